"""LossGroups: over which ranks the sums of a loss run."""

import math
from dataclasses import dataclass

from seqpar.parallel.mesh import Group, as_group


@dataclass(frozen=True, eq=False)
class LossGroups:
    """Which sums are partial on this rank.

    A mode makes them (``mode.loss_groups``); by hand, torch's own groups are taken too.

    - ``voxels``: the group over which one tile's voxels are spread
    - ``samples``: groups over which the batch's tiles are spread (``data``, and ``seq`` where each rank decodes whole
      samples)
    """

    voxels: Group | None = None
    samples: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if self.voxels is not None:
            object.__setattr__(self, "voxels", as_group(self.voxels))
        object.__setattr__(self, "samples", tuple(map(as_group, self.samples)))

    @property
    def num_sample_ranks(self) -> int:
        """How many ranks' losses are averaged to the batch's loss because each holds only its own samples."""
        return math.prod(group.size for group in self.samples)
