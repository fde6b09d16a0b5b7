"""Norms with statistics of the whole volume where it is spread over a group; without a spread they are torch's own.

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
from seqpar.decoders.spread import Spread
from seqpar.mesh import Group


class InstanceNorm3d(nn.InstanceNorm3d):
    """Instance norm; statistics over all voxels of the whole volume, for each sample and channel."""

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged spread."""
        own = self.training or not self.track_running_stats
        if spread is None or not own:
            return super().forward(x), spread
        _refuse_single(math.prod(spread.extents), self)
        y, mean, variance = _norm(x, self, _Pool(self.num_features, False, (spread.group,)), spread)
        if self.running_mean is not None and self.running_var is not None:
            factor = self.momentum or 0.0
            self.running_mean.lerp_(mean.mean(0).flatten(), factor)
            self.running_var.lerp_(variance.mean(0).flatten(), factor)
        return y, spread


class BatchNorm3d(nn.BatchNorm3d):
    """Batch norm; statistics over all voxels and samples, and over ``data``'s ranks where one is given."""

    def __init__(self, num_features: int, *options: Any, data: Group | None = None, **more: Any) -> None:
        super().__init__(num_features, *options, **more)
        self.data = data

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged spread."""
        own = self.training or self.running_mean is None
        groups = (*([] if spread is None else [spread.group]), *([] if self.data is None else [self.data]))
        if not groups or not own:
            return super().forward(x), spread
        voxels = spread.extents if spread is not None else x.shape[2:]
        _refuse_single(len(x) * math.prod(voxels) * (self.data.size if self.data else 1), self)
        y, mean, variance = _norm(x, self, _Pool(self.num_features, True, groups), spread)
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.flatten(), factor)
            self.running_var.lerp_(variance.flatten(), factor)
        return y, spread


class GroupNorm(nn.GroupNorm):
    """Group norm; statistics over all voxels and each group's channels."""

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged spread."""
        if spread is None:
            return super().forward(x), None
        return _norm(x, self, _Pool(self.num_groups, False, (spread.group,)), spread)[0], spread


class ChannelLayerNorm(nn.LayerNorm):
    """Layer norm over the channels of ``b c W D H``: local to a voxel."""

    def __init__(self, num_channels: int, **options: Any) -> None:
        super().__init__(num_channels, **options)

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged spread."""
        last = x.movedim(1, -1)
        return F.layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps).movedim(-1, 1), spread


def _refuse_single(count: int, norm: nn.Module) -> None:
    if count == 1:
        raise ValueError(f"{norm} has one value per channel to norm: use a larger --tile or batch")


@dataclass(frozen=True)
class _Pool:
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
        rows = x.flatten(2).flatten(0, 1)  # (b c) v/s
        wide = torch.promote_types(x.dtype, torch.float32)
        mean = rows.mean(1, dtype=wide)
        squares = [(piece - m[:, None]).square_().sum(1) for piece, m in _pieces(rows, mean)]
        counts = torch.full_like(mean, rows.shape[1])
        local = torch.stack([counts, mean, torch.cat(squares)]).double()
        moments = _merged(local.view(3, len(x), self.num_groups, -1), self.dims)
        for group in self.groups:
            every = all_gather(moments[:, None], group, 1, [1] * group.size, "statistics")
            moments = _merged(every, (0,))[:, 0]
        return moments

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


_AT_ONCE = 1 << 18  # values: intermediates stay in the processor's cache


def _pieces(*tensors: Tensor) -> Any:
    """Returns rows ``(b c) v`` and what belongs to them, a few at a time; the first gives the size."""
    first = tensors[0]
    at_once = max(1, _AT_ONCE // first.shape[1]) if first.device.type == "cpu" else len(first)
    return zip(*(tensor.split(at_once) for tensor in tensors))


def _norm(
    x: Tensor, norm: InstanceNorm3d | BatchNorm3d | GroupNorm, pool: _Pool, spread: Spread | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the normed volume, and the mean and unbiased variance ``b g 1`` that all ranks share."""
    assert spread is None or spread.fits(x), (x.shape, spread.sides)
    return _Norm.apply(x, norm.weight, norm.bias, norm.eps, pool)  # type: ignore[no-any-return]


class _Norm(Function):
    """*forward:* merges all ranks' moments. *backward:* sums over all ranks what the statistics owe to each value.

    Kept are the input and two statistics; the normed values are made again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, pool: _Pool
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
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = x.flatten(2).flatten(0, 1)
        for source, out, m, a, b in _pieces(rows, y.view(rows.shape), pool.each(mean, x.shape), times, shift):
            normed = torch.sub(source, m[:, None], out=out if out.dtype == wide else None)
            normed.mul_(a[:, None]).add_(b[:, None])
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
        pool: _Pool = ctx.pool
        rows, grads = x.flatten(2).flatten(0, 1), grad.flatten(2).flatten(0, 1)  # (b c) v/s
        mean, scale = pool.each(mean, x.shape), pool.each(scale, x.shape)  # (b c)
        products = [(source - m[:, None]).mul_(g).sum(1) for source, g, m in _pieces(rows, grads, mean)]
        along = torch.cat(products) * scale  # of the gradient with the normed values
        sums = torch.stack([grads.sum(1, dtype=along.dtype), along]).view(2, *x.shape[:2])  # 2 b c
        times = scale if weight is None else scale * weight.to(scale.dtype).repeat(len(x))
        dx = None
        if ctx.needs_input_grad[0]:
            weighted = sums if weight is None else sums * weight.to(scale.dtype)
            level, slope = (pool.each(s / ctx.count, x.shape) * scale for s in pool.sums(weighted))
            dx = torch.empty_like(x, memory_format=torch.contiguous_format)
            parts = _pieces(rows, grads, dx.view(rows.shape), mean, times, -level, -slope * scale)
            for source, g, out, m, a, b, c in parts:
                owed = torch.sub(source, m[:, None], out=out if out.dtype == mean.dtype else None)
                owed.mul_(c[:, None]).add_(b[:, None]).addcmul_(g, a[:, None])
                if owed is not out:
                    out.copy_(owed)
        dweight = None if weight is None else sums[1].sum(0).to(weight.dtype)
        dbias = sums[0].sum(0).to(weight.dtype) if weight is not None and ctx.biased else None
        return dx, dweight, dbias, None, None
