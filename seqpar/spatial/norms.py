"""Norms with statistics of the whole volume where it is spread over a group; without a box grid they are torch's own.

Legend: b batch, c channels, g groups of channels, W D H voxels, v the voxels of a box; ``/s`` after the letter
that is spread over the group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.collectives import all_gather, all_reduce
from seqpar.mesh import Group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.memory_format import channels_last
from seqpar.spatial.pieces import Pieces


class InstanceNorm3d(nn.InstanceNorm3d):
    """Instance norm; statistics over all voxels of the whole volume, for each sample and channel."""

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged box grid."""
        own = self.training or not self.track_running_stats
        if not own or (grid is None and not channels_last(x)):  # torch's own would lay channels out anew
            return super().forward(x), grid
        _refuse_single(math.prod(x.shape[2:] if grid is None else grid.extents), self)
        groups = () if grid is None else (grid.group,)
        y, mean, variance = _norm(x, self, MomentGroups(self.num_features, False, groups), grid)
        if self.running_mean is not None and self.running_var is not None:
            factor = self.momentum or 0.0
            self.running_mean.lerp_(mean.mean(0).flatten(), factor)
            self.running_var.lerp_(variance.mean(0).flatten(), factor)
        return y, grid


class BatchNorm3d(nn.BatchNorm3d):
    """Batch norm; statistics over all voxels and samples, and over ``data``'s ranks where one is given."""

    def __init__(self, num_features: int, *options: Any, data: Group | None = None, **more: Any) -> None:
        super().__init__(num_features, *options, **more)
        self.data = data

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged box grid."""
        own = self.training or self.running_mean is None
        groups = (*([] if grid is None else [grid.group]), *([] if self.data is None else [self.data]))
        if not groups or not own:
            return super().forward(x), grid
        voxels = grid.extents if grid is not None else x.shape[2:]
        _refuse_single(len(x) * math.prod(voxels) * (self.data.size if self.data else 1), self)
        y, mean, variance = _norm(x, self, MomentGroups(self.num_features, True, groups), grid)
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.flatten(), factor)
            self.running_var.lerp_(variance.flatten(), factor)
        return y, grid


class GroupNorm(nn.GroupNorm):
    """Group norm; statistics over all voxels and each group's channels."""

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged box grid."""
        if grid is None:
            return super().forward(x), None
        return _norm(x, self, MomentGroups(self.num_groups, False, (grid.group,)), grid)[0], grid


class ChannelLayerNorm(nn.LayerNorm):
    """Layer norm over the channels of ``b c W D H``: local to a voxel."""

    def __init__(self, num_channels: int, **options: Any) -> None:
        super().__init__(num_channels, **options)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged box grid."""
        last = x.movedim(1, -1)
        return F.layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps).movedim(-1, 1), grid


def _refuse_single(count: int, norm: nn.Module) -> None:
    if count == 1:
        raise ValueError(f"{norm} has one value per channel to norm: use a larger --tile or batch")


