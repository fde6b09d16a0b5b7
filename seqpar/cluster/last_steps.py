"""The last steps of a process that has to end: none may hold it up, whatever disk or pipe does not answer."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

WAIT_S = 10.0  # for all steps together
LEAST_S = 1.0  # for each of them, also after one that hangs


class LastSteps:
    """Takes steps one after the other, each in a thread of its own; one that hangs is left behind."""

    def __init__(self) -> None:
        self._until = time.monotonic() + WAIT_S

    def take(self, step: Callable[[], object]) -> None:
        """Calls ``step``, and returns once it is done, has failed, or has had its time."""

        def attempt() -> None:
            with suppress(Exception):
                step()

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(max(LEAST_S, self._until - time.monotonic()))
