"""Predicts label maps with a trained run: ``torchrun launch/predict.py RUN -i IMAGES -o FOLDER``."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.prediction_inputs import find_inputs
from seqpar.data.preparation.case import Prepared, prepare_case
from seqpar.data.preparation.recipe import Recipe
from seqpar.decoders.modes.choose import MODES
from seqpar.environment import read_start
from seqpar.launch.inference.prediction_folder import Answers
from seqpar.launch.inference.predictor import WINDOWS, Predictor, Settings, by_first
from seqpar.launch.inference.whole_volume_memory import footprint
from seqpar.launch.inference.windows import WEIGHTS, Course
from seqpar.launch.job import exit_codes
from seqpar.launch.job.local_ranks import die_with_parent
from seqpar.launch.runs.trained_run import Run, find_weights, fitting_mode, load_nets, read_run
from seqpar.launch.weights.checkpoint import digest
from seqpar.mesh import Mesh, start

DIRECTIONS = "WDH"


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0, or 3 where a case could not be predicted; a user's errors are raised."""
    die_with_parent()
    options = _parser().parse_args(list(arguments))
    settings = _settings(options)
    run = read_run(options.run)
    world = read_start(os.environ).world
    with start(options.seqpar or fitting_seqpar(run, settings, world), device=options.device) as mesh:
        try:
            return predict(options, settings, run, mesh)
        except Exception as error:
            return _end(error, mesh)


def fitting_seqpar(run: Run, settings: Settings, world: int) -> int:
    """Returns how many ranks share a window: up to as many as in training; all share a whole volume."""
    wish = world if settings.window == "whole" else run.config.seqpar
    return max(size for size in range(1, world + 1) if world % size == 0 and size <= wish)


def predict(options: argparse.Namespace, settings: Settings, run: Run, mesh: Mesh) -> int:
    """Returns the exit code of predicting everything that is still to be done."""
    files = [find_weights(run, which) for which in options.checkpoint or ["best"]]
    predictor = Predictor(run, load_nets(run, files, mesh, options.mode), settings, mesh)
    mode = options.mode or fitting_mode(run)
    answers = Answers(options.output, run.outputs if options.probabilities else ())
    cases, faults = list[Case](), list[str]()

    def plan() -> list[str]:
        found, wrong = find_inputs(options.input, run.recipe.modalities)
        record: dict[str, Any] = {
            "run": str(run.path.absolute()),
            "weights": {str(path): digest(path) for path in files},
            "settings": {**asdict(settings), "mirror": list(settings.mirror)},
            "probabilities": options.probabilities,
        }
        if mode == "nogather":  # what a rank does not see depends on how many there are
            record["seqpar"] = mesh.seq.size
        cases.extend(answers.begin(found, record, options.go_on))
        faults.extend(str(fault) for fault in wrong)
        kept = f" ({len(found) - len(cases)} are done)" if len(cases) < len(found) else ""
        named = ", ".join(map(str, files))
        print(f"predicting {len(cases)} cases{kept} by {named}; {_told(run, mode, mesh)}", flush=True)
        return [case.id for case in cases]

    names = by_first(plan, mesh)
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr, flush=True)
    ahead = _Ahead(cases, run.recipe)
    for number, name in enumerate(names):
        try:
            _one(predictor, answers, ahead, number, name)
        except ValueError as error:
            if isinstance(error, DataError) and error.path == str(options.output):
                raise
            faults.append(str(error) if isinstance(error, DataError) else f"{name}: {error}")
            if mesh.is_first:
                print(f"error: {faults[-1]}", file=sys.stderr, flush=True)
    if mesh.is_first:
        told = f", faults {len(faults)}" if faults else ""
        print(f"cases {len(names)}{told}: {options.output}", flush=True)
    return exit_codes.DATA if by_first(lambda: len(faults), mesh) else 0


class _Ahead:
    """Prepares a case while the network is busy with the one before."""

    def __init__(self, cases: Sequence[Case], recipe: Recipe) -> None:
        self.cases, self.recipe = cases, recipe
        self._pool = ThreadPoolExecutor(1)
        self._begun: dict[int, Future[Prepared]] = {}

    def take(self, number: int) -> Prepared:
        """Returns the case with that number, prepared, and begins with the next."""
        for at in range(number, min(number + 2, len(self.cases))):
            if at not in self._begun:
                self._begun[at] = self._pool.submit(prepare_case, self.cases[at], self.recipe)
        return self._begun.pop(number).result()


def _one(predictor: Predictor, answers: Answers, ahead: _Ahead, number: int, name: str) -> None:
    """Predicts one case and writes its files; every error is alike on all ranks."""
    mesh, settings, run = predictor.mesh, predictor.settings, predictor.run
    began = time.perf_counter()
    image, shape, prepared = predictor.share(lambda: ahead.take(number))
    if settings.window == "whole":
        need = footprint(predictor.nets[0], image.shape[1:], len(run.outputs), mesh)
        if mesh.is_first:
            print(f"{name}: a whole pass over {_by(image.shape[1:])} voxels takes {need}", flush=True)
    rows = answers.rows(ahead.cases[number], shape, not run.regions) if mesh.is_first else None
    keep = (rows.keep if rows is not None else _drop) if answers.outputs else None
    try:
        ids = predictor.class_ids(image, shape, keep)
        by_first(lambda: _write(predictor, answers, ahead.cases[number], prepared, ids.numpy(), rows), mesh)
    finally:
        if rows is not None:
            rows.remove()
    if mesh.is_first:
        course = Course.of(image.shape[1:], settings.sliding(run.config.tile))
        count = len(course.corners)
        windows = "one pass" if settings.window == "whole" else f"{count} window{'s' if count > 1 else ''}"
        took = time.perf_counter() - began
        where = answers.label(ahead.cases[number])
        print(f"{name}: {_by(image.shape[1:])} voxels, {windows}, {took:.1f} s: {where}", flush=True)


def _write(predictor: Predictor, answers: Answers, case: Case, prepared: Any, ids: Any, rows: Any) -> None:
    answers.write(case, predictor.to_source(ids, prepared.properties), prepared.properties, rows)


def _drop(first: int, rows: Any) -> None:
    """Takes rows on a rank that writes nothing."""


def _by(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


def _told(run: Run, mode: str, mesh: Mesh) -> str:
    told = f"{mesh.world.size} rank{'s' if mesh.world.size > 1 else ''} = data {mesh.data.size} x seq {mesh.seq.size}"
    if run.config.mode == "nogather" and (mode, mesh.seq.size) != ("nogather", run.config.seqpar):
        told += f" (trained in mode nogather on seq {run.config.seqpar}: parts now see other borders)"
    return told


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
