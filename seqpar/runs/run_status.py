"""status.json: written at each turn, corrected where the process was killed; at which step each start began."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from seqpar.data.files import write_json
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_folder import holds_folds, read_status
from seqpar.runs.run_lock import RunLock
from seqpar.settings.config import Config
from seqpar.settings.rules import with_absolute_paths
from seqpar.terminal import coloured, typed_command
from seqpar.text import flag_name


class StatusFile:
    """Writes ``status.json``: whether a run is running, finished, preempted or failed, and why.

    ``step`` is where the run is, ``steps`` where it ends. ``lock``: of the run folder; without holding it, nothing is
    written.
    """

    def __init__(self, out: Path, lock: RunLock | None = None) -> None:
        self.path, self.lock = out / "status.json", lock
        self.step = self.steps = 0

    def open(self) -> None:
        """Writes that a run is running; what a finished one says stays until ``begin``, as it may not be resumed."""
        before = read_status(self.path.parent)
        self.step, self.steps = _whole(before, "step"), _whole(before, "steps")
        if before.get("state") != "finished":
            self.write("running")

    def begin(self) -> None:
        """Writes that a run is running, unless another rank has failed."""
        if read_status(self.path.parent).get("state") == "finished":
            self.write("running")
        self.write_unless_over("running")

    def write(self, state: str, why: str = "", code: int = 0, durable: bool = True) -> None:
        """Writes the state.

        - ``code``: the exit code that goes with it
        - ``durable``: wait until it is on disk. False where this process ends in trouble: its peers wait for that end,
          the disk may be what does not answer, and other processes read the new file at once anyway
        """
        if self.lock is not None and self.lock.is_lost():
            return
        content = {"state": state, "step": self.step, "steps": self.steps, "why": why, "code": code}
        content["time"] = time.time()
        try:
            write_json(self.path, content, durable)
        except OSError:  # of a full disk, which has room in the old file: else a failed run would read as killed
            if state == "running" or not self.path.is_file():
                raise
            with open(self.path, "r+") as file:
                file.write(json.dumps(content, indent=2) + "\n")
                file.truncate()

    def write_unless_over(self, state: str, why: str = "", code: int = 0, durable: bool = True) -> None:
        """Writes, unless another rank has written how the run ended: the first cause is kept."""
        now = read_status(self.path.parent)
        if now.get("state", "running") == "running":
            self.step, self.steps = self.step or _whole(now, "step"), self.steps or _whole(now, "steps")
            self.write(state, why, code, durable)


def _whole(status: Mapping[str, Any], name: str) -> int:
    return n if isinstance(n := status.get(name), int) else 0


def describe_kill(run: str | Path) -> str:
    """Returns a sentence on a run folder whose training was killed; "" where none certainly was.

    - ``run``: a run folder; a file, or a folder that holds no run, is none, nor is a folder of five folds
    """
    run = Path(run)
    if holds_folds(run) or not _says_running(run):  # each fold has a lock of its own
        return ""
    process = RunLock(run).abandoned_by()
    if not process or not _says_running(run):  # it may have ended while the lock was looked at
        return ""
    return f"{run} was killed: its status.json says running, but {process}; {_last_step(run)}"


def warn_if_killed(*folders: Path) -> None:
    """Prints a warning on stderr for each run folder among ``folders`` whose training was killed."""
    for folder in dict.fromkeys(folders):
        if sentence := describe_kill(folder):
            line = f"warning: {sentence}; continue with train --resume --out {folder}"
            print(coloured(line, sys.stderr), file=sys.stderr, flush=True)


def warn_if_not_validated(*folders: Path) -> None:
    """Prints a warning on stderr for each run folder among ``folders`` that has weights, and none that are the best."""
    for folder in dict.fromkeys(folders):
        points = folder / "checkpoints"
        if (points / "latest").is_file() and not (points / "best").is_file():
            line = (
                f"warning: {folder} has not been validated, so none of its weights are the best: the latest are taken"
            )
            print(coloured(line, sys.stderr), file=sys.stderr, flush=True)


def _says_running(run: Path) -> bool:
    return read_status(run).get("state") == "running"


def _last_step(run: Path) -> str:
    try:
        steps = [row["step"] + 1 for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
        return f"the last step that it recorded is {max(steps)}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it recorded no step"


Changes = Mapping[str, Sequence[Any]]  # name of a setting: what it was, what it is
_OF_ONE_START = ("out", "resume", "again", "take_over", "dry_run")  # these say how a run is started, not what it is


def changed_settings(before: Config, now: Config) -> dict[str, list[Any]]:
    """Returns the settings that differ, each with what it was and what it is."""
    before, now = map(with_absolute_paths, (before, now))
    pairs = {f.name: [getattr(before, f.name), getattr(now, f.name)] for f in fields(Config)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in _OF_ONE_START}


def changes_line(changes: Changes) -> str:
    """Returns the changes in a line, as typed on the command line; "" for none."""
    listed = ", ".join(f"--{flag_name(name)} {_typed(was)} -> {_typed(new)}" for name, (was, new) in changes.items())
    return listed and f"changed since this run was last started: {listed}"


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (" ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)) or "unset"


def append_start(history: Sequence[Any], step: int, ranks: int, changes: Changes) -> list[Any]:
    """Returns a run's history with this start of it; ``step``: from where it resumes."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return [*history, {"step": step, "time": now, "ranks": ranks, "changed": dict(changes), "command": typed_command()}]
