"""Verdicts on curves, in words with their figure: whether they coincide, differ beyond the seeds' spread, or cross.

All of them are computed from the points of the curves alone. If Dice is below ``LEARNED`` over the last half of the
steps, they only say that the network has not learned.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from seqpar.report.curves import DICE, Curve

EXACT = 1e-9  # within which curves simply coincide; else the bound is told
OWN_QUESTION = "The question is our own: no paper says what is to be seen"
REPRODUCED = "Reproduced: "
LEARNED = 0.3  # Dice, the mean over seeds and over the last half of the steps, as the levels that are compared


@dataclass(frozen=True)
class Difference:
    """How a curve differs from a reference, at the steps that both have.

    - ``largest``: the largest difference of one seed at one step, and the step of it; infinite where only one of both
      is a number
    - ``level``: how far the mean over the seeds lies above the reference's, over the last half of the steps
    - ``spread``: by how much that level differs between seeds, each compared with itself, which saw the same tiles;
      None of one seed
    - ``between_seeds``: likewise, how far the seeds of one curve are apart, for the curve where they are farther
    - ``crossings``: the steps after which the mean has changed sides
    """

    largest: float
    step: int
    level: float
    spread: float | None
    between_seeds: float | None
    crossings: tuple[int, ...]

    @property
    def is_beyond_seeds(self) -> bool:
        return self.spread is not None and abs(self.level) > self.spread


def difference(reference: Curve, other: Curve) -> Difference:
    """Returns how ``other`` differs from ``reference``; raises ValueError where they have no step in common."""
    a, b, steps = _common(reference, other)
    seeds = min(len(a), len(b))
    gaps = _gaps(a[:seeds], b[:seeds])
    row = gaps.max(0)
    at = int(row.argmax())
    half = len(steps) // 2
    means = b.mean(0) - a.mean(0)
    levels = [values[:, half:].mean(1) for values in (a, b)]
    level = float(levels[1].mean() - levels[0].mean())
    spread = between_seeds = None
    if seeds > 1:
        spread = float(np.ptp(levels[1][:seeds] - levels[0][:seeds]))
        between_seeds = max(float(np.ptp(of_curve)) for of_curve in levels)
    return Difference(float(row[at]), steps[at], level, spread, between_seeds, _crossings(means, steps))


def _common(reference: Curve, other: Curve) -> tuple[NDArray[np.float64], NDArray[np.float64], list[int]]:
    """Returns the values of both by seed and step, at their common steps, and these."""
    steps = [step for step in reference.steps if step in other.steps]
    if not steps:
        raise ValueError(f"{reference.label} and {other.label} have no step in common")
    a, b = (curve.values[:, [curve.steps.index(step) for step in steps]] for curve in (reference, other))
    return a, b, steps


def _gaps(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the sizes of differences: 0 where neither is a number, infinity where one is none."""
    none = np.isnan(a), np.isnan(b)
    gaps: NDArray[np.float64] = np.abs(a - b)
    gaps = np.where(none[0] | none[1], math.inf, gaps)
    return np.where(none[0] & none[1], 0.0, gaps)


def _crossings(differences: NDArray[np.float64], steps: Sequence[int]) -> tuple[int, ...]:
    sides = [(np.sign(value), step) for value, step in zip(differences, steps) if value and not np.isnan(value)]
    return tuple(step for (before, _), (side, step) in zip(sides, sides[1:]) if side != before)


def has_learned(quantity: str, curve: Curve) -> bool:
    """Returns False for a Dice that is below ``LEARNED`` over the last half of the steps."""
    return quantity != DICE or _last_half(curve) >= LEARNED


