"""The stages in which a decoder comes from the token grid to voxels, and by how much each enlarges each direction."""

import math
from collections.abc import Sequence

Stride = tuple[int, int, int]


def strides(patch: Sequence[int], short_first: bool = True) -> tuple[Stride, ...]:
    """Returns the strides of each stage, the coarsest first: 2, or 1 along a direction that needs no doubling there.

    Raises ValueError for sides that are no powers of 2.

    - ``short_first``: a direction of few doublings has them in the first stages, so that the finest stages, where its
      voxels are the longer ones, leave it as it is; else in the last stages
    """
    if len(patch) != 3 or any(side < 1 or side & (side - 1) for side in patch) or max(patch) < 2:
        raise ValueError(
            f"patch {tuple(patch)}: the convolutional decoders double the grid; use --patch 2, 4, 8 or 16, or three "
            "such numbers, of which one or two may be 1"
        )
    doublings = [int(math.log2(side)) for side in patch]
    most = max(doublings)
    stages = []
    for stage in range(most):
        w, d, h = (2 if (stage < n if short_first else stage >= most - n) else 1 for n in doublings)
        stages.append((w, d, h))
    return tuple(stages)
