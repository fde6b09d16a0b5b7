"""The curves of runs: read from their journals, and described as diagrams, which ``plots`` draws."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.report.planes import RUN_COLOURS, colours_of
from seqpar.runs.journal import held_out_scores, loss_terms, read_metrics
from seqpar.runs.metrics_tail import PADDING, of_one_way, score_of
from seqpar.runs.run_folder import name_validated, validates_trained
from seqpar.text import quantity

TRAIN_LOSS, VAL_LOSS, DICE = "training loss", "validation loss", "Dice"
QUANTITIES = (TRAIN_LOSS, VAL_LOSS, DICE)
Row = Mapping[str, Any]  # of metrics.jsonl


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
    """Returns the value and the seconds of training so far, by the number of finished steps."""
    train = {row["step"] + 1: row for row in rows if row["kind"] == "train"}
    spent, until = 0.0, {0: 0.0}
    for step, row in sorted(train.items()):
        spent += row["seconds"]
        until[step] = spent
    if quantity == TRAIN_LOSS:
        return {step: (float(row["loss"]), until[step]) for step, row in sorted(train.items())}
    held_out = {row["step"]: row for row in of_one_way([row for row in rows if row["kind"] == "val"])}
    return {
        step: (score_of(row) if quantity == DICE else float(row["loss"]), until.get(step, math.nan))
        for step, row in sorted(held_out.items())
    }


class LineStyle(NamedTuple):
    """How a line is drawn; ``hollow`` markers do not hide those of a line below."""

    colour: str
    dashes: Any = "-"
    marker: str = "o"
    width: float = 1.6
    hollow: bool = False


INK, GRID = "#222222", "#d9dde2"  # on a page: the colours of its text and its lines
GREY = "#8a929b"
NEUTRAL = tuple(map(LineStyle, (GREY, INK)))  # training and held out
OF_NUMBERS = (  # terms of a loss, kinds of score; those that coincide are all seen
    LineStyle("#5b6cb8", "-", "o", 3.2, True),
    LineStyle("#9b7a5a", "-", "s", 2.2, True),
    LineStyle("#5f8f5a", "-", "^", 1.6, True),
    LineStyle("#a0628f", "-", "D", 1.2, True),
)
MOST_CURVES = len(RUN_COLOURS)  # of the best points of a sweep, which a reader can tell apart
_FIRST, *_OTHERS = (LineStyle(colour, dashes) for dashes in ("-", "--", ":") for colour in RUN_COLOURS)
OF_RUNS = (_FIRST._replace(width=3.2), *_OTHERS)  # a line that coincides with the first does not hide it
# Okabe and Ito's colours from dark to light, each with its own dashes and marker, so that lines differ in grey too. The
# first line is the widest, so that those that coincide with it do not hide it.
DISTINCT = (
    LineStyle("#000000", "-", "o", 4.0, True),
    LineStyle("#d55e00", "--", "s", 2.8, True),
    LineStyle("#0072b2", ":", "^", 2.0, True),
    LineStyle("#009e73", "-.", "D", 1.6, True),
    LineStyle("#e69f00", (0, (5, 1, 1, 1, 1, 1)), "v", 1.4, True),
    LineStyle("#cc79a7", (0, (1, 3)), "P", 1.4, True),
    LineStyle("#56b4e9", (0, (8, 3)), "X", 1.4, True),
)


# Lines that share a colour differ in these: dashes, and a marker with the letter that stands for it in a key.
AGAIN = (("--", "v", "▽"), (":", "P", "✚"), ("-.", "X", "✖"), ((0, (8, 3)), "*", "☆"))


@dataclass(frozen=True)
class Line:
    """Values over places; NaN is left out.

    - ``rows``: the values of each seed
    - ``dots``: marks each value, for what is measured only now and then
    - ``only_points``: single measurements, which no line joins
    - ``dashed``: what others are compared with
    - ``noisy``: shows the running mean too
    - ``style``: number of its style; None: as many as lines are before it
    - ``colour``: its colour; "": that of its style
    """

    label: str
    places: Sequence[float]
    rows: Sequence[Sequence[float]]
    dots: bool = False
    only_points: bool = False
    dashed: bool = False
    noisy: bool = False
    style: int | None = None
    colour: str = ""

    @property
    def is_dot(self) -> bool:
        """Whether it has one value alone, which makes no line."""
        return len(self.points()) == 1 and not self.only_points

    def points(self) -> NDArray[np.float64]:
        """Returns place, mean, smallest and largest value over the seeds, of each place that has values."""
        values = np.array(self.rows, dtype=np.float64)
        points = np.stack([np.array(self.places, np.float64), values.mean(0), values.min(0), values.max(0)], 1)
        known: NDArray[np.float64] = points[np.isfinite(points).all(1)]
        return known


@dataclass(frozen=True)
class Diagram:
    """Lines over an axis.

    - ``log``: both axes are logarithmic
    - ``low``, ``high``: ends of the axis of values; None: as the values are
    - ``last``: end of the axis below; None: the last place
    - ``styles``: of the lines, in turn
    - ``square``: both axes are equally long, for shares over shares
    - ``up``: what the axis of values shows; "": the quantity, which is the title
    """

    quantity: str
    over: str
    lines: Sequence[Line]
    log: bool = False
    low: float | None = None
    high: float | None = None
    last: float | None = None
    styles: Sequence[LineStyle] = DISTINCT
    up: str = ""
    square: bool = False

    @property
    def has_keys(self) -> bool:
        """Whether lines need names: one that is called as the diagram does not."""
        return any(line.label.lower() not in ("", self.quantity.lower()) for line in self.lines)

    def named(self) -> list[tuple[Line, LineStyle]]:
        """Returns the lines with their styles; those with names differ: a colour that comes again has other dashes."""
        numbers = (n if line.style is None else line.style for n, line in enumerate(self.lines))
        drawn, lines = set[tuple[str, Any]](), list[tuple[Line, LineStyle]]()
        for line, n in zip(self.lines, numbers):
            style = self.styles[n % len(self.styles)]
            style = style._replace(colour=line.colour or style.colour)
            again = (style._replace(dashes=dashes, marker=marker) for dashes, marker, _ in AGAIN)
            if line.label:
                style = next((one for one in (style, *again) if (one.colour, one.dashes) not in drawn), style)
                drawn.add((style.colour, style.dashes))
            lines.append((line, style))
        return lines


CHANCE = LineStyle(GREY, "--")


def reliability_diagram(
    title: str,
    over: str,
    up: str,
    tenths: Mapping[str, Sequence[tuple[float, float, int]]],
    colours: Mapping[str, str] = MappingProxyType({}),
) -> Diagram:
    """Returns how often what has a probability is true, next to perfect calibration.

    - ``over``, ``up``: what the probability is of, and what the share is of
    - ``tenths``: by label of a line the mean probability of each tenth, the share that is right, and how many it has
    - ``colours``: by label; the others are drawn as text is
    """
    lines = [Line("perfect calibration", (0.0, 1.0), [(0.0, 1.0)], dashed=True)]
    for label, points in tenths.items():
        places, shares = [given for given, _, _ in points], [right for _, right, _ in points]
        # no line, which would also pass where no tenth is drawn
        lines.append(Line(label, places, [shares], only_points=True, style=1, colour=colours.get(label, "")))
    styles = (CHANCE, LineStyle(INK))
    return Diagram(title, over, lines, low=0.0, high=1.0, last=1.0, styles=styles, up=up, square=True)


@dataclass(frozen=True)
class Bars:
    """Values of labels, side by side for each kind of value: ``values[label][kind]``."""

    quantity: str
    values: Mapping[str, Mapping[str, float]]


def over_steps(quantity: str, over: str, curves: Sequence[Curve]) -> Diagram:
    """Returns the diagram of curves over "step" or over "seconds" of training."""
    lines = [
        Line(curve.label, curve.steps if over == "step" else curve.seconds, curve.rows, dots=True) for curve in curves
    ]
    low, high = (0.0, 1.0) if quantity == DICE else (None, None)
    return Diagram(quantity, "step" if over == "step" else "seconds of training", lines, low=low, high=high)


WORDS_OF_LOSSES = {  # values of --loss, as people read them
    "ce": "cross-entropy",
    "cldice": "Dice, cross-entropy and centreline Dice",
    "dice": "Dice",
    "dice-ce": "Dice and cross-entropy",
    "dice-focal": "Dice and focal",
    "focal": "focal",
    "lesion-dice-ce": "Dice of the lesion and cross-entropy",
    "skeleton-recall": "Dice, cross-entropy and skeleton recall",
    "tversky": "Tversky",
}
OF_TILES = (  # settings that decide on which tiles the loss in training is
    *("tile", "spacing", "crop_to", "augment", "synthesis", "synthesis_per"),
    *("foreground", "foreground_by", "foreground_shift"),
)
WORDS_OF_WINDOWS = {"sliding": "in windows", "whole": "in one pass"}  # values of --val-window
WORDS_OF_TERMS = {  # keys of metrics.jsonl
    "ce_loss": "cross-entropy",
    "dice_loss": "Dice loss",
    "dice_per_case_loss": "Dice loss of the lesion, per case",
    "dice_global_loss": "Dice loss of the lesion, of all cases at once",
    "focal_loss": "focal loss",
    "cldice_loss": "centreline Dice loss",
    "skeleton_recall_loss": "skeleton recall loss",
}


def seen_in(window: object, overlap: object, mirrored: int) -> str:
    """Returns how a network sees a case, in words; "" if it is not known. ``mirrored``: in how many directions."""
    if not isinstance(window, str) or window not in WORDS_OF_WINDOWS:
        return ""
    by = f" that overlap by {100 * overlap:.3g} %" * (window == "sliding") if isinstance(overlap, float) else ""
    flips = f", as a mean over mirrored copies ({quantity(mirrored, 'direction')})" * bool(mirrored)
    return f"{WORDS_OF_WINDOWS[window]}{by}{flips}"


def training_diagrams(
    train: Sequence[Row],
    held_out: Sequence[Row],
    loss: str = "loss",
    classes: Sequence[str] = (),
    data: Mapping[str, Any] = MappingProxyType({}),
) -> list[Diagram]:
    """Returns what a run shows over its steps: the loss, its terms, held-out scores with n, the learning rate.

    - ``train``, ``held_out``: the rows of steps and of validations
    - ``loss``: its title
    - ``classes``: in the order of their colours; those of the rows that are missing here come after them
    - ``data``: what the run records of its data
    """
    held_out = of_one_way(held_out)
    validated, which = "validation" if validates_trained(data) else "held out", name_validated(data)
    steps, at = [row["step"] + 1 for row in train], [row["step"] for row in held_out]
    has = {name for row in held_out for name in row if name.endswith("_loss")}
    lacking = [WORDS_OF_TERMS.get(name, name) for name in loss_terms(train) if has and name not in has]
    of_terms = f", without {' and '.join(lacking)}" * bool(lacking)
    windows = {WORDS_OF_WINDOWS[row["window"]] for row in held_out if row.get("window") in WORDS_OF_WINDOWS}
    ways = f", {' or '.join(sorted(windows))}" * bool(windows)
    is_padded = any(PADDING in row for row in held_out)
    losses = [
        Line("training", steps, [[number(row.get("loss")) for row in train]], noisy=True),
        Line(
            f"{validated}{count_of(held_out, '=')}{of_terms}{ways}{', without padding' * is_padded}",
            at,
            [[number(row.get("loss")) for row in held_out]],
            dots=True,
        ),
    ]
    if any("error_of_mean" in row for row in held_out):  # a loss that falls may still be no better
        guess = [[number(row.get("error_of_mean")) for row in held_out]]
        losses.append(Line(f"{validated}, if filled in with the mean", at, guess, dots=True, dashed=True, style=1))
    terms = []
    for name in loss_terms(train):
        rows = [row for row in train if name in row]
        values = [number(row[name]) for row in rows]
        terms.append(
            Line(
                WORDS_OF_TERMS.get(name, name.replace("_", " ")),
                [row["step"] + 1 for row in rows],
                [values],
                noisy=True,
            )
        )
    key, title = held_out_scores(held_out[-1]) if held_out else ("dice", "Dice")
    names = list(map(str, held_out[-1].get(key, {}))) if held_out else []
    colours = colours_of((*classes, *names)) if key == "dice" else {}
    scores = [
        Line(n, at, [[number(row.get(key, {}).get(n)) for row in held_out]], dots=True, colour=colours.get(n, ""))
        for n in names
    ]
    rates = [Line("learning rate", steps, [[number(row.get("lr")) for row in train]])]
    every = (
        (loss, losses, None, NEUTRAL),
        ("Terms of the training loss, unweighted", terms, None, OF_NUMBERS),
        (f"{'Mean Dice' if key == 'dice' else title} on {which}{count_of(held_out)}{ways}", scores, 1.0, OF_NUMBERS),
        ("Learning rate", rates, None, NEUTRAL),
    )
    return [
        Diagram(title, step_axis([train]), lines, low=0.0, high=high, last=max([*steps, *at]), styles=styles)
        for title, lines, high, styles in every
        if any(len(line.points()) for line in lines)
    ]


def count_of(held_out: Sequence[Row], sign: str = "") -> str:
    """Returns how many cases validations are on, for a title; "" if it is not known.

    - ``sign``: "=" for a loss, which is the mean over all of them; "": a class's mean Dice is over those that have one
    """
    counts = {int(row["cases"]) for row in held_out if "cases" in row}
    if not counts:
        return ""
    if not sign and any(row.get("dice") for row in held_out):
        return f" (up to {quantity(max(counts), 'case')})"
    return f" (n = {' to '.join(map(str, sorted({min(counts), max(counts)})))})"


def step_axis(runs: Sequence[Sequence[Row]]) -> str:
    """Returns the name of an axis of steps, with the steps of an epoch if they are known and the same in all runs.

    - ``runs``: the rows of each run's steps
    """
    lengths = {max(Counter(row["epoch"] for row in rows if "epoch" in row).values(), default=0) for rows in runs}
    length = lengths.pop() if len(lengths) == 1 else 0
    return f"step ({length:,} an epoch)" if length else "step"


def number(value: Any) -> float:
    """Returns a value of the journal as a number, NaN if it is none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def points_of(diagrams: Sequence[Diagram | Bars]) -> Iterator[list[Any]]:
    """Yields each point: quantity, label, kind or seed, what it is over, place and value."""
    for one in diagrams:
        if isinstance(one, Bars):
            for label, kinds in one.values.items():
                yield from ([one.quantity, label, kind, "", "", repr(value)] for kind, value in kinds.items())
        else:
            for line in one.lines:
                for seed, row in enumerate(line.rows):
                    for place, value in zip(line.places, row):
                        yield [one.quantity, line.label, seed, one.over, f"{place:.6g}", repr(float(value))]
