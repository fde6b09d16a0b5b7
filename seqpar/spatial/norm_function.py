"""Norms of volumes that are split into boxes, as one autograd step that may include a leaky ReLU.

Legend: b batch, c channels, g groups of channels, W D H voxels; a row is one channel of one sample, ``(b c)``.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.parallel.meta_tensors import device_type
from seqpar.spatial.cache_pieces import Pieces, fits_whole_samples
from seqpar.spatial.fused_norm import before_leaky_relu, shift_of, write_gradient
from seqpar.spatial.moments import MomentGroups

_SMALL = 1 << 16  # values of a sample
Statistics = tuple[Tensor, Tensor, Tensor | int]  # mean and variance ``b g 1`` over all ranks, number of values


def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    moment_groups: MomentGroups,
    slope: float | None = None,
) -> tuple[Tensor, Statistics]:
    """Returns the normed volume and the statistics shared by all ranks.

    - ``weight``, ``bias``: one value per channel
    - ``eps``: added to the variance
    - ``slope``: of a leaky ReLU that follows, which a CPU computes while the values are in its cache; None: no
      activation
    """
    if _takes_torchs(x, weight, moment_groups):
        y, mean, variance = _SmallNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
        return (y if slope is None else F.leaky_relu_(y, slope)), (mean, variance, x.shape[2:].numel())
    inside = slope is not None and not fits_whole_samples(x)
    y, *statistics = _Norm.apply(x, weight, bias, eps, moment_groups, slope if inside else None)  # type: ignore[no-untyped-call]
    mean, variance, count = statistics
    return (y if slope is None or inside else F.leaky_relu_(y, slope)), (mean, variance, count)


def _takes_torchs(x: Tensor, weight: Tensor | None, moment_groups: MomentGroups) -> bool:
    """Returns whether each sample is whole and so small that a CPU needs longer for the calls than for the values."""
    by_row = moment_groups.num_groups == x.shape[1] and not moment_groups.over_batch
    whole = all(group.size == 1 for group in moment_groups.groups)
    wide = x.dtype in (torch.float32, torch.float64) and (weight is None or weight.dtype == x.dtype)
    return by_row and whole and wide and device_type(x) == "cpu" and x.shape[1:].numel() <= _SMALL


class _SmallNorm(Function):
    """Instance norm of whole, small volumes by torch's batch norm of all their rows.

    Rows are contiguous there: with channels innermost, torch would sum in float32 one value after another.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        columns = _repeated(weight, len(x)), _repeated(bias, len(x))
        y, mean, scale = torch.native_batch_norm(_in_rows(x), *columns, None, None, True, 0.0, eps)
        ctx.eps, ctx.format = eps, Pieces(x).format
        ctx.save_for_backward(x, weight, mean, scale)
        mean, variance = (rows.view(len(x), -1, 1) for rows in (mean, scale**-2 - eps))
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return Pieces(x).empty(x.dtype).copy_(y.view(x.shape)), mean, variance  # no view: it is activated in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        column = _repeated(weight, len(x))
        dx, *sums = torch.ops.aten.native_batch_norm_backward(
            _in_rows(grad), _in_rows(x), column, None, None, mean, scale, True, ctx.eps, ctx.needs_input_grad[:3]
        )
        dx = None if dx is None else dx.view(x.shape).contiguous(memory_format=ctx.format)
        return dx, *(None if each is None else each.view(len(x), -1).sum(0) for each in sums), None


def _in_rows(x: Tensor) -> Tensor:
    """Returns the values of each channel of each sample, adjacent: ``1 (b c) v``."""
    return x.reshape(1, x.shape[0] * x.shape[1], x.shape[2:].numel())


def _repeated(values: Tensor | None, times: int) -> Tensor | None:
    return values if values is None or times == 1 else values.repeat(times)


