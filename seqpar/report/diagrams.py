"""Diagrams of a figure, as data: lines over an axis, and bars beside each other."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from seqpar.report.curves import Curve


@dataclass(frozen=True)
class Line:
    """Values over places; ``rows``: those of each seed.

    - ``only_points``: single measurements, which no line joins
    - ``style``: number of its colour and style; None: as many as lines are before it
    """

    label: str
    places: Sequence[float]
    rows: Sequence[Sequence[float]]
    only_points: bool = False
    style: int | None = None


@dataclass(frozen=True)
class Diagram:
    """Lines over an axis; ``log``: both axes are logarithmic."""

    quantity: str
    over: str
    lines: Sequence[Line]
    log: bool = False


@dataclass(frozen=True)
class Bars:
    """Values of labels, beside each other for each kind of value: ``values[label][kind]``."""

    quantity: str
    values: Mapping[str, Mapping[str, float]]


def over_steps(quantity: str, over: str, curves: Sequence[Curve]) -> Diagram:
    """Returns the diagram of curves over "step" or over "seconds" of training."""
    lines = [Line(curve.label, curve.steps if over == "step" else curve.seconds, curve.rows) for curve in curves]
    return Diagram(quantity, "step" if over == "step" else "seconds of training", lines)


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
