"""The blocks of U-Nets: modules that take ``(x, grid)`` and return ``(y, grid of y)``.

Legend: b batch, c channels, W D H voxels of a box, /r a reduced number of channels.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from seqpar.decoders.unets.architecture import ONE, Style, Three
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d, ConvTranspose3d
from seqpar.spatial.halos import Halos
from seqpar.spatial.memory_format import in_fastest_format
from seqpar.spatial.norms import BatchNorm3d, GroupNorm, InstanceNorm3d
from seqpar.spatial.pooling import AvgPool3d, GlobalMean, Upsample
from seqpar.spatial.receptive_field import ReceptiveField
from seqpar.vit.dropout import DropoutKey, keyed_voxel_dropout


class LastAxisNorm(nn.Module):
    """Applies a norm with positions along the last axis as channels, as DistMIS's code does.

    Each position has its own weights; volumes of another length are refused, because their positions differ.

    - ``norm``: of as many channels as the last axis has positions
    """

    def __init__(self, norm: BatchNorm3d | GroupNorm) -> None:
        super().__init__()
        self.norm = norm
        self.length = norm.num_features if isinstance(norm, BatchNorm3d) else norm.num_channels

    def forward(self, x: Tensor, grid: BoxGrid | None = None, slope: float | None = None) -> Value:
        """Returns the normed volume and its unchanged box grid; the last axis must not be cut.

        - ``slope``: of a leaky ReLU that follows
        """
        assert x.shape[-1] == self.length, (x.shape, self.length)
        turned_grid = None
        if grid is not None:
            assert grid.parts[-1] == 1, grid.edges
            turned_grid = BoxGrid(((0, x.shape[1]), *grid.edges[:-1]), grid.group)
        turned, _ = self.norm(rearrange(x, "b c w d h -> b h c w d").contiguous(), turned_grid, slope)
        return rearrange(turned, "b h c w d -> b c w d h"), grid


def norm_of(style: Style, channels: int, scale: Three) -> nn.Module:
    """Returns the style's norm for a volume whose points cover ``scale`` voxels."""
    if style.norm == "instance":
        return InstanceNorm3d(channels, eps=style.eps, affine=True)
    count = style.length // scale[-1] or channels
    if style.norm == "group":
        norm: BatchNorm3d | GroupNorm = GroupNorm(math.gcd(style.num_groups, count), count, eps=style.eps)
    else:
        groups = {"data": style.data, "peers": style.peers}
        norm = BatchNorm3d(count, eps=style.eps, momentum=style.momentum, **groups)
    return LastAxisNorm(norm) if style.length else norm


def activate(x: Tensor, style: Style) -> Tensor:
    """Returns the activated volume, computed in place if the gradient can be computed from the output."""
    if style.activation == "relu":
        return F.relu_(x)
    return F.gelu(x) if style.activation == "gelu" else F.leaky_relu_(x, style.slope)


class VoxelDropout(nn.Module):
    """Drops activations in training by (key, sample, voxel of the whole volume, channel), on any boxes alike.

    ``key``: of the step and the cell, which the network sets before the cell runs; None: nothing is dropped.
    """

    takes_key = True
    key: DropoutKey | None = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Tensor:
        """Returns the volume with zeros, and the rest enlarged."""
        if self.key is None or not self.training:
            return x
        extents, box = (x.shape[2:], None) if grid is None else (grid.extents, grid.box)
        w, d, h = (torch.arange(*(box[axis] if box else (side,)), device=x.device) for axis, side in enumerate(extents))
        voxels = (w[:, None, None] * extents[1] + d[:, None]) * extents[2] + h
        return keyed_voxel_dropout(x, self.rate, self.key, voxels)


