"""Measures how long this rank waited for others, by the host's clock or by events on the GPU's stream."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WaitClock:
    """Adds up the seconds that this rank waited for others between ``measure`` and ``take_waited``.

    Outside of these two it costs nothing.
    """

    def __init__(self) -> None:
        self._runs = False
        self._waited_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # start and end of the stream's waits
        self._ready: float | torch.cuda.Event | None = None
        self._marks, self._usual_marks = 0, 0  # in this backward, and in the last one

    def measure(self) -> None:
        """Starts the clock at zero."""
        self._runs, self._waited_s, self._events, self._ready, self._marks = True, 0.0, [], None, 0

    def take_waited(self) -> float:
        """Returns the seconds waited since ``measure`` and stops the clock; the device must be synchronized."""
        seconds = self._waited_s + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self._runs, self._events = False, []
        return seconds

    @contextmanager
    def waiting(self, on_gpu: bool) -> Iterator[None]:
        """Counts the time spent inside as waiting, either of the device's stream or of this process."""
        if not self._runs:
            yield
        elif on_gpu:
            begin = _record()
            yield
            self._events.append((begin, _record()))
        else:
            began = time.perf_counter()
            yield
            self._waited_s += time.perf_counter() - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing inside, for waits that overlap with this rank's own work."""
        runs, self._runs = self._runs, False
        try:
            yield
        finally:
            self._runs = runs

    def mark_ready(self, on_gpu: bool) -> None:
        """Records that this rank has finished its own work; only the last call counts.

        A GPU records one event, at the call that was the last one in the previous backward.
        """
        self._marks += 1
        if self._runs and not (on_gpu and self._marks < self._usual_marks):
            self._ready = _record() if on_gpu else time.perf_counter()

    def count_since_ready(self) -> None:
        """Counts the time since ``mark_ready`` as waiting."""
        ready, self._ready = self._ready, None
        self._usual_marks, self._marks = self._marks, 0
        if isinstance(ready, float):
            self._waited_s += time.perf_counter() - ready
        elif ready is not None:
            self._events.append((ready, _record()))


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
