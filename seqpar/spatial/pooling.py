"""Pooling and upsampling of volumes that are split into boxes; without a box grid they are torch's own.

Each takes ``(x, grid)`` and returns ``(y, grid of y)``. Legend: b batch, c channels, W D H voxels; ``/s`` after the
letter that is split over the group.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.parallel.collectives import all_sum
from seqpar.parallel.device_constants import cached
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.halos import Halos
from seqpar.spatial.receptive_field import ReceptiveField, enlarging_reach, output_grid, sliding_reach


class MaxPool3d(nn.MaxPool3d):
    """Applies 3D max pooling to a box, fetching its halos; any kernel, stride, padding, dilation and ``ceil_mode``.

    Args:
        ``sizes``, ``options``: as in ``torch.nn.MaxPool3d``; ``return_indices`` must be False.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        if self.return_indices:
            raise ValueError("return_indices=True would number voxels of the box, not of the volume: remove it")
        _refuse_padding(self, _three(self.dilation))

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns this rank's box of the output, ``b c W/s D/s H/s``, and its box grid."""
        if grid is None:
            return super().forward(x), None
        grid.refuse_other_box(x)
        reaches = _pool_reaches(self, _three(self.dilation), grid)
        window = Halos.of(grid, reaches).fetch(x, -math.inf)
        padding = [reach.padding for reach in reaches]
        y = F.max_pool3d(window, self.kernel_size, self.stride, padding, self.dilation, self.ceil_mode)
        return y, output_grid(grid, reaches)


class AvgPool3d(nn.AvgPool3d):
    """Applies 3D average pooling to a box, fetching its halos; at the volume's borders it divides by torch's count.

    Args:
        ``sizes``, ``options``: as in ``torch.nn.AvgPool3d``.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        _refuse_padding(self, (1, 1, 1))

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns this rank's box of the output, ``b c W/s D/s H/s``, and its box grid."""
        if grid is None:
            return super().forward(x), None
        grid.refuse_other_box(x)
        reaches = _pool_reaches(self, (1, 1, 1), grid)
        window = Halos.of(grid, reaches).fetch(x)
        padding = [reach.padding for reach in reaches]
        counts = [self._counts(dim, reach, grid) for dim, reach in enumerate(reaches)]
        divisor = self.divisor_override
        if divisor is None and all(len(set(count)) == 1 for count in counts):
            divisor = math.prod(count[0] for count in counts)
        sizes = self.kernel_size, self.stride, padding, self.ceil_mode, True
        y = F.avg_pool3d(window, *sizes, 1 if divisor is None else divisor)
        if divisor is None:
            y = y / _divisors(tuple(map(tuple, counts)), y.dtype, y.device)
        return y, output_grid(grid, reaches)

    def _counts(self, dim: int, reach: ReceptiveField, grid: BoxGrid) -> list[int]:
        """Returns the number of voxels by which torch divides along ``dim``, for each of this rank's outputs."""
        kernel, stride = _three(self.kernel_size)[dim], _three(self.stride)[dim]
        padding, extent = _three(self.padding)[dim], grid.extents[dim]
        low, high = (0, extent) if not self.count_include_pad else (-padding, extent + padding)
        at = grid.place[dim]
        begins = [o * stride - padding for o in range(reach.edges[at], reach.edges[at + 1])]
        return [min(begin + kernel, high) - max(begin, low) for begin in begins]


