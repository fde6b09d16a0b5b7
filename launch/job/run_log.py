"""A run's log file: what this process prints, line by line with the time, without colours."""

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from seqpar.launch.job.display import EVERY_S

_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colours, and the erasing of a line


class RunLog:
    """Collects what is printed; once ``open`` names the file, that and all that follows is written to it.

    Of a line that changes in place, its last state is kept, and one state a minute. What cannot be written ends no run.
    """

    def __init__(self, active: bool = True) -> None:
        self.active = active  # else no file is written
        self._early: list[str] = []
        self._file: IO[str] | None = None
        self._last = time.monotonic()

    def open(self, path: Path, say: Callable[[str], Any] = print) -> None:
        """Opens the file, to which an earlier start of the run may have written; ``say`` prints a warning."""
        if not self.active:
            return
        try:
            self._file = open(path, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
            self._file.write(_stamped(f"$ {shlex.join(sys.argv)}"))
            self._file.writelines(self._early)
        except OSError as error:
            say(f"warning: {path} cannot be written ({error.strerror}): this run has no log file")
        self._early = []

    def line(self, text: str) -> None:
        """Takes a whole line."""
        self._last = time.monotonic()
        if self._file is None:
            self._early.append(_stamped(text))
            return
        with suppress(OSError, ValueError):
            self._file.write(_stamped(text))

    def state(self, text: str) -> None:
        """Takes a state of a line that changes in place."""
        if text and time.monotonic() - self._last >= EVERY_S:
            self.line(text)

    def close(self) -> None:
        with suppress(OSError):
            if self._file is not None:
                self._file.close()


class _Copied:
    """A stream that hands what it writes to a log as well."""

    def __init__(self, stream: Any, log: RunLog) -> None:
        self._stream, self._log, self._open = stream, log, ""

    def write(self, text: str) -> int:
        self._stream.write(text)
        *lines, self._open = (self._open + text).split("\n")
        for line in lines:
            self._log.line(_last_state(line))
        if text and "\r" in self._open:  # print writes its end too, which may be nothing
            self._open = "\r" + _last_state(self._open)
            self._log.state(self._open[1:])
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _last_state(line: str) -> str:
    """Returns what a terminal shows of a line that was written over, without colours."""
    return _CODES.sub("", line.rpartition("\r")[2])


def _stamped(line: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}".rstrip() + "\n"


@contextmanager
def recorded(active: bool) -> Iterator[RunLog]:
    """Yields a log of what this process prints within the block, where ``active``; elsewhere it takes nothing."""
    log, before = RunLog(active), (sys.stdout, sys.stderr)
    if active:
        sys.stdout, sys.stderr = (_Copied(stream, log) for stream in before)  # type: ignore[assignment]
    try:
        yield log
    finally:
        sys.stdout, sys.stderr = before
        log.close()
