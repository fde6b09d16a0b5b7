"""Figure 11: memory and time of a step over sequence length and ranks, planned to 64 and measured as far as 4."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lab.figures.costs import RunCost, cost_from_plan, measured_cost
from lab.figures.figure import Figure, FigureCurve, Results
from lab.figures.verdicts import rounded
from seqpar.report.curves import Diagram, Line
from seqpar.settings.config import Config
from seqpar.sweeps.scaling_plan import plan_of

MEASURED, PLANNED = (1, 2, 4), (1, 2, 4, 8, 16, 32, 64)
SIDES = {"debug": (16, 32, 48), "laptop": (32, 48, 64), "paper": (64, 96, 128)}
NAMES = ("small", "middle", "large")
COSTS: dict[str, str] = {"memory": "MiB of a rank", "seconds": "seconds a step"}


def _arm(place: int, ranks: int) -> FigureCurve:
    at = {scale: {"tile": (sides[place],) * 3} for scale, sides in SIDES.items()}
    return FigureCurve(
        f"{NAMES[place]} tile, SeqPar {ranks}", {"seqpar": ranks, "mode": "halo", "patch": (4, 4, 4)}, at
    )


def tokens_of(config: Config) -> int:
    """Returns the tokens of a tile."""
    return math.prod(side // p for side, p in zip(config.tile, config.patch))


def measured(results: Results) -> dict[tuple[int, int], RunCost]:
    """Returns what each run cost, by ranks and tokens."""
    every = {}
    for label, runs in results.runs.items():
        config = results.config(label)
        every[config.seqpar, tokens_of(config)] = measured_cost(runs[0])
    return every


def planned(results: Results) -> dict[tuple[int, int], RunCost]:
    """Returns what the planner says of each length on up to 64 ranks, where tokens are enough for them."""
    every = {}
    configs = {tokens_of(config): config for config in map(results.config, results.runs)}
    for tokens, config in configs.items():
        for ranks in PLANNED:
            try:
                every[ranks, tokens] = cost_from_plan(plan_of(replace(config, seqpar=ranks), ranks))
            except ValueError:  # too few tokens, or no grid of boxes
                continue
    return every


def draw(results: Results) -> list[Diagram]:
    """Returns memory and seconds over tokens, a line for each number of ranks with measured points on it."""
    plans, runs = planned(results), measured(results)
    return [
        Diagram(quantity, "tokens of a tile", [*_lines(plans, name, "planned"), *_lines(runs, name, "measured")], True)
        for name, quantity in COSTS.items()
    ]


def _lines(every: Mapping[tuple[int, int], RunCost], name: str, source: str) -> list[Line]:
    lines = []
    for style, ranks in enumerate(PLANNED):
        tokens = sorted(count for size, count in every if size == ranks)
        row: list[Any] = [getattr(every[ranks, count], name) for count in tokens]
        if tokens:
            lines.append(Line(f"SeqPar {ranks}, {source}", tokens, [row], True, source == "measured", style=style))
    return lines


def judge(results: Results) -> list[str]:
    """Returns how near the planner comes to what was measured, and how memory falls with the ranks."""
    plans, runs = planned(results), measured(results)
    lines = []
    for name, quantity in COSTS.items():
        ratios = sorted(getattr(plans[key], name) / getattr(cost, name) for key, cost in runs.items() if key in plans)
        lines.append(f"Lengths: planned {quantity} to measured: {ratios[0]:.2f} to {ratios[-1]:.2f}")
    longest = max(tokens for _, tokens in plans)
    sizes = sorted(ranks for ranks, tokens in plans if tokens == longest)
    ends = [rounded(plans[ranks, longest].memory) for ranks in (sizes[0], sizes[-1])]
    return [
        *lines,
        f"Lengths: {longest:,} tokens need {ends[0]} MiB on {sizes[0]} rank and {ends[1]} on each of {sizes[-1]} "
        "(planned)",
    ]


LENGTH_FIGURE = Figure(
    11,
    "Memory and time of a step over sequence length and ranks",
    "memory and time a step over tokens, planned to 64 ranks with measured points of this machine",
    tuple(_arm(place, ranks) for place in range(len(NAMES)) for ranks in MEASURED),
    judge,
    {
        "debug": {"epochs": 1, "iterations": 4},
        "laptop": {"epochs": 1, "iterations": 8},
        "paper": {"epochs": 1, "iterations": 10, "batch": 1},
    },
    draw,
)
