"""Removes connected components below a size."""

import math
import re
from collections.abc import Collection, Sequence

import numpy as np

from seqpar.late_import import late

ndimage = late("scipy.ndimage")


def parse_min_component(text: str, voxel_mm3: float) -> int:
    """Returns the number of voxels from which a component is kept, from "50", "50mm3" or "20voxels"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(voxels|mm3|)", text)
    if match is None:
        raise ValueError(f"--min-component {text}: give a volume in mm3, such as 50, or a count, such as 20voxels")
    voxels = float(match[1]) if match[2] == "voxels" else float(match[1]) / voxel_mm3
    return math.ceil(voxels - 1e-6)


def drop_small_components(
    ids: np.ndarray, min_voxels: int, regions: Collection[Sequence[int]] = (), regions_class_order: Sequence[int] = ()
) -> np.ndarray:
    """Returns class ids without the connected components of a region, or else of a class, below ``min_voxels``.

    Voxels that share a corner are connected. A voxel that drops out of a region gets the label of the last region in
    the order that it stays in, so that no region loses a voxel to another's filter; if there is none, background.
    """
    if min_voxels <= 1:
        return ids
    if not regions:
        regions_class_order = [value for value in np.unique(ids).tolist() if value]
        regions = [(value,) for value in regions_class_order]
    remaining, dropped = np.zeros_like(ids), np.zeros(ids.shape, bool)
    for members, label in zip(regions, regions_class_order):
        mask = np.isin(ids, members)
        components, _ = ndimage.label(mask, np.ones((3,) * ids.ndim, bool))
        is_small = np.bincount(components.reshape(-1)) < min_voxels
        is_small[0] = False  # component 0 is everything outside the mask
        dropped |= is_small[components]
        remaining[mask & ~is_small[components]] = label
    return np.where(dropped, remaining, ids)
