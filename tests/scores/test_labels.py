"""Which labels evaluation scores: of dataset.json, data sets, BraTS and regions."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from seqpar.cluster.exit_codes import DATA, USAGE
from seqpar.data.errors import DataError
from seqpar.data.formats.brats import LABEL_SCHEMES
from seqpar.data.formats.recognise import read_dataset
from seqpar.scores.label_classes import BRATS, labels_of_dataset, labels_of_declaration, read_declared_labels
from seqpar.scores.label_files import about_held_out, match_cases
from seqpar.tasks.case_evaluation import other_values
from tests.support.folders import NEW, brats, decathlon, nnunet, write_json
from tests.support.label_folders import evaluate_folders, random_labels, save, summary_of


@pytest.mark.parametrize(
    ("content", "classes", "ignore"),
    [
        ({"background": 0, "blob": 1}, {"blob": (1,)}, None),
        ({"background": 0, "b": 2, "a": [2, 1], "ignore": 3}, {"b": (2,), "a": (2, 1)}, 3),
        ({"0": "background", "1": "edema", "2": "core"}, {"edema": (1,), "core": (2,)}, None),
    ],
)
def test_dataset_json_declares_labels_regions_and_ignored_voxels(
    tmp_path: Path, content: dict, classes: dict, ignore: int | None
) -> None:
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({"labels": content}))
    labels = read_declared_labels(path)
    assert (labels.classes, labels.ignore) == (classes, ignore)
    assert labels.declared == {0}.union(*classes.values())


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"labels": 3}', '{"labels": {"a": "x"}}', '{"labels": {"b": 0}}'])
def test_a_damaged_dataset_json_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "dataset.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"dataset\.json: "):
        read_declared_labels(path)


def test_ignored_voxels_are_left_out_and_cannot_be_predicted(folders: tuple[Path, Path]) -> None:
    (folders[0].parent / "dataset.json").write_text(json.dumps({"labels": {"a": 1, "ignore": 2}}))
    truth = random_labels(0)
    path = save(folders[0] / "case_0.nii.gz", truth)
    prediction = save(folders[1] / "case_0.nii.gz", np.ones_like(truth))
    assert evaluate_folders((path, prediction)) == 0
    row = summary_of(folders)["metric_per_case"][0]["metrics"]["1"]
    assert (row["TP"], row["FP"]) == ((truth == 1).sum(), (truth == 0).sum())
    save(prediction, truth)
    assert evaluate_folders((path, prediction)) == DATA


def test_presets_mean_the_labels_of_their_year(folders: tuple[Path, Path], tmp_path: Path) -> None:
    of_2021, of_2023 = tmp_path / "b21" / "t.nii.gz", tmp_path / "b23" / "t.nii.gz"
    labels = np.zeros((8, 8, 8), np.uint8)
    labels[:6], labels[1:4], labels[2:3] = 2, 1, 4
    save(of_2021, labels)
    save(of_2023, np.where(labels == 4, 3, labels).astype(np.uint8))
    for path, year in ((of_2021, "2021"), (of_2023, "2023")):
        assert evaluate_folders((path, path), "--brats", year) == 0
        regions = summary_of((path.parent, path.parent))["metric_per_case"][0]["metrics"]
        sizes = {key: row["n_ref"] // 64 for key, row in regions.items()}
        last = 4 if year == "2021" else 3
        assert sizes == {f"(1, 2, {last})": 6, f"(1, {last})": 3, f"{last}": 1}
        other = "2023" if year == "2021" else "2021"
        assert evaluate_folders((path, path), "--brats", other) == DATA  # 4 or 3 has no meaning there


@pytest.mark.parametrize("year", BRATS)
def test_every_meaning_of_brats_is_a_preset(year: str, tmp_path: Path) -> None:
    assert set(BRATS.values()) == set(LABEL_SCHEMES)
    meaning = LABEL_SCHEMES[BRATS[year]]
    path = save(tmp_path / "a.nii.gz", np.resize(np.array([*meaning.labels.values()], np.uint8), (5, 6, 7)))
    assert evaluate_folders((path, path), "--brats", year) == 0
    keys = [str(values) if len(values) > 1 else str(values[0]) for values in meaning.regions.values()]
    assert summary_of((path, tmp_path))["classes"] == dict(zip(meaning.regions, keys))


def test_what_a_list_declares_is_scored_as_it_is_trained(tmp_path: Path) -> None:
    """The decathlon's labels of a brain tumour bring their regions, before or after training; nnU-Net's do not."""
    root = decathlon(tmp_path / "Task01")
    labels = read_declared_labels(root / "dataset.json")
    assert labels.classes == labels_of_dataset(read_dataset(root)).classes == {
        "WT": (1, 2, 3), "TC": (2, 3), "ET": (3,), "edema": (1,), "non-enhancing tumor": (2,),
    }  # fmt: skip
    predicted = shutil.copytree(root / "labelsTr", tmp_path / "predicted")
    assert evaluate_folders((root / "labelsTr", predicted)) == 0
    assert set(summary_of((root, predicted))["classes"]) == set(labels.classes)
    raw = nnunet(tmp_path / "raw", labels={"background": 0, "edema": 1, "core": 2})
    assert read_declared_labels(raw / "dataset.json").classes == {"edema": (1,), "core": (2,)}


@pytest.mark.parametrize("flat", [False, True])
def test_the_truth_may_be_a_folder_of_brats_cases(flat: bool, tmp_path: Path, capsys) -> None:
    names = ["BraTS-GLI-00000-000", "BraTS-GLI-00001-000", "BraTS-GLI-00002-000"]
    data = brats(tmp_path / "data", names, NEW, "-", (1, 2, 3), flat=flat)
    for name in names[:2]:
        prediction = save(tmp_path / "out" / f"{name}.nii.gz", np.zeros((2, 2, 2)))
        shutil.copy(next(data.rglob(f"{name}-seg.nii.gz")), prediction)
    assert evaluate_folders((data, tmp_path / "out"), "--brats", "2023") == 0
    assert "1 case without a prediction: BraTS-GLI-00002-000\n" in capsys.readouterr().out
    assert list(summary_of((data, tmp_path / "out"))["classes"]) == ["WT", "TC", "ET"]
    assert evaluate_folders((data, tmp_path / "out")) == 0
    summary = summary_of((data, tmp_path / "out"))
    assert list(summary["classes"]) == ["NCR", "ED", "ET", "WT", "TC"] and summary["foreground_mean"]["Dice"] == 1


def test_the_truth_may_be_any_data_set_with_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its folder, its list or its name, whatever its splits are worth."""
    raw = nnunet(tmp_path / "Dataset007_X")
    write_json(raw / "splits_final.json", [{"train": ["c_000"], "val": ["gone"]}])
    monkeypatch.setenv("nnUNet_raw", str(tmp_path))
    predicted = shutil.copytree(raw / "labelsTr", tmp_path / "predicted")
    for truth in (raw, Path("7"), raw / "dataset.json"):
        assert evaluate_folders((truth, predicted)) == 0
    entries = [{"image": f"imagesTr/c_{n:03d}_0000.nii.gz", "label": f"labelsTr/c_{n:03d}.nii.gz"} for n in range(3)]
    content = {"labels": {"0": "background", "1": "x"}, "training": entries}
    out = tmp_path / "out"
    for n in range(3):
        shutil.copy(raw / f"labelsTr/c_{n:03d}.nii.gz", save(out / f"c_{n:03d}_0000.nii.gz", np.zeros((2,) * 3)))
    assert evaluate_folders((write_json(raw / "list.json", content), out)) == 0
    assert evaluate_folders((raw, out / "c_000_0000.nii.gz")) == USAGE
    shutil.rmtree(raw / "labelsTr")
    assert evaluate_folders((raw, out)) == DATA


