"""Progress over cases, on a terminal or in a log."""

import sys
import time
from typing import Any


def silent(done: int, total: int) -> None:
    pass


def bar(text: str) -> Any:
    def show(done: int, total: int) -> None:
        if total and (sys.stderr.isatty() or done in (0, total)):
            print(f"\r{text}: {done} of {total} cases", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


class Bar:
    """Progress over cases: a bar on a terminal, else a line every tenth."""

    def __init__(self) -> None:
        self.start, self.shown = time.monotonic(), -1

    def __call__(self, done: int, total: int) -> None:
        """Shows that `done` of `total` cases are done."""
        step = done if sys.stderr.isatty() else done * 10 // max(total, 1)
        if step == self.shown or total == 0:
            return
        self.shown, spent = step, time.monotonic() - self.start
        left = f", {spent / done * (total - done):.0f} s left" if 0 < done < total else ""
        line = f"{done}/{total} cases in {spent:.0f} s{left}"
        if sys.stderr.isatty():
            filled = 30 * done // total
            end = "\n" if done == total else ""
            print(f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {line}", end=end, file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
