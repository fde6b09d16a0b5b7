"""Evaluation of folders: files written, faults reported while the other cases go on."""

import csv
import fcntl
import gzip
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from seqpar.cli import evaluate
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.scores import summary_files
from seqpar.scores.comparison import hardly_learned_lines, what_is_hardly_learned
from seqpar.scores.label_scores import describe_consensus, not_measured, score, summarise, words_of
from seqpar.scores.summary_files import write_output, writing_alone
from seqpar.tasks import case_evaluation
from tests.support.folders import child, exit_code
from tests.support.label_folders import OBLIQUE, OBLIQUE_MM, evaluate_folders, random_labels, save, summary_of


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


def test_the_csv_has_a_line_per_case_and_class(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate_folders(folders, "--lesion-wise", "--centreline") == 0
    said = capsys.readouterr().out
    assert "missed or false: 374" in said and "false branches cost" in said
    assert max(map(len, words_of(True, True, True, describe_consensus(2), readers=True))) < 120
    with open(folders[1] / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["case"], r["class"]) for r in rows] == [
        (f"case_{n}", name) for n in range(3) for name in ("core", "whole")
    ]
    cases = summary_of(folders)["metric_per_case"]
    for column in ("LesionHD95", "CentrelineRecall"):
        assert float(rows[2][column]) == cases[1]["metrics"]["2"][column]


def test_the_table_ends_with_one_line_that_sums_up(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_folders(folders) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:3] == ["whole", "1+2", "mean"] and line.endswith("3/3") for line in lines)
    assert {"median", "global"} <= {word for line in lines for word in line.split()}
    mean = summary_of(folders)["foreground_mean"]
    assert lines[-1].startswith(f"3 cases, 2 classes: mean Dice {mean['Dice']:.4f}, HD95 {mean['HD95']:.2f} mm, NSD ")
    save(folders[1] / "case_0.nii.gz", np.minimum(random_labels(10), 1))  # without one of the classes
    assert evaluate_folders(folders) == 0
    assert " mm (1 of 6 replaced: one map lacks the class), NSD " in capsys.readouterr().out


def test_too_much_is_not_called_hardly_overlapping() -> None:
    """Of a Dice alone nobody knows which of both it is."""
    much = "on average, the prediction covers 84 % of the truth, but is much too large"
    assert what_is_hardly_learned(0.16, 2, 0.16, 0.84) == what_is_hardly_learned(0.16, 9, 0.16, 0.84) == much
    assert "hardly overlap" in what_is_hardly_learned(0.16, 2, 0.16, 0.29)
    some = "on average, the prediction covers 40 % of the truth: cases are missed, or too much is predicted"
    assert some == what_is_hardly_learned(0.16, 2, 0.16, 0.4, predicted=14.0, true=10.0)
    much = f"{some} (7.0 times as many voxels as are true)"
    assert what_is_hardly_learned(0.16, 2, 0.16, 0.4, predicted=70.0, true=10.0) == much
    assert what_is_hardly_learned(0.2, 1, 0.2, 0.6) == "the prediction covers 60 % of the truth, and much that is false"
    little = "too little is predicted: 10 % as many voxels as are true, and on average, 9 % of the truth covered"
    assert what_is_hardly_learned(0.16, 2, 0.16, 0.09, predicted=1.0, true=10.0) == little
    assert "or much too much is predicted" in what_is_hardly_learned(0.16, 2, 0.16)
    assert what_is_hardly_learned(0.0, 1, 0.0, 0.0) == "no voxel of the truth was found", "or predicted"
    assert what_is_hardly_learned(0.0, 6, 0.0, 0.0, predicted=0.0) == "nothing of this class was predicted"
    assert "do not overlap" in what_is_hardly_learned(0.0, 6, 0.0, 0.0, predicted=2.5)
    said = "no case has this class in the readers' consensus"
    assert what_is_hardly_learned(0.0, 2, math.nan, math.nan, where="in the readers' consensus") == said


