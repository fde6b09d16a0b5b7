"""Programs end with the command that usually comes next, and it works as it stands."""

import importlib
import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from seqpar.cli import evaluate, export, phantom, predict, prepare, pretrain, train
from seqpar.cluster.exit_codes import USAGE, run
from seqpar.tasks.lookup import TASKS
from seqpar.training import folds
from seqpar.weights.weight_files import digest
from tests.support.folders import write_json
from tests.support.pages import ROOT

TINY = ["--iterations", "2", "--epochs", "1", "--workers", "0", "--device", "cpu"]


@pytest.fixture
def line_of(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """Returns a function that starts a program and returns the words of each command that it prints as next."""
    monkeypatch.chdir(tmp_path)

    def next_lines(act: object, *arguments: object) -> Iterator[list[str]]:
        capsys.readouterr()
        assert run(act, list(map(str, arguments))) == 0
        lines = capsys.readouterr().out.splitlines()
        return [shlex.split(line.removeprefix("next: ").partition("  (")[0]) for line in lines if "next: " in line]

    return next_lines


def start(words: list[str], *more: str, **places: object) -> int:
    """Starts a printed command, with paths in the places of its capitals; returns the exit code."""
    words = [str(places.get(word, word)) for word in words]
    act = Path(words[words[0] == "python"]).stem.removeprefix("seqpar-")
    return run(importlib.import_module(f"seqpar.cli.{act}").act, [*words[1 + (words[0] == "python") :], *more])


@pytest.mark.started
def test_each_printed_command_works_as_it_stands(line_of, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    of_phantom, of_test = line_of(phantom.act, "--cases", 5, "--size", 24, 24, 24, "--out", "data", "--workers", 1)
    assert "auto" in of_phantom and start(of_phantom, "--dry-run") == 0, "laptop's tile would not suit their size"
    (of_prepare,) = line_of(prepare.act, "data", "--workers", 1)
    assert start(of_prepare, "--dry-run") == 0
    small = ["--data", "data", "--tile", "16", "16", "16", *TINY]
    of_train, of_report = line_of(train.act, "--preset", "debug", *small, "--out", "run")
    assert start(of_train, IMAGES="data", PREDICTIONS="found") == 0
    assert start(of_report) == 0 and (tmp_path / "run/report.html").is_file()
    (of_export,) = line_of(export.act, "run", "run.zip")
    assert start(of_export, IMAGES="data", PREDICTIONS="again") == 0
    of_evaluate, of_page = line_of(predict.act, "run", "-i", "data", "-o", "found")
    assert start(of_page) == 0 and (tmp_path / "run/report-found.html").is_file()
    (of_scored,) = line_of(evaluate.act, *["data" if word == "TRUTH" else word for word in of_evaluate[2:]])
    assert of_scored[2:] == ["run", "--truth", "data", "--prediction", "found"] and start(of_scored) == 0
    assert (tmp_path / "run/scores-found.html").is_file() and start(of_test, RUN="run", PREDICTIONS="tested") == 0
    (tmp_path / "truth").mkdir()
    for path in (tmp_path / "found").glob("*.nii.gz"):
        shutil.copy(path, tmp_path / "truth")
    capsys.readouterr()
    assert run(evaluate.act, ["truth", "found"]) == 0
    assert (
        "  (scores and cases on one page; --images FOLDER adds images that are stored elsewhere)"
        in capsys.readouterr().out
    )


def test_phantoms_name_a_training_that_can_learn_them_if_they_are_enough(line_of) -> None:
    few = "--size", 24, 24, 24, "--workers", 1
    (of_test,) = line_of(phantom.act, "--cases", 4, *few, "--out", "few")
    assert "few" in of_test and any("predict" in word for word in of_test), "five folds need five cases"
    of_classes, _ = line_of(phantom.act, "--kind", "dementia", "--cases", 10, *few, "--out", "brains")
    assert "resattnet18" in of_classes and start(of_classes, "--dry-run") == 0


@pytest.mark.started
def test_a_pretraining_names_a_training_that_takes_its_encoder(line_of, tmp_path: Path) -> None:
    """With its tile and widths where they are not the preset's, on its data where these have labels."""
    line_of(phantom.act, "--cases", 5, "--size", 24, 24, 24, "--out", "data", "--workers", 1)
    own = ["--preset", "mae-debug", "--tile", "16", "16", "16", "--embed-dim", "24", "--depth", "1", "--heads", "2"]
    of_train, of_report = line_of(pretrain.act, *own, "--data", "data", *TINY, "--out", "mae")
    assert start(of_train, *TINY, "--out", "run") == 0
    assert start(of_report) == 0
    of_best = shlex.split(TASKS["pretrain"].next_step(Path("mae")).partition("  (")[0])
    assert of_best == of_train, "as a sweep of pretrainings names it for its best point"
    assert "Rebuilt patches are invented: never read a finding" in (tmp_path / "mae/report.html").read_text()


def change_weights(file: Path, by: float) -> None:
    """Adds to all weights of a run folder or of a checkpoint, and says so in the checkpoint's manifest."""
    with safe_open(file, "pt") as stored:
        weights, metadata = {name: stored.get_tensor(name) + by for name in stored.keys()}, stored.metadata()  # noqa: SIM118
    save_file(weights, file, metadata)
    if (manifest := file.with_name("manifest.json")).exists():
        write_json(manifest, json.loads(manifest.read_text()) | {file.name: digest(file)})


@pytest.mark.started
def test_five_folds_name_a_prediction_by_their_mean(line_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first fold is trained in a process of its own; copies with other weights stand for the others."""
    line_of(phantom.act, "--cases", 5, "--size", 24, 24, 24, "--out", "data", "--workers", 1)
    small = ["--preset", "debug", "--data", "data", "--tile", "16", "16", "16", *TINY]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    begin, copied = folds.start_python, Mock(**{"wait.return_value": 0})

    def start_or_copy(command: list[str], env: dict[str, str]) -> object:
        run = command[command.index("--out") + 1]
        if run.endswith("/fold0"):
            return begin(command, env)
        shutil.copytree(Path(run).with_name("fold0"), run)
        content = json.loads(Path(run, "config.json").read_text())
        write_json(Path(run, "config.json"), {**content, "config": {**content["config"], "fold": run[-1]}})
        for file in Path(run).rglob("model.safetensors"):
            change_weights(file, 1e-3 * int(run[-1]))
        return copied

    monkeypatch.setattr(folds, "start_python", start_or_copy)
    (of_folds,) = line_of(train.act, *small, "--fold", "all5", "--out", "five")
    assert start(of_folds, IMAGES="data", PREDICTIONS="mean") == 0
    assert len(list((tmp_path / "mean").glob("*.nii.gz"))) == 5
    small[1] = "mae-debug"
    (of_pretrainings,) = line_of(pretrain.act, *small, "--fold", "all5", "--out", "mae")
    assert start(of_pretrainings, "--out", "page.html") == 0 and "Comparison of 5 runs" in Path("page.html").read_text()


def test_a_dry_run_refuses_weights_that_do_not_fit(line_of, capsys: pytest.CaptureFixture) -> None:
    line_of(pretrain.act, "--preset", "mae-debug", "--embed-dim", "24", "--heads", "2", *TINY,
            "--out", "mae")  # fmt: skip
    capsys.readouterr()
    assert run(train.act, ["--preset", "debug", "--weights", "mae", "--dry-run"]) == USAGE
    assert "use --heads 2" in capsys.readouterr().err
    assert (
        run(train.act, ["--preset", "debug", "--weights", "mae", "--dry-run", "--embed-dim", "24", "--heads", "2"]) == 0
    )
    assert "mae (seqpar): " in capsys.readouterr().out
