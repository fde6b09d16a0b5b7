"""Sliding windows as nnU-Net lays and weighs them: evenly spread, and by a blurred point in half precision."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from seqpar.late_import import late

ndimage = late("scipy.ndimage")
_SIGMA, _PEAK = 0.125, 10.0  # of the blur, as a share of the window's side; of the largest weight


def even_starts(extent: int, tile: int, overlap: float) -> tuple[int, ...]:
    """Returns where windows start along one direction: as few as overlap so much, evenly spread from end to end.

    If the tile is larger than the extent, there is one window with the volume in its middle.
    """
    if extent <= tile:
        return (-((tile - extent) // 2),)
    count = math.ceil((extent - tile) / (tile * (1 - overlap))) + 1
    return tuple(round((extent - tile) / (count - 1) * number) for number in range(count))


def blurred_point(tile: Sequence[int], kind: str = "gaussian") -> Tensor:
    """Returns each voxel's weight in a window: one point blurred, rounded to half precision, nowhere 0.

    ``kind``: "constant" for equal weights.
    """
    if kind == "constant":
        return torch.ones(tuple(tile))
    point = np.zeros(tuple(tile))
    point[tuple(side // 2 for side in tile)] = 1
    blurred = ndimage.gaussian_filter(point, [_SIGMA * side for side in tile], 0, mode="constant", cval=0)
    weights = torch.from_numpy(blurred / (blurred.max() / _PEAK)).half()
    weights[weights == 0] = weights[weights != 0].min()
    return weights.float()
