"""Gather: every rank decodes the whole tile. No-gather: each decodes its own part alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.collectives import gather
from seqpar.decoders.modes.mode import grids, real, together, volume
from seqpar.layout import Layout
from seqpar.losses import LossGroups
from seqpar.mesh import Group
from seqpar.vit.tokens import to_grid


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

    def box_grid(self, layout: Layout, batch: int) -> None:
        """Returns None: every rank holds the whole."""

    def loss_groups(self, data: Group | None = None, batch: int | None = None) -> LossGroups:
        """Returns which sums of the loss are partial: those over the group over which tiles are spread."""
        return LossGroups(samples=real(data))


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

    def box_grid(self, layout: Layout, batch: int) -> None:
        """Returns None: to the decoder, the part is all there is."""

    def loss_groups(self, data: Group | None = None, batch: int | None = None) -> LossGroups:
        """Returns which sums of the loss are partial: none over the sequence group, the loss is the part's own."""
        return LossGroups(samples=real(data))

    def _grid(self, layout: Layout) -> tuple[int, ...]:
        return tuple(high - low for low, high in layout.box(self.group.index))
