"""tune --plan: what a sweep takes on 1, 2, 4 ... devices."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from seqpar.cluster.cpu_speed import measure_cpu
from seqpar.cluster.devices import Device, device_here, measured, usable_cores
from seqpar.data.errors import DataError
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.parallel.launcher import Launcher
from seqpar.planner.batch_size import choose_batch, hold_global_batch, settings_at_start
from seqpar.planner.chooser import choose_lessons, has_open_lessons
from seqpar.planner.needs import Plan, RunToPlan, plan_complete_config
from seqpar.report.curves import Diagram, Line
from seqpar.report.plots import draw_figure, escape_mathtext, name_of_run
from seqpar.runs.run_folder import read_config
from seqpar.runs.sweep_folder import Sweep
from seqpar.settings.config import Config
from seqpar.settings.lessons import lessons_of
from seqpar.sweeps.sweep_request import ALL, SweepRequest
from seqpar.tasks.lookup import task_of
from seqpar.text import clock, quantity


def makespan(lengths: Sequence[float], workers: int) -> float:
    """Returns when the last of runs ends that begin in their order, each on the worker that is free first."""
    if workers < 1:
        raise ValueError(f"{workers} workers: at least 1 is needed")
    free = [0.0] * workers
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


def speedup_of_equal(count: int, workers: int) -> float:
    """Returns the speed-up of ``count`` runs of equal length on ``workers`` workers."""
    return count / math.ceil(count / workers)


@dataclass(frozen=True)
class Scaling:
    """The seconds of a sweep on a number of devices; NaN for a way that cannot be taken with them.

    - ``side_by_side``: each run on the devices of one run
    - ``one_by_one``: each run on all devices, one after the other
    """

    devices: int
    side_by_side: float
    one_by_one: float


def scale(
    lengths: Sequence[float], devices_per_run: int, sizes: Sequence[int], on_all: Callable[[int], Sequence[float]]
) -> list[Scaling]:
    """Returns what runs take on each number of devices.

    - ``lengths``: seconds of each run on the devices of one run
    - ``on_all``: returns the seconds of each run on a number of devices, () if they cannot be used
    """
    every = []
    for size in sizes:
        at_a_time = size // devices_per_run
        side_by_side = makespan(lengths, at_a_time) if at_a_time else math.nan
        every.append(Scaling(size, side_by_side, sum(on_all(size)) or math.nan))
    return every


def _seconds(clock: str) -> int:
    hours, minutes, seconds = map(int, clock.split(":"))
    return (hours * 60 + minutes) * 60 + seconds


# by number of GPUs: seconds of 32 runs one after the other on all of them, and side by side on one each
TABLE_I = {
    gpus: Scaling(gpus, float(_seconds(experiments)), float(_seconds(data)))
    for gpus, data, experiments in (
        (1, "44:18:02", "44:20:19"),
        (2, "23:09:28", "22:24:39"),
        (4, "15:09:35", "11:32:20"),
        (8, "7:41:12", "7:03:17"),
        (12, "5:59:59", "5:35:22"),
        (16, "4:26:50", "4:11:54"),
        (32, "3:21:44", "2:55:06"),
    )
}
MOST_DEVICES = 32  # of the table, unless more are here
# what changes no length of a step
_FREE = {"lr": 1e-4, "betas": (), "amsgrad": False, "seed": 0, "weight_decay": 0.0, "fold": "0", "schedule": "constant"}


@dataclass(frozen=True)
class Recorded:
    """What a run took, in seconds, and on how many ranks."""

    seconds: float
    ranks: int


def print_plan(order: SweepRequest, sweep: Sweep, out: Path, devices_here: int) -> None:
    """Prints what the sweep takes, and draws scaling.png into its folder.

    - ``devices_here``: how many there are
    """
    configs = order.configs(order.known(sweep), {"measured"})  # seconds are planned with it in any case
    fewest = max(config.group_ranks for config in configs.values())
    per_run = fewest if order.devices_per_run == ALL else int(order.devices_per_run)
    usual = devices_here if order.devices_per_run == ALL else per_run
    recorded = {
        point.name: Recorded(point.seconds, _ranks_of(out / point.name, usual))
        for point in sweep.points
        if point.state == "finished" and point.seconds
    }
    runs = [(config, recorded.get(name)) for name, config in configs.items()]
    lengths = [run_seconds_on(per_run, *run) for run in runs]
    sizes = _sizes(per_run, len(lengths), devices_here)
    rows = scale(lengths, per_run, sizes, lambda size: _on_all(runs, per_run, size))
    print(f"{quantity(len(lengths), 'point')} of {_range(lengths)} each; {source_of(len(recorded), len(lengths))}")
    is_distmis = order.preset == "distmis" and len(lengths) == 32
    for line in table(rows, len(lengths) if per_run == 1 else 0, is_distmis):
        print(line)
    here = next((row for row in rows if row.devices == devices_here), rows[-1])
    print(verdict(here), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    draw_scaling(rows, is_distmis, out / "scaling.png")
    print(out / "scaling.png", flush=True)


def source_of(recorded: int, points: int) -> str:
    """Returns where the lengths of points come from: those that have finished recorded theirs."""
    if recorded == points:
        return "times are recorded, and leave out what each run takes to start"
    by_planner = "are planned from the number of steps, and leave out starting and validating"
    return f"{recorded} of the times are recorded; the others {by_planner}" if recorded else f"times {by_planner}"


def run_seconds(config: Config, ranks: int) -> float:
    """Returns the planner's seconds for a run's steps on ``ranks`` ranks.

    More sequence groups see more tiles a step; the steps are fewer with ``--scale-lr`` alone, the tiles of a group with
    ``--global-batch``.
    """
    num_groups = ranks // config.group_ranks
    held = hold_global_batch(config, num_groups) if config.global_batch > 0 else config
    return settings_at_start(config, num_groups).steps * step_seconds(held, ranks)


def run_seconds_on(ranks: int, config: Config, recorded: Recorded | None = None) -> float:
    """Returns the seconds of a run on ``ranks`` ranks: recorded, converted from another number of ranks, or planned."""
    if recorded is None:
        return run_seconds(config, ranks)
    if recorded.ranks == ranks:
        return recorded.seconds
    return recorded.seconds * run_seconds(config, ranks) / run_seconds(config, recorded.ranks)


def step_seconds(config: Config, ranks: int) -> float:
    """Returns the seconds of a step on ``ranks`` ranks, each on a device of its own.

    The planner shares the cores of a CPU out to all ranks; here each of them has one.
    """
    seconds = plan_of(replace(config, **_FREE), ranks).step_seconds  # type: ignore[arg-type]
    return seconds if device_here(config.device).on_gpu else seconds * usable_cores() / ranks


def _on_all(runs: Sequence[tuple[Config, Recorded | None]], per_run: int, size: int) -> Sequence[float]:
    """Returns the seconds of each run on all of ``size`` devices, () where one of them cannot be made so."""
    for config, _ in runs:
        num_groups, odd = divmod(size, config.group_ranks)
        if size < per_run or odd or (config.global_batch > 0 and config.global_batch % num_groups):
            return ()
    return [run_seconds_on(size, *run) for run in runs]


def _ranks_of(run: Path, usual: int) -> int:
    """Returns the ranks on which a run was made, ``usual`` where its folder does not say."""
    try:
        return int(read_config(run)["layout"]["ranks"])
    except (DataError, ValueError, KeyError, TypeError):
        return usual


def _sizes(per_run: int, points: int, devices_here: int) -> list[int]:
    """Returns the numbers of devices to plan for: doubled, as far as they help, and those that are here."""
    most = max(min(per_run * 2 ** math.ceil(math.log2(max(points, 1))), MOST_DEVICES), devices_here, per_run)
    sizes = {per_run * 2**power for power in range(16) if per_run * 2**power <= most}
    return sorted(sizes | ({devices_here} if devices_here >= per_run else set()))


def _range(lengths: Sequence[float]) -> str:
    low, high = min(lengths), max(lengths)
    return clock(low) if clock(low) == clock(high) else f"{clock(low)} to {clock(high)}"


def table(rows: Sequence[Scaling], equal_runs: int, is_distmis: bool) -> list[str]:
    """Returns the lines of the table: times and how many times as fast as on the fewest devices.

    - ``equal_runs``: as how many runs of equal length the most that side by side can gain is computed; 0: there is none
    - ``is_distmis``: whether DistMIS's own measurements are shown too
    """
    heads = f"{'devices':>7}  {'side by side':>14} {'speed':>6}  {'one by one':>14} {'speed':>6}"
    heads += f"  {'most':>6}" * bool(equal_runs) + f"   {'measured in the paper':>29}" * is_distmis
    lines, first = [heads], rows[0]
    for row in rows:
        line = f"{row.devices:>7}  {clock(row.side_by_side):>14} {first.side_by_side / row.side_by_side:>6.2f}"
        line += f"  {clock(row.one_by_one):>14} {first.one_by_one / row.one_by_one:>6.2f}"
        if equal_runs:
            line += f"  {speedup_of_equal(equal_runs, row.devices):>6.2f}"
        if is_distmis and row.devices in TABLE_I:
            theirs, alone = TABLE_I[row.devices], TABLE_I[1]
            pair = f"{alone.side_by_side / theirs.side_by_side:.2f}, {alone.one_by_one / theirs.one_by_one:.2f}"
            line += f"   {pair:>29}"
        lines.append(line)
    return lines


def verdict(row: Scaling) -> str:
    """Returns which way is quicker, in a sentence."""
    if math.isnan(row.one_by_one) or math.isnan(row.side_by_side):
        return f"on {row.devices} devices only one way can be taken"
    quicker = row.side_by_side <= row.one_by_one
    ways = ("side by side", "one run after the other (--devices-per-run all)")
    ratio = max(row.side_by_side, row.one_by_one) / max(min(row.side_by_side, row.one_by_one), 1e-9)
    return f"on {row.devices} devices {ways[not quicker]} is quicker, {ratio:.2f} times"


def draw_scaling(rows: Sequence[Scaling], is_distmis: bool, path: Path) -> None:
    """Draws seconds and speed-up of both ways over the number of devices."""
    sizes, first = [row.devices for row in rows], rows[0]
    lengths = [time for row in rows for time in (row.side_by_side, row.one_by_one) if math.isfinite(time)]
    units = {"hours": 3600, "minutes": 60, "seconds": 1}
    name = next((name for name, unit in units.items() if max(lengths, default=0.0) >= 2 * unit), "seconds")
    unit = units[name]
    times = [
        Line("side by side", sizes, [[row.side_by_side / unit for row in rows]], dots=True),
        Line("one after the other", sizes, [[row.one_by_one / unit for row in rows]], dots=True),
    ]
    speeds = [
        Line("side by side", sizes, [[first.side_by_side / row.side_by_side for row in rows]], dots=True),
        Line("one after the other", sizes, [[first.one_by_one / row.one_by_one for row in rows]], dots=True),
        Line("ideal: twice the devices, twice as fast", sizes, [[size / sizes[0] for size in sizes]], dots=True),
    ]
    if is_distmis:
        paper = list(TABLE_I.values())
        gpus, alone = [row.devices for row in paper], paper[0]
        side = [[alone.side_by_side / row.side_by_side for row in paper]]
        speeds += [
            Line("measured in the paper, side by side", gpus, side, only_points=True),
            Line("measured in the paper, one after the other", gpus,
                 [[alone.one_by_one / row.one_by_one for row in paper]], only_points=True),
        ]  # fmt: skip
    note = "simulated from planned or recorded times of runs; each run starts as soon as devices are free"
    draw_figure(
        f"{escape_mathtext(name_of_run(path.parent, 'Sweep'))}: planned time on several devices",
        [Diagram(name, "devices", times, log=True), Diagram("times as fast", "devices", speeds, log=True)],
        note,
        [path],
    )


def plan_of(config: Config, ranks: int) -> Plan:
    """Returns the plan of a config on ``ranks`` devices like this one; for a curriculum, that of its last lesson."""
    config = replace(config, out="", resume=False)
    if has_open_lessons(config):
        data = task_of(config).read_headers(config)
        largest = data.largest(PrepareSettings.spaced(config.spacing).spacing)
        sizes = len(data.modalities), len(data.outputs(config.targets))
        config, _ = choose_lessons(config, Launcher("alone"), largest, *sizes)
    return _plan(choose_batch(lessons_of(config)[-1].config), ranks)


@cache
def _plan(config: Config, ranks: int) -> Plan:
    data = task_of(config).read_headers(config)
    device = _device(config.device, config.precision)
    if config.measured:
        device = measured(config.measured, device, config.precision)
    return plan_complete_config(
        RunToPlan(config, device, len(data.modalities), len(data.outputs(config.targets))), ranks
    )


@cache
def _device(kind: str, precision: str) -> Device:
    """Returns the device here; a CPU's cores are measured, which takes some seconds."""
    device = device_here(kind)
    return device if device.on_gpu else measure_cpu(precision)
