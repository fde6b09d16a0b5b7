"""The plan of a run over a pipe on the device here, counted: nothing is allocated or measured."""

from seqpar.parallel.launcher import Launcher
from seqpar.planner.auto_settings import device_of
from seqpar.planner.needs import Plan, RunToPlan
from seqpar.planner.pipeline_plan import plan_counted
from seqpar.planner.stage_lines import describe_stages, describe_step, no_overlap
from seqpar.settings.config import Config


def plan_pipe_here(config: Config, launcher: Launcher, channels: int, outputs: int) -> tuple[Plan, list[str]]:
    """Returns the plan of a complete config's fullest place, and lines on its stages.

    Where no placement fits it is one that does not, as its memory tells.
    """
    run = RunToPlan(config, device_of(config, launcher), channels, outputs, timed=False)
    plan, pipe, placed = plan_counted(run, max(launcher.world, config.group_ranks))
    assert placed.stages is not None
    why = f"--placement {config.placement} by counted costs; training measures them"
    return plan, [describe_stages(placed.stages, why), describe_step(pipe, placed.stages), *no_overlap(config)]
