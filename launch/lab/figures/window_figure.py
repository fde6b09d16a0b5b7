"""Figure 12: a pass over whole volumes against sliding windows, by Dice, seams and time of one trained network."""

import math
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lab.benches.predict import seam_strength
from lab.figures.figure import Figure, FigureCurve, Results
from lab.figures.verdicts import differ, highest, rounded
from seqpar.parallel.rendezvous import start
from seqpar.prediction.sliding_window import sliding_window, whole_volume
from seqpar.prediction.window_grid import Sliding, WindowGrid
from seqpar.report.curves import DICE, TRAIN_LOSS, Bars, Curve, Diagram, over_steps
from seqpar.runs.journal import read_metrics
from seqpar.runs.trained_run import find_weights, load_nets, read_run
from seqpar.tasks.segment.data import open_data

LABELS = {"sliding": "sliding windows", "whole": "whole pass"}
SEAM, SECONDS = "seam at borders of windows", "seconds a case"


@dataclass(frozen=True)
class Prediction:
    """How long a case took, and its seam: at the borders that sliding windows have."""

    seconds: float
    seam: float


@cache
def predictions(folder: Path) -> dict[str, Prediction]:
    """Returns what predicting the first held-out case takes by each kind of window, in this process, without its first
    pass.
    """
    run = read_run(folder)
    data = open_data(run.config, True)
    image = data.dataset.cases[data.held_out_ids[0]].image
    mesh = start(1, env={})
    nets = load_nets(run, [find_weights(run)], mesh)
    sliding = Sliding(run.config.tile, run.config.val_overlap)
    windows = WindowGrid.of(image.shape[1:], sliding)
    result = {}
    with torch.no_grad():
        for kind in ("sliding", "sliding", "whole", "whole"):  # the first time of each is not what is kept
            began = time.perf_counter()
            slabs = sliding_window(nets, image, sliding, mesh) if kind == "sliding" else whole_volume(nets, image, mesh)
            logits = torch.cat([slab.logits for slab in slabs], 1)
            seconds = time.perf_counter() - began
            chances = logits.sigmoid() if run.learns_regions else logits.softmax(0)
            result[kind] = Prediction(seconds, seam_strength(chances, windows))
    return result


def curves(results: Results) -> list[Curve]:
    """Returns Dice over steps by each kind of window."""
    runs = next(iter(results.runs.values()))
    (dice,) = results.curves(DICE)
    every = []
    for kind, label in LABELS.items():
        rows = []
        for run in runs:
            by_step = {row["step"]: row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "val"}
            rows.append(tuple(float(by_step[step]["windows"][kind]) for step in dice.steps))
        every.append(Curve(label, dice.steps, tuple(rows), dice.seconds))
    return every


def judge(results: Results) -> list[str]:
    """Returns which kind of window has the higher Dice, and what each takes."""
    sliding, whole = curves(results)
    of_case = predictions(next(iter(results.runs.values()))[0])
    seconds = {kind: one.seconds for kind, one in of_case.items()}
    seams = {LABELS[kind]: one.seam for kind, one in of_case.items() if not math.isnan(one.seam)}
    changes = ", ".join(f"{rounded(seam)} times as much as elsewhere ({label})" for label, seam in seams.items())
    return [
        highest("Windows", DICE, [sliding, whole]),
        differ("Windows", DICE, sliding, whole),
        f"Windows: a whole pass takes {seconds['whole'] / seconds['sliding']:.2f} of the time of sliding windows",
        f"Windows: at borders of windows probabilities change {changes}"
        if seams
        else "Windows: one window holds the case, so that there are no borders in it",
    ]


def draw(results: Results) -> list[Diagram | Bars]:
    """Returns training loss, Dice by kind of window, and bars of time and seams."""
    of_case = predictions(next(iter(results.runs.values()))[0])
    seams = {LABELS[kind]: {"measured": one.seam} for kind, one in of_case.items() if not math.isnan(one.seam)}
    return [
        over_steps(TRAIN_LOSS, "step", results.curves(TRAIN_LOSS)),
        over_steps(DICE, "step", curves(results)),
        Bars(SECONDS, {LABELS[kind]: {"measured": one.seconds} for kind, one in of_case.items()}),
        *([Bars(SEAM, seams)] if seams else []),
    ]


WINDOW_FIGURE = Figure(
    12,
    "A whole pass against sliding windows",
    "Dice of a whole pass and of sliding windows, their seams and time",
    (FigureCurve("training", {"val_window": "both"}),),
    judge,
    draw=draw,
)
