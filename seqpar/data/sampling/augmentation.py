"""Augments a tile; what happens to it depends on its seed alone.

A recipe says how often and how strongly each step acts; a step that does not act costs nothing. First the source (a
crop larger than the tile) is warped or just cropped, then intensities change, then directions are mirrored. Intensity
steps are batchgenerators' own where those are fast; extra ones are in `extra_steps`.
"""

import contextlib
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from seqpar.data.sampling.augmentation_presets import (
    DEFORMATIONS,
    ORDERS,
    RECIPES,
    AugmentationRecipe,
    Chance,
    Image,
    Label,
)
from seqpar.data.sampling.extra_steps import EXTRA_STEPS
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.data.sampling.warp import (
    Size,
    Warp,
    apply_warp,
    draw_offsets,
    match_parity,
    rotate,
    rotated_size,
    sheared,
)
from seqpar.losses import SoftLabels

INTENSITY_STEPS = (
    "noise", "blur", "brightness", "contrast", "low_resolution", "gamma_inverted", "gamma", "uniform_noise",
)  # fmt: skip
# Drawn after all others, so that recipes without these steps draw what they did before there were any.
_DRAWN_LAST = ("shear", "shift", "uniform_noise", "quarter_turn")


@dataclass(frozen=True)
class Augmentation:
    """Makes a tile from a source (a larger crop) and its label; ``augment`` builds one by name."""

    recipe: AugmentationRecipe
    tile_size: Size
    synthesis: TumourSynthesis | None = None
    order: int = 1  # of the image's interpolation
    outside_label: int = 0
    keep_background: bool = False  # voxels that are 0 in all channels stay 0
    soft: SoftLabels | None = None  # what labels are codes of, if they are labels with doubt

    def __post_init__(self) -> None:
        if len(self.tile_size) not in (2, 3) or min(self.tile_size) < 1:
            raise ValueError(f"a tile needs two or three sizes of at least 1, got {self.tile_size}")
        if self.order not in ORDERS.values():
            raise ValueError(f"the interpolation order must be 1 (linear) or 3 (cubic), got {self.order}")
        if self.recipe.quarter_turn.probability and len({*self.tile_size[:2]}) > 1:
            raise ValueError(
                f"quarter turns need a tile whose first two sides are equal, got {self.tile_size}; "
                "choose such a tile, or an augmentation without them"
            )
        for step, chance in self._chances():
            if not 0 <= chance.probability <= 1 or chance.low > chance.high:
                raise ValueError(f"{step} needs a probability in 0..1 and low below high, got {chance}")

    @property
    def source_size(self) -> Size:
        """Returns the size of the largest crop that a tile may need; voxels beyond it count as outside."""
        if not self.recipe.deforms:
            return self.tile_size
        if self.recipe.by_batchgenerators:
            return self._library_extent(DEFORMATIONS)
        turn = self.recipe.rotation
        degrees = max(abs(turn.low), abs(turn.high)) if turn.probability else 0
        return rotated_size(self.tile_size, degrees, 0.85)  # nnU-Net's bound, which cuts off rare corners

    def needed_size(self, seed: int) -> Size:
        """Returns the size of the crop that this seed's tile needs, often that of the tile itself."""
        draws = self._draws(seed)
        if "synthesis" in draws:
            return self.source_size
        if self.recipe.by_batchgenerators:
            return self._library_extent(draws)
        return self._extent(self._warp(draws))

    def plan(self, seed: int) -> tuple[str, ...]:
        """Returns the names of the steps that act on this seed's tile."""
        return tuple(self._draws(seed))

    def __call__(self, image: Image, label: Label, seed: int) -> tuple[Image, Label]:
        """Returns the tile in the middle of a source; ``source_size`` and ``needed_size`` give the same tile."""
        if image.shape[1:] != label.shape or any(n < t for n, t in zip(label.shape, self.tile_size)):
            raise ValueError(
                f"a tile {self.tile_size} needs image and label of that size or larger, "
                f"got {image.shape[1:]} and {label.shape}; pad them, or choose a smaller tile"
            )
        draws = self._draws(seed)
        by_library = self.recipe.by_batchgenerators
        warp = None if by_library else self._warp(draws)
        if "synthesis" in draws:
            assert self.synthesis is not None
            image, label = _crop(image, label, self.source_size)
            image, label = self.synthesis(image, label, draws["synthesis"])
        image, label = _crop(image, label, self._library_extent(draws) if by_library else self._extent(warp))
        if by_library and draws.keys() & {*DEFORMATIONS}:
            image, label = self._deform_by_library(image, label, draws)
        elif warp is None:
            image, label = image.astype(np.float32, order="C"), label.copy()
        else:
            image, label = apply_warp(
                warp, np.ascontiguousarray(image, np.float32), label, self.tile_size, self.order, self.outside_label
            )
        image = self._change_intensities(image, label, draws)
        flips = tuple(d for d in range(len(self.tile_size)) if f"mirror{d}" in draws)
        if flips:
            image = np.ascontiguousarray(np.flip(image, tuple(d + 1 for d in flips)))
            label = np.ascontiguousarray(np.flip(label, flips))
        if "quarter_turn" in draws:
            image = np.ascontiguousarray(np.rot90(image, 1, (1, 2)))
            label = np.ascontiguousarray(np.rot90(label))
        return image, label

    def _chances(self) -> Iterator[tuple[str, Chance]]:
        for field in fields(AugmentationRecipe):
            chance = getattr(self.recipe, field.name)
            if isinstance(chance, Chance):
                yield field.name, chance
        for name, step in self.recipe.further:
            yield name, step.chance

    def _draws(self, seed: int) -> dict[str, np.random.Generator]:
        """Returns the steps that act, each with its own generator, so that no step shifts another's draws."""
        rng, further = np.random.default_rng(seed), {name for name, _ in self.recipe.further}
        parts = [[("synthesis", self.synthesis.probability if self.synthesis else 0.0)], [], []]
        for name, chance in self._chances():
            axes = [axis for axis in self.recipe.mirror_axes if axis < len(self.tile_size)]
            names = [f"mirror{axis}" for axis in axes] if name == "mirror" else [name]
            part = parts[1 if name in further else 2 if name in _DRAWN_LAST else 0]
            part += [(each, chance.probability) for each in names]
        draws: dict[str, np.random.Generator] = {}
        luck: dict[str, float] = {}
        for part in parts:
            names = [name for name, _ in part]
            luck |= dict(zip(names, rng.random(len(part))))
            for (name, share), own_seed in zip(part, rng.integers(2**63, size=len(part))):
                is_joint = self.recipe.together and name in DEFORMATIONS
                if luck["rotation" if is_joint else name] < share:
                    draws[name] = np.random.default_rng(own_seed)
        return draws

    def _warp(self, draws: dict[str, np.random.Generator]) -> Warp | None:
        """Returns the drawn deformation; None if the tile is only cropped."""
        dims, matrix = len(self.tile_size), np.eye(len(self.tile_size))
        offsets, shift = None, None
        if not draws.keys() & {*DEFORMATIONS}:
            return None
        if "rotation" in draws:
            turn = self.recipe.rotation
            angles = draws["rotation"].uniform(turn.low, turn.high, dims * (dims - 1) // 2)
            matrix = rotate(list(angles), dims)
        if "shear" in draws:
            strength = self.recipe.shear
            matrix = matrix @ sheared(list(draws["shear"].uniform(strength.low, strength.high, 3)), dims)
        if "shift" in draws:
            share = draws["shift"].uniform(self.recipe.shift.low, self.recipe.shift.high, dims)
            shift = matrix @ (share * self.tile_size)
        if "scaling" in draws:
            sides = dims if self.recipe.scales_each_side else 1
            factors = [_around_one(draws["scaling"], self.recipe.scaling) for _ in range(sides)]
            matrix = matrix * np.array(factors)
        if "elastic" in draws:
            rng, alpha = draws["elastic"], self.recipe.elastic
            offsets = draw_offsets(
                rng, self.tile_size, rng.uniform(alpha.low, alpha.high), rng.uniform(*self.recipe.elastic_sigma)
            )
        return Warp(matrix, offsets, shift)

    def _library_extent(self, acting: Iterable[str]) -> Size:
        """Returns the size of a crop in which batchgenerators finds all points, whatever it draws."""
        recipe, dims, acting = self.recipe, len(self.tile_size), {*acting} & {*DEFORMATIONS}
        half = (np.asarray(self.tile_size) - 1) / 2
        if "elastic" in acting:  # it moves points by at most half of its strength, and the middle back
            half = half + recipe.elastic.high * np.asarray(self.tile_size) / 2 + 1
        if "rotation" in acting:
            sine = np.sin(np.deg2rad(max(abs(recipe.rotation.low), abs(recipe.rotation.high))))
            for i, j in itertools.combinations(range(dims), 2):
                spread = np.eye(dims)
                spread[i, j] = spread[j, i] = sine
                half = spread @ half
        if "scaling" in acting:
            half = half * max(1.0, recipe.scaling.high)
        return match_parity(2 * half + 1, self.tile_size)

    def _deform_by_library(
        self, image: Image, label: Label, draws: dict[str, np.random.Generator]
    ) -> tuple[Image, Label]:
        """Returns the tile that batchgenerators' spatial transform makes with the steps that act.

        A code of labels with doubt goes to the nearest voxel, by its place among the codes of the source.
        """
        from batchgenerators.augmentations.spatial_transformations import augment_spatial_2

        codes, own = np.unique(label, return_inverse=True) if self.soft else (np.zeros(0, label.dtype), label)
        if self.soft and codes[0] != self.outside_label:
            codes, own = np.concatenate([[self.outside_label], codes]).astype(label.dtype), own + 1
        recipe = self.recipe
        angles = tuple(np.deg2rad((recipe.rotation.low, recipe.rotation.high)))
        first = next(name for name in DEFORMATIONS if name in draws)
        with _global_seed(int(draws[first].integers(2**32))):
            images, labels = augment_spatial_2(
                image[None].astype(np.float32),
                own.reshape(label.shape)[None, None].astype(np.float32),
                self.tile_size,
                [side // 2 for side in self.tile_size],
                do_elastic_deform="elastic" in draws,
                deformation_scale=(recipe.elastic.low, recipe.elastic.high),
                do_rotation="rotation" in draws,
                angle_x=angles,
                angle_y=angles,
                angle_z=angles,
                do_scale="scaling" in draws,
                scale=(recipe.scaling.low, recipe.scaling.high),
                border_mode_data="constant",
                order_data=self.order,
                border_mode_seg="constant",
                border_cval_seg=self.outside_label,
                order_seg=0 if self.soft else 1,
                random_crop=False,
            )
        if self.soft:
            return images[0], codes[labels[0, 0].astype(np.int64)]
        return images[0], labels[0, 0].astype(label.dtype)

    def _extent(self, warp: Warp | None) -> Size:
        if warp is None:
            return self.tile_size
        return tuple(min(a, b) for a, b in zip(warp.reach(self.tile_size), self.source_size))

    def _change_intensities(self, image: Image, label: Label, draws: dict[str, np.random.Generator]) -> Image:
        further = {name: step for name, step in self.recipe.further if name in draws}
        if further and self.soft:
            label = self.soft.consensus(label)
        acting = [name for name in (*INTENSITY_STEPS, *further) if name in draws]
        background = ~image.any(0) if acting and self.keep_background else None
        for name in acting:
            if name in further:
                image = further[name].change(image, label, further[name].chance, draws[name])
                continue
            chance = getattr(self.recipe, name)
            if name == "noise":
                spread = np.float32(draws[name].uniform(chance.low, chance.high))
                image += spread * draws[name].standard_normal(image.shape, dtype=np.float32)
            elif name == "uniform_noise":
                image += draws[name].uniform(chance.low, chance.high, image.shape).astype(np.float32)
            elif name == "low_resolution":
                _lower_resolution(image, chance, draws[name])
            else:
                with _global_seed(int(draws[name].integers(2**32))):
                    image = _transform(name, (chance.low, chance.high))(data=image[None])["data"][0]
        if background is not None:
            image[:, background] = 0
        return image


def augment(
    name: str,
    tile_size: Size,
    synthesis: TumourSynthesis | None = None,
    order: int = 1,
    outside_label: int = 0,
    keep_background: bool = False,
    soft: SoftLabels | None = None,
) -> Augmentation:
    """Returns the augmentation of that name (see ``recipe_of``) for tiles of this size."""
    return Augmentation(recipe_of(name), tuple(tile_size), synthesis, order, outside_label, keep_background, soft)


def recipe_of(name: str) -> AugmentationRecipe:
    """Returns the recipe of ``RECIPES`` that the name begins with, with the extra steps that follow a ``+``."""
    first, *more = name.split("+")
    if first not in RECIPES:
        raise ValueError(f"an augmentation is one of {', '.join(RECIPES)}, got {first}")
    for step in more:
        if step not in EXTRA_STEPS or more.count(step) > 1:
            raise ValueError(f"{first} takes the extra steps {', '.join(EXTRA_STEPS)}, each at most once; got {step}")
    return replace(RECIPES[first](), further=tuple((step, EXTRA_STEPS[step]) for step in more))


def _crop(image: Image, label: Label, size: Size) -> tuple[Image, Label]:
    """Returns the middle, at most ``size``; cuts off an even number of voxels, so that the centre stays."""
    size = tuple(min(s, n - (n - s) % 2) for s, n in zip(size, label.shape))
    middle = tuple(slice((n - s) // 2, (n - s) // 2 + s) for s, n in zip(size, label.shape))
    return image[(slice(None), *middle)], label[middle]


def _around_one(rng: np.random.Generator, chance: Chance) -> float:
    """Returns a factor that is below one in half of the draws if the range allows, as in batchgenerators."""
    if rng.random() < 0.5 and chance.low < 1:
        return rng.uniform(chance.low, min(1.0, chance.high))
    return rng.uniform(max(chance.low, 1.0), max(chance.high, 1.0))


def _lower_resolution(image: Image, chance: Chance, rng: np.random.Generator) -> None:
    """Downsamples channels by the nearest voxel and upsamples them linearly."""
    for channel in image:
        if rng.random() < 0.5:
            zoom = rng.uniform(chance.low, chance.high)
            small = [max(1, round(n * zoom)) for n in channel.shape]
            down = F.interpolate(torch.from_numpy(channel)[None, None], small, mode="nearest-exact")
            mode = "trilinear" if channel.ndim == 3 else "bilinear"
            channel[...] = F.interpolate(down, channel.shape, mode=mode)[0, 0].numpy()


def _transform(name: str, strength: tuple[float, float]) -> Any:
    """Returns batchgenerators' transform, imported late because that takes a second."""
    from batchgenerators.transforms import color_transforms as color
    from batchgenerators.transforms import noise_transforms as noise

    if name == "blur":
        return noise.GaussianBlurTransform(strength, different_sigma_per_channel=True, p_per_channel=0.5)
    if name == "brightness":
        return color.BrightnessMultiplicativeTransform(strength)
    if name == "contrast":
        return color.ContrastAugmentationTransform(strength)
    return color.GammaTransform(strength, name == "gamma_inverted", per_channel=True, retain_stats=True)


@contextlib.contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seeds the global generators that batchgenerators uses, and restores their states afterwards."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
