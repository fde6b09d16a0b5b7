"""Curves of runs over their steps, read from their journals; runs that differ by their seed alone form one curve."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.runs.journal import read_metrics
from seqpar.runs.metrics_tail import score_of

TRAIN_LOSS, VAL_LOSS, DICE = "training loss", "validation loss", "Dice"
QUANTITIES = (TRAIN_LOSS, VAL_LOSS, DICE)


@dataclass(frozen=True)
class Curve:
    """Values of one quantity over steps.

    - ``rows``: the values of each seed
    - ``seconds``: of training until each step, the mean over the seeds
    """

    label: str
    steps: tuple[int, ...]
    rows: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...] = ()

    @property
    def values(self) -> NDArray[np.float64]:
        """Values by seed and step."""
        return np.array(self.rows, dtype=np.float64)

    @property
    def mean(self) -> NDArray[np.float64]:
        """The mean over the seeds at each step."""
        mean: NDArray[np.float64] = self.values.mean(0)
        return mean


def read_curve(label: str, runs: Sequence[Path], quantity: str) -> Curve:
    """Returns a quantity of the runs of one setting, one run a seed, over the steps that all of them have."""
    every = [_points(read_metrics(run / "metrics.jsonl"), quantity) for run in runs]
    steps = [step for step in every[0] if all(step in points for points in every)]
    rows = tuple(tuple(points[step][0] for step in steps) for points in every)
    seconds = tuple(fmean(points[step][1] for points in every) for step in steps)
    return Curve(label, tuple(steps), rows, seconds)


def _points(rows: Sequence[dict[str, Any]], quantity: str) -> dict[int, tuple[float, float]]:
    """Returns value and seconds of training so far by the number of steps done."""
    train = {row["step"] + 1: row for row in rows if row["kind"] == "train"}
    spent, until = 0.0, {0: 0.0}
    for step, row in sorted(train.items()):
        spent += row["seconds"]
        until[step] = spent
    if quantity == TRAIN_LOSS:
        return {step: (float(row["loss"]), until[step]) for step, row in sorted(train.items())}
    held_out = {row["step"]: row for row in rows if row["kind"] == "val"}
    return {
        step: (score_of(row) if quantity == DICE else float(row["loss"]), until.get(step, math.nan))
        for step, row in sorted(held_out.items())
    }
