"""Evaluation of folders: files written, labels declared, faults reported while the other cases go on."""

import csv
import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest

from seqpar.data.errors import DataError
from seqpar.data.formats.brats import MEANINGS
from seqpar.data.formats.recognise import recognise
from seqpar.launch import evaluate
from seqpar.launch.evaluation.classes import BRATS, labels_of_dataset, read_declared_labels
from seqpar.launch.evaluation.scores import score
from seqpar.launch.job.exit_codes import DATA, USAGE, run
from tests.support.folders import NEW, brats, decathlon, nnunet, write_json

LABELS = {"background": 0, "whole": [1, 2], "core": [2]}
OBLIQUE = np.array([[-0.9, 0.3, 0, 20], [0.3, 0.9, 0, -30], [0, 0, 2.5, 5], [0, 0, 0, 1.0]])
OBLIQUE_MM = [math.sqrt(0.9), math.sqrt(0.9), 2.5]


def random_labels(seed: int, shape: tuple[int, ...] = (12, 11, 9)) -> np.ndarray:
    """Labels 0, 1, 2 in nested boxes at random places."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(shape, np.uint8)
    low = rng.integers(0, 3, 3)
    labels[tuple(slice(a, a + 6) for a in low)] = 1
    labels[tuple(slice(a + 1, a + 4) for a in low)] = 2
    return labels


def save(path: Path, labels: np.ndarray, affine: np.ndarray = OBLIQUE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(labels, affine), path)
    return path


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A raw data set of three cases, and predictions of them."""
    truth, prediction = tmp_path / "labelsTr", tmp_path / "predicted"
    for case in range(3):
        save(truth / f"case_{case}.nii.gz", random_labels(case))
        save(prediction / f"case_{case}.nii.gz", random_labels(case + 10))
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": LABELS}))
    return truth, prediction


def evaluate_folders(folders: tuple[Path, Path], *options: str) -> int:
    return run(evaluate.act, [*map(str, folders), "--workers", "1", *options])


def summary_of(folders: tuple[Path, Path]) -> dict:
    return json.loads((folders[1] / "summary.json").read_text())


# -- from files


def test_the_summary_has_nnunets_schema_and_our_scores(folders: tuple[Path, Path]) -> None:
    assert evaluate_folders(folders, "--nsd-tolerance", "2") == 0
    summary = summary_of(folders)
    assert {"foreground_mean", "mean", "metric_per_case"} <= set(summary)
    assert set(summary["mean"]) == {"(1, 2)", "2"}  # as nnU-Net's reader turns them back into labels
    assert summary["classes"] == {"whole": "(1, 2)", "core": "2"}
    nnunet = {"Dice", "IoU", "FP", "TP", "FN", "TN", "n_pred", "n_ref"}
    for number, case in enumerate(summary["metric_per_case"]):
        assert set(case) == {"metrics", "reference_file", "prediction_file"}
        assert Path(case["reference_file"]) == folders[0] / f"case_{number}.nii.gz"
        assert Path(case["prediction_file"]) == folders[1] / f"case_{number}.nii.gz"
        truth, prediction = random_labels(number), random_labels(number + 10)
        expected = score(truth, prediction, {"(1, 2)": (1, 2), "2": (2,)}, OBLIQUE_MM, nsd_tolerance=2.0)
        assert nnunet <= set(case["metrics"]["2"])
        for key, row in expected.items():
            assert case["metrics"][key] == pytest.approx(row)
    dices = [case["metrics"]["2"]["Dice"] for case in summary["metric_per_case"]]
    assert summary["mean"]["2"]["Dice"] == pytest.approx(np.mean(dices))
    means = [summary["mean"][key]["HD95"] for key in summary["mean"]]
    assert summary["foreground_mean"]["HD95"] == pytest.approx(np.mean(means))


def test_the_csv_has_a_line_per_case_and_class(folders: tuple[Path, Path]) -> None:
    assert evaluate_folders(folders, "--lesion-wise") == 0
    with open(folders[1] / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["case"], r["class"]) for r in rows] == [
        (f"case_{n}", name) for n in range(3) for name in ("core", "whole")
    ]
    cases = summary_of(folders)["metric_per_case"]
    assert float(rows[2]["LesionHD95"]) == cases[1]["metrics"]["2"]["LesionHD95"]


def test_the_table_ends_with_one_line_that_sums_up(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_folders(folders) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["whole", "1+2", "mean"] and line.endswith("3/3") for line in lines)
    assert {"median", "global"} <= {word for line in lines for word in line.split()}
    mean = summary_of(folders)["foreground_mean"]
    assert lines[-1].startswith(f"cases 3, classes 2: mean Dice {mean['Dice']:.4f}, HD95 {mean['HD95']:.2f} ")


