"""Augmentation: from the seed alone, image and label together, as often as asked."""

import multiprocessing
import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from scipy import ndimage

from seqpar.data.sampling.augmentation import Augmentation, _around_one, augment
from seqpar.data.sampling.augmentation_presets import RECIPES, AugmentationRecipe, Chance, full, light
from seqpar.data.sampling.extra_steps import EXTRA_STEPS
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.data.sampling.warp import Warp, apply_warp, draw_offsets, rotate
from seqpar.tasks.segment.data import exchanged_sides

TILE = (16, 14, 12)
STEPS = [step.name for step in fields(AugmentationRecipe) if isinstance(step.default, Chance)]
MORE = {"elastic": (0, 300), "shear": (-0.2, 0.2), "shift": (-0.1, 0.1), "uniform_noise": (-0.2, 0.2)}
ALWAYS = replace(
    full(),
    **{name: Chance(0.5, *strength) for name, strength in MORE.items()},
    further=tuple(
        (name, replace(step, chance=replace(step.chance, probability=0.7))) for name, step in EXTRA_STEPS.items()
    ),
    **{
        name: replace(getattr(full(), name), probability=0.7)
        for name in STEPS
        if name not in (*MORE, "quarter_turn")  # which needs a tile of equal sides
    },
)


def source(size: tuple[int, ...], labels: tuple[int, ...] = (0, 2, 5), channels: int = 2):
    rng = np.random.default_rng(1)
    image = ndimage.gaussian_filter(rng.standard_normal((channels, *size)), [0] + [1.0] * len(size)) * 5 + 2
    blocks = rng.choice(labels, [n // 4 + 1 for n in size])
    for direction, n in enumerate(size):
        blocks = blocks.repeat(4, direction).take(range(n), direction)
    return image.astype(np.float32), blocks.astype(np.int16)


def middle(array: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    where = tuple(slice((n - s) // 2, (n - s) // 2 + s) for n, s in zip(array.shape[-len(size) :], size))
    return array[(..., *where)]


def same(a: tuple[np.ndarray, np.ndarray], b: tuple[np.ndarray, np.ndarray]) -> bool:
    return all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b))


def only(step: str, low: float, high: float, tile: tuple[int, ...] = TILE) -> Augmentation:
    return Augmentation(AugmentationRecipe(**{step: Chance(1.0, low, high)}), tile)


def run_forked(augmentation: Augmentation, end, image, label) -> None:
    np.random.rand(7)
    end.send([augmentation(image, label, seed) for seed in range(8)])


def test_a_tile_depends_on_its_seed_alone():
    augmentation = Augmentation(ALWAYS, TILE, TumourSynthesis((0, 2), (5,)))
    image, label = source(augmentation.source_size)
    first = [augmentation(image, label, seed) for seed in range(8)]
    np.random.rand(3), random.random(), torch.rand(2)
    backwards = [augmentation(image, label, seed) for seed in reversed(range(8))][::-1]
    assert all(same(a, b) for a, b in zip(first, backwards))
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    child = fork.Process(target=run_forked, args=(augmentation, there, image, label))
    child.start()
    assert here.poll(60)
    assert all(same(a, b) for a, b in zip(first, here.recv()))
    child.join()
    assert not any(same(first[i], first[i + 1]) for i in range(7))


def test_global_random_states_stay_as_they_were():
    augmentation = Augmentation(ALWAYS, TILE)
    image, label = source(augmentation.source_size)
    np.random.seed(3), random.seed(3), torch.manual_seed(3)
    expected = np.random.rand(), random.random(), torch.rand(1).item()
    np.random.seed(3), random.seed(3), torch.manual_seed(3)
    for seed in range(4):
        augmentation(image, label, seed)
    assert (np.random.rand(), random.random(), torch.rand(1).item()) == expected


@pytest.mark.parametrize("tile", [TILE, (15, 16), (17, 13, 15)])
def test_the_needed_crop_gives_the_same_tile_as_the_largest(tile):
    augmentation = Augmentation(ALWAYS, tile, TumourSynthesis((0, 2), (5,), probability=0.2))
    image, label = source(augmentation.source_size)
    sizes = set()
    for seed in range(40):
        need = augmentation.needed_size(seed)
        sizes.add(need)
        assert all(t <= n <= s for t, n, s in zip(tile, need, augmentation.source_size))
        small = augmentation(middle(image, need).copy(), middle(label, need).copy(), seed)
        large = augmentation(image, label, seed)
        assert small[0].shape == (2, *tile) and small[1].shape == tile
        assert np.array_equal(small[1], large[1]) and np.allclose(small[0], large[0], atol=2e-4)
    assert tile in sizes and len(sizes) > 3


def test_the_source_is_as_large_as_in_nnunet():
    assert augment("full", (128, 128, 128)).source_size == (206, 206, 206)  # 205, of the tile's parity
    assert augment("none", TILE).source_size == TILE


def test_none_crops_and_nothing_changes_its_input():
    image, label = source((20, 20, 20))
    assert same(augment("none", TILE)(image, label, 5), (middle(image, TILE), middle(label, TILE)))
    augmentation = Augmentation(ALWAYS, TILE, TumourSynthesis((0, 2), (5,)))
    image, label = source(augmentation.source_size)
    kept = image.copy(), label.copy()
    for seed in range(12):
        tile, tile_label = augmentation(image, label, seed)
        tile += 1
        tile_label += 1
    assert same((image, label), kept)


@pytest.mark.parametrize("name", ["light", "full+corruption", "paper", "lamp", "lamp-liver", "flips"])
def test_each_step_acts_as_often_as_the_recipe_says(name):
    augmentation = augment(name, (4, 4, 4))
    draws = 3000
    plans = [augmentation.plan(seed) for seed in range(draws)]
    asked = dict(augmentation._chances())
    for step, chance in asked.items():
        for acted in [f"mirror{d}" for d in augmentation.recipe.mirror_axes] if step == "mirror" else [step]:
            share = np.mean([acted in plan for plan in plans])
            sigma = np.sqrt(chance.probability * (1 - chance.probability) / draws)
            assert abs(share - chance.probability) <= 4 * sigma
    if name == "full+corruption":  # and independently
        both = np.mean([{"gamma", "low_resolution"} <= set(plan) for plan in plans])
        assert abs(both - 0.3 * 0.25) < 0.02


def test_what_is_planned_is_what_happens():
    augmentation = augment("full", (6, 6, 6))
    image, label = source(augmentation.source_size)
    crop = middle(image, (6, 6, 6)), middle(label, (6, 6, 6))
    quiet = [seed for seed in range(300) if not augmentation.plan(seed)]
    assert len(quiet) > 1
    for seed in range(60):
        unchanged = np.array_equal(augmentation(image, label, seed)[0], crop[0])
        # blur and low resolution may spare all of the channels
        assert unchanged == (seed in quiet) or set(augmentation.plan(seed)) <= {"blur", "low_resolution"}
    assert all(same(augmentation(image, label, seed), crop) for seed in quiet)


@pytest.mark.parametrize("step", [name for name in STEPS if name != "quarter_turn"])
def test_each_step_acts(step):
    low, high = {
        "elastic": (800, 900),
        "rotation": (10, 30),
        "scaling": (1.2, 1.4),
        "blur": (0.5, 1),
        "noise": (0.05, 0.1),
    }.get(step, (0.6, 0.8))
    augmentation = only(step, low, high)
    image, label = source(augmentation.source_size, channels=6)
    changed, changed_label = augmentation(image, label, 3)
    crop, crop_label = middle(image, TILE), middle(label, TILE)
    assert changed.dtype == np.float32 and np.isfinite(changed).all()
    assert np.abs(changed - crop).max() > 0.05
    moves = step in ("rotation", "scaling", "elastic", "mirror", "shear", "shift")
    assert (not np.array_equal(changed_label, crop_label)) == moves


def test_strengths_stay_in_their_ranges():
    image, label = source(TILE)
    for seed in range(20):
        factor = only("brightness", 0.75, 1.25)(image, label, seed)[0] / image
        per_channel = np.median(factor, (1, 2, 3))
        assert (np.abs(per_channel - 1) <= 0.25).all() and per_channel[0] != per_channel[1]
        assert (only("noise", 0, 0.1)(image, label, seed)[0] - image).std() < 0.105
        after = only("gamma", 0.7, 1.5)(image, label, seed)[0]
        assert np.allclose(after.mean((1, 2, 3)), image.mean((1, 2, 3)), atol=1e-3)
        assert np.allclose(after.std((1, 2, 3)), image.std((1, 2, 3)), rtol=1e-3)
        scale = only("scaling", 0.7, 1.4)
        warp = scale._warp(scale._draws(seed))
        assert 0.7 <= warp.matrix[0, 0] <= 1.4 and np.allclose(warp.matrix, np.eye(3) * warp.matrix[0, 0])
    spared = [np.array_equal(only("blur", 0.5, 1)(image, label, s)[0][0], image[0]) for s in range(60)]
    assert 0.25 < np.mean(spared) < 0.75


@pytest.mark.parametrize("order", [1, 3])
def test_a_warp_equals_scipys(order):
    image, label = source((24, 26, 22))
    matrix = rotate([20, -10, 35], 3) * 0.8
    assert np.allclose(rotate([20, -10, 35], 3) @ rotate([20, -10, 35], 3).T, np.eye(3))
    warped, moved = apply_warp(Warp(matrix), image, label, TILE, order, 0)
    offset = (np.array(label.shape) - 1) / 2 - matrix @ ((np.array(TILE) - 1) / 2)
    expected = np.stack([ndimage.affine_transform(c, matrix, offset, TILE, order=order) for c in image])
    assert np.abs(warped - expected).max() < 1e-3
    nearest = ndimage.affine_transform(label, matrix, offset, TILE, order=0)
    assert np.mean(nearest != moved) < 1e-3


def test_elastic_offsets_are_as_large_as_batchgenerators():
    from batchgenerators.augmentations import utils as theirs

    np.random.seed(0)
    mesh = theirs.create_zero_centered_coordinate_mesh((64, 64, 64))
    moved = [theirs.elastic_deform_coordinates(mesh, 500, 6) - mesh for _ in range(3)]
    expected = np.mean([np.std(m[:, 18:-18, 18:-18, 18:-18]) for m in moved])
    ours = np.mean([np.std(draw_offsets(np.random.default_rng(s), (64, 64, 64), 500, 6)) for s in range(6)])
    assert abs(ours / expected - 1) < 0.1
    assert draw_offsets(np.random.default_rng(0), (33, 20), 100, 9).shape[0] == 2


def test_labels_are_never_invented_and_image_and_label_move_together():
    tile = (24, 24, 24)
    augmentation = Augmentation(
        AugmentationRecipe(Chance(1, -30, 30), Chance(1, 0.7, 1.4), Chance(1, 0, 400), mirror=Chance(0.5)), tile
    )
    label = ndimage.zoom(
        np.random.default_rng(2).integers(0, 2, [n // 7 for n in augmentation.source_size]), 8, order=0
    )
    label = (middle(label, augmentation.source_size) * 5).astype(np.int16)  # 0 and 5: between would be 1 to 4
    image = label[None].astype(np.float32)
    for seed in range(6):
        warped, moved = augmentation(image, label, seed)
        assert set(np.unique(moved)) == {0, 5} and moved.dtype == np.int16
        differ = np.mean((warped[0] > 2.5) != (moved > 2.5))
        shifted = np.mean((warped[0, 1:] > 2.5) != (moved[:-1] > 2.5))
        assert differ < 0.02 and shifted > 3 * differ  # one voxel aside would be seen


def test_outside_of_the_source_is_zero_and_marked():
    grown = Augmentation(AugmentationRecipe(scaling=Chance(1, 1.39, 1.4)), TILE, outside_label=-1)
    image, label = source(TILE)  # no more than the tile is there
    for seed in range(20):
        warped, moved = grown(image + 10, label, seed)
        assert set(np.unique(moved)) == {-1, 0, 2, 5}
        assert (moved[0] == -1).all() and (warped[:, 0] == 0).all()
        assert (warped[:, moved != -1] > 0).all()


def test_background_is_kept_where_asked():
    image, label = source(TILE)
    image[:, :5] = 0
    noise = AugmentationRecipe(noise=Chance(1, 0.1, 0.1), brightness=Chance(1, 1.1, 1.2))
    assert (Augmentation(noise, TILE)(image, label, 0)[0][:, :5] != 0).mean() > 0.9
    kept = Augmentation(noise, TILE, keep_background=True)(image, label, 0)[0]
    assert (kept[:, :5] == 0).all() and (kept[:, 5:] != image[:, 5:]).all()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="one of none, light, full, paper, lamp, lamp-liver, flips, got fulll"):
        augment("fulll", TILE)
    with pytest.raises(ValueError, match="interpolation order"):
        augment("full", TILE, order=2)
    with pytest.raises(ValueError, match="two or three sizes"):
        augment("full", (8,))
    with pytest.raises(ValueError, match="noise needs a probability"):
        Augmentation(replace(light(), noise=Chance(1.5)), TILE)
    with pytest.raises(ValueError, match="pad them"):
        augment("full", TILE)(*source((10, 14, 12)), 0)
    with pytest.raises(ValueError, match="first two sides are equal"):
        augment("lamp-liver", TILE)
    assert list(RECIPES) == ["none", "light", "full", "paper", "lamp", "lamp-liver", "flips"]


def test_strengths_of_light_and_factors_around_one() -> None:
    """Half of the factors lie below one, evenly, and half above."""
    recipe = light()
    assert (recipe.scaling.probability, recipe.scaling.low, recipe.scaling.high) == (0.1, 0.85, 1.25)
    rng = np.random.default_rng(0)
    factors = np.array([_around_one(rng, recipe.scaling) for _ in range(4000)])
    assert np.mean(factors < 1) == pytest.approx(0.5, abs=0.03)
    for part, low, high in ((factors[factors < 1], 0.85, 1.0), (factors[factors >= 1], 1.0, 1.25)):
        assert part.min() == pytest.approx(low, abs=0.002) and part.max() == pytest.approx(high, abs=0.002)
        assert part.mean() == pytest.approx((low + high) / 2, abs=0.005)


def test_labels_of_sides_that_mirroring_exchanges_are_named() -> None:
    sides = ["background", "kidney_left", "Kidney_Right", "liver", "cleft"]
    assert exchanged_sides(sides, "light+corruption") == "kidney_left and Kidney_Right"
    assert exchanged_sides(["lung L", "lung R"], "full") and not exchanged_sides(["lung L", "lung"], "full")
    assert exchanged_sides(["organ", "right"], "light") == "left and right, so that right may name either side"
    assert exchanged_sides(["background", "left atrium"], "light") == ""
    assert exchanged_sides(sides, "none") == exchanged_sides(sides, "lamp") == exchanged_sides(sides[3:], "light") == ""
