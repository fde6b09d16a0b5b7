"""Exit codes, and the one place where an exception becomes a line and a code."""

import sys
from collections.abc import Callable, Sequence

import torch

from seqpar.data.faults import DataError

USAGE, DATA, MEMORY, NONFINITE, PREEMPTED = 2, 3, 4, 5, 75


def code_of(error: BaseException) -> int | None:
    """Returns the exit code of an error that a user can cause, None for a mistake of our own."""
    if isinstance(error, DataError):
        return DATA
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return MEMORY
    if isinstance(error, ValueError):
        return USAGE
    return None


def run(act: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code of ``act(arguments)``; a user's error is one line on stderr, no traceback."""
    try:
        return act(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        return 0
    except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
        code = code_of(error)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return code if code is not None else 1
