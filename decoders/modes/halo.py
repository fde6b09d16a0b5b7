"""Halo: each rank decodes its box and exchanges halos with its neighbours."""

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from seqpar.decoders.modes.mode import grids, real, together, volume
from seqpar.layout import Layout
from seqpar.losses import LossGroups
from seqpar.mesh import Group
from seqpar.remaps import Remap, plan_remap, remap
from seqpar.spatial.box_grid import BoxGrid


class Halo:
    """Each rank decodes its box and fetches what it needs of its neighbours': exact, nothing computed twice.

    Where the parts are no grid of boxes, everything moves to one first.
    """

    name = "halo"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns how it decodes; refuses a layout whose token grid cannot be cut into so many boxes."""
        cuts = _boxes(layout).voxel_cuts()
        count = " x ".join(str(len(edges) - 1) for edges in cuts)
        moves = "as the tokens lie" if _boxes(layout) is layout else "to which the tokens move"
        return f"{self.name}: each of {self.group.size} ranks decodes one of {count} boxes, {moves}"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns this rank's boxes ``b e w/s d/s h/s`` of tokens ``b n/s e``, in one message at most."""
        box = self.box_grid(layout, 0).sides
        return grids(self._moved(together(tokens), layout, "remap"), tokens, box)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's box of the image ``b c W/s D/s H/s`` or label ``b W/s D/s H/s``."""
        return volume(self._moved(part, layout, "voxels"), layout, self.box_grid(layout, 0).sides)

    def box_grid(self, layout: Layout, batch: int) -> BoxGrid:
        """Returns where the token grid is cut into the ranks' boxes."""
        return BoxGrid(_boxes(layout).voxel_cuts(), self.group)

    def loss_groups(self, data: Group | None = None, batch: int | None = None) -> LossGroups:
        """Returns which sums of the loss are partial: those over voxels, and over the group of other tiles."""
        return LossGroups(voxels=self.group, samples=real(data))

    def _moved(self, rows: Tensor, layout: Layout, kind: str) -> Tensor:
        """Returns ``b n/s ...`` of this rank's box."""
        if _boxes(layout) is layout:
            return rows
        return remap(rows, self.group, 1, _to_boxes(layout, self.group.index), kind)


def _boxes(layout: Layout) -> Layout:
    """Returns the grid of boxes on which a layout is decoded: itself, where it is one."""
    try:
        return layout.boxed()
    except ValueError:
        raise ValueError(
            f"--mode halo needs a box for each rank, but {layout.num_ranks} boxes do not cut the token grid "
            f"{layout.grid}: use a smaller --seqpar, or --mode gather"
        ) from None


@lru_cache(maxsize=16)
def _to_boxes(layout: Layout, me: int) -> Remap:
    return plan_remap(layout.all_ids, _boxes(layout).all_ids, me)
