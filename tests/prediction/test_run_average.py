"""Several runs predict together: the mean of their probabilities; runs that do not fit are refused."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from seqpar.cli import export, predict
from seqpar.cluster import exit_codes
from seqpar.data.errors import DataError
from seqpar.prediction.run_average import MeanProbabilities, check_no_duplicates
from tests.support.folders import tree, write_json
from tests.support.predictions import RECIPE, SMALL, act, make_run, on_ranks, voxels, write_images

OTHER_SPACING = replace(RECIPE, spacing=(1.5, 0.8, 1.0))
TWO_VALUES = replace(RECIPE, values=(0, 2, 5))
REGIONS: dict[str, Any] = {"regions": {"whole": [1, 2], "core": [2]}, "regions_class_order": [1, 2]}


KINDS = ("entropy", "disagreement")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images and runs that fit each other, each predicted by itself."""
    place = tmp_path_factory.mktemp("runs")
    write_images(place / "images")
    torch.manual_seed(0)
    make_run(place / "a")
    make_run(place / "b", OTHER_SPACING, replace(SMALL, tile=(12, 8, 8)))
    make_run(place / "c", TWO_VALUES, **REGIONS)
    make_run(place / "d", TWO_VALUES, **REGIONS)
    for name in "abcd":
        weights = load_file(place / name / "model.safetensors")
        weights["decoder.classes.weight"] *= -20 if name in "bd" else 30  # else the bias decides alone, and alike
        weights["decoder.classes.bias"].zero_()
        save_file(weights, place / name / "model.safetensors")
        assert act(place, place / name, "--probabilities", "--uncertainty", out=f"out-{name}") == 0
    return place


def entropy(probabilities: np.ndarray, are_regions: bool) -> np.ndarray:
    """Returns nats of probabilities ``... k W D H``, of which those of regions have a complement each."""
    p = probabilities.astype(np.float64)
    p = np.concatenate([p, 1 - p], -4) if are_regions else p
    return -(p * np.log(np.clip(p, 1e-300, 1))).sum(-4)


def predict_all(place: Path, names: str, *more: str, out: Path) -> int:
    runs = [str(place / name) for name in names]
    return predict.act([*runs, "-i", str(place / "images"), "-o", str(out), *more])


@pytest.mark.parametrize("names, outputs", [("ab", ("label-0", "label-1")), ("cd", ("whole", "core"))])
def test_several_runs_predict_by_the_mean_of_their_probabilities(names: str, outputs, place, tmp_path) -> None:
    """One run is at its own spacing and has its own tile; regions may overlap, and the later label wins."""
    assert predict_all(place, names, "--probabilities", "--uncertainty", out=tmp_path / "out") == 0
    differ, disagree, are_regions = 0, 0.0, names == "cd"
    for case in ("c_000", "c_001", "c_002"):
        files = [f"probabilities/{case}_{output}.nii.gz" for output in outputs]
        alone = [np.stack([voxels(place / f"out-{name}" / file) for file in files]) for name in names]
        mean, written = np.mean(alone, 0), np.stack([voxels(tmp_path / "out" / file) for file in files])
        assert np.abs(written - mean).max() < 1e-6
        for name, own in zip(names, alone):
            written_entropy = voxels(place / f"out-{name}/uncertainty/{case}_entropy.nii.gz")
            assert np.abs(written_entropy - entropy(own, are_regions)).max() < 1e-5
            assert not (place / f"out-{name}/uncertainty/{case}_disagreement.nii.gz").exists(), "one run has none"
        total, disagreement = (voxels(tmp_path / f"out/uncertainty/{case}_{kind}.nii.gz") for kind in KINDS)
        assert total.dtype == np.float32 and np.abs(total - entropy(mean, are_regions)).max() < 1e-5
        expected = entropy(mean, are_regions) - entropy(np.stack(alone), are_regions).mean(0)
        assert np.abs(disagreement - expected).max() < 1e-5
        disagree = max(disagree, float(disagreement.max()))
        labels = voxels(tmp_path / "out" / f"{case}.nii.gz")
        if names == "ab":
            expected, sure = mean.argmax(0), np.abs(mean[1] - mean[0]) > 1e-5
        else:
            expected, sure = np.where(mean[1] > 0.5, 5, np.where(mean[0] > 0.5, 2, 0)), (abs(mean - 0.5) > 1e-5).all(0)
        assert sure.mean() > 0.9 and (labels == expected)[sure].all()
        differ += sum(int((labels != voxels(place / f"out-{name}" / f"{case}.nii.gz")).sum()) for name in names)
    assert differ > 0, "or one of them would do"
    assert disagree > 0.1


