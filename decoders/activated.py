"""Instance norm and leaky ReLU in one step that keeps its output only, from which the normed values are read back.

The output is kept anyway, as the next convolution's input, so that the norm's own input need not be: a residual
block keeps three volumes beside its input instead of five. Legend: b batch, c channels, W D H voxels, v the voxels
of a box; ``/s`` after the letter that is spread over the group.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.collectives import all_reduce
from seqpar.decoders.norms import _pieces, _Pool
from seqpar.decoders.spread import Spread
from seqpar.mesh import Group

SLOPE = 0.01
Groups = tuple[Group, ...]  # over which a volume is spread: one or none


class NormedActivation(nn.Module):
    """LeakyReLU of the instance-normed ``x``, or of its sum with ``other``, which ``norm_other`` norms too.

    It has no parameters. Statistics are the whole volume's, for each sample and channel.
    """

    def __init__(self, eps: float = 1e-5, norm_other: bool = False) -> None:
        super().__init__()
        self.eps, self.norm_other = eps, norm_other

    def forward(
        self, x: Tensor, spread: Spread | None = None, other: Tensor | None = None
    ) -> tuple[Tensor, Spread | None]:
        """Returns the activated volume ``b c W/s D/s H/s`` and its unchanged spread."""
        assert spread is None or spread.fits(x), (x.shape, spread.sides)
        assert other is not None or not self.norm_other
        step = _SumOfNormed if self.norm_other else _Normed
        groups = () if spread is None else (spread.group,)
        count = math.prod(x.shape[2:] if spread is None else spread.extents)
        return step.apply(x, other, self.eps, groups, count), spread  # type: ignore[no-untyped-call]


def _rows(x: Tensor) -> Tensor:
    return x.flatten(2).flatten(0, 1)  # (b c) v/s


def _statistics(x: Tensor, eps: float, groups: Groups) -> tuple[Tensor, Tensor]:
    """Returns mean and scale of each row ``(b c)`` over all ranks, in float32 at least."""
    counts, mean, squares = _Pool(x.shape[1], False, groups).moments(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    return mean.flatten().to(wide), (squares / counts + eps).rsqrt().flatten().to(wide)


def _owed(sums: list[Tensor], groups: Groups, count: int) -> Tensor:
    """Returns means over all ranks' voxels, one column a row ``(b c)``, of what was summed piece by piece."""
    whole = torch.cat(sums, 1)
    for group in groups:
        whole = all_reduce(whole, group, "statistics")
    return whole / count


def _back(grad: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the gradient before the activation and what was activated, both new."""
    grad, y = grad.to(dtype), y.to(dtype)
    return torch.where(y > 0, grad, grad * SLOPE), torch.where(y > 0, y, y / SLOPE)


class _Normed(Function):
    """*forward:* merges all ranks' moments. *backward:* sums over all ranks what the statistics owe to each value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, eps: float, groups: Groups, count: int) -> Tensor:
        mean, scale = _statistics(x, eps, groups)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        beside = _rows(x if other is None else other)
        for out, source, plus, m, a in _pieces(_rows(y), _rows(x), beside, mean, scale):
            normed = (source - m[:, None]).mul_(a[:, None])
            out.copy_(F.leaky_relu_(normed if other is None else normed.add_(plus), SLOPE))
        ctx.how = groups, count
        ctx.save_for_backward(y, other, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, other, scale = ctx.saved_tensors
        groups, count = ctx.how
        rows = _rows(y), _rows(grad), _rows(y if other is None else other)

        def read(out: Tensor, g: Tensor, plus: Tensor) -> tuple[Tensor, Tensor]:
            g, total = _back(g, out, scale.dtype)
            return g, total if other is None else total.sub_(plus)

        sums = []
        for piece in _pieces(*rows):
            g, normed = read(*piece)
            sums.append(torch.stack([g.sum(1), normed.mul_(g).sum(1)]))
        level, along = _owed(sums, groups, count)
        dx = torch.empty_like(y)
        dother = dx if other is None else torch.empty_like(y)
        for out, g, plus, to, to_other, a, b, c in _pieces(*rows, _rows(dx), _rows(dother), scale, level, along):
            g, normed = read(out, g, plus)
            to_other.copy_(g)
            to.copy_(g.sub_(b[:, None]).sub_(normed.mul_(c[:, None])).mul_(a[:, None]))
        return dx, None if other is None else dother, None, None, None


class _SumOfNormed(Function):
    """*forward:* merges all ranks' moments. *backward:* sums over all ranks what the statistics owe to each value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, eps: float, groups: Groups, count: int) -> Tensor:
        mean, scale = _statistics(x, eps, groups)
        other_mean, other_scale = _statistics(other, eps, groups)
        y, kept = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        volumes = (_rows(volume) for volume in (y, kept, x, other))
        for out, keep, source, plus, m, a, n, b in _pieces(*volumes, mean, scale, other_mean, other_scale):
            keep.copy_((source - m[:, None]).mul_(a[:, None]))
            out.copy_(F.leaky_relu_((plus - n[:, None]).mul_(b[:, None]).add_(keep), SLOPE))
        ctx.how = groups, count
        ctx.save_for_backward(y, kept, scale, other_scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, kept, scale, other_scale = ctx.saved_tensors
        groups, count = ctx.how
        rows = _rows(y), _rows(grad), _rows(kept)
        sums = []
        for out, g, normed in _pieces(*rows):
            g, total = _back(g, out, scale.dtype)
            plus = total.sub_(normed)
            sums.append(torch.stack([g.sum(1), (g * normed).sum(1), plus.mul_(g).sum(1)]))
        level, along, other_along = _owed(sums, groups, count)
        dx, dother = torch.empty_like(y), torch.empty_like(y)
        columns = scale, other_scale, level, along, other_along
        for out, g, normed, to, to_other, a, b, mean, c, d in _pieces(*rows, _rows(dx), _rows(dother), *columns):
            g, total = _back(g, out, scale.dtype)
            g, plus = g.sub_(mean[:, None]), total.sub_(normed)
            to_other.copy_((g - plus.mul_(d[:, None])).mul_(b[:, None]))
            to.copy_(g.sub_(normed * c[:, None]).mul_(a[:, None]))
        return dx, dother, None, None, None
