"""Norms with statistics of the whole volume, of which each rank has a box; without a box grid they are torch's own.

Legend: b batch, c channels, g groups of channels, W D H voxels, v the voxels of a box; ``/s`` after the letter
that is spread over the group.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.mesh import AnyGroup, as_group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.memory_format import is_channels_last
from seqpar.spatial.moments import MomentGroups
from seqpar.spatial.pieces import Pieces


class InstanceNorm3d(nn.InstanceNorm3d):
    """Instance norm; statistics over all voxels of the whole volume, for each sample and channel."""

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged box grid."""
        own = self.training or not self.track_running_stats
        if not own or (grid is None and not is_channels_last(x)):  # torch's own would return another memory format
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
    """Batch norm; statistics over all voxels and samples of the batch, whichever ranks hold them.

    - ``num_features`` and other options: torch's
    - ``data``: ranks that hold other tiles of the batch
    - ``peers``: ranks that hold other whole samples of it where the volume is not cut into boxes
    """

    def __init__(
        self, num_features: int, *options: Any, data: AnyGroup | None = None, peers: AnyGroup | None = None, **more: Any
    ) -> None:
        super().__init__(num_features, *options, **more)
        self.data = None if data is None else as_group(data, "data")
        self.peers = None if peers is None else as_group(peers)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged box grid."""
        own = self.training or self.running_mean is None
        groups = tuple(group for group in (self.peers if grid is None else grid.group, self.data) if group is not None)
        if not groups or not own:
            return super().forward(x), grid
        voxels = grid.extents if grid is not None else x.shape[2:]
        samples = len(x) * math.prod(group.size for group in groups if grid is None or group is not grid.group)
        _refuse_single(samples * math.prod(voxels), self)
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
    """Layer norm over the ``num_channels`` channels of ``b c W D H``: local to a voxel; other options are torch's."""

    def __init__(self, num_channels: int, **options: Any) -> None:
        super().__init__(num_channels, **options)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged box grid."""
        y = rearrange(x, "b c w d h -> b w d h c")
        y = F.layer_norm(y, self.normalized_shape, self.weight, self.bias, self.eps)
        return rearrange(y, "b w d h c -> b c w d h"), grid


def _refuse_single(count: int, norm: nn.Module) -> None:
    if count == 1:
        raise ValueError(f"{norm} has one value per channel to norm: use a larger --tile or batch")


def _norm(
    x: Tensor, norm: InstanceNorm3d | BatchNorm3d | GroupNorm, moment_groups: MomentGroups, grid: BoxGrid | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the normed volume, and the mean and unbiased variance ``b g 1`` that all ranks share."""
    assert grid is None or grid.fits(x), (x.shape, grid.sides)
    return _Norm.apply(x, norm.weight, norm.bias, norm.eps, moment_groups)  # type: ignore[no-any-return]


class _Norm(Function):
    """*forward:* norms with the moments of all ranks' boxes.

    *backward:* sums over all ranks what the loss owes to mean and variance, and takes it from each voxel's gradient.

    Kept are the input and two statistics; the normed values are computed again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, moment_groups: MomentGroups
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, mean, squares = moment_groups.moments(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, scale = mean.to(wide), (squares / count + eps).rsqrt().to(wide)
        ctx.moment_groups, ctx.count = moment_groups, count.flatten()[0].to(wide, copy=True)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.biased = bias is not None
        factor = moment_groups.to_rows(scale, x.shape)
        if weight is not None:
            factor = factor * weight.to(wide).repeat(len(x))
        shift = torch.zeros_like(factor) if bias is None else bias.to(wide).repeat(len(x))
        pieces = Pieces(x)
        y = pieces.empty(x.dtype)
        for piece in pieces.of([x, y], [moment_groups.to_rows(mean, x.shape), factor, shift]):
            (source, out), (row_mean, row_factor, row_shift) = piece.values, piece.columns
            normed = torch.sub(source, row_mean, out=out if out.dtype == wide else None)
            normed.mul_(row_factor).add_(row_shift)
            if normed is not out:
                out.copy_(normed)
        variance = (squares / (count - 1)).to(wide)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        moment_groups: MomentGroups = ctx.moment_groups
        mean, scale = (moment_groups.to_rows(statistic, x.shape) for statistic in (mean, scale))
        pieces = Pieces(x)
        grad = grad.contiguous(memory_format=pieces.format)
        row_sums = scale.new_zeros(2, pieces.num_rows)
        grad_sum, product_sum = row_sums  # of the gradient, and of its product with the normed values
        for piece in pieces.of([x, grad], [mean]):
            (source, g), (row_mean,) = piece.values, piece.columns
            grad_sum[piece.rows] += piece.sum(g, scale.dtype)
            product_sum[piece.rows] += piece.sum((source - row_mean).mul_(g))
        product_sum *= scale
        sums = rearrange(row_sums, "two (b c) -> two b c", b=len(x))
        dweight = None if weight is None else sums[1].sum(0).to(weight.dtype)
        dbias = sums[0].sum(0).to(weight.dtype) if weight is not None and ctx.biased else None
        if not ctx.needs_input_grad[0]:
            return None, dweight, dbias, None, None
        factor = scale if weight is None else scale * weight.to(scale.dtype).repeat(len(x))
        weighted = sums if weight is None else sums * weight.to(scale.dtype)
        level, slope = (moment_groups.to_rows(s / ctx.count, x.shape) * scale for s in moment_groups.sums(weighted))
        dx = pieces.empty(x.dtype)
        for piece in pieces.of([x, grad, dx], [mean, factor, -level, -slope * scale]):
            (source, g, out), (row_mean, row_factor, row_shift, row_slope) = piece.values, piece.columns
            owed = torch.sub(source, row_mean, out=out if out.dtype == mean.dtype else None)
            owed.mul_(row_slope).add_(row_shift).addcmul_(g, row_factor)
            if owed is not out:
                out.copy_(owed)
        return dx, dweight, dbias, None, None
