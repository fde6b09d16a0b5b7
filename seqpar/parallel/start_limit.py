"""A time limit for making groups of ranks: the call of a library that hangs there cannot be interrupted.

A wrong network interface or a rank that never comes would otherwise keep all others, and their allocation, for ever.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from seqpar.parallel.watchdog import these


def _end() -> None:
    os._exit(1)


class StartLimit:
    """Ends this process when making a group takes too long, after one rank has named the group and who is behind.

    - ``store``: through which ranks tell each other how far they are
    - ``left_s``: returns the seconds that the next step may take
    - ``end``: ends the process
    """

    def __init__(
        self, store: Any, rank: int, world: int, left_s: Callable[[], float], end: Callable[[], object] = _end
    ) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store  # not busy with what the main thread awaits
        self._rank, self._world, self._left_s, self._end = rank, world, left_s, end
        self._number = 0

    @contextmanager
    def making(self, name: str, ranks: Sequence[int]) -> Iterator[None]:
        """Limits what happens inside, which all ranks of the world enter in one order, whoever is in the group."""
        self._number += 1
        self._store.set(f"making/{self._rank}", str(self._number))
        limit_s = self._left_s()
        what = f"the {name} group of {these(ranks)}"
        timer = threading.Timer(limit_s, self._overdue, (self._number, what, limit_s))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _overdue(self, making: int, what: str, limit_s: float) -> None:
        keys = [f"making/{rank}" for rank in range(self._world)]
        try:
            numbers = [int(self._store.get(key)) if self._store.check([key]) else 0 for key in keys]
        except RuntimeError:  # the store went with rank 0
            numbers = [making] * self._world
        behind = [rank for rank, number in enumerate(numbers) if number < making]
        if self._rank == min(set(range(self._world)) - set(behind), default=self._rank):
            why = f"{these(behind)} never came" if behind else (
                "all ranks came, but do not reach each other: check NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; "
                "NCCL_DEBUG=INFO says what it tries"
            )  # fmt: skip
            print(f"error: {what} was not made within {limit_s:.0f} s: {why}", file=sys.stderr, flush=True)
        self._end()
