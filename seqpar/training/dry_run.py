"""``train --dry-run``: what would run, by the headers of the data."""

from dataclasses import replace
from pathlib import Path

from seqpar.parallel.launcher import Launcher
from seqpar.parallel.rendezvous import check_seqpar
from seqpar.planner.answer import rehearsal
from seqpar.planner.auto_settings import plan_here
from seqpar.planner.feasibility import refuse_lonely
from seqpar.planner.pipe_here import plan_pipe_here
from seqpar.runs.stale_status import warn_if_killed
from seqpar.tasks.tasks import task_of
from seqpar.training.open_settings import sizes_of
from seqpar.training.run_request import RunRequest
from seqpar.training.setup import first_lines


def dry_run(request: RunRequest, launcher: Launcher) -> int:
    """Prints what would run, by the headers of the data; allocates and writes nothing, and needs no other rank."""
    config = request.config
    num_ranks = max(launcher.world, config.group_ranks)
    check_seqpar(config.seqpar, num_ranks, config.pipe)
    refuse_lonely(config, num_ranks)
    assert request.fingerprint is not None
    if launcher.rank == 0:
        task = task_of(config)
        data, sizes = task.describe(request.fingerprint, config), sizes_of(request.fingerprint, config)
        here = replace(launcher, world=num_ranks)
        warn_if_killed(*[Path(config.out)] * bool(config.out))
        print(first_lines(request, here))
        for lesson in request.lessons:
            own, stages = lesson.config, list[str]()
            if own.pipe > 1:
                plan, stages = plan_pipe_here(own, here, *sizes)
            else:
                plan = plan_here(own, here, *sizes)
            print(rehearsal(own, plan, *sizes, data, len(lesson.steps), stages))
        if advice := task.advice(request.fingerprint, config, request.flags, request.preset):
            print(advice)
    return 0