def test_a_class_that_no_truth_has_is_not_called_hardly_learned(folders: tuple[Path, Path], capsys) -> None:
    for case in range(5):
        save(folders[0] / f"case_{case}.nii.gz", np.full((12, 11, 9), 1, np.uint8))
        save(folders[1] / f"case_{case}.nii.gz", np.full((12, 11, 9), 2, np.uint8))
    assert evaluate_folders(folders) == 0
    said = capsys.readouterr().out
    assert "core: mean Dice 0.0000: no case has this class, and what is predicted of it counts as false" in said
    save(folders[0] / "case_0.nii.gz", np.full((12, 11, 9), 2, np.uint8))
    assert evaluate_folders(folders) == 0
    said = capsys.readouterr().out
    assert "core: mean Dice 0.2000: 1.000 where the truth has this class; where it has none, predictions c" in said
    for case in range(1, 4):
        save(folders[0] / f"case_{case}.nii.gz", np.full((12, 11, 9), 2, np.uint8))
    assert evaluate_folders(folders) == 0
    told = "core: mean Dice 0.8000: 1 of 5 values is 0, as this class was predicted where the truth has none; 1.0000 "
    assert f"{told}without it" in capsys.readouterr().out


def test_what_counts_as_measured_or_as_0_does_not_depend_on_how_empty_cases_count() -> None:
    empty, full = np.zeros((6, 6, 6), np.uint8), np.ones((6, 6, 6), np.uint8)
    part = full.copy()
    part[2:] = 0  # a Dice of 0.5
    pairs = ((full, part), (empty, full), (empty, empty))
    rows = [score(*pair, {"core": (1,)}, (1.0, 1.0, 1.0), empty="brats") for pair in pairs]
    (line,) = hardly_learned_lines(summarise(rows))
    told = "1 of 3 values is 0, as this class was predicted where the truth has none; 0.7500 without it"
    told += "; 0.5000 where the truth has this class"
    assert line == f"core: mean Dice 0.5000: {told}"
    assert not_measured(rows) == " (1 of 3 replaced: one map lacks the class)"


def test_zeros_of_cases_without_a_class_are_told_of_a_low_dice_too() -> None:
    empty, full = np.zeros((6, 6, 6), np.uint8), np.ones((6, 6, 6), np.uint8)
    part = full.copy()
    part[1:] = 0
    rows = [score(*pair, {"core": (1,)}, (1.0, 1.0, 1.0)) for pair in ((full, part), (empty, full))]
    (line,) = hardly_learned_lines(summarise(rows))
    told = "1 of 2 values is 0, as this class was predicted where the truth has none; 0.2857 without it"
    assert line == f"core: mean Dice 0.1429: the predictions hardly overlap the truth; {told}"


def test_a_low_dice_says_how_much_is_predicted() -> None:
    true, found = (np.zeros((6, 6, 6), np.uint8) for _ in range(2))
    true[0, 0] = 1  # 6 voxels, 3 of them among 36 that are predicted
    found[0, 0, :3], found[3:, 3:, :4] = 1, 1
    (line,) = hardly_learned_lines(summarise([score(true, found, {"core": (1,)}, (1.0, 1.0, 1.0))] * 2))
    assert line.endswith("covers 50 % of the truth: cases are missed, or too much is predicted (6.5 times as many "
                         "voxels as are true)")  # fmt: skip


def test_a_low_dice_has_a_caution_below_its_table(folders: tuple[Path, Path], capsys) -> None:
    one = folders[1] / "case_0.nii.gz"
    for case in range(5):
        save(folders[0] / f"case_{case}.nii.gz", np.full((12, 11, 9), 2, np.uint8))
        found = np.full((12, 11, 9), 2, np.uint8)
        found[1:] = 1  # "core" has a Dice of 2 / 13, "whole" of 1
        save(folders[1] / f"case_{case}.nii.gz", found)
    assert evaluate_folders(folders) == 0
    said = capsys.readouterr().out
    assert "core: mean Dice 0.1538: too little is predicted: 8 % as many" in said and "whole: mean" not in said
    assert evaluate_folders((folders[0] / one.name, one)) == 0
    little = "too little is predicted: 8 % as many voxels as are true"
    assert f"core: Dice 0.1538: {little}, and 8 % of the truth covered" in capsys.readouterr().out
    for case in (3, 4):
        (folders[1] / f"case_{case}.nii.gz").unlink()
        (folders[0] / f"case_{case}.nii.gz").unlink()
    assert evaluate_folders(folders) == 0
    assert f"core: mean Dice 0.1538: {little}, and on average, 8 % of the truth" in capsys.readouterr().out