@pytest.mark.parametrize("name, outputs", [("a", ("label-0", "label-1")), ("c", ("whole", "core"))])
def test_a_temperature_changes_probabilities_and_no_label(name: str, outputs, place, tmp_path, capsys) -> None:
    out, before = tmp_path / "out", place / f"out-{name}"
    more = ("-i", str(place / "images"), "-o", str(out), "--probabilities", "--uncertainty", "--temperature", "2.5")
    assert predict.act([str(place / name), *more]) == 0
    assert json.loads((out / "prediction.json").read_text())["settings"]["temperature"] == 2.5
    assert f"probabilities (logits divided by 2.5, the temperature): {out / 'probabilities'}" in capsys.readouterr().out
    for case in ("c_000", "c_001", "c_002"):
        assert (out / f"{case}.nii.gz").read_bytes() == (before / f"{case}.nii.gz").read_bytes()
        files = [f"probabilities/{case}_{output}.nii.gz" for output in outputs]
        own, found = (np.stack([voxels(folder / file) for file in files]).astype(float) for folder in (before, out))
        inside = voxels(before / f"uncertainty/{case}_entropy.nii.gz") > 0  # else beyond the crop
        powers, rest = own**0.4, (1 - own) ** 0.4 if name == "c" else None
        expected = powers / (powers.sum(0) if rest is None else powers + rest)
        sure = inside & (own > 1e-4).all(0) & (own < 1 - 1e-4).all(0)
        assert sure.sum() > 100 and np.abs(found - expected)[:, sure].max() < 1e-4 and np.abs(found - own).max() > 0.05
        heat = voxels(out / f"uncertainty/{case}_entropy.nii.gz")
        assert np.abs(heat - entropy(found, name == "c")).max() < 1e-5
    with pytest.raises(ValueError, match="--temperature 2.5 is for one run, and 2 came"):
        predict.act([str(place / "a"), str(place / "b"), *more])


def test_the_mean_is_the_same_on_any_number_of_ranks(ranks, place, tmp_path) -> None:
    runs = [str(place / name) for name in "ab"]
    cases, written = ("c_000", "c_001", "c_002"), []
    maps = {f"uncertainty/{case}_{kind}.nii.gz" for case in cases for kind in KINDS}
    for world, seqpar in ((1, 1), (2, 1), (4, 1), (2, 2)):
        out = tmp_path / f"{world}-{seqpar}"
        more = ("-i", str(place / "images"), "-o", str(out), "--statistics", "--uncertainty")
        assert ranks(world, on_ranks, *runs, *more, seqpar=seqpar) == [0] * world
        written.append(tree(out))
    for name in maps:
        alone, *others = (voxels(tmp_path / out / name) for out in ("1-1", "2-1", "4-1", "2-2"))
        assert max(np.abs(alone - other).max() for other in others) < 1e-6, (
            "of rows of other lengths, rounded otherwise"
        )
    written = [{name: text for name, text in files.items() if name not in maps} for files in written[:3]]
    assert written[0] == written[1] == written[2]
    assert set(written[0]) == {"c_000.nii.gz", "c_001.nii.gz", "c_002.nii.gz", "prediction.json", "statistics.csv"}


def test_a_copy_of_a_run_does_not_count_twice(place, tmp_path) -> None:
    copytree(place / "a", tmp_path / "copy")
    with pytest.raises(ValueError, match="/a and .*copy hold the same weights, which would count twice"):
        line = [str(place / "b"), str(place / "a"), str(tmp_path / "copy"), "-i", str(place / "images")]
        predict.act([*line, "-o", str(tmp_path / "out")])


def test_an_exported_run_does_not_count_twice(place, tmp_path) -> None:
    export.act([str(place / "a"), str(tmp_path / "a.zip")])
    export.act([str(place / "b"), str(tmp_path / "b.zip")])
    line = ["-i", str(place / "images"), "-o", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="/a and .*a.zip hold the same weights, which would count twice"):
        predict.act([str(place / "a"), str(tmp_path / "a.zip"), *line])
    options = predict._parser().parse_args([str(place / "a"), str(tmp_path / "b.zip"), *line])
    assert len(predict._members(options)) == 2


