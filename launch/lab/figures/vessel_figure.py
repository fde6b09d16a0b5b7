"""Figure 19: vessels of one to three voxels, with tiles centred on them or shifted, and with four losses."""

from functools import cache
from pathlib import Path
from statistics import fmean

from lab.figures.figure import Figure, FigureCurve, Results
from lab.figures.verdicts import differ, highest
from seqpar.data.files import user_cache
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom
from seqpar.report.curves import DICE, TRAIN_LOSS, Bars, Curve, Diagram, over_steps
from seqpar.report.record import read_scores
from seqpar.runs.run_folder import read_config
from seqpar.scores.label_classes import labels_of_run
from seqpar.scores.label_files import Pair, score_pair
from seqpar.scores.label_scores import DEFAULT_SETTINGS

SUBJECT, RECALL = "Vessels", "share of the centre line"
CASES = {"debug": 6, "laptop": 20, "paper": 100}
NETWORK = {"network": "nnunet-plain", "foreground": 0.66, "val_cases": 0}
LONG = {"features": 8, "lr": 5e-3, "epochs": 6, "iterations": 50, "val_every": 2}


def _arm(label: str, loss: str, shifted: bool = False) -> FigureCurve:
    return FigureCurve(label, {"loss": loss, "foreground_shift": shifted})


def vessels(scale: str) -> Path:
    """Returns the folder of the generated vessels for a scale; they are made where they are missing."""
    cases, settings = CASES[scale], PhantomSettings.of("vessels")
    return write_phantom(user_cache() / "data" / f"vessels-{cases}", cases, settings)


@cache
def centreline_recall(run: Path) -> float:
    """Returns the mean share of the true centre line that the last validation's label maps have, over its cases."""
    labels, settings = labels_of_run(read_config(run)["dataset"]), {**DEFAULT_SETTINGS, "centreline": True}
    shares = []
    for case in read_scores(run).cases:
        assert case.truth is not None
        rows = score_pair(Pair(case.name, case.truth, case.prediction), labels, settings)
        shares += [row["CentrelineRecall"] for row in rows.values()]
    return fmean(shares)


def recalls(results: Results) -> list[Curve]:
    """Returns the share of the centre line after the last step, of each arm."""
    every = []
    for dice in results.curves(DICE):
        rows = tuple((centreline_recall(run),) for run in results.runs[dice.label])
        every.append(Curve(dice.label, dice.steps[-1:], rows, dice.seconds[-1:]))
    return every


def judge(results: Results) -> list[str]:
    """Returns which arm has the highest Dice and most of the centre line, and how each differs from the first."""
    lines = []
    for name, curves in ((DICE, results.curves(DICE)), (RECALL, recalls(results))):
        first, *others = curves
        lines += [highest(SUBJECT, name, curves), *(differ(SUBJECT, name, first, other) for other in others)]
    return lines


def draw(results: Results) -> list[Diagram | Bars]:
    """Returns training loss and Dice over steps, and the share of the centre line in the end, a bar for each seed."""
    bars = {
        curve.label: {f"seed {number}": row[-1] for number, row in enumerate(curve.rows)} for curve in recalls(results)
    }
    return [*(over_steps(name, "step", results.curves(name)) for name in (TRAIN_LOSS, DICE)), Bars(RECALL, bars)]


VESSEL_FIGURE = Figure(
    19,
    "Thin structures: shifted tiles, and losses that see centre lines",
    "generated vessels: tiles centred on them or shifted, and four losses, by Dice and centre line",
    (
        _arm("centred tiles", "dice-ce"),
        _arm("shifted tiles", "dice-ce", True),
        _arm("tversky", "tversky"),
        _arm("skeleton-recall", "skeleton-recall"),
        _arm("cldice", "cldice"),
    ),
    judge,
    {"debug": NETWORK, "laptop": {**NETWORK, **LONG}, "paper": NETWORK},
    draw,
    data=vessels,
)
