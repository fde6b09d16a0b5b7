"""Steps that a recipe has where --augment adds them: what each does, and that the other draws stay the same."""

from dataclasses import replace

import numpy as np
import pytest

from seqpar.data.sampling.augmentation import Augmentation, augment, recipe_of
from seqpar.data.sampling.augmentation_presets import AugmentationRecipe, Chance
from seqpar.data.sampling.extra_steps import EXTRA_STEPS, block_of

TILE = (18, 16, 14)


def scene() -> tuple[np.ndarray, np.ndarray]:
    """Returns two channels and a label with two classes beside background; a margin lies outside of the body."""
    image = np.random.default_rng(0).normal(0, 1, (2, *TILE)).astype(np.float32)
    label = np.zeros(TILE, np.uint8)
    label[4:9, 4:12, 3:11], label[9:13, 4:12, 3:11] = 1, 2
    image[:, :2] = 0
    return image, label


def changed(step: str, low: float, high: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns image and label of the scene, and the image after one step that always acts."""
    image, label = scene()
    always = replace(EXTRA_STEPS[step], chance=Chance(1.0, low, high))
    new, same = Augmentation(AugmentationRecipe(further=((step, always),)), TILE)(image, label, seed)
    assert np.array_equal(same, label)
    return image, label, new


def test_a_shift_is_one_number_per_class_and_channel() -> None:
    shifts = []
    for seed in range(40):
        image, label, new = changed("intensity-shift", 0.3, 0.3, seed)
        assert not new[:, :2].any(), "outside of the body nothing is added"
        for value in (0, 1, 2):
            for channel in range(2):
                added = (new - image)[channel][(label == value) & image.any(0)]
                assert np.ptp(added) < 1e-5
                shifts.append(added.mean())
    assert len({round(float(shift), 4) for shift in shifts}) > 200
    assert 0.2 < np.std(shifts) < 0.35 and np.abs(shifts).max() <= 0.6 + 1e-5


def test_a_cell_of_coarse_noise_has_a_32nd_of_the_longest_side_and_at_least_two_voxels() -> None:
    sizes = {(159, 9, 9): 4, (9, 160, 9): 5, (1023, 9, 9): 31, (9, 9, 1024): 32, (9, 9, 9): 2}
    assert {size: block_of(size) for size in sizes} == sizes


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_corruption_blanks_regions_outside_the_labels(share: float) -> None:
    shares = []
    for seed in range(20):
        image, label, new = changed("corruption", share, share, seed)
        blanked = (new == 0).all(0) & image.any(0)
        assert not blanked[label > 0].any() and np.array_equal(new[:, ~blanked], image[:, ~blanked])
        shares.append(blanked[label == 0].mean())
        inside = blanked[1:-1, 1:-1, 1:-1]
        alone = inside & ~blanked[2:, 1:-1, 1:-1] & ~blanked[:-2, 1:-1, 1:-1] & ~blanked[1:-1, 2:, 1:-1]
        assert alone.sum() < 0.2 * blanked.sum(), "regions, no scattered voxels"
    assert 0.4 * share < np.mean(shares) < 1.6 * share


def test_adding_steps_leaves_the_draws_of_the_recipe_as_they_are() -> None:
    image, label = np.random.default_rng(1).normal(0, 1, (2, 30, 30, 30)).astype(np.float32), np.zeros((30,) * 3, "u1")
    plain, more = augment("full", TILE), augment("full+intensity-shift+corruption", TILE)
    different = 0
    for seed in range(60):
        first, second = plain.plan(seed), more.plan(seed)
        assert [name for name in second if name not in EXTRA_STEPS] == list(first)
        equal = np.array_equal(plain(image, label, seed)[0], more(image, label, seed)[0])
        assert equal == (not set(second) & set(EXTRA_STEPS))
        different += not equal
    assert 10 < different < 45


@pytest.mark.parametrize("name", ["best", "light+best", "light+corruption+corruption", "light+", "corruption"])
def test_what_is_no_recipe_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(ValueError, match="none, light, full, paper|corruption, intensity-shift"):
        recipe_of(name)
