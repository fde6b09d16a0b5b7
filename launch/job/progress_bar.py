"""Progress over cases, on a terminal or in a log."""

import sys
import time


class ProgressBar:
    """Prints to stderr how many cases are done: a bar on a terminal, else a line after every tenth of them.

    activity: what is done to the cases, such as "preparing".
    """

    def __init__(self, activity: str) -> None:
        self.activity, self.start, self.shown = activity, time.monotonic(), -1

    def __call__(self, done: int, total: int) -> None:
        """Shows that ``done`` of ``total`` cases are done."""
        on_terminal = sys.stderr.isatty()
        step = done if on_terminal else done * 10 // max(total, 1)
        if step == self.shown or total == 0:
            return
        self.shown, spent = step, time.monotonic() - self.start
        left = f", {spent / done * (total - done):.0f} s left" if 0 < done < total else ""
        line = f"{self.activity}: {done}/{total} cases in {spent:.0f} s{left}"
        if on_terminal:
            filled = 30 * done // total
            line = f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {line}"
        print(line, end="" if on_terminal and done < total else "\n", file=sys.stderr, flush=True)
