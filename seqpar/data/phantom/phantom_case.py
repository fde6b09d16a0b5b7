"""PhantomCase: one patient of a phantom data set, a function of (seed, case index) alone."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seqpar.data.phantom.fields import Extent

NUM_STREAMS = 4


@dataclass(frozen=True)
class PhantomCase:
    """One case: image ``(c, W, D, H)`` int16, label ``(W, D, H)`` uint8, spacing in mm."""

    image: NDArray[np.int16]
    label: NDArray[np.uint8]
    spacing: tuple[float, float, float]

    @property
    def affine(self) -> NDArray[np.float64]:
        """The matrix from voxel indices to mm, with the middle of the volume at 0."""
        affine = np.diag([*self.spacing, 1.0])
        affine[:3, 3] = [-s * (n - 1) / 2 for s, n in zip(self.spacing, self.label.shape)]
        return affine


def spacing_of(extent: Extent, size: tuple[int, int, int]) -> tuple[float, float, float]:
    """Returns the voxels' sides in mm."""
    (w, d, h), (x, y, z) = size, extent
    return x / w, y / d, z / h


def streams(seed: int, index: int, size: tuple[int, int, int]) -> list[np.random.Generator]:
    """Returns the generators of a case, so that what one draws does not shift another; refuses impossible numbers."""
    if seed < 0 or index < 0:
        raise ValueError(f"a phantom's seed and case index are 0 or more, got {seed} and {index}")
    if len(size) != 3 or min(size) < 16:
        raise ValueError(f"a phantom's size is three numbers of voxels, each 16 or more, got {size}")
    return [np.random.default_rng([seed, index, stream]) for stream in range(NUM_STREAMS)]
