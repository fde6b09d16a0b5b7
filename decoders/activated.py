"""Instance norm and leaky ReLU in one step that keeps its output only, from which the normed values are read back.

The output is kept anyway, as the next convolution's input, so that the norm's own input need not be: a residual
block keeps three volumes beside its input instead of five. Legend: b batch, c channels, W D H voxels, v the voxels
of a box; ``/s`` after the letter that is spread over the group.
"""

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
        return step.apply(x, other, self.eps, None if spread is None else spread.group), spread  # type: ignore


def _rows(x: Tensor) -> Tensor:
    return x.flatten(2).flatten(0, 1)  # (b c) v/s


def _statistics(x: Tensor, eps: float, group: Group | None) -> tuple[Tensor, Tensor, float]:
    """Returns mean and scale of each row ``(b c)`` over all ranks, and over how many voxels they are."""
    counts, mean, squares = _Pool(x.shape[1], False, () if group is None else (group,)).moments(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = (squares / counts + eps).rsqrt()
    return mean.flatten().to(wide), scale.flatten().to(wide), float(counts.flatten()[0])


def _owed(sums: list[Tensor], group: Group | None, count: float) -> Tensor:
    """Returns means over all ranks' voxels, one column a row ``(b c)``, of what was summed piece by piece."""
    whole = torch.cat(sums, 1)
    return (whole if group is None else all_reduce(whole, group, "statistics")) / count


def _before(y: Tensor) -> Tensor:
    """Returns what was activated, ``_through`` its gradient: both new tensors."""
    return torch.where(y > 0, y, y / SLOPE)


def _through(grad: Tensor, y: Tensor) -> Tensor:
    return torch.where(y > 0, grad, grad * SLOPE)


class _Normed(Function):
    """*forward:* merges all ranks' moments. *backward:* sums over all ranks what the statistics owe to each value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, eps: float, group: Group | None) -> Tensor:
        mean, scale, count = _statistics(x, eps, group)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        beside = _rows(x if other is None else other)
        for out, source, plus, m, a in _pieces(_rows(y), _rows(x), beside, mean, scale):
            normed = (source - m[:, None]).mul_(a[:, None])
            out.copy_(F.leaky_relu_(normed if other is None else normed.add_(plus), SLOPE))
        ctx.how = group, count
        ctx.save_for_backward(y, other, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, other, scale = ctx.saved_tensors
        group, count = ctx.how
        rows = _rows(y), _rows(grad), _rows(y if other is None else other)

        def normed(out: Tensor, plus: Tensor) -> Tensor:
            return _before(out) if other is None else _before(out).sub_(plus)

        sums = []
        for out, g, plus in _pieces(*rows):
            g = _through(g, out)
            sums.append(torch.stack([g.sum(1), normed(out, plus).mul_(g).sum(1)]))
        level, along = _owed(sums, group, count)
        dx = torch.empty_like(y)
        dother = dx if other is None else torch.empty_like(y)
        for out, g, plus, to, to_other, a, b, c in _pieces(*rows, _rows(dx), _rows(dother), scale, level, along):
            g = _through(g, out)
            to_other.copy_(g)
            to.copy_(g.sub_(b[:, None]).sub_(normed(out, plus).mul_(c[:, None])).mul_(a[:, None]))
        return dx, None if other is None else dother, None, None


class _SumOfNormed(Function):
    """*forward:* merges all ranks' moments. *backward:* sums over all ranks what the statistics owe to each value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, eps: float, group: Group | None) -> Tensor:
        mean, scale, count = _statistics(x, eps, group)
        other_mean, other_scale, _ = _statistics(other, eps, group)
        y, kept = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        volumes = (_rows(volume) for volume in (y, kept, x, other))
        for out, keep, source, plus, m, a, n, b in _pieces(*volumes, mean, scale, other_mean, other_scale):
            keep.copy_((source - m[:, None]).mul_(a[:, None]))
            out.copy_(F.leaky_relu_((plus - n[:, None]).mul_(b[:, None]).add_(keep), SLOPE))
        ctx.how = group, count
        ctx.save_for_backward(y, kept, scale, other_scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, kept, scale, other_scale = ctx.saved_tensors
        group, count = ctx.how
        rows = _rows(y), _rows(grad), _rows(kept)
        sums = []
        for out, g, normed in _pieces(*rows):
            g, plus = _through(g, out), _before(out).sub_(normed)
            sums.append(torch.stack([g.sum(1), (g * normed).sum(1), plus.mul_(g).sum(1)]))
        level, along, other_along = _owed(sums, group, count)
        dx, dother = torch.empty_like(y), torch.empty_like(y)
        columns = scale, other_scale, level, along, other_along
        for out, g, normed, to, to_other, a, b, mean, c, d in _pieces(*rows, _rows(dx), _rows(dother), *columns):
            g, plus = _through(g, out).sub_(mean[:, None]), _before(out).sub_(normed)
            to_other.copy_((g - plus.mul_(d[:, None])).mul_(b[:, None]))
            to.copy_(g.sub_(normed * c[:, None]).mul_(a[:, None]))
        return dx, dother, None, None