@dataclass(frozen=True)
class MomentGroups:
    """Which values share statistics: of a channel group, of the batch or of each sample, on all ranks of ``groups``."""

    num_groups: int
    over_batch: bool
    groups: tuple[Group, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of ``b g c`` that share them."""
        return (0, 2) if self.over_batch else (2,)

    def moments(self, x: Tensor) -> Tensor:
        """Returns count, mean and sum of squared deviations, ``3 b g 1`` (``3 1 g 1`` over the batch), of all ranks."""
        wide = torch.promote_types(x.dtype, torch.float32)
        pieces = Pieces(x)
        found: dict[int, list[Tensor]] = {}  # by the first of their rows
        for piece in pieces.of([x]):
            (values,) = piece.values
            mean = piece.sum(values, wide).div_(piece.voxels)
            squares = piece.sum((values - piece.broadcast(mean)).square_())
            moments = torch.full_like(mean, piece.voxels, dtype=torch.float64), mean.double(), squares.double()
            found.setdefault(piece.rows.start, []).append(torch.stack(moments))
        local = torch.cat([_merged(torch.stack(same, 1), (0,)) for same in found.values()], 2)
        merged = _merged(local.view(3, len(x), self.num_groups, -1), self.dims)
        for group in self.groups:
            every = all_gather(merged[:, None], group, 1, [1] * group.size, "statistics")
            merged = _merged(every, (0,))[:, 0]
        return merged

    def sums(self, x: Tensor) -> Tensor:
        """Returns sums ``2 b g 1`` over all ranks of what this rank has, ``2 b c``."""
        sums = x.view(2, -1, self.num_groups, x.shape[-1] // self.num_groups)
        sums = sums.sum([dim + 1 for dim in self.dims], keepdim=True)
        for group in self.groups:
            sums = all_reduce(sums, group, "statistics")
        return sums

    def each(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns a statistic ``b g 1`` for each row ``(b c)`` of a volume of that shape."""
        return x.expand(shape[0], -1, shape[1] // self.num_groups).flatten()


def _merged(moments: Tensor, dims: Sequence[int]) -> Tensor:
    """Returns the moments of the union of sets that lie along ``dims`` (Chan, Golub, LeVeque)."""
    counts, means, squares = moments
    count = counts.sum(dims, keepdim=True)
    mean = (counts * means).sum(dims, keepdim=True) / count
    squares = (squares + counts * (means - mean) ** 2).sum(dims, keepdim=True)
    return torch.stack([count, mean, squares])


def _norm(
    x: Tensor, norm: InstanceNorm3d | BatchNorm3d | GroupNorm, pool: MomentGroups, grid: BoxGrid | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the normed volume, and the mean and unbiased variance ``b g 1`` that all ranks share."""
    assert grid is None or grid.fits(x), (x.shape, grid.sides)
    return _Norm.apply(x, norm.weight, norm.bias, norm.eps, pool)  # type: ignore[no-any-return]


class _Norm(Function):
    """*forward:* merges all ranks' moments. *backward:* sums over all ranks what the statistics owe to each value.

    Kept are the input and two statistics; the normed values are made again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, pool: MomentGroups
    ) -> tuple[Tensor, Tensor, Tensor]:
        counts, mean, squares = pool.moments(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = (squares / counts + eps).rsqrt().to(wide)
        mean = mean.to(wide, copy=True)  # not a view that keeps all three
        ctx.pool, ctx.count = pool, counts.flatten()[0].to(wide, copy=True)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.biased = bias is not None
        times = pool.each(scale, x.shape)
        if weight is not None:
            times = times * weight.to(wide).repeat(len(x))
        shift = torch.zeros_like(times) if bias is None else bias.to(wide).repeat(len(x))
        pieces = Pieces(x)
        y = pieces.empty(x.dtype)
        for piece in pieces.of([x, y], [pool.each(mean, x.shape), times, shift]):
            (source, out), (m, a, b) = piece.values, piece.columns
            normed = torch.sub(source, m, out=out if out.dtype == wide else None)
            normed.mul_(a).add_(b)
            if normed is not out:
                out.copy_(normed)
        variance = (squares / (counts - 1)).to(wide)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        pool: MomentGroups = ctx.pool
        mean, scale = pool.each(mean, x.shape), pool.each(scale, x.shape)  # (b c)
        pieces = Pieces(x)
        grad = grad.contiguous(memory_format=pieces.format)
        totals = scale.new_zeros(2, pieces.num_rows)
        for piece in pieces.of([x, grad], [mean]):
            (source, g), (m,) = piece.values, piece.columns
            totals[0, piece.rows] += piece.sum(g, scale.dtype)
            totals[1, piece.rows] += piece.sum((source - m).mul_(g))
        totals[1] *= scale
        sums = totals.view(2, *x.shape[:2])  # 2 b c: of the gradient, and of its product with the normed values
        times = scale if weight is None else scale * weight.to(scale.dtype).repeat(len(x))
        dx = None
        if ctx.needs_input_grad[0]:
            weighted = sums if weight is None else sums * weight.to(scale.dtype)
            level, slope = (pool.each(s / ctx.count, x.shape) * scale for s in pool.sums(weighted))
            dx = pieces.empty(x.dtype)
            for piece in pieces.of([x, grad, dx], [mean, times, -level, -slope * scale]):
                (source, g, out), (m, a, b, c) = piece.values, piece.columns
                owed = torch.sub(source, m, out=out if out.dtype == mean.dtype else None)
                owed.mul_(c).add_(b).addcmul_(g, a)
                if owed is not out:
                    out.copy_(owed)
        dweight = None if weight is None else sums[1].sum(0).to(weight.dtype)
        dbias = sums[0].sum(0).to(weight.dtype) if weight is not None and ctx.biased else None
        return dx, dweight, dbias, None, None
