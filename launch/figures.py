"""Redraws the paper's figures, and some that it lacks: ``python launch/figures.py 5 6 --scale debug``.

Each is a list of training runs, a picture (PNG, SVG), every point as CSV, and verdicts computed from the points.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import seqpar.cli  # noqa: F401  first: it sets what torch reads once, when it is imported

# isort: split
from lab.figures.encoder_figure import ENCODER_FIGURE
from lab.figures.figure import Figure, FigureRequest, Results, every_run, runs_of
from lab.figures.figure_files import write_figure
from lab.figures.figure_plan import print_plan, time_left
from lab.figures.length_figure import LENGTH_FIGURE
from lab.figures.paper_figures import PAPER_FIGURES, SCALES
from lab.figures.pretraining_figure import PRETRAINING_FIGURE
from lab.figures.question_figures import QUESTION_FIGURES
from lab.figures.tile_figure import RESOLUTION_FIGURE, TILE_FIGURE
from lab.figures.vessel_figure import VESSEL_FIGURE
from lab.figures.window_figure import WINDOW_FIGURE
from seqpar.cluster import exit_codes
from seqpar.models.build import NETWORK_NAMES
from seqpar.parallel.launcher import read_launcher
from seqpar.runs.sweep_folder import make_folder
from seqpar.settings.command_line import MOST_RANKS, parse
from seqpar.settings.data_settings import ALL_FOLDS
from seqpar.settings.field import whole_bounds
from seqpar.settings.parser import Parser, check_numbers
from seqpar.sweeps.one_by_one import OneByOne
from seqpar.sweeps.planned_run import PlannedRun, config_of
from seqpar.text import flag_name, parse_duration

LATER = (LENGTH_FIGURE, WINDOW_FIGURE, PRETRAINING_FIGURE, TILE_FIGURE, ENCODER_FIGURE, RESOLUTION_FIGURE)
EVERY = (*PAPER_FIGURES, *QUESTION_FIGURES, *LATER, VESSEL_FIGURE)
FIGURES = {figure.number: figure for figure in sorted(EVERY, key=lambda one: one.number)}
REACH, REACH_FIGURE = 0.8, 14  # a Dice, and the figure that asks for the time to it
MOST_SEEDS = 1000
OF_ONE_RUN = ("out", "resume", "again", "take_over", "dry_run", "time_limit", "preset")  # figures sets these itself


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 once all figures are drawn, 75 where they were left early, else that of a run."""
    figures, options, rest = _parse(arguments)
    if options.list:
        print("\n".join(f"{figure.number:3}  {figure.shows}" for figure in FIGURES.values()))
        return 0
    order = FigureRequest(options.scale, _typed(rest), options.seeds, options.groups or 0)
    planned = {figure.number: runs_of(figure, figure.with_data(order), SCALES) for figure in figures}
    for run in {run.name: run for number in planned for run in every_run(planned[number])}.values():
        config_of(run)
    if options.plan:
        print_plan(planned, options.out / "runs")
        return 0
    make_folder(options.out)
    engine, codes = OneByOne(until=time.monotonic() + parse_duration(options.time_limit)), list[int]()
    for figure in figures:
        runs = planned[figure.number]
        every = every_run(runs)
        takes = time_left(every, options.out / "runs")
        print(f"figure {figure.number}: {figure.shows}; {takes}", flush=True)
        code = engine.make(every, options.out / "runs")
        if code == exit_codes.PREEMPTED:
            print("left early: the same command continues", flush=True)
            return code
        codes.append(code)
        if code:
            print(f"figure {figure.number} is not drawn: one of its runs failed", file=sys.stderr, flush=True)
        else:
            _draw(figure, runs, options)
    return next(filter(None, codes), 0)


def _draw(figure: Figure, runs: dict[str, list[PlannedRun]], options: argparse.Namespace) -> None:
    root = options.out / "runs"
    folders = {label: [root / run.name for run in of_arm] for label, of_arm in runs.items()}
    before = {label: [root / run.before.name for run in of_arm if run.before] for label, of_arm in runs.items()}
    results = Results(folders, options.reach or REACH, before)
    for line in write_figure(figure, results, options.scale, options.out):
        print(line, flush=True)
    print(f"{options.out / f'figure-{figure.number}'}.png, .svg, .csv (points), .txt (verdicts)", flush=True)


