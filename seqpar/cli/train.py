"""Trains: ``torchrun launch/train.py --seqpar 4 --patch 4``; without --data on built-in phantom brains."""

import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.exit_codes import report_unless_rank0_did
from seqpar.cluster.start_ranks import start_missing_ranks
from seqpar.cluster.stop_request import LeftBeforeStart, StopRequest
from seqpar.cluster.torch_setup import restore_kernel_cache, save_kernel_cache, set_arithmetic
from seqpar.data.preparation.cache_writer import reading
from seqpar.parallel.consensus import broadcast_text, gather_texts, run_on_rank0
from seqpar.parallel.launcher import Launcher, flight_recorder, read_launcher
from seqpar.parallel.meeting import Meeting
from seqpar.parallel.mesh import seed
from seqpar.parallel.processes import PARENT_OF_FOLD, die_with_parent
from seqpar.parallel.rendezvous import check_seqpar, start
from seqpar.planner.feasibility import require_peers
from seqpar.runs.run_lock import RunLock
from seqpar.runs.run_log import RunLog, logging_output
from seqpar.runs.run_status import StatusFile
from seqpar.settings.data_settings import ALL_FOLDS
from seqpar.tasks.lookup import task_of
from seqpar.terminal import resume_command
from seqpar.text import parse_duration
from seqpar.training.failure import end_failed_run
from seqpar.training.run import (
    describe_finished,
    dry_run,
    refuse_changes_of_finished,
    refuse_fewer_steps,
    refuse_other_weights,
    run_lessons,
)
from seqpar.training.run_request import RunRequest, read_request, refuse_other_run
from seqpar.training.setup import first_lines, open_folder, refuse_unequal_ranks


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 finished, 75 preempted and resumable; a user's errors are raised."""
    die_with_parent()
    launcher = read_launcher(os.environ)
    try:
        if ALL_FOLDS in " ".join(arguments):
            from seqpar.training.folds import find_folds

            if five := find_folds(arguments):
                return five.train(launcher)
        meeting = Meeting(launcher)
        request = read_request(arguments, launcher, meeting)
        refuse_other_run(request.config)
        refuse_fewer_steps(request.config)
        refuse_changes_of_finished(request)
        if request.config.dry_run:
            return dry_run(request, launcher)
        if finished := describe_finished(request):
            print(finished if launcher.rank == 0 else "", end="", flush=True)
            return 0
        if request.config.group_ranks > launcher.world:
            return start_missing_ranks(request.config.seqpar, "train", arguments, launcher, request.config.pipe)
        check_seqpar(request.config.seqpar, launcher.world, request.config.pipe)
        require_peers(request.config, launcher.world)
        return _train(request, launcher, meeting)
    except ValueError as error:
        if launcher.rank == 0:
            raise
        return report_unless_rank0_did(error, launcher)


def _train(request: RunRequest, launcher: Launcher, meeting: Meeting) -> int:
    """Returns the exit code after this rank's share of the run."""
    with logging_output(launcher.rank == 0) as log:
        try:
            return _run(request, launcher, meeting, log)
        except LeftBeforeStart:
            text = f"stopped before training {'continued' if request.config.resume else 'began'}"
            if PARENT_OF_FOLD not in os.environ:  # all five have a command of their own
                text += "; run the same command again"
            if launcher.rank == 0:
                print(text, file=sys.stderr, flush=True)
            exit_codes.leave_last_words(text)
            raise


def _run(request: RunRequest, launcher: Launcher, meeting: Meeting, log: RunLog) -> int:
    config = request.config
    if launcher.rank == 0:
        print(first_lines(request, launcher), flush=True)
    stopper = StopRequest(parse_duration(config.time_limit), resumes=config.resume)
    task = task_of(config)
    if request.data is None:
        refuse_other_weights(config)
    data = request.data or task.open_data(config, launcher.rank == 0)
    if launcher.rank == 0:
        advice = task.tile_advice(config, request.flags, request.preset, data)
        print("\n".join(filter(None, [task.summary(data, config), advice])), flush=True)
    os.environ.update(flight_recorder(os.environ, config.out, torch.__version__))
    set_arithmetic(config.precision, config.deterministic)
    check = config.debug_collectives
    with (
        reading(data.dataset.path) if launcher.rank == 0 else nullcontext(),
        start(config.seqpar, None, config.device, config.start_timeout, check, config.pipe, meeting) as mesh,
    ):
        refuse_unequal_ranks(config, data, mesh.world)
        seed(config.seed)
        out = Path(config.out or broadcast_text(_new_folder(request.preset), 0, mesh.world))
        lock = RunLock(out)
        status = StatusFile(out, lock)

        def write_preempted(why: str) -> None:
            if mesh.is_first:
                status.write_unless_over("preempted", why, exit_codes.PREEMPTED, durable=False)
                lock.release()

        stopper.begin(mesh, write_preempted, out)
        try:
            number, text = run_on_rank0(lambda: open_folder(status, lock, config, log), mesh.world)
            lock.ticket = (number, text)
            restore_kernel_cache(out)
            finished = run_lessons(request, mesh, data, status, stopper)
            if mesh.is_first:
                save_kernel_cache(out)
            gather_texts("", mesh.world)  # all have come to their end, so that none asks another where to leave
            stopper.close()  # before the rank leaves that keeps the store
        except (Exception, KeyboardInterrupt) as error:
            end_failed_run(error, config, mesh, status)
    if launcher.rank == 0:
        lock.release()
    if not finished:
        ranks = launcher.world if launcher.world > config.group_ranks else 1
        again = resume_command(task.train_command[0], out, ranks=ranks)
        exit_codes.leave_last_words(f"left early ({stopper.reason}); to continue: {again}")
    return 0 if finished else exit_codes.PREEMPTED


def _new_folder(preset: str) -> str:
    return f"runs/{preset}-{time.strftime('%Y%m%d-%H%M%S')}"


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know every sign
    exit_codes.leave(exit_codes.run(act))


if __name__ == "__main__":
    main()
