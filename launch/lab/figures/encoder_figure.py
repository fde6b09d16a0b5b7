"""Figure 17: an encoder of stages against a plain one, at equal parameters, tile, patch and steps; and with windows."""

from typing import Any

from lab.figures.costs import measured_cost
from lab.figures.figure import Figure, FigureCurve, Results
from lab.figures.question_figures import judge_networks
from lab.figures.verdicts import differ
from seqpar.report.curves import DICE, QUANTITIES, TRAIN_LOSS, Diagram, over_steps

SUBJECT = "Encoders"
PLAIN, STAGES, WINDOWS = "plain", "hierarchical", "hierarchical, windows"
# enough tokens that merging and windows pay; positions are no parameters, since more tokens would have more of them
LONG = {"patch": (4, 4, 4), "decoder": "unetr", "positions": "sincos"}
AT: dict[str, dict[str, Any]] = {  # about as large as the plain one, which the decoder's width makes equal
    "debug": {"stage_depths": (1, 1), "embed_dim": 26, "heads": 2},
    "laptop": {"stage_depths": (2, 2), "embed_dim": 48, "heads": 2},
    "paper": {"stage_depths": (2, 2, 10), "embed_dim": 192, "heads": 3},
}
IN_WINDOWS = AT | {"paper": {**AT["paper"], "window": 8}}


def judge(results: Results) -> list[str]:
    """Returns sizes, which encoder is ahead at equal steps and at equal time, and what each takes."""
    lines = judge_networks(SUBJECT)(results)
    for name in (DICE, TRAIN_LOSS):
        plain, stages, windows = results.curves(name, PLAIN, STAGES, WINDOWS)
        loss = [differ(SUBJECT, name, plain, stages)] if name == TRAIN_LOSS else []
        lines += [*loss, differ(SUBJECT, name, stages, windows)]
    return [*lines, *(_cost(results, label) for label in (STAGES, WINDOWS))]


def _cost(results: Results, label: str) -> str:
    """Returns which share of the plain encoder's memory and time a step takes; of several seeds the first's."""
    plain, own = (measured_cost(results.runs[each][0]) for each in (PLAIN, label))
    return (
        f"{SUBJECT}: {label} takes of the {plain.seconds:.3g} s and {plain.memory:.0f} MiB of a plain one's step "
        f"{own.seconds / plain.seconds:.2f} and {own.memory / plain.memory:.2f}"
    )


def draw(results: Results) -> list[Diagram]:
    """Returns losses and Dice, over steps and over the seconds of training."""
    return [over_steps(name, over, results.curves(name)) for over in ("step", "seconds") for name in QUANTITIES]


ENCODER_FIGURE = Figure(
    17,
    "Tokens that merge, and windows, against a plain encoder, at equal parameters",
    "an encoder of stages, with windows too, against a plain one at patch 4 and equal parameters and steps",
    (
        FigureCurve(PLAIN, {"encoder": "plain"}),
        FigureCurve(STAGES, {"encoder": "hierarchical"}, AT, matched="decoder_width"),
        FigureCurve(WINDOWS, {"encoder": "hierarchical", "window": 4}, IN_WINDOWS, matched="decoder_width"),
    ),
    judge,
    {
        "debug": LONG,
        "laptop": LONG,
        "paper": {**LONG, "decoder_width": 16, "seqpar": 4, "batch": 1},
    },
    draw,
    size_of=PLAIN,
)
