"""Looks at the ranks and nodes of a job before it starts: ``srun -n 8 python launch/doctor.py --seqpar 4``.

Run it under the launcher of the job, with the job's --seqpar and --out. It ends with 0 when nothing stands in the
way (there may be warnings), with 1 when something does or a rank hangs, which is named, and with 2 on wrong usage.
"""

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
from seqpar.launch.hardware.findings import described, folder_line, judge, print_groups, print_ranks
from seqpar.launch.hardware.link_speed import clock_offsets, matmul_speeds, measure_groups
from seqpar.launch.hardware.rank_facts import RankFacts, about_self, write_speed
from seqpar.launch.job import exit_codes
from seqpar.launch.job.local_ranks import die_with_parent, run_local
from seqpar.launch.settings.command_line import Parser
from seqpar.mesh import Mesh
from seqpar.rendezvous import start


def act(arguments: Sequence[str]) -> int:
    """Returns 0 when the job may start, 1 when something stands in its way."""
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
        clock.cancel()  # from here on the watch names who hangs
        left_s = max(4.0, options.time_limit - (time.monotonic() - began))
        mesh.set_timeout(left_s, lambda finding: _leave(mesh, finding))
        try:
            code = examine(mesh, options)
        except RuntimeError as error:
            if not mesh.world.watch.finding:  # else the watch is about to say it
                print(f"error: rank {mesh.world.index} lost contact: {str(error).splitlines()[0]}", file=sys.stderr)
            time.sleep(2)
            os._exit(exit_codes.FAULT)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="seqpar-doctor", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seqpar", type=int, default=1, help="ranks that share a tile, as in the job (1)")
    parser.add_argument("--out", default="", help="the job's output folder: its room and speed are looked at")
    parser.add_argument("--json", default="", help="write what was measured here, for launch/plan.py")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds after which a hang is named (60)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (auto)")
    return parser


def _leave(mesh: Mesh, finding: str) -> NoReturn:
    """Ends this process from wherever it hangs; the first rank that waits says why, and all let each other find out."""
    if mesh.world.watch.speaks:
        print(f"error: {finding}", file=sys.stderr, flush=True)
    time.sleep(2)
    os._exit(exit_codes.FAULT)


def _overdue(who: str, limit_s: float) -> NoReturn:
    """Ends a process that hangs where no step of the start could say for whom it waits."""
    print(f"error: {who} has not got through its start within {limit_s:g} s: look at its node", file=sys.stderr)
    os._exit(exit_codes.FAULT)


def examine(mesh: Mesh, options: argparse.Namespace) -> int:
    """Returns the exit code; the first rank has printed all that was found."""
    flops = matmul_speeds(mesh)
    room = _room(mesh, options.out)
    own = json.dumps(asdict(about_self(mesh, flops, room, options.device == "cpu")))
    ranks = [RankFacts(**json.loads(text)) for text in gather_texts(own, mesh.world)]
    if mesh.is_first:
        if room["file"]:
            os.unlink(room["file"])  # all have looked
        print_ranks(mesh, ranks)
    offsets = clock_offsets(mesh)
    groups = measure_groups(mesh, options.time_limit / 3)
    found = judge(mesh.seq.size, ranks, offsets, room)
    if mesh.is_first:
        print_groups(groups)
        print(folder_line(room) + f"clocks: {max(map(abs, offsets)) * 1e3:.1f} ms apart at most")
        for trap in found:
            print(trap)
        wrong = sum(trap.error for trap in found)
        print(f"{wrong} error(s), {len(found) - wrong} warning(s)", flush=True)
        if options.json:
            write_json(Path(options.json), described(mesh, ranks, groups))
    return exit_codes.FAULT if any(trap.error for trap in found) else 0


def _room(mesh: Mesh, out: str) -> dict[str, Any]:
    """Returns, the same on all ranks, what the first found in the output folder; its file there is for all to see."""
    room: dict[str, Any] = {"out": out, "file": "", "free": 0, "bytes_per_s": 0.0, "fault": ""}
    if out and mesh.is_first:
        try:
            room |= write_speed(Path(out))
        except OSError as error:
            room["fault"] = f"--out {out} cannot be written ({error.strerror}): name another, or make room"
    return json.loads(broadcast_text(json.dumps(room), 0, mesh.world))  # type: ignore[no-any-return]


def main() -> None:
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
