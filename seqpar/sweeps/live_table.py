"""LiveTable: the runs of a sweep while they train, as a table on a terminal, as lines in a log."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from seqpar.runs.metrics_tail import SCORES, MetricsTail, measure_of, score_of, task_of_row
from seqpar.runs.run_folder import read_status
from seqpar.terminal import Display
from seqpar.text import clock

REFRESH_S = 1.0
HEADS = f"{'step':>13} {'train loss':>10} {'score':>6} {'left':>8}  {'where':15}  point"


@dataclass
class RunRow:
    """What the table has of a run that trains."""

    tail: MetricsTail
    where: str = ""
    step: int = 0
    steps: int = 0
    loss: float = float("nan")
    score: float = float("nan")
    score_name: str = ""  # before the first validation
    seconds: list[float] = field(default_factory=list)  # of each step that this table saw

    def refresh(self) -> None:
        """Takes in what the run has written since."""
        for row in self.tail.read():
            if row.get("kind") == "train":
                self.step, self.loss = row["step"] + 1, float(row["loss"])
                self.seconds.append(float(row["seconds"]))
            elif row.get("kind") == "val":
                task = task_of_row(row)
                self.score, self.score_name = measure_of(task, score_of(row)), SCORES[task]
        self.steps = int(read_status(self.tail.path.parent).get("steps", 0) or self.steps)

    @property
    def left_s(self) -> float:
        return fmean(self.seconds[-50:]) * max(self.steps - self.step, 0) if self.seconds else float("inf")

    def text(self, name: str) -> str:
        """Returns the line of the run ``name``."""
        steps = f"{self.step}/{self.steps or '?'}"
        return f"{steps:>13} {self.loss:10.4f} {self.score:6.3f} {clock(self.left_s):>8}  {self.where:15.15}  {name}"


class LiveTable:
    """Shows the runs below ``root``; ``total`` of them are to be made.

    - ``over``: how many of these are over already
    """

    def __init__(self, root: Path, total: int, over: int = 0) -> None:
        self.root, self.total, self.over = root, total, over
        self.rows = dict[str, RunRow]()
        self.display = Display("stdout")
        self._began, self._ended = time.monotonic(), 0
        self._shown, self._lines = 0.0, 0

    def begins(self, name: str, again: bool = False) -> None:
        """Adds a run that trains from now on; ``again``: from its checkpoint, after it was killed."""
        self.rows[name] = RunRow(MetricsTail(self.root / name / "metrics.jsonl"))
        self._say(f"{name} {'resumes: its training was killed' if again else 'begins'}")

    def lies(self, name: str, where: str) -> None:
        """Takes in on which nodes a run's ranks are."""
        if name in self.rows:
            self.rows[name].where = where

    def ends(self, name: str, how: str) -> None:
        """Removes a run; ``how`` it ended, in words."""
        row = self.rows.pop(name, None)
        self.over, self._ended = self.over + 1, self._ended + 1
        best = ""
        if row is not None:
            row.refresh()
            best = f": training loss {row.loss:.4f}" + f", {row.score_name} {row.score:.3f}" * bool(row.score_name)
        self._say(f"{self.over} of {self.total}: {name} {how}{best}")

    def refresh(self) -> None:
        """Shows how far the runs are, at most once a second."""
        now = time.monotonic()
        if now - self._shown < REFRESH_S:
            return
        self._shown = now
        for row in self.rows.values():
            row.refresh()
        fields = [f"{self.over} of {self.total} points have ended, {len(self.rows)} training"]
        if self._ended:
            fields.append(f"{clock(self._left_s())} left")
        if not self.display.on_terminal:
            self.display.show(fields)
            return
        size = shutil.get_terminal_size()
        lines = ["  ".join(fields), HEADS, *(row.text(name) for name, row in self.rows.items())]
        self._draw([line[: size.columns - 1] for line in lines[: size.lines - 2]])

    def close(self) -> None:
        """Ends the display; the last table stays."""
        self._lines = 0
        self.display.close()

    def _left_s(self) -> float:
        """Returns how long the sweep still takes, by the points that ended so far."""
        return (time.monotonic() - self._began) / self._ended * (self.total - self.over)

    def _say(self, text: str) -> None:
        self._draw([])
        self.display.say(text)

    def _draw(self, lines: Sequence[str]) -> None:
        """Writes lines over those of the last time."""
        if not self.display.on_terminal:
            return
        up = f"\x1b[{self._lines}A" if self._lines else ""
        sys.stdout.write(f"\r{up}\x1b[J" + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self._lines = len(lines)
