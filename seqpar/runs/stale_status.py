"""A run that was killed cannot write so: its status.json still says "running", but its process has ended."""

import sys
from pathlib import Path

from seqpar.display import coloured
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_folder import read_status
from seqpar.runs.run_lock import RunLock


def killed(run: str | Path) -> str:
    """Returns a sentence on a run folder whose training was killed; "" where none certainly was.

    - ``run``: a run folder; a file, or a folder that holds no run, is none
    """
    run = Path(run)
    if not _says_running(run):
        return ""
    process = RunLock(run).abandoned_by()
    if not process or not _says_running(run):  # it may have ended while the lock was looked at
        return ""
    return f"{run} was killed: its status.json says running, but {process}; {_last_step(run)}"


def warn_if_killed(*folders: Path) -> None:
    """Prints a warning on stderr for each run folder among ``folders`` whose training was killed."""
    for folder in dict.fromkeys(folders):
        if sentence := killed(folder):
            line = f"warning: {sentence}; go on with train --resume --out {folder}"
            print(coloured(line, sys.stderr), file=sys.stderr, flush=True)


def _says_running(run: Path) -> bool:
    return read_status(run).get("state") == "running"


def _last_step(run: Path) -> str:
    try:
        steps = [row["step"] + 1 for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
        return f"the last step that it recorded is {max(steps)}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it recorded no step"
