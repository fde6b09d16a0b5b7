"""Swap: each rank decodes whole samples.

Legend: b batch, c channels, n tokens, e embedding, W D H voxels, w d h tokens; ``/s`` after the letter that is split
over the sequence group.
"""

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from seqpar.decoders.modes.mode import concat_blocks, groups_with_peers, join_patches, split_blocks
from seqpar.losses import LossGroups
from seqpar.parallel.collectives import gather
from seqpar.parallel.device_constants import cached
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import AnyGroup, Group
from seqpar.parallel.remaps import Remap, count_remap, make_remap, remap


class Swap:
    """Each rank decodes whole samples, whose tokens an all-to-all collects from all ranks.

    Exact; nothing is computed twice, and there are no halos. The batch must be divisible by the group's size.
    """

    name = "swap"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        size = self.group.size
        if batch is not None and (batch < 1 or batch % size):
            below = batch // size * size
            advice = f"batch={below} or {below + size}" if below > 0 else f"batch={size}"
            raise ValueError(
                f"mode='swap' splits the batch evenly over {size} ranks, but batch={batch} is not divisible by {size}: "
                f"use {advice}, or mode='halo'"
            )
        share = "its share of the batch" if batch is None else f"{batch // size} of the batch's {batch} samples"
        return f"{self.name}: each of {size} ranks decodes {share}, each sample as a whole"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns whole grids ``b/s e w d h`` of tokens ``b n/s e``, moved in one message."""
        return split_blocks(self._move(concat_blocks(tokens), layout, "remap"), tokens, layout.grid)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's samples of the image ``b/s c W D H`` or label ``b/s W D H``."""
        return join_patches(self._move(part, layout, "voxels"), layout, layout.grid)

    def whole(self, y: Tensor, layout: Layout) -> Tensor:
        return gather(y, self.group, 0, (len(y),) * self.group.size, kind="voxels")

    def samples(self, rows: Tensor) -> Tensor:
        """Returns the rows ``b/s ...`` of this rank's samples."""
        return rows.chunk(self.group.size)[self.group.index]

    def box_grid(self, layout: Layout, batch: int) -> None:
        """Returns None, because every rank has its samples whole."""

    def loss_groups(self, data: AnyGroup | None = None, batch: int | None = None) -> LossGroups:
        """Returns the sequence group and ``data`` for sums over samples."""
        return LossGroups(samples=groups_with_peers(self.group, data))

    def _move(self, rows: Tensor, layout: Layout, kind: str) -> Tensor:
        """Returns rows ``b/s n ...`` with tokens in raster order, given ``b n/s ...``."""
        self.check(layout, len(rows))
        plan = _count_to_samples if rows.is_meta else _plan_to_samples
        moves = plan(layout, len(rows), self.group.index)
        moved = remap(rearrange(rows, "b n ... -> (b n) ..."), self.group, 0, moves, kind)
        return rearrange(moved, "(b n) ... -> b n ...", n=layout.num_tokens)


@cached(16)
def _plan_to_samples(layout: Layout, batch: int, index: int) -> Remap:
    """Returns the remap from this rank's tokens of all samples to all tokens of its samples, rows ``(b n)``."""
    first = torch.arange(batch)[:, None] * layout.num_tokens  # the number of each sample's first token
    sources = [(first + ids).flatten() for ids in layout.all_ids]
    targets = torch.arange(batch * layout.num_tokens).chunk(layout.num_ranks)
    return make_remap(sources, targets, index)


def _count_to_samples(layout: Layout, batch: int, index: int) -> Remap:
    """Returns the same remap without positions."""
    share = batch // layout.num_ranks
    return count_remap([share * layout.counts[index]] * layout.num_ranks, [share * count for count in layout.counts])
