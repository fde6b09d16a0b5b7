"""What making figures takes: their runs, and the time of those that are still to make, before anything begins."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.figures.figure import every_run
from seqpar.sweeps.planned_run import PlannedRun, config_of, has_begun, has_finished, read_status
from seqpar.sweeps.scaling_plan import plan_of
from seqpar.text import clock, quantity


class StepsLeft(NamedTuple):
    """The steps that a run lacks, their planned time, and how far it is, in words."""

    steps: int
    seconds: float
    state: str = ""


def steps_left(run: PlannedRun, root: Path) -> StepsLeft:
    """Returns what a run in ``root`` lacks."""
    config, folder = config_of(run), root / run.name
    left, state = config.steps, ""
    if has_finished(folder):
        return StepsLeft(0, 0.0, " (finished)")
    if has_begun(folder):
        left = config.steps - int(read_status(folder).get("step", 0))
        state = f" (resumes at step {config.steps - left})"
    return StepsLeft(left, left * plan_of(config, run.ranks).step_seconds if left else 0.0, state)


def time_left(runs: Iterable[PlannedRun], root: Path) -> str:
    """Returns in words how long the steps take that some runs lack."""
    seconds = sum(steps_left(run, root).seconds for run in runs)
    return f"about {clock(seconds)} of steps by the planner" if seconds else "its runs have finished"


def print_plan(figures: Mapping[int, Mapping[str, Sequence[PlannedRun]]], root: Path) -> None:
    """Prints each run of the figures once, how far it is, and the planned time of the steps that it lacks."""
    numbers, runs = dict[str, list[int]](), dict[str, PlannedRun]()
    for number, arms in figures.items():
        for run in every_run(arms):
            runs[run.name] = run
            numbers.setdefault(run.name, []).append(number)
    print(f"{'figures':>12} {'ranks':>5} {'steps':>7}  {'time':>8}  run", flush=True)
    left_s = 0.0
    for name, run in runs.items():
        left = steps_left(run, root)
        left_s += left.seconds
        of, folder = ",".join(map(str, numbers[name])), root / name
        print(f"{of:>12} {run.ranks:>5} {left.steps:>7}  {clock(left.seconds):>8}  {folder}{left.state}", flush=True)
    print(
        f"{quantity(len(runs), 'run')}, {clock(left_s)} of steps by the planner, one run after the other; starts and "
        "validations come on top"
    )
