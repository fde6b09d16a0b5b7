"""Pooling and upsampling of volumes that are split into boxes; without a box grid they are torch's own.

Each takes ``(x, grid)`` and returns ``(y, grid of y)``. Legend: b batch, c channels, W D H voxels; ``/s`` after the
letter that is split over the group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.parallel.collectives import all_sum
from seqpar.parallel.device_constants import cached
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.halos import Halos
from seqpar.spatial.receptive_field import ReceptiveField, enlarging_reach, output_grid, sliding_reach

INTERPOLATING = ("linear", "bilinear", "trilinear")


class MaxPool3d(nn.MaxPool3d):
    """Applies 3D max pooling to a box, fetching its halos; any kernel, stride, padding, dilation and ``ceil_mode``.

    Args:
        ``sizes``, ``options``: as in ``torch.nn.MaxPool3d``; ``return_indices`` must be False.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        if self.return_indices:
            raise ValueError("return_indices=True would number voxels of the box, not of the volume: remove it")
        _refuse_padding(self, self.dilation)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns this rank's box of the output, ``b c W/s D/s H/s``, and its box grid."""
        sizes = self.kernel_size, self.stride, self.padding, self.dilation
        if grid is None:
            is_plain = x.ndim != 5 or not _in_one_order(x)
            return super().forward(x) if is_plain else max_pool_by_place(x, *sizes, self.ceil_mode), None
        return max_pool_box(x, grid, *sizes, self.ceil_mode, str(self))


class AvgPool3d(nn.AvgPool3d):
    """Applies 3D average pooling to a box, fetching its halos; at the volume's borders it divides by torch's count.

    Args:
        ``sizes``, ``options``: as in ``torch.nn.AvgPool3d``.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        _refuse_padding(self, 1)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns this rank's box of the output, ``b c W/s D/s H/s``, and its box grid."""
        if grid is None:
            return super().forward(x), None
        sizes = self.kernel_size, self.stride, self.padding
        options = self.ceil_mode, self.count_include_pad, self.divisor_override
        return avg_pool_box(x, grid, *sizes, *options, str(self))


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
        factors = each(self.scale_factor, 3)
        if any(factor != int(factor) or factor < 1 for factor in factors):
            raise ValueError(f"scale_factor={self.scale_factor} must be integers, so that boxes stay aligned")
        self.factors = tuple(int(factor) for factor in factors)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:  # type: ignore[override]
        """Returns this rank's box of the output, ``b c W/s D/s H/s``, and its box grid."""
        if grid is None:
            return _upsample(x, self.factors, self.mode), None
        grid.refuse_other_box(x)
        return upsample_box(x, grid, self.factors, self.mode)


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


def _max_pool(x: Tensor, *options: Any) -> Tensor:
    return max_pool_by_place(x, *options) if _in_one_order(x) else _torchs_max_pool(x)(x, *options)


def _in_one_order(x: Tensor) -> bool:
    """Returns whether gradients are to be added in one order, where torch's kernel adds them in any."""
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()


def _torchs_max_pool(x: Tensor) -> Callable[..., Any]:
    return F.max_pool2d if x.ndim == 4 else F.max_pool3d


def max_pool_by_place(x: Tensor, *options: Any) -> Tensor:
    """Pools with a deterministic gradient on a GPU, unlike torch's own kernel, which adds those of overlapping windows.

    - ``options``: torch's, from the kernel on
    """
    with torch.no_grad():
        _, places = _torchs_max_pool(x)(x, *options, return_indices=True)
    return x.flatten(2).gather(2, places.flatten(2)).view_as(places)


