"""Lets one process prepare while the others poll a file, since a collective would time out."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import STATE, write_json
from seqpar.data.preparation.cache_writer import ELSEWHERE, as_cache_error
from seqpar.data.workers import Progress

_POLL, _GRACE, _BEAT = 0.2, 3.0, 2.0  # seconds
_SHARED = (  # the variables that all processes of one run share, and other runs do not
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def run_token() -> str:
    """Returns a name for this run, the same in all its processes, made from the launcher's variables."""
    return "/".join(os.environ.get(name, "") for name in _SHARED)


class ProgressFile:
    """The file in which the preparing process reports its progress, and that it is alive."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.token, self.last, self.count = path, token, 0.0, 0
        self.file = _state_file(path, token)

    def tell(self, done: float, total: int) -> None:
        """Records how many cases are done; writes at most every few seconds."""
        if done == total or time.monotonic() - self.last > _BEAT:
            self.write(state="preparing", done=done, total=total)

    def write(self, **content: Any) -> None:
        """Replaces the content of the file."""
        self.last, self.count = time.monotonic(), self.count + 1
        with as_cache_error(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            content = {"run": self.token, "beat": self.count, **content}
            write_json(self.file, content, durable=False)  # frequent, and useless after a crash


@contextmanager
def writing_progress(path: Path, token: str) -> Iterator[ProgressFile]:
    """Yields the progress file; an error in the block is passed on to the waiting processes, then raised."""
    announcement = ProgressFile(path, token)
    announcement.write(state="preparing", done=0, total=0)
    try:
        yield announcement
    except BaseException as error:
        fault = error if isinstance(error, DataError) else DataError(path, f"its preparation failed: {error!r}")
        with suppress(DataError):
            announcement.write(state="failed", path=fault.path, problem=fault.problem)
        raise
    with as_cache_error(path):
        announcement.file.unlink(missing_ok=True)


def wait_for(
    path: Path,
    marker: Path,
    token: str,
    is_ready: Callable[[], bool],
    deadline: float,
    progress: Progress,
) -> None:
    """Waits until another process has prepared ``path``; raises the error that it met, if any.

    marker: the file that is written last; ``is_ready`` is called at the start and whenever this file changes.
    deadline: seconds without news after which the other process counts as lost.
    """
    changed = time.monotonic()
    state: dict[str, Any] | None = None
    index: tuple[int, int] | None = None
    is_checked = False
    while True:
        if not is_checked or _stamp(marker) != index:
            is_checked, index = True, _stamp(marker)
            if is_ready():
                return
        now = time.monotonic()
        announced_state = _read(_state_file(path, token))
        if announced_state is not None and announced_state != state:
            state, changed = announced_state, now
            progress(announced_state.get("done", 0), announced_state.get("total", 0))
        if state and state["state"] == "failed" and now - changed > _GRACE:
            raise DataError(state["path"], state["problem"])  # not an earlier run's, which would be replaced by now
        if not os.access(_existing(path), os.W_OK):
            raise DataError(path, f"has no finished cache and cannot be written; {ELSEWHERE}")
        if now - changed > deadline:
            raise DataError(
                path,
                f"the process that prepares it has been silent for {deadline:.0f} s; look at its output, "
                "and run prepare separately",
            )
        time.sleep(_POLL)


def _state_file(path: Path, token: str) -> Path:
    """Returns the file of a run; each run has its own, since several may share a folder."""
    return path / f"{STATE}{hashlib.blake2b(token.encode(), digest_size=4).hexdigest()}.json"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    except (OSError, ValueError):
        return None


def _existing(path: Path) -> Path:
    return path if path.exists() or path.parent == path else _existing(path.parent)
