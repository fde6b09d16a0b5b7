"""``train --dry-run``: what would run, by the headers of the data."""

from dataclasses import replace
from pathlib import Path

from seqpar.environment import Launcher
from seqpar.launch.planning.answer import rehearsal
from seqpar.launch.planning.auto_settings import plan_here
from seqpar.launch.planning.feasibility import refuse_lonely
from seqpar.launch.runs.stale_status import warn_if_killed
from seqpar.launch.training.data import describe_data
from seqpar.launch.training.data_summary import tile_line
from seqpar.launch.training.request import RunRequest, sizes_of
from seqpar.launch.training.setup import first_lines
from seqpar.rendezvous import check_seqpar


def dry_run(request: RunRequest, launcher: Launcher) -> int:
    """Prints what would run, by the headers of the data; allocates and writes nothing, and needs no other rank."""
    config = request.config
    num_ranks = max(launcher.world, config.seqpar)
    check_seqpar(config.seqpar, num_ranks)
    refuse_lonely(config, num_ranks)
    assert request.fingerprint is not None
    if launcher.rank == 0:
        data, sizes = describe_data(request.fingerprint, config), sizes_of(request.fingerprint, config)
        here = replace(launcher, world=num_ranks)
        warn_if_killed(*[Path(config.out)] * bool(config.out))
        print(first_lines(request, here))
        for lesson in request.lessons:
            print(rehearsal(lesson.config, plan_here(lesson.config, here, *sizes), *sizes, data, len(lesson.steps)))
        if advice := tile_line(request, request.fingerprint):
            print(advice)
    return 0
