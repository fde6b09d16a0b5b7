"""Checks the ranks and nodes of a job before it starts: ``srun -n 8 python launch/doctor.py --seqpar 4``."""

import argparse
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from seqpar.cluster import exit_codes
from seqpar.cluster.examination import examine
from seqpar.cluster.start_ranks import run_local
from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import refuse_special
from seqpar.parallel.launcher import read_launcher
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.processes import die_with_parent
from seqpar.parallel.rendezvous import start
from seqpar.settings.command_line import MOST_RANKS
from seqpar.settings.field import Bounds, whole_bounds
from seqpar.settings.parser import Parser, check_numbers
from seqpar.settings.run_settings import DEVICE_KINDS
from seqpar.terminal import python_module
from seqpar.text import flag_name

ABOUT = (
    "Checks the ranks and nodes of a job before it starts. Run it under the job's launcher, with the job's --seqpar, "
    "--pipe and --out. The exit code is 0 if the job can start (there may be warnings), 1 if something prevents it or "
    "a rank hangs, which is then named, and 2 on wrong usage."
)
INSIDE = Path(__file__).parents[1] / "cluster" / "slurm"  # only a wheel has it
SECONDS = Bounds(lambda value: 5 <= value <= 86_400, "it must be at least 5 seconds, and at most a day")
_BEGINNING = b'{\n  "device":'  # of what --json writes
JOB_SCRIPTS = INSIDE if INSIDE.is_dir() else Path(__file__).parents[2] / "launch" / "slurm"


def act(arguments: Sequence[str]) -> int:
    """Checks the ranks that were started; returns 0 if the job can start, 1 if something prevents it."""
    die_with_parent()
    began = time.monotonic()
    options = _parser().parse_args(list(arguments))
    if options.job_scripts:
        return _write_job_scripts(options)
    if options.accept or options.part:
        return _accept(options)
    some = whole_bounds(1, MOST_RANKS)
    check_numbers(options, seqpar=some, pipe=some, time_limit=SECONDS)
    _refuse_missing_folder(options)
    if options.out:
        _refuse_dataset(Path(options.out))
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
            if not mesh.world.watch.finding:  # else the watchdog reports it
                print(f"error: rank {mesh.world.index} lost contact: {str(error).splitlines()[0]}", file=sys.stderr)
            time.sleep(2)
            os._exit(exit_codes.FAULT)
    return code


def _accept(options: argparse.Namespace) -> int:
    """Runs the acceptance program on this process's device."""
    if not options.accept:
        raise ValueError("--part would do nothing: it names a part of --accept: add that")
    _refuse_others(options, "--accept starts its own ranks", ("accept", "part", "json", "device"))
    _refuse_missing_folder(options)
    if (world := read_launcher(os.environ).world) > 1:
        raise ValueError(f"--accept starts its own ranks, but {world} were started: start one")
    from seqpar.cluster.acceptance.program import accept  # imports every module that it tests

    return accept(options.device, options.part, Path(options.json) if options.json else None)


def _write_job_scripts(options: argparse.Namespace) -> int:
    """Copies the job scripts to where a checkout has them, below a folder of the user's."""
    _refuse_others(options, "--job-scripts only writes files", ("job_scripts",))
    target = Path(options.job_scripts, "launch", "slurm")
    if target.exists():
        raise ValueError(f"--job-scripts {options.job_scripts}: {target} exists: name another folder, or remove it")
    try:
        for source in sorted(path for path in JOB_SCRIPTS.iterdir() if path.is_file()):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            if source.suffix == ".sh":
                (target / source.name).chmod(0o755)  # a wheel may have lost it
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)  # half of them would be in the way of the next try
        raise unwritable(target, error) from error
    print(f"Wrote {target}: edit a job script as its README.md says, and submit it from {options.job_scripts}")
    return 0


def _refuse_others(options: argparse.Namespace, why: str, taken: Collection[str]) -> None:
    usual = vars(_parser().parse_args([]))
    idle = [name for name, value in vars(options).items() if value != usual[name] and name not in taken]
    if idle:
        raise ValueError(f"--{flag_name(idle[0])} would do nothing: {why}")


def _refuse_dataset(folder: Path) -> None:
    """Raises DataError for a folder of a data set; a borrowed machine may lack what tells."""
    with suppress(ImportError):
        from seqpar.data.formats.recognise import place_in_data

        if kept := place_in_data(folder):
            raise DataError(folder, f"{kept}, which doctor never writes into: name another place")


def _refuse_missing_folder(options: argparse.Namespace) -> None:
    """Raises ValueError for a --json that cannot be written, or would replace what doctor did not write."""
    if not options.json:
        return
    file = Path(options.json)
    if not file.absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: its folder does not exist")
    _refuse_dataset(file.parent)
    files = {file: _BEGINNING}
    if options.accept:
        if file.suffix == ".md":
            other = file.with_suffix(".json")
            raise ValueError(f"--json {file}: the page for people would replace it: name it {other}")
        from seqpar.cluster.acceptance.program import PAGE  # imports every module that it tests

        files[file.with_suffix(".md")] = PAGE.encode()
    for path, beginning in files.items():
        if path.is_dir():
            raise ValueError(
                f"--json {path} is a folder: name a file" if path == file else f"--json {file}: {path} is a folder"
            )
        refuse_special(path)
        if path.is_file() and path.read_bytes()[: len(beginning)] not in (b"", beginning):
            raise DataError(path, "is there, and doctor did not write it: name another file by --json")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("doctor", description=ABOUT)
    for flag, what in (("--seqpar", "ranks that share a tile"), ("--pipe", "ranks that share the layers")):
        parser.add_argument(flag, type=int, default=1, metavar="RANKS", help=f"{what}, as in the job (default: 1)")
    parser.add_argument(
        "--out",
        default="",
        metavar="FOLDER",
        help="the job's output folder: checks that all ranks see it, and measures its free space and speed",
    )
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write all measurements to this file, for plan --measured"
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="name a rank that hangs after this many seconds (default: 60)",
    )
    parser.add_argument(
        "--device", choices=DEVICE_KINDS, default="auto", help="device; auto: a GPU if there is one (default: auto)"
    )
    accept = "check on one device, in three parts, that all results are correct, and measure its speed"
    parser.add_argument("--accept", action="store_true", help=accept)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), default=0, help="part of --accept to run (default: all)")
    scripts = "write the job scripts for Slurm to FOLDER/launch/slurm, and stop"
    parser.add_argument("--job-scripts", default="", metavar="FOLDER", help=scripts)
    return parser


def _leave(mesh: Mesh, finding: str) -> NoReturn:
    """Ends this process wherever it hangs; one rank prints why, and all wait until each has seen it."""
    if mesh.world.watch.speaks:
        print(f"error: {finding}", file=sys.stderr, flush=True)
    time.sleep(2)
    os._exit(exit_codes.FAULT)


def _overdue(who: str, limit_s: float) -> NoReturn:
    """Ends a process whose start hangs before the watchdog runs."""
    print(f"error: {who} has not started within {limit_s:g} s: check its node", file=sys.stderr)
    os._exit(exit_codes.FAULT)


def main() -> None:
    exit_codes.leave(exit_codes.run(act, prints_result=True))


if __name__ == "__main__":
    main()
