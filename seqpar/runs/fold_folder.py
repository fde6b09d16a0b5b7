"""A folder of five folds, each a run of its own, as ``train --fold all5`` leaves it.

OUT/fold0 … OUT/fold4   run folders, as train writes them
OUT/status.json         how all of them stand: "step" counts the folds that have finished
OUT/folds.json          the flags that folds begin with, so that --resume needs OUT alone
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seqpar.cluster import exit_codes
from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import read_json, write_json
from seqpar.data.formats.splits import FOLDS
from seqpar.runs.run_folder import FOLDS_FILE, holds_folds, holds_run, read_config, read_status
from seqpar.terminal import next_command


def has_ended(out: str | Path) -> bool:
    """Returns whether a run, or a whole of five, has finished, or failed of what would come again if it went on.

    A run that has taken all its steps and lacks a file, as on a full disk, has not.
    """
    status = read_status(out)
    if status.get("state") == "failed" and status.get("code") == exit_codes.DATA and status.get("step"):
        return status["step"] != status.get("steps")
    return has_finished(status) or status.get("state") == "failed" and status.get("code") in exit_codes.FINAL


def has_finished(status: Mapping[str, Any]) -> bool:
    """Returns whether a status.json says so."""
    return status.get("state") == "finished"


def runs_of(out: str | Path) -> list[str]:
    """Returns the folders of the five runs, whether they are there or not."""
    return [f"{out}/fold{number}" for number in range(FOLDS)]


def refuse_other_folds(out: str | Path) -> None:
    """Raises DataError if a folder of five folds holds another run in place of one."""
    for number, run in enumerate(runs_of(out)):
        if not holds_run(run):
            continue
        fold = read_config(run).get("config", {}).get("fold", str(number))
        if str(fold) != str(number):
            raise DataError(run, f"holds a run of fold {fold}: put that of fold {number} back, or remove it")


def started_folds(out: str | Path) -> list[str]:
    """Returns the folders of the runs that have begun."""
    return [run for run in runs_of(out) if holds_run(run)]


def all_ended(out: str | Path) -> bool:
    """Returns whether five folds have begun and are over: all have finished, or one has failed for good."""
    runs = started_folds(out)
    if not runs:
        return False
    finished = [has_finished(read_status(run)) for run in runs]
    failed = any(has_ended(run) and not done for run, done in zip(runs, finished))
    return has_ended(out) or failed or len(runs) == FOLDS and all(finished)


def expand_folds(paths: Sequence[Path]) -> list[Path]:
    """Returns the paths, with a folder of five replaced by its run folders."""
    return [run for path in paths for run in (finished_runs(path) if holds_folds(path) else [path])]


def finished_runs(out: str | Path) -> list[Path]:
    """Returns the run folders of five folds that have finished.

    Raises ``ValueError`` with the lines to type where some have not: a mean over other folds has to be asked for.
    """
    runs = [Path(run) for run in runs_of(out)]
    finished = [run for run in runs if has_finished(read_status(run))]
    refuse_other_folds(out)
    if len(finished) < FOLDS:
        those = "none has" if not finished else f"{', '.join(run.name for run in finished)} {_has(len(finished))}"
        predict = next_command("predict", *finished, "-i", "IMAGES", "-o", "PREDICTIONS")
        only = f", or average these: {predict}" if finished else ""
        resume = next_command("train", "--resume", "--fold", "all5", "--out", out)
        raise ValueError(f"{out} is to hold five folds, and {those} finished: continue with {resume}{only}")
    return runs


def _has(count: int) -> str:
    return "has" if count == 1 else "have"


def read_flags(out: str | Path) -> list[str]:
    """Returns the flags that folds begin with, [] where none are written; raises ``DataError`` for a damaged file."""
    path = Path(out) / FOLDS_FILE
    content = read_json(path) if path.exists() else {"flags": []}
    flags = content.get("flags") if isinstance(content, dict) else None
    if not isinstance(flags, list) or not all(isinstance(flag, str) for flag in flags):
        raise DataError(path, "is damaged (no list of flags): restore it, or name another --out")
    return flags


def write_flags(out: str | Path, flags: Sequence[str]) -> None:
    """Writes the flags that folds begin with; makes the folder."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        write_json(Path(out) / FOLDS_FILE, {"flags": list(flags)})
    except OSError as error:
        raise unwritable(f"--out {out}", error) from None
