"""How tokens, image and label reach the decoder: all of them together, by one rule a mode.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction, W D H voxels, w d h
tokens; ``/s`` after the letter that is spread over the sequence group.
"""

from collections.abc import Sequence

from torch import Tensor

from seqpar.decoders.modes.gather import Gather, NoGather
from seqpar.decoders.modes.halo import Halo
from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.modes.swap import Swap
from seqpar.layout import Layout
from seqpar.losses import LossGroups
from seqpar.mesh import Group
from seqpar.spatial.box_grid import BoxGrid


class Auto:
    """Swap where the batch divides by the group, else halo; each batch is looked at for itself.

    ``chosen`` is what the last check found for its batch.
    """

    name = "auto"

    def __init__(self, group: Group) -> None:
        self.group = group
        self.chosen: str | None = None
        self._halo, self._swap = Halo(group), Swap(group)

    def pick(self, batch: int) -> Halo | Swap:
        """Returns the mode for a batch of so many samples."""
        return self._halo if batch % self.group.size else self._swap

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns which mode it takes and how that decodes; refuses what that refuses."""
        if batch is None:
            return f"{self.name}: swap where the batch divides by {self.group.size}, else halo"
        mode = self.pick(batch)
        text = f"{self.name}: batch {batch} on {self.group.size} ranks takes {mode.check(layout, batch)}"
        self.chosen = mode.name
        return text

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns the picked mode's grids."""
        return self.pick(len(tokens[0])).features(tokens, layout)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the picked mode's volume."""
        return self.pick(len(part)).voxels(part, layout)

    def box_grid(self, layout: Layout, batch: int) -> BoxGrid | None:
        """Returns the picked mode's box grid."""
        return self.pick(batch).box_grid(layout, batch)

    def loss_groups(self, data: Group | None = None, batch: int | None = None) -> LossGroups:
        """Returns the picked mode's partial sums: they differ, so the batch must be told."""
        if batch is None:
            raise ValueError("--mode auto shares the loss by the batch: give its size")
        return self.pick(batch).loss_groups(data, batch)


_KINDS: dict[str, type[Gather] | type[NoGather] | type[Halo] | type[Swap] | type[Auto]] = {
    kind.name: kind for kind in (Gather, NoGather, Halo, Swap, Auto)
}
MODES = tuple(_KINDS)


def choose_mode(name: str, group: Group) -> Mode:
    """Returns the mode of that name on ``group``."""
    if name not in _KINDS:
        raise ValueError(f"--mode {name}: choose one of {', '.join(MODES)}")
    return _KINDS[name](group)
