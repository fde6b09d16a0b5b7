"""LossGroups: over which ranks the sums of a loss run."""

import math
from dataclasses import dataclass

from seqpar.mesh import Group


@dataclass(frozen=True, eq=False)
class LossGroups:
    """Which sums are partial on this rank.

    ``voxels``: the group over which one tile's voxels are spread. ``samples``: groups over which the batch's
    tiles are spread (``data``, and ``seq`` where each rank decodes whole samples).
    """

    voxels: Group | None = None
    samples: tuple[Group, ...] = ()

    @property
    def num_sample_ranks(self) -> int:
        """How many ranks' losses are averaged to the batch's loss because each holds only its own samples."""
        return math.prod(group.size for group in self.samples)
