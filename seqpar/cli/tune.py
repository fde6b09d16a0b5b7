"""Compares settings: ``python launch/tune.py --space lr=1e-4,1e-3 amsgrad=no,yes --out sweeps/first``.

Every point of the space is a run of its own; Ray Tune makes as many of them at a time as there are devices.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from seqpar.cluster import exit_codes
from seqpar.cluster.devices import num_devices
from seqpar.data.errors import DataError
from seqpar.data.files import refuse_unwritable
from seqpar.data.formats.recognise import place_in_data
from seqpar.runs.run_folder import holds_folds, holds_run, refuse_foreign_status
from seqpar.runs.sweep_folder import Sweep, holds_sweep, odd_points, read_sweep
from seqpar.settings.command_line import MOST_RANKS, default_preset, wants_gpu
from seqpar.settings.field import whole_bounds
from seqpar.settings.parser import Parser, check_numbers
from seqpar.sweeps.ray_cluster import split_address
from seqpar.sweeps.results import write_results
from seqpar.sweeps.scaling_plan import print_plan
from seqpar.sweeps.space import parse_space
from seqpar.sweeps.sweep_request import (
    ALL,
    MAX_FAILURES,
    SEARCHES,
    STOPPERS,
    SweepRequest,
    check_devices,
    check_same_sweep,
    check_search,
    has_begun_points,
    override_by_flags,
    require_ray,
    resume_sweep,
    tupled_points,
    typed_settings,
)
from seqpar.terminal import coloured, resume_command
from seqpar.text import parse_duration


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 once all points have ended, 75 if they were left early, else that of a run."""
    options, rest = _parse(arguments)
    order, sweep = _order(options, rest)
    devices = options.devices or num_devices(order.on_gpu)
    if kept := place_in_data(options.out):
        raise DataError(f"--out {options.out}", f"{kept}, where no sweep writes: name another folder")
    refuse_unwritable(options.out, f"--out {options.out}")
    if options.plan:
        print_plan(order, sweep, options.out, devices)
        return 0
    if not options.ray:
        check_devices(devices, order.device, order.on_gpu)
        order.runs(order.known(sweep), devices)  # refuses ranks for which there are no devices
    require_ray()
    from seqpar.sweeps.sweep_runs import make_sweep  # Ray takes seconds to import

    code, sweep = make_sweep(order, sweep, options, time.monotonic() + parse_duration(options.time_limit))
    print("\n".join(write_results(options.out, sweep)), flush=True)
    for told in odd_points(options.out, sweep):
        print(coloured(f"warning: {told}", sys.stderr), file=sys.stderr, flush=True)
    if code == exit_codes.PREEMPTED:
        print(f"left early; to continue: {resume_command('tune', options.out)}", flush=True)
    elif code:
        exit_codes.report(
            f"--out {options.out}: not all points have finished, for the reasons above; mend these, and continue: "
            f"{resume_command('tune', options.out)}"
        )
    return code


def _order(options: argparse.Namespace, rest: Sequence[str]) -> tuple[SweepRequest, Sweep]:
    """Returns what is asked for, and its points as they stand; refuses a folder that holds something else."""
    typed = _typed_order(options, rest) if options.space else None
    out, is_there = options.out, holds_sweep(options.out)
    if not is_there and options.resume:
        raise ValueError(f"--resume --out {out}: it holds no sweep: name its folder, or leave --resume out")
    if typed is None and not is_there:
        raise ValueError("--space is missing: name flags of train and their values, as in --space lr=1e-4,1e-3")
    if holds_run(out) or holds_folds(out):
        raise ValueError(f"--out {out} holds a run, whose status would be lost: name another folder")
    refuse_foreign_status(out)
    if typed is not None and (not is_there or not has_begun_points(out)):
        return typed, typed.sweep()
    if not options.resume and not options.plan:
        raise ValueError(f"--out {out} holds a sweep already: add --resume to continue it, or name another folder")
    before = tupled_points(read_sweep(out))
    if typed is not None:
        check_same_sweep(before.began, typed.began(), str(out))
    elif rest:
        raise ValueError(f"{rest[0]} without --space: a resumed sweep has the flags of its sweep.json: remove it")
    return resume_sweep(before, options)


