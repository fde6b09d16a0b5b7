"""TensorBoard and trackers get what the journal records; stand-ins take the place of packages, and of any network."""

import importlib.util
import json
import signal
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imsave

from seqpar.planner.feasibility import check_feasible
from seqpar.runs.boards import TensorBoard, Tracker, open_boards
from seqpar.runs.journal import Journal, read_metrics
from seqpar.settings.command_line import parse
from seqpar.settings.config import Config
from seqpar.tasks.segment import validation
from seqpar.training import after_step
from tests.support.training_runs import Hook, Launch, at, signalled, status, tiny_data, trained

RED = np.tile(np.array([1.0, 0.0, 0.0]), (4, 6, 1))


def tracker_module(name: str, tell: Callable[[list[Any]], None], fails_of: str = "") -> ModuleType:
    """Returns a stand-in of wandb or trackio with the arguments that both packages, or this one, take."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)

    def init(*, project: str, name: str, config: dict[str, Any], resume: str, **own: str) -> None:
        if fails_of:
            raise RuntimeError(fails_of)
        assert own.keys() == ({"id", "dir"} if module.__name__ == "wandb" else set())
        tell(["init", project, name, own.get("id", name), resume, config["lr"]])

    module.init, module.finish = init, lambda: tell(["finish"])  # type: ignore[attr-defined]
    module.Image = lambda path: {"png": Path(path).name}  # type: ignore[attr-defined]
    module.log = lambda values, step: tell(["log", step, values])  # type: ignore[attr-defined]
    return module


class Writer:
    """A stand-in of torch's SummaryWriter."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.calls: list[Any] = [(folder, purge_step)]
        WRITERS.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, value, step))

    def add_image(self, name: str, image: np.ndarray, step: int, dataformats: str) -> None:
        self.calls.append((name, image.shape, image.mean((0, 1)).tolist(), step, dataformats))

    def close(self) -> None:
        self.calls.append("closed")


WRITERS: list[Writer] = []


@pytest.fixture
def writer(monkeypatch) -> type[Writer]:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    WRITERS.clear()
    return Writer


def test_tensorboard_gets_the_journals_numbers_and_pictures(tmp_path, writer, monkeypatch, capsys) -> None:
    journal = Journal(tmp_path, True, 3, boards=open_boards(Config(tensorboard=True), tmp_path, 3, "now"))
    journal.record("train", 3, epoch=1, loss=0.5)
    journal.record("val", 4, dice={"WT": 0.8, "ET": None})
    journal.picture("validation", 4, tmp_path / "validation.png")  # there is none yet
    imsave(tmp_path / "validation.png", RED)
    journal.picture("validation", 4, tmp_path / "validation.png")
    journal.close()
    numbers = [("train/loss", 0.5, 3), ("val/dice/WT", 0.8, 4)]
    picture = ("validation", (4, 6, 3), [1.0, 0.0, 0.0], 4, "HWC")
    assert WRITERS[0].calls == [(str(tmp_path / "tensorboard"), 3), *numbers, picture, "closed"]
    monkeypatch.setattr(writer, "add_scalar", lambda *of: (_ for _ in ()).throw(OSError(28, "No space left")))
    full = Journal(tmp_path, True, 3, boards=[TensorBoard(tmp_path, 3)])
    full.record("train", 3, loss=0.5)
    full.close()
    assert "cannot be written (No space left); training continues" in capsys.readouterr().out


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="tensorboard is not installed")
def test_the_real_tensorboard_shows_numbers_and_pictures(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    imsave(tmp_path / "validation.png", RED)
    board = TensorBoard(tmp_path / "board", 0)
    board.record("val", 4, {"dice": {"WT": 0.5}})
    board.picture("validation", 4, tmp_path / "validation.png")
    board.close()
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("val/dice/WT")] == [(4, 0.5)]
    (image,) = events.Images("validation")
    assert (image.step, image.width, image.height) == (4, 6, 4) and image.encoded_image_string.startswith(b"\x89PNG")


