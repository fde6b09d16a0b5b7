"""Gives each case a class: the next one is prepared while this one is predicted.

FOLDER/predictions.csv        written anew after each case, whole
FOLDER/prediction.json        how everything in it was predicted
FOLDER/explanations/…         CASE.nii.gz and CASE.png, where asked for
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import read_json, write_json, write_text
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.recognise import find_inputs
from seqpar.data.preparation.prepared_case import Prepared
from seqpar.data.volumes import write_volume
from seqpar.models.classifier import Classifier
from seqpar.models.network import Network
from seqpar.parallel.consensus import run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.case_stream import CaseProgress
from seqpar.prediction.prediction_folder import RECORD
from seqpar.prediction.predictor import Predictor
from seqpar.prediction.run_average import EnsembleMember
from seqpar.prediction.sliding_window import Image
from seqpar.runs.trained_run import TrainedRun
from seqpar.tasks.classify.explanation import class_logits, explain
from seqpar.tasks.classify.scores import TABLE, ClassTable, read_class_table
from seqpar.tasks.segment.prediction import PreparedCases, Request
from seqpar.terminal import next_command
from seqpar.weights.weight_files import digest

EXPLANATIONS = "explanations"
Draw = Callable[[Path, str, np.ndarray, np.ndarray, Sequence[float]], None]  # path, title, image, map, spacing


@dataclass
class PredictionTable:
    """The probabilities of the cases so far, and the folder that they are written to."""

    folder: Path
    names: tuple[str, ...]
    rows: dict[str, np.ndarray] = field(default_factory=dict)

    def open(self, cases: Sequence[Case], record: dict[str, Any], resume: bool) -> list[Case]:
        """Returns the cases that are still to be predicted; removes what predictions of other settings left.

        Cases predicted with the same settings stay, with ``resume`` requested ones too. Refuses to
        overwrite what others wrote.
        """
        path, mark = self.folder / TABLE, self.folder / RECORD
        previous = read_json(mark) if mark.is_file() else None
        if path.exists() and previous is None:
            raise DataError(path, f"would be overwritten, and no {RECORD} says that predict wrote it; choose another "
                            "--output")  # fmt: skip
        if resume and previous is not None and previous != record:
            raise DataError(self.folder, "was predicted with other settings; choose another --output, or leave "
                            "--continue out to predict everything again")  # fmt: skip
        if previous == record and path.is_file():
            table, anew = read_class_table(path), set() if resume else {case.id for case in cases}
            self.rows = {case: row for case, row in zip(table.cases, table.probabilities) if case not in anew}
        left = [case for case in cases if case.id not in self.rows]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.rows:
                self._write()
            else:
                path.unlink(missing_ok=True)
            for case in left:
                for suffix in (".nii.gz", ".png"):
                    (self.folder / EXPLANATIONS / f"{case.id}{suffix}").unlink(missing_ok=True)
            write_json(mark, record)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        return left

    def add(self, case: str, probabilities: np.ndarray) -> None:
        """Writes the table with one more case."""
        self.rows[case] = probabilities
        try:
            self._write()
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _write(self) -> None:
        """Writes the table anew."""
        cases = tuple(sorted(self.rows))
        table = ClassTable(self.names, cases, np.stack([self.rows[name] for name in cases]))
        write_text(self.folder / TABLE, table.text())


@dataclass(frozen=True)
class ExplanationRequest:
    """How it is shown where the first run sees the class of a case; ``way``: of its networks, "" for the usual one."""

    draw: Draw
    way: str = ""

    def for_nets(self, nets: Sequence[Network]) -> "ExplanationRequest":
        """Returns it with the way by its name; raises ValueError for one that networks do not have."""
        return replace(self, way=cast(Classifier, nets[0]).known_way(self.way))


def predict_classes(
    request: Request, members: Sequence[EnsembleMember], mesh: Mesh, explained: ExplanationRequest | None = None
) -> list[str]:
    """Predicts the requested cases that are not done yet; returns what went wrong, a line per fault, on all ranks.

    - ``members``: the runs; of several, the probabilities are averaged
    - ``explained``: how it is shown where a class is seen; None: that is not asked for
    """
    predictors = [
        Predictor(member.run, member.run.load_nets(member.weights, mesh, request.mode), member.settings, mesh)
        for member in members
    ]
    explained = explained and explained.for_nets(predictors[0].nets)
    run = members[0].run
    table = PredictionTable(request.output, run.outputs)
    record = _record(members, explained.way if explained else "")
    plan = run_on_rank0(lambda: _plan(table, request, record, run), mesh.world)
    cases = [Case(name, tuple(map(Path, images))) for name, images in plan["cases"]]
    faults, shown = list[str](plan["faults"]), CaseProgress(cases, mesh.is_first)
    shown.say(f"predicting the classes of {len(cases)} cases: {', '.join(run.outputs)}; {mesh.world.size} ranks")
    for fault in faults:
        shown.complain(fault)
    prepared_cases = PreparedCases(cases, [member.run.preparation for member in members], False)
    with closing(shown):
        for number, case in enumerate(cases):
            began = time.perf_counter()
            shown.begin(number)
            try:
                probabilities = _predict_case(predictors, prepared_cases, number, table, explained)
            except ValueError as error:
                if isinstance(error, DataError) and error.path == str(request.output):
                    raise
                faults.append(str(error) if isinstance(error, DataError) else f"{case.id}: {error}")
                shown.complain(faults[-1])
                continue
            sure = ", ".join(f"{name} {p:.3f}" for name, p in zip(run.outputs, probabilities.tolist()))
            shown.say(f"{case.id}: {sure}, {time.perf_counter() - began:.1f} s")
    failed = f", faults {len(faults)}" if faults else ""
    shown.say(f"cases {len(cases)}{failed}: {request.output / TABLE}")
    shown.say(f"next: {next_command('evaluate', 'TRUTH', request.output)}  (TRUTH: the data set with labels.csv)")
    return faults


def _record(members: Sequence[EnsembleMember], way: str) -> dict[str, Any]:
    """Returns the content of prediction.json: all that the predictions depend on, and how they are explained."""
    runs = [
        {
            "run": str(member.run.path.absolute()),
            "weights": {str(path): digest(path) for path in member.weights},
            "precision": asdict(member.settings)["precision"],
        }
        for member in members
    ]
    return {"task": "classify", "runs": runs, "explained": way}


def _plan(table: PredictionTable, request: Request, record: dict[str, Any], run: TrainedRun) -> dict[str, Any]:
    """Opens the folder; returns the cases to predict and what is wrong with others, as JSON."""
    cases, faults = find_inputs(request.inputs, run.recipe.modalities)
    wanted = [case for case in cases if request.only is None or case.id in request.only]
    left = table.open(wanted, record, request.resume)
    return {"cases": [[case.id, list(map(str, case.images))] for case in left], "faults": list(map(str, faults))}


def _predict_case(
    predictors: Sequence[Predictor],
    prepared_cases: PreparedCases,
    number: int,
    table: PredictionTable,
    explained: ExplanationRequest | None,
) -> Tensor:
    """Returns the probabilities ``k`` of a case, after writing them; what fails on one rank is raised on all."""
    mesh, taken = predictors[0].mesh, list[Prepared]()

    def take(at: int) -> Prepared:
        if not taken:
            taken.extend(prepared_cases.take(number))
        return taken[at]

    means, images = list[Tensor](), list[Image]()
    for at, predictor in enumerate(predictors):
        image, _, _ = predictor.distribute(lambda at=at: take(at))  # type: ignore[misc]
        images.append(image)
        means.append(class_logits(predictor.nets, image, mesh.device, predictor.settings.precision).softmax(0))
    probabilities, seen = torch.stack(means).mean(0).cpu(), np.zeros(0)
    if explained:
        own, first = int(probabilities.argmax()), predictors[0]
        seen = explain(first.nets, images[0], own, mesh.device, first.settings.precision, explained.way)
    name = prepared_cases.cases[number].id

    def write() -> None:
        if explained:
            _write_map(predictors[0].run, taken[0], seen, table, name, probabilities, explained.draw)
        table.add(name, probabilities.numpy())

    run_on_rank0(write, mesh.world)
    return probabilities


def _write_map(
    run: TrainedRun,
    prepared: Prepared,
    seen: np.ndarray,
    table: PredictionTable,
    name: str,
    probabilities: Tensor,
    draw: Draw,
) -> None:
    """Writes where a class is seen, in the source's geometry, and a picture of it over the first modality."""
    folder, properties = table.folder / EXPLANATIONS, prepared.properties
    number = int(probabilities.argmax())
    try:
        folder.mkdir(exist_ok=True)
        source = run.preparation.channel_to_source(seen, properties)
        write_volume(folder / f"{name}.nii.gz", source, properties.geometry, np.float32)
        title = f"{name}: {table.names[number]} {probabilities[number]:.2f}"
        draw(folder / f"{name}.png", title, prepared.image[0], seen, properties.spacing)
    except OSError as error:
        raise unwritable(table.folder, error) from error