class _Norm(Function):
    """*forward:* norms with the moments of all ranks' boxes, and activates.

    *backward:* the gradient that flows through mean and variance is summed over all ranks and added to each voxel's
    own.

    It keeps the input and two statistics; the normed values are recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        moment_groups: MomentGroups,
        slope: float | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | int]:
        mean, variance, count = moment_groups.mean_and_variance(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        mean, scale = mean.to(wide), (variance + eps).rsqrt().to(wide)
        ctx.moment_groups, ctx.slope = moment_groups, slope
        ctx.count = count.flatten()[0].to(wide, copy=True) if isinstance(count, Tensor) else count
        ctx.save_for_backward(x, weight, bias, mean, scale)
        row_mean, factor = (moment_groups.to_rows(statistic, x.shape) for statistic in (mean, scale))
        y = _scale(x, row_mean, _weighed(factor, weight), bias, slope)
        ctx.mark_non_differentiable(mean, variance, *[c for c in (count,) if isinstance(c, Tensor)])
        ctx.set_materialize_grads(False)
        return y, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        moment_groups: MomentGroups = ctx.moment_groups
        mean, scale = (moment_groups.to_rows(statistic, x.shape) for statistic in (mean, scale))
        factor = _weighed(scale, weight)
        activation = None if ctx.slope is None else _Activation(ctx.slope, factor, _of_rows(bias, factor))
        grad = grad.contiguous(memory_format=Pieces(x).format)
        row_sums = _sums(x, grad, mean, scale, activation)
        sums = rearrange(row_sums, "two (b c) -> two b c", b=len(x))
        dweight = None if weight is None else sums[1].sum(0).to(weight.dtype)
        dbias = None if bias is None else sums[0].sum(0).to(bias.dtype)
        if not ctx.needs_input_grad[0]:
            return None, dweight, dbias, None, None, None
        weighted = sums if weight is None else sums * weight.to(scale.dtype)
        means, sign = moment_groups.sums(weighted) / ctx.count, -scale
        level, slope = (moment_groups.to_rows(each, x.shape) * sign for each in means)
        dx = _gradient(x, grad, mean, factor, level, slope * scale, activation)
        return dx, dweight, dbias, None, None, None


class _Activation:
    """A leaky ReLU after a norm, whose inputs were not kept: recomputes which of them were positive.

    - ``factor``, ``shift``: scale and shift of the centred values, per row
    """

    def __init__(self, slope: float, factor: Tensor, shift: Tensor) -> None:
        self.slope, self.columns = slope, (factor, shift)

    def backward(self, grad: Tensor, centred: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
        """Returns the gradient before the activation of a piece, whose values minus their mean are ``centred``."""
        return before_leaky_relu(  # type: ignore[no-any-return]
            grad.to(centred.dtype), torch.addcmul(shift, centred, factor), self.slope, False
        )


def _weighed(rows: Tensor, weight: Tensor | None) -> Tensor:
    """Returns the rows ``(b c)`` multiplied by the weights ``c``."""
    return rows if weight is None else _each_sample(torch.mul, rows, weight.to(rows.dtype))


def _of_rows(bias: Tensor | None, like: Tensor) -> Tensor:
    """Repeats the bias ``c`` for each row ``(b c)``."""
    return torch.zeros_like(like) if bias is None else bias.to(like.dtype).repeat(len(like) // len(bias))


def _each_sample(act: Callable[[Tensor, Tensor], Tensor], rows: Tensor, channels: Tensor) -> Tensor:
    """Applies ``act`` to each sample's rows of ``(b c)`` and to the values ``c``."""
    return act(rows.view(-1, len(channels)), channels).flatten()


def _scale(x: Tensor, mean: Tensor, factor: Tensor, bias: Tensor | None, slope: float | None) -> Tensor:
    """Returns ``(x - mean) * factor + bias``, activated; mean and factor are per row, the bias per channel."""
    pieces = Pieces(x)
    y = pieces.empty(x.dtype)
    if pieces.at_once:
        shift = shift_of(mean, factor)
        shift = shift if bias is None else _each_sample(torch.add, shift, bias.to(factor.dtype))
        for piece in pieces.of([x, y], [shift, factor]):
            torch.addcmul(piece.columns[0], piece.values[0], piece.columns[1], out=piece.values[1])
        return y
    for piece in pieces.of([x, y], [mean, factor, _of_rows(bias, factor)]):
        (source, out), (row_mean, row_factor, row_shift) = piece.values, piece.columns
        result = torch.sub(source, row_mean, out=out if out.dtype == factor.dtype else None)
        torch.addcmul(row_shift, result, row_factor, out=result)
        if slope is not None:
            F.leaky_relu_(result, slope)
        if result is not out:
            out.copy_(result)
    return y


def _sums(x: Tensor, grad: Tensor, mean: Tensor, scale: Tensor, activation: _Activation | None) -> Tensor:
    """Returns the row sums ``2 (b c)`` of the gradient, and of its product with the normed values."""
    pieces = Pieces(x)
    row_sums = scale.new_zeros(2, pieces.num_rows)
    grad_sum, product_sum = row_sums
    for piece in pieces.of([x, grad], [mean, *(activation.columns if activation else ())]):
        (source, g), (row_mean, *columns) = piece.values, piece.columns
        centred = source - row_mean
        if activation is not None:
            g = activation.backward(g, centred, *columns)
        grad_sum[piece.rows] += piece.sum(g, scale.dtype)
        product_sum[piece.rows] += piece.sum(centred.mul_(g))
    product_sum *= scale
    return row_sums


def _gradient(
    x: Tensor,
    grad: Tensor,
    mean: Tensor,
    factor: Tensor,
    level: Tensor,
    slope: Tensor,
    activation: _Activation | None,
) -> Tensor:
    """Returns ``(x - mean) * slope + grad * factor + level``, where ``grad`` is taken before the activation."""
    pieces = Pieces(x)
    dx = pieces.empty(x.dtype)
    columns = [mean, factor, level, slope, *(activation.columns if activation else ())]
    for piece in pieces.of([x, grad, dx], columns):
        (source, g, out), (row_mean, row_factor, row_level, row_slope, *of_activation) = piece.values, piece.columns
        if pieces.at_once:
            write_gradient(g, source - row_mean, out, row_factor, row_level, row_slope)
            continue
        owed = torch.sub(source, row_mean, out=out if out.dtype == mean.dtype else None)
        if activation is not None:
            g = activation.backward(g, owed, *of_activation)
        torch.addcmul(row_level, owed, row_slope, out=owed).addcmul_(g, row_factor)
        if owed is not out:
            out.copy_(owed)
    return dx
