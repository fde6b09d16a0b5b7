"""A run as an nnU-Net results folder: what is in it, that it predicts the same, and what is refused."""

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from seqpar.cli.export import _of_joined
from seqpar.cli.export import act as export
from seqpar.cluster.exit_codes import DATA
from seqpar.cluster.exit_codes import run as code_of
from seqpar.data.preparation.recipe import Intensity, Recipe
from seqpar.runs.fold_folder import write_flags
from seqpar.settings.config import Config
from seqpar.weights.nnunet_settings import read_plan, settings_of
from tests.support.folders import child, exit_code
from tests.support.predictions import act, make_run, voxels, write_images

NET = Config(network="nnunet-plain", tile=(16, 8, 8), features=4, decoder="plain", fold="2", batch=3, val_mirror="W")
CT = Recipe(("CT",), ("ct",), (Intensity(-2.0, 2.0, 0.1, 0.8),), (1.1, 0.9, 1.3), (0, 1, 2), False, 100)
REGIONS: dict[str, Any] = {"name": "Made", "regions": {"all": [1, 2], "core": [2]}, "regions_class_order": [1, 2]}
KINDS = {
    "plain": (NET, CT, {"name": "Made"}),
    "residual": (replace(NET, network="nnunet-resenc"), replace(CT, spacing=None), {"name": "Made"}),
    "regions": (NET, CT, REGIONS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_predicts_what_the_run_predicts(kind: str, tmp_path: Path) -> None:
    config, recipe, keys = KINDS[kind]
    run = make_run(tmp_path / "run", recipe, config, **keys)
    write_images(tmp_path / "images")
    assert export([str(run), str(tmp_path / "back")]) == 0
    plan = read_plan(str(tmp_path / "back" / "plans.json"))
    assert settings_of(plan, "")["spacing"] == ("1.1,0.9,1.3" if recipe.spacing else "source")
    assert act(tmp_path, run, out="ours") == act(tmp_path, tmp_path / "back", out="theirs") == 0
    names = sorted(path.name for path in (tmp_path / "ours").glob("*.nii.gz"))
    assert names
    for name in names:
        ours, back = (voxels(tmp_path / folder / name) for folder in ("ours", "theirs"))
        assert np.count_nonzero(ours != back) <= ours.size / 10_000 and len(np.unique(ours)) > 1


def test_plans_data_set_and_checkpoint_are_plain_and_in_nnunets_axes(tmp_path: Path) -> None:
    medians = {"shape": [20, 18, 9.5], "cropped_shape": [24, 18, 8], "file_spacing": [1.0, 0.9, 1.5]}
    run = make_run(tmp_path / "run", CT, NET, name="Made", medians=medians)
    place = tmp_path / "nnUNetTrainer__mine__3d_lowres"
    assert export([str(run), str(place)]) == 0
    plans, dataset = (json.loads((place / name).read_text()) for name in ("plans.json", "dataset.json"))
    own = plans["configurations"]["3d_lowres"]
    assert own["patch_size"] == [8, 8, 16] and own["spacing"] == [1.3, 0.9, 1.1] and own["batch_size"] == 3
    assert own["median_image_size_in_voxels"] == [9.5, 18, 20]
    assert plans["original_median_shape_after_transp"] == [8, 18, 24]
    assert plans["original_median_spacing_after_transp"] == [1.5, 0.9, 1.0]
    assert plans["plans_name"] == "mine" and plans["image_reader_writer"] == "NibabelIOWithReorient"
    assert plans["foreground_intensity_properties_per_channel"]["0"]["percentile_99_5"] == 2.0
    assert dataset["labels"] == {"background": 0, "label 1": 1, "label 2": 2} and dataset["file_ending"] == ".nii.gz"
    saved = torch.load(place / "fold_2" / "checkpoint_final.pth", map_location="cpu", weights_only=True)
    assert saved["trainer_name"] == "nnUNetTrainer" and saved["init_args"]["plans"] == plans
    assert saved["inference_allowed_mirroring_axes"] == (2,)  # W is nnU-Net's last


REFUSED: dict[str, tuple[Config, Recipe, dict[str, Any], str]] = {
    "a fixed crop": (NET, replace(CT, crop_to=(9, 9, 9)), {}, "cuts volumes to 9 9 9 voxels"),
    "gaps": (NET, replace(CT, values=(0, 1, 4)), {}, r"labels of the values \[0, 1, 4\]"),
    "a sigmoid for each label": (
        replace(NET, targets="regions"),
        CT,
        {"regions": {"all": [1], "core": [2]}},
        "learns all, core by a sigmoid each",
    ),
    "another network": (Config(tile=(8, 8, 8), patch=4, embed_dim=12, depth=1, heads=2), CT, {}, "has the network vit"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_plan_cannot_say_is_refused_by_name(what: str, tmp_path: Path) -> None:
    config, recipe, keys, message = REFUSED[what]
    run = make_run(tmp_path / "run", recipe, config, name="Made", **keys)
    with pytest.raises(ValueError, match=message):
        export([str(run), str(tmp_path / "back")])
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".back*"))


def test_a_folder_that_holds_something_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CT, NET, name="Made")
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "mine").write_text("")
    with pytest.raises(ValueError, match="is there already"):
        export([str(run), str(tmp_path / "back")])
    assert [path.name for path in (tmp_path / "back").iterdir()] == ["mine"]
    (mine := tmp_path / ".new.tmp").mkdir()

    def on_a_full_disk() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        assert code_of(export, [str(run), str(tmp_path / "new")]) == DATA

    assert exit_code(child(on_a_full_disk)) == 0
    assert mine.is_dir() and sorted(path.name for path in tmp_path.iterdir()) == [".new.tmp", "back", "run"]


def test_five_folds_become_five(tmp_path: Path) -> None:
    for number in range(5):
        run = make_run(tmp_path / "five" / f"fold{number}", CT, replace(NET, fold=str(number)), name="Made")
        (run / "status.json").write_text('{"state": "finished"}')
    write_flags(tmp_path / "five", [])
    assert export([str(tmp_path / "five"), str(tmp_path / "back")]) == 0
    for number in range(5):
        path = tmp_path / "back" / f"fold_{number}" / "checkpoint_final.pth"
        assert torch.load(path, map_location="cpu", weights_only=True)["init_args"]["fold"] == number


def test_joined_labels_are_told_as_the_folder_cannot() -> None:
    labels = {"background": 0, "organ": 1, "left tumour": 2}
    run = SimpleNamespace(labels=labels, recipe=SimpleNamespace(values=(0, 1, 2), joined=((3, 2), (5, 2))))
    (told,) = _of_joined(run)
    assert told.startswith("note: the run learned joined labels (--join-labels), which this folder does not record: ")
    assert told.endswith("with evaluate --regions organ=1 --regions 'left tumour=2,3,5'")
    assert _of_joined(SimpleNamespace(labels=labels, recipe=SimpleNamespace(values=(0, 1, 2), joined=()))) == []
