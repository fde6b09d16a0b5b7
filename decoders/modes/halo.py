"""Halo: each rank decodes its box and exchanges halos with its neighbours.

Legend: b batch, c channels, n tokens, e embedding, W D H voxels, w d h tokens; ``/s`` after the letter that is split
over the sequence group.
"""

from collections.abc import Sequence

from torch import Tensor

from seqpar.decoders.modes.mode import concat_blocks, gather_boxes, groups_with_peers, join_patches, split_blocks
from seqpar.losses import LossGroups
from seqpar.parallel.device_constants import cached
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import AnyGroup, Group
from seqpar.parallel.remaps import Remap, count_remap, make_remap, remap
from seqpar.spatial.box_grid import BoxGrid


class Halo:
    """Each rank decodes its box, and the decoder's operations fetch halos. Exact; nothing is computed twice.

    If the parts do not form a grid of boxes, everything is moved to one first.
    """

    name = "halo"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        cuts = _boxed(layout).voxel_cuts()
        count = " x ".join(str(len(edges) - 1) for edges in cuts)
        moves = "" if _boxed(layout) is layout else ", to which the tokens are moved"
        return f"{self.name}: each of {self.group.size} ranks decodes one of {count} boxes{moves}"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns this rank's boxes ``b e w/s d/s h/s`` of tokens ``b n/s e``, moved in at most one message."""
        sides = self.box_grid(layout, 0).sides
        return split_blocks(self._move(concat_blocks(tokens), layout, "remap"), tokens, sides)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's box of the image ``b c W/s D/s H/s`` or label ``b W/s D/s H/s``."""
        return join_patches(self._move(part, layout, "voxels"), layout, self.box_grid(layout, 0).sides)

    def whole(self, y: Tensor, layout: Layout) -> Tensor:
        return gather_boxes(y, layout, self.group)

    def samples(self, rows: Tensor) -> Tensor:
        return rows

    def box_grid(self, layout: Layout, batch: int) -> BoxGrid:
        return BoxGrid(_boxed(layout).voxel_cuts(), self.group)

    def loss_groups(self, data: AnyGroup | None = None, batch: int | None = None) -> LossGroups:
        """Returns the sequence group for sums over voxels, and ``data`` for sums over samples."""
        return LossGroups(voxels=self.group, samples=groups_with_peers(data))

    def _move(self, rows: Tensor, layout: Layout, kind: str) -> Tensor:
        """Returns the rows ``b n/s ...`` of this rank's box."""
        if _boxed(layout) is layout:
            return rows
        plan = _count_to_boxes if rows.is_meta else _plan_to_boxes
        return remap(rows, self.group, 1, plan(layout, self.group.index), kind)


def _boxed(layout: Layout) -> Layout:
    """Returns the layout that is decoded: ``layout`` if its parts form a grid of boxes, else the spatial one."""
    try:
        return layout.boxed()
    except ValueError:
        raise ValueError(
            f"mode='halo' needs a box for each rank, but the token grid {layout.grid} cannot be cut into "
            f"{layout.num_ranks} boxes: use a smaller `seqpar`, or mode='gather'"
        ) from None


@cached(16)
def _plan_to_boxes(layout: Layout, index: int) -> Remap:
    return make_remap(layout.all_ids, _boxed(layout).all_ids, index)


def _count_to_boxes(layout: Layout, index: int) -> Remap:
    """Returns the same remap without positions."""
    boxes, ranks = _boxed(layout), range(layout.num_ranks)

    def shared(source: int, target: int) -> int:
        low, high = layout.runs[source]
        return boxes.num_below(target, high) - boxes.num_below(target, low)

    return count_remap([shared(index, rank) for rank in ranks], [shared(rank, index) for rank in ranks])
