"""Augmentation recipes: how often and how strongly each step acts on a tile."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.float32]
Label = NDArray[Any]


@dataclass(frozen=True)
class Chance:
    """How often a step acts, and its range of strengths."""

    probability: float = 0.0
    low: float = 0.0
    high: float = 0.0


@dataclass(frozen=True)
class ExtraStep:
    """An extra step, which ``--augment`` adds to a recipe by name.

    ``change`` takes a tile's image ``c W D H``, its label ``W D H``, the strengths and a generator, and returns the
    image, which it may change in place. ``chance``: how often the step acts, and its range of strengths.
    """

    change: Callable[[Image, Label, Chance, np.random.Generator], Image]
    chance: Chance


@dataclass(frozen=True)
class AugmentationRecipe:
    """The steps of an augmentation in the order in which they act, then extra ones in their order."""

    rotation: Chance = Chance()  # degrees, about each axis
    scaling: Chance = Chance()  # below 1 enlarges; half of the draws are below
    elastic: Chance = Chance()  # alpha of batchgenerators
    elastic_sigma: tuple[float, float] = (9.0, 13.0)
    noise: Chance = Chance()  # standard deviation (batchgenerators calls it variance)
    blur: Chance = Chance()  # sigma in voxels; skips each channel half of the time
    brightness: Chance = Chance()
    contrast: Chance = Chance()
    low_resolution: Chance = Chance()  # zoom; skips each channel half of the time
    gamma_inverted: Chance = Chance()
    gamma: Chance = Chance()
    mirror: Chance = Chance()  # of each direction
    further: tuple[tuple[str, ExtraStep], ...] = ()  # by name; they act before mirroring

    @property
    def deforms(self) -> bool:
        """Whether a tile may be interpolated."""
        return any(step.probability for step in (self.rotation, self.scaling, self.elastic))


def none() -> AugmentationRecipe:
    """Returns the recipe that changes nothing."""
    return AugmentationRecipe()


def light() -> AugmentationRecipe:
    """Returns a cheap recipe for short runs."""
    return AugmentationRecipe(
        rotation=Chance(0.1, -15, 15),
        scaling=Chance(0.1, 0.85, 1.25),
        noise=Chance(0.1, 0, 0.05),
        brightness=Chance(0.15, 0.9, 1.1),
        mirror=Chance(0.5),
    )


def full() -> AugmentationRecipe:
    """Returns nnU-Net's default steps with its probabilities and ranges.

    nnU-Net's last step, which keeps a zero background at zero, depends on the data: see `keep_background`.
    """
    return AugmentationRecipe(
        rotation=Chance(0.2, -30, 30),
        scaling=Chance(0.2, 0.7, 1.4),
        noise=Chance(0.1, 0, 0.1),
        blur=Chance(0.2, 0.5, 1.0),
        brightness=Chance(0.15, 0.75, 1.25),
        contrast=Chance(0.15, 0.75, 1.25),
        low_resolution=Chance(0.25, 0.5, 1.0),
        gamma_inverted=Chance(0.1, 0.7, 1.5),
        gamma=Chance(0.3, 0.7, 1.5),
        mirror=Chance(0.5),
    )


def paper() -> AugmentationRecipe:
    """Returns rotation, elastic deformation and scaling, with batchgenerators' strengths for brains."""
    return AugmentationRecipe(rotation=Chance(0.2, -30, 30), scaling=Chance(0.2, 0.7, 1.4), elastic=Chance(0.2, 0, 900))


ORDERS = {"linear": 1, "cubic": 3}  # of the image's interpolation; labels take the nearest voxel
RECIPES: dict[str, Callable[[], AugmentationRecipe]] = {"none": none, "light": light, "full": full, "paper": paper}
