"""The files of a run folder: config.json and status.json."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch

import seqpar
from seqpar.data.errors import DataError
from seqpar.data.files import write_json
from seqpar.launch.job.next_command import next_command
from seqpar.launch.runs.archive import ABOUT, CONFIG, is_archive, read_archived
from seqpar.launch.runs.run_lock import RunLock
from seqpar.launch.settings.config import Config


def read_config(run: str | Path) -> dict[str, Any]:
    """Returns the config.json of a run folder, or of a run that was exported."""
    if is_archive(run):
        return read_archived(run, CONFIG)
    path = Path(run) / CONFIG
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing, so {run} is no run folder: name the folder that train wrote (--out)"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it or train again") from None


def describe_run(
    config: Config, preset: str, dataset: dict[str, Any], layout: dict[str, Any], history: Sequence[Any] = ()
) -> dict[str, Any]:
    """Returns the content of config.json: settings, data set, layout of the ranks, versions, commit, command.

    ``history``: the starts of the run so far, this one included, with the settings that each changed.
    """
    return {
        "config": json.loads(config.to_json()),
        "preset": preset,
        "dataset": dataset,
        "layout": layout,
        "versions": {
            "seqpar": seqpar.__version__,
            "torch": torch.__version__,
            "numpy": numpy.__version__,
            "python": platform.python_version(),
            "safetensors": safetensors.__version__,
        },
        "commit": _commit(),
        "command": sys.argv,
        "history": list(history),
    }


def _commit() -> str:
    """Returns the git commit of this code, "" where it is no checkout."""
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return git.stdout.strip()


def result_files(run: Path) -> list[Path]:
    """Returns the files that a finished run leaves for people, those that are there."""
    names = ["progress.png", "validation.png", "validation/summary.json", "metrics.jsonl"]
    names += ["model.safetensors", "config.json", "train.log"]
    return [run / name for name in names if (run / name).exists()]


def next_lines(run: Path) -> list[str]:
    """Returns the commands that usually follow a finished run."""
    predict = next_command("predict", run, "-i", "IMAGES", "-o", "PREDICTIONS")
    return [f"next: {predict}", f"next: {next_command('report', run)}  (curves, scores and cases on one page)"]


def write_window(run: Path, windows: Mapping[str, float], step: int, whole_grid: Sequence[int] = ()) -> None:
    """Writes window.json: the mean Dice of the best checkpoint by kind of window, the better first.

    - ``whole_grid``: the most tokens per direction in whole passes
    """
    content = {"window": next(iter(windows)), "dice": dict(windows), "step": step, "whole_grid": list(whole_grid)}
    write_json(run / "window.json", content)


def read_windows(run: Path) -> tuple[dict[str, float], tuple[int, ...]]:
    """Returns what validation measured: the mean Dice by kind of window, the better first, and the most tokens per
    direction in whole passes; both are empty where none is recorded.
    """
    try:
        windows = read_archived(run, ABOUT) if is_archive(run) else json.loads((run / "window.json").read_text())
        dice = {str(window): float(mean) for window, mean in windows.get("dice", {}).items()}
        return dice, tuple(int(side) for side in windows.get("whole_grid", ()))
    except FileNotFoundError:
        return {}, ()
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if is_archive(run):
            raise DataError(run, f"its {ABOUT} is damaged ({error}); copy it again") from None
        raise ValueError(f"{run / 'window.json'} is damaged ({error}): remove it, and name --window yourself") from None


def read_best_step(run: str | Path) -> int | None:
    """Returns the step of the best checkpoint of a run folder, None where none is recorded."""
    try:
        return int(json.loads((Path(run) / "window.json").read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Status:
    """Writes ``status.json``: whether a run is running, finished, preempted or failed, and why.

    ``step`` is where the run is, ``steps`` where it ends. ``lock``: of the run folder; without holding it, nothing is
    written.
    """

    def __init__(self, out: Path, lock: RunLock | None = None) -> None:
        self.path, self.lock = out / "status.json", lock
        self.step = self.steps = 0

    def write(self, state: str, why: str = "", code: int = 0, durable: bool = True) -> None:
        """Writes the state.

        - ``code``: the exit code that goes with it
        - ``durable``: wait until it is on disk. False where this process ends in trouble: its peers wait for that end,
          the disk may be what does not answer, and other processes read the new file at once anyway
        """
        if self.lock is not None and self.lock.is_lost():
            return
        content = {"state": state, "step": self.step, "steps": self.steps, "why": why, "code": code}
        write_json(self.path, {**content, "time": time.time()}, durable)

    def write_unless_over(self, state: str, why: str = "", code: int = 0, durable: bool = True) -> None:
        """Writes, unless another rank has written how the run ended: the first cause is kept."""
        try:
            if json.loads(self.path.read_text())["state"] != "running":
                return
        except (OSError, ValueError, KeyError):
            pass
        self.write(state, why, code, durable)
