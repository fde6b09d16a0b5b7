"""CPU convolutions in the form in which oneDNN is fast, and correct.

Without oneDNN, torch is about eight times slower: it skips it for a single float32 sample of at most 20,480 channels x
W x D, but not for two samples. So a small sample is cut into two halves, which overlap by the kernel's extent.

Without AVX-512, oneDNN's fast kernel for weight gradients needs channels first and no padding along W; otherwise it
builds a matrix of 27 copies of the volume. So slabs along W, with the rows that they reach into, are copied to that
form, and their gradients added; a slab stays in the cache.

In bfloat16, if there is padding along a direction and the kernel is longer there than the volume, oneDNN's weight
gradient contains uninitialized numbers. With kernels of six voxels or more, or padding of more than half a kernel, it
does in float32 too, and can corrupt memory (torch 2.13, AVX-512 with bf16). Without padding it is correct, so such
volumes are padded by hand, and processed as slabs. A transposed convolution's weight gradient is that of a convolution
of the output's gradient: there the output's length counts.

Legend: b batch, c channels, W D H voxels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from seqpar.parallel.meta_tensors import autocast_dtype, device_type, representative_pieces
from seqpar.spatial.memory_format import is_channels_last

_NATIVE = 20480  # channels x W x D up to which torch does not call oneDNN
_SLAB = 1 << 21  # values
_CHANNELS = 8  # block size of the kernel without AVX-512
_LONG = 6  # kernels from which oneDNN is also wrong in float32
Ints = tuple[int, ...]


@dataclass(frozen=True)
class ConvOptions:
    """A convolution's options, as torch names them."""

    stride: Ints
    padding: Ints
    dilation: Ints
    transposed: bool
    output_padding: Ints
    groups: int

    @classmethod
    def of(cls, layer: nn.Conv3d | nn.ConvTranspose3d, padding: Ints) -> "ConvOptions":
        """Returns the options of a layer, with a different padding."""
        return cls(layer.stride, padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups)

    @property
    def all(self) -> tuple[Ints, Ints, Ints, bool, Ints, int]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


@dataclass(frozen=True)
class _Cut:
    """How to halve a sample along ``dim``: each half's inputs and outputs, and the ``step`` between their starts."""

    dim: int
    num_inputs: int
    num_outputs: int
    step: int
    padding: int

    def halves(self, x: Tensor) -> Tensor:
        """Returns the two halves of one sample, padding included, as two samples."""
        whole, inside = self._framed(x)
        inside.copy_(x)
        return torch.cat([whole.narrow(self.dim, at, self.num_inputs) for at in (0, self.step)])

    def halves_adjoint(self, both: Tensor, like: Tensor) -> Tensor:
        """Returns the adjoint of ``halves``."""
        whole, inside = self._framed(like)
        for half, at in zip(both.split(1), (0, self.step)):
            whole.narrow(self.dim, at, self.num_inputs).add_(half)
        return inside

    def _framed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns zeros of the padded shape of ``x``, and the view of them without the padding."""
        shape = list(x.shape)
        shape[self.dim] += 2 * self.padding
        order = torch.channels_last_3d if is_channels_last(x) else torch.contiguous_format
        whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order).zero_()
        return whole, whole.narrow(self.dim, self.padding, x.shape[self.dim])


def _cut(x: Tensor, weight: Tensor, options: ConvOptions) -> _Cut | None:
    """Returns how to halve a sample that torch would convolve without oneDNN, or None if it uses oneDNN."""
    if device_type(x) != "cpu" or x.dtype != torch.float32 or x.ndim != 5 or x.shape[0] != 1:
        return None
    kernel = weight.shape[2:]
    if options.transposed or options.groups > 1 or math.prod(x.shape[1:4]) > _NATIVE or not 1 < max(kernel) <= 3:
        return None
    for dim in range(3):
        extent, span = x.shape[dim + 2] + 2 * options.padding[dim], options.dilation[dim] * (kernel[dim] - 1) + 1
        half, odd = divmod((extent - span) // options.stride[dim] + 1, 2)
        if half and not odd:
            step = half * options.stride[dim]
            return _Cut(dim + 2, step - options.stride[dim] + span, half, step, options.padding[dim])
    return None


def uses_own_kernel(x: Tensor, weight: Tensor, options: ConvOptions) -> bool:
    """Returns whether a convolution, or one of its gradients, is computed differently from torch's own."""
    return _cut(x, weight, options) is not None or weight_grad_by_slabs(x, weight, options)


def weight_grad_by_slabs(x: Tensor, weight: Tensor, options: ConvOptions) -> bool:
    """Returns whether the weight gradient is computed slab by slab."""
    if device_type(x) != "cpu" or x.ndim != 5 or max(weight.shape[2:]) == 1:
        return False
    dtype = autocast_dtype(x) or x.dtype
    if _is_short(x, weight, dtype, options):
        return True
    if dtype != torch.float32 or options.transposed or options.groups > 1:
        return False
    in_blocks = not (weight.shape[0] % _CHANNELS or weight.shape[1] % _CHANNELS)
    return in_blocks and torch.backends.cpu.get_cpu_capability() == "AVX2"