def test_a_folder_of_five_folds_stands_for_its_runs(place, tmp_path, monkeypatch) -> None:
    five, opened = tmp_path / "five", list[str]()
    write_json(five / "folds.json", {})
    line = ["-i", str(place / "images"), "-o", str(tmp_path / "out")]
    for fold in range(5):
        write_json(five / f"fold{fold}" / "status.json", {"state": "finished" if fold in (0, 3) else "preempted"})
    with pytest.raises(ValueError, match="fold0, fold3 have finished: .*--resume --fold all5 .*, or average these: .*"):
        predict.act([str(five), *line])
    with pytest.raises(ValueError, match=f"{five} holds five folds: name the run folder of one, such as {five}/fold0"):
        export.act([str(five), str(tmp_path / "five.zip")])
    for fold in range(5):
        write_json(five / f"fold{fold}" / "status.json", {"state": "finished"})
    monkeypatch.setattr(predict, "open_run", lambda path, *of: opened.append(str(path)))
    monkeypatch.setattr(predict, "check_compatible_runs", lambda runs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        predict.act([str(five), str(place / "a"), *line])
    assert opened == [*(f"{five}/fold{n}" for n in range(5)), str(place / "a")]


def test_runs_that_were_trained_on_several_states_of_the_data_say_so(tmp_path, capsys) -> None:
    images = write_images(tmp_path / "images")
    states = {"a": ("before", "One"), "b": ("after", "One"), "c": ("after", "One"), "d": ("other", "Two")}
    states["e"] = ("after", "Copy of One")
    for number, (name, (state, data)) in enumerate(states.items()):
        described = {"digests": {"c_000": state, "c_001": "same"}, "voxels": {"c_000": state}, "name": data}
        path = make_run(tmp_path / name, **described) / "model.safetensors"
        save_file({key: value + 1e-3 * number for key, value in load_file(path).items()}, path)
    told = "warning: 1 case, such as c_000, changed between these trainings: the mean of their predictions mixes two"
    for names, is_told in (("ab", True), ("bc", False), ("bd", False), ("bcd", False), ("be", False)):
        out = tmp_path / f"out-{names}"
        runs = [str(tmp_path / name) for name in names]
        assert predict.act([*runs, "-i", str(images), "-o", str(out)]) == 0
        said = " ".join(capsys.readouterr().err.split())
        assert (told in said) == is_told
        assert ("note: these runs were trained on several data sets: One, Two" in said) == ("d" in names)
        assert ("several data sets" in said) == ("d" in names), "one data set may have two names"


def test_what_was_averaged_is_recorded_and_continued_by_the_same_runs_alone(place, tmp_path) -> None:
    out = tmp_path / "out"
    assert predict_all(place, "ab", out=out) == 0
    record = json.loads((out / "prediction.json").read_text())
    assert [Path(run["run"]).name for run in record["runs"]] == ["a", "b"]
    assert predict_all(place, "ab", "--continue", out=out) == 0
    for names in ("a", "ba"):
        with pytest.raises(DataError, match="other settings .*runs"):
            predict_all(place, names, "--continue", out=out)


def test_runs_that_do_not_fit_together_are_refused_by_name(place, tmp_path) -> None:
    channels = replace(RECIPE, modalities=("T2",))
    make_run(tmp_path / "t2", channels)
    make_run(tmp_path / "values", replace(RECIPE, values=(0, 3)), labels={"label 0": 0, "label 1": 1})
    order = make_run(tmp_path / "order", TWO_VALUES, **{**REGIONS, "regions_class_order": [2, 1]})
    for names, why in (
        (["a", "a"], "a is named twice"),
        (["a", str(tmp_path / "t2")], "their channels are T1 and T2"),
        (["a", "c"], "their outputs are label 0, label 1 and whole, core"),
        (["a", str(tmp_path / "values")], "their labels are label 0 0, label 1 1 and label 0 0, label 1 3"),
        (["c", str(order)], "their labels of regions are 2, 5 and 5, 2"),
    ):
        with pytest.raises(ValueError, match=why) as error:
            predict_all(place, names, out=tmp_path / "out")  # type: ignore[arg-type]
        assert all(name.split("/")[-1] in str(error.value) for name in names)
    with pytest.raises(ValueError, match="--checkpoint .*: a file belongs to one run"):
        predict_all(place, "ab", "--checkpoint", str(place / "a" / "model.safetensors"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_room_for_the_mean_is_one_error_that_leaves_nothing_half_done(place, tmp_path, monkeypatch, capfd) -> None:
    def full(*of: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MeanProbabilities, "put", full)
    runs = [str(place / name) for name in "ab"]
    line = [*runs, "-i", str(place / "images"), "-o", str(tmp_path / "out")]
    assert exit_codes.run(predict.act, line) == exit_codes.DATA
    assert capfd.readouterr().err.count("No space left") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["prediction.json"]


def test_a_copied_fold_does_not_count_twice(tmp_path) -> None:
    """As somebody may make who knows that nnU-Net averages five folds."""
    files = [tmp_path / f"fold_{fold}.pth" for fold in range(3)]
    for fold, file in enumerate(files):
        file.write_text(str(min(fold, 1)))
    member = SimpleNamespace(run=SimpleNamespace(path=tmp_path), weights=files[:2])
    assert check_no_duplicates([member]) == [member]
    member.weights = files
    with pytest.raises(ValueError, match="fold_1.pth and .*fold_2.pth hold the same weights, which would count twice"):
        check_no_duplicates([member])
