"""The modes by name, and auto: swap if the batch is divisible by the group's size, else halo."""

from collections.abc import Sequence

from torch import Tensor

from seqpar.decoders.modes.gather import Gather, NoGather
from seqpar.decoders.modes.halo import Halo
from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.modes.swap import Swap
from seqpar.losses import LossGroups
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import AnyGroup, Group, as_group
from seqpar.spatial.box_grid import BoxGrid


class Auto:
    """Swap if the batch is divisible by the group's size, else halo.

    ``chosen`` is the name of the mode for the batch that was checked last.
    """

    name = "auto"

    def __init__(self, group: Group) -> None:
        self.group = group
        self.chosen: str | None = None
        self._halo, self._swap = Halo(group), Swap(group)

    def pick(self, batch: int) -> Halo | Swap:
        """Returns the mode for a batch of ``batch`` samples."""
        return self._halo if batch % self.group.size else self._swap

    def check(self, layout: Layout, batch: int | None = None) -> str:
        if batch is None:
            return f"{self.name}: swap if the batch is divisible by {self.group.size}, else halo"
        mode = self.pick(batch)
        sentence = f"{self.name}: batch {batch} on {self.group.size} ranks takes {mode.check(layout, batch)}"
        self.chosen = mode.name
        return sentence

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        return self.pick(len(tokens[0])).features(tokens, layout)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        return self.pick(len(part)).voxels(part, layout)

    def whole(self, y: Tensor, layout: Layout) -> Tensor:
        decoded_whole = tuple(y.shape[-len(layout.tile) :]) == layout.tile
        return (self._swap if decoded_whole else self._halo).whole(y, layout)

    def samples(self, rows: Tensor) -> Tensor:
        return self.pick(len(rows)).samples(rows)

    def box_grid(self, layout: Layout, batch: int) -> BoxGrid | None:
        return self.pick(batch).box_grid(layout, batch)

    def loss_groups(self, data: AnyGroup | None = None, batch: int | None = None) -> LossGroups:
        """Returns the picked mode's groups; they depend on ``batch``, which must be given."""
        if batch is None:
            raise ValueError("loss_groups of mode='auto' depend on the batch: give its size as `batch`")
        return self.pick(batch).loss_groups(data, batch)


_MODES: dict[str, type[Gather] | type[NoGather] | type[Halo] | type[Swap] | type[Auto]] = {
    mode.name: mode for mode in (Gather, NoGather, Halo, Swap, Auto)
}
MODES = tuple(_MODES)


def choose_mode(name: str, group: AnyGroup | None) -> Mode:
    """Returns the mode that brings tokens, image and label to the ranks that decode them.

    Args:
        ``name``: ``"gather"`` (every rank decodes the whole tile), ``"halo"`` (its box), ``"swap"`` (whole samples),
            ``"auto"`` (swap if the batch is divisible by the group's size, else halo), or ``"nogather"`` (each rank
            decodes its part alone, which is not exact).
        ``group``: the encoder's group: a ``Group``, torch's ``ProcessGroup``, or a one-dimensional ``DeviceMesh``;
            None: this process alone.
    """
    if name not in _MODES:
        raise ValueError(f"mode={name!r}: choose one of {', '.join(MODES)}")
    return _MODES[name](as_group(group))