def test_a_class_that_no_case_has_is_named_in_words_and_is_nan_in_files(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Files have what nnU-Net writes there. Several predictions are compared as ever."""
    other = folders[1].with_name("other")
    for folder, seed in ((folders[0], 0), (folders[1], 10), (other, 20)):
        for case in range(3):
            save(folder / f"case_{case}.nii.gz", np.minimum(random_labels(case + seed), 1))
    assert run(evaluate.act, [*map(str, (*folders, other)), "--workers", "1", "--find-best"]) == 0
    said = capsys.readouterr().out
    assert not re.search(r"\bnan\b", said)
    assert re.search(r"case_0: Dice core – \(in neither map\), whole 0\.\d{4}\n", said)
    core = next(line.split() for line in said.splitlines() if line.startswith("core "))
    assert core[:6] == ["core", "2", "mean", "–", "–", "–"] and core[-1] == "0/3"
    assert re.search(r"^  – +no case has such a score$", said, re.M)
    assert math.isnan(summary_of(folders)["mean"]["2"]["Dice"])
    for path in (folders[1] / "summary.json", folders[1] / "metrics.csv"):
        assert re.search(r"\bnan\b", path.read_text(), re.IGNORECASE), path
    save(folders[0] / "case_0.nii.gz", nothing := np.zeros((12, 11, 9), np.uint8))
    save(folders[1] / "case_0.nii.gz", nothing)
    places = ["--json", str(folders[1] / "one.json"), "--csv", str(folders[1] / "one.csv")]
    files = [str(folder / "case_0.nii.gz") for folder in folders]
    assert run(evaluate.act, [*files, "--dataset", str(folders[0].parent), "--workers", "1", *places]) == 0
    assert "1 case, 2 classes: mean Dice –, HD95 – mm, NSD – at 1 mm" in capsys.readouterr().out


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


def test_scores_of_one_file_never_replace_those_of_its_folder(folders: tuple[Path, Path], capsys) -> None:
    one = tuple(folder / "case_0.nii.gz" for folder in folders)
    assert evaluate_folders(folders) == 0
    files = [folders[1] / name for name in ("summary.json", "metrics.csv")]
    before = [path.read_bytes() for path in files]
    capsys.readouterr()
    assert evaluate_folders(one) == 0
    said = capsys.readouterr().out
    assert "summary.json has scores of more cases and stays" in said and "1 case, 2 classes: mean Dice" in said
    assert evaluate_folders(one, "--json", str(folders[1] / "one.json")) == 0
    assert [path.read_bytes() for path in files] == before and (folders[1] / "one.json").is_file()
    files[0].unlink()
    assert evaluate_folders(one) == 0 and files[1].read_bytes() == before[1] and not files[0].exists()


@pytest.mark.parametrize("declared", [True, False])
def test_a_region_that_nobody_knows_is_refused(folders: tuple[Path, Path], declared: bool, capsys) -> None:
    if not declared:
        for path in folders[0].parent.rglob("dataset.json"):
            path.unlink()
    assert evaluate_folders(folders, "--regions", "B=1,2", "--regions", "A=99") == USAGE
    said = capsys.readouterr().err
    assert "--regions A=99: no label map" in said and "they have [0, 1, 2]" in said
    assert not (folders[1] / "summary.json").exists()
    assert evaluate_folders(folders, "--regions", "A=1,2,99") == 0


@pytest.mark.started
def test_the_act_runs_as_a_script(folders: tuple[Path, Path], tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    command = [sys.executable, repository / "launch" / "evaluate.py", *folders]
    environment = os.environ | {"PYTHONPATH": str(repository)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("3 cases")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def damage(path: Path, at: int, body: bytes) -> None:
    """Writes other bytes into the header."""
    whole = bytearray(gzip.decompress(path.read_bytes()))
    whole[at : at + len(body)] = body
    path.write_bytes(gzip.compress(bytes(whole)))


FAULTS: dict[str, Callable[[Path, Path], object]] = {
    r"predicted/case_1.nii.gz: has no truth": lambda t, p: t.unlink(),
    r"predicted/case_1.nii.gz: does not lie on .*labelsTr/case_1.nii.gz: its shape is \(12, 11, 8\)": lambda t, p: save(
        p, random_labels(1)[..., :8]
    ),
    r"predicted/case_1.nii.gz: does not lie on .*labelsTr/case_1.nii.gz: its affine": lambda t, p: save(
        p, random_labels(1), np.diag([1, 1, 2.5, 1])
    ),
    r"predicted/case_1.nii.gz: holds \[3\]": lambda t, p: save(p, random_labels(1) + np.uint8(1)),
    r"labelsTr/case_1.nii.gz: holds \[4\]": lambda t, p: save(t, random_labels(1) * np.uint8(2)),
    r"predicted/case_1.nii.gz: holds values": lambda t, p: save(p, random_labels(1) * np.float32(0.4)),
    r"predicted/case_1.nii.gz: is truncated": lambda t, p: truncate(p),
    r"labelsTr/case_1.nii.gz: is not compressed": lambda t, p: t.write_text("no image"),
    r"predicted/case_1.nii.gz: .* unknown type 999": lambda t, p: damage(p, 70, (999).to_bytes(2, "little")),
    r"labelsTr/case_1.nii.gz: has a 9-D array": lambda t, p: damage(t, 40, (9).to_bytes(2, "little")),
    r"predicted/case_1.nii: is there as .*predicted/case_1.nii.gz too": lambda t, p: save(
        p.with_suffix(""), random_labels(1)
    ),
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


def test_scores_of_phantoms_are_said_to_be_of_phantoms(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    said = "Generated phantoms, not patients: these scores say nothing about real images.\n"
    assert evaluate_folders(folders) == 0 and said not in capsys.readouterr().out
    (folders[0] / "phantom.json").write_text("{}")
    assert evaluate_folders(folders) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(said) and printed.count(said) == 1, "above the first score"


@pytest.mark.parametrize("kept", [False, True], ids=["no run", "data moved"])
def test_predictions_are_scored_whatever_made_them(folders: tuple[Path, Path], tmp_path: Path, kept: bool) -> None:
    """Also by an nnU-Net folder, which has no record, or by a run whose training data are elsewhere now."""
    truth, prediction = folders
    model = tmp_path / "model"
    model.mkdir()
    if kept:
        (model / "config.json").write_text(json.dumps({"config": {"data": str(tmp_path / "gone")}}))
    (prediction / "prediction.json").write_text(json.dumps({"run": str(model), "files": []}))
    assert run(evaluate.act, [str(truth), str(prediction)]) == 0


def test_a_part_of_the_cases_may_be_predicted(folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for case in ("case_0", "case_2"):
        (folders[1] / f"{case}.nii.gz").unlink()
    assert evaluate_folders(folders) == 0
    printed = capsys.readouterr()
    assert not printed.err and printed.out.count("2 cases without a prediction: case_0, case_2\n") == 1
    assert summary_of(folders)["missing"] == ["case_0", "case_2"] and not summary_of(folders)["faults"]


def test_folders_that_are_no_data_are_named(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate_folders((tmp_path / "none", folders[1])) == DATA
    (tmp_path / "empty").mkdir()
    assert evaluate_folders((tmp_path / "empty", folders[1])) == DATA
    assert evaluate_folders((folders[0], tmp_path / "empty")) == DATA
    printed = capsys.readouterr()
    assert "none: does not exist" in printed.err and "empty: has no cases" in printed.err
    assert "empty: holds no prediction of a case in" in printed.err and "such as case_0.nii.gz" in printed.err


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


def test_two_evaluations_at_once_leave_files_of_one(folders: tuple[Path, Path], monkeypatch, tmp_path) -> None:
    half, second = tmp_path / "half", tmp_path / "second"

    def write_slowly(path: Path, content: Any) -> None:
        write_output(path, content)
        half.touch()
        while not second.exists():
            time.sleep(0.01)
        time.sleep(0.5)

    def begin_to_write(files: Any) -> Any:
        second.touch()
        return writing_alone(files)

    def first() -> None:
        monkeypatch.setattr(case_evaluation, "write_output", write_slowly)
        assert evaluate_folders(folders) == 0

    pid = child(first)
    while not half.exists():
        time.sleep(0.01)
    monkeypatch.setattr(case_evaluation, "writing_alone", begin_to_write)
    assert evaluate_folders(folders, "--nsd-tolerance", "5") == 0 and exit_code(pid) == 0
    with open(folders[1] / "metrics.csv", newline="") as file:
        table = [float(row["NSD"]) for row in csv.DictReader(file) if row["class"] == "core"]
    assert table == [case["metrics"]["2"]["NSD"] for case in summary_of(folders)["metric_per_case"]]


def test_a_prediction_that_is_writing_into_the_folder_is_said_and_not_awaited(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(summary_files, "_TURN_S", 0.1)
    handle = os.open(folders[1], os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert evaluate_folders(folders) == 0 and (folders[1] / "metrics.csv").is_file()
    assert f"warning: {folders[1]} is in use by a prediction" in capsys.readouterr().err
    os.close(handle)
    assert evaluate_folders(folders) == 0 and not capsys.readouterr().err
