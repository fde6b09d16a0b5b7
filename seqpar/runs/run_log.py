"""A run's log file: what this process prints, line by line with the time, without colours.

Of five folds each has such a file with all lines. On the screen, what the fold before has said of its start in the same
words is not said again.
"""

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from seqpar.data.files import SPECIAL, is_special
from seqpar.terminal import EVERY_S, typed_command

FOLD_BEFORE = (
    "SEQPAR_FOLD_BEFORE"  # variable of a fold's training: log file of the fold before, which a person has read
)
FIRST_EPOCH = "epoch "  # begins the first line after those of the start
_STAMP = "%Y-%m-%d %H:%M:%S "
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
        if is_special(path):  # to open a pipe may never end
            say(f"warning: {path} {SPECIAL}: this run has no log file")
            self._early = []
            return
        try:
            self._file = open(path, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115
            self._file.write(_stamped(f"$ {shlex.join(typed_command())}"))
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
    """A stream that hands what it writes to a log as well.

    - ``known``: lines that the log alone gets
    """

    def __init__(self, stream: Any, log: RunLog, known: Collection[str] = ()) -> None:
        self._stream, self._log, self._open = stream, log, ""
        self._known, self._waits = known, ""  # a known line without its end, which the next write may bring

    def write(self, text: str) -> int:
        self._stream.write(self._news(text) if self._known else text)
        *lines, self._open = (self._open + text).split("\n")
        for line in lines:
            self._log.line(_last_state(line))
        if text and "\r" in self._open:  # print writes its end too, which may be nothing
            self._open = "\r" + _last_state(self._open)
            self._log.state(self._open[1:])
        return len(text)

    def _news(self, text: str) -> str:
        """Returns what the stream gets: all but known lines."""
        whole, was_begun = self._waits + text, bool(self._open) and not self._waits
        *lines, rest = whole.split("\n")
        kept = [line for n, line in enumerate(lines) if (was_begun and n == 0) or not self._is_known(line)]
        self._waits = rest if self._is_known(rest) and (lines or not was_begun) else ""
        return "".join(f"{line}\n" for line in kept) + ("" if self._waits else rest)

    def _is_known(self, line: str) -> bool:
        return _last_state(line).rstrip() in self._known

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _said_before() -> frozenset[str]:
    """Returns the lines of the start of the fold before, none if there is none."""
    path = Path(os.environ.get(FOLD_BEFORE, ""))
    if is_special(path):
        return frozenset()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return frozenset()
    texts = (line[len(time.strftime(_STAMP)) :] for line in lines)
    return frozenset(takewhile(lambda text: not text.startswith(FIRST_EPOCH), texts)) - {""}


def _last_state(line: str) -> str:
    """Returns what a terminal shows of a line that was written over, without colours."""
    return _CODES.sub("", line.rpartition("\r")[2])


def _stamped(line: str) -> str:
    return f"{time.strftime(_STAMP)}{line}".rstrip() + "\n"


@contextmanager
def logging_output(active: bool) -> Iterator[RunLog]:
    """Yields a log of what this process prints within the block, where ``active``; elsewhere it takes nothing."""
    log, before = RunLog(active), (sys.stdout, sys.stderr)
    if active:
        sys.stdout = _Copied(sys.stdout, log, _said_before())  # type: ignore[assignment]
        sys.stderr = _Copied(sys.stderr, log)  # type: ignore[assignment]
    try:
        yield log
    finally:
        sys.stdout, sys.stderr = before
        log.close()
