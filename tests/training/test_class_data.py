"""Volumes as classifiers take them: cut to their middle or padded, alike in training, prediction and maps; presets."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqpar.data.formats.dataset import VolumeClasses
from seqpar.data.sampling.tiles import TileKey
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.resattnet import ResAttNet
from seqpar.losses.loss import Loss
from seqpar.losses.terms import CrossEntropy
from seqpar.models.classifier import VolumeClassifier
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import learning_rate
from seqpar.parallel.mesh import Group
from seqpar.parallel.rendezvous import start
from seqpar.settings.config import Config
from seqpar.settings.presets import PRESETS
from seqpar.tasks.classify.data import ClassData, open_class_data, summary_of_classes
from seqpar.tasks.classify.explanation import crop_or_pad, explain
from seqpar.tasks.classify.validation import ClassValidation
from seqpar.tasks.training_data import TrainingData, mirrors_sides
from seqpar.training.setup import data_that_changed
from tests.support.class_folders import SHAPE, class_folder, volume
from tests.support.folders import save

TILE = (24, 32, 16)  # of volumes of 40 x 24 x 16: W is cut, D is padded


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> ClassData:
    root = tmp_path_factory.mktemp("classes")
    folder = class_folder(root / "data", 5)
    where = {"data": str(folder), "cache": str(root / "cache"), "fold": "all"}
    return open_class_data(Config(task="classify", network="resattnet18", tile=(), augment="none", **where), True)


def test_a_tile_is_the_middle_of_a_volume_or_it_is_padded(data: ClassData) -> None:
    assert data.tiles.tile_size == SHAPE, "left open, it holds every case"
    tiles = data.with_tiles(Config(task="classify", tile=TILE, augment="none")).tiles
    middles = {name: np.zeros((1, *TILE), np.float32) for name in data.train_ids}
    for name, middle in middles.items():
        middle[:, :, 4:28] = np.asarray(data.dataset.cases[name].image)[:, 8:32]
        assert np.array_equal(crop_or_pad(data.dataset.cases[name].image, TILE), middle), "as in prediction"
    drawn = [tiles.draw(TileKey(0, step, 0)).image for step in range(12)]
    names = [[name for name, middle in middles.items() if np.array_equal(image, middle)] for image in drawn]
    assert all(len(own) == 1 for own in names) and len({own[0] for own in names}) > 2


def test_data_that_changed_since_a_run_was_last_started_are_named(tmp_path: Path) -> None:
    folder = class_folder(tmp_path / "data", 6)
    where = {"data": str(folder), "cache": str(tmp_path / "cache"), "fold": "all"}
    config = Config(task="classify", network="resattnet18", tile=(), augment="none", **where)

    def described() -> dict[str, Any]:
        data = open_class_data(config, True)
        return {**data.describe(), "digests": data.digests()}

    began = described()
    save(folder / "c_01.nii.gz", volume(9, True))
    (folder / "c_00.nii.gz").touch()
    (folder / "c_04.nii.gz").rename(folder / "c_07.nii.gz")
    (folder / "labels.csv").write_text((folder / "labels.csv").read_text().replace("c_04", "c_07"))
    now = described()
    cases = "1 case changed, such as c_01; 1 case added, such as c_07; 1 case removed, such as c_04"
    (said,) = data_that_changed(began, now)
    assert said.endswith(f"the data are not those with which this run was last started: {cases}")
    assert data_that_changed(began, began) == data_that_changed({}, now) == []
    table = (folder / "labels.csv").read_text()
    (folder / "labels.csv").write_text(table.replace("c_02,healthy", "c_02,ill"))
    assert "1 case changed, such as c_02" in data_that_changed(now, described())[0]


def test_a_split_or_a_preparation_that_changed_is_not_called_other_data() -> None:
    every = {"digests": {case: case for case in "abcde"}, "recipe": {"spacing": (1, 1)}}
    began = {**every, "train": ["a", "b"], "held_out": ["c"], "test": ["d"]}
    now = {**every, "train": ["a"], "held_out": ["c", "d"], "test": ["e"]}
    split = "the split is not the one with which this run was last started: "
    (said,) = data_that_changed(began, now)
    assert said == (
        f"{split}1 case that was trained on is now left out, such as b; 1 case that was kept for tests is now held "
        "out, such as d; 1 case that was left out is now kept for tests, such as e"
    )
    of_used = {**began, "digests": {case: case for case in "abc"}, "recipe": {"spacing": [1, 1]}}
    assert data_that_changed(of_used, began) == [], "as earlier versions recorded them"
    both = {**every, "train": ["a", "b"], "held_out": ["a", "b"]}
    fewer = {**every, "train": ["c"], "held_out": ["a", "b"]}
    assert "2 cases that were trained on and held out are now held out, such as a" in data_that_changed(both, fewer)[0]
    other = {**began, "digests": dict.fromkeys("abcde", "new"), "recipe": {"spacing": (2, 2)}}
    prepared = "the data are not prepared as they were when this run was last started"
    assert data_that_changed(began, other) == [prepared]
    scans = {case: case for case in "abcde"}
    lines = data_that_changed({**began, "files": scans}, {**other, "files": {**scans, "c": "new"}})
    assert lines[0] == prepared and "1 case changed, such as c" in lines[1], "which changed how all are prepared"
    lines = data_that_changed({**began, "voxels": scans}, {**other, "files": scans, "voxels": {**scans, "c": "new"}})
    assert "1 case changed, such as c" in lines[1], "an earlier version recorded no files"
    assert "5 cases changed, such as a" in data_that_changed(began, {**other, "recipe": began["recipe"]})[0]


def test_cases_that_are_validated_are_of_each_class_in_turn(data: ClassData) -> None:
    """Also where names sort them by class, as folders of groups do; no draw is longer than what is held out."""
    numbers = {f"c_{n:02d}": int(n > 2) for n in range(5)}
    dataset = replace(data.dataset, volume_classes=VolumeClasses(("healthy", "ill"), numbers))
    sorted_by_class = replace(data, dataset=dataset)
    for count, counts in ((2, [1, 1]), (4, [2, 2]), (0, [3, 2]), (9, [3, 2])):
        ids = sorted_by_class.ids_to_validate(count)
        assert sorted_by_class.volume_classes.counts(ids) == counts and list(ids) == sorted(ids)
    assert TrainingData.ids_to_validate(sorted_by_class, 2) == ("c_00", "c_01"), "labels of voxels: the first by name"
    config = Config(task="classify", tile=SHAPE, val_cases=2)
    validation = ClassValidation(config, start(1, env={}), sorted_by_class, Loss([CrossEntropy()]))
    assert sorted_by_class.volume_classes.counts(validation.ids) == [1, 1]


def test_what_was_cut_off_has_no_part_in_a_map(data: ClassData) -> None:
    torch.manual_seed(1)
    net = VolumeClassifier(ResAttNet(1, 2, (1, 1, 1, 1), 2), TILE, (8, 8, 8), choose_mode("gather", Group("seq")))
    image = data.dataset.cases["c_01"].image
    maps = [explain([net.eval()], image, number, torch.device("cpu"), "fp32")[0] for number in (0, 1)]
    assert all(seen.shape == SHAPE and not seen[:8].any() and not seen[32:].any() for seen in maps)
    assert max(seen[8:32].max() for seen in maps) > 0.5


def test_the_published_training_is_sgd_of_six_volumes_from_1e_4_to_1e_6() -> None:
    config = PRESETS["resattnet"]()
    assert (config.task, config.network, config.optimizer) == ("classify", "resattnet18-text", "sgd")
    assert (config.batch, config.epochs, config.loss) == (6, 50, "ce")
    assert (config.augment, config.betas, config.weight_decay) == ("none", (0.0,), 0.0), "what it does not state"
    assert (config.fold, config.iterations, config.val_every, config.tile) == ("0", 100, 5, ()), "whole volumes"
    (group,) = make_optimizer(torch.nn.Linear(1, 1), config.optimizer_options).param_groups[:1]
    assert group["momentum"] == 0 and not group["nesterov"]
    epochs = [learning_rate(replace(config, tile=SHAPE).schedule_options, 100 * epoch) for epoch in range(50)]
    assert epochs == pytest.approx([1e-4] * 17 + [1e-5] * 17 + [1e-6] * 16)


def test_it_is_said_that_volumes_are_mirrored(tmp_path: Path) -> None:
    """Classes that differ by side cannot be told apart then, and nothing else would show why."""
    folder = class_folder(tmp_path / "data", 8)
    for augment, is_said in (("light", True), ("light+corruption", True), ("none", False)):
        where = {"data": str(folder), "cache": str(tmp_path / "cache")}
        config = Config(task="classify", network="resattnet18", tile=(), augment=augment, **where)
        said = summary_of_classes(open_class_data(config, True), config)
        told = f"  note: --augment {augment} mirrors volumes: if classes differ by side, use --augment none"
        assert (told in said) == is_said == mirrors_sides(augment)


def test_a_class_has_no_held_out_cases_if_all_are_trained_on(tmp_path: Path) -> None:
    where = {"data": str(class_folder(tmp_path / "data", 8)), "cache": str(tmp_path / "cache")}
    for fold, told in (("all", "4 to train on, also used to validate"), ("0", "held out")):
        config = Config(task="classify", network="resattnet18", tile=(), fold=fold, **where)
        lines = summary_of_classes(open_class_data(config, True), config).split("\n")
        classes = [line for line in lines if line.startswith("  class ")]
        assert len(classes) == 2 and all(line.endswith(told) for line in classes), lines