class GlobalMean(nn.AdaptiveAvgPool3d):
    """Averages over the whole volume; returns ``b c 1 1 1``, the same on all ranks."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, None]:  # type: ignore[override]
        """Returns the means, and None because they are not split into boxes."""
        if grid is None:
            return super().forward(x), None
        return global_mean(x, grid), None


def max_pool_box(
    x: Tensor, grid: BoxGrid, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, what: str
) -> tuple[Tensor, BoxGrid]:
    """Computes torch's max pooling of a box with its halos, in as many dimensions as ``grid`` has.

    - ``what``: names the operation in errors
    """
    grid.refuse_other_box(x)
    reaches = _pool_reaches(grid, kernel, stride, padding, dilation, ceil_mode, what)
    window = Halos.of(grid, reaches).fetch(x, -math.inf)
    pads = [reach.padding for reach in reaches]
    return _max_pool(window, kernel, stride, pads, dilation, ceil_mode), output_grid(grid, reaches)


def avg_pool_box(
    x: Tensor,
    grid: BoxGrid,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    what: str,
) -> tuple[Tensor, BoxGrid]:
    """Computes torch's average pooling of a box with its halos, in as many dimensions as ``grid`` has.

    - ``what``: names the operation in errors
    """
    grid.refuse_other_box(x)
    reaches = _pool_reaches(grid, kernel, stride, padding, 1, ceil_mode, what)
    window = Halos.of(grid, reaches).fetch(x)
    pads = [reach.padding for reach in reaches]
    n = len(grid.edges)
    along = zip(each(kernel, n), each(stride, n), each(padding, n), reaches, grid.extents, grid.place)
    counts = [_counts(k, s, p, reach, extent, place, count_include_pad) for k, s, p, reach, extent, place in along]
    divisor = divisor_override
    if divisor is None and all(len(set(count)) == 1 for count in counts):
        divisor = math.prod(count[0] for count in counts)
    pool = F.avg_pool2d if n == 2 else F.avg_pool3d
    y = pool(window, kernel, stride, pads, ceil_mode, True, 1 if divisor is None else divisor)
    if divisor is None:
        y = y / _divisors(tuple(map(tuple, counts)), y.dtype, y.device)
    return y, output_grid(grid, reaches)


def _counts(
    kernel: int, stride: int, padding: int, reach: ReceptiveField, extent: int, place: int, count_include_pad: bool
) -> list[int]:
    """Returns the divisor that torch uses along a dimension, for each of this rank's outputs."""
    low, high = (0, extent) if not count_include_pad else (-padding, extent + padding)
    begins = [o * stride - padding for o in range(reach.edges[place], reach.edges[place + 1])]
    return [min(begin + kernel, high) - max(begin, low) for begin in begins]


def upsample_box(x: Tensor, grid: BoxGrid, factors: Sequence[int], mode: str) -> tuple[Tensor, BoxGrid]:
    """Upsamples a box by integer factors, in as many dimensions as ``grid`` has; ``mode`` is torch's."""
    grid.refuse_other_box(x)
    interpolates = mode in INTERPOLATING
    reaches = [enlarging_reach(edges, f, int(interpolates and f > 1)) for edges, f in zip(grid.edges, factors)]
    y = _upsample(Halos.of(grid, reaches).fetch(x), factors, mode)
    for dim, (reach, place, factor) in enumerate(zip(reaches, grid.place, factors)):
        begin, end = reach.edges[place], reach.edges[place + 1]
        if end - begin < y.shape[dim + 2]:
            y = y.narrow(dim + 2, begin - reach.needed[place][0] * factor, end - begin)
    return y, output_grid(grid, reaches)


def _upsample(x: Tensor, factors: Sequence[int], mode: str) -> Tensor:
    interpolates = mode in INTERPOLATING
    if interpolates and _in_one_order(x):
        return upsample_trilinear(x, factors)
    align = False if interpolates else None
    return F.interpolate(x, scale_factor=[float(f) for f in factors], mode=mode, align_corners=align)


def global_mean(x: Tensor, grid: BoxGrid) -> Tensor:
    """Returns the mean of the whole volume, of extent 1 along each of its dimensions."""
    grid.refuse_other_box(x)
    fraction = math.prod(grid.sides) / math.prod(grid.extents)
    dims = tuple(range(2, x.ndim))
    mean = x.mean(dims, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    return all_sum(mean * fraction, grid.group, "statistics").to(x.dtype)


@cached(64)
def _divisors(counts: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the products of one count per output along each dimension."""
    along = [torch.tensor(count, dtype=dtype, device=device) for count in counts]
    return math.prod(torch.meshgrid(*along, indexing="ij"))  # type: ignore[return-value]


def _refuse_padding(pool: MaxPool3d | AvgPool3d, dilation: Any) -> None:
    refuse_wide_padding(pool.kernel_size, pool.padding, dilation, 3, str(pool))


def refuse_wide_padding(kernel: Any, padding: Any, dilation: Any, num_dims: int, what: str) -> None:
    """Raises ValueError for padding that torch refuses on whole volumes; on boxes torch would not notice it."""
    for k, p, d in zip(each(kernel, num_dims), each(padding, num_dims), each(dilation, num_dims)):
        if 2 * p > d * (k - 1) + 1:
            raise ValueError(f"{what}: padding must be at most half of the kernel size")


def _pool_reaches(
    grid: BoxGrid, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool, what: str
) -> list[ReceptiveField]:
    sizes = [each(size, len(grid.edges)) for size in (kernel, stride, padding, dilation)]
    return [
        sliding_reach(edges, d * (k - 1) + 1, s, (p, p), what, ceil_mode)
        for edges, k, s, p, d in zip(grid.edges, *sizes)
    ]


def each(value: Any, num_dims: int) -> tuple[Any, ...]:
    """Returns a setting of torch's for each dimension, given for each or as one for all."""
    return tuple(value) * (num_dims // len(value)) if isinstance(value, Sequence) else (value,) * num_dims
