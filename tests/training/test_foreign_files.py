"""Files of a run folder that were edited, or copied from another run, are told."""

import html
import json
import math
import shutil
import time
from pathlib import Path

import pytest

from seqpar.cli import evaluate, predict, report
from seqpar.cluster.exit_codes import DATA, run
from seqpar.data.errors import DataError
from seqpar.runs import run_status
from seqpar.runs.run_folder import origin_mark, read_config, run_of_validation
from seqpar.runs.run_status import weights_taken
from seqpar.tasks.classify.scores import replaced_rows, row_stamps
from seqpar.weights.checkpoint import Progress
from seqpar.weights.weight_files import read_weights
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

    for name in ("model.safetensors", "status.json"):
        shutil.copyfile(other / name, moved / name)
    with pytest.raises(DataError, match=r"status.json: is of another run than config.json next to it, and so are the"):
        read_weights(moved / "model.safetensors")
    shutil.rmtree(moved / "checkpoints")
    assert run(predict.act, [str(moved), *line[1:]]) == DATA
    assert "is of another run than config.json" in capfd.readouterr().err

    window = out / "window.json"
    measured = json.loads(window.read_text())
    window.write_text(json.dumps(measured | {"temperatures": {"sliding": 9.0}}))
    assert weights_taken(out).edited.startswith(f"{window} is not what a checkpoint says was measured")
    window.write_text(json.dumps(measured | {"step": 1, "temperatures": {"sliding": 9.0}}))
    assert weights_taken(out).edited == "", "of another step, as after a kill"


def test_a_record_that_rounds_otherwise_or_has_no_score_is_no_other(tmp_path: Path) -> None:
    """The mean of three classes has another last digit by ``sum`` than by ``fmean``."""
    out, dice = tmp_path / "run", {"a": 0.1, "b": 0.2, "c": 0.3}
    loss = 1 / 3
    for best, best_loss, row, told in (
        (sum(dice.values()) / 3 + 3e-16, loss, {"dice": dice, "loss": loss}, False),
        (0.25, loss, {"dice": dice, "loss": loss}, True),
        (0.2, 0.5, {"dice": dice, "loss": loss}, True),
        (0.2, None, {"dice": dice, "loss": loss}, False),
        (0.0, loss, {"dice": {"a": None}, "loss": loss}, False),
        (0.2, math.nan, {"dice": dice, "loss": math.nan}, False),
    ):
        own = Progress(step=4, best=best, best_step=4, best_loss=best_loss)
        rows = [{"kind": "val", "step": 4, **row}]
        assert bool([*run_status._foreign_files(out, "segment", [own], rows)]) == told, (best, best_loss, row)
    windows = {"window": "sliding", "step": 4, "dice": {"sliding": math.nan}}
    out.mkdir()
    (out / "window.json").write_text(json.dumps(windows))
    own = Progress(step=4, windows=json.loads(json.dumps(windows)))
    assert [*run_status._foreign_files(out, "segment", [own], [])] == []


def test_a_run_whose_config_is_gone_is_validated_all_the_same(tmp_path: Path) -> None:
    assert origin_mark(tmp_path / "nowhere") == {}
    (tmp_path / "config.json").write_text('{"history": 5}')
    assert origin_mark(tmp_path) == {}


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
    assert "These cases were predicted after step 4, not with the weights that predict uses (step 2)." in said
    assert "were chosen on these cases" in said and "changed since" not in said

    (found,) = (out / "validation").glob("*.nii.gz")
    assert run_of_validation(found) == run_of_validation(found.parent) == run_of_validation(out) == out
    assert run_of_validation(tmp_path / "s.json") is None
    monkeypatch.chdir(out / "validation")
    assert run_of_validation(Path()) == out
    assert run_of_validation(Path(shutil.copytree(found.parent, out / "validation-moved"))) is None, "no name of ours"
    shutil.copyfile(truth / found.name, found)
    assert run(evaluate.act, line) == 0
    told = f"1 of 1 label map in {out / 'validation'}, such as {found.name}, has changed since it was written."
    assert told in capfd.readouterr().out
    assert run(evaluate.act, [line[0], str(out), *line[2:]]) == 0 and told in capfd.readouterr().out
    (found.parent / "prediction.json").write_text("{}")
    assert run_of_validation(found.parent) is None, "of predict"


def test_rows_of_a_validation_that_have_changed_are_told(tmp_path: Path) -> None:
    table, text = tmp_path / "predictions.csv", "case,class,a,b\nx,a,0.9,0.1\ny,b,0.2,0.8\n"
    table.write_text(text)
    (tmp_path / "summary.json").write_text(json.dumps({"rows": row_stamps(text)}))
    assert replaced_rows(table) == ""
    table.write_text(text.replace("x,a,0.9,0.1", "x,b,0.1,0.9"))
    assert replaced_rows(tmp_path) == f"1 of 2 rows of {table}, such as that of x, has changed since it was written."
