"""Memory of large tensors on a CPU stays with the process, in place of new pages from the kernel each time."""

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # names of mallopt's parameters, in malloc.h of glibc
_NEVER = -1
_OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # whoever sets these has chosen


def keep_memory(env: Mapping[str, str] = os.environ) -> bool:
    """Lets this process keep the memory that it frees, and take the next tensor's from it; returns whether it does.

    A tensor of more than 32 MiB is otherwise new memory each time, whose pages the kernel fills with zeros one by one
    when they are first written: up to a third of a training step. Nothing is done without glibc, or where the
    environment chooses an allocator's settings or another allocator.
    """
    if any(name.startswith(_OWN) for name in env):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    return bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, _NEVER))
