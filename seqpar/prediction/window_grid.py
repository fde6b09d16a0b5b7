"""Sliding windows as arithmetic: where they lie, how they weigh, whose rows they fill; nnU-Net's too."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.late_import import late
from seqpar.parallel.layout import even_bounds

ndimage = late("scipy.ndimage")
_NNUNET_SIGMA, _PEAK = 0.125, 10.0  # of the blur, as a share of the window's side; of the largest weight


def even_starts(extent: int, tile: int, overlap: float) -> tuple[int, ...]:
    """Returns where windows start along one direction: as few as overlap so much, evenly spread from end to end.

    If the tile is larger than the extent, there is one window with the volume in its middle.
    """
    if extent <= tile:
        return (-((tile - extent) // 2),)
    count = math.ceil((extent - tile) / (tile * (1 - overlap))) + 1
    return tuple(round((extent - tile) / (count - 1) * number) for number in range(count))


def blurred_point(tile: Sequence[int], kind: str = "gaussian") -> Tensor:
    """Returns each voxel's weight in a window: one point blurred, rounded to half precision, nowhere 0.

    ``kind``: "constant" for equal weights.
    """
    if kind == "constant":
        return torch.ones(tuple(tile))
    point = np.zeros(tuple(tile))
    point[tuple(side // 2 for side in tile)] = 1
    blurred = ndimage.gaussian_filter(point, [_NNUNET_SIGMA * side for side in tile], 0, mode="constant", cval=0)
    weights = torch.from_numpy(blurred / (blurred.max() / _PEAK)).half()
    weights[weights == 0] = weights[weights != 0].min()
    return weights.float()


Interval = tuple[int, int]
Region = tuple[Interval, ...]  # half-open voxel interval per direction
BYTES_AT_ONCE = 64 << 20  # of all classes' logits, where a step can take as few rows as it likes
WINDOWS = ("sliding", "whole")
DIRECTIONS = "WDH"
WEIGHTS = ("gaussian", "constant")
SUMS = ("float", "half")  # precision of the sums over windows
_SIGMA, _MIN_WEIGHT = 0.125, 1e-3  # of the Gaussian: standard deviation as a share of the tile's side


@dataclass(frozen=True)
class Sliding:
    """Settings of sliding windows.

    ``tile`` is a window's voxels, ``overlap`` the share of it that the next window covers again, ``weights`` one of
    ``WEIGHTS``, ``batch`` the windows that a sequence group predicts at once. ``mirror`` names the directions (0 W,
    1 D, 2 H) to flip, in all combinations. ``rule`` is one of ``RULES``, ``sums`` one of ``SUMS``: half rounds them to
    half precision after each window, as nnU-Net does.
    """

    tile: tuple[int, ...]
    overlap: float = 0.5
    weights: str = "gaussian"
    batch: int = 1
    mirror: tuple[int, ...] = ()
    rule: str = "stride"
    sums: str = "float"

    def __post_init__(self) -> None:
        if self.sums not in SUMS:
            raise ValueError(f"sums={self.sums!r}: choose {' or '.join(SUMS)}")
        if not 0 <= self.overlap < 1:
            raise ValueError(f"overlap={self.overlap}: give a share of the window, 0 or more and below 1")
        if self.weights not in WEIGHTS:
            raise ValueError(f"weights={self.weights!r}: choose {' or '.join(WEIGHTS)}")
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: give 1 or more windows")
        mirrors(self.mirror, len(self.tile))


def mirrored_dims(words: Sequence[str]) -> tuple[int, ...]:
    """Returns the dims that ``--mirror`` names by their letters, all where it names none; "none" stands alone."""
    if "none" in words and len(set(words)) > 1:
        raise ValueError(f"--mirror {' '.join(words)}: none and directions contradict each other")
    return tuple(dim for dim, letter in enumerate(DIRECTIONS) if letter in (words or DIRECTIONS))


def mirrors(directions: Sequence[int], num_directions: int) -> list[tuple[int, ...]]:
    """Returns all combinations of the directions to flip, the empty one first."""
    if len(set(directions)) < len(directions) or not set(directions) <= set(range(num_directions)):
        raise ValueError(f"mirror {tuple(directions)}: name each direction, 0…{num_directions - 1}, at most once")
    counts = range(len(directions) + 1)
    return [flips for count in counts for flips in itertools.combinations(sorted(directions), count)]


def window_starts(extent: int, tile: int, overlap: float) -> tuple[int, ...]:
    """Returns where windows start along one direction, at a fixed stride; the last one is shifted back to fit.

    If the tile is larger than the extent, there is one window with the volume in its middle.
    """
    if extent <= tile:
        return (-((tile - extent) // 2),)
    stride = max(1, int(tile * (1 - overlap)))
    count = -(-(extent - tile) // stride) + 1
    return tuple(min(number * stride, extent - tile) for number in range(count))


def window_weights(tile: Sequence[int], kind: str = "gaussian") -> Tensor:
    """Returns each voxel's weight in a window, in float32 and at least 0.001; ``kind`` is one of ``WEIGHTS``."""
    if kind == "constant":
        return torch.ones(tuple(tile))
    weights = torch.ones(())
    for side in tile:
        distance = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
        weights = weights[..., None] * torch.exp(distance**2 / (-2 * (_SIGMA * side) ** 2))
    return weights.clamp(min=max(float(weights.min()), _MIN_WEIGHT))


