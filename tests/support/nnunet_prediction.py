"""nnU-Net's prediction of a case in numpy and scipy, written from a description of its steps alone.

Sums over windows are in float32, or in half precision, as nnU-Net has them.

Nothing of ours is imported: what is under test cannot agree with itself. Axes x y z: the file's reversed, transposed.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from scipy import ndimage

Predict = Callable[[torch.Tensor], torch.Tensor]


def read(paths: Sequence[Path], forward: Sequence[int]) -> tuple[np.ndarray, list[float]]:
    """Returns c x y z in float32, and the spacing."""
    images = [nibabel.load(path) for path in paths]
    data = np.stack([np.asanyarray(image.dataobj).T for image in images]).astype(np.float32)
    spacing = [float(size) for size in images[0].header.get_zooms()][::-1]
    return data.transpose(0, *(1 + axis for axis in forward)), [spacing[axis] for axis in forward]


def prepared(data: np.ndarray, spacing: list[float], plans: dict[str, Any], own: dict[str, Any]) -> tuple:
    """Returns the network's input, the crop's slices, and the crop's shape."""
    mask = ndimage.binary_fill_holes((data != 0).any(0))
    where = np.argwhere(mask)
    cut = tuple(slice(low, high + 1) for low, high in zip(where.min(0), where.max(0)))
    data, mask = data[(slice(None), *cut)].copy(), mask[cut]
    schemes = zip(own["normalization_schemes"], own["use_mask_for_norm"])
    for c, (scheme, masked) in enumerate(schemes):
        intensity, x = plans["foreground_intensity_properties_per_channel"][str(c)], data[c]
        if scheme == "CTNormalization":
            x = np.clip(x, intensity["percentile_00_5"], intensity["percentile_99_5"])
            x = (x - intensity["mean"]) / max(intensity["std"], 1e-8)
        elif scheme == "ZScoreNormalization" and masked:
            x[mask] = (x[mask] - x[mask].mean()) / max(x[mask].std(), 1e-8)
        elif scheme == "ZScoreNormalization":
            x = (x - x.mean()) / max(x.std(), 1e-8)
        elif scheme == "RescaleTo01Normalization":
            x = (x - x.min()) / np.clip((x - x.min()).max(), 1e-8, None)
        elif scheme == "RGBTo01Normalization":
            x = x / 255.0
        data[c] = x
    sides = data.shape[1:]
    shape = [int(round(old / new * n)) for old, new, n in zip(spacing, own["spacing"], sides)]
    return resampled(data, shape, spacing, own["spacing"], order=3), cut, sides


def resampled(data: np.ndarray, shape: Sequence[int], spacing: Any, new: Any, order: int) -> np.ndarray:
    if list(data.shape[1:]) == list(shape):
        return data
    axis = None
    for sizes in (spacing, new):
        if max(sizes) / min(sizes) > 3:
            longest = [at for at, size in enumerate(sizes) if size == max(sizes)]
            axis = longest[0] if len(longest) == 1 else None
            break
    return np.stack([_channel(x.astype(float), list(shape), axis, order) for x in data]).astype(data.dtype)


def _channel(x: np.ndarray, shape: list[int], axis: int | None, order: int) -> np.ndarray:
    if axis is None:
        return _zoom(x, shape, order)
    plane = [n for at, n in enumerate(shape) if at != axis]
    x = np.stack([_zoom(slice_, plane, order) for slice_ in np.moveaxis(x, axis, 0)], axis)
    grid = np.mgrid[tuple(slice(0, n) for n in shape)]
    at = [old / n * (g + 0.5) - 0.5 for old, n, g in zip(x.shape, shape, grid)]
    return ndimage.map_coordinates(x, at, order=0, mode="nearest")


def _zoom(x: np.ndarray, shape: list[int], order: int) -> np.ndarray:
    factors = [1 / (old / n) for n, old in zip(shape, x.shape)]
    return np.clip(ndimage.zoom(x, factors, order=order, mode="nearest", grid_mode=True), x.min(), x.max())


def logits(
    nets: Sequence[Predict], data: np.ndarray, tile: Sequence[int], mirror: Sequence[int], half: bool = False
) -> np.ndarray:
    """Returns k x y z: over windows, flips and folds."""
    lacking = [max(t - n, 0) for t, n in zip(tile, data.shape[1:])]
    before = [n // 2 for n in lacking]
    padded = torch.from_numpy(np.pad(data, [(0, 0), *((b, n - b) for b, n in zip(before, lacking))]))
    point = np.zeros(tuple(tile))
    point[tuple(t // 2 for t in tile)] = 1
    blurred = ndimage.gaussian_filter(point, [t / 8 for t in tile], mode="constant")
    weight = torch.from_numpy(blurred / (blurred.max() / 10)).half()
    weight[weight == 0] = weight[weight != 0].min()
    flips = [f for n in range(len(mirror) + 1) for f in itertools.combinations([2 + axis for axis in mirror], n)]
    mean, dtype = torch.zeros(()), torch.half if half else torch.float32
    for net in nets:
        total, count = torch.zeros(()), torch.zeros(padded.shape[1:], dtype=dtype)
        for corner in itertools.product(*(_starts(n, t) for n, t in zip(padded.shape[1:], tile))):
            at = tuple(slice(c, c + t) for c, t in zip(corner, tile))
            window = padded[(slice(None), *at)][None]
            with torch.no_grad():
                y = torch.stack([net(window.flip(f)).flip(f)[0] for f in flips]).mean(0)
            total = torch.zeros(len(y), *padded.shape[1:], dtype=dtype) if total.ndim == 0 else total
            total[(slice(None), *at)] += y * weight.float()
            count[at] += weight.float()
        mean = mean + (total / count if half else total / count / len(nets))
    mean = mean / len(nets) if half else mean
    return mean[(slice(None), *(slice(b, b + n) for b, n in zip(before, data.shape[1:])))].numpy()


def _starts(extent: int, tile: int) -> list[int]:
    count = int(np.ceil((extent - tile) / (tile * 0.5))) + 1
    return [0] if count == 1 else [int(np.round((extent - tile) / (count - 1) * i)) for i in range(count)]


def labels(
    nets: Sequence[Predict], paths: Sequence[Path], plans: dict[str, Any], own: dict[str, Any], mirror: Sequence[int],
    order: Sequence[int] = (), half: bool = False,
) -> np.ndarray:  # fmt: skip
    """Returns a case's label map in the file's axes; ``order``: of regions, each region's label."""
    forward = plans["transpose_forward"]
    whole, spacing = read(paths, forward)
    data, cut, sides = prepared(whole, spacing, plans, own)
    scores = resampled(logits(nets, data, own["patch_size"], mirror, half), sides, own["spacing"], spacing, order=1)
    ids = scores.argmax(0)
    if order:
        ids = np.zeros(sides, int)
        for region, value in zip(1 / (1 + np.exp(-scores.astype(float))), order):
            ids[region > 0.5] = value
    result = np.zeros(whole.shape[1:], np.uint8)
    result[cut] = ids
    return result.transpose(np.argsort(forward)).T
