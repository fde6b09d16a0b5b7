"""Gather: every rank decodes the whole tile.

Legend: b batch, c channels, n tokens, e embedding, W D H voxels, w d h tokens; ``/s`` after the letter that is split
over the sequence group.
"""

from collections.abc import Sequence

from torch import Tensor

from seqpar.decoders.modes.mode import concat_blocks, groups_with_peers, split_blocks
from seqpar.losses import LossGroups
from seqpar.parallel.collectives import gather
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import AnyGroup, Group


class Gather:
    """Every rank decodes the whole tile, from features gathered from all ranks."""

    name = "gather"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        return f"{self.name}: each of {self.group.size} ranks decodes the whole tile"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Gathers tokens ``b n/s e`` to whole grids ``b e w d h``, in one message.

        Every rank computes the same from them, so their gradients are equal and backward sends nothing.
        """
        whole = gather(concat_blocks(tokens), self.group, 1, layout.counts, equal_gradients=True)
        if self.group.size > 1:
            whole = whole.index_select(1, layout.raster_order(whole.device))  # b n e, raster order
        return split_blocks(whole, tokens, layout.grid)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        whole = gather(part, self.group, 1, layout.counts, equal_gradients=True, kind="voxels")
        return layout.join(whole.split(layout.counts, 1))

    def whole(self, y: Tensor, layout: Layout) -> Tensor:
        """Returns ``y``, which is whole already."""
        return y

    def samples(self, rows: Tensor) -> Tensor:
        return rows

    def box_grid(self, layout: Layout, batch: int) -> None:
        """Returns None: every rank holds the whole."""

    def loss_groups(self, data: AnyGroup | None = None, batch: int | None = None) -> LossGroups:
        """Returns ``data`` only, because each rank of a sequence group has the whole tile."""
        return LossGroups(samples=groups_with_peers(data))
