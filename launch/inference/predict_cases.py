"""Predicts case after case: the next one is prepared while this one is predicted and written."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from seqpar.consensus import by_first
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.prediction_inputs import find_inputs
from seqpar.data.preparation.case import Prepared, load_case, prepare_loaded
from seqpar.data.preparation.recipe import Recipe
from seqpar.launch.evaluation.classes import labels_of_declaration
from seqpar.launch.inference.case_progress import CaseProgress
from seqpar.launch.inference.class_statistics import ClassStatistics
from seqpar.launch.inference.prediction_folder import PredictionFolder
from seqpar.launch.inference.predictor import Predictor, Settings
from seqpar.launch.inference.sliding_window import beyond_training
from seqpar.launch.inference.whole_volume_memory import footprint
from seqpar.launch.inference.windows import WindowGrid
from seqpar.launch.job.next_command import next_command
from seqpar.launch.runs.trained_run import Run, find_weights, fitting_mode, load_nets
from seqpar.launch.weights.checkpoint import digest
from seqpar.mesh import Mesh


@dataclass(frozen=True)
class Request:
    """Which cases to predict with which weights, and where to write the predictions.

    ``inputs`` name a data set, a folder or list of images, or files. ``checkpoints`` are "best", "latest" or files of
    weights; several are an ensemble. ``mode`` says how ranks decode a window that they share, "" that the run decides.
    ``statistics`` writes statistics.csv too. ``resume`` skips the cases that are already predicted.
    """

    inputs: tuple[str, ...]
    output: Path
    checkpoints: tuple[str, ...] = ("best",)
    mode: str = ""
    probabilities: bool = False
    statistics: bool = False
    resume: bool = False


def predict_cases(request: Request, settings: Settings, run: Run, mesh: Mesh) -> list[str]:
    """Predicts the requested cases that are not done yet; returns what went wrong, a line per fault, on all ranks.

    A case that fails does not stop the others; a folder that cannot be written to does.
    """
    weights = [find_weights(run, name) for name in request.checkpoints]
    predictor = Predictor(run, load_nets(run, weights, mesh, request.mode), settings, mesh)
    statistics = _statistics(request.output, run) if request.statistics else None
    folder = PredictionFolder(request.output, run.outputs if request.probabilities else (), statistics)
    # Only the first rank reads the inputs and the folder; the others get the cases from it.
    plan = by_first(lambda: _plan(folder, request, _record(request, settings, run, weights, mesh), run), mesh.world)
    cases = [Case(name, tuple(map(Path, images))) for name, images in plan["cases"]]
    faults: list[str] = list(plan["faults"])
    shown = CaseProgress(cases, mesh.is_first)
    done = f" ({plan['num_done']} are done)" if plan["num_done"] else ""
    files = ", ".join(map(str, weights))
    shown.say(f"predicting {len(cases)} cases{done} by {files}; {_ranks_line(request, run, mesh)}")
    if len(run.windows) > 1:
        dices = ", ".join(f"{window} {dice:.3f}" for window, dice in run.windows.items())
        shown.say(f"--window {settings.window}; mean Dice in the run's validation: {dices}")
    for fault in faults:
        shown.complain(fault)
    prepared_cases = _PreparedCases(cases, run.recipe, keep_images=request.statistics)
    with closing(shown):
        for number, case in enumerate(cases):
            try:
                _predict_case(predictor, folder, prepared_cases, number, shown)
            except ValueError as error:
                if isinstance(error, DataError) and error.path == str(request.output):
                    raise
                faults.append(str(error) if isinstance(error, DataError) else f"{case.id}: {error}")
                shown.complain(faults[-1])
    failed = f", faults {len(faults)}" if faults else ""
    shown.say(f"cases {len(cases)}{failed}: {request.output}")
    shown.say(f"next: {next_command('evaluate', 'TRUTH', request.output)}  (TRUTH: folder of the true label maps)")
    return faults


def _record(request: Request, settings: Settings, run: Run, weights: Sequence[Path], mesh: Mesh) -> dict[str, Any]:
    """Returns the content of prediction.json: all that the predictions depend on."""
    record: dict[str, Any] = {
        "run": str(run.path.absolute()),
        "weights": {str(path): digest(path) for path in weights},
        "settings": {**asdict(settings), "mirror": list(settings.mirror)},
        "probabilities": request.probabilities,
    }
    if request.statistics:
        record["statistics"] = True
    if (request.mode or fitting_mode(run)) == "nogather":  # what a rank sees then depends on the size of the group
        record["seqpar"] = mesh.seq.size
    return record


def _statistics(folder: Path, run: Run) -> ClassStatistics:
    """Returns the statistics of the run's labels and regions, in the files' label values."""
    values = run.recipe.values
    labels = {name: values[n] for name, n in run.labels.items()}
    regions = {name: tuple(values[n] for n in members) for name, members in run.regions.items()}
    return ClassStatistics(folder, labels_of_declaration(labels, regions, None).classes, run.recipe.modalities)


def _plan(folder: PredictionFolder, request: Request, record: dict[str, Any], run: Run) -> dict[str, Any]:
    """Opens the folder; returns the cases to predict, how many are done, and what is wrong with others, as JSON."""
    cases, faults = find_inputs(request.inputs, run.recipe.modalities)
    left = folder.open(cases, record, request.resume)
    return {
        "cases": [[case.id, list(map(str, case.images))] for case in left],
        "num_done": len(cases) - len(left),
        "faults": list(map(str, faults)),
    }


def _ranks_line(request: Request, run: Run, mesh: Mesh) -> str:
    """Returns how the ranks are grouped, with a warning where nogather runs on other parts than it was trained on."""
    ranks = f"{mesh.world.size} rank{'s' if mesh.world.size > 1 else ''}"
    line = f"{ranks} = data {mesh.data.size} x seq {mesh.seq.size}"
    here = request.mode or fitting_mode(run), mesh.seq.size
    if run.config.mode == "nogather" and here != ("nogather", run.config.seqpar):
        line += f" (trained in mode nogather on seq {run.config.seqpar}: parts now see other borders)"
    return line


class _PreparedCases:
    """The cases, each prepared in a thread while the network is busy with the one before; for the first rank.

    ``image``: of the case that was taken last, canonical ``c W D H`` in the files' numbers, where images are kept.
    """

    def __init__(self, cases: Sequence[Case], recipe: Recipe, keep_images: bool) -> None:
        self.cases, self.recipe, self.keep_images = cases, recipe, keep_images
        self.image: np.ndarray | None = None
        self._pool = ThreadPoolExecutor(1)
        self._started: dict[int, Future[tuple[Prepared, np.ndarray | None]]] = {}

    def take(self, number: int) -> Prepared:
        """Returns the case with that number once it is prepared, and starts to prepare the next one."""
        for index in range(number, min(number + 2, len(self.cases))):
            if index not in self._started:
                self._started[index] = self._pool.submit(self._prepare, self.cases[index])
        prepared, self.image = self._started.pop(number).result()
        return prepared

    def _prepare(self, case: Case) -> tuple[Prepared, np.ndarray | None]:
        loaded = load_case(case, self.recipe)
        return prepare_loaded(loaded, case, self.recipe), loaded.image if self.keep_images else None


def _predict_case(
    predictor: Predictor,
    folder: PredictionFolder,
    prepared_cases: _PreparedCases,
    number: int,
    shown: CaseProgress,
) -> None:
    """Predicts one case and writes its files; what fails on one rank is raised on all."""
    mesh, settings, run, case = predictor.mesh, predictor.settings, predictor.run, prepared_cases.cases[number]
    started = time.perf_counter()
    tell = shown.begin(number)
    image, shape, prepared = predictor.distribute(lambda: prepared_cases.take(number))
    voxels = "x".join(map(str, image.shape[1:]))
    if settings.window == "whole":
        memory = footprint(predictor.nets[0], image.shape[1:], len(run.outputs), mesh)
        shown.say(f"{case.id}: a whole pass over {voxels} voxels takes {memory}")
        if "whole" not in run.windows and (warning := beyond_training(predictor.nets[0], image.shape[1:])):
            shown.warn(f"{case.id}: {warning}")
    probabilities = folder.probability_file(case, shape, not run.learns_regions) if mesh.is_first else None
    write_rows = None
    if folder.outputs:
        write_rows = _ignore_rows if probabilities is None else probabilities.write_rows
    try:
        ids = predictor.class_ids(image, shape, write_rows, tell)

        def write() -> None:
            assert prepared is not None
            labels = predictor.to_source(ids.numpy(), prepared.properties)
            folder.write(case, labels, prepared.properties, probabilities, prepared_cases.image)

        by_first(write, mesh.world)
    finally:
        if probabilities is not None:
            probabilities.remove()
    if mesh.is_first:
        count = len(WindowGrid.of(image.shape[1:], settings.sliding(run.config.tile)).corners)
        windows = "one pass" if settings.window == "whole" else f"{count} window{'s' if count > 1 else ''}"
        seconds = time.perf_counter() - started
        shown.say(f"{case.id}: {voxels} voxels, {windows}, {seconds:.1f} s: {folder.label_path(case)}")


def _ignore_rows(first_row: int, rows: Tensor) -> None:
    """Stands for the writer of probabilities on the ranks that write nothing."""
