"""Blanks regions without labels, so that a network does not rely on any one of them (Hou et al.)."""

import numpy as np

from seqpar.data.sampling.augmentation_presets import Chance, Image, Label, Step
from seqpar.data.sampling.smooth_noise import lowest_voxels

_CELLS = 3  # along the longest direction: regions are about a third of the tile wide


def _change(image: Image, label: Label, strength: Chance, rng: np.random.Generator) -> Image:
    """Returns the image with a share of its voxels set to 0; labelled voxels are spared."""
    share = float(rng.uniform(strength.low, strength.high))
    blanked = lowest_voxels(rng, label.shape, max(2, max(label.shape) // _CELLS), share)
    image[:, blanked & (label == 0)] = 0
    return image


corruption = Step(_change, Chance(0.2, 0.05, 0.25))  # share of the voxels
