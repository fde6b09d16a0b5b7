"""Looks at the ranks and nodes of a job before it starts: ``srun -n 8 python launch/doctor.py --seqpar 4``."""

import argparse
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from seqpar.consensus import broadcast_text, gather_texts
from seqpar.data.files import write_json
from seqpar.environment import read_launcher
from seqpar.launch.hardware.doctor_report import folder_line, print_groups, print_ranks, record
from seqpar.launch.hardware.findings import judge
from seqpar.launch.hardware.link_speed import clock_offsets, matmul_speeds, measure_groups
from seqpar.launch.hardware.rank_facts import RankFacts, facts_of_this_rank, write_speed
from seqpar.launch.job import exit_codes
from seqpar.launch.job.local_ranks import die_with_parent, run_local
from seqpar.launch.settings.command_line import Parser
from seqpar.launch.settings.config import DEVICE_KINDS
from seqpar.mesh import Mesh
from seqpar.rendezvous import start

ABOUT = (
    "Looks at the ranks and nodes of a job before it starts. Run it under the launcher of the job, with the job's "
    "--seqpar and --out. It ends with 0 when nothing stands in the way (there may be warnings), with 1 when something "
    "does or a rank hangs, which is named, and with 2 on wrong usage."
)


def act(arguments: Sequence[str]) -> int:
    """Examines the ranks that were started; returns 0 when the job may start, 1 when something stands in its way."""
    die_with_parent()
    began = time.monotonic()
    options = _parser().parse_args(list(arguments))
    if options.seqpar < 1 or not options.time_limit >= 5:
        raise ValueError("--seqpar must be at least 1, and --time-limit at least 5 seconds")
    if options.json and not Path(options.json).absolute().parent.is_dir():
        raise ValueError(f"--json {options.json}: its folder does not exist")
    launcher = read_launcher(os.environ)
    if launcher.world == 1 < options.seqpar:
        if launcher.warning:
            raise ValueError(launcher.warning)
        return run_local(options.seqpar, [__file__, *arguments])
    host = launcher.host or socket.gethostname()
    clock = threading.Timer(1.25 * options.time_limit, _overdue, (f"rank {launcher.rank} ({host})", options.time_limit))
    clock.daemon = True
    clock.start()
    with start(options.seqpar, None, options.device, options.time_limit) as mesh:
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser("doctor", description=ABOUT)
    parser.add_argument(
        "--seqpar", type=int, default=1, metavar="RANKS", help="ranks that share a tile, as in the job (default: 1)"
    )
    parser.add_argument(
        "--out",
        default="",
        metavar="FOLDER",
        help="the job's output folder: its free space and speed are measured, and whether all ranks see it",
    )
    parser.add_argument(
        "--json", default="", metavar="FILE", help="write the measured speeds to this file, for plan --measured"
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


def examine(mesh: Mesh, options: argparse.Namespace) -> int:
    """Measures and judges; the first rank prints everything. Returns the exit code."""
    flops = matmul_speeds(mesh)
    folder = _output_folder(mesh, options.out)
    own = json.dumps(asdict(facts_of_this_rank(mesh, flops, folder, options.device == "cpu")))
    ranks = [RankFacts(**json.loads(text)) for text in gather_texts(own, mesh.world)]
    if mesh.is_first:
        if folder["file"]:
            os.unlink(folder["file"])  # all have looked
        print_ranks(mesh, ranks)
    offsets = clock_offsets(mesh)
    groups = measure_groups(mesh, options.time_limit / 3)
    findings = judge(mesh.seq.size, ranks, offsets, folder)
    if mesh.is_first:
        print_groups(groups)
        print(folder_line(folder) + f"clocks: {max(map(abs, offsets)) * 1e3:.1f} ms apart at most")
        for trap in findings:
            print(trap)
        wrong = sum(trap.error for trap in findings)
        print(f"{wrong} error(s), {len(findings) - wrong} warning(s)", flush=True)
        if options.json:
            write_json(Path(options.json), record(mesh, ranks, groups))
    return exit_codes.FAULT if any(trap.error for trap in findings) else 0


def _output_folder(mesh: Mesh, out: str) -> dict[str, Any]:
    """Returns what the first rank found in the output folder, on all ranks; it leaves a file there for them to see."""
    folder: dict[str, Any] = {"out": out, "file": "", "free": 0, "bytes_per_s": 0.0, "fault": ""}
    if out and mesh.is_first:
        try:
            folder |= write_speed(Path(out))
        except OSError as error:
            folder["fault"] = f"--out {out} cannot be written ({error.strerror}): name another, or make room"
    return json.loads(broadcast_text(json.dumps(folder), 0, mesh.world))  # type: ignore[no-any-return]


def main() -> None:
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
