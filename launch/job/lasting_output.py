"""Output that outlives its reader: nobody's closed pipe or full disk ends what takes days."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Lasting:
    """A stream that drops what cannot be written, and after its reader has gone everything."""

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
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what is buffered, and the interpreter's end, find a way out
            os.close(nowhere)
        except (OSError, ValueError):  # a log's disk is full, or the stream was closed
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting() -> Iterator[None]:
    """Lets stdout and stderr outlive their readers."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Lasting(before[0]), Lasting(before[1])
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
