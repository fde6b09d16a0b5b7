"""Measures speed and memory as ratios within one run: ``python launch/bench.py data step … [--quick] [--write]``."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import seqpar.cli  # noqa: F401  first: it sets what torch reads once, when it is imported

# isort: split
from lab.benches.series import Progress, Series, Table, run_series
from seqpar.cluster.exit_codes import run
from seqpar.settings.field import whole_bounds
from seqpar.settings.parser import Parser, check_numbers
from seqpar.text import clock

# subject → functions of lab.benches that return its series; without a name: the module's ``series``
SUBJECTS = {
    "attention": ("attention",),
    "convert": ("unets.converted",),
    "encoder": ("encoder", "rank"),
    "growth": ("growth",),
    "hierarchical": ("memory_by_ranks.stages",),
    "launches": ("launches",),
    "memory": ("memory",),
    "data": ("data", "loader"),
    "nnunet": ("nnunet",),
    "pipe": ("pipe",),
    "plan": ("plan", "plan.published", "plan.answers"),
    "predict": ("predict", "predict.parts"),
    "pretrain": ("memory_by_ranks.masked",),
    "start": ("start",),
    "step": ("step", "step_profile"),
    "unets": ("unets",),
}
LARGE = {"memory": ("memory.large_series",), "pretrain": ("memory_by_ranks.large_masked",)}
RESULTS = Path(__file__).parent / "lab" / "benches" / "results"
CUT_SHORT = 130
MOST_TURNS = 1000


class Planned(NamedTuple):
    """A series to measure, and the subject and function that it belongs to."""

    subject: str
    function: str
    series: Series
    turns: int

    @property
    def seconds(self) -> float:
        return self.turns * self.series.turn_s


def act(arguments: Sequence[str]) -> int:
    """Measures the subjects that the command line names; returns 0, or 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    check_numbers(options, turns=whole_bounds(1, MOST_TURNS))
    planned = plan_series(options.subjects, options.quick, options.large, options.turns)
    print(estimate(planned), file=sys.stderr, flush=True)
    for one in planned:
        table = Table(
            f"{one.subject} ({one.function}), {one.series.in_words(one.turns)}",
            RESULTS / f"{one.subject}.md" if options.write else None,
        )
        finished = run_series(one.series, one.turns, table.add, Progress())
        cut_short = "Cut short: the rows show the turns that were done."
        table.close(one.series.conclude(table.rows) if finished else cut_short)
        if not finished:
            return CUT_SHORT
    return 0


def plan_series(subjects: Sequence[str], quick: bool, large: bool, turns: int | None) -> list[Planned]:
    """Returns the series to measure, in order; ``turns``: of every series, None for its own number."""
    unknown = [name for name in subjects if name not in SUBJECTS]
    if unknown:
        raise ValueError(f"there is no bench of {unknown[0]}: choose from {', '.join(SUBJECTS)}")
    if quick and large:
        raise ValueError("--quick and --large are opposites: remove one of them")
    functions = LARGE if large else SUBJECTS
    if not set(subjects) <= functions.keys():
        raise ValueError(f"--large is only for {', '.join(LARGE)}: remove it, or name only these")
    result = []
    for subject in subjects or functions:
        for spelled in functions[subject]:
            module, _, name = spelled.partition(".")
            make = getattr(importlib.import_module(f"lab.benches.{module}"), name or "series")
            every: list[Series] = make() if large else make(quick)
            result += [Planned(subject, name or module, one, turns or one.turns) for one in every]
    return result


def estimate(planned: Sequence[Planned]) -> str:
    """Returns the estimated time, in total and by subject."""
    seconds: dict[str, float] = {}
    for one in planned:
        seconds[one.subject] = seconds.get(one.subject, 0.0) + one.seconds
    parts = ", ".join(f"{subject} {clock(spent)}" for subject, spent in seconds.items())
    shorter = "Ctrl-C keeps the rows so far; --quick and --turns 1 are shorter"
    return f"about {clock(sum(seconds.values()))} on 2 idle CPU cores ({parts}). {shorter}"


def _parser() -> argparse.ArgumentParser:
    parser = Parser("bench", description="Measures speed and memory as ratios within one run, and prints a table.")
    subjects = f"what to measure: {', '.join(SUBJECTS)} (default: all)"
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=subjects)
    quick = "measure smaller cases in fewer turns: at most 3 minutes a subject on 2 CPU cores"
    parser.add_argument("--quick", action="store_true", help=quick)
    large = "measure large cases instead (10 minutes or more each); only memory and pretrain have some"
    parser.add_argument("--large", action="store_true", help=large)
    turns = "how often to measure each case (default: more often the more its times vary)"
    parser.add_argument("--turns", type=int, metavar="TURNS", help=turns)
    write = "also append each table to lab/benches/results/SUBJECT.md next to this script"
    parser.add_argument("--write", action="store_true", help=write)
    return parser


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs start with Ctrl-C ignored
        signal.signal(number, signal.default_int_handler)  # both signals keep the rows so far
    sys.exit(run(act))


if __name__ == "__main__":
    main()
