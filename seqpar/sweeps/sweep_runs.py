"""Makes the runs of a sweep on Ray, and keeps sweep.json up to date meanwhile."""

import argparse
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from seqpar.cluster.exit_codes import PREEMPTED, code_of
from seqpar.data.errors import unwritable
from seqpar.runs.run_lock import RunLock
from seqpar.runs.run_status import StatusFile
from seqpar.runs.sweep_folder import Point, Sweep, list_some, make_folder, refresh_points, write_sweep
from seqpar.settings.config import Config
from seqpar.settings.data_settings import DataSettings
from seqpar.settings.presets import FROM_DATA
from seqpar.sweeps.planned_run import PlannedRun
from seqpar.sweeps.ray_cluster import ray_cluster, require_answer
from seqpar.sweeps.ray_engine import SideBySide
from seqpar.sweeps.sweep_request import SweepRequest
from seqpar.tasks.lookup import task_of
from seqpar.text import in_flags, quantity


def make_sweep(order: SweepRequest, sweep: Sweep, options: argparse.Namespace, until: float) -> tuple[int, Sweep]:
    """Returns the exit code, and the sweep as it stands then.

    - ``options``: of the command line
    - ``until``: when to leave, by ``time.monotonic``
    """
    out, configs = Path(options.out), order.configs(order.known(sweep))
    make_folder(out)
    lock = RunLock(out)
    try:
        lock.take(options.take_over)
    except OSError as error:
        raise unwritable(f"--out {out}", error) from None
    record = _Record(out, sweep, lock, order.total)
    try:
        record.write()
        is_over = record.num_over == max(len(sweep.points), order.total)
        code = 0 if is_over else _make(order, record, configs, options, until)
        return code, record.write("preempted" if code == PREEMPTED else "failed" if code else "finished", code)
    except KeyboardInterrupt:  # before runs begin, or after; meanwhile the engine keeps it
        return PREEMPTED, record.write("preempted", PREEMPTED)
    except BaseException as error:
        record.status.write("failed", in_flags(str(error)), code_of(error) or 1)
        raise
    finally:
        lock.release()


def _make(
    order: SweepRequest,
    record: "_Record",
    configs: Mapping[str, Config],
    options: argparse.Namespace,
    until: float,
) -> int:
    """Returns the exit code of the runs that are not over."""
    if options.ray:
        require_answer(options.ray)
    over = {point.name for point in record.sweep.points if point.is_over}
    count = max(len(record.sweep.points), order.total)
    print(_points_to_train(count, record.num_over), flush=True)
    if order.preset not in FROM_DATA:  # else each run decides by itself how its data are prepared
        _prepare([config for name, config in configs.items() if name not in over])
    print(f"joining the Ray at {options.ray}" if options.ray else "starting Ray", flush=True)
    with ray_cluster(options.ray, order.device, order.on_gpu, options.devices or 0, options.ray_nodes) as cluster:
        runs, ranks = order.runs(record.sweep, cluster.devices), order.ranks(cluster.devices)
        first_step, last_step = order.validated_steps(configs, ranks)
        engine = SideBySide(
            cluster,
            ranks,
            order.max_failures,
            order.stop_early,
            first_step,
            last_step,
            until,
            stopped=record.stopped,
            on_end=record.write,
            refuse_taken_over=record.refuse_taken_over,
            suggest=partial(_suggested, order, record, cluster.devices) if order.total else None,
            total=order.total,
        )
        print(_at_a_time(count - record.num_over, ranks, cluster.devices, cluster.on_gpu), flush=True)
        return engine.make(runs, record.out)


def _suggested(
    order: SweepRequest,
    record: "_Record",
    devices: int,
    task_of: Callable[[PlannedRun], dict[str, Any]],
    ends: Callable[[], bool],
) -> Any:
    """Returns the search algorithm that adds points to the record, one after the other."""
    from seqpar.sweeps.suggested_points import SuggestedPoints  # optuna may be missing

    def task(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        record.add(Point(name, dict(settings)))
        return task_of(order.run(name, settings, devices))

    seed = int(order.settings.get("seed", 0))
    return SuggestedPoints(order.space, order.samples, record.sweep.points, task, ends, seed)


class _Record:
    """Writes sweep.json and the status of the sweep as its runs stand."""

    def __init__(self, out: Path, sweep: Sweep, lock: RunLock, total: int = 0) -> None:
        self.out, self.sweep, self.status, self.total = out, sweep, StatusFile(out, lock), total
        self.refuse_taken_over = partial(lock.refuse_lost, "this sweep ends")
        self.stopped = [point.name for point in sweep.points if point.state == "stopped"]
        self._lock = threading.Lock()

    @property
    def num_over(self) -> int:
        return sum(point.is_over for point in self.sweep.points)

    def add(self, point: Point) -> None:
        """Adds a point, unless it is there, and writes it down before its run begins."""
        self.refuse_taken_over()
        with self._lock:
            if point.name not in {known.name for known in self.sweep.points}:
                self.sweep = replace(self.sweep, points=(*self.sweep.points, point))
                write_sweep(self.out, self.sweep)

    def write(self, state: str = "running", code: int = 0) -> Sweep:
        """Returns the sweep as it stands."""
        self.refuse_taken_over()
        with self._lock:  # points may be added by the thread of a search algorithm
            ended = {"running": "", "preempted": "preempted"}.get(state, "killed")
            self.sweep = refresh_points(self.out, self.sweep, self.stopped, ended)
            write_sweep(self.out, self.sweep)
        self.status.step, self.status.steps = self.num_over, max(len(self.sweep.points), self.total)
        why = list_some(self.sweep.failures, "; ") or "not all points have finished"
        self.status.write(state, why * (state == "failed"), code)
        return self.sweep


def _prepare(configs: list[Config]) -> None:
    """Prepares the data of all runs, once for those that share them: what is wrong is said before any begins."""
    names = {f.name for f in fields(DataSettings)} - {"workers", "augment", "out"}
    kinds = {tuple(getattr(config, name) for name in sorted(names)): config for config in configs}
    for config in kinds.values():
        task_of(config).open_data(replace(config, out=""), True)


def _points_to_train(count: int, over: int) -> str:
    return f"{quantity(count, 'point')} to train{f', of which {over} ended before' if over else ''}"


def _at_a_time(left: int, ranks: int, devices: int, on_gpu: bool) -> str:
    device = "GPU" if on_gpu else "core"
    at_a_time = max(1, min(devices // ranks, left))
    return f"each on {quantity(ranks, device)}, {at_a_time} at a time on {quantity(devices, device)}"