def _typed_order(options: argparse.Namespace, rest: Sequence[str]) -> SweepRequest:
    """Returns what the command line asks for."""
    space = parse_space(options.space)
    check_search(space, options.samples, options.search)
    usual, own = default_preset(rest, wants_gpu(rest)), tuple(_parser()._option_string_actions)
    preset, settings = typed_settings(rest, space, usual, own)
    order = SweepRequest(space, preset, settings, options.devices_per_run, options.samples, options.search)
    return override_by_flags(order, options)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the options of this act, checked, and the flags of train."""
    options, rest = _parser().parse_known_args(arguments)
    per_run = options.devices_per_run
    if per_run != ALL and not (per_run.isdigit() and 1 <= int(per_run) <= MOST_RANKS):
        raise ValueError(f"--devices-per-run {per_run}: give a number of devices, 1 to {MOST_RANKS}, or {ALL}")
    parse_duration(options.time_limit)
    some = whole_bounds(1, MOST_RANKS)
    check_numbers(options, max_failures=whole_bounds(0, MOST_RANKS), devices=some, ray_nodes=some, samples=some)
    if options.ray_nodes != 1 and not options.ray:
        raise ValueError(f"--ray-nodes {options.ray_nodes} would do nothing: there is no --ray: remove it")
    if options.devices is not None and options.ray:
        raise ValueError("--devices is of a Ray that is started here, and --ray names a running one: leave one out")
    if options.ray not in ("", "auto"):
        split_address(options.ray)
    return options, rest


def _parser() -> Parser:
    parser = Parser(
        "tune",
        usage="%(prog)s --space FLAG=VALUE,VALUE ... --out FOLDER [train's flags]",
        description="Compares settings: each point of --space is a run of its own, several side by side by Ray Tune.",
        epilog="All flags of train are taken as well: seqpar-train --help all. Exit codes are those of train; 75: left "
        "early, and --resume --out FOLDER resumes it.",
    )
    add = parser.add_argument
    add("--space", nargs="+", default=[], metavar="FLAG=VALUES", help="flags of train and their values: lr=1e-4,1e-3 "
        "amsgrad=no,yes betas=0.9:0.99,0.9:0.999 lr=log:1e-4:1e-2, or a JSON file of such lists")  # fmt: skip
    add("--samples", type=int, default=1, metavar="NUMBER", help="draws from ranges for each combination of the other "
        "values; with --search optuna the number of points (%(default)s)")  # fmt: skip
    add("--search", choices=SEARCHES, default=SEARCHES[0], help="how points are drawn: at random, or by optuna from "
        "the scores so far (%(default)s)")  # fmt: skip
    add("--devices-per-run", default="1", metavar="NUMBER", help="ranks of a run, each on a GPU or a core; all: one "
        "run after the other (%(default)s)")  # fmt: skip
    add("--devices", type=int, metavar="NUMBER", help="devices of this machine to use (default: all)")
    add("--out", type=Path, default=Path("sweeps/first"), metavar="FOLDER", help="folder of the sweep, in which each "
        "point has a run folder (%(default)s)")  # fmt: skip
    add("--ray", default="", metavar="ADDRESS", help="running Ray cluster to use, HOST:PORT or auto")
    add("--ray-nodes", type=int, default=1, metavar="NUMBER", help="nodes of that cluster to wait for (%(default)s)")
    add("--stop-early", choices=STOPPERS, help=f"end runs that fall behind ({STOPPERS[0]})")
    add("--max-failures", type=int, metavar="NUMBER", help="how often a killed training resumes from its "
        f"checkpoint ({MAX_FAILURES})")  # fmt: skip
    add("--resume", action="store_true", help="resume the sweep in --out: points that have ended stay")
    add("--take-over", action="store_true", help="take --out over from a tune that may still run there")
    add("--time-limit", default="", metavar="TIME", help="limit of the whole sweep: minutes or H:MM:SS")
    add(
        "--plan",
        action="store_true",
        help="print how long the sweep would take, side by side and one run after the other",
    )
    return parser


def main() -> None:
    """Ends the process with the act's exit code, without waiting for threads of a Ray that is gone."""
    code = exit_codes.run(act)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
