"""Augmentation recipes: how often and how strongly each step acts on a tile."""

import math
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


DEFORMATIONS = ("rotation", "scaling", "elastic", "shear", "shift")  # one resampling does them all


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
    shear: Chance = Chance()  # coefficients
    shift: Chance = Chance()  # shares of the tile's sides
    uniform_noise: Chance = Chance()  # what is added to each voxel
    quarter_turn: Chance = Chance()  # in the plane of the first two directions, whose sides must be equal
    mirror_axes: tuple[int, ...] = (0, 1, 2)
    together: bool = False  # deformations act all at once, as often as the rotation
    scales_each_side: bool = False  # by a factor of its own
    by_batchgenerators: bool = False  # its spatial transform, whose elastic strength is a share of the tile's sides
    further: tuple[tuple[str, ExtraStep], ...] = ()  # by name; they act before mirroring

    @property
    def deforms(self) -> bool:
        """Whether a tile may be interpolated."""
        return any(getattr(self, name).probability for name in DEFORMATIONS)


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
    """Returns rotation, elastic deformation and scaling by batchgenerators, as in its example of brain tumours."""
    return AugmentationRecipe(
        rotation=Chance(0.1, -15, 15),
        scaling=Chance(0.1, 0.75, 1.25),
        elastic=Chance(0.1, 0, 0.25),
        by_batchgenerators=True,
    )


def lamp() -> AugmentationRecipe:
    """Returns the deformation of LAMP's release for heads and necks (MONAI's Rand3DElastic)."""
    return AugmentationRecipe(
        rotation=Chance(0.8, -15, 15),
        scaling=Chance(0.8, 0.8, 1.2),
        elastic=Chance(0.8, 600, 1200),
        elastic_sigma=(10.0, 50.0),
        shear=Chance(0.8, -math.pi / 18, math.pi / 18),
        shift=Chance(0.8, -0.05, 0.05),
        together=True,
        scales_each_side=True,
    )


def flips() -> AugmentationRecipe:
    """Returns a flip of each direction for half of the tiles, as in the release of Hou et al."""
    return AugmentationRecipe(mirror=Chance(0.5))


def lamp_liver() -> AugmentationRecipe:
    """Returns LAMP's recipe for livers: flips and turns by 90 degrees in the plane W D, and uniform noise."""
    return AugmentationRecipe(
        mirror=Chance(0.1), mirror_axes=(0, 1), quarter_turn=Chance(0.1), uniform_noise=Chance(1.0, -0.2, 0.2)
    )


ORDERS = {"linear": 1, "cubic": 3}  # of the image's interpolation; labels take the nearest voxel
RECIPES: dict[str, Callable[[], AugmentationRecipe]] = {
    recipe.__name__.replace("_", "-"): recipe for recipe in (none, light, full, paper, lamp, lamp_liver, flips)
}
