"""Means and variances of volumes that are split into boxes: each rank's moments, merged over all ranks.

Legend: b batch, c channels, g groups of channels, W D H voxels; a row is one channel of one sample, ``(b c)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from seqpar.parallel.collectives import all_gather, all_reduce
from seqpar.parallel.mesh import Group
from seqpar.spatial.cache_pieces import Pieces
from seqpar.spatial.fused_norm import mean_and_variance, merge_batch_rows


class Moments(NamedTuple):
    """The number of values in each set, their mean, and the sum of their squared deviations from it."""

    counts: Tensor
    means: Tensor
    squares: Tensor

    def merged(self, dims: tuple[int, ...]) -> "Moments":
        """Returns the moments of the unions of sets along ``dims`` (Chan, Golub, LeVeque)."""
        count = self.counts.sum(dims, keepdim=True)
        mean = (self.counts * self.means).sum(dims, keepdim=True) / count
        squares = (self.squares + self.counts * (self.means - mean) ** 2).sum(dims, keepdim=True)
        return Moments(count, mean, squares)


@dataclass(frozen=True)
class MomentGroups:
    """Which values share statistics: a channel group's, in the batch or in each sample, on all ranks of ``groups``."""

    num_groups: int
    over_batch: bool
    groups: tuple[Group, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of ``b g c`` that share statistics."""
        return (0, 2) if self.over_batch else (2,)

    def moments(self, x: Tensor) -> Moments:
        """Returns the moments over all ranks, each ``b g 1`` (``1 g 1`` over the batch), in float64."""
        rows = _row_moments(x)
        merged = Moments(*(rearrange(m, "(b g c) -> b g c", b=len(x), g=self.num_groups) for m in rows))
        if any(merged.counts.shape[dim] > 1 for dim in self.dims):
            merged = merged.merged(self.dims)
        for group in self.groups:
            if group.size == 1:
                continue
            stacked = torch.stack(merged)[:, None]  # one message for all three
            every = Moments(*all_gather(stacked, group, 1, [1] * group.size, "statistics"))
            merged = Moments(*(m[0] for m in every.merged((0,))))
        return merged

    def mean_and_variance(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
        """Returns the mean and variance over all ranks, each ``b g 1``, and the number of values.

        A GPU computes both in one pass if each row has its own statistics; otherwise all are merged in float64.
        """
        pieces, alone = Pieces(x), all(group.size == 1 for group in self.groups)
        if pieces.at_once and alone and not self.over_batch and self.num_groups == x.shape[1]:
            rows = [mean_and_variance(*piece.values) for piece in pieces.of([x])]
            mean, variance = (merge_batch_rows(of_rows).view(len(x), -1, 1) for of_rows in zip(*rows))
            return mean, variance, x.shape[2:].numel()
        count, mean, squares = self.moments(x)
        return mean, squares / count, count

    def sums(self, x: Tensor) -> Tensor:
        """Returns the sums over all ranks, ``2 b g 1``, of two quantities ``2 b c``."""
        sums = rearrange(x, "two b (g c) -> two b g c", g=self.num_groups)
        sums = sums.sum([dim + 1 for dim in self.dims], keepdim=True)
        for group in self.groups:
            sums = all_reduce(sums, group, "statistics")
        return sums

    def to_rows(self, statistic: Tensor, shape: Sequence[int]) -> Tensor:
        """Expands a statistic ``b g 1`` to one value for each row of a volume of that shape."""
        return statistic.expand(shape[0], -1, shape[1] // self.num_groups).flatten()


def _row_moments(x: Tensor) -> Moments:
    """Returns the moments of each row of this rank's box."""
    wide = torch.promote_types(x.dtype, torch.float32)
    by_first_row: dict[int, list[Moments]] = {}  # several pieces may belong to the same rows
    pieces = Pieces(x)
    for piece in pieces.of([x]):
        (values,) = piece.values
        if pieces.at_once:
            mean, variance = mean_and_variance(values)
            squares = variance * piece.voxels
        else:
            mean = piece.sum(values, wide).div_(piece.voxels)
            squares = piece.sum((values - piece.broadcast(mean)).square_())
        count = torch.full_like(mean, piece.voxels, dtype=torch.float64)
        by_first_row.setdefault(piece.rows.start, []).append(Moments(count, mean.double(), squares.double()))
    if [len(pieces) for pieces in by_first_row.values()] == [1]:
        return by_first_row[0][0]
    blocks = [Moments(*map(torch.stack, zip(*pieces))).merged((0,)) for pieces in by_first_row.values()]
    return Moments(*(torch.cat(block, 1)[0] for block in zip(*blocks)))
