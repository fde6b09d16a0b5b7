"""The modes that move tokens, image and label to other owners first: to boxes, or to whole samples.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction, W D H voxels, w d h
tokens; ``/s`` after the letter that is spread over the sequence group.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from seqpar.layout import Layout, from_patches
from seqpar.losses import Share
from seqpar.mesh import Group
from seqpar.remaps import Remap, plan_remap, remap
from seqpar.spatial.box_grid import Spread
from seqpar.vit.tokens import to_grid


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
        box = self.spread(layout, 0).sides
        return grids(self._moved(together(tokens), layout, "remap"), tokens, box)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's box of the image ``b c W/s D/s H/s`` or label ``b W/s D/s H/s``."""
        return volume(self._moved(part, layout, "voxels"), layout, self.spread(layout, 0).sides)

    def spread(self, layout: Layout, batch: int) -> Spread:
        """Returns where the token grid is cut into the ranks' boxes."""
        return Spread(_boxes(layout).voxel_cuts(), self.group)

    def share(self, data: Group | None = None, batch: int | None = None) -> Share:
        """Returns which sums of the loss are partial: those over voxels, and over the group of other tiles."""
        return Share(voxels=self.group, samples=real(data))

    def _moved(self, rows: Tensor, layout: Layout, kind: str) -> Tensor:
        """Returns ``b n/s ...`` of this rank's box."""
        if _boxes(layout) is layout:
            return rows
        return remap(rows, self.group, 1, _to_boxes(layout, self.group.index), kind)


class Swap:
    """Each rank decodes whole samples of its own: from all samples' n/s tokens to b/s samples' tokens, and back.

    Exact, nothing is computed twice, no halos; the batch must divide by the group.
    """

    name = "swap"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns how it decodes; refuses a batch that does not divide."""
        size = self.group.size
        if batch is not None and (batch < 1 or batch % size):
            below = batch // size * size
            fits = f"--batch {below} or {below + size}" if below > 0 else f"--batch {size}"
            raise ValueError(
                f"--mode swap gives each of {size} ranks as many samples, but --batch {batch} does not divide: "
                f"use {fits}, or --mode halo"
            )
        each = "its share" if batch is None else batch // size
        return f"{self.name}: each of {size} ranks decodes {each} of the batch's samples, whole"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns whole grids ``b/s e w d h`` of tokens ``b n/s e``, in one message."""
        return grids(self._moved(together(tokens), layout, "remap"), tokens, layout.grid)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's samples of the image ``b/s c W D H`` or label ``b/s W D H``."""
        return volume(self._moved(part, layout, "voxels"), layout, layout.grid)

    def spread(self, layout: Layout, batch: int) -> None:
        """Returns None: every rank holds its samples whole."""

    def share(self, data: Group | None = None, batch: int | None = None) -> Share:
        """Returns which sums of the loss are partial: those over samples."""
        return Share(samples=(*real(self.group), *real(data)))

    def _moved(self, rows: Tensor, layout: Layout, kind: str) -> Tensor:
        """Returns ``b/s n ...``, raster order, of ``b n/s ...``."""
        self.check(layout, len(rows))
        plan = _to_samples(layout, len(rows), self.group.index)
        return remap(rows.flatten(0, 1), self.group, 0, plan, kind).unflatten(0, (-1, layout.num_tokens))


def real(group: Group | None) -> tuple[Group, ...]:
    return (group,) if group is not None and group.size > 1 else ()


def together(tokens: Sequence[Tensor]) -> Tensor:
    """Returns the tokens of several blocks side by side, ``b n/s e``: one message for all."""
    return tokens[0] if len(tokens) == 1 else torch.cat(list(tokens), 2)


def grids(rows: Tensor, tokens: Sequence[Tensor], grid: Sequence[int]) -> list[Tensor]:
    """Returns each block's grid of tokens that travelled together."""
    return [to_grid(x, grid) for x in rows.split([x.shape[2] for x in tokens], 2)]


def volume(cells: Tensor, layout: Layout, grid: Sequence[int]) -> Tensor:
    """Returns the image or label of a grid's patches, ``b n c p p p`` or ``b n p p p``."""
    has_channels = cells.ndim == len(layout.tile) + 3
    return from_patches(cells.transpose(1, 2) if has_channels else cells, grid)


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


@lru_cache(maxsize=16)
def _to_samples(layout: Layout, batch: int, me: int) -> Remap:
    """Returns the move from all samples' tokens of this rank to all tokens of its samples, rows ``(b n)``."""
    first = torch.arange(batch)[:, None] * layout.num_tokens  # the number of each sample's first token
    sources = [(first + ids).flatten() for ids in layout.all_ids]
    targets = torch.arange(batch * layout.num_tokens).chunk(layout.num_ranks)
    return plan_remap(sources, targets, me)