class ConvBlock(nn.Module):
    """A convolution, its norm and its activation, applied to a volume or to a volume joined with a skip.

    - ``scale``: voxels per point of the output
    - ``has_norm``, ``activates``: whether norm and activation follow
    - ``drops``: whether the style's dropout follows
    - ``bias``: of the convolution; None: the style's if a norm follows, else True
    - ``keep_window``: keep halos for backward rather than fetching them again, which needs the same memory if nothing
      else keeps the input. None suits an input that is the output of such a block, which keeps it itself if it
      activates without a norm
    """

    def __init__(
        self,
        style: Style,
        channels: int,
        width: int,
        kernel: Three,
        stride: Three = ONE,
        scale: Three = ONE,
        has_norm: bool = True,
        activates: bool = True,
        bias: bool | None = None,
        keep_window: bool | None = None,
        drops: bool = False,
    ) -> None:
        super().__init__()
        has_norm = has_norm and style.norm != "none"
        self.style, self.activates = style, activates
        if keep_window is None and style.norm == "none":
            keep_window = False
        self.conv = Conv3d(
            channels,
            width,
            kernel,
            stride=stride,
            padding=tuple(side // 2 for side in kernel),
            bias=(style.bias or not has_norm) if bias is None else bias,
            keep_window=keep_window,
        )
        self.norm = norm_of(style, width, scale) if has_norm else None
        self.holds_more = has_norm
        self.dropout = VoxelDropout(style.dropout) if drops and style.dropout else None

    def forward(self, x: Tensor, grid: BoxGrid | None = None, skip: Value | None = None) -> Value:
        """Returns the block's output and its box grid; the channels of ``skip`` are appended to those of ``x``."""
        if skip is not None:
            x, grid = concat_skip(x, grid, skip)
        x, grid = self.conv(x, grid)
        if self.conv.in_channels == 1:  # a single channel has no memory format that the convolution could have kept
            x = in_fastest_format(x)
        leak = self.style.leak if self.activates else None
        if self.norm is not None:
            x, grid = self.norm(x, grid, leak)
        is_done = not self.activates or (self.norm is not None and leak is not None)
        x = x if is_done else activate(x, self.style)
        return (x if self.dropout is None else self.dropout(x, grid)), grid


class ResidualBlock(nn.Module):
    """Convolutions and a shortcut, which averages if they have a stride and is a 1x1x1 convolution if widths differ.

    - ``narrow``: channels inside a bottleneck (1x1x1, kernel with the stride, 1x1x1); 0: two convolutions
    - ``squeeze``: reduction factor of squeeze-excite before the sum; 0: none
    """

    holds_more = True

    def __init__(
        self,
        style: Style,
        channels: int,
        width: int,
        kernel: Three,
        stride: Three,
        scale: Three,
        narrow: int = 0,
        squeeze: int = 0,
    ) -> None:
        super().__init__()
        before = scale if max(stride) == 1 else _divided(scale, stride)
        widths, kernels = (channels, width, width), (kernel, kernel)
        strides, scales = (stride, ONE), (scale, scale)
        if narrow:
            widths, kernels = (channels, narrow, narrow, width), (ONE, kernel, ONE)  # type: ignore[assignment]
            strides, scales = (ONE, stride, ONE), (before, scale, scale)  # type: ignore[assignment]
        steps = zip(itertools.pairwise(widths), kernels, strides, scales)
        self.convs = nn.ModuleList(
            ConvBlock(style, c, w, k, s, at, activates=number < len(kernels) - 1, keep_window=None if number else False)
            for number, ((c, w), k, s, at) in enumerate(steps)
        )
        self.squeeze = SqueezeExcite(width, squeeze) if squeeze else None
        self.pool = AvgPool3d(stride, stride) if max(stride) > 1 else None
        self.project = None
        if channels != width:
            self.project = ConvBlock(style, channels, width, ONE, ONE, scale, activates=False, bias=False)
        self.style = style

    def begin_as_shortcut(self) -> None:
        """Sets the last norm to 0, so that the block starts as its shortcut."""
        for p in self.convs[-1].norm.parameters():  # type: ignore[union-attr]
            nn.init.zeros_(p)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Value:
        """Returns the block's output and its box grid."""
        shortcut, shortcut_grid = x, grid
        for step in (self.pool, self.project):
            if step is not None:
                shortcut, shortcut_grid = step(shortcut, shortcut_grid)
        for conv in self.convs:
            x, grid = conv(x, grid)
        if self.squeeze is not None:
            x, grid = self.squeeze(x, grid)
        assert grid is None or (shortcut_grid is not None and grid.edges == shortcut_grid.edges), (grid, shortcut_grid)
        return activate(x + shortcut, self.style), grid


class SqueezeExcite(nn.Module):
    """Scales each channel by a factor in (0, 1) computed from the means of all channels over the whole volume."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        self.mean = GlobalMean()
        self.reduce = nn.Linear(channels, max(1, channels // reduction))
        self.expand = nn.Linear(max(1, channels // reduction), channels)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Value:
        """Returns the scaled volume and its unchanged box grid."""
        mean, _ = self.mean(x, grid)  # b c 1 1 1, the same on all ranks
        factor = self.expand(F.relu(self.reduce(mean.flatten(1)))).sigmoid()
        return x * factor[:, :, None, None, None].to(x.dtype), grid


class Up(nn.Module):
    """Upsamples by one level: a transposed convolution, or a 1x1x1 convolution and an upsampling without weights.

    - ``kernel``: of the transposed convolution; 0: equal to the stride
    - ``activates``: whether an activation follows
    """

    def __init__(
        self,
        style: Style,
        channels: int,
        width: int,
        stride: Three,
        how: str = "transposed",
        kernel: int = 0,
        activates: bool = False,
    ) -> None:
        super().__init__()
        self.style, self.activates = style, activates
        self.upsample = None
        self.dropout = VoxelDropout(style.dropout) if style.dropout else None
        if how != "transposed":
            self.conv: nn.Module = Conv3d(channels, width, 1, bias=style.up_bias)
            self.upsample = Upsample(scale_factor=tuple(map(float, stride)), mode=how)
            return
        kernels = [max(kernel, side) if side > 1 else 1 for side in stride]
        padding = tuple((k - s + 1) // 2 for k, s in zip(kernels, stride))
        output_padding = tuple(2 * p + s - k for k, s, p in zip(kernels, stride, padding))
        options: dict[str, Any] = {"stride": stride, "padding": padding, "output_padding": output_padding}
        self.conv = ConvTranspose3d(channels, width, tuple(kernels), bias=style.up_bias, **options, keep_window=False)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Value:
        """Returns the finer volume and its box grid."""
        x, grid = self.conv(x, grid)
        if self.upsample is not None:
            x, grid = self.upsample(x, grid)
        x = activate(x, self.style) if self.activates else x
        return (x if self.dropout is None else self.dropout(x, grid)), grid


class MedNeXtBlock(nn.Module):
    """A MedNeXt block: each channel's own convolution, a norm, a wider 1x1x1 convolution, GELU, and a narrower one.

    Submodules have the names of MedNeXt's package.

    - ``expansion``: inner channels over ``channels``
    - ``resample``: "" at one resolution, with the input added; "down" to half of it, or "up" to twice, with a 1x1x1
      convolution of the input added. Upsampling computes 2n - 1 points from n, norms them, and puts a 0 before them
    """

    holds_more = True

    def __init__(
        self, style: Style, channels: int, width: int, expansion: int, kernel: Three, resample: str = ""
    ) -> None:
        super().__init__()
        self.style, self.resample = style, resample
        inner, shift = expansion * channels, {"cut_shift": 1} if resample == "up" else {}
        conv: type[Conv3d | ConvTranspose3d] = ConvTranspose3d if resample == "up" else Conv3d
        options: dict[str, Any] = {"stride": 2 if resample else 1, **shift}
        padding = tuple(side // 2 for side in kernel)
        keeps = {"keep_window": not resample}  # the other convolution of the input keeps it
        self.conv1 = conv(channels, channels, kernel, padding=padding, groups=channels, **options, **keeps)
        self.norm = norm_of(style, channels, ONE) if style.norm != "none" else None
        self.conv2 = Conv3d(channels, inner, 1)
        self.conv3 = Conv3d(inner, width, 1)
        self.res_conv = conv(channels, width, 1, **options) if resample else None

    def forward(self, x: Tensor, grid: BoxGrid | None = None, skip: Value | None = None) -> Value:
        """Returns the block's output and its box grid; an upsampled one is added to ``skip``."""
        shortcut, shortcut_grid = (x, grid) if self.res_conv is None else self.res_conv(x, grid)
        x, grid = self.conv1(x, grid)
        if self.norm is not None:
            x, grid = self.norm(x, grid)
        x, grid = self.conv3(activate(self.conv2(x, grid)[0], self.style), grid)
        assert grid is None or (shortcut_grid is not None and grid.edges == shortcut_grid.edges), (grid, shortcut_grid)
        x = x + shortcut
        if self.resample == "up":
            x, grid = _pad_before(x, grid)
        if skip is None:
            return x, grid
        other, other_grid = skip
        return move_to_grid(x, grid, other_grid) + other, other_grid


def _pad_before(x: Tensor, grid: BoxGrid | None) -> Value:
    """Puts a 0 before the first voxel along each dimension; all others are one further, and stay on their rank."""
    if grid is None:
        return F.pad(x, (1, 0) * 3), None
    first = [int(place == 0) for place in grid.place]
    edges = tuple((0, *(edge + 1 for edge in along[1:])) for along in grid.edges)
    return F.pad(x, tuple(side for at in reversed(first) for side in (at, 0))), BoxGrid(edges, grid.group)


def concat_skip(x: Tensor, grid: BoxGrid | None, skip: Value) -> Value:
    """Concatenates the channels of ``x`` and of a skip, on the skip's boxes."""
    other, other_grid = skip
    return torch.cat([move_to_grid(x, grid, other_grid), other], 1), other_grid


def move_to_grid(x: Tensor, grid: BoxGrid | None, to: BoxGrid | None) -> Tensor:
    """Moves ``x`` to the boxes ``to`` of the same volume; where edges differ, voxels move to a neighbour."""
    if grid is None or to is None or grid.edges == to.edges:
        assert (grid is None) == (to is None)
        return x
    assert grid.extents == to.extents, (grid.extents, to.extents)
    reaches = [ReceptiveField(edges, tuple(itertools.pairwise(edges))) for edges in to.edges]
    return Halos.of(grid, reaches).fetch(x)


def init_weights(net: nn.Module, style: Style) -> None:
    """Initializes all kernels by the style's method; biases are 0. Torch's own values stay if the style says so."""
    if style.init == "torch":
        return
    for module in net.modules():
        if isinstance(module, (nn.Conv3d, nn.ConvTranspose3d, nn.Linear)):
            if style.init == "truncated" and isinstance(module, nn.ConvTranspose3d):
                nn.init.xavier_uniform_(module.weight)
            elif style.init == "truncated":
                nn.init.trunc_normal_(module.weight, std=0.05, a=-0.1, b=0.1)
            else:
                nn.init.kaiming_normal_(module.weight, a=style.slope if style.activation == "leaky_relu" else 0.0)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _divided(scale: Sequence[int], stride: Sequence[int]) -> Three:
    w, d, h = (a // b for a, b in zip(scale, stride))
    return w, d, h
