"""Looks at the ranks and nodes of a job before it starts: ``srun -n 8 python launch/doctor.py --seqpar 4``."""

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from seqpar.cluster import exit_codes
from seqpar.cluster.examination import examine
from seqpar.cluster.start_ranks import run_local
from seqpar.parallel.launcher import read_launcher
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.processes import die_with_parent
from seqpar.parallel.rendezvous import start
from seqpar.settings.config import DEVICE_KINDS
from seqpar.settings.parser import Parser
from seqpar.terminal import python_module

ABOUT = (
    "Looks at the ranks and nodes of a job before it starts. Run it under the launcher of the job, with the job's "
    "--seqpar, --pipe and --out. It ends with 0 when nothing stands in the way (there may be warnings), with 1 when "
    "something does or a rank hangs, which is named, and with 2 on wrong usage."
)


def act(arguments: Sequence[str]) -> int:
    """Examines the ranks that were started; returns 0 when the job may start, 1 when something stands in its way."""
    die_with_parent()
    began = time.monotonic()
    options = _parser().parse_args(list(arguments))
    if options.accept or options.part:
        return _accept(options)
    if min(options.seqpar, options.pipe) < 1 or not options.time_limit >= 5:
        raise ValueError("--seqpar and --pipe must be at least 1, and --time-limit at least 5 seconds")
    _refuse_missing_folder(options)
    launcher = read_launcher(os.environ)
    if launcher.world == 1 < options.seqpar * options.pipe:
        if launcher.warning:
            raise ValueError(launcher.warning)
        return run_local(options.seqpar * options.pipe, [*python_module("doctor"), *arguments])
    host = launcher.host or socket.gethostname()
    clock = threading.Timer(1.25 * options.time_limit, _overdue, (f"rank {launcher.rank} ({host})", options.time_limit))
    clock.daemon = True
    clock.start()
    with start(options.seqpar, None, options.device, options.time_limit, pipe=options.pipe) as mesh:
        clock.cancel()  # from here on the watchdog names who hangs
        left_s = max(4.0, options.time_limit - (time.monotonic() - began))
        mesh.set_timeout(left_s, lambda finding: _leave(mesh, finding))
        try:
            code = examine(mesh, options)
        except RuntimeError as error:
            if not mesh.world.watch.finding:  # else the watchdog is about to say it
                print(f"error: rank {mesh.world.index} lost contact: {str(error).splitlines()[0]}", file=sys.stderr)
            time.sleep(2)
            os._exit(exit_codes.FAULT)
    return code


def _accept(options: argparse.Namespace) -> int:
    """Runs the acceptance program on this process's device."""
    usual = _parser().parse_args([])
    idle = [name for name in ("seqpar", "pipe", "out", "time_limit") if getattr(options, name) != getattr(usual, name)]
    if not options.accept or idle:
        flag = "part" if not options.accept else idle[0].replace("_", "-")
        why = "it names a part of --accept: add that" if not options.accept else "--accept starts its own ranks"
        raise ValueError(f"--{flag} would do nothing: {why}")
    _refuse_missing_folder(options)
    if (world := read_launcher(os.environ).world) > 1:
        raise ValueError(f"--accept starts its own ranks, and {world} were started: start one")
    from seqpar.acceptance.program import accept  # all that it tries comes with it

    return accept(options.device, options.part, Path(options.json) if options.json else None)


def _refuse_missing_folder(options: argparse.Namespace) -> None:
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: its folder does not exist")
    if options.json and Path(options.json).is_dir():
        raise ValueError(f"--json {options.json} is a folder: name a file")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("doctor", description=ABOUT)
    for flag, what in (("--seqpar", "ranks that share a tile"), ("--pipe", "ranks over which layers are spread")):
        parser.add_argument(flag, type=int, default=1, metavar="RANKS", help=f"{what}, as in the job (default: 1)")
    parser.add_argument(
        "--out",
        default="",
        metavar="FOLDER",
        help="the job's output folder: its free space and speed are measured, and whether all ranks see it",
    )
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write what was measured to this file, for plan --measured"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a rank that hangs is named after so many seconds (default: 60)",
    )
    parser.add_argument(
        "--device", choices=DEVICE_KINDS, default="auto", help="device; auto: a GPU where there is one (default: auto)"
    )
    accept = "settle on one device, in three parts, whether all numbers are right, and measure its speed"
    parser.add_argument("--accept", action="store_true", help=accept)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), default=0, help="of --accept (default: all)")
    return parser


def _leave(mesh: Mesh, finding: str) -> NoReturn:
    """Ends this process from wherever it hangs; one rank prints why, and all stay until each has seen it."""
    if mesh.world.watch.speaks:
        print(f"error: {finding}", file=sys.stderr, flush=True)
    time.sleep(2)
    os._exit(exit_codes.FAULT)


def _overdue(who: str, limit_s: float) -> NoReturn:
    """Ends a process whose start hangs before the watchdog runs."""
    print(f"error: {who} has not got through its start within {limit_s:g} s: look at its node", file=sys.stderr)
    os._exit(exit_codes.FAULT)


def main() -> None:
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
