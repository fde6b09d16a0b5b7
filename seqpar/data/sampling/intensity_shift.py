"""Shifts the intensities of each class by itself, so that contrast between tissues is no sure sign."""

import numpy as np

from seqpar.data.sampling.augmentation_presets import Chance, Image, Label, Step


def _change(image: Image, label: Label, strength: Chance, rng: np.random.Generator) -> Image:
    """Returns the image with a number of its own added to each class in each channel; what lies outside stays 0.

    The numbers are normal, at most two standard deviations from 0. Hou et al. multiply, since their images run from 0
    to 1; ours are normalised around 0.
    """
    inside, spread = image.any(0), rng.uniform(strength.low, strength.high)
    for value in np.unique(label):
        shift = spread * np.clip(rng.standard_normal(len(image), dtype=np.float32), -2, 2)
        image += shift.reshape(-1, *[1] * label.ndim) * (inside & (label == value))
    return image


intensity_shift = Step(_change, Chance(0.3, 0, 0.2))  # standard deviation
