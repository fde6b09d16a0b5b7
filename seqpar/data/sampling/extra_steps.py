"""Extra augmentation steps, which ``--augment`` adds to a recipe as in ``light+intensity-shift``.

``corruption`` blanks regions without labels, so that a network does not rely on any one of them (Hou et al.).
``intensity-shift`` shifts each class separately, so that it does not rely on the contrast of tissues.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from seqpar.data.sampling.augmentation_presets import Chance, ExtraStep, Image, Label
from seqpar.late_import import late

ndimage = late("scipy.ndimage")
_MOST_ROWS = 128  # per direction, for the percentiles of a large volume


def block_of(size: Sequence[int]) -> int:
    """Returns the width in voxels of the coarse noise's cells, and of blurred edges (Hou et al.)."""
    return max(2, max(size) // 32)


class SmoothNoise:
    """Noise on a coarse grid, upsampled and smoothed: computes any box of it without the rest of the volume.

    Upsampling and smoothing are linear and separable, so that each is one matrix per direction.
    ``block``: the width in voxels of a cell of the coarse grid, and of the filter that smooths the upsampled noise.
    """

    def __init__(self, rng: np.random.Generator, size: Sequence[int], block: int) -> None:
        coarse = [max(1, side // block) for side in size]
        self.noise = rng.standard_normal(coarse, dtype=np.float32).clip(-2, 2)
        self._matrices = [_matrix(side, cells, block // 2 * 2 + 1) for side, cells in zip(size, coarse)]

    def at(self, rows: Sequence[slice]) -> NDArray[np.float32]:
        """Returns the values at the voxels of a box, or at some of its rows."""
        field = self.noise
        for matrix, some in zip(self._matrices, rows):  # each turn moves its direction to the end
            field = np.tensordot(field, matrix[some], (0, 1))
        return field

    def percentile(self, share: float) -> float:
        """Returns the percentile of the values at ``share``, rounded down to whole percent.

        In large volumes, only every second, third, ... row is used, since the noise changes slowly.
        """
        every = [slice(0, None, -(-len(matrix) // _MOST_ROWS)) for matrix in self._matrices]
        return float(np.percentile(self.at(every), int(100 * share)))


def lowest_voxels(rng: np.random.Generator, size: Sequence[int], block: int, share: float) -> NDArray[np.bool_]:
    """Returns the mask of the voxels with the lowest smooth noise, about ``share`` of all; ``block``: its cells."""
    noise = SmoothNoise(rng, size, block)
    lowest: NDArray[np.bool_] = noise.at([slice(None)] * len(size)) < noise.percentile(share)
    return lowest


def _matrix(side: int, cells: int, width: int) -> NDArray[np.float32]:
    """Returns the matrix (side, cells) that upsamples ``cells`` to ``side`` values and smooths them over ``width``."""
    enlarged = F.interpolate(torch.eye(cells)[None], side, mode="linear")[0].numpy().T
    smooth: NDArray[np.float32] = ndimage.uniform_filter1d(enlarged, width, axis=0)
    return smooth


_CELLS = 3  # along the longest direction; regions are about a third of the tile wide


def _blank(image: Image, label: Label, strength: Chance, rng: np.random.Generator) -> Image:
    """Returns the image with a share of its voxels set to 0, except labelled ones."""
    share = float(rng.uniform(strength.low, strength.high))
    blanked = lowest_voxels(rng, label.shape, max(2, max(label.shape) // _CELLS), share)
    image[:, blanked & (label == 0)] = 0
    return image


corruption = ExtraStep(_blank, Chance(0.2, 0.05, 0.25))  # share of the voxels


def _shift(image: Image, label: Label, strength: Chance, rng: np.random.Generator) -> Image:
    """Returns the image with a number added to each class in each channel; voxels outside stay 0.

    The numbers are normal, at most two standard deviations from 0. Hou et al. multiply instead, since their images run
    from 0 to 1; ours are normalised around 0.
    """
    inside, spread = image.any(0), rng.uniform(strength.low, strength.high)
    for value in np.unique(label):
        shift = spread * np.clip(rng.standard_normal(len(image), dtype=np.float32), -2, 2)
        image += shift.reshape(-1, *[1] * label.ndim) * (inside & (label == value))
    return image


intensity_shift = ExtraStep(_shift, Chance(0.3, 0, 0.2))  # standard deviation
EXTRA_STEPS: dict[str, ExtraStep] = {
    "corruption": corruption,
    "intensity-shift": intensity_shift,
}
