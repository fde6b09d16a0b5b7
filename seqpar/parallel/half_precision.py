"""What autocast does on a GPU, in fewer launches: weights are cast at once, and gradients of weights are never cast.

Autocast casts every weight where it is used, the weight's gradient back, and computes layer norms in float32 between
two casts. Here, all weights of a network are cast before its forward (``weights_cast_at_once``); gradients of weights
come from their matrix products in float32; and a layer norm reads half precision and computes its statistics in
float32. Without autocast, on a CPU and while a compiler traces, everything is torch's own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.torch_version import TorchVersion

from seqpar.parallel.meta_tensors import autocast_dtype, device_type, without_autocast

Weight = TypeVar("Weight", bound=Tensor | None)
_cast = ContextVar[Mapping[Tensor, Tensor] | None]("cast", default=None)  # weights that are cast already
aten = torch.ops.aten


def half_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast converts ``x`` on a GPU; None if it does not, and on a CPU."""
    return None if torch.compiler.is_compiling() or device_type(x) == "cpu" else autocast_dtype(x)


@contextmanager
def weights_cast_at_once(net: nn.Module) -> Iterator[None]:
    """Casts, in a few launches, the weights that modules of ``net`` name in ``cast_weights``; they are found inside.

    Weights that are sharded are cast where they are used, because they are gathered there.
    """
    names = ((module, name) for module in net.modules() for name in getattr(module, "cast_weights", ()))
    weights = [w for w in (getattr(module, name) for module, name in names) if w is not None]
    weights = [w for w in weights if not hasattr(w, "to_local") and half_dtype(w) not in (None, w.dtype)]
    if not weights:
        yield
        return
    cast = [torch.empty_like(w, dtype=half_dtype(w), requires_grad=False) for w in weights]
    with torch.no_grad():
        torch._foreach_copy_(cast, weights)
    before = _cast.set(dict(zip(weights, cast)))
    try:
        yield
    finally:
        _cast.reset(before)


def _in(dtype: torch.dtype, weight: Tensor) -> Tensor:
    """Returns the weight in half precision, without its history: as it was cast before, else cast now."""
    known = (_cast.get() or {}).get(weight)
    return weight.detach().to(dtype) if known is None or known.dtype != dtype else known


def half(weight: Weight) -> Weight:
    """Returns a weight in the dtype to which autocast converts it on a GPU; elsewhere the weight itself.

    Its gradient is cast back, to the weight's memory format.
    """
    dtype = None if weight is None else half_dtype(weight)
    return weight if weight is None or dtype in (None, weight.dtype) else _Half.apply(weight, dtype)  # type: ignore


class _Half(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = weight.dtype
        return _in(dtype, weight).view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype, memory_format=torch.contiguous_format), None


def linear(x: Tensor, weight: Tensor, *bias: Tensor | None) -> Tensor:
    """Returns ``x`` (..., i) times a weight of ``o`` rows, in any shape, plus a bias: (..., o).

    - ``bias``: its parts, one after the other, or None
    """
    parts, dtype = [part for part in bias if part is not None], half_dtype(x)
    if dtype is None:
        return F.linear(x, weight.flatten(1), torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None)
    return _Linear.apply(x, weight, dtype, *parts)  # type: ignore[no-any-return]


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype, *parts: Tensor) -> Tensor:
        ctx.dtypes, ctx.sizes = (x.dtype, weight.dtype), [len(part) for part in parts]
        ctx.shape = weight.shape
        x, matrix, cast = x.to(dtype), _in(dtype, weight).flatten(1), [_in(dtype, part) for part in parts]
        ctx.save_for_backward(x, matrix)
        y = x.new_empty(*x.shape[:-1], len(matrix))  # not a view, so that attention may rotate it in place
        factors, out = (x.flatten(0, -2), matrix.t()), y.view(-1, len(matrix))
        if cast:
            torch.addmm(torch.cat(cast) if len(cast) > 1 else cast[0], *factors, out=out)
        else:
            torch.mm(*factors, out=out)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        of_x, of_weight = ctx.dtypes
        rows = grad.flatten(0, -2)
        dx = (rows @ matrix).view(x.shape).to(of_x) if ctx.needs_input_grad[0] else None
        dweight = product(rows.t(), x.flatten(0, -2), of_weight).view(ctx.shape) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, *_sums_of_parts(rows, ctx.sizes, ctx.needs_input_grad[3:], of_weight)


