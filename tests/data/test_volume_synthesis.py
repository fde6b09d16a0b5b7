"""Synthesis per volume: a tile is its part of the changed case, whose tumours are as Hou et al. made them."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage

from seqpar.data.boxes import read_box
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.data.preparation.prepare_dataset import prepared
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.data.sampling.augmentation import Augmentation, augment
from seqpar.data.sampling.augmentation_presets import AugmentationRecipe, Chance
from seqpar.data.sampling.extra_steps import SmoothNoise, block_of
from seqpar.data.sampling.tiles import TileKey, TileSource
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.data.sampling.volume_synthesis import VolumeSynthesis
from seqpar.settings.command_line import parse
from seqpar.tasks.segment.data import open_data

SIZE = (72, 60, 66)


@dataclass(frozen=True)
class Case:
    id: str
    image: np.ndarray
    label: np.ndarray

    @property
    def locations(self) -> dict[int, np.ndarray]:
        return {value: np.argwhere(self.label == value) for value in (1, 2)}


def liver(name: str = "a", lesion: float = -0.4, channels: int = 1) -> Case:
    """Returns an organ (1) in darker surroundings, with a lesion (2) of that contrast."""
    grid = np.meshgrid(*(np.arange(side) - side / 2 for side in SIZE), indexing="ij")
    label = (np.sqrt(sum((g / (0.42 * side)) ** 2 for g, side in zip(grid, SIZE))) < 1).astype(np.uint8)
    label[20:34, 24:36, 24:38] = 2
    image = np.choose(label, [0.2, 1.0, 1.0 + lesion])[None].repeat(channels, 0)
    image += 0.02 * np.random.default_rng(0).standard_normal(image.shape)
    return Case(name, image.astype(np.float32), label)


def whole_as_released(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the changed case, computed at once on all of it."""
    rng, block = np.random.default_rng(seed), max(2, max(SIZE) // 32)
    share = np.clip(rng.normal(0.01, 0.01) + rng.normal(0, 0.05), 0.05, 0.25)
    coarse = rng.standard_normal([side // block for side in SIZE], dtype=np.float32).clip(-2, 2)
    enlarged = F.interpolate(torch.from_numpy(coarse)[None, None], SIZE, mode="trilinear")[0, 0].numpy()
    smooth = ndimage.uniform_filter(enlarged, block // 2 * 2 + 1)
    fake = (smooth < np.percentile(smooth, int(100 * share))) & (case.label > 0)
    real = case.label == 2
    difference = 1.15 * (case.image[:, case.label == 1].mean() - case.image[:, real].mean())
    blur = [ndimage.uniform_filter(mask.astype(np.float32), block) for mask in (real, fake)]
    label = np.where(fake, 2, np.where(real, 1, case.label))
    return case.image + difference * blur[0] - difference * blur[1], label


@pytest.fixture
def synthesis() -> VolumeSynthesis:
    return VolumeSynthesis(TumourSynthesis(probability=1.0))


def test_smooth_noise_is_enlarged_and_filtered_noise_anywhere():
    noise = SmoothNoise(np.random.default_rng(3), SIZE, 4)
    enlarged = F.interpolate(torch.from_numpy(noise.noise)[None, None], SIZE, mode="trilinear")[0, 0].numpy()
    smooth = ndimage.uniform_filter(enlarged, 5)
    everywhere = noise.at([slice(None)] * 3)
    np.testing.assert_allclose(everywhere, smooth, atol=1e-5)
    box = (slice(7, 30), slice(0, 9), slice(60, 66))
    np.testing.assert_allclose(noise.at(box), everywhere[box], atol=1e-6)
    large = SmoothNoise(np.random.default_rng(3), (300, 40, 40), 9)  # of which not every row is looked at
    assert abs(np.mean(large.at([slice(None)] * 3) < large.percentile(0.2)) - 0.2) < 0.01


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_whole_case_is_changed_as_released(synthesis, seed):
    case = liver()
    image, label = synthesis.read(case, (0, 0, 0), SIZE, 0, seed)
    expected_image, expected_label = whole_as_released(case, seed)
    same = label == expected_label
    assert same.mean() > 0.9999 and np.abs(image - expected_image)[:, same].mean() < 1e-5
    assert np.array_equal(label > 0, case.label > 0)


@pytest.mark.parametrize(
    ("first", "size"), [((10, 12, 9), (30, 24, 28)), ((-6, 40, -3), (30, 30, 30)), ((-4, -5, -6), (80, 70, 78))]
)
def test_a_box_is_a_part_of_the_changed_case(synthesis, first, size):
    case = liver()
    whole_image, whole_label = synthesis.read(case, (0, 0, 0), SIZE, 0, 5)
    image, label = synthesis.read(case, first, size, 7, 5)
    expected = read_box(whole_label, first, size, 7)
    assert np.mean(label == expected) > 0.9999 and np.array_equal(label == 7, expected == 7)
    assert np.mean(np.abs(image - read_box(whole_image, first, size, 0))) < 1e-5
    assert (read_box(case.label, first, size, 7) != label).any()


def test_the_contrast_leaves_the_real_lesion_and_is_found_in_the_fake_one(synthesis):
    case = liver()
    for seed in range(4):
        image, label = synthesis.read(case, (0, 0, 0), SIZE, 0, seed)
        fake = label == 2
        old = ndimage.binary_erosion((case.label == 2) & ~ndimage.binary_dilation(fake, iterations=3), iterations=2)
        inner = ndimage.binary_erosion(fake, iterations=2) & (case.label == 1)
        assert abs(image[0][old].mean() - 1) < 0.2 * 0.4 and (image[0][inner].mean() - 1) / -0.4 > 0.8
        assert 0.02 < fake.sum() / (case.label > 0).sum() < 0.5


@pytest.mark.parametrize("case", [
    liver("none", lesion=0.0), liver("brighter", lesion=0.4),
    Case("healthy", liver().image, np.minimum(liver().label, 1)),
    Case("no organ", liver().image, liver().label * (liver().label == 2)),
    Case("two channels", np.concatenate([liver().image, liver(lesion=0.3).image]), liver().label),
], ids=lambda case: case.id)  # fmt: skip
def test_a_case_without_darker_lesions_stays_as_it_is(synthesis, case):
    if case.id == "none":
        case.image[:, case.label == 2] = case.image[:, case.label == 1].mean()
    image, label = synthesis.read(case, (5, 5, 5), (40, 40, 40), 0, 1)
    box = (slice(5, 45),) * 3
    assert np.array_equal(image, case.image[(slice(None), *box)]) and np.array_equal(label, case.label[box])


@pytest.mark.parametrize(("darker", "changes"), [(8e-5, False), (1e-4, True)])
def test_the_least_contrast_that_is_moved_is_that_of_the_release(synthesis, darker, changes):
    """A ten-thousandth, and 1.15 times the difference of the means is looked at."""
    label = liver().label
    case = Case("faint", np.where(label == 2, 1 - darker, 1.0)[None].astype(np.float32), label)
    image, _ = synthesis.read(case, (0, 0, 0), SIZE, 0, 1)
    assert np.array_equal(image, case.image) != changes


def test_a_tile_is_drawn_of_the_changed_case_at_the_same_place(synthesis):
    case = liver()
    plain = TileSource((case,), augment("none", (32, 32, 32)), 1, 3, 0.5)
    always = replace(plain, synthesis=synthesis)
    half = replace(plain, synthesis=VolumeSynthesis(TumourSynthesis(probability=0.5)))
    keys = [TileKey(0, step, 0) for step in range(16)]
    changed = [not np.array_equal(half.draw(key).label, plain.draw(key).label) for key in keys]
    assert 2 < sum(changed) < 14
    for key in keys[:4]:
        tile, again = always.draw(key), always.draw(key)
        assert np.array_equal(tile.image, again.image) and not np.array_equal(tile.label, plain.draw(key).label)
        assert np.array_equal(tile.label > 0, plain.draw(key).label > 0)  # the organ's place tells the tile's
    deformed = replace(
        always, augmentation=Augmentation(AugmentationRecipe(rotation=Chance(1.0, -30, 30)), (32, 32, 32))
    )
    assert deformed.draw(keys[0]).label.shape == (32, 32, 32)
    assert block_of((512, 100, 512)) == 16 and block_of((40, 40, 40)) == 2


def test_the_volume_synthesis_of_a_run_is_the_one_that_the_flag_names(tmp_path):
    root = write_phantom(tmp_path, 5, PhantomSettings.of("liver", size=(32, 28, 28)))
    line = ["--data", str(root), "--cache", str(tmp_path / "cache"), "--tile", "16", "--synthesis", "1"]
    line += ["--augment", "none"]
    per_tile = open_data(parse(line, "laptop")[1], True).tiles
    per_volume = open_data(parse([*line, "--synthesis-per", "volume"], "laptop")[1], True).tiles
    assert per_tile.augmentation.synthesis and not per_tile.synthesis
    assert per_volume.synthesis and not per_volume.augmentation.synthesis
    assert per_volume.synthesis.labels == TumourSynthesis((1,), (2,), None, 1.0)
    plain = replace(per_volume, synthesis=None)
    keys = [TileKey(0, 0, j) for j in range(6)]
    own, before = ([source.draw(key) for key in keys] for source in (per_volume, plain))
    assert all(np.array_equal(a.label > 0, b.label > 0) for a, b in zip(own, before)), "the same tiles of organs"
    changed = [not np.array_equal(a.label, b.label) for a, b in zip(own, before)]
    assert any(changed), "in which other voxels are lesions"
    assert [not np.array_equal(a.image, b.image) for a, b in zip(own, before)] == changed


def test_lesions_without_an_organ_are_refused(tmp_path):
    dataset = prepared(
        write_phantom(tmp_path, 5, PhantomSettings("nnunet", (20, 20, 20))),
        tmp_path / "c",
        PrepareSettings(),
        is_first=True,
    )
    with pytest.raises(
        ValueError, match="--synthesis-per volume: Dataset999_Phantom does not label the organ around its lesions"
    ):
        VolumeSynthesis.of(dataset, 0.5)
    with pytest.raises(ValueError, match="needs a labelled organ"):
        VolumeSynthesis(TumourSynthesis((0,), (2,)))
