"""Small float32 convolutions on a CPU, computed as those of two halves.

Torch convolves a single float32 sample of at most 20,480 channels x W x D without oneDNN, some eight times slower; two
samples go to oneDNN. So the sample is cut into two, which overlap by the kernel's reach.

Legend: b batch, c channels, W D H voxels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from seqpar.meta_tensors import device_type
from seqpar.spatial.memory_format import is_channels_last

_NATIVE = 20480  # channels x W x D up to which torch does not call oneDNN
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
        """Returns the options of a layer, with another padding."""
        return cls(layer.stride, padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups)

    @property
    def all(self) -> tuple[Ints, Ints, Ints, bool, Ints, int]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


@dataclass(frozen=True)
class _Cut:
    """How a sample is halved: along ``dim``, into halves of so many inputs and outputs that begin ``step`` apart."""

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
    """Returns how to halve a sample that torch would convolve without oneDNN; None for all others."""
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


def is_halved(x: Tensor, weight: Tensor, options: ConvOptions) -> bool:
    """Returns whether a convolution is computed as that of two halves."""
    return _cut(x, weight, options) is not None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, options: ConvOptions) -> Tensor:
    """Returns torch's convolution, without a gradient."""
    cut = _cut(x, weight, options)
    if cut is None:
        return torch.convolution(x, weight, bias, *options.all)  # type: ignore[arg-type]
    both = torch.convolution(cut.halves(x), weight, bias, *_unpadded(options, cut).all)  # type: ignore[arg-type]
    return torch.cat(both.split(1), cut.dim)


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, biased: bool, options: ConvOptions, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of a convolution's input, weight and bias, None where ``needs`` is false."""
    cut = _cut(x, weight, options)
    shape = [grad.shape[1]] if biased else None
    back = torch.ops.aten.convolution_backward
    if cut is None:
        return back(grad, x, weight, shape, *options.all, needs)  # type: ignore[no-any-return]
    both = torch.cat(grad.split(cut.num_outputs, cut.dim))
    dx, dweight, dbias = back(both, cut.halves(x), weight, shape, *_unpadded(options, cut).all, needs)
    return None if dx is None else cut.halves_adjoint(dx, x), dweight, dbias


def _unpadded(options: ConvOptions, cut: _Cut) -> ConvOptions:
    """Returns the options for halves, which contain their padding."""
    padding = tuple(0 if dim + 2 == cut.dim else pad for dim, pad in enumerate(options.padding))
    return replace(options, padding=padding)
