"""Norms with the statistics of a whole volume that is split into boxes; without a box grid they are torch's own.

A leaky ReLU that follows a norm can be computed with it.

Legend: b batch, c channels, g groups of channels, W D H voxels.
"""

import math
from typing import Any

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from seqpar.parallel.mesh import AnyGroup, as_group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.memory_format import is_channels_last
from seqpar.spatial.moments import MomentGroups
from seqpar.spatial.norm_function import Statistics, normalize


class InstanceNorm3d(nn.InstanceNorm3d):
    """Applies instance norm with statistics over all voxels of the whole volume, per sample and channel."""

    def forward(  # type: ignore[override]
        self, x: Tensor, grid: BoxGrid | None = None, slope: float | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns the normed volume and its unchanged box grid; ``slope`` is that of a leaky ReLU that follows."""
        own = self.training or not self.track_running_stats
        if own:
            _refuse_single(math.prod(x.shape[2:] if grid is None else grid.extents), self)
        if not own or (grid is None and not is_channels_last(x)):  # torch's own would return another memory format
            return _activated(super().forward(x), slope), grid
        groups = () if grid is None else (grid.group,)
        y, statistics = _norm(x, self, MomentGroups(self.num_features, False, groups), grid, slope)
        update_running(self.running_mean, self.running_var, self.momentum or 0.0, statistics)
        return y, grid


class BatchNorm3d(nn.BatchNorm3d):
    """Applies batch norm with statistics over all voxels and samples of the batch, on whichever ranks they are.

    Args:
        ``num_features``, ``options``, ``more``: as in ``torch.nn.BatchNorm3d``.
        ``data``: ranks that hold other tiles of the batch.
        ``peers``: ranks that hold other whole samples of the batch, if the volume is not split into boxes.
    """

    def __init__(
        self, num_features: int, *options: Any, data: AnyGroup | None = None, peers: AnyGroup | None = None, **more: Any
    ) -> None:
        super().__init__(num_features, *options, **more)
        self.data = None if data is None else as_group(data, "data")
        self.peers = None if peers is None else as_group(peers)

    def forward(  # type: ignore[override]
        self, x: Tensor, grid: BoxGrid | None = None, slope: float | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns the normed volume and its unchanged box grid; ``slope`` is that of a leaky ReLU that follows."""
        own = self.training or self.running_mean is None
        groups = tuple(group for group in (self.peers if grid is None else grid.group, self.data) if group is not None)
        if own:
            voxels = grid.extents if grid is not None else x.shape[2:]
            samples = len(x) * math.prod(group.size for group in groups if grid is None or group is not grid.group)
            _refuse_single(samples * math.prod(voxels), self)
        if not groups or not own:
            return _activated(super().forward(x), slope), grid
        y, statistics = _norm(x, self, MomentGroups(self.num_features, True, groups), grid, slope)
        if self.training and self.running_mean is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            update_running(self.running_mean, self.running_var, factor, statistics)
        return y, grid


class GroupNorm(nn.GroupNorm):
    """Applies group norm with statistics over all voxels of the whole volume and each group's channels."""

    def forward(  # type: ignore[override]
        self, x: Tensor, grid: BoxGrid | None = None, slope: float | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns the normed volume and its unchanged box grid; ``slope`` is that of a leaky ReLU that follows."""
        if grid is None:
            return _activated(super().forward(x), slope), None
        return _norm(x, self, MomentGroups(self.num_groups, False, (grid.group,)), grid, slope)[0], grid


class ChannelLayerNorm(nn.LayerNorm):
    """Applies layer norm over the channels of ``b c W D H``, independently at each voxel.

    Args:
        ``num_channels``: the number of channels.
        ``options``: as in ``torch.nn.LayerNorm``.
    """

    def __init__(self, num_channels: int, **options: Any) -> None:
        super().__init__(num_channels, **options)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged box grid."""
        y = rearrange(x, "b c w d h -> b w d h c")
        y = F.layer_norm(y, self.normalized_shape, self.weight, self.bias, self.eps)
        return rearrange(y, "b w d h c -> b c w d h"), grid


def _refuse_single(count: int, norm: nn.Module) -> None:
    if count == 1:
        raise ValueError(f"{norm} needs more than one value per channel: use a larger `tile` or `batch`")


def _norm(
    x: Tensor,
    norm: InstanceNorm3d | BatchNorm3d | GroupNorm,
    moment_groups: MomentGroups,
    grid: BoxGrid | None,
    slope: float | None,
) -> tuple[Tensor, Statistics]:
    if grid is not None:
        grid.refuse_other_box(x)
    return normalize(x, norm.weight, norm.bias, norm.eps, moment_groups, slope)


def _activated(x: Tensor, slope: float | None) -> Tensor:
    return x if slope is None else F.leaky_relu_(x, slope)


def update_running(
    running_mean: Tensor | None, running_var: Tensor | None, factor: float, statistics: Statistics
) -> None:
    """Moves running statistics, if there are any, by ``factor`` towards those of a batch, averaged over its samples."""
    mean, variance, count = statistics
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.mean(0).flatten(), factor)
        unbiased = (variance * (count / (count - 1))).to(running_var.dtype)
        running_var.lerp_(unbiased.mean(0).flatten(), factor)
