"""Removes connected components below a size."""

import math
import re
from collections.abc import Collection, Sequence

import numpy as np
from scipy import ndimage


def smallest(text: str, voxel_mm3: float) -> int:
    """Returns the voxels of the smallest component that stays, from mm3 or voxels in words."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(voxels|mm3|)", text)
    if match is None:
        raise ValueError(f"--min-component {text}: give a volume in mm3, such as 50, or a count, such as 20voxels")
    number = float(match[1]) if match[2] == "voxels" else float(match[1]) / voxel_mm3
    return math.ceil(number - 1e-6)


def drop_small(
    ids: np.ndarray, least: int, regions: Collection[Sequence[int]] = (), regions_class_order: Sequence[int] = ()
) -> np.ndarray:
    """Returns class ids without what is too small: connected voxels (corners touch) of a region, or else of a class.

    A voxel that falls out of a region gets the label of the last region in the order that it stays in, so that no
    region loses a voxel to another's filter; where it stays in none, it is background.
    """
    if least <= 1:
        return ids
    if not regions:
        regions_class_order = [value for value in np.unique(ids).tolist() if value]
        regions = [(value,) for value in regions_class_order]
    left, lost = np.zeros_like(ids), np.zeros(ids.shape, bool)
    for members, label in zip(regions, regions_class_order):
        mask = np.isin(ids, members)
        components, _ = ndimage.label(mask, np.ones((3,) * ids.ndim, bool))
        small = np.bincount(components.reshape(-1)) < least
        small[0] = False  # what lies between components
        lost |= small[components]
        left[mask & ~small[components]] = label
    return np.where(lost, left, ids)
