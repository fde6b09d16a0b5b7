"""Exit codes, and the one place where an exception becomes a line and a code."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from seqpar.data.errors import DataError
from seqpar.launch.job.lasting_output import lasting

FAULT, USAGE, DATA, MEMORY, NONFINITE, PREEMPTED = 1, 2, 3, 4, 5, 75


class NonFinite(RuntimeError):
    """A loss or gradient that is no number, on any rank."""


def code_of(error: BaseException) -> int | None:
    """Returns the exit code of an error that a user can cause, None for a mistake of our own."""
    if isinstance(error, DataError):
        return DATA
    if isinstance(error, NonFinite):
        return NONFINITE
    if is_out_of_memory(error):
        return MEMORY
    if isinstance(error, ValueError):
        return USAGE
    if isinstance(error, (ConnectionError, TimeoutError)):  # ranks that did not start, by name
        return FAULT
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether a GPU or this machine had no memory left (torch's CPU allocator raises a RuntimeError)."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def run(act: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of ``act(arguments)``; a user's error is one line on stderr, no traceback.

    Who reads what it prints may leave before it ends (``| head``): that changes nothing.
    """
    with lasting():
        code = _code(act, arguments)
    if code in (USAGE, DATA, MEMORY):
        _leave_word(code)
    return code


def _leave_word(code: int) -> None:
    """Writes a user's error to the file that SEQPAR_VERDICT names, before this rank leaves.

    Its end makes the launcher end the others, with a signal's code; no status.json may be there yet. The first counts.
    """
    path = os.environ.get("SEQPAR_VERDICT")
    if path:
        with suppress(OSError), open(path, "x") as file:
            file.write(f"{code}\n")


def _code(act: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    try:
        return act(sys.argv[1:] if arguments is None else arguments)
    except Exception as error:
        code = code_of(error)
        if code is None:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        return code
