"""Measures speed and memory as ratios within one run: ``python launch/bench.py data step … [--quick] [--write]``."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lab.benches.series import Progress, Series, run_series
from lab.benches.table import Table
from seqpar.cluster.exit_codes import run
from seqpar.settings.parser import Parser
from seqpar.text import clock

# subject → modules of benches/ that have series(), imported only when they are measured
SUBJECTS = {
    "attention": ("attention",),
    "encoder": ("encoder", "rank"),
    "hierarchical": ("hierarchical",),
    "hybrid": ("hybrid", "classes"),
    "memory": ("memory",),
    "data": ("data", "loader"),
    "pipe": ("pipe",),
    "plan": ("plan", "plan_answer"),
    "predict": ("predict", "pass_profile", "labels", "lamp"),
    "pretrain": ("masked",),
    "reading": ("reading",),
    "start": ("start",),
    "step": ("step", "step_profile", "launches"),
    "sweep": ("sweep",),
    "unets": ("unets", "halo_share"),
    "tiles": ("tiles",),
}
LARGE = {"memory": ("memory",), "pretrain": ("masked",)}  # these have large_series() too
RESULTS = Path(__file__).parent / "lab" / "benches" / "results"
CUT_SHORT = 130


class Planned(NamedTuple):
    """A series to measure, and where its table goes."""

    subject: str
    module: str
    series: Series
    turns: int

    @property
    def seconds(self) -> float:
        return self.turns * self.series.turn_s


def act(arguments: Sequence[str]) -> int:
    """Measures the subjects that the command line names; returns 0, or 130 where Ctrl-C cut it short."""
    options = _parser().parse_args(arguments)
    planned = plan_series(options.subjects, options.quick, options.large, options.turns)
    print(estimate(planned), file=sys.stderr, flush=True)
    for one in planned:
        title = f"{one.subject} ({one.module}{', large' if options.large else ''})"
        table = Table(
            f"{title}, {one.series.in_words(one.turns)}", RESULTS / f"{one.subject}.md" if options.write else None
        )
        finished = run_series(one.series, one.turns, table.add, Progress())
        cut_short = "Cut short: the rows are of the turns that were done."
        table.close(one.series.conclude(table.rows) if finished else cut_short)
        if not finished:
            return CUT_SHORT
    return 0


def plan_series(subjects: Sequence[str], quick: bool, large: bool, turns: int | None) -> list[Planned]:
    """Returns what is to be measured, in order; ``turns``: of every series, None for its own number."""
    unknown = [name for name in subjects if name not in SUBJECTS]
    if unknown:
        raise ValueError(f"there is no bench of {unknown[0]}: choose from {', '.join(SUBJECTS)}")
    if turns is not None and turns < 1:
        raise ValueError(f"--turns {turns}: it must be at least 1")
    if quick and large:
        raise ValueError("--quick and --large are opposites: leave one of both out")
    modules = LARGE if large else SUBJECTS
    if not set(subjects) <= modules.keys():
        raise ValueError(f"--large has rows of {', '.join(LARGE)} alone: leave it out, or name only these")
    result = []
    for subject in subjects or modules:
        for name in modules[subject]:
            module = importlib.import_module(f"lab.benches.{name}")
            every: list[Series] = module.large_series() if large else module.series(quick)
            result += [Planned(subject, name, one, turns or one.turns) for one in every]
    return result


def estimate(planned: Sequence[Planned]) -> str:
    """Returns how long it takes, in all and by subject."""
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
    large = "measure the large cases instead, a quarter of an hour or more each; only memory and pretrain have some"
    parser.add_argument("--large", action="store_true", help=large)
    turns = "how often each case is measured (default: as often as its times vary)"
    parser.add_argument("--turns", type=int, metavar="TURNS", help=turns)
    write = "append each table to benches/results/SUBJECT.md beside this script, as well as printing it"
    parser.add_argument("--write", action="store_true", help=write)
    return parser


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a job in the background starts with Ctrl-C ignored
        signal.signal(number, signal.default_int_handler)  # both keep the rows so far
    sys.exit(run(act))


if __name__ == "__main__":
    main()