def telling(name: str, file: Path, fails_of: str = "") -> Hook:
    """Returns a hook that puts a stand-in of a tracker into every rank; it adds what it is called with to ``file``."""

    def hook(rank: int) -> None:
        def tell(what: list[Any]) -> None:
            with file.open("a") as open_file:
                open_file.write(json.dumps([rank, *what]) + "\n")

        sys.modules[name] = tracker_module(name, tell, fails_of)
        validation.draw_cases = lambda path, *of: imsave(path, RED)  # type: ignore[assignment]

    return hook


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_runs_numbers_and_pictures_and_goes_on_after_resume(name, data, tmp_path) -> None:
    out, file = tmp_path / "run", tmp_path / "calls.jsonl"
    leave = at(after_step.AfterStep, "decide", 0, signalled(signal.SIGTERM), call=3)

    def hook(rank: int) -> None:
        telling(name, file)(rank)
        leave(rank)

    line = [*data, "--tracker", name, "--epochs", "2"]
    trained(2 if name == "wandb" else 1, line, out, expect=75, hook=hook, pictures=True)
    trained(1, ["--resume"], out, hook=telling(name, file), pictures=True)
    calls = [json.loads(text) for text in file.read_text().splitlines()]
    assert {rank for rank, *_ in calls} == {0}, "the first rank alone speaks"
    first, second = (call for _, *call in calls if call[0] == "init")
    assert first == second and first[1] == "seqpar" and first[2] == first[3] and first[2].startswith("run-")
    assert first[4:] == ["allow", 0.01] and [call[0] for _, *call in calls].count("finish") == 2
    logs = [(step, values) for _, what, *call in calls if what == "log" for step, values in [call]]
    rows = read_metrics(out / "metrics.jsonl")
    assert {step: values["train/loss"] for step, values in logs if "train/loss" in values} == {
        row["step"]: row["loss"] for row in rows if row["kind"] == "train"
    }
    assert [step for step, values in logs if values == {"validation": {"png": "validation.png"}}] == [2, 4]
    assert all("val/dice/" in " ".join(values) for step, values in logs if "val/loss" in values)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    return tiny_data(tmp_path_factory.mktemp("data"))


def test_a_tracker_that_does_not_begin_ends_all_ranks_alike_and_one_that_fails_later_none(
    data, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "run"
    hook = telling("wandb", tmp_path / "calls", fails_of="no API key")
    with Launch(2, [*data, "--tracker", "wandb"], out, hook) as launch:
        assert launch.wait() == [2, 2], launch.said()
    assert launch.said().count("error: --tracker wandb does not begin (no API key)") == 1
    assert status(out)["code"] == 2 and not (out / "metrics.jsonl").exists()

    calls: list[Any] = []
    module = tracker_module("trackio", calls.append)
    monkeypatch.setitem(sys.modules, "trackio", module)
    board = Tracker("trackio", tmp_path / "other", {"lr": 1}, "now")
    monkeypatch.setattr(module, "log", lambda values, step: 1 / 0)
    journal = Journal(tmp_path, True, 0, boards=[board])
    journal.record("train", 0, loss=0.5)
    journal.record("train", 1, loss=0.4)
    journal.close()
    assert capsys.readouterr().out.count("warning: trackio failed (division by zero); training continues without") == 1
    assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.4]
    assert Tracker("trackio", tmp_path / "other", {"lr": 1}, "later") and calls[0][2] != calls[-1][2]


@pytest.mark.parametrize(("flag", "package"), [("--tensorboard", "tensorboard"), ("--tracker wandb", "wandb")])
def test_a_package_that_is_not_there_is_named_before_anything_begins(flag, package, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"{flag} needs .* pip install 'seqpar\[{package}\]'"):
        check_feasible(parse(flag.split(), "debug")[1])
    check_feasible(parse([], "debug")[1])
