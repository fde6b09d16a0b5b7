"""The steps of preparation on arrays: normalise, resample, renumber, each next to its inverse.

Legend: ``c`` channels, ``W D H`` voxels (canonical), ``k`` classes. Every step takes the last three dims.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from seqpar.data.boxes import Array


def measure(channel: np.ndarray) -> tuple[float, float]:
    """Returns mean and standard deviation of the nonzero voxels; (0, 0) if there are none."""
    inside = channel[channel != 0].astype(np.float64)
    return (float(inside.mean()), float(inside.std())) if inside.size else (0.0, 0.0)


def measure_all(channel: np.ndarray) -> tuple[float, float]:
    """Returns mean and standard deviation of all voxels; the latter is at least 1 / sqrt(number of voxels)."""
    values = channel.astype(np.float64)
    return float(values.mean()), max(float(values.std()), 1 / float(np.sqrt(values.size)))


def normalise(channel: np.ndarray, mean: float, std: float, keep_zero: bool) -> np.ndarray:
    """Returns (x − mean) / std; with ``keep_zero``, exactly the voxels that were 0 (outside the body) are 0."""
    scaled = ((channel - mean) / std).astype(np.float32)
    if not keep_zero:
        return scaled
    scaled[scaled == 0] = np.float32(1e-9)
    return np.where(channel == 0, np.float32(0), scaled)


def denormalise(channel: np.ndarray, mean: float, std: float, keep_zero: bool) -> np.ndarray:
    """Returns x · std + mean: the inverse of `normalise` (values that CT clips before it stay clipped)."""
    values = channel.astype(np.float32) * std + mean
    return np.where(channel == 0, np.float32(0), values) if keep_zero else values


def new_shape(shape: Sequence[int], spacing: Sequence[float], target: Sequence[float]) -> tuple[int, int, int]:
    """Returns the number of voxels in each direction after a change of spacing."""
    w, d, h = (max(1, round(n * old / new)) for n, old, new in zip(shape, spacing, target))
    return w, d, h


def resample(array: Array, shape: Sequence[int], nearest: int | None = None) -> Array:
    """Returns ``(…, W, D, H)`` resampled linearly to a grid of `shape` over the same extent.

    nearest: the direction, as an index into `shape`, that takes the nearest rows instead.
    """
    for direction, size in enumerate(shape):
        dim = array.ndim - len(shape) + direction
        if array.shape[dim] != size:
            array = blend(array, dim, *neighbours(array.shape[dim], size, direction == nearest))
    return array


def neighbours(extent: int, new_extent: int, nearest: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns for each voxel of a new grid the two old ones whose centres are around it, and the weight of the second.

    Both grids span the same length; a voxel beyond the first or last centre takes that one alone. With `nearest`, each
    takes the one old voxel that it is in.
    """
    if nearest:
        rows = nearest_rows(extent, new_extent)
        return rows, rows, np.zeros(new_extent, np.float32)
    where = np.clip((np.arange(new_extent) + 0.5) * extent / new_extent - 0.5, 0, extent - 1)
    below = np.floor(where).astype(np.int64)
    return below, np.minimum(below + 1, extent - 1), (where - below).astype(np.float32)


def nearest_rows(extent: int, new_extent: int) -> np.ndarray:
    """Returns for each voxel of a new grid the old one that it is in; both grids span the same length."""
    where = extent / new_extent * (np.arange(new_extent) + 0.5) - 0.5
    return np.clip(np.floor(where + 0.5).astype(np.int64), 0, extent - 1)


def blend(array: Array, dim: int, below: np.ndarray, above: np.ndarray, weight: np.ndarray) -> Array:
    """Interpolates linearly between the rows `below` and `above` of one dim."""
    shape = (-1, *(1,) * (array.ndim - 1 - dim))
    if isinstance(array, Tensor):
        lower, upper = (array.index_select(dim, torch.from_numpy(rows).to(array.device)) for rows in (below, above))
        return lower.add_(upper.sub_(lower).mul_(torch.from_numpy(weight).to(array).view(shape)))  # both are copies
    first, second = array.take(below, dim), array.take(above, dim)
    return first + (second - first) * weight.reshape(shape)


def resample_label(label: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns a label ``(W, D, H)`` on another grid, where each voxel gets the label with the largest linear weight."""
    if tuple(shape) == label.shape:
        return label
    best = np.full(tuple(shape), -1, np.float32)
    chosen = np.zeros(tuple(shape), label.dtype)
    for value in np.unique(label):  # ties go to the smaller value
        weight = resample((label == value).astype(np.float32), shape)
        better = weight > best
        best[better], chosen[better] = weight[better], value
    return chosen


def to_ids(label: np.ndarray, values: Sequence[int], joined: Sequence[tuple[int, int]] = ()) -> np.ndarray:
    """Returns consecutive class ids: id n is the file's value ``values[n]``; all values must be declared.

    joined: pairs of a value and the one that it is read as.
    """
    most = max([*values, *(value for value, _ in joined)])
    table = np.zeros(most + 1, np.uint8 if len(values) <= 256 else np.int16)
    table[list(values)] = np.arange(len(values))
    for value, counts_as in joined:
        table[value] = table[counts_as]
    return table[label]


def to_values(ids: np.ndarray, values: Sequence[int]) -> np.ndarray:
    """Returns the file's values for class ids: the inverse of `to_ids`."""
    return np.asarray(values, np.uint8 if max(values) <= 255 else np.int32)[ids]
