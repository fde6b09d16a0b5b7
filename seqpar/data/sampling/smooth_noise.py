"""Regions of random shape: where noise on a coarse grid, enlarged and smoothed, is lowest."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage


def lowest_voxels(rng: np.random.Generator, size: Sequence[int], block: int, share: float) -> NDArray[np.bool_]:
    """Returns the mask of the voxels where smooth noise is lowest; ``share`` of all in whole percent, rounded down.

    block: the width in voxels of a cell of the coarse grid and of the filter that smooths the enlarged noise.
    """
    coarse = [max(1, n // block) for n in size]
    noise = torch.from_numpy(rng.standard_normal(coarse, dtype=np.float32).clip(-2, 2))[None, None]
    mode = "trilinear" if len(size) == 3 else "bilinear"
    enlarged = F.interpolate(noise, list(size), mode=mode)[0, 0].numpy()
    smooth = ndimage.uniform_filter(enlarged, block // 2 * 2 + 1)
    lowest: NDArray[np.bool_] = smooth < np.percentile(smooth, int(100 * share))
    return lowest
