"""The modes by name, and auto: swap where the batch divides, else halo."""

from collections.abc import Sequence

from torch import Tensor

from seqpar.decoders.modes.gather import Gather
from seqpar.decoders.modes.halo import Halo
from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.modes.nogather import NoGather
from seqpar.decoders.modes.swap import Swap
from seqpar.losses import LossGroups
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import AnyGroup, Group, as_group
from seqpar.spatial.box_grid import BoxGrid


class Auto:
    """Swap if the batch divides by the group, else halo.

    ``chosen`` is the name of the mode for the batch that was checked last.
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
        """Returns which mode it picks and how that decodes; raises ValueError if that mode does."""
        if batch is None:
            return f"{self.name}: swap where the batch divides by {self.group.size}, else halo"
        mode = self.pick(batch)
        sentence = f"{self.name}: batch {batch} on {self.group.size} ranks takes {mode.check(layout, batch)}"
        self.chosen = mode.name
        return sentence

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns the picked mode's grids."""
        return self.pick(len(tokens[0])).features(tokens, layout)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the picked mode's image or label."""
        return self.pick(len(part)).voxels(part, layout)

    def samples(self, rows: Tensor) -> Tensor:
        """Returns the picked mode's rows."""
        return self.pick(len(rows)).samples(rows)

    def box_grid(self, layout: Layout, batch: int) -> BoxGrid | None:
        """Returns the picked mode's box grid."""
        return self.pick(batch).box_grid(layout, batch)

    def loss_groups(self, data: AnyGroup | None = None, batch: int | None = None) -> LossGroups:
        """Returns the picked mode's groups; they depend on the batch, which must be given."""
        if batch is None:
            raise ValueError("--mode auto shares the loss by the batch: give its size")
        return self.pick(batch).loss_groups(data, batch)


_MODES: dict[str, type[Gather] | type[NoGather] | type[Halo] | type[Swap] | type[Auto]] = {
    mode.name: mode for mode in (Gather, NoGather, Halo, Swap, Auto)
}
MODES = tuple(_MODES)


def choose_mode(name: str, group: AnyGroup | None) -> Mode:
    """Returns the mode that brings tokens, image and label to where they are decoded.

    - ``name``: gather (every rank decodes the whole tile), halo (its box), swap (whole samples), auto (swap where the
      batch divides, else halo), or nogather (each rank its part alone, which is not exact)
    - ``group``: the encoder's: ours, torch's ``ProcessGroup`` or a ``DeviceMesh`` of one direction; None: none shares
    """
    if name not in _MODES:
        raise ValueError(f"--mode {name}: choose one of {', '.join(MODES)}")
    return _MODES[name](as_group(group))
