"""Scores of held-out cases that a run's first weights had learned are not called new, wherever they are shown."""

import json
from pathlib import Path

import pytest

from seqpar.cli import evaluate, predict
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
    assert "had already learned from some of these held-out cases" in capsys.readouterr().out
    out = tmp_path / "predictions"
    assert predict.act([str(second), "-i", str(data / "imagesTr"), "-o", str(out), "--device", "cpu"]) == 0
    assert evaluate.act([str(data), str(out)]) == 0
    assert "5 of 5 scored cases were in the run's training data" in capsys.readouterr().out
