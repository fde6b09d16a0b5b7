"""Output that survives its reader: a closed pipe or a full disk does not end a run of days."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Lasting:
    """A stream that drops what it cannot write, and everything once its reader has closed the pipe."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())  # the buffer is flushed once more, at the interpreter's exit at least
            os.close(null)
        except (OSError, ValueError):  # the disk of a log is full, or the stream is closed
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting() -> Iterator[None]:
    """Keeps stdout and stderr writable within the block, even if their readers close them."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Lasting(before[0]), Lasting(before[1])
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
