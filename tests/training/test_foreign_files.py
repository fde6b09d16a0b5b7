"""Files of a run folder that were edited, or copied from another run, are told."""

import html
import json
import shutil
import time
from pathlib import Path

import pytest

from seqpar.cli import evaluate, predict, report
from seqpar.cluster.exit_codes import run
from seqpar.runs.run_folder import read_config, run_of_validation
from seqpar.runs.run_status import weights_taken
from seqpar.tasks.classify.scores import replaced_rows, row_stamps
from tests.support.folders import nnunet
from tests.support.training_runs import trained
from tests.training.test_best_weights import scored

STEPS = ["--iterations", "2", "--val-every", "1", "--epochs", "2"]


def test_a_record_and_scores_of_another_run_are_told(flags, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    trained(1, [*flags, *STEPS], out)
    time.sleep(1.1)  # runs are told apart by their commands, here the same, and the second in which they began
    trained(1, [*flags, *STEPS, "--seed", "5", "--val-window", "sliding"], other)
    assert weights_taken(out).edited == weights_taken(other).edited == ""
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    assert weights_taken(moved).edited == "", "a copy is the same run"

    shutil.copyfile(other / "metrics.jsonl", out / "metrics.jsonl")
    told = weights_taken(out).edited
    assert f"{out}/metrics.jsonl says mean Dice 0." in told and "it was edited, or is another run's" in told
    images = nnunet(tmp_path / "Dataset003_New", 1) / "imagesTr"
    capfd.readouterr()
    line = [str(out), "-i", str(images), "-o", str(tmp_path / "found"), "--device", "cpu"]
    assert run(predict.act, line) == 0 and told in capfd.readouterr().err
    shutil.copyfile(moved / "metrics.jsonl", out / "metrics.jsonl")

    shutil.rmtree(out / "validation")
    shutil.copytree(other / "validation", out / "validation")
    path = out / "validation" / "summary.json"
    assert weights_taken(out).edited.startswith(f"{path} is another run's, and with it the scores of single cases")
    assert run(report.act, [str(out), "--cases", "0"]) == 0
    assert f"{path} is another run's" in html.unescape((out / "report.html").read_text())
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in content.items() if name != "run"}))
    assert weights_taken(out).edited == "", "earlier versions did not say whose it is"

    window = out / "window.json"
    measured = json.loads(window.read_text())
    window.write_text(json.dumps(measured | {"temperatures": {"sliding": 9.0}}))
    assert weights_taken(out).edited.startswith(f"{window} is not what a checkpoint says was measured")
    window.write_text(json.dumps(measured | {"step": 1, "temperatures": {"sliding": 9.0}}))
    assert weights_taken(out).edited == "", "of another step, as after a kill"


def test_maps_of_a_validation_are_known_as_its_own_and_told_if_they_change(
    flags, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        scored(patched, 0.3, 0.1)
        trained(1, [*flags, *STEPS], out)
    truth = Path(read_config(out)["config"]["data"]) / "labelsTr"
    line = [str(truth), str(out / "validation"), "--json", str(tmp_path / "s.json"), "--csv", str(tmp_path / "s.csv")]
    capfd.readouterr()
    assert run(evaluate.act, line) == 0
    said = capfd.readouterr().out
    assert "These are predictions after step 4, not with the weights that predict uses (step 2)." in said
    assert "were chosen on these held-out cases" in said and "changed since" not in said

    (found,) = (out / "validation").glob("*.nii.gz")
    assert run_of_validation(found) == run_of_validation(found.parent) == run_of_validation(out) == out
    assert run_of_validation(tmp_path / "s.json") is None
    shutil.copyfile(truth / found.name, found)
    assert run(evaluate.act, line) == 0
    told = f"1 of 1 label map in {out / 'validation'}, such as {found.name}, has changed since it was written."
    assert told in capfd.readouterr().out


def test_rows_of_a_validation_that_have_changed_are_told(tmp_path: Path) -> None:
    table, text = tmp_path / "predictions.csv", "case,class,a,b\nx,a,0.9,0.1\ny,b,0.2,0.8\n"
    table.write_text(text)
    (tmp_path / "summary.json").write_text(json.dumps({"rows": row_stamps(text)}))
    assert replaced_rows(table) == ""
    table.write_text(text.replace("x,a,0.9,0.1", "x,b,0.1,0.9"))
    assert replaced_rows(tmp_path) == f"1 of 2 rows of {table}, such as that of x, has changed since it was written."
