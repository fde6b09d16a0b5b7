"""Predicts case after case: the next one is prepared while this one is predicted and written."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.recognise import find_inputs
from seqpar.data.preparation.preparation import Preparation
from seqpar.data.preparation.prepared_case import Prepared, load_case
from seqpar.parallel.consensus import run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.case_stream import CaseProgress
from seqpar.prediction.class_statistics import ClassStatistics
from seqpar.prediction.prediction_folder import PredictionFolder, ProbabilityFile
from seqpar.prediction.prediction_memory import footprint
from seqpar.prediction.predictor import PredictionSettings, Predictor
from seqpar.prediction.run_average import EnsembleMember, MeanProbabilities, share_of_progress
from seqpar.prediction.sliding_window import Image, warn_beyond_training
from seqpar.prediction.window_grid import WindowGrid
from seqpar.runs.trained_run import TrainedRun, prediction_mode
from seqpar.scores.label_classes import labels_of_declaration
from seqpar.terminal import next_command
from seqpar.text import quantity
from seqpar.weights.weight_files import digest


@dataclass(frozen=True)
class Request:
    """Which cases to predict, and where to write the predictions.

    ``inputs`` name a data set, a folder or list of images, or files. ``mode`` says how ranks decode a window that they
    share, "" that the run decides.
    ``statistics`` writes statistics.csv too. ``resume`` skips the cases that are already predicted.
    ``only`` names the cases that are predicted; None for all.
    """

    inputs: tuple[str, ...]
    output: Path
    mode: str = ""
    probabilities: bool = False
    statistics: bool = False
    resume: bool = False
    only: frozenset[str] | None = None


def predict_cases(request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> list[str]:
    """Predicts the requested cases that are not done yet; returns what went wrong, a line per fault, on all ranks.

    A case that fails does not stop the others; a folder that cannot be written to does. ``members``: the runs; of
    several, the probabilities are averaged.
    """
    predictors = [
        Predictor(member.run, member.run.load_nets(member.weights, mesh, request.mode), member.settings, mesh)
        for member in members
    ]
    run = members[0].run
    statistics = _statistics(request.output, run) if request.statistics else None
    folder = PredictionFolder(request.output, run.outputs if request.probabilities else (), statistics)
    # Only the first rank reads the inputs and the folder; the others get the cases from it.
    plan = run_on_rank0(lambda: _plan(folder, request, _record(request, members, mesh), run), mesh.world)
    cases = [Case(name, tuple(map(Path, images))) for name, images in plan["cases"]]
    faults: list[str] = list(plan["faults"])
    shown = CaseProgress(cases, mesh.is_first)
    done = f" ({plan['num_done']} are done)" if plan["num_done"] else ""
    files = ", ".join(str(path) for member in members for path in member.weights)
    mean = f", the mean of {len(members)} runs" if len(members) > 1 else ""
    shown.say(
        f"predicting {quantity(len(cases), 'case')}{done} by {files}{mean}; {_ranks_line(request, members, mesh)}"
    )
    for member in members:
        if len(member.run.windows) > 1:
            dices = ", ".join(f"{window} {dice:.3f}" for window, dice in member.run.windows.items())
            whose = f"of {member.run.path}" if len(members) > 1 else "in the run's validation"
            shown.say(f"--window {member.settings.window}; mean Dice {whose}: {dices}")
            if (member.settings.window, member.run.window) == ("whole", "sliding"):
                shown.warn(f"--window whole is the worse of both by the validation of {member.run.path}: leave it out")
    for fault in faults:
        shown.complain(fault)
    prepared_cases = PreparedCases(cases, [member.run.preparation for member in members], request.statistics)
    predicted = 0
    with closing(shown):
        for number, case in enumerate(cases):
            try:
                _predict_case(predictors, folder, prepared_cases, number, shown)
                predicted += 1
            except ValueError as error:
                if isinstance(error, DataError) and error.path == str(request.output):
                    raise
                faults.append(str(error) if isinstance(error, DataError) else f"{case.id}: {error}")
                shown.complain(faults[-1])
    failed = f", {quantity(len(faults), 'fault')}" if faults else ""
    shown.say(f"label maps of {quantity(predicted, 'case')}{failed}: {request.output}")
    if predicted:
        shown.say(f"next: {next_command('evaluate', 'TRUTH', request.output)}  (TRUTH: folder of the true label maps)")
    return faults


def _that_act(settings: PredictionSettings) -> dict[str, Any]:
    """Returns the settings that predictions depend on; ``force`` only allows them."""
    return {
        **{name: value for name, value in asdict(settings).items() if name != "force"},
        "mirror": [*settings.mirror],
    }


def _record(request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> dict[str, Any]:
    """Returns the content of prediction.json: all that the predictions depend on."""
    runs = [
        {
            "run": str(member.run.path.absolute()),
            "weights": {str(path): digest(path) for path in member.weights},
            "settings": _that_act(member.settings),
        }
        for member in members
    ]
    record: dict[str, Any] = runs[0] if len(runs) == 1 else {"runs": runs}
    record["probabilities"] = request.probabilities
    if request.statistics:
        record["statistics"] = True
    if "nogather" in _modes(request, members):  # what a rank sees then depends on the size of the group
        record["seqpar"] = mesh.seq.size
    return record


def _modes(request: Request, members: Sequence[EnsembleMember]) -> list[str]:
    """Returns how ranks decode a window of each run."""
    return [request.mode or prediction_mode(member.run) for member in members]


def _statistics(folder: Path, run: TrainedRun) -> ClassStatistics:
    """Returns the statistics of the run's labels and regions, in the files' label values."""
    values = run.recipe.values
    labels = {name: values[n] for name, n in run.labels.items()}
    regions = {name: tuple(values[n] for n in members) for name, members in run.regions.items()}
    return ClassStatistics(folder, labels_of_declaration(labels, regions, None).classes, run.recipe.modalities)


def _plan(folder: PredictionFolder, request: Request, record: dict[str, Any], run: TrainedRun) -> dict[str, Any]:
    """Opens the folder; returns the cases to predict, how many are done, and what is wrong with others, as JSON."""
    cases, faults = find_inputs(request.inputs, run.recipe.modalities)
    cases = [case for case in cases if request.only is None or case.id in request.only]
    left = folder.open(cases, record, request.resume)
    return {
        "cases": [[case.id, list(map(str, case.images))] for case in left],
        "num_done": len(cases) - len(left),
        "faults": list(map(str, faults)),
    }


def _ranks_line(request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> str:
    """Returns how the ranks are grouped, with a warning where nogather runs on other parts than it was trained on."""
    ranks = quantity(mesh.world.size, "rank")
    line = f"{ranks} = data {mesh.data.size} x seq {mesh.seq.size}"
    for mode, member in zip(_modes(request, members), members):
        config = member.run.config
        if config.mode == "nogather" and (mode, mesh.seq.size) != ("nogather", config.seqpar):
            line += f" (trained in mode nogather on seq {config.seqpar}: parts now see other borders)"
    return line


class PreparedCases:
    """The cases, each prepared in a thread while the network is busy with the one before; for the first rank.

    ``preparations``: each run's; runs that prepare alike share a prepared case.
    ``image``: of the case that was taken last, canonical ``c W D H`` in the files' numbers, where images are kept.
    """

    def __init__(self, cases: Sequence[Case], preparations: Sequence[Preparation], keep_images: bool) -> None:
        self.cases, self.preparations, self.keep_images = cases, preparations, keep_images
        self.image: np.ndarray | None = None
        self._pool = ThreadPoolExecutor(1)
        self._started: dict[int, Future[tuple[list[Prepared], np.ndarray | None]]] = {}

    def take(self, number: int) -> list[Prepared]:
        """Returns the case with that number as each run takes it, once it is prepared, and begins with the next one."""
        for index in range(number, min(number + 2, len(self.cases))):
            if index not in self._started:
                self._started[index] = self._pool.submit(self._prepare, self.cases[index])
        prepared, self.image = self._started.pop(number).result()
        return prepared

    def _prepare(self, case: Case) -> tuple[list[Prepared], np.ndarray | None]:
        loaded = load_case(case, self.preparations[0].recipe)
        distinct = list[tuple[Preparation, Prepared]]()
        for preparation in self.preparations:
            if all(preparation != known for known, _ in distinct):
                distinct.append((preparation, preparation.prepare(loaded, case)))
        prepared = [next(one for known, one in distinct if known == own) for own in self.preparations]
        return prepared, loaded.image if self.keep_images else None


def _predict_case(
    predictors: Sequence[Predictor],
    folder: PredictionFolder,
    prepared_cases: PreparedCases,
    number: int,
    shown: CaseProgress,
) -> None:
    """Predicts one case and writes its files; what fails on one rank is raised on all."""
    first, case, count = predictors[0], prepared_cases.cases[number], len(predictors)
    mesh, run = first.mesh, first.run
    started = time.perf_counter()
    tell = shown.begin(number)
    taken: list[Prepared] = []

    def take() -> Prepared:
        taken.extend(prepared_cases.take(number))
        return taken[0]

    image, target, prepared = first.distribute(take)
    probabilities = _probability_file(folder, case, target.shape, run, count) if mesh.is_first else None
    write_rows = None
    if folder.outputs or count > 1:
        write_rows = _ignore_rows if probabilities is None else probabilities.write_rows
    windows = list[str]()
    try:
        for at, predictor in enumerate(predictors):
            if predictor.run.preparation != predictors[max(at - 1, 0)].run.preparation:
                image, target, _ = predictor.distribute(partial(taken.__getitem__, at))
            windows.append(_say_size(predictor, case, image, target.shape, shown))
            ids = predictor.class_ids(image, target, write_rows, share_of_progress(tell, at, count))

        def write() -> None:
            assert prepared is not None
            labels = ids
            if isinstance(probabilities, MeanProbabilities):
                with folder.writable():
                    labels = probabilities.class_ids(run.output_order)
            values = first.to_source(labels.numpy(), prepared.properties)
            folder.write(case, values, prepared.properties, run.preparation, probabilities, prepared_cases.image)

        run_on_rank0(write, mesh.world)
    finally:
        if probabilities is not None:
            probabilities.remove()
    if mesh.is_first:
        seconds = time.perf_counter() - started
        shown.say(f"{case.id}: {', '.join(dict.fromkeys(windows))}, {seconds:.1f} s: {folder.label_path(case)}")


def _probability_file(
    folder: PredictionFolder, case: Case, shape: Sequence[int], run: TrainedRun, count: int
) -> ProbabilityFile | None:
    """Returns the temporary file of a case's probabilities, for ``count`` runs that of their mean; None for neither."""
    softmax = not run.learns_regions
    if count == 1:
        return folder.probability_file(case, shape, softmax)
    return MeanProbabilities(folder.temporary_file(case), (len(run.outputs), *shape), softmax, count)


def _say_size(predictor: Predictor, case: Case, image: Image, to_shape: Sequence[int], shown: CaseProgress) -> str:
    """Returns how many voxels and windows a case has for a run; says before what a whole pass takes."""
    settings, run = predictor.settings, predictor.run
    voxels = "x".join(map(str, image.shape[1:]))
    if settings.window == "whole":
        views, ranks = len(predictor.nets) * 2 ** len(settings.mirror), predictor.mesh.world.size
        memory = footprint(predictor.nets[0], image.shape[1:], len(run.outputs), ranks, to_shape, views)
        shown.say(f"{case.id}: a whole pass over {voxels} voxels takes {memory}")
        if warning := warn_beyond_training(predictor.nets[0], image.shape[1:], run.whole_grid):
            shown.warn(f"{case.id}: {warning}")
        return f"{voxels} voxels, one pass"
    count = len(WindowGrid.of(image.shape[1:], settings.sliding(run.config.tile, run.window_rule)).corners)
    return f"{voxels} voxels, {quantity(count, 'window')}"


def _ignore_rows(first_row: int, rows: Tensor) -> None:
    """Stands for the writer of probabilities on the ranks that write nothing."""