def _sums_of_parts(
    rows: Tensor, sizes: Sequence[int], needed: Sequence[bool], dtype: torch.dtype
) -> list[Tensor | None]:
    """Returns the sums of the columns of each part that is needed, in one launch; equal parts alone are read."""
    sums: list[Tensor | None] = [None] * len(sizes)
    at = [number for number, needs in enumerate(needed) if needs]
    if not at:
        return sums
    spaced = range(at[0], at[-1] + 1, at[1] - at[0] if len(at) > 1 else 1)
    if [*spaced] != at or len({*sizes}) > 1:
        return [x if needs else None for x, needs in zip(rows.sum(0, dtype=dtype).split(sizes), needed)]
    parts = rows.unflatten(1, (len(sizes), -1))[:, spaced.start : spaced.stop : spaced.step]
    for number, x in zip(at, parts.sum(0, dtype=dtype)):
        sums[number] = x
    return sums


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the product of two matrices in half precision, summed in float32, in a dtype."""
    is_known = not a.is_meta or TorchVersion(torch.__version__) >= "2.10"  # torch 2.8 cannot infer its shape
    if device_type(a) == "cuda" and torch.version.hip is None and dtype == torch.float32 and is_known:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


class Linear(nn.Linear):
    """torch's linear layer, whose weight's gradient is not rounded to half precision under autocast on a GPU."""

    cast_weights = ("weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``x`` times the weight, plus the bias."""
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """torch's layer norm, which reads and returns half precision under autocast on a GPU; statistics are float32."""

    cast_weights = ("weight", "bias")

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normed values."""
        dtype = self.dtype_of(x)
        return super().forward(x) if dtype is None else self.with_input(x, dtype)[1]

    def dtype_of(self, x: Tensor) -> torch.dtype | None:
        """Returns the dtype in which ``x`` is normed; None: as torch does."""
        return None if self.weight is None or self.bias is None else half_dtype(x)

    def with_input(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns ``x``, and its normed values in half precision."""
        return _LayerNorm.apply(x, self.weight, self.bias, self.normalized_shape, self.eps, dtype)  # type: ignore


def with_normed(x: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns ``x`` and its normed values; if both are used from here, their gradients are added in one launch.

    A norm of another kind, or one with hooks, is called as usual.
    """
    hooks = norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks
    if type(norm) is LayerNorm and not any(hooks) and (dtype := norm.dtype_of(x)) is not None:
        return norm.with_input(x, dtype)
    return x, norm(x)


class _LayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...], eps: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.dtype = shape, weight.dtype
        ctx.set_materialize_grads(False)
        cast, weight, bias = x.to(dtype), _in(dtype, weight), _in(dtype, bias)
        with without_autocast(x):  # it would norm in float32
            y, mean, scale = torch.native_layer_norm(cast, shape, weight, bias, eps)
        ctx.save_for_backward(cast, mean, scale, weight, bias)
        return x, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, skip: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return skip, None, None, None, None, None
        x, mean, scale, weight, bias = ctx.saved_tensors
        assert grad.shape == x.shape and (skip is None or skip.shape == x.shape)
        mask = [bool(needed) for needed in ctx.needs_input_grad[:3]]
        dx, *of_weights = aten.native_layer_norm_backward(grad, x, ctx.shape, mean, scale, weight, bias, mask)
        if None not in of_weights:  # both in one launch
            wide = [torch.empty_like(d, dtype=ctx.dtype) for d in of_weights]
            torch._foreach_copy_(wide, of_weights)
            of_weights = wide
        return dx if skip is None or dx is None else skip + dx, *of_weights, None, None, None
