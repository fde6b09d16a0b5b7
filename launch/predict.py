"""Predicts label maps with a trained run: ``torchrun launch/predict.py RUN -i IMAGES -o FOLDER``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from seqpar.decoders.modes.choose import MODES
from seqpar.environment import read_launcher
from seqpar.launch.hardware.devices import device_here
from seqpar.launch.inference.group_size import fitting_seqpar
from seqpar.launch.inference.predict_cases import Request, predict_cases
from seqpar.launch.inference.predictor import Settings
from seqpar.launch.inference.run_average import Member, refuse_unlike
from seqpar.launch.inference.windows import WEIGHTS, WINDOWS
from seqpar.launch.job import exit_codes
from seqpar.launch.job.local_ranks import die_with_parent, start_missing_ranks
from seqpar.launch.runs.open_run import open_run
from seqpar.launch.runs.stale_status import warn_if_killed
from seqpar.launch.runs.trained_run import Run
from seqpar.launch.settings.command_line import Parser
from seqpar.launch.settings.config import DEVICE_KINDS
from seqpar.mesh import Mesh
from seqpar.rendezvous import start

DIRECTIONS = "WDH"


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 3 if a case could not be predicted; raises what the user has to correct."""
    die_with_parent()
    options = _parser().parse_args(list(arguments))
    launcher = read_launcher(os.environ)
    if launcher.rank == 0:
        warn_if_killed(*options.run)
    request, members = _request(options), _members(options)
    if options.seqpar > launcher.world:
        return start_missing_ranks(options.seqpar, __file__, arguments, launcher)
    memory = device_here(options.device).of(launcher.world).memory
    seqpar, line = (options.seqpar, "") if options.seqpar else fitting_seqpar(members, launcher.world, memory)
    if line and launcher.rank == 0:
        print(line, flush=True)
    with start(seqpar, device=options.device) as mesh:
        try:
            faults = predict_cases(request, members, mesh)
        except Exception as error:
            return _exit_code(error, mesh)
    return exit_codes.DATA if faults else 0


def _exit_code(error: Exception, mesh: Mesh) -> int:
    """Returns the exit code of an error that all ranks raise alike; on any other error ends this process at once.

    The other ranks may be waiting for this one in a collective, so it must not wait for them.
    """
    code, on_all_ranks = exit_codes.code_of(error), isinstance(error, ValueError)
    if mesh.world.size == 1 or code is None:
        raise error
    if mesh.is_first or not on_all_ranks:
        where = "" if on_all_ranks else f"rank {mesh.world.index}: "
        exit_codes.report(f"{where}{error}")
    if not on_all_ranks:
        os._exit(code)
    return code


def _request(options: argparse.Namespace) -> Request:
    return Request(
        inputs=tuple(options.input),
        output=options.output,
        mode=options.mode,
        probabilities=options.probabilities,
        statistics=options.statistics,
        resume=options.resume,
    )


def _members(options: argparse.Namespace) -> list[Member]:
    """Returns the runs with their settings and weights; refuses runs that cannot be averaged."""
    checkpoints = options.checkpoint or []
    runs = [open_run(path, checkpoints, options.folds) for path in options.run]
    refuse_unlike(runs)
    if len(runs) > 1 and (files := [name for name in checkpoints if name not in ("best", "latest")]):
        raise ValueError(f"--checkpoint {files[0]}: a file belongs to one run, and {len(runs)} came: leave it out")
    return [Member(run, _settings(options, run), run.weights_of(checkpoints)) for run in runs]


def _settings(options: argparse.Namespace, run: Run) -> Settings:
    window = options.window or run.window
    values = {name: getattr(options, name) for name in ("overlap", "weights", "window_batch")}
    sliding = {name: value for name, value in values.items() if value is not None}
    if sliding and window == "whole":
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sliding)
        whose = "" if options.window else f", which {run.path} found better than sliding windows,"
        raise ValueError(f"{flags}: a whole pass{whose} has no windows; leave it out, or use --window sliding")
    if window == "whole" and run.why_not_whole and not options.force:
        raise ValueError(f"--window whole with {run.path}: {run.why_not_whole}; leave it out, or add --force")
    if options.force and not (window == "whole" and run.why_not_whole):
        raise ValueError("--force would do nothing: it is for --window whole with networks of nnU-Net's: leave it out")
    mirror = run.mirror
    if options.mirror is not None:
        flips = options.mirror or DIRECTIONS
        mirror = tuple(sorted({DIRECTIONS.index(direction) for direction in flips if direction != "none"}))
    return Settings(window=window, mirror=mirror, min_component=options.min_component, **sliding)


def _parser() -> Parser:
    parser = Parser("predict", description="Predicts label maps with a trained run.")
    add = parser.add_argument
    add("run", type=Path, nargs="+", metavar="RUN",
        help="run folder that train wrote, or archive that export wrote; several are averaged")  # fmt: skip
    add("-i", "--input", nargs="+", required=True, metavar="PATH", help="data set, folder or list of images, or files")
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="folder to write the label maps to")
    add("--folds", nargs="+", default=[], metavar="FOLD", help="folds of nnU-Net's to average (default: all there are)")
    add("--checkpoint", nargs="+", action="extend", metavar="WHICH",
        help="best (default), latest or a file of weights; several are an ensemble: mean of logits")  # fmt: skip
    add("--window", choices=WINDOWS,
        help="sliding windows of the training tile, or the whole volume in one pass (default: what validation found "
        "better, train --val-window both; else sliding)")  # fmt: skip
    add("--force", action="store_true", help="predict whole volumes by networks of nnU-Net's all the same")
    add("--overlap", type=float, metavar="SHARE", help="share of a window that the next one overlaps (default 0.5)")
    add("--weights", choices=WEIGHTS, help="weights of a window's voxels in the mean over windows (default gaussian)")
    add("--window-batch", type=int, metavar="WINDOWS", help="windows that a group predicts at once (default 1)")
    add("--mirror", nargs="*", choices=[*DIRECTIONS, "none"],
        help="average over flips along these directions, all three if none is named (default: none; networks of "
        "nnU-Net's: all that training flipped)")  # fmt: skip
    add("--probabilities", action="store_true", help="also write a volume of probabilities per network output")
    add("--statistics", action="store_true", help="also write statistics.csv: ml and mean intensity per case and class")
    add("--min-component", default="0", metavar="SIZE",
        help="remove connected components below this size: 50 (mm3) or 20voxels (default 0: keep all)")  # fmt: skip
    add("--continue", action="store_true", dest="resume", help="skip the cases that are already predicted")
    add("--seqpar", type=int, default=0, metavar="RANKS",
        help="ranks that share a window, started if need be (default: as in training; whole volume: all)")  # fmt: skip
    add("--mode", choices=MODES, default="",
        help="how ranks decode a window that they share (default: the mode that needs the least memory)")  # fmt: skip
    add("--device", choices=DEVICE_KINDS, default="auto", help="device to predict on (default auto)")
    return parser


def main() -> None:
    """Ends the process with the act's exit code."""
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
