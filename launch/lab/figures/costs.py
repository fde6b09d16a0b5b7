"""What a run cost and what the planner says it costs: memory of a rank, and seconds a step."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from seqpar.cluster.devices import MIB
from seqpar.planner.needs import Plan
from seqpar.runs.journal import read_metrics
from seqpar.runs.run_folder import read_config
from seqpar.settings.config import Config
from seqpar.sweeps.scaling_plan import plan_of


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
