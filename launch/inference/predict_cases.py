"""Predicts case after case: the next one is prepared while this one is predicted and written."""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from seqpar.consensus import by_first
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.prediction_inputs import find_inputs
from seqpar.data.preparation.case import Prepared, prepare_case
from seqpar.data.preparation.recipe import Recipe
from seqpar.launch.inference.prediction_folder import PredictionFolder
from seqpar.launch.inference.predictor import Predictor, Settings
from seqpar.launch.inference.whole_volume_memory import footprint
from seqpar.launch.inference.windows import WindowGrid
from seqpar.launch.job import exit_codes
from seqpar.launch.runs.trained_run import Run, find_weights, fitting_mode, load_nets
from seqpar.launch.weights.checkpoint import digest
from seqpar.mesh import Mesh


def predict(options: argparse.Namespace, settings: Settings, run: Run, mesh: Mesh) -> int:
    """Returns the exit code of predicting everything that is still to be done."""
    files = [find_weights(run, which) for which in options.checkpoint or ["best"]]
    predictor = Predictor(run, load_nets(run, files, mesh, options.mode), settings, mesh)
    mode = options.mode or fitting_mode(run)
    answers = PredictionFolder(options.output, run.outputs if options.probabilities else ())
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

    names = by_first(plan, mesh.world)
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
    return exit_codes.DATA if by_first(lambda: len(faults), mesh.world) else 0


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


def _one(predictor: Predictor, answers: PredictionFolder, ahead: _Ahead, number: int, name: str) -> None:
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
        by_first(lambda: _write(predictor, answers, ahead.cases[number], prepared, ids.numpy(), rows), mesh.world)
    finally:
        if rows is not None:
            rows.remove()
    if mesh.is_first:
        course = WindowGrid.of(image.shape[1:], settings.sliding(run.config.tile))
        count = len(course.corners)
        windows = "one pass" if settings.window == "whole" else f"{count} window{'s' if count > 1 else ''}"
        took = time.perf_counter() - began
        where = answers.label(ahead.cases[number])
        print(f"{name}: {_by(image.shape[1:])} voxels, {windows}, {took:.1f} s: {where}", flush=True)


def _write(predictor: Predictor, answers: PredictionFolder, case: Case, prepared: Any, ids: Any, rows: Any) -> None:
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
