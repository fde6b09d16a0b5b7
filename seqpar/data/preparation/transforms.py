"""The steps of preparation on arrays: crop, normalise, resample, renumber; the inverse of each beside it.

Legend: ``c`` channels, ``W D H`` voxels (canonical), ``k`` classes. Every step takes the last three dims.
"""

from collections.abc import Sequence

import numpy as np

Box = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]  # from, to (excluded) along W, D, H


def find_box(image: np.ndarray) -> Box:
    """Returns the smallest box that holds every voxel in which a channel of ``(c, W, D, H)`` is not zero."""
    found = (image != 0).any(0)
    bounds = []
    for dim in range(3):
        rows = np.flatnonzero(found.any(tuple(other for other in range(3) if other != dim)))
        bounds.append((int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, found.shape[dim]))
    return bounds[0], bounds[1], bounds[2]


def crop(array: np.ndarray, box: Box) -> np.ndarray:
    """Returns the box of ``(…, W, D, H)``, a view."""
    (w0, w1), (d0, d1), (h0, h1) = box
    return array[..., w0:w1, d0:d1, h0:h1]


def uncrop(array: np.ndarray, box: Box, shape: Sequence[int], fill: float = 0) -> np.ndarray:
    """Returns an array of `shape` with `array` in its box and `fill` elsewhere: the inverse of `crop`."""
    whole = np.full((*array.shape[:-3], *shape), fill, array.dtype)
    crop(whole, box)[...] = array
    return whole


def measure(channel: np.ndarray) -> tuple[float, float]:
    """Returns mean and deviation over the voxels that are not zero; (0, 0) where there are none."""
    inside = channel[channel != 0].astype(np.float64)
    return (float(inside.mean()), float(inside.std())) if inside.size else (0.0, 0.0)


def normalise(channel: np.ndarray, mean: float, std: float, keep_zero: bool) -> np.ndarray:
    """Returns (x − mean) / std; with `keep_zero` just what is zero (outside the body) is zero after it."""
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
    """Returns the number of voxels of another spacing over the same extent."""
    w, d, h = (max(1, round(n * old / new)) for n, old, new in zip(shape, spacing, target))
    return w, d, h


def resample(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns ``(…, W, D, H)`` on a grid of `shape` over the same extent, linearly."""
    for dim in range(3):
        array = _interpolate(array, array.ndim - 3 + dim, shape[dim], 0, shape[dim])
    return array


def resample_slab(array: np.ndarray, shape: Sequence[int], start: int, stop: int) -> np.ndarray:
    """Returns rows start to stop along W of `resample`, without computing the others."""
    array = _interpolate(array, array.ndim - 3, shape[0], start, stop)
    for dim in (1, 2):
        array = _interpolate(array, array.ndim - 3 + dim, shape[dim], 0, shape[dim])
    return array


def resample_label(label: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns ``(W, D, H)`` on another grid; each voxel gets the label with most weight, never a new one."""
    if tuple(shape) == label.shape:
        return label
    best = np.full(tuple(shape), -1, np.float32)
    chosen = np.zeros(tuple(shape), label.dtype)
    for value in np.unique(label):  # ties go to the smaller value
        weight = resample((label == value).astype(np.float32), shape)
        better = weight > best
        best[better], chosen[better] = weight[better], value
    return chosen


def to_ids(label: np.ndarray, values: Sequence[int]) -> np.ndarray:
    """Returns consecutive class ids: id n stands for the file's value ``values[n]``; all must be declared."""
    table = np.zeros(max(values) + 1, np.uint8 if len(values) <= 256 else np.int16)
    table[list(values)] = np.arange(len(values))
    return table[label]


def to_values(ids: np.ndarray, values: Sequence[int]) -> np.ndarray:
    """Returns the file's values for class ids: the inverse of `to_ids`."""
    return np.asarray(values, np.uint8 if max(values) <= 255 else np.int32)[ids]


def _interpolate(array: np.ndarray, dim: int, size: int, start: int, stop: int) -> np.ndarray:
    """Returns rows start to stop of `size` along one dim, linearly between voxel centres, edges held."""
    old = array.shape[dim]
    if old == size:
        return array[(slice(None),) * dim + (slice(start, stop),)]
    where = np.clip((np.arange(start, stop) + 0.5) * old / size - 0.5, 0, old - 1)
    low = np.floor(where).astype(int)
    weight = (where - low).astype(np.float32).reshape(-1, *(1,) * (array.ndim - 1 - dim))
    below, above = array.take(low, dim), array.take(np.minimum(low + 1, old - 1), dim)
    return below + (above - below) * weight
