"""Augments a tile; what happens to it depends on its seed alone.

A recipe says how often and how strongly each step acts; a step that does not act costs nothing. First the source (a
crop larger than the tile) is warped or just cropped, then intensities change, then directions are mirrored. Intensity
steps are batchgenerators' own where those are fast; extra ones are in `extra_steps`.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from seqpar.data.sampling.augmentation_presets import ORDERS, RECIPES, AugmentationRecipe, Chance, Image, Label
from seqpar.data.sampling.extra_steps import EXTRA_STEPS
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.data.sampling.warp import Size, Warp, apply_warp, draw_offsets, rotate, rotated_size

INTENSITY_STEPS = ("noise", "blur", "brightness", "contrast", "low_resolution", "gamma_inverted", "gamma")


@dataclass(frozen=True)
class Augmentation:
    """Makes a tile from a source (a larger crop) and its label; ``augment`` builds one by name."""

    recipe: AugmentationRecipe
    tile_size: Size
    synthesis: TumourSynthesis | None = None
    order: int = 1  # of the image's interpolation
    outside_label: int = 0
    keep_background: bool = False  # voxels that are 0 in all channels stay 0

    def __post_init__(self) -> None:
        if len(self.tile_size) not in (2, 3) or min(self.tile_size) < 1:
            raise ValueError(f"a tile needs two or three sizes of at least 1, got {self.tile_size}")
        if self.order not in ORDERS.values():
            raise ValueError(f"the interpolation order must be 1 (linear) or 3 (cubic), got {self.order}")
        for step, chance in self._chances():
            if not 0 <= chance.probability <= 1 or chance.low > chance.high:
                raise ValueError(f"{step} needs a probability in 0..1 and low below high, got {chance}")

    @property
    def source_size(self) -> Size:
        """Returns the size of the largest crop that a tile may need; voxels beyond it count as outside."""
        if not self.recipe.deforms:
            return self.tile_size
        turn = self.recipe.rotation
        degrees = max(abs(turn.low), abs(turn.high)) if turn.probability else 0
        return rotated_size(self.tile_size, degrees, 0.85)  # nnU-Net's bound, which cuts off rare corners

    def needed_size(self, seed: int) -> Size:
        """Returns the size of the crop that this seed's tile needs, often that of the tile itself."""
        draws = self._draws(seed)
        if "synthesis" in draws:
            return self.source_size
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
        warp = self._warp(draws)
        if "synthesis" in draws:
            assert self.synthesis is not None
            image, label = _crop(image, label, self.source_size)
            image, label = self.synthesis(image, label, draws["synthesis"])
        image, label = _crop(image, label, self._extent(warp))
        if warp is None:
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
        rng = np.random.default_rng(seed)
        steps = [("synthesis", self.synthesis.probability if self.synthesis else 0.0)]
        for name, chance in self._chances():
            names = [f"mirror{d}" for d in range(len(self.tile_size))] if name == "mirror" else [name]
            steps += [(each, chance.probability) for each in names]
        draws: dict[str, np.random.Generator] = {}
        num_further = len(self.recipe.further)  # drawn last, so that they do not change the other draws
        for part in (steps[: len(steps) - num_further], steps[len(steps) - num_further :]):
            luck, seeds = rng.random(len(part)), rng.integers(2**63, size=len(part))
            draws |= {name: np.random.default_rng(s) for (name, share), u, s in zip(part, luck, seeds) if u < share}
        return draws

    def _warp(self, draws: dict[str, np.random.Generator]) -> Warp | None:
        """Returns the drawn deformation; None if the tile is only cropped."""
        dims, matrix, offsets = len(self.tile_size), np.eye(len(self.tile_size)), None
        if not {"rotation", "scaling", "elastic"} & draws.keys():
            return None
        if "rotation" in draws:
            turn = self.recipe.rotation
            angles = draws["rotation"].uniform(turn.low, turn.high, dims * (dims - 1) // 2)
            matrix = rotate(list(angles), dims)
        if "scaling" in draws:
            matrix = matrix * _around_one(draws["scaling"], self.recipe.scaling)
        if "elastic" in draws:
            rng, alpha = draws["elastic"], self.recipe.elastic
            offsets = draw_offsets(
                rng, self.tile_size, rng.uniform(alpha.low, alpha.high), rng.uniform(*self.recipe.elastic_sigma)
            )
        return Warp(matrix, offsets)

    def _extent(self, warp: Warp | None) -> Size:
        if warp is None:
            return self.tile_size
        return tuple(min(a, b) for a, b in zip(warp.reach(self.tile_size), self.source_size))

    def _change_intensities(self, image: Image, label: Label, draws: dict[str, np.random.Generator]) -> Image:
        further = {name: step for name, step in self.recipe.further if name in draws}
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
) -> Augmentation:
    """Returns the augmentation of that name (see ``recipe_of``) for tiles of this size."""
    return Augmentation(recipe_of(name), tuple(tile_size), synthesis, order, outside_label, keep_background)


def recipe_of(name: str) -> AugmentationRecipe:
    """Returns the recipe ``none``, ``light``, ``full`` or ``paper``, with the extra steps that follow a ``+``."""
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