class Upsample(nn.Upsample):
    """Applies nearest or trilinear upsampling by integer factors to a box.

    Trilinear upsampling fetches one voxel of each neighbour.

    Args:
        ``sizes``, ``options``: as in ``torch.nn.Upsample``; give ``scale_factor``, not ``size``.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        if self.mode not in ("nearest", "nearest-exact", "trilinear"):
            raise ValueError(f"mode {self.mode!r} is not supported: use 'nearest' or 'trilinear'")
        if self.align_corners:
            raise ValueError("align_corners=True depends on the extent of the whole volume: use False")
        if self.size is not None or self.scale_factor is None:
            raise ValueError(f"size={self.size} is not supported, because boxes differ in size: give scale_factor")
        factors = _three(self.scale_factor)
        if any(factor != int(factor) or factor < 1 for factor in factors):
            raise ValueError(f"scale_factor={self.scale_factor} must be integers, so that boxes stay aligned")
        self.factors = tuple(int(factor) for factor in factors)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns this rank's box of the output, ``b c W/s D/s H/s``, and its box grid."""
        if grid is None:
            return self._upsample(x), None
        grid.refuse_other_box(x)
        interpolates = self.mode == "trilinear"
        reaches = [enlarging_reach(edges, f, int(interpolates and f > 1)) for edges, f in zip(grid.edges, self.factors)]
        window = Halos.of(grid, reaches).fetch(x)
        y = self._upsample(window)
        for dim, (reach, place, factor) in enumerate(zip(reaches, grid.place, self.factors)):
            begin, end = reach.edges[place], reach.edges[place + 1]
            if end - begin < y.shape[dim + 2]:
                y = y.narrow(dim + 2, begin - reach.needed[place][0] * factor, end - begin)
        return y, output_grid(grid, reaches)

    def _upsample(self, x: Tensor) -> Tensor:
        interpolates = self.mode == "trilinear"
        if interpolates and x.is_cuda and torch.are_deterministic_algorithms_enabled():
            return upsample_trilinear(x, self.factors)
        align = False if interpolates else None
        return F.interpolate(x, scale_factor=[float(f) for f in self.factors], mode=self.mode, align_corners=align)


def upsample_trilinear(x: Tensor, factors: Sequence[int]) -> Tensor:
    """Upsamples trilinearly with a deterministic gradient on a GPU, unlike torch's own kernel.

    torch's kernel adds gradients in the order in which its threads finish. This one computes in at least float32, as
    torch's does under autocast.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    for dim, factor in enumerate(factors, start=2):
        if factor > 1:
            before = torch.cat([y.narrow(dim, 0, 1), y.narrow(dim, 0, y.shape[dim] - 1)], dim)
            after = torch.cat([y.narrow(dim, 1, y.shape[dim] - 1), y.narrow(dim, y.shape[dim] - 1, 1)], dim)
            offsets = [
                (phase + 0.5) / factor - 0.5 for phase in range(factor)
            ]  # of the new voxels from the old voxel's centre
            phases = [torch.lerp(y, before if offset < 0 else after, abs(offset)) for offset in offsets]
            y = torch.stack(phases, dim + 1).flatten(dim, dim + 1)
    return y if torch.is_autocast_enabled(x.device.type) else y.to(x.dtype)


class GlobalMean(nn.AdaptiveAvgPool3d):
    """Averages over the whole volume; returns ``b c 1 1 1``, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        """Returns the means, and None because they are not split into boxes."""
        if grid is None:
            return super().forward(x), None
        grid.refuse_other_box(x)
        fraction = math.prod(grid.sides) / math.prod(grid.extents)
        mean = x.mean((2, 3, 4), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
        return all_sum(mean * fraction, grid.group, "statistics").to(x.dtype), None


@cached(64)
def _divisors(counts: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the products ``W D H`` of one count per output along each dimension."""
    w, d, h = (torch.tensor(count, dtype=dtype, device=device) for count in counts)
    return w[:, None, None] * d[:, None] * h


def _refuse_padding(pool: MaxPool3d | AvgPool3d, dilation: Sequence[int]) -> None:
    """Raises ValueError for padding that torch refuses on whole volumes; on boxes torch would not notice it."""
    for k, p, d in zip(_three(pool.kernel_size), _three(pool.padding), dilation):
        if 2 * p > d * (k - 1) + 1:
            raise ValueError(f"{pool}: padding must be at most half of the kernel size")


def _pool_reaches(pool: MaxPool3d | AvgPool3d, dilation: Sequence[int], grid: BoxGrid) -> list[ReceptiveField]:
    kernel, stride, padding = _three(pool.kernel_size), _three(pool.stride), _three(pool.padding)
    return [
        sliding_reach(edges, d * (k - 1) + 1, s, (p, p), str(pool), pool.ceil_mode)
        for edges, k, s, p, d in zip(grid.edges, kernel, stride, padding, dilation)
    ]


def _three(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * 3
