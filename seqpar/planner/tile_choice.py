"""Spacing, patch and tiles that suit a data set, by nnU-Net's rules: about as long in mm in every direction.

Legend: W D H voxels, in canonical axes.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from seqpar.data.preparation.fingerprint import Fingerprint, Millimetres, Sides
from seqpar.models.build import family_of
from seqpar.settings.config import Config

ANISOTROPIC = 3.0  # times as long as the others are voxels, from which on a direction is treated by itself
UNLIKE = 2.0  # times as long in mm as the shortest is the longest side of a tile that is called unlike the data


def target_spacing(fingerprint: Fingerprint) -> Millimetres | None:
    """Returns the voxel size to resample all cases to, None where all have the same already.

    The median; along a direction of far longer voxels and fewer of them the 10th percentile, so that few cases lose
    slices, but no less than along the others.
    """
    sizes, shapes = np.array(fingerprint.spacings), np.array(fingerprint.shapes)
    if np.allclose(sizes, sizes[0], rtol=0.01):
        return None
    target, shape = np.median(sizes, 0), np.median(shapes, 0)
    worst = int(np.argmax(target))
    others = [at for at in range(3) if at != worst]
    if target[worst] > ANISOTROPIC * target[others].max() and ANISOTROPIC * shape[worst] < shape[others].min():
        target[worst] = max(np.percentile(sizes[:, worst], 10), target[others].max())
    w, d, h = (float(f"{size:.6g}") for size in target)
    return w, d, h


def shape_at(fingerprint: Fingerprint, spacing: Sequence[float] | None) -> Sides:
    """Returns the median number of voxels of a case, resampled to ``spacing`` if there is one."""
    if spacing is None:
        return fingerprint.shape
    shapes = [
        [n * s / to for n, s, to in zip(*case, spacing)] for case in zip(fingerprint.shapes, fingerprint.spacings)
    ]
    w, d, h = (max(1, round(float(side))) for side in np.median(shapes, 0))
    return w, d, h


def cube_in_mm(voxels: float, shape: Sequence[int], spacing: Sequence[float]) -> list[float]:
    """Returns the sides of a tile of ``voxels`` voxels, as equal as the shape allows."""
    sides, fixed = list(map(float, shape)), set[int]()
    while len(fixed) < len(sides):
        free = [at for at in range(len(sides)) if at not in fixed]
        left = voxels / math.prod(sides[at] for at in fixed)
        length = (left * math.prod(spacing[at] for at in free)) ** (1 / len(free))
        short = [at for at in free if length / spacing[at] >= shape[at]]
        if not short:
            for at in free:
                sides[at] = length / spacing[at]
            break
        fixed.update(short)
    return sides


def suited_tile(voxels: float, shape: Sequence[int], spacing: Sequence[float], unit: Sequence[int]) -> Sides:
    """Returns a tile of at most about ``voxels`` voxels that suits cases of ``shape``, in multiples of ``unit``."""
    sides = cube_in_mm(voxels, shape, spacing)
    w, d, h = (max(1, min(round(side / step), -(-n // step))) * step for side, n, step in zip(sides, shape, unit))
    return w, d, h


def smaller_tiles(tile: Sequence[int], shape: Sequence[int], unit: Sequence[int]) -> Iterator[Sides]:
    """Yields a tile and ever smaller ones: the side that is longest relative to the shape loses a unit, down to two."""
    sides = list(tile)
    while True:
        w, d, h = sides
        yield w, d, h
        able = [at for at in range(3) if sides[at] > 2 * unit[at]]
        if not able:
            return
        at = max(able, key=lambda at: (sides[at] / shape[at], sides[at]))
        sides[at] -= unit[at]


def better_tile(
    tile: Sequence[int], shape: Sequence[int], spacing: Sequence[float], unit: Sequence[int]
) -> tuple[Sides, str] | None:
    """Returns an equally large tile that suits the cases better, and why; None if ``tile`` suits them."""
    better = suited_tile(math.prod(tile), shape, spacing, unit)
    for side, n, step, which in zip(tile, shape, unit, ("first", "second", "third")):
        if side > -(-n // step) * step:
            return better, f"its {which} side, {side}, is longer than theirs, {n}"
    if _unlikeness(tile, spacing) > UNLIKE and _unlikeness(better, spacing) < 0.75 * _unlikeness(tile, spacing):
        lengths = " x ".join(f"{side * size:.0f}" for side, size in zip(tile, spacing))
        return better, f"it is {lengths} mm"
    return None


def tile_advice(config: Config, shape: Sequence[int], spacing: Sequence[float]) -> str:
    """Returns a line on a better tile for cases of ``shape``, "" where the config's suits them."""
    tile, better = config.tile, better_tile(config.tile, shape, spacing, family_of(config).unit(config))
    if better is None or better[0] == tile:
        return ""
    sides, why = better
    cases = f"{'x'.join(map(str, shape))} voxels of {'x'.join(f'{size:.3g}' for size in spacing)} mm"
    return (
        f"note: --tile {' '.join(map(str, tile))}, the preset's, does not suit cases of {cases}, as {why}: "
        f"--tile {' '.join(map(str, sides))} does, or --preset auto"
    )


def _unlikeness(tile: Sequence[int], spacing: Sequence[float]) -> float:
    """Returns how many times as long in mm the longest side is as the shortest."""
    lengths = [side * size for side, size in zip(tile, spacing)]
    return max(lengths) / min(lengths)