def _last_half(curve: Curve) -> float:
    """Returns a curve's mean over its seeds and the last half of its steps, without what is not a number; or 0."""
    values = curve.values[:, len(curve.steps) // 2 :]
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else 0.0


def not_learned(quantity: str, curves: Sequence[Curve]) -> str:
    """Returns which curves have not learned, "" if all have."""
    idle = [curve for curve in curves if not has_learned(quantity, curve)]
    if not idle:
        return ""
    best = max(map(_last_half, idle))
    verb, most = ("has", "is") if len(idle) == 1 else ("have", "is at most")
    labels = listed([curve.label for curve in idle])
    return f"{labels} {verb} not learned: over the last half Dice {most} {best:.3f}, and {LEARNED} is needed to compare"


def coincide(subject: str, quantity: str, curves: Sequence[Curve], tolerance: float) -> str:
    """Returns whether all curves are those of the first one, up to ``tolerance`` at every step of every seed."""
    if text := not_learned(quantity, curves):
        return f"{subject}: {text}"
    pairs = [(difference(curves[0], curve), curve) for curve in curves[1:]]
    worst, other = max(pairs, key=lambda pair: pair[0].largest)
    labels = listed([curve.label for curve in curves])
    if worst.largest <= tolerance:
        within = f" within {tolerance:.0e}" if worst.largest > EXACT else ""
        return f"{subject}: {labels} coincide{within}: largest difference of the {quantity} {worst.largest:.1e}"
    return (
        f"{subject}: {labels} do not coincide: largest difference of the {quantity} {rounded(worst.largest)}, between "
        f"{curves[0].label} and {other.label} at step {worst.step} (bound {tolerance:.0e})"
    )


def differ(subject: str, quantity: str, reference: Curve, other: Curve) -> str:
    """Returns how a curve differs from a reference: by how much at most, where it lies, whether beyond the seeds."""
    if text := not_learned(quantity, [reference, other]):
        return f"{subject}: {text}"
    d = difference(reference, other)
    start, of = f"{subject}: {other.label}", f"largest difference of the {quantity}"
    if not d.largest:
        return f"{start} is the same as {reference.label}: {of} 0"
    text = f"{start} differs from {reference.label}: {of} {rounded(d.largest)} at step {d.step}; "
    return text + _level(d) + _crossed(d)


def _level(d: Difference) -> str:
    """Returns on which side a curve lies over the last half of the steps, and whether seeds explain it."""
    if math.isnan(d.level):
        return "over the last half not all values are numbers"
    text = f"over the last half it lies {'above' if d.level > 0 else 'below'} by {rounded(abs(d.level))}"
    if d.spread is None or d.between_seeds is None:
        return f"{text}; one seed shows no spread (--seeds 3 does)"
    beyond = "beyond" if d.is_beyond_seeds else "within"
    return (
        f"{text}, {beyond} the seeds' spread of {rounded(d.spread)}, each compared with itself (seeds of one curve are "
        f"up to {rounded(d.between_seeds)} apart)"
    )


def beside_paper(says: str, sees: str, holds: bool | None, paper: str = "The paper") -> list[str]:
    """Returns what a paper says, what is seen here, and whether that is the same; ``holds``: None if it is open."""
    answer = {True: "yes", False: "no", None: "cannot tell at this scale"}[holds]
    return [f"{paper} says: {says}", f"We see: {sees}", f"{REPRODUCED}{answer}"]


def with_question(verdicts: Sequence[str]) -> list[str]:
    """Returns verdicts, after a line that says so if they answer no paper."""
    return [*([] if any(line.startswith(REPRODUCED) for line in verdicts) else [OWN_QUESTION]), *verdicts]


def is_settled(curves: Sequence[Curve], *differences: Difference) -> bool:
    """Returns whether all curves of a Dice have learned, and these differences can be told from those of seeds."""
    return all(has_learned(DICE, curve) for curve in curves) and all(one.spread is not None for one in differences)


def differs_alone(one: Difference, other: Difference) -> bool | None:
    """Returns whether the first of two differences is one beyond the seeds' spread, and the second is not; None if
    neither is, which tells nothing.
    """
    return False if other.is_beyond_seeds else True if one.is_beyond_seeds else None


def growth(paper: str, says: str, curves: Sequence[Curve]) -> list[str]:
    """Returns whether Dice grows from each curve to the next, as a paper says of it."""
    steps = [difference(smaller, larger) for smaller, larger in pairwise(curves)]
    first, *_, last = curves
    ends = f"{_ends(DICE, curves)}; {last.label} against {first.label}, {side(DICE, difference(first, last))}"
    sees = not_learned(DICE, curves) or ends
    holds = None
    if is_settled(curves, *steps):
        if all(step.is_beyond_seeds and step.level > 0 for step in steps):
            holds = True
        elif any(step.is_beyond_seeds and step.level < 0 for step in steps):
            holds = False
    return beside_paper(says, sees, holds, paper)


def side(quantity: str, d: Difference) -> str:
    """Returns on which side a curve lies over the last half of the steps, in short."""
    place = f"{quantity} {'above' if d.level > 0 else 'below'} by {rounded(abs(d.level))}"
    if d.spread is None:
        return f"{place} (one seed)"
    return f"{place} ({'beyond' if d.is_beyond_seeds else 'within'} the seeds' spread)"


def _crossed(d: Difference) -> str:
    if not d.crossings:
        return "; they do not cross"
    times = len(d.crossings)
    return f"; they cross {f'{times} times' if times > 1 else 'once'}, last before step {d.crossings[-1]}"


def highest(subject: str, quantity: str, curves: Sequence[Curve]) -> str:
    """Returns the values of all curves after the same number of steps, which is highest, and whether beyond seeds.

    Curves that have not learned have no rank.
    """
    step = _last_step(curves)
    ends = {curve.label: curve.values[:, curve.steps.index(step)] for curve in curves}
    ranked = sorted(
        (curve for curve in curves if has_learned(quantity, curve)),
        key=lambda curve: -np.nan_to_num(ends[curve.label].mean(), nan=-math.inf),
    )
    text = f"{subject}: {_ends(quantity, curves)}"
    if idle := [curve.label for curve in curves if curve not in ranked]:
        text += f"; {listed(idle)} {'has' if len(idle) == 1 else 'have'} not learned"
    if len(ranked) < 2:
        return text
    first, second = ranked[:2]
    gap = float(ends[first.label].mean() - ends[second.label].mean())
    if not gap > 0:
        return f"{text}; none is highest"
    text += f"; {first.label} is highest, by {rounded(gap)}"
    seeds = min(len(curve.rows) for curve in (first, second))
    if seeds < 2:
        return f"{text}; one seed shows no spread (--seeds 3 does)"
    spread = float(np.ptp(ends[first.label][:seeds] - ends[second.label][:seeds]))
    return f"{text}, {'beyond' if gap > spread else 'within'} the seeds' spread of {rounded(spread)}"


def _last_step(curves: Sequence[Curve]) -> int:
    """Returns the last step that all curves have."""
    return max(set(curves[0].steps).intersection(*(curve.steps for curve in curves)))


def _ends(quantity: str, curves: Sequence[Curve]) -> str:
    """Returns the values of all curves after the same number of steps."""
    step = _last_step(curves)
    values = ", ".join(f"{one.label} {one.values[:, one.steps.index(step)].mean():.3f}" for one in curves)
    return f"{quantity} after {step} steps: {values}"


@dataclass(frozen=True)
class Reached:
    """When the mean of a curve first was at a value: the step and the seconds of training, None where it never was."""

    label: str
    step: int | None = None
    seconds: float | None = None


def reached(curve: Curve, value: float) -> Reached:
    """Returns when a curve's mean over the seeds was first measured at or above a value."""
    for mean, step, seconds in zip(curve.mean, curve.steps, curve.seconds):
        if mean >= value:
            return Reached(curve.label, step, seconds)
    return Reached(curve.label)


def plateau(curves: Sequence[Curve]) -> float:
    """Returns the highest mean Dice of the first curve that has learned, in thousandths that it is not below; or 0."""
    highest_of = (float(np.nanmax(curve.mean)) for curve in curves if has_learned(DICE, curve))
    return math.floor(next(highest_of, 0.0) * 1000) / 1000


def first_to_reach(subject: str, quantity: str, curves: Sequence[Curve], value: float) -> str:
    """Returns the seconds of training that each curve takes to a value, and which is the quickest."""
    if quantity == DICE and value < LEARNED:
        return f"{subject}: the time to a {quantity} says nothing below {LEARNED}, where no network has learned"
    every = [reached(curve, value) for curve in curves]
    cells = (f"{r.label} {'never' if r.seconds is None else f'{r.seconds:.3g} s (step {r.step})'}" for r in every)
    text = f"{subject}: to {quantity} {value:g}: {', '.join(cells)}"
    known = [(r.seconds, r.label) for r in every if r.seconds is not None]
    return f"{text}; {min(known)[1]} is quickest" if known else f"{text}; none reaches it"


def rounded(value: float) -> str:
    """Returns a number with the digits that tell its size."""
    return f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def listed(labels: Sequence[str]) -> str:
    """Returns labels in short: "SeqPar 1, 2, 4" for SeqPar 1, SeqPar 2 and SeqPar 4."""
    pieces = [re.fullmatch(r"(.+) (\d+)", label) for label in labels]
    starts = {piece[1] for piece in pieces if piece}
    if len(starts) == 1 and all(pieces):
        return f"{starts.pop()} {', '.join(piece[2] for piece in pieces if piece)}"
    return ", ".join(labels)