def test_the_brats_preset_brings_the_challenges_policy(tmp_path: Path) -> None:
    path = save(tmp_path / "empty.nii.gz", np.zeros((4, 4, 4), np.uint8))
    assert evaluate_folders((path, path), "--brats", "2023") == 0
    assert summary_of((path, tmp_path))["foreground_mean"]["Dice"] == 1.0
    assert evaluate_folders((path, path), "--brats", "2023", "--empty", "skip") == 0
    assert math.isnan(summary_of((path, tmp_path))["foreground_mean"]["Dice"])


def test_regions_replace_the_data_sets_classes_but_not_its_declarations(folders: tuple[Path, Path]) -> None:
    assert evaluate_folders(folders, "--regions", "core=2") == 0
    assert set(summary_of(folders)["mean"]) == {"2"}
    (folders[0].parent / "dataset.json").unlink()
    assert evaluate_folders(folders, "--regions", "core=2") == DATA  # 1 is declared nowhere
    assert evaluate_folders(folders, "--regions", "core=2", "--regions", "all=2,1") == 0
    assert set(summary_of(folders)["mean"]) == {"2", "(1, 2)"}


def test_labels_that_are_not_declared_or_twice_are_a_usage_error(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_folders(folders, "--brats", "2023", "--regions", "a=1") == USAGE
    assert evaluate_folders(folders, "--regions", "a=1", "--regions", "b=1") == USAGE
    assert evaluate_folders(folders, "--regions", "a=1", "--regions", "a=2") == USAGE
    assert evaluate_folders(folders, "--nsd-tolerance", "-1") == USAGE
    assert evaluate_folders(folders, "--workers", "0") == USAGE
    assert evaluate_folders((folders[0], folders[1] / "case_0.nii.gz")) == USAGE
    (folders[0].parent / "dataset.json").unlink()
    capsys.readouterr()
    assert evaluate_folders(folders) == USAGE
    assert "--regions" in capsys.readouterr().err
    for text in ("core", "=1", "a=x"):
        assert evaluate_folders(folders, "--regions", text) == USAGE


def test_cases_for_tests_that_are_not_there_are_named(folders: tuple[Path, Path]) -> None:
    with pytest.raises(DataError, match="holds none of the cases that the run kept for tests, such as elsewhere"):
        match_cases(*folders, None, frozenset({"elsewhere"}))
    (folders[1] / "case_0.nii.gz").unlink()
    with pytest.raises(DataError, match="no prediction of a case in .* that the run kept for tests: name files as"):
        match_cases(*folders, None, frozenset({"case_0"}))


def test_a_run_that_writes_a_class_as_another_value_is_told() -> None:
    scored = labels_of_declaration({"background": 0, "a": 1, "b": 2}, {}, None)
    written = labels_of_declaration({"background": 0, "a": 2, "b": 1, "c": 3}, {}, None)
    assert other_values(Path("run"), scored, scored) == []
    assert other_values(Path("run"), written, scored) == [
        "Caution: run writes a as 2, which is scored as 1; b as 1, which is scored as 2. The scores compare other "
        "classes."
    ]
    regions = [{"whole": members} for members in ((1, 2), (2, 1), (2,))]
    same, turned, smaller = (labels_of_declaration({"background": 0, "a": 1, "b": 2}, own, None) for own in regions)
    assert other_values(Path("run"), turned, same) == []
    assert "whole as 2, which is scored as 1 and 2" in other_values(Path("run"), smaller, same)[0]


def test_a_validation_of_other_cases_than_were_held_out_is_told(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"dataset": {"held_out": ["a", "b"]}})
    for name in ("a", "b"):
        save(tmp_path / "validation" / f"{name}.nii.gz", np.zeros((4, 4, 4), np.uint8))
    assert about_held_out(tmp_path) == "" and about_held_out(tmp_path / "validation") == ""
    save(tmp_path / "validation" / "c.nii.gz", np.zeros((4, 4, 4), np.uint8))
    (tmp_path / "validation" / "b.nii.gz").unlink()
    said = "lacks 1 held-out case, such as b and has 1 case that the run did not hold out, such as c."
    assert about_held_out(tmp_path) == f"Caution: {tmp_path / 'validation'} {said}"
    (tmp_path / "validation" / "c.nii.gz").unlink()
    assert about_held_out(tmp_path).startswith("Caution: ")
    write_json(tmp_path / "config.json", {"config": {"val_cases": 1}, "dataset": {"held_out": ["a", "b"]}})
    assert (
        about_held_out(tmp_path)
        == f"{tmp_path} validated 1 of its 2 held-out cases (--val-cases 1): the scores are of no others."
    )
