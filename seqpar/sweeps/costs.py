"""What a run cost and what the planner says it costs: memory of a rank, and seconds a step."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median

from seqpar.cluster.cpu_speed import measure_cpu
from seqpar.cluster.devices import MIB, Device, device_here, measured
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.parallel.launcher import Launcher
from seqpar.planner.batch_size import choose_batch
from seqpar.planner.chooser import choose_lessons, has_open_lessons
from seqpar.planner.needs import Plan, RunToPlan, plan_complete_config
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_folder import read_config
from seqpar.settings.config import Config
from seqpar.settings.lessons import lessons_of
from seqpar.tasks.lookup import task_of


@dataclass(frozen=True)
class RunCost:
    """Mebibytes of a rank, and seconds a step."""

    memory: float
    seconds: float


def measured_cost(run: Path) -> RunCost:
    """Returns the most memory that the first rank took, and the median time of its steps but the first."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    seconds = [row["seconds"] for row in rows]
    return RunCost(max(row["peak_mem_mb"] for row in rows), median(seconds[1:] or seconds))


def planned_cost(run: Path) -> RunCost:
    """Returns what the planner says of a finished run, for the device here."""
    content = read_config(run)
    return cost_from_plan(plan_of(Config.from_dict(content["config"]), content["layout"]["ranks"]))


def cost_from_plan(plan: Plan) -> RunCost:
    return RunCost(plan.total / MIB, plan.step_seconds)


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
