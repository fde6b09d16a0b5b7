"""Convolutions of volumes that are split into boxes; without a box grid they are torch's own.

Each takes ``(x, grid)`` and returns ``(y, grid of y)``; parameters have torch's names. Legend: b batch, c channels, W D
H voxels; ``/s`` after the letter that is split over the group.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.parallel.half_precision import half, linear
from seqpar.parallel.mesh import Group
from seqpar.parallel.meta_tensors import autocast_dtype, device_type
from seqpar.parallel.row_exchange import Interval
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.cache_pieces import fits_whole_samples
from seqpar.spatial.cpu_convolution import ConvOptions, uses_own_kernel
from seqpar.spatial.halos import Halos
from seqpar.spatial.memory_format import is_channels_last, match_memory_format
from seqpar.spatial.overlap import BoxConvolution, backward_during_exchange, convolve_during_exchange, overlap_pays_off
from seqpar.spatial.receptive_field import ReceptiveField, output_grid, sliding_reach, transposed_reach


class Conv3d(nn.Conv3d):
    """Applies a 3D convolution to a box, fetching its halos; any kernel, stride, zero padding, dilation and groups.

    Args:
        ``sizes``, ``options``: as in ``torch.nn.Conv3d``; ``padding_mode`` must be ``"zeros"``.
        ``keep_window``: keep the box with its halos for backward. If False, keep only the input and fetch its halos
            again, which needs no memory if something else keeps the input anyway. None suits an input that comes from a
            norm with activation, which is kept on a GPU anyway, but not on a CPU.
    """

    cast_weights = ("weight", "bias")

    def __init__(self, *sizes: Any, keep_window: bool | None = True, **options: Any) -> None:
        super().__init__(*sizes, **options)
        _refuse_padding(self.padding_mode)
        self.keep_window = keep_window

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns this rank's box of the output, ``b c W/s D/s H/s``, and its box grid."""
        _refuse_channels(self, x)
        if self._is_local() and is_channels_last(x):
            if grid is not None:
                grid.refuse_other_box(x)
            y = linear(rearrange(x, "b c w d h -> b w d h c"), self.weight, self.bias)
            return rearrange(y, "b w d h c -> b c w d h"), grid
        if grid is None:
            return self._whole(x), None
        keep_window = not fits_whole_samples(x) if self.keep_window is None else self.keep_window
        pads, options = [self._pads(dim) for dim in range(3)], ConvOptions.of(self, (0, 0, 0))
        return convolve_box(x, grid, self.weight, self.bias, options, pads, str(self), keep_window)

    def _whole(self, x: Tensor) -> Tensor:
        """Returns the convolution of a whole volume."""
        pads = [self._pads(dim) for dim in range(3)]
        conv_options = ConvOptions.of(self, tuple(before for before, _ in pads))
        if all(before == behind for before, behind in pads) and uses_own_kernel(x, self.weight, conv_options):
            return _convolve(x, self.weight, self.bias, BoxConvolution(Halos(Group("self")), conv_options, True))
        return match_memory_format(self._conv_forward(x, half(self.weight), half(self.bias)), x)

    def _is_local(self) -> bool:
        """Returns whether this is a matrix product at each voxel, independent of its neighbours."""
        plain = self.groups == 1 and not any(sum(self._pads(dim)) for dim in range(3))
        return plain and math.prod(self.kernel_size) == 1 == math.prod(self.stride)

    def _span(self, dim: int) -> int:
        return self.dilation[dim] * (self.kernel_size[dim] - 1) + 1

    def _pads(self, dim: int) -> tuple[int, int]:
        if isinstance(self.padding, str):
            both = self._span(dim) - 1 if self.padding == "same" else 0
            return both // 2, both - both // 2
        return self.padding[dim], self.padding[dim]


class ConvTranspose3d(nn.ConvTranspose3d):
    """Applies a 3D transposed convolution to a box, fetching its halos; it needs none if kernel and stride are equal.

    Args:
        ``sizes``, ``options``: as in ``torch.nn.ConvTranspose3d``; ``padding_mode`` must be ``"zeros"``.
        ``keep_window``: as in ``Conv3d``.
        ``cut_shift``: how many voxels before its usual place the output is cut; for an output that is padded before.
    """

    cast_weights = ("weight", "bias")

    def __init__(self, *sizes: Any, keep_window: bool = True, cut_shift: int = 0, **options: Any) -> None:
        super().__init__(*sizes, **options)
        _refuse_padding(self.padding_mode)
        if any(e >= max(s, d) for e, s, d in zip(self.output_padding, self.stride, self.dilation)):
            raise ValueError(f"output_padding {self.output_padding} must be smaller than stride or dilation")
        self.keep_window, self.cut_shift = keep_window, cut_shift

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns this rank's box of the output, ``b c W/s D/s H/s``, and its box grid."""
        _refuse_channels(self, x)
        if grid is None:
            conv_options = ConvOptions.of(self, self.padding)  # type: ignore[arg-type]
            if uses_own_kernel(x, self.weight, conv_options):
                return _convolve(
                    x, self.weight, self.bias, BoxConvolution(Halos(Group("self")), conv_options, True)
                ), None
            sizes = self.stride, self.padding, self.output_padding, self.groups, self.dilation
            y = F.conv_transpose3d(x, half(self.weight), half(self.bias), *sizes)  # type: ignore[arg-type]
            return match_memory_format(y, x), None
        options = ConvOptions.of(self, self.padding)  # type: ignore[arg-type]
        how = str(self), self.keep_window, self.cut_shift
        return convolve_box_transposed(x, grid, self.weight, self.bias, options, *how)


