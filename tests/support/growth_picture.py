"""Draws how time and memory of a rank grow, from the newest table of ``bench.py growth --write``."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.support.drawing import COLOURS, Drawing
from tests.support.pages import ROOT, table_rows

TABLE = ROOT / "launch" / "lab" / "benches" / "results" / "growth.md"
BLUE, ORANGE, GREEN, VIOLET = COLOURS
RED, OLIVE = "#d05a5a", "#a08c28"
# name → colour, and whether it is dashed: other libraries are
STYLES = {
    "gather-kv": (BLUE, False),
    "gather-x, projected": (ORANGE, False),
    "ulysses": (GREEN, False),
    "hybrid:2": (VIOLET, False),
    "DeepSpeed Ulysses": (GREEN, True),
    "torch ring, all-gather": (RED, True),
    "torch ring, all-to-all": (OLIVE, True),
    "operations": (BLUE, False),
    "attention's": (ORANGE, False),
    "seconds": (VIOLET, True),
    "held for backward": (GREEN, False),
    "peak": (RED, False),
    "H100": (GREEN, False),
    "MI250X die": (VIOLET, False),
    "either": (BLUE, False),
}
Points = list[tuple[float, float]]
WIDTH, HEIGHT = 220, 150  # of a panel


@dataclass(frozen=True)
class Panel:
    """A diagram with logarithmic axes: its place in the picture, and the points of each line."""

    column: int
    row: int
    title: str
    lines: Mapping[str, Points]


def newest_rows() -> list[dict[str, str]]:
    """Returns the rows of the newest table."""
    return table_rows(TABLE.read_text().rpartition("\n## ")[2])


def panels() -> list[Panel]:
    """Returns all panels: in the upper row what takes time, in the lower one memory."""
    rows = newest_rows()
    tokens = [row for row in rows if row["grows"] == "tokens"]
    over = [float(row["tokens"]) for row in tokens]

    def by_tokens(column: str) -> Points:
        return [(x, float(row[column])) for x, row in zip(over, tokens) if row[column]]

    ranks: dict[str, dict[str, Points]] = {"sent MiB": {}, "peak MiB": {}}
    for name in dict.fromkeys(row["of"] for row in rows if row["grows"] == "ranks" and row["ranks"] != "1"):
        for column, lines in ranks.items():
            lines[name] = [
                (float(row["ranks"]), float(row[column]))
                for row in rows
                if row["grows"] == "ranks" and row["of"] in (name, "any strategy") and float(row[column])
            ]
    seconds, needs = dict[str, Points](), Points()
    for key, name in (("h100", "H100"), ("mi250x", "MI250X die")):
        grown = [row for row in rows if row["grows"] == "both" and f", {key}" in row["of"] and _is_even(row)]
        seconds[name] = [(float(row["ranks"]), float(row["s"])) for row in grown]
        needs = [(float(row["ranks"]), float(row["peak MiB"]) / 1024) for row in grown]  # the same on both
    work = {"operations": "TFLOP", "attention's": "of attention", "seconds": "s"}
    memory = {"held for backward": "held MiB", "peak": "peak MiB"}
    return [
        Panel(0, 0, "TFLOP and seconds", {name: by_tokens(column) for name, column in work.items()}),
        Panel(0, 1, "MiB", {name: by_tokens(column) for name, column in memory.items()}),
        Panel(1, 0, "MiB sent by a rank", ranks["sent MiB"]),
        Panel(1, 1, "peak MiB of a rank", ranks["peak MiB"]),
        Panel(2, 0, "seconds of a step, planned", seconds),
        Panel(2, 1, "GiB of a rank, planned", {"either": needs}),
    ]


def _is_even(row: Mapping[str, str]) -> bool:
    """Returns whether a planned step has as many voxels a rank as that of one rank, and the planner's own strategy."""
    side = re.search(r"of (\d+) voxels", row["of"])
    return (
        bool(side)
        and int(side[1]) ** 3 == 128**3 * int(row["ranks"])
        and row["of"].count(", ") - 1 <= ("auto: " in row["of"])
    )


def growth() -> Drawing:
    """How time and memory of a rank grow with tokens, with ranks, and with both."""
    drawing = Drawing(850, 560, "Time and memory of a rank by tokens, by ranks and by both, on logarithmic axes")
    heads = ("more tokens on one rank", "more ranks, 1,024 tokens each", "more ranks, 128³ voxels each")
    below = ("tokens", "ranks", "ranks")
    for column, (head, axis) in enumerate(zip(heads, below)):
        left = 56 + 278 * column
        drawing.text(left - 36, 24, head)
        drawing.text(left + WIDTH / 2, 460, axis, "small", "middle")
    for panel in panels():
        _draw(drawing, panel, 56 + 278 * panel.column, 62 + 206 * panel.row)
    for column in range(3):
        names = dict.fromkeys(name for panel in panels() if panel.column == column for name in panel.lines)
        for at, name in enumerate(names):
            x, y = 20 + 278 * column + 128 * (at % 2), 484 + 18 * (at // 2)
            drawing.line([(x, y - 4), (x + 18, y - 4)], *STYLES[name])
            drawing.text(x + 23, y, name.replace(", projected", "").replace("torch ring, ", "ring, "), "small")
    return drawing


def _draw(drawing: Drawing, panel: Panel, left: float, top: float) -> None:
    every = [point for points in panel.lines.values() for point in points]
    places = sorted({x for x, _ in every})
    ticks = list(_ticks(min(y for _, y in every), max(y for _, y in every)))

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / places[0]) / math.log(places[-1] / places[0])
        up = math.log(y / ticks[0]) / math.log(ticks[-1] / ticks[0])
        return left + WIDTH * across, top + HEIGHT * (1 - up)

    drawing.text(left - 36, top - 12, panel.title, "small")
    for tick in ticks:
        x, y = at(places[0], tick)
        drawing.line([(x, y), (x + WIDTH, y)], "#8c959f", thin=True)
        drawing.text(left - 5, y + 4, f"{tick:g}", "small", "end")
    for place in places:
        drawing.text(at(place, ticks[0])[0], top + HEIGHT + 16, f"{place:,.0f}", "small", "middle")
    for name, points in panel.lines.items():
        drawing.line([at(*point) for point in points], *STYLES[name], dots=True)


def _ticks(low: float, high: float) -> Iterator[float]:
    """Yields the numbers on an axis from at most ``low`` to at least ``high``: 1, 2 and 5; tens if these are many."""
    fine = [times * 10.0**power for power in range(-5, 7) for times in (1, 2, 5)]
    coarse = [10.0**power for power in range(-5, 7)]
    for numbers in (fine, coarse):
        chosen = _covering(numbers, low, high)
        if len(chosen) <= 7:
            break
    yield from chosen


def _covering(numbers: Sequence[float], low: float, high: float) -> list[float]:
    pairs = list(itertools.pairwise(numbers))
    first = max(a for a, _ in pairs if a <= low)
    last = min(b for _, b in pairs if b >= high)
    return [number for number in numbers if first <= number <= last]
