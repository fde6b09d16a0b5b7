"""Scores of held-out cases that a run's first weights had learned are not called new, wherever they are shown."""

import json
import shutil
from pathlib import Path

import pytest

from seqpar.cli import evaluate, export, predict
from tests.support.training_runs import tiny_data, trained


def test_cases_that_the_first_weights_had_learned_are_said_by_train_and_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, data = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "Dataset001_Tiny"
    first, second = tmp_path / "first", tmp_path / "second"
    trained(1, [*flags, "--fold", "0"], first)
    said = trained(1, [*flags, "--fold", "1", "--weights", str(first)], second).said()
    (case,) = json.loads((second / "config.json").read_text())["dataset"]["held_out"]
    caution = f"caution: they have learned from 1 held-out case, such as {case}, whose scores therefore say nothing"
    assert caution in " ".join(said.split())
    trained(1, ["--resume", "--epochs", "2", "--device", "cpu"], second)
    assert json.loads((second / "config.json").read_text())["dataset"]["learned_before"] == [case]
    assert evaluate.act([str(data), str(second)]) == 0
    assert "The weights have learned from some of these held-out cases" in capsys.readouterr().out
    out = tmp_path / "predictions"
    assert predict.act([str(second), "-i", str(data / "imagesTr"), "-o", str(out), "--device", "cpu"]) == 0
    assert evaluate.act([str(data), str(out)]) == 0
    assert "5 of 5 scored cases were in the run's training data" in capsys.readouterr().out


def test_weights_that_do_not_say_what_they_learned_are_said_to(tmp_path: Path) -> None:
    """A dry run names the cases behind weights; an archive and a copied file tell none, for cases are not exported."""
    flags, first = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "first"
    trained(1, [*flags, "--fold", "0"], first)
    archive, copied = tmp_path / "first.zip", tmp_path / "copied.safetensors"
    assert export.act([str(first), str(archive)]) == 0
    shutil.copy(first / "model.safetensors", copied)
    unknown = "caution: they do not say from which cases they have learned"
    for number, (weights, said) in enumerate(((archive, unknown), (copied, unknown), (first, "learned from 4 cases"))):
        begin = [*flags, "--fold", "1", "--weights", str(weights)]
        dry = trained(1, [*begin, "--dry-run"], tmp_path / "dry").said()
        assert said in " ".join(dry.split())
        if said == unknown:
            assert unknown in " ".join(trained(1, begin, tmp_path / f"run{number}").said().split())


def test_what_earlier_starts_learned_stays_known_and_their_label_maps_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, data, run = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "Dataset001_Tiny", tmp_path / "run"
    trained(1, [*flags, "--fold", "0"], run)
    for epochs in ("2", "3"):
        said = trained(1, ["--resume", "--epochs", epochs, "--fold", "1", "--device", "cpu"], run).said()
        assert "this run trained on 1 case that it holds out now" in " ".join(said.split())
    described = json.loads((run / "config.json").read_text())["dataset"]
    assert described["learned_before"] == described["held_out"] and len(described["held_out"]) == 1
    maps = [path.name.removesuffix(".nii.gz") for path in (run / "validation").glob("*.nii.gz")]
    assert maps == described["held_out"]
    assert evaluate.act([str(data), str(run)]) == 0
    assert "The weights have learned from some of these held-out cases" in capsys.readouterr().out


def test_a_run_of_all_cases_holds_none_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, run = [*tiny_data(tmp_path), "--epochs", "1"], tmp_path / "run"
    said = trained(1, [*flags, "--fold", "all"], run).said()
    assert "5 cases: 5 to train on, also used to validate (fold all): scores say nothing about new cases" in said
    assert evaluate.act([str(tmp_path / "Dataset001_Tiny"), str(run)]) == 0
    assert "The weights have learned from some of these held-out cases (--fold all" in capsys.readouterr().out
