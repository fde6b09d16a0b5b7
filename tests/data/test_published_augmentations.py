"""The augmentations of the papers: batchgenerators' own for brains, and LAMP's for heads, necks and livers."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import ndimage, stats

from seqpar.data.sampling.augmentation import Augmentation, augment
from seqpar.data.sampling.augmentation_presets import AugmentationRecipe, Chance, lamp, lamp_liver, paper
from seqpar.data.sampling.warp import apply_warp, sheared
from tests.data.test_augment import TILE, middle, only, same, source

DRAWS = 250


def always(recipe: AugmentationRecipe) -> AugmentationRecipe:
    """Returns the recipe whose deformations act on every tile."""
    steps = {name: replace(getattr(recipe, name), probability=1.0) for name in ("rotation", "scaling", "elastic")}
    return replace(recipe, **steps)


def test_the_papers_strengths_are_those_of_batchgenerators_example_of_brains(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgenerators.augmentations import spatial_transformations
    from batchgenerators.examples.brats2017.brats2017_dataloader_3D import get_train_transform

    example = get_train_transform(TILE).transforms[0]
    recipe = paper()
    assert recipe.rotation.probability == example.p_rot_per_sample == 0.1
    assert recipe.scaling.probability == example.p_scale_per_sample == 0.1
    assert recipe.elastic.probability == example.p_el_per_sample == 0.1
    calls = list[dict[str, Any]]()
    own = spatial_transformations.augment_spatial_2
    monkeypatch.setattr(
        spatial_transformations, "augment_spatial_2", lambda *a, **more: (calls.append(more), own(*a, **more))[1]
    )
    augmentation = Augmentation(always(recipe), TILE, order=3)
    augmentation(*source(augmentation.source_size), 0)
    (called,) = calls
    names = ("deformation_scale", "scale", "border_mode_data", "border_mode_seg", "order_data", "order_seg")
    for name in names:
        assert called[name] == getattr(example, name), name
    for name in ("angle_x", "angle_y", "angle_z"):
        assert called[name] == pytest.approx(getattr(example, name)), name


def test_batchgenerators_tile_follows_from_its_seed_and_needs_no_more_than_its_crop() -> None:
    augmentation = Augmentation(always(paper()), TILE, outside_label=-1)
    image, label = source(augmentation.source_size)
    for seed in range(6):
        np.random.seed(seed)
        first = augmentation(image, label, seed)
        np.random.seed(99)
        assert same(first, augmentation(image, label, seed))
        assert first[0].shape == (2, *TILE) and first[1].dtype == label.dtype and -1 not in first[1]
        assert not same(first, augmentation(image, label, seed + 6))
    rare = augment("paper", TILE)
    sizes = set()
    for seed in range(60):
        need = rare.needed_size(seed)
        sizes.add(need)
        small = rare(middle(image, need).copy(), middle(label, need).copy(), seed)
        large = rare(image, label, seed)
        assert np.array_equal(small[1], large[1]) and np.allclose(small[0], large[0], atol=2e-4)
    assert TILE in sizes and len(sizes) > 2
    assert need <= rare.source_size


def places(images: list[np.ndarray], voxel: tuple[int, ...]) -> np.ndarray:
    """Returns where a voxel of each tile came from, of images that hold the coordinates of a source."""
    return np.stack([image[(slice(None), *voxel)] for image in images])


@pytest.mark.started
def test_our_fast_deformation_has_the_distribution_of_batchgenerators() -> None:
    """The same strengths on a source that holds its own coordinates: where a corner and a face come from."""
    from batchgenerators.augmentations.spatial_transformations import augment_spatial

    tile, size = (24, 24, 24), 60
    ramps = np.stack(np.meshgrid(*[np.arange(size) - (size - 1) / 2] * 3, indexing="ij")).astype(np.float32)
    label, turn = np.zeros((size,) * 3, np.uint8), np.deg2rad(15)
    recipe = AugmentationRecipe(
        Chance(1, -15, 15), Chance(1, 0.75, 1.25), Chance(1, 200, 400), elastic_sigma=(5.0, 7.0)
    )
    augmentation = Augmentation(recipe, tile)
    ours = [augmentation(ramps, label, seed)[0] for seed in range(DRAWS)]
    np.random.seed(0)
    theirs = [
        augment_spatial(
            ramps[None], None, tile, 0, True, (200, 400), (5, 7), True, (-turn, turn), (-turn, turn), (-turn, turn),
            True, (0.75, 1.25), "constant", order_data=1, random_crop=False,
        )[0][0]
        for _ in range(DRAWS)
    ]  # fmt: skip
    weaker = [only("scaling", 0.75, 1.25, tile)(ramps, label, seed)[0] for seed in range(DRAWS)]
    for voxel in ((4, 4, 4), (12, 4, 12)):
        mine, others, control = (places(images, voxel) for images in (ours, theirs, weaker))
        for axis in range(3):
            assert stats.ks_2samp(mine[:, axis], others[:, axis]).pvalue > 1e-3, (voxel, axis)
        assert min(stats.ks_2samp(control[:, axis], others[:, axis]).pvalue for axis in range(3)) < 1e-6


def test_lamps_deformation_is_that_of_its_release() -> None:
    recipe = lamp()
    assert (recipe.rotation, recipe.scaling) == (Chance(0.8, -15, 15), Chance(0.8, 0.8, 1.2))
    assert (recipe.elastic, recipe.elastic_sigma) == (Chance(0.8, 600, 1200), (10, 50))
    assert recipe.shear == Chance(0.8, -np.pi / 18, np.pi / 18) and recipe.shift == Chance(0.8, -0.05, 0.05)
    augmentation = augment("lamp", TILE)
    plans = [augmentation.plan(seed) for seed in range(300)]
    assert {len(plan) for plan in plans} == {0, 5}, "all deformations act, or none"
    linear = Augmentation(replace(recipe, elastic=Chance()), (40, 40, 40))
    seeds = [seed for seed in range(1500) if linear.plan(seed)]
    warps = [linear._warp(linear._draws(seed)) for seed in seeds]
    shifts = np.stack([np.linalg.solve(warp.matrix, warp.shift) for warp in warps])
    assert 1.9 < np.abs(shifts).max() < 2 / 0.8, "a twentieth of 40 voxels, before the sides are scaled"
    factors = np.array([np.linalg.det(warp.matrix) for warp in warps])
    assert factors.min() < 0.75 and factors.max() > 1.3, "each side has its own factor"


def test_lamps_livers_are_flipped_and_turned_in_the_plane_of_the_first_two_axes_and_get_uniform_noise() -> None:
    recipe, tile = lamp_liver(), (12, 12, 8)
    assert (recipe.mirror.probability, recipe.mirror_axes, recipe.quarter_turn.probability) == (0.1, (0, 1), 0.1)
    image, label = source(tile)
    noisy, kept = augment("lamp-liver", tile)(image, label, next(s for s in range(99) if len(plan_of(s, tile)) == 1))
    assert all("uniform_noise" in plan_of(seed, tile) for seed in range(99)), "every tile gets noise"
    noise = noisy - image
    assert np.array_equal(kept, label) and np.abs(noise).max() <= 0.2 + 1e-6
    assert stats.kstest(noise.ravel()[::7], stats.uniform(-0.2, 0.4).cdf).pvalue > 1e-3
    turned = Augmentation(AugmentationRecipe(quarter_turn=Chance(1.0)), tile)
    for seed in range(30):
        got = turned(image, label, seed)
        assert np.array_equal(got[1], np.rot90(label)), "by 90 degrees, as the paper says"
        assert np.array_equal(got[0], np.rot90(image, 1, (1, 2)))


def plan_of(seed: int, tile: tuple[int, ...]) -> tuple[str, ...]:
    return augment("lamp-liver", tile).plan(seed)


def test_a_shear_is_that_of_monai_when_lamp_was_released() -> None:
    assert sheared([0.1, -0.2, 0.3], 3).tolist() == [[1, 0.1, -0.2], [0.3, 1, 0], [0, 0, 1]]
    assert sheared([0.1, -0.2, 0.3], 2).tolist() == [[1, 0.1], [0.3, 1]]


def test_lamps_warp_is_scipys_affine_transform() -> None:
    affine = Augmentation(replace(lamp(), elastic=Chance(), rotation=Chance(1.0, -15, 15)), TILE)
    image, label = source((40, 38, 36))
    seed = next(seed for seed in range(20) if affine.plan(seed))
    warp = affine._warp(affine._draws(seed))
    assert warp is not None and warp.shift is not None
    got, _ = apply_warp(warp, image, label, TILE, 1, 0)
    offset = (np.array(label.shape) - 1) / 2 + warp.shift - warp.matrix @ ((np.array(TILE) - 1) / 2)
    want = np.stack([ndimage.affine_transform(c, warp.matrix, offset, TILE, order=1) for c in image])
    assert np.abs(got - want).max() < 1e-3
