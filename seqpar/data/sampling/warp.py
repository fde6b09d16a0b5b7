"""Rotates, scales and deforms a tile, in one resampling.

A warp maps a voxel of the tile, counted from the tile's middle, to a place in the source, counted from the
source's middle, both in voxels.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage

Size = tuple[int, ...]


@dataclass(frozen=True)
class Warp:
    """One drawn deformation: a matrix, and per direction a coarse field of offsets in tile voxels, if any."""

    matrix: NDArray[np.float64]
    offsets: NDArray[np.float32] | None = None

    def reach(self, tile_size: Size) -> Size:
        """Returns the smallest centred source, of the tile's parity, that holds all that is looked at."""
        half = (np.asarray(tile_size) - 1) / 2
        if self.offsets is not None:
            half = half + np.abs(self.offsets).reshape(len(tile_size), -1).max(1)
        return even_with(np.abs(self.matrix) @ half * 2 + 1, tile_size)


def even_with(size: Any, tile_size: Size) -> Size:
    """Returns ``size`` enlarged until it shares its middle voxel with the tile."""
    return tuple(n + 2 * max(0, int(np.ceil((s - n) / 2 - 1e-6))) for s, n in zip(size, tile_size))


def rotate(angles: list[float], dims: int) -> NDArray[np.float64]:
    """Returns the matrix of a turn in each plane of two directions, ``angles`` in degrees."""
    whole = np.eye(dims)
    for angle, (i, j) in zip(angles, itertools.combinations(range(dims), 2)):
        turn, radians = np.eye(dims), np.deg2rad(angle)
        turn[i, i] = turn[j, j] = np.cos(radians)
        turn[i, j], turn[j, i] = -np.sin(radians), np.sin(radians)
        whole = turn @ whole
    return whole


def rotated_size(tile_size: Size, degrees: float, smallest_scale: float) -> Size:
    """Returns nnU-Net's source size: holds the tile turned about one axis, divided by the smallest scale."""
    tile = np.asarray(tile_size, float)
    largest, radians = tile.copy(), np.deg2rad(min(degrees, 90))
    for i, j in itertools.combinations(range(len(tile_size)), 2):
        turned = tile.copy()
        turned[i] = np.cos(radians) * tile[i] + np.sin(radians) * tile[j]
        turned[j] = np.sin(radians) * tile[i] + np.cos(radians) * tile[j]
        largest = np.maximum(largest, turned)
    return even_with(np.floor(largest / smallest_scale), tile_size)


def draw_offsets(rng: np.random.Generator, tile_size: Size, alpha: float, sigma: float) -> NDArray[np.float32]:
    """Returns ``(direction, *coarse)`` offsets like ``alpha`` times uniform noise that ``sigma`` blurs.

    Drawn on every fourth voxel or so: what is that smooth needs no more. The spread is batchgenerators'.
    """
    step = max(1.0, sigma / 3)
    margin = int(np.ceil(3 * sigma / step))
    coarse = [int(np.ceil((n - 1) / step)) + 1 for n in tile_size]
    noise = rng.standard_normal((len(tile_size), *(n + 2 * margin for n in coarse)), dtype=np.float32)
    width = sigma / step
    smooth = ndimage.gaussian_filter(noise, [0.0, *[width] * len(tile_size)], mode="wrap", truncate=3)
    inner = (slice(None), *(slice(margin, margin + n) for n in coarse))
    spread_here = np.sum(_kernel(width) ** 2) ** (len(tile_size) / 2)
    spread = np.sqrt(1 / 3) * (2 * np.sqrt(np.pi) * sigma) ** (-len(tile_size) / 2)
    return np.ascontiguousarray(smooth[inner] * np.float32(alpha * spread / spread_here))


def _kernel(width: float) -> NDArray[np.float64]:
    reach = int(3 * width + 0.5)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    return weights / weights.sum()


def apply_warp(
    warp: Warp, image: NDArray[np.float32], label: NDArray[Any], tile_size: Size, order: int, outside: int
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Returns tile-sized image (0 outside of the source) and label (nearest, ``outside`` there)."""
    places = _places(warp, tile_size)
    source_half = [(n - 1) / 2 for n in label.shape]
    # grid_sample counts from -1 to 1, the last direction first
    grid = torch.stack([p / max(h, 0.5) for p, h in zip(places, source_half)][::-1], -1)[None]
    if order == 1:
        warped = F.grid_sample(torch.from_numpy(image)[None], grid, align_corners=True)[0].numpy()
    else:
        where = [(p + h).numpy() for p, h in zip(places, source_half)]
        warped = np.stack([ndimage.map_coordinates(c, where, order=order, mode="constant") for c in image])
    shifted = torch.from_numpy((label.astype(np.float32) - outside)[None, None])  # so that outside is 0
    nearest = F.grid_sample(shifted, grid, mode="nearest", align_corners=True)[0, 0].numpy()
    return warped, (nearest + outside).astype(label.dtype)


def _places(warp: Warp, tile_size: Size) -> list[torch.Tensor]:
    """Returns, per direction, where in the source each voxel of the tile lies."""
    dims = len(tile_size)
    axes = [torch.arange(n, dtype=torch.float32) - (n - 1) / 2 for n in tile_size]
    start = [a.reshape([-1 if d == i else 1 for d in range(dims)]) for i, a in enumerate(axes)]
    if warp.offsets is not None:
        mode = "trilinear" if dims == 3 else "bilinear"
        coarse = torch.from_numpy(warp.offsets)[None]
        fields = F.interpolate(coarse, tile_size, mode=mode, align_corners=True)[0]
        start = [a + field for a, field in zip(start, fields)]
    moved = [sum((a * float(m) for a, m in zip(start, row)), torch.zeros(())) for row in warp.matrix]
    return [m.expand(tile_size) for m in moved]
