"""Gather: every rank decodes the whole tile. No-gather: each rank decodes its own part as if there were no others.

Legend: b batch, c channels, n tokens, e embedding, W D H voxels, w d h tokens; ``/s`` after the letter that is split
over the sequence group.
"""

from collections.abc import Sequence

from torch import Tensor

from seqpar.decoders.modes.mode import concat_blocks, gather_boxes, groups_with_peers, join_patches, split_blocks
from seqpar.losses import LossGroups
from seqpar.parallel.collectives import gather
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import AnyGroup, Group
from seqpar.vit.tokens import to_grid


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


class NoGather:
    """Each rank decodes its own part alone, and its loss is that of its part: deliberately not exact."""

    name = "nogather"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        if not layout.is_box:
            raise ValueError(
                f"mode='nogather' needs boxes, but split={layout.split!r} cuts the token grid {layout.grid} into "
                f"{layout.num_ranks} parts that are not boxes: {layout.box_advice()}"
            )
        return f"{self.name}: each of {self.group.size} ranks decodes its own box alone; not exact"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns this rank's grids ``b e w/s d/s h/s``; sends nothing."""
        return [to_grid(x, self._sides(layout)) for x in tokens]

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's box of the image ``b c W/s D/s H/s`` or label ``b W/s D/s H/s``."""
        return join_patches(part, layout, self._sides(layout))

    def whole(self, y: Tensor, layout: Layout) -> Tensor:
        return gather_boxes(y, layout, self.group)

    def samples(self, rows: Tensor) -> Tensor:
        return rows

    def box_grid(self, layout: Layout, batch: int) -> None:
        """Returns None: to the decoder, the part is all there is."""

    def loss_groups(self, data: AnyGroup | None = None, batch: int | None = None) -> LossGroups:
        """Returns ``data`` only: no sum includes the other parts of the tile."""
        return LossGroups(samples=groups_with_peers(data))

    def _sides(self, layout: Layout) -> tuple[int, ...]:
        return tuple(high - low for low, high in layout.box(self.group.index))