def _parse(arguments: Sequence[str]) -> tuple[list[Figure], argparse.Namespace, list[str]]:
    """Returns the figures, the options of this act, and the flags of train."""
    launcher = read_launcher(os.environ)
    if launcher.world > 1:
        raise ValueError(f"figures starts the ranks of its runs itself, and {launcher.world} came: start it once")
    count = next((n for n, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    parser = _parser()
    options, rest = parser.parse_known_args(arguments[count:])
    check_numbers(options, seeds=whole_bounds(1, MOST_SEEDS), groups=whole_bounds(1, MOST_RANKS))
    known = ", ".join(map(str, FIGURES))
    numbers = [int(word) if word.isdigit() else word for word in arguments[:count]]
    for number in numbers:
        if number not in FIGURES:
            raise ValueError(f"there is no figure {number} here: choose from {known} (--list tells what each shows)")
    chosen = {int(number) for number in numbers} or FIGURES.keys()
    if options.reach is not None and (REACH_FIGURE not in chosen or not 0 < options.reach <= 1):
        why = "a Dice in (0, 1] is needed" if REACH_FIGURE in chosen else f"only figure {REACH_FIGURE} asks for it"
        raise ValueError(f"--reach {options.reach}: {why}")
    return [figure for number, figure in FIGURES.items() if number in chosen], options, rest


def _typed(rest: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of train on the command line."""
    if any(word.startswith("--preset") for word in rest):
        raise ValueError("--preset: --scale says what the figures' runs begin with; remove it")
    _, config, names = parse(rest, "paper", NETWORK_NAMES, tuple(_parser()._option_string_actions))
    if own := sorted(names.intersection(OF_ONE_RUN)):
        raise ValueError(f"--{flag_name(own[0])} belongs to a single run, and each figure has several: remove it")
    if config.fold == ALL_FOLDS:
        raise ValueError(f"--fold {ALL_FOLDS} is five runs, and a curve of a figure is one: name a fold")
    typed = {name: getattr(config, name) for name in sorted(names)}
    return typed | {name: os.path.abspath(typed[name]) for name in ("data", "cache") if typed.get(name)}


def _parser() -> Parser:
    parser = Parser(
        "figures",
        usage="%(prog)s [FIGURE ...] [--scale debug|laptop|paper] [--data FOLDER] [--out FOLDER] [train's flags]",
        description="Redraws the paper's figures, all or those whose numbers come first, from runs that it makes.",
        epilog="All flags of train that the figure does not compare work here too: seqpar-train --help all. Finished "
        "runs are not repeated, interrupted ones resume.",
    )
    add = parser.add_argument
    add("--scale", choices=list(SCALES), default="debug", help="size of the runs: minutes (debug), an hour (laptop), "
        "or the paper's (%(default)s)")  # fmt: skip
    add("--out", type=Path, default=Path("figures"), metavar="FOLDER", help="where pictures, points, verdicts and, in "
        "runs/, run folders go (%(default)s)")  # fmt: skip
    add("--seeds", type=int, default=1, metavar="NUMBER", help="runs of each curve, which become a band (%(default)s)")
    add("--groups", type=int, metavar="NUMBER", help="sequence groups of each run, which stay as many as "
        "more ranks share a tile (default: 1; at --scale paper 8)")  # fmt: skip
    add("--reach", type=float, metavar="DICE", help=f"Dice to which figure {REACH_FIGURE} takes the time ({REACH})")
    add("--time-limit", default="", metavar="TIME", help="of all runs: minutes or H:MM:SS")
    add("--plan", action="store_true", help="say which runs there are to make, and how long they take, and stop")
    add("--list", action="store_true", help="say what each figure shows, and stop")
    return parser


def main() -> None:
    """Ends the process with the act's exit code."""
    exit_codes.leave(exit_codes.run(act))


if __name__ == "__main__":
    main()