def convolve_box(
    x: Tensor,
    grid: BoxGrid,
    weight: Tensor,
    bias: Tensor | None,
    options: ConvOptions,
    pads: Sequence[tuple[int, int]],
    what: str,
    keep_window: bool = True,
) -> tuple[Tensor, BoxGrid]:
    """Convolves a box with its halos, in as many dimensions as ``grid`` has.

    - ``options``: its padding is ignored
    - ``pads``: padding before and behind the volume, along each dimension
    - ``what``: names the operation in errors
    - ``keep_window``: keep the box with its halos for backward; if False, fetch them again
    """
    spans = [d * (k - 1) + 1 for k, d in zip(weight.shape[2:], options.dilation)]
    reaches = [sliding_reach(*along, what) for along in zip(grid.edges, spans, options.stride, pads)]
    conv_options = replace(options, padding=tuple(reach.padding for reach in reaches))
    how = BoxConvolution(Halos.of(grid, reaches), conv_options, keep_window)
    grid.refuse_other_box(x)
    return _convolve(x, weight, bias, how), output_grid(grid, reaches)


def convolve_box_transposed(
    x: Tensor,
    grid: BoxGrid,
    weight: Tensor,
    bias: Tensor | None,
    options: ConvOptions,
    what: str,
    keep_window: bool = True,
    cut_shift: int = 0,
) -> tuple[Tensor, BoxGrid]:
    """Convolves a box transposed with its halos, in as many dimensions as ``grid`` has; arguments as above.

    - ``cut_shift``: as in ``ConvTranspose3d``
    """
    sizes = list(zip(weight.shape[2:], options.stride, options.padding, options.dilation, options.output_padding))
    reaches = [
        transposed_reach(edges, *along, what=what, cut_shift=cut_shift) for edges, along in zip(grid.edges, sizes)
    ]
    result = output_grid(grid, reaches)
    computed = [_computed(reach, at, *along[:4]) for reach, at, along in zip(reaches, grid.place, sizes)]
    padding = tuple(reach.padding for reach in reaches)
    output_padding = tuple(e if reach.local else 0 for e, reach in zip(options.output_padding, reaches))
    conv_options = replace(options, padding=padding, output_padding=output_padding)
    how = BoxConvolution(Halos.of(grid, reaches), conv_options, keep_window, Halos.crop(computed, result.box))
    grid.refuse_other_box(x)
    return _convolve(x, weight, bias, how), result


def _computed(reach: ReceptiveField, place: int, kernel: int, stride: int, padding: int, dilation: int) -> Interval:
    """Returns the interval of outputs computed from this rank's window."""
    if reach.local:
        return 0, reach.edges[-1]
    low, high = reach.needed[place]
    return low * stride - padding, (high - 1) * stride - padding + dilation * (kernel - 1) + 1


def _refuse_padding(mode: str) -> None:
    if mode != "zeros":
        raise ValueError(f"padding_mode={mode!r} does not work across boxes: use 'zeros'")


def _refuse_channels(conv: Conv3d | ConvTranspose3d, x: Tensor) -> None:
    if x.ndim != 5 or x.shape[1] != conv.in_channels:
        raise ValueError(
            f"expected a volume (batch, {conv.in_channels} channels, W, D, H), got shape {tuple(x.shape)}, for {conv}"
        )


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, how: BoxConvolution) -> Tensor:
    dtype = autocast_dtype(x)
    if dtype is not None:
        weight, bias = half(weight), half(bias)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _Convolve.apply(x, weight, bias, how)  # type: ignore[no-any-return]


class _Convolve(Function):
    """*forward:* fetches the halos and convolves.

    *backward:* sends the halos' gradients back to their owners, which add them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: BoxConvolution) -> Tensor:
        inner_bias = None if how.crop.plans else bias  # outputs that no input reaches also get the bias
        ctx.how, ctx.biased, ctx.overlaps = (
            how,
            bias is not None,
            overlap_pays_off(device_type(x), how.halos.bytes_to_come(x)),
        )
        window, y = convolve_during_exchange(how, x, weight, inner_bias, ctx.overlaps)
        ctx.save_for_backward(window if how.keep_window else x, weight)
        ctx.window_shape = y.shape
        y = how.crop.open(y)
        if bias is not None and inner_bias is None:
            y += bias.view(-1, *[1] * (y.ndim - 2))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        how: BoxConvolution = ctx.how
        kept, weight = ctx.saved_tensors
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        window_grad = how.crop.close(grad)  # cropping sends no message, so grad is not written to
        assert window_grad.shape == ctx.window_shape, (window_grad.shape, ctx.window_shape)
        inner_bias = for_bias and not how.crop.plans
        needs = for_x, for_weight, inner_bias
        dx, dweight, dbias = backward_during_exchange(how, window_grad, kept, weight, ctx.biased, needs, ctx.overlaps)
        if for_bias and not inner_bias:
            dbias = grad.sum([0, *range(2, grad.ndim)])
        return dx, dweight, dbias, None