def _is_short(x: Tensor, weight: Tensor, dtype: torch.dtype, options: ConvOptions) -> bool:
    """Returns whether a volume is too short in a direction for oneDNN's weight gradient with padding."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    for dim, (rows, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:])):
        stride, padding, reach = options.stride[dim], options.padding[dim], options.dilation[dim] * (kernel - 1)
        if options.transposed:
            rows = (rows - 1) * stride - 2 * padding + reach + options.output_padding[dim] + 1
        is_doubtful = kernel >= _LONG or 2 * padding > reach
        if padding and rows <= reach + stride * is_doubtful and (is_doubtful or dtype == torch.bfloat16):
            return True
    return False


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvOptions) -> Tensor:
    """Computes torch's convolution, without a gradient."""
    cut = _cut(x, weight, options)
    if cut is None:
        return torch.convolution(x, weight, bias, *options.all)  # type: ignore[arg-type]
    both = torch.convolution(cut.halves(x), weight, bias, *_unpadded(options, cut).all)  # type: ignore[arg-type]
    return torch.cat(both.split(1), cut.dim)


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, biased: bool, options: ConvOptions, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of a convolution's input, weight and bias; None where ``needs`` is False."""
    cut = _cut(x, weight, options)
    shape = [grad.shape[1]] if biased else None
    back = torch.ops.aten.convolution_backward
    if cut is None and any(needs[1:]) and weight_grad_by_slabs(x, weight, options):
        dx = back(grad, x, weight, shape, *options.all, (True, False, False))[0] if needs[0] else None
        is_short = _is_short(x, weight, x.dtype, options)
        if not options.transposed:
            return dx, *_by_slabs(grad, x, weight, shape, options, needs[1:], is_short)
        mirrored = replace(options, transposed=False, output_padding=(0, 0, 0))
        dweight = _by_slabs(x, grad, weight, None, mirrored, (needs[1], False), is_short)[0]
        return dx, dweight, grad.sum((0, 2, 3, 4)) if biased and needs[2] else None
    if cut is None:
        return back(grad, x, weight, shape, *options.all, needs)  # type: ignore[no-any-return]
    both = torch.cat(grad.split(cut.num_outputs, cut.dim))
    dx, dweight, dbias = back(both, cut.halves(x), weight, shape, *_unpadded(options, cut).all, needs)
    return None if dx is None else cut.halves_adjoint(dx, x), dweight, dbias


def _by_slabs(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    shape: list[int] | None,
    options: ConvOptions,
    needs: Sequence[bool],
    by_hand: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the gradients of weight and bias, summed over slabs; None for those that ``needs`` does not ask for.

    - ``by_hand``: also pads the other directions
    """
    if by_hand and any(options.padding[1:]):
        _, d, h = options.padding
        x, options = F.pad(x, (h, h, d, d)), replace(options, padding=(options.padding[0], 0, 0))
    stride, padding = options.stride[0], options.padding[0]
    span, count = options.dilation[0] * (weight.shape[2] - 1) + 1, grad.shape[2]
    bare = replace(options, padding=(0, *options.padding[1:]))
    most = max(1, _SLAB // max(grad[:, :, 0].numel(), stride * x[:, :, 0].numel()))
    at_once = math.ceil(count / math.ceil(count / most))  # so that no slab is too small for oneDNN
    totals: list[Tensor | None] = [None, None]
    slabs = [(first, min(first + at_once, count)) for first in range(0, count, at_once)]
    for first, last in representative_pieces(slabs, x):
        slab = _rows(x, first * stride - padding, (last - 1) * stride - padding + span)
        of_rows = _rows(grad, first, last)
        parts = torch.ops.aten.convolution_backward(of_rows, slab, weight, shape, *bare.all, (False, *needs))[1:]
        totals = [part if total is None else total.add_(part) for total, part in zip(totals, parts)]
    dweight, dbias = totals
    return dweight, dbias


def _rows(x: Tensor, low: int, high: int) -> Tensor:
    """Returns rows along W of a channels-first volume, with zeros outside of it."""
    begin = min(max(low, 0), x.shape[2])
    inside = x.narrow(2, begin, max(min(high, x.shape[2]) - begin, 0))
    result = torch.empty((*x.shape[:2], high - low, *x.shape[3:]), dtype=x.dtype, device=x.device)
    before, behind = begin - low, high - begin - inside.shape[2]
    if not before and not behind and len(x) == 1:  # torch transposes a matrix fast
        rearrange(result, "1 c w d h -> c (w d h)").copy_(rearrange(inside, "1 c w d h -> c (w d h)"))
        return result
    result.narrow(2, 0, before).zero_()
    result.narrow(2, before + inside.shape[2], behind).zero_()
    result.narrow(2, before, inside.shape[2]).copy_(inside)
    return result


def _unpadded(options: ConvOptions, cut: _Cut) -> ConvOptions:
    """Returns the options for the halves, which already contain their padding."""
    padding = tuple(0 if dim + 2 == cut.dim else pad for dim, pad in enumerate(options.padding))
    return replace(options, padding=padding)
