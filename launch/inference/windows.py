"""Sliding windows as pure arithmetic: where they lie, how they are weighted, which rank adds up which rows.

Everything is in the volume's own coordinates: a window may reach out of the volume, where zeros are read and
nothing is kept. Rows are planes across the first direction, W.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from seqpar.layout import even_bounds

Interval = tuple[int, int]
Region = tuple[Interval, ...]  # half-open voxel interval per direction

WEIGHTS = ("gaussian", "constant")
_SIGMA, _LEAST = 0.125, 1e-3  # of the Gaussian: deviation per side of the tile, and the smallest weight


@dataclass(frozen=True)
class Sliding:
    """How windows slide and are averaged; ``mirror`` names the directions (0 W, 1 D, 2 H) to flip, in all mixtures."""

    tile: tuple[int, ...]
    overlap: float = 0.5
    weights: str = "gaussian"
    batch: int = 1
    mirror: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < 1:
            raise ValueError(f"--overlap {self.overlap}: a share of the tile in [0, 1) is needed")
        if self.weights not in WEIGHTS:
            raise ValueError(f"--weights {self.weights}: choose {' or '.join(WEIGHTS)}")
        if self.batch < 1:
            raise ValueError(f"--window-batch {self.batch}: at least one window goes through the network at a time")
        mirrors(self.mirror, len(self.tile))


def mirrors(directions: Sequence[int], num_directions: int) -> list[tuple[int, ...]]:
    """Returns all mixtures of the directions, the unflipped one first."""
    if len(set(directions)) < len(directions) or not set(directions) <= set(range(num_directions)):
        raise ValueError(f"mirror {tuple(directions)}: name each direction, 0…{num_directions - 1}, at most once")
    counts = range(len(directions) + 1)
    return [mixture for count in counts for mixture in itertools.combinations(sorted(directions), count)]


def window_starts(extent: int, tile: int, overlap: float) -> tuple[int, ...]:
    """Returns where windows start along one direction, at a fixed stride; the last is shifted back to fit.

    Where the tile is larger than the extent there is one window, and the volume lies in its middle.
    """
    if extent <= tile:
        return (-((tile - extent) // 2),)
    stride = max(1, int(tile * (1 - overlap)))
    count = -(-(extent - tile) // stride) + 1
    return tuple(min(at * stride, extent - tile) for at in range(count))


def window_weights(tile: Sequence[int], kind: str = "gaussian") -> Tensor:
    """Returns each voxel's weight in a window, in float32; no weight is smaller than a thousandth."""
    if kind == "constant":
        return torch.ones(tuple(tile))
    weights = torch.ones(())
    for side in tile:
        at = torch.arange(side, dtype=torch.float32) - (side - 1) / 2
        weights = weights[..., None] * torch.exp(at**2 / (-2 * (_SIGMA * side) ** 2))
    return weights.clamp(min=max(float(weights.min()), _LEAST))


@dataclass(frozen=True)
class WindowGrid:
    """The windows over a volume in raster order, and the slabs of rows that they complete one after another.

    A slab reaches from the start of one layer of windows to that of the next, so that it is complete when its layer
    is, and only the slabs under a window are in memory. Each is shared by all ranks, row by row.
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]  # per direction
    num_ranks: int = 1

    @classmethod
    def of(cls, shape: Sequence[int], sliding: Sliding, num_ranks: int = 1) -> "WindowGrid":
        """Returns the course of sliding windows over a volume of that shape."""
        if len(shape) != len(sliding.tile) or min(shape) < 1:
            raise ValueError(f"a volume of shape {tuple(shape)} came for windows of {sliding.tile} voxels")
        starts = tuple(window_starts(side, tile, sliding.overlap) for side, tile in zip(shape, sliding.tile))
        return cls(tuple(shape), sliding.tile, starts, num_ranks)

    @cached_property
    def corners(self) -> list[tuple[int, ...]]:
        """Where each window starts."""
        return list(itertools.product(*self.starts))

    @property
    def num_slabs(self) -> int:
        return len(self.starts[0])

    def num_finished(self, num_windows: int) -> int:
        """Returns how many slabs are complete after that many windows."""
        return num_windows // math.prod(map(len, self.starts[1:]))

    @cached_property
    def bounds(self) -> tuple[tuple[int, ...], ...]:
        """For each slab the rows at which it is cut: rank r adds up ``bounds[slab][r]…bounds[slab][r + 1]``."""
        edges = [0, *self.starts[0][1:], self.shape[0]]
        return tuple(self._shared(low, high) for low, high in itertools.pairwise(edges))

    def _shared(self, low: int, high: int) -> tuple[int, ...]:
        busy = min(high - low, self.num_ranks)
        cuts = [low + cut for cut in even_bounds(high - low, busy)]
        return (*cuts, *[high] * (self.num_ranks - busy))

    def region(self, window: int, box: Region) -> Region:
        """Returns where a window's box lies in the volume, without what reaches out of it."""
        placed = zip(self.corners[window], box, self.shape)
        return tuple((max(corner + low, 0), min(corner + high, side)) for corner, (low, high), side in placed)

    def pieces(self, window: int, box: Region, rank: int) -> Iterator[tuple[int, Region]]:
        """Returns slab and region of everything in a window's box that the rank adds up."""
        rows, *others = self.region(window, box)
        if any(low >= high for low, high in others):
            return
        for slab, bounds in enumerate(self.bounds):
            low, high = max(rows[0], bounds[rank]), min(rows[1], bounds[rank + 1])
            if low < high:
                yield slab, ((low, high), *others)


def whole_box(tile: Sequence[int]) -> Region:
    """Returns the region that is all of a window."""
    return tuple((0, side) for side in tile)


def flipped(box: Region, tile: Sequence[int], directions: Sequence[int]) -> Region:
    """Returns where a window's box lies once the window is flipped; its own inverse."""
    return tuple(
        (side - high, side - low) if direction in directions else (low, high)
        for direction, ((low, high), side) in enumerate(zip(box, tile))
    )


def within(region: Region, corner: Sequence[int]) -> tuple[slice, ...]:
    """Returns a region as slices of an array whose first voxel is ``corner``."""
    return tuple(slice(low - at, high - at) for (low, high), at in zip(region, corner))
