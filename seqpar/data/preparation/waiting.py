"""One process prepares and the others wait: they poll a file, because a collective would time out."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import write_json
from seqpar.data.preparation.cache_writer import ELSEWHERE, STATE, writable
from seqpar.data.workers import Progress

_POLL, _GRACE, _BEAT = 0.2, 3.0, 2.0  # seconds
_SHARED = (  # what all processes of one run have in common, and other runs do not
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def run_token() -> str:
    """Returns a name of this run that all of its processes know without talking to each other."""
    return "/".join(os.environ.get(name, "") for name in _SHARED)


class Announcement:
    """What the preparing process says to those who wait: how far it is, and that it is alive."""

    def __init__(self, path: Path, token: str) -> None:
        self.path, self.token, self.last, self.count = path, token, 0.0, 0
        self.file = _state_file(path, token)

    def tell(self, done: int, total: int) -> None:
        """Says how many cases are done; called often, it writes every few seconds."""
        if done == total or time.monotonic() - self.last > _BEAT:
            self.write(state="preparing", done=done, total=total)

    def write(self, **content: Any) -> None:
        """Replaces what the file says."""
        self.last, self.count = time.monotonic(), self.count + 1
        with writable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            content = {"run": self.token, "beat": self.count, **content}
            write_json(self.file, content, durable=False)  # frequent, and of no use after a crash


@contextmanager
def announced(path: Path, token: str) -> Iterator[Announcement]:
    """Returns the announcement; what goes wrong inside is handed on to those who wait, then raised."""
    announcement = Announcement(path, token)
    announcement.write(state="preparing", done=0, total=0)
    try:
        yield announcement
    except BaseException as error:
        fault = error if isinstance(error, DataError) else DataError(path, f"preparing it failed: {error!r}")
        with suppress(DataError):
            announcement.write(state="failed", path=fault.path, problem=fault.problem)
        raise
    with writable(path):
        announcement.file.unlink(missing_ok=True)


def wait_for(
    path: Path,
    marker: Path,
    token: str,
    is_ready: Callable[[], bool],
    deadline: float,
    progress: Progress,
) -> None:
    """Returns when what is made in ``path`` is ready; raises what its making raised, or `deadline` s of silence.

    ``marker`` is the file that is written last: whether all is ready is asked at first, and when that file changes.
    """
    changed = time.monotonic()
    state: dict[str, Any] | None = None
    index: tuple[int, int] | None = None
    asked = False
    while True:
        if not asked or _stamp(marker) != index:
            asked, index = True, _stamp(marker)
            if is_ready():
                return
        now = time.monotonic()
        seen = _read(_state_file(path, token))
        if seen is not None and seen != state:
            state, changed = seen, now
            progress(seen.get("done", 0), seen.get("total", 0))
        if state and state["state"] == "failed" and now - changed > _GRACE:
            raise DataError(state["path"], state["problem"])  # an earlier run's would be replaced by now
        if not os.access(_existing(path), os.W_OK):
            raise DataError(path, f"holds no finished cache and cannot be written; {ELSEWHERE}")
        if now - changed > deadline:
            raise DataError(
                path,
                f"the process that prepares it has been silent for {deadline:.0f} s; look what it printed, "
                "and run prepare by itself",
            )
        time.sleep(_POLL)


def _state_file(path: Path, token: str) -> Path:
    """Returns the file of one run: another's in the same folder would replace what it says."""
    return path / f"{STATE}{hashlib.blake2b(token.encode(), digest_size=4).hexdigest()}.json"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    except (OSError, ValueError):
        return None


def _existing(path: Path) -> Path:
    return path if path.exists() or path.parent == path else _existing(path.parent)
