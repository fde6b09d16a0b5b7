"""How many levels a decoder has: how often the token grid is doubled to reach voxels."""

import math
from collections.abc import Sequence


def num_doublings(patch: Sequence[int]) -> int:
    """Returns L of a cubic patch of 2^L voxels a side; raises ValueError for others."""
    side = patch[0]
    if len(set(patch)) > 1 or side < 2 or side & (side - 1):
        raise ValueError(f"patch {tuple(patch)}: the convolutional decoders double the grid; use --patch 2, 4, 8 or 16")
    return int(math.log2(side))