def test_workers_and_places_to_write_change_no_value(folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert evaluate_folders(folders) == 0
    out = tmp_path / "new" / "a.json", tmp_path / "new" / "b.csv"
    names = [*map(str, folders), "--workers", "2", "--json", str(out[0]), "--csv", str(out[1])]
    assert run(evaluate.act, names) == 0
    assert out[0].read_text() == (folders[1] / "summary.json").read_text()
    assert out[1].read_text() == (folders[1] / "metrics.csv").read_text()
    assert sorted(os.listdir(out[0].parent)) == ["a.json", "b.csv"]  # no partial file stays


def test_single_files_need_not_share_a_name(folders: tuple[Path, Path]) -> None:
    other = save(folders[1].parent / "one" / "x.nii", random_labels(10))
    assert evaluate_folders((folders[0] / "case_0.nii.gz", other)) == 0
    assert len(json.loads((other.parent / "summary.json").read_text())["metric_per_case"]) == 1


def test_the_act_runs_as_a_script(folders: tuple[Path, Path], tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    command = [sys.executable, repository / "launch" / "evaluate.py", *folders]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("cases 3")


# -- which labels


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
    assert set(BRATS.values()) == set(MEANINGS)
    meaning = MEANINGS[BRATS[year]]
    path = save(tmp_path / "a.nii.gz", np.resize(np.array([*meaning.labels.values()], np.uint8), (5, 6, 7)))
    assert evaluate_folders((path, path), "--brats", year) == 0
    keys = [str(values) if len(values) > 1 else str(values[0]) for values in meaning.regions.values()]
    assert summary_of((path, tmp_path))["classes"] == dict(zip(meaning.regions, keys))


def test_what_a_list_declares_is_scored_as_it_is_trained(tmp_path: Path) -> None:
    """The decathlon's labels of a brain tumour bring their regions, before or after training; nnU-Net's do not."""
    root = decathlon(tmp_path / "Task01")
    labels = read_declared_labels(root / "dataset.json")
    assert labels.classes == labels_of_dataset(recognise(root)).classes == {
        "WT": (1, 2, 3), "TC": (2, 3), "ET": (3,), "edema": (1,), "non-enhancing tumor": (2,),
    }  # fmt: skip
    assert evaluate_folders((root / "labelsTr", root / "labelsTr")) == 0
    assert set(summary_of((root, root / "labelsTr"))["classes"]) == set(labels.classes)
    raw = nnunet(tmp_path / "raw", labels={"background": 0, "edema": 1, "core": 2})
    assert read_declared_labels(raw / "dataset.json").classes == {"edema": (1,), "core": (2,)}


@pytest.mark.parametrize("flat", [False, True])
def test_the_truth_may_be_a_folder_of_brats_cases(flat: bool, tmp_path: Path, capsys) -> None:
    names = ["BraTS-GLI-00000-000", "BraTS-GLI-00001-000", "BraTS-GLI-00002-000"]
    data = brats(tmp_path / "data", names, NEW, "-", (1, 2, 3), flat=flat)
    for name in names[:2]:
        prediction = save(tmp_path / "out" / f"{name}.nii.gz", np.zeros((2, 2, 2)))
        shutil.copy(next(data.rglob(f"{name}-seg.nii.gz")), prediction)
    assert evaluate_folders((data, tmp_path / "out"), "--brats", "2023") == DATA
    printed = capsys.readouterr()
    assert "BraTS-GLI-00002-000.nii.gz: is missing" in printed.err and "faults 1" in printed.out
    assert list(summary_of((data, tmp_path / "out"))["classes"]) == ["WT", "TC", "ET"]
    assert evaluate_folders((data, tmp_path / "out")) == DATA
    summary = summary_of((data, tmp_path / "out"))
    assert list(summary["classes"]) == ["NCR", "ED", "ET", "WT", "TC"] and summary["foreground_mean"]["Dice"] == 1


def test_the_truth_may_be_any_data_set_with_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its folder, its list or its name, whatever its splits are worth."""
    raw = nnunet(tmp_path / "Dataset007_X")
    write_json(raw / "splits_final.json", [{"train": ["c_000"], "val": ["gone"]}])
    monkeypatch.setenv("nnUNet_raw", str(tmp_path))
    for truth in (raw, Path("7"), raw / "dataset.json"):
        assert evaluate_folders((truth, raw / "labelsTr")) == 0
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
        with pytest.raises(SystemExit):
            evaluate_folders(folders, "--regions", text)


# -- faults


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def damage(path: Path, at: int, body: bytes) -> None:
    """Writes other bytes into the header."""
    whole = bytearray(gzip.decompress(path.read_bytes()))
    whole[at : at + len(body)] = body
    path.write_bytes(gzip.compress(bytes(whole)))


FAULTS: dict[str, Callable[[Path, Path], object]] = {
    r"predicted/case_1.nii.gz: is missing": lambda t, p: p.unlink(),
    r"predicted/case_1.nii.gz: has no truth": lambda t, p: t.unlink(),
    r"predicted/case_1.nii.gz: .* its shape is \(12, 11, 8\)": lambda t, p: save(p, random_labels(1)[..., :8]),
    r"predicted/case_1.nii.gz: does not lie.* affine": lambda t, p: save(p, random_labels(1), np.diag([1, 1, 2.5, 1])),
    r"predicted/case_1.nii.gz: holds \[3\]": lambda t, p: save(p, random_labels(1) + np.uint8(1)),
    r"labelsTr/case_1.nii.gz: holds \[4\]": lambda t, p: save(t, random_labels(1) * np.uint8(2)),
    r"predicted/case_1.nii.gz: holds values": lambda t, p: save(p, random_labels(1) * np.float32(0.4)),
    r"predicted/case_1.nii.gz: is truncated": lambda t, p: truncate(p),
    r"labelsTr/case_1.nii.gz: is not packed": lambda t, p: t.write_text("no image"),
    r"predicted/case_1.nii.gz: .* unknown type 999": lambda t, p: damage(p, 70, (999).to_bytes(2, "little")),
    r"labelsTr/case_1.nii.gz: holds a 9-D array": lambda t, p: damage(t, 40, (9).to_bytes(2, "little")),
    r"predicted/case_1.nii: is there as": lambda t, p: save(p.with_suffix(""), random_labels(1)),
    r"labelsTr/case_1.nii.gz: holds 2 channels": lambda t, p: save(t, np.stack([random_labels(1)] * 2, -1)),
}


@pytest.mark.parametrize("message", FAULTS)
def test_one_bad_case_is_named_and_the_others_are_scored(
    folders: tuple[Path, Path], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    truth, prediction = folders
    FAULTS[message](truth / "case_1.nii.gz", prediction / "case_1.nii.gz")
    assert evaluate_folders(folders) == DATA
    printed = capsys.readouterr()
    errors = printed.err.splitlines()
    assert len(errors) == 1
    assert re.search(message, errors[0]), errors[0]
    assert printed.out.splitlines()[-1].endswith("faults 1")
    summary = summary_of(folders)
    names = [Path(case["reference_file"]).name for case in summary["metric_per_case"]]
    assert names == ["case_0.nii.gz", "case_2.nii.gz"]
    assert len(summary["faults"]) == 1


def test_bad_cases_are_named_by_workers_too(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    truncate(folders[1] / "case_0.nii.gz")
    save(folders[1] / "case_2.nii.gz", random_labels(0, (9, 9, 9)))
    assert run(evaluate.act, [*map(str, folders), "--workers", "2"]) == DATA
    errors = capsys.readouterr().err.splitlines()
    assert ["case_0" in errors[0], "case_2" in errors[1], len(errors)] == [True, True, 2]


def test_what_differs_in_writing_only_is_no_fault(folders: tuple[Path, Path]) -> None:
    truth, prediction = folders
    save(prediction / "case_0.nii.gz", random_labels(10).astype(np.float32)[..., None], OBLIQUE + 1e-5)
    (prediction / "case_1.nii.gz").rename(prediction / "kept")
    save(prediction / "case_1.nii", random_labels(11).astype(np.int16))
    (prediction / "._case_2.nii.gz").write_text("of another system")
    assert evaluate_folders(folders) == 0


def test_a_prediction_may_be_stored_in_another_orientation(folders: tuple[Path, Path]) -> None:
    assert evaluate_folders(folders) == 0
    before = summary_of(folders)["metric_per_case"]
    path = folders[1] / "case_1.nii.gz"
    nibabel.save(nibabel.as_closest_canonical(nibabel.load(path)), path)
    assert nibabel.load(path).affine[0, 0] > 0 > nibabel.load(folders[0] / "case_1.nii.gz").affine[0, 0]
    assert evaluate_folders(folders) == 0
    for case, one in zip(summary_of(folders)["metric_per_case"], before):
        assert case["metrics"]["2"] == pytest.approx(one["metrics"]["2"])


def test_folders_that_are_no_data_are_named(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_folders((tmp_path / "none", folders[1])) == DATA
    (tmp_path / "empty").mkdir()
    assert evaluate_folders((tmp_path / "empty", folders[1])) == DATA
    assert evaluate_folders((folders[0], tmp_path / "empty")) == DATA
    printed = capsys.readouterr()
    assert "none: does not exist" in printed.err and "empty: no cases were found" in printed.err
    assert printed.err.count("is missing") == 3
    assert printed.out.splitlines()[-1].startswith("no case could be scored")


def test_a_place_that_cannot_be_written_is_one_error_and_keeps_the_old_file(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_folders(folders) == 0
    before = (folders[1] / "summary.json").read_text()
    os.link(folders[1] / "summary.json", folders[1] / "held_open")
    assert evaluate_folders(folders, "--nsd-tolerance", "5") == 0
    assert (folders[1] / "held_open").read_text() == before != (folders[1] / "summary.json").read_text()
    before = (folders[1] / "summary.json").read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert evaluate_folders(folders, "--nsd-tolerance", "3", "--csv", os.devnull + "/x.csv") == DATA
    errors = capsys.readouterr().err.splitlines()
    assert "summary.json: cannot be written (No space left" in errors[0]
    assert (folders[1] / "summary.json").read_text() == before
    assert not list(folders[1].glob(".*tmp"))
