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
from seqpar.mesh import Group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.norms import MomentGroups
from seqpar.spatial.pieces import Pieces

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
        self, x: Tensor, grid: BoxGrid | None = None, other: Tensor | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns the activated volume ``b c W/s D/s H/s`` and its unchanged box grid."""
        assert grid is None or grid.fits(x), (x.shape, grid.sides)
        assert other is not None or not self.norm_other
        step = _SumOfNormed if self.norm_other else _Normed
        groups = () if grid is None else (grid.group,)
        count = math.prod(x.shape[2:] if grid is None else grid.extents)
        return step.apply(x, other, self.eps, groups, count), grid  # type: ignore[no-untyped-call]


def _statistics(x: Tensor, eps: float, groups: Groups) -> tuple[Tensor, Tensor]:
    """Returns mean and scale of each row ``(b c)`` over all ranks, in float32 at least."""
    counts, mean, squares = MomentGroups(x.shape[1], False, groups).moments(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    return mean.flatten().to(wide), (squares / counts + eps).rsqrt().flatten().to(wide)


def _owed(sums: Tensor, groups: Groups, count: int) -> Tensor:
    """Returns means over all ranks' voxels of sums over this rank's, one column a row ``(b c)``."""
    for group in groups:
        sums = all_reduce(sums, group, "statistics")
    return sums / count


def _back(grad: Tensor, y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the gradient before the activation and what was activated, both new."""
    grad, y = grad.to(dtype), y.to(dtype)
    return torch.ops.aten.leaky_relu_backward(grad, y, SLOPE, True), F.leaky_relu(y, 1 / SLOPE)


class _Normed(Function):
    """*forward:* merges all ranks' moments. *backward:* sums over all ranks what the statistics owe to each value.

    Of a sum in half precision the normed values are kept too: beside a large ``other`` they could not be read back.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, eps: float, groups: Groups, count: int) -> Tensor:
        mean, scale = _statistics(x, eps, groups)
        pieces = Pieces(x)
        y = pieces.empty(x.dtype)
        kept = pieces.empty(x.dtype) if other is not None and x.dtype.itemsize < 4 else None
        volumes = [x, y, x if other is None else other, y if kept is None else kept]
        for piece in pieces.of(volumes, [mean, scale]):
            (source, out, plus, keep), (m, a) = piece.values, piece.columns
            normed = (source - m).mul_(a)
            if kept is not None:
                keep.copy_(normed)
            out.copy_(F.leaky_relu_(normed if other is None else normed.add_(plus), SLOPE))
        ctx.how = groups, count, kept is not None
        ctx.save_for_backward(y, other if kept is None else kept, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, beside, scale = ctx.saved_tensors  # beside: nothing, the other summand, or the normed values
        groups, count, is_kept = ctx.how
        pieces = Pieces(y)
        volumes = [y, grad.contiguous(memory_format=pieces.format), y if beside is None else beside]

        def read(out: Tensor, g: Tensor, plus: Tensor) -> tuple[Tensor, Tensor]:
            g, total = _back(g, out, scale.dtype)
            if is_kept:
                return g, plus.to(scale.dtype)
            return g, total if beside is None else total.sub_(plus)

        sums = scale.new_zeros(2, pieces.num_rows)
        for piece in pieces.of(volumes):
            g, normed = read(*piece.values)
            sums[0, piece.rows] += piece.sum(g)
            sums[1, piece.rows] += piece.sum(normed.mul_(g))
        level, along = _owed(sums, groups, count)
        dx = pieces.empty(y.dtype)
        dother = dx if beside is None else pieces.empty(y.dtype)
        for piece in pieces.of([*volumes, dx, dother], [scale, level, along]):
            (*given, to, to_other), (a, b, c) = piece.values, piece.columns
            g, normed = read(*given)
            to_other.copy_(g)
            to.copy_(g.sub_(b).sub_(normed.mul_(c)).mul_(a))
        return dx, None if beside is None else dother, None, None, None


class _SumOfNormed(Function):
    """*forward:* merges all ranks' moments. *backward:* sums over all ranks what the statistics owe to each value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, eps: float, groups: Groups, count: int) -> Tensor:
        mean, scale = _statistics(x, eps, groups)
        other_mean, other_scale = _statistics(other, eps, groups)
        pieces = Pieces(x)
        y, kept = pieces.empty(x.dtype), pieces.empty(x.dtype)
        for piece in pieces.of([x, other, y, kept], [mean, scale, other_mean, other_scale]):
            (source, plus, out, keep), (m, a, n, b) = piece.values, piece.columns
            normed = (source - m).mul_(a)
            keep.copy_(normed)
            out.copy_(F.leaky_relu_((plus - n).mul_(b).add_(normed), SLOPE))
        ctx.how = groups, count
        ctx.save_for_backward(y, kept, scale, other_scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, kept, scale, other_scale = ctx.saved_tensors
        groups, count = ctx.how
        pieces = Pieces(y)
        volumes = [y, grad.contiguous(memory_format=pieces.format), kept]
        sums = scale.new_zeros(3, pieces.num_rows)
        for piece in pieces.of(volumes):
            out, g, normed = piece.values
            g, total = _back(g, out, scale.dtype)
            plus = total.sub_(normed)
            sums[0, piece.rows] += piece.sum(g)
            sums[1, piece.rows] += piece.sum(g * normed)
            sums[2, piece.rows] += piece.sum(plus.mul_(g))
        level, along, other_along = _owed(sums, groups, count)
        dx, dother = pieces.empty(y.dtype), pieces.empty(y.dtype)
        columns = scale, other_scale, level, along, other_along
        for piece in pieces.of([*volumes, dx, dother], columns):
            (out, g, normed, to, to_other), (a, b, mean, c, d) = piece.values, piece.columns
            g, total = _back(g, out, scale.dtype)
            g, plus = g.sub_(mean), total.sub_(normed)
            to_other.copy_((g - plus.mul_(d)).mul_(b))
            to.copy_(g.sub_(normed * c).mul_(a))
        return dx, dother, None, None, None