class WindowRule(NamedTuple):
    """Where windows start along a direction of an extent, by tile and overlap, and what their voxels weigh."""

    starts: Callable[[int, int, float], tuple[int, ...]]
    weights: Callable[[Sequence[int], str], Tensor]


RULES = {"stride": WindowRule(window_starts, window_weights), "nnU-Net": WindowRule(even_starts, blurred_point)}


@dataclass(frozen=True)
class WindowGrid:
    """The windows over a volume in raster order, and the slabs of rows that they complete one after another.

    A slab reaches from the start of one layer of windows to the start of the next, so it is complete when its layer
    is, and only the slabs under a window are in memory. The rows of each slab are spread over all ranks.
    ``slab_rows`` cuts slabs that have more rows into smaller ones; 0: none.
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]  # per direction
    num_ranks: int = 1
    slab_rows: int = 0

    @classmethod
    def of(cls, shape: Sequence[int], sliding: Sliding, num_ranks: int = 1) -> "WindowGrid":
        """Returns the grid of sliding windows over a volume of that shape."""
        if len(shape) != len(sliding.tile) or min(shape) < 1:
            raise ValueError(f"a volume of shape {tuple(shape)} does not fit windows of {sliding.tile} voxels")
        start = RULES[sliding.rule].starts
        starts = tuple(start(side, tile, sliding.overlap) for side, tile in zip(shape, sliding.tile))
        return cls(tuple(shape), sliding.tile, starts, num_ranks)

    @cached_property
    def corners(self) -> list[tuple[int, ...]]:
        """Where each window starts."""
        return list(itertools.product(*self.starts))

    def num_complete(self, num_windows: int) -> int:
        """Returns how many slabs are complete after the first ``num_windows`` windows."""
        layers = num_windows // math.prod(map(len, self.starts[1:]))
        end = (*self.starts[0][1:], self.shape[0])[layers - 1] if layers else 0
        return sum(bounds[-1] <= end for bounds in self.bounds)

    @cached_property
    def bounds(self) -> tuple[tuple[int, ...], ...]:
        """Where each slab is cut: rank r adds up its rows ``bounds[slab][r]`` to ``bounds[slab][r + 1]``."""
        edges = [0, *self.starts[0][1:], self.shape[0]]
        step = self.slab_rows or self.shape[0]
        return tuple(
            self._spread_rows(first, min(first + step, high))
            for low, high in itertools.pairwise(edges)
            for first in range(low, high, step)
        )

    def _spread_rows(self, low: int, high: int) -> tuple[int, ...]:
        num_busy = min(high - low, self.num_ranks)
        cuts = [low + cut for cut in even_bounds(high - low, num_busy)]
        return (*cuts, *[high] * (self.num_ranks - num_busy))

    def rows(self, slab: int, rank: int) -> Interval:
        """Returns the rows of a slab that the rank adds up."""
        return self.bounds[slab][rank], self.bounds[slab][rank + 1]

    def region(self, window: int, box: Region) -> Region:
        """Returns the part of a window's box that is inside the volume, in the volume's coordinates."""
        placed = zip(self.corners[window], box, self.shape)
        return tuple((max(corner + low, 0), min(corner + high, side)) for corner, (low, high), side in placed)

    def pieces(self, window: int, box: Region, rank: int, slabs: Sequence[int] = ()) -> Iterator[tuple[int, Region]]:
        """Yields slab and region of every piece of a window's box that the rank adds up, in some slabs or in all."""
        (first, end), *others = self.region(window, box)
        if any(low >= high for low, high in others):
            return
        for slab in slabs or range(len(self.bounds)):
            low, high = self.rows(slab, rank)
            low, high = max(first, low), min(end, high)
            if low < high:
                yield slab, ((low, high), *others)


def whole_box(tile: Sequence[int]) -> Region:
    """Returns the box that is the whole window."""
    return tuple((0, side) for side in tile)


def flipped(box: Region, tile: Sequence[int], directions: Sequence[int]) -> Region:
    """Returns where a window's box lies once the window is flipped along ``directions``; its own inverse."""
    return tuple(
        (side - high, side - low) if direction in directions else (low, high)
        for direction, ((low, high), side) in enumerate(zip(box, tile))
    )


def local_slices(region: Region, corner: Sequence[int]) -> tuple[slice, ...]:
    """Returns a region as slices of an array whose first voxel lies at ``corner``."""
    return tuple(slice(low - start, high - start) for (low, high), start in zip(region, corner))


def rows_at_once(num_classes: int, sides: Sequence[int], itemsize: int = 4) -> int:
    """Returns how many rows of ``sides`` voxels a step takes at once: as logits about ``BYTES_AT_ONCE``, at least 1."""
    return max(1, BYTES_AT_ONCE // (num_classes * math.prod(sides) * itemsize))
