"""Shows on the first rank how far the prediction of several cases is."""

import time
from collections.abc import Sequence

from seqpar.data.formats.dataset import Case
from seqpar.data.workers import ReportProgress, no_item_progress
from seqpar.terminal import Display, bar
from seqpar.text import clock, in_flags


class CaseProgress:
    """Shows which case is predicted, which share of it is done, and how long all of them still take.

    ``active``: whether this rank speaks.
    """

    def __init__(self, cases: Sequence[Case], active: bool) -> None:
        self.cases, self.active = cases, active
        self._display, self._began = Display("stdout"), time.perf_counter()

    def begin(self, number: int) -> ReportProgress:
        """Returns a function that shows which share of case ``number`` is done."""
        if not self.active:
            return no_item_progress

        def tell(share: float) -> None:
            spent, done, total = time.perf_counter() - self._began, number + share, len(self.cases)
            left = f"{clock(spent / done * (total - done))} left" if done else "? left"
            self._display.show([f"case {number + 1}/{total} {bar(share)} {share:.0%}", left, self.cases[number].id])

        tell(0.0)
        return tell

    def say(self, text: str) -> None:
        """Prints text on lines of its own."""
        if self.active:
            self._display.say(text)

    def complain(self, text: str) -> None:
        """Prints an error to stderr."""
        if self.active:
            self._display.say(f"error: {in_flags(text)}", "stderr")

    def warn(self, text: str) -> None:
        """Prints a warning to stderr."""
        if self.active:
            self._display.say(f"warning: {text}", "stderr")

    def close(self) -> None:
        """Ends what is shown."""
        self._display.close()
