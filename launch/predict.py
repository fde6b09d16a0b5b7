"""Predicts label maps with a trained run: ``torchrun launch/predict.py RUN -i IMAGES -o FOLDER``."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from seqpar.decoders.modes.choose import MODES
from seqpar.environment import read_launcher
from seqpar.launch.inference.predict_cases import predict
from seqpar.launch.inference.predictor import WINDOWS, Settings
from seqpar.launch.inference.windows import WEIGHTS
from seqpar.launch.job import exit_codes
from seqpar.launch.job.local_ranks import die_with_parent
from seqpar.launch.runs.trained_run import Run, read_run
from seqpar.mesh import Mesh
from seqpar.rendezvous import start

DIRECTIONS = "WDH"


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 3 where a case could not be predicted; a user's errors are raised."""
    die_with_parent()
    options = _parser().parse_args(list(arguments))
    settings = _settings(options)
    run = read_run(options.run)
    world = read_launcher(os.environ).world
    with start(options.seqpar or fitting_seqpar(run, settings, world), device=options.device) as mesh:
        try:
            return predict(options, settings, run, mesh)
        except Exception as error:
            return _end(error, mesh)


def fitting_seqpar(run: Run, settings: Settings, world: int) -> int:
    """Returns how many ranks share a window: up to as many as in training; all share a whole volume."""
    wish = world if settings.window == "whole" else run.config.seqpar
    return max(size for size in range(1, world + 1) if world % size == 0 and size <= wish)


def _end(error: Exception, mesh: Mesh) -> int:
    """Returns the exit code of an error that all ranks met alike; on any other this rank ends at once.

    Its peers may be waiting for it, and it cannot wait for them.
    """
    code, alike = exit_codes.code_of(error), isinstance(error, ValueError)
    if mesh.world.size == 1 or code is None:
        raise error
    if mesh.is_first or not alike:
        where = "" if alike else f"rank {mesh.world.index}: "
        print(f"error: {where}{error}", file=sys.stderr, flush=True)
    if not alike:
        os._exit(code)
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists all)")


def _settings(options: argparse.Namespace) -> Settings:
    mirror = options.mirror if options.mirror != [] else list(DIRECTIONS)
    sliding = {name: getattr(options, name) for name in ("overlap", "weights", "window_batch")}
    given = {name: value for name, value in sliding.items() if value is not None}
    if given and options.window == "whole":
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{named}: a whole pass has no windows; leave it out, or use --window sliding")
    return Settings(
        window=options.window,
        mirror=tuple(sorted({DIRECTIONS.index(direction) for direction in mirror or ()})),
        min_component=options.min_component,
        **given,
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("predict", description="Predicts label maps with a trained run.", allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder that train wrote")
    add("-i", "--input", nargs="+", required=True, metavar="PATH", help="data set, folder or list of images, or files")
    add("-o", "--output", type=Path, required=True, metavar="FOLDER", help="where label maps are written")
    add("--checkpoint", nargs="+", action="extend", metavar="WHICH", help="best (default), latest or a file; several: "
        "the mean of their logits")  # fmt: skip
    add("--window", choices=WINDOWS, default="sliding", help="windows as in training, or the whole volume in one pass")
    add("--overlap", type=float, help="share of a window that the next one covers again (default 0.5)")
    add("--weights", choices=WEIGHTS, help="how windows are weighted (default gaussian)")
    add("--window-batch", type=int, metavar="N", help="windows that a sequence group sees at a time (default 1)")
    add("--mirror", nargs="*", choices=list(DIRECTIONS), help="average over flips of these directions, or of all")
    add("--probabilities", action="store_true", help="write each output's probabilities too")
    add("--min-component", default="0", metavar="SIZE", help="drop smaller components: 50 (mm3) or 20voxels")
    add("--continue", action="store_true", dest="go_on", help="skip the cases that are done")
    add("--seqpar", type=int, default=0, metavar="N", help="ranks that share a window (default: as in training)")
    add("--mode", choices=MODES, default="", help="how ranks decode a window they share (default: the thriftiest)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def main() -> None:
    """Ends the process with the act's exit code."""
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
