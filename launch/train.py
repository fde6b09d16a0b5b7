"""Trains: ``torchrun launch/train.py --seqpar 4 --patch 4``; without --data on built-in phantom brains."""

import io
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from seqpar.consensus import by_first, gather_texts
from seqpar.environment import Launcher, flight_recorder, read_launcher
from seqpar.launch.job import exit_codes
from seqpar.launch.job.local_ranks import die_with_parent, run_local, visible_devices
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.planning.answer import rehearsal
from seqpar.launch.planning.auto_settings import choose_attention
from seqpar.launch.planning.feasibility import refuse_lonely
from seqpar.launch.runs.run_folder import Status
from seqpar.launch.settings.config import seconds
from seqpar.launch.training.data import open_data
from seqpar.launch.training.failure import end
from seqpar.launch.training.request import RunRequest, channels_of, read_request, refuse_other_run
from seqpar.launch.training.setup import make_trainer, open_folder
from seqpar.mesh import seed
from seqpar.rendezvous import check_seqpar, start

FIRST_S = 2.0  # before another rank than the first one says why it cannot begin


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 finished, 75 preempted and resumable; a user's errors are raised."""
    die_with_parent()
    launcher = read_launcher(os.environ)
    try:
        order = read_request(arguments, launcher)
        if order.config.dry_run:
            return _rehearse(order, launcher)
        if order.config.seqpar > launcher.world:
            return _start_ranks(order, launcher, arguments)
        check_seqpar(order.config.seqpar, launcher.world)
        refuse_lonely(order.config, launcher.world)
        refuse_other_run(order.config)
    except ValueError as error:
        if launcher.rank == 0:
            raise
        time.sleep(FIRST_S)  # mostly all ranks refuse the same, and the first one's end ends these
        print(
            f"error: rank {launcher.rank} ({launcher.host or socket.gethostname()}): {error}",
            file=sys.stderr,
            flush=True,
        )
        return exit_codes.code_of(error) or exit_codes.USAGE
    return _run(order, launcher)


def _run(order: RunRequest, launcher: Launcher) -> int:
    config = order.config
    if launcher.rank == 0:
        print("\n".join([*order.told, _first_line(order, launcher)]), flush=True)
    stopper = Stopper(seconds(config.time_limit))
    material = open_data(config, launcher.rank == 0)
    os.environ.update(flight_recorder(os.environ, config.out, torch.__version__))
    with start(config.seqpar, None, config.device, config.start_timeout, config.debug_collectives) as mesh:
        seed(config.seed)
        status = Status(Path(config.out or gather_texts(_new_name(order.preset), mesh.world)[0]))
        stopper.there_is_work(
            mesh,
            lambda why: status.write_unless_over("preempted", why, exit_codes.PREEMPTED) if mesh.is_first else None,
        )
        try:
            by_first(lambda: open_folder(status), mesh.world)
            trainer = make_trainer(order, mesh, material, status)
            verdict = trainer.run(stopper)
        except (Exception, KeyboardInterrupt) as error:
            end(error, config, mesh, status)
    stopper.close()
    return 0 if verdict == "finished" else exit_codes.PREEMPTED


def _start_ranks(order: RunRequest, launcher: Launcher, arguments: Sequence[str]) -> int:
    """Starts the missing ranks here, if this is one process on one machine; else says how to start them."""
    count, typed = order.config.seqpar, shlex.join(arguments)
    script = os.path.relpath(__file__)
    line = f"torchrun --nproc-per-node {count} {script} {typed}"
    lacking = f"--seqpar {count} needs {count} ranks, and {launcher.world} came"
    if "SLURM_JOB_ID" in os.environ:
        raise ValueError(f"{lacking}; in this Slurm job use: srun -n {count} python {script} {typed}")
    if launcher.world > 1:
        raise ValueError(f"{lacking}; use: {line}")
    told = f"--seqpar {count} needs {count} ranks and 1 was started: starting {count} here"
    print(f"{told} ({visible_devices()}); the same as: {line}", flush=True)
    return run_local(count, [__file__, *arguments])


def _new_name(preset: str) -> str:
    return f"runs/{preset}-{time.strftime('%Y%m%d-%H%M%S')}"


def _first_line(order: RunRequest, launcher: Launcher) -> str:
    config, groups = order.config, launcher.world // order.config.seqpar
    return (
        f"seqpar: preset {order.preset} ({order.why}); {launcher.world} rank{'s' if launcher.world > 1 else ''} = data "
        f"{groups} x seq {config.seqpar}, started by {launcher.by}; tile {'x'.join(map(str, config.tile))}, patch "
        f"{config.patch}, decoder {config.decoder}, mode {config.mode}, {config.precision}, {config.batch} "
        f"tile{'s' if config.batch > 1 else ''} per sequence group"
        + (f", {config.accumulate} times a step" if config.accumulate > 1 else "")
    )


def _rehearse(order: RunRequest, launcher: Launcher) -> int:
    """Says what would run; allocates and writes nothing, and needs no other rank."""
    count = max(launcher.world, order.config.seqpar)
    check_seqpar(order.config.seqpar, count)
    refuse_lonely(order.config, count)
    if launcher.rank == 0:
        print("\n".join([*order.told, _first_line(order, replace(launcher, world=count))]))
        print(
            rehearsal(
                order.config, count, choose_attention(order.config, launcher, *channels_of(order.config, launcher))
            )
        )
    return 0


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know every sign
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
