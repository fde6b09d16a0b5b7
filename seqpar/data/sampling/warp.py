"""Rotates, scales and deforms a tile in one resampling.

A warp maps each voxel of the tile to a point in the source, the larger crop that it is sampled from. Both are given in
voxels from the middle of their array.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from seqpar.late_import import late

ndimage = late("scipy.ndimage")
Size = tuple[int, ...]


@dataclass(frozen=True)
class Warp:
    """A deformation: a matrix, then a shift in source voxels.

    - ``offsets``: if elastic, a coarse field in tile voxels ``(direction, *coarse)``, added before the matrix acts
    """

    matrix: NDArray[np.float64]
    offsets: NDArray[np.float32] | None = None
    shift: NDArray[np.float64] | None = None

    def reach(self, tile_size: Size) -> Size:
        """Returns the size of the smallest centred source, of the tile's parity, with all points of the warp."""
        half = (np.asarray(tile_size) - 1) / 2
        if self.offsets is not None:
            half = half + np.abs(self.offsets).reshape(len(tile_size), -1).max(1)
        half = np.abs(self.matrix) @ half
        if self.shift is not None:
            half = half + np.abs(self.shift)
        return match_parity(half * 2 + 1, tile_size)


def match_parity(size: Any, tile_size: Size) -> Size:
    """Returns ``size`` enlarged to at least the tile's size and to its parity, so that both have the same middle."""
    return tuple(n + 2 * max(0, int(np.ceil((s - n) / 2 - 1e-6))) for s, n in zip(size, tile_size))


def rotate(angles: list[float], dims: int) -> NDArray[np.float64]:
    """Returns the matrix that rotates in each plane in turn, by ``angles`` in degrees."""
    matrix = np.eye(dims)
    for angle, (i, j) in zip(angles, itertools.combinations(range(dims), 2)):
        rotation, radians = np.eye(dims), np.deg2rad(angle)
        rotation[i, i] = rotation[j, j] = np.cos(radians)
        rotation[i, j], rotation[j, i] = -np.sin(radians), np.sin(radians)
        matrix = rotation @ matrix
    return matrix


def sheared(coefficients: Sequence[float], dims: int) -> NDArray[np.float64]:
    """Returns the matrix that shears W by D and by H, and D by W (those that exist), as MONAI's with three numbers."""
    matrix = np.eye(dims)
    for coefficient, (i, j) in zip(coefficients, ((0, 1), (0, 2), (1, 0))):
        if max(i, j) < dims:
            matrix[i, j] = coefficient
    return matrix


def rotated_size(tile_size: Size, degrees: float, smallest_scale: float) -> Size:
    """Returns nnU-Net's source size: the tile's, rotated about one axis, divided by the smallest scale."""
    tile = np.asarray(tile_size, float)
    largest, radians = tile.copy(), np.deg2rad(min(degrees, 90))
    for i, j in itertools.combinations(range(len(tile_size)), 2):
        rotated = tile.copy()
        rotated[i] = np.cos(radians) * tile[i] + np.sin(radians) * tile[j]
        rotated[j] = np.sin(radians) * tile[i] + np.cos(radians) * tile[j]
        largest = np.maximum(largest, rotated)
    return match_parity(np.floor(largest / smallest_scale), tile_size)


def draw_offsets(rng: np.random.Generator, tile_size: Size, alpha: float, sigma: float) -> NDArray[np.float32]:
    """Returns offsets ``(direction, *coarse)``: ``alpha`` times noise blurred by ``sigma``.

    They are drawn on a coarse grid of ``sigma / 3`` voxels, enough for so smooth a field. Their standard
    deviation is that of batchgenerators, which blurs uniform noise.
    """
    step = max(1.0, sigma / 3)
    margin = int(np.ceil(3 * sigma / step))
    coarse = [int(np.ceil((n - 1) / step)) + 1 for n in tile_size]
    noise = rng.standard_normal((len(tile_size), *(n + 2 * margin for n in coarse)), dtype=np.float32)
    width = sigma / step
    smooth = ndimage.gaussian_filter(noise, [0.0, *[width] * len(tile_size)], mode="wrap", truncate=3)
    inner = (slice(None), *(slice(margin, margin + n) for n in coarse))
    coarse_std = np.sum(_kernel(width) ** 2) ** (len(tile_size) / 2)
    std = np.sqrt(1 / 3) * (2 * np.sqrt(np.pi) * sigma) ** (-len(tile_size) / 2)
    return np.ascontiguousarray(smooth[inner] * np.float32(alpha * std / coarse_std))


def _kernel(width: float) -> NDArray[np.float64]:
    reach = int(3 * width + 0.5)
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    return weights / weights.sum()


def apply_warp(
    warp: Warp, image: NDArray[np.float32], label: NDArray[Any], tile_size: Size, order: int, outside: int
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Returns the tile's image and label, sampled by the warp.

    - ``order``: of the spline for the image; the label takes the nearest voxel
    - ``outside``: the label of points outside the source, where the image is 0

    Labels of more than two bytes are sampled in float64, which has all codes of labels with doubt.
    """
    places = _places(warp, tile_size)
    source_half = [(n - 1) / 2 for n in label.shape]
    # grid_sample takes coordinates from -1 to 1, the last direction first
    grid = torch.stack([p / max(h, 0.5) for p, h in zip(places, source_half)][::-1], -1)[None]
    if order == 1:
        warped = F.grid_sample(torch.from_numpy(image)[None], grid, align_corners=True)[0].numpy()
    else:
        indices = [(p + h).numpy() for p, h in zip(places, source_half)]
        warped = np.stack([ndimage.map_coordinates(c, indices, order=order, mode="constant") for c in image])
    kind = np.float32 if label.dtype.itemsize <= 2 else np.float64
    shifted = torch.from_numpy(
        (label.astype(kind) - outside)[None, None]
    )  # so that 0, which grid_sample fills in outside, means ``outside``
    nearest = F.grid_sample(shifted, grid.to(shifted.dtype), mode="nearest", align_corners=True)[0, 0].numpy()
    return warped, (nearest + outside).astype(label.dtype)


def _places(warp: Warp, tile_size: Size) -> list[torch.Tensor]:
    """Returns the source coordinates of each voxel of the tile, one tensor per direction."""
    dims = len(tile_size)
    axes = [torch.arange(n, dtype=torch.float32) - (n - 1) / 2 for n in tile_size]
    start = [a.reshape([-1 if d == i else 1 for d in range(dims)]) for i, a in enumerate(axes)]
    if warp.offsets is not None:
        mode = "trilinear" if dims == 3 else "bilinear"
        coarse = torch.from_numpy(warp.offsets)[None]
        fields = F.interpolate(coarse, tile_size, mode=mode, align_corners=True)[0]
        start = [a + field for a, field in zip(start, fields)]
    moved = [sum((a * float(m) for a, m in zip(start, row)), torch.zeros(())) for row in warp.matrix]
    if warp.shift is not None:
        moved = [m + float(shift) for m, shift in zip(moved, warp.shift)]
    return [m.expand(tile_size) for m in moved]
