"""How tokens, image and label reach the decoder: all of them together, by one rule a mode.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction, W D H voxels, w d h
tokens; ``/s`` after the letter that is spread over the sequence group.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from seqpar.collectives import gather
from seqpar.decoders.modes.swap import Halo, Swap, grids, real, together, volume
from seqpar.layout import Layout
from seqpar.losses import Share
from seqpar.mesh import Group
from seqpar.spatial.box_grid import Spread
from seqpar.vit.tokens import to_grid


class Mode(Protocol):
    """What every mode does; ``batch`` is the number of samples that a sequence group has together."""

    name: str
    group: Group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns in a sentence how this mode will decode; refuses a layout or batch that it cannot."""

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns the grids that the decoder takes, of tokens ``b n/s e``, in one message."""

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the image or label part where the logits are."""

    def spread(self, layout: Layout, batch: int) -> Spread | None:
        """Returns how the token grid is spread over the group; None where each rank holds all that it decodes."""

    def share(self, data: Group | None = None, batch: int | None = None) -> Share:
        """Returns which sums of the loss are partial, given the group over which tiles are spread."""


class Gather:
    """Every rank decodes the whole tile: features come from all, gradients are scattered back."""

    name = "gather"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns how it decodes; any layout and batch will do."""
        return f"{self.name}: each of {self.group.size} ranks decodes the whole tile"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns whole grids ``b e w d h`` of tokens ``b n/s e``, in one message.

        Every rank computes the same from them, so their gradients are equal and need no message back.
        """
        whole = gather(together(tokens), self.group, 1, layout.counts, equal_gradients=True)
        if self.group.size > 1:
            order = torch.argsort(torch.cat(layout.all_ids)).to(whole.device)
            whole = whole.index_select(1, order)  # b n e, raster order
        return grids(whole, tokens, layout.grid)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the whole image ``b c W D H`` or label ``b W D H`` of the ranks' parts."""
        whole = gather(part, self.group, 1, layout.counts, equal_gradients=True, kind="voxels")
        return layout.join(whole.split(layout.counts, 1))

    def spread(self, layout: Layout, batch: int) -> None:
        """Returns None: every rank holds the whole."""

    def share(self, data: Group | None = None, batch: int | None = None) -> Share:
        """Returns which sums of the loss are partial: those over the group over which tiles are spread."""
        return Share(samples=real(data))


class NoGather:
    """Each rank decodes its own part as if there were no other, and takes the loss of it: not exact, on purpose."""

    name = "nogather"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns how it decodes; refuses a layout in which some rank's part is no box."""
        if not layout.is_box:
            raise ValueError(
                f"--mode nogather needs boxes, but --split {layout.split} cuts the grid {layout.grid} into "
                f"{layout.num_ranks} chunks that are none: {layout.box_advice()}"
            )
        return f"{self.name}: each of {self.group.size} ranks decodes its own box alone; not exact"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns this rank's grids ``b e w/s d/s h/s``."""
        return [to_grid(x, self._grid(layout)) for x in tokens]

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's box of the image ``b c W/s D/s H/s`` or label ``b W/s D/s H/s``."""
        return volume(part, layout, self._grid(layout))

    def spread(self, layout: Layout, batch: int) -> None:
        """Returns None: to the decoder, the part is all there is."""

    def share(self, data: Group | None = None, batch: int | None = None) -> Share:
        """Returns which sums of the loss are partial: none over the sequence group, the loss is the part's own."""
        return Share(samples=real(data))

    def _grid(self, layout: Layout) -> tuple[int, ...]:
        return tuple(high - low for low, high in layout.box(self.group.index))


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

    def spread(self, layout: Layout, batch: int) -> Spread | None:
        """Returns the picked mode's spread."""
        return self.pick(batch).spread(layout, batch)

    def share(self, data: Group | None = None, batch: int | None = None) -> Share:
        """Returns the picked mode's partial sums: they differ, so the batch must be told."""
        if batch is None:
            raise ValueError("--mode auto shares the loss by the batch: give its size")
        return self.pick(batch).share(data, batch)


_KINDS: dict[str, type[Gather] | type[NoGather] | type[Halo] | type[Swap] | type[Auto]] = {
    kind.name: kind for kind in (Gather, NoGather, Halo, Swap, Auto)
}
MODES = tuple(_KINDS)


def choose_mode(name: str, group: Group) -> Mode:
    """Returns the mode of that name on ``group``."""
    if name not in _KINDS:
        raise ValueError(f"--mode {name}: choose one of {', '.join(MODES)}")
    return _KINDS[name](group)
