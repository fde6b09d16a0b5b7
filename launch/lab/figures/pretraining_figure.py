"""Figure 15: training on a few labelled cases, from a pretraining on all images and without one, at equal steps."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.figures.figure import Figure, FigureCurve, Results, losses_and_dice
from lab.figures.verdicts import differ, first_to_reach, highest, plateau, rounded
from seqpar.report.curves import DICE, TRAIN_LOSS, Curve, Diagram, Line, read_curve
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_folder import read_config
from seqpar.text import quantity

SUBJECT, ERROR = "Pretraining", "error of hidden voxels"
FRESH, PRETRAINED = "not pretrained", "pretrained"
# positions are the same sums of sines in both, so that only what was learned differs
FEW = {"positions": "sincos", "train_cases": 4}
MASKED = FigureCurve(
    "pretraining",
    {"task": "pretrain", "train_cases": 0, "val_every": 0},
    {
        "debug": {"batch": 4, "epochs": 4, "iterations": 8},
        "laptop": {"batch": 4, "epochs": 10, "iterations": 50},
        "paper": {"batch": 32, "epochs": 400, "iterations": 50},
    },
)


def judge(results: Results) -> list[str]:
    """Returns which start is ahead at equal steps, how soon, and what the pretraining cost."""
    fresh, pretrained = results.curves(DICE, FRESH, PRETRAINED)
    every = [fresh, pretrained, _with_pretraining(pretrained, results)]
    return [
        highest(SUBJECT, DICE, [fresh, pretrained]),
        differ(SUBJECT, DICE, fresh, pretrained),
        differ(SUBJECT, TRAIN_LOSS, *results.curves(TRAIN_LOSS, FRESH, PRETRAINED)),
        first_to_reach(SUBJECT, DICE, every, plateau(every)),
        _cost(results),
    ]


def draw(results: Results) -> list[Diagram]:
    """Returns the usual diagrams, and the loss of the pretraining."""
    loss = read_curve(SUBJECT.lower(), results.before[PRETRAINED], TRAIN_LOSS)
    line = Line(loss.label, loss.steps, loss.rows, dots=True, style=2)  # those before it are of others
    return [*losses_and_dice(results), Diagram(ERROR, "step", [line])]


def _with_pretraining(curve: Curve, results: Results) -> Curve:
    """Returns a curve whose seconds begin with the pretraining."""
    spent = _seconds(results.before[PRETRAINED])
    return replace(
        curve, label=f"{curve.label}, with the time of that", seconds=tuple(spent + s for s in curve.seconds)
    )


def _cost(results: Results) -> str:
    """Returns the cases, steps and seconds of both trainings."""
    before, after = results.before[PRETRAINED], results.runs[PRETRAINED]
    own, images = _seconds(after), read_config(before[0])["dataset"]
    labelled, spent = read_config(after[0])["dataset"], _seconds(before)
    return (
        f"{SUBJECT}: {_steps(before)} steps on {quantity(len(images['train']), 'case')} without labels took "
        f"{rounded(spent)} s, {spent / own:.2f} times the {rounded(own)} s of {_steps(after)} steps on "
        f"{len(labelled['train'])} labelled ones"
    )


def _seconds(runs: Sequence[Path]) -> float:
    """Returns the seconds of all steps of a run, the mean over seeds."""
    return fmean(sum(row["seconds"] for row in _rows(run)) for run in runs)


def _steps(runs: Sequence[Path]) -> int:
    return len(_rows(runs[0]))


def _rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]


PRETRAINING_FIGURE = Figure(
    15,
    "Few labelled cases: from a pretraining without labels, and from nothing",
    "training on 4 labelled cases at equal steps, from a masked autoencoder and from nothing",
    (FigureCurve(FRESH, {}), FigureCurve(PRETRAINED, {}, after=MASKED)),
    judge,
    {
        "debug": FEW,
        "laptop": {**FEW, "val_cases": 0},
        "paper": {**FEW, "batch": 4},
    },
    draw,
)
