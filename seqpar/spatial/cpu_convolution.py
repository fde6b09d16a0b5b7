"""Convolutions of one small sample on a processor, as those of its two halves.

Torch leaves oneDNN for a single float32 sample of at most 20,480 channels x W x D and convolves it some eight times
slower; two samples go to oneDNN. The halves overlap by the kernel's reach. Legend: b batch, c channels, W D H voxels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from seqpar.meta_tensors import device_type
from seqpar.spatial.memory_format import channels_last

_NATIVE = 20480  # channels x W x D up to which torch takes its own kernel
Ints = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """A convolution's numbers, as torch names them."""

    stride: Ints
    padding: Ints
    dilation: Ints
    transposed: bool
    output_padding: Ints
    groups: int

    @classmethod
    def of(cls, layer: nn.Conv3d | nn.ConvTranspose3d, padding: Ints) -> "Sizes":
        """Returns a layer's, but for its padding."""
        return cls(layer.stride, padding, layer.dilation, layer.transposed, layer.output_padding, layer.groups)

    @property
    def all(self) -> tuple[Ints, Ints, Ints, bool, Ints, int]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


@dataclass(frozen=True)
class _Cut:
    """Where a sample is halved: along which dimension, how many inputs and outputs a half has, how far apart."""

    dim: int
    given: int
    made: int
    step: int
    padding: int

    def halves(self, x: Tensor) -> Tensor:
        """Returns both halves of one sample, zeros around it included, as two samples."""
        whole, inside = self._framed(x)
        inside.copy_(x)
        return torch.cat([whole.narrow(self.dim, at, self.given) for at in (0, self.step)])

    def added(self, both: Tensor, like: Tensor) -> Tensor:
        """Returns the adjoint of ``halves``."""
        whole, inside = self._framed(like)
        for half, at in zip(both.split(1), (0, self.step)):
            whole.narrow(self.dim, at, self.given).add_(half)
        return inside

    def _framed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns zeros like ``x`` with its padding around it, and what of them lies inside."""
        shape = list(x.shape)
        shape[self.dim] += 2 * self.padding
        order = torch.channels_last_3d if channels_last(x) else torch.contiguous_format
        whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order).zero_()
        return whole, whole.narrow(self.dim, self.padding, x.shape[self.dim])


def _cut(x: Tensor, weight: Tensor, sizes: Sizes) -> _Cut | None:
    """Returns where to halve a sample that torch would convolve natively; None for all others."""
    if device_type(x) != "cpu" or x.dtype != torch.float32 or x.ndim != 5 or x.shape[0] != 1:
        return None
    kernel = weight.shape[2:]
    if sizes.transposed or sizes.groups > 1 or math.prod(x.shape[1:4]) > _NATIVE or not 1 < max(kernel) <= 3:
        return None
    for dim in range(3):
        extent, span = x.shape[dim + 2] + 2 * sizes.padding[dim], sizes.dilation[dim] * (kernel[dim] - 1) + 1
        made, odd = divmod((extent - span) // sizes.stride[dim] + 1, 2)
        if made and not odd:
            step = made * sizes.stride[dim]
            return _Cut(dim + 2, step - sizes.stride[dim] + span, made, step, sizes.padding[dim])
    return None


def is_halved(x: Tensor, weight: Tensor, sizes: Sizes) -> bool:
    """Returns whether a convolution is computed as one of two halves."""
    return _cut(x, weight, sizes) is not None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sizes) -> Tensor:
    """Returns torch's convolution, without a gradient."""
    cut = _cut(x, weight, sizes)
    if cut is None:
        return torch.convolution(x, weight, bias, *sizes.all)  # type: ignore[arg-type]
    both = torch.convolution(cut.halves(x), weight, bias, *_unpadded(sizes, cut).all)  # type: ignore[arg-type]
    return torch.cat(both.split(1), cut.dim)


def gradients(
    grad: Tensor, x: Tensor, weight: Tensor, biased: bool, sizes: Sizes, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of a convolution's input, weight and bias, those that are wanted."""
    cut = _cut(x, weight, sizes)
    shape = [grad.shape[1]] if biased else None
    back = torch.ops.aten.convolution_backward
    if cut is None:
        return back(grad, x, weight, shape, *sizes.all, wanted)  # type: ignore[no-any-return]
    both = torch.cat(grad.split(cut.made, cut.dim))
    dx, dweight, dbias = back(both, cut.halves(x), weight, shape, *_unpadded(sizes, cut).all, wanted)
    return None if dx is None else cut.added(dx, x), dweight, dbias


def _unpadded(sizes: Sizes, cut: _Cut) -> Sizes:
    """Returns the numbers for halves, which bring their zeros along."""
    padding = tuple(0 if dim + 2 == cut.dim else pad for dim, pad in enumerate(sizes.padding))
    return replace(sizes, padding=padding)
