"""Predicts case after case: the next one is prepared while this one is predicted and written."""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from seqpar.cluster.torch_setup import keep_memory
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.recognise import find_inputs
from seqpar.data.preparation.prepared_case import Preparation, Prepared, TargetGrid, load_case
from seqpar.data.volumes import join_digests
from seqpar.data.workers import ReportProgress, no_item_progress
from seqpar.parallel.consensus import run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.class_statistics import NAME as STATISTICS
from seqpar.prediction.prediction_folder import PredictionFolder
from seqpar.prediction.predictor import Predictor
from seqpar.prediction.run_average import EnsembleMember
from seqpar.prediction.sliding_window import Image
from seqpar.report.images import other_voxels, spacings_of
from seqpar.report.record import mixed_line, read_record
from seqpar.runs.run_folder import holds_run
from seqpar.terminal import Display, bar, next_command
from seqpar.text import clock, in_flags, quantity
from seqpar.weights.weight_files import digest, shorten_list

MOST_LABELS = 32  # values that tell a label map from an image of few greys


@dataclass(frozen=True)
class Request:
    """Which cases to predict, and where to write the predictions.

    - ``inputs``: a data set, a folder or list of images, or files
    - ``mode``: how ranks decode a window that they share; "": as the run decides
    - ``probabilities``, ``npz``, ``statistics``: also write each output's probabilities, in volumes or for nnU-Net's
      ensemble, and statistics.csv
    - ``dicom_seg``: also write a DICOM segmentation of each case
    - ``uncertainty``: also write maps of the entropy and, of several runs, of their disagreement
    - ``explain_by``: also write where a class is seen, and how to find it, "" for the network's default; None: no
    - ``resume``: skip the cases that are already predicted and whose images have not changed
    - ``only``: the cases to predict; None for all
    """

    inputs: tuple[str, ...]
    output: Path
    mode: str = ""
    probabilities: bool = False
    npz: bool = False
    dicom_seg: bool = False
    statistics: bool = False
    uncertainty: bool = False
    explain_by: str | None = None
    resume: bool = False
    only: frozenset[str] | None = None


def record_of_weights(member: EnsembleMember) -> dict[str, Any]:
    """Returns what prediction.json says about a run and its weights."""
    weights = {str(path.absolute()): digest(path) for path in member.weights}
    return {"run": str(member.run.path.absolute()), "weights": weights}


class PreparedCases:
    """The cases, each prepared in a thread while the network is busy with the one before; for the first rank.

    - ``preparations``: each run's; runs that prepare alike share a prepared case
    - ``taken``: the case that was taken last, as each run takes it
    - ``image``: of that case, canonical ``c W D H`` in the files' numbers, if images are kept
    - ``is_like_labels``: whether that case's files could be label maps of the runs' labels by their values
    """

    def __init__(self, cases: Sequence[Case], preparations: Sequence[Preparation], keep_images: bool) -> None:
        self.cases, self.preparations, self.keep_images = cases, preparations, keep_images
        self.taken, self.image, self.is_like_labels = list[Prepared](), cast(np.ndarray | None, None), False
        self._pool = ThreadPoolExecutor(1)
        self._started: dict[int, Future[tuple[list[Prepared], np.ndarray | None, bool]]] = {}

    def take(self, number: int) -> list[Prepared]:
        """Returns the case with that number as each run takes it, once it is prepared, and starts on the next one."""
        for index in range(number, min(number + 2, len(self.cases))):
            if index not in self._started:
                self._started[index] = self._pool.submit(self._prepare, self.cases[index])
        self.taken, self.image, self.is_like_labels = self._started.pop(number).result()
        return self.taken

    def _prepare(self, case: Case) -> tuple[list[Prepared], np.ndarray | None, bool]:
        loaded = load_case(case, self.preparations[0].recipe)
        distinct = list[tuple[Preparation, Prepared]]()
        for preparation in self.preparations:
            if all(preparation != known for known, _ in distinct):
                distinct.append((preparation, preparation.prepare(loaded, case)))
        prepared = [next(one for known, one in distinct if known == own) for own in self.preparations]
        is_like_labels = _is_like_labels(loaded.image, self.preparations[0].recipe.values)
        return prepared, loaded.image if self.keep_images else None, is_like_labels


def _is_like_labels(image: np.ndarray, values: Collection[int]) -> bool:
    """Returns whether an image has several values, but few, and all of them labels."""
    some = np.unique(image[:, ::8, ::8, ::8])  # of most images, these few voxels tell
    if len(some) > MOST_LABELS or not np.isin(some, [*values]).all() or image.min() == image.max():
        return False
    found = np.zeros(image.shape, bool)
    for value in values:
        found |= image == value
    return bool(found.all())


class CaseProgress:
    """Shows which case is predicted, which share of it is done, and how long all of them still take.

    ``active``: whether this rank speaks.
    """

    def __init__(self, cases: Sequence[Case], active: bool) -> None:
        self.cases, self.active = cases, active
        self._display, self._began = Display("stdout"), time.perf_counter()

    def begin(self, number: int) -> ReportProgress:
        """Returns a function that shows which share of case ``number`` is done."""
        if not self.active:
            return no_item_progress

        def tell(share: float) -> None:
            spent, done, total = time.perf_counter() - self._began, number + share, len(self.cases)
            left = f"{clock(spent / done * (total - done))} left" if done else "? left"
            self._display.show(
                [f"case {number + 1}/{total} {bar(share)} {share:.0%} of it", left, self.cases[number].id]
            )

        tell(0.0)
        return tell

    def say(self, text: str) -> None:
        """Prints text on lines of its own."""
        if self.active:
            self._display.say(text)

    def complain(self, text: str) -> None:
        """Prints an error to stderr."""
        if self.active:
            self._display.say(f"error: {in_flags(text)}", "stderr")

    def warn(self, text: str) -> None:
        """Prints a warning to stderr."""
        if self.active:
            self._display.say(f"warning: {text}", "stderr")

    def close(self) -> None:
        """Ends what is shown."""
        self._display.close()


class CasePrediction(ABC):
    """Predicts the requested cases that are not done yet. A task adds what becomes of a case.

    A case that fails does not stop the others; a folder that cannot be written to does. All ranks call every method,
    except ``record``.

    - ``members``: the runs; tasks average the probabilities of several
    - ``what``: what is written, in words
    - ``truth``: what ``evaluate`` compares it with, in words
    - ``page``: what ``report`` shows of it, in words
    """

    what: str
    truth: str
    page: str
    folder: PredictionFolder
    shown: CaseProgress
    prepared_cases: PreparedCases

    def __init__(self, request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> None:
        self.request, self.members, self.mesh, self.run = request, members, mesh, members[0].run
        if mesh.device.type == "cpu":
            keep_memory()
        self.predictors = [
            Predictor(member.run, member.run.load_nets(member.weights, mesh, request.mode), member.settings, mesh)
            for member in members
        ]

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Returns the content of prediction.json: all that the predictions depend on. The first rank calls it."""

    @abstractmethod
    def announce(self, cases: str) -> None:
        """Says what begins; ``cases``: how many cases, in words."""

    @abstractmethod
    def predict_case(self, number: int, case: Case, tell: ReportProgress) -> str:
        """Predicts one case and writes its files; returns what to say about it.

        What fails on one rank is raised on all. ``tell`` takes the share that is done.
        """

    @property
    def weights_line(self) -> str:
        """The files of weights, and of how many runs the mean is, in words."""
        files = ", ".join(str(path) for member in self.members for path in member.weights)
        return files + (f", the mean of {len(self.members)} runs" if len(self.members) > 1 else "")

    def predict(self) -> list[str]:
        """Predicts the cases; returns what went wrong, a line per fault, on all ranks."""
        with closing(self.folder):
            return self._predict()

    def _predict(self) -> list[str]:
        # Only the first rank reads the inputs and the folder; the others get the cases from it.
        plan = run_on_rank0(self._plan, self.mesh.world)
        cases = [Case(name, tuple(map(Path, images))) for name, images in plan["cases"]]
        faults: list[str] = list(plan["faults"])
        self.shown = CaseProgress(cases, self.mesh.is_first)
        preparations = [member.run.preparation for member in self.members]
        self.prepared_cases = PreparedCases(cases, preparations, self.request.statistics)
        done = f" ({plan['num_done']} are done)" if plan["num_done"] else ""
        if cases or not faults:  # else the faults say it all
            self.announce(f"{quantity(len(cases), 'case')}{done}")
        if plan["changed"]:
            self.shown.say(f"predicted again, since their images have changed: {', '.join(plan['changed'])}")
        if plan["replaced"]:
            self.shown.say(f"replacing what {self.request.output} holds of {shorten_list(plan['replaced'], 3)}")
            if (scores := self.request.output / "summary.json").is_file():
                self.shown.say(f"the scores in {scores} are of what was there before: evaluate again")
        if plan["others"]:
            self.shown.say(mixed_line(self.request.output, plan["others"]))
        for warning in plan["warnings"]:
            self.shown.warn(warning)
        for fault in faults:
            self.shown.complain(fault)
        predicted = 0
        with closing(self.shown):
            for number, case in enumerate(cases):
                began = time.perf_counter()
                try:
                    line = self.predict_case(number, case, self.shown.begin(number))
                except ValueError as error:
                    if isinstance(error, DataError) and error.path == str(self.request.output):
                        raise
                    faults.append(str(error) if isinstance(error, DataError) else f"{case.id}: {error}")
                    self.shown.complain(faults[-1])
                    continue
                predicted += 1
                self.shown.say(f"{case.id}: {line}, {time.perf_counter() - began:.1f} s")
        if self.mesh.is_first and (stay := self.folder.not_replaced):
            self.shown.say(mixed_line(self.request.output, stay))
        failed = f", {quantity(len(faults), 'fault')}" if faults else ""
        where = f": {self.folder.path}" if self.folder.path.exists() else ""
        self.shown.say(f"{self.what} of {quantity(predicted, 'case')}{failed}{where}")
        for line in (*self.other_files(), *self._next_lines()) if predicted else ():
            self.shown.say(line)
        return faults

    def other_files(self) -> list[str]:
        """Returns a line on each other kind of file that is written, and where."""
        return [f"statistics: {self.request.output / STATISTICS}"] if self.request.statistics else []

    def _next_lines(self) -> list[str]:
        """Returns the commands that usually follow; only a single run folder has a page."""
        lines = [f"next: {next_command('evaluate', 'TRUTH', self.request.output)}  (TRUTH: {self.truth})"]
        if len(self.members) == 1 and holds_run(self.run.path):
            report = next_command("report", self.run.path, "--prediction", self.request.output, *self.report_flags())
            lines.append(f"next: {report}  ({self.page})")
        return lines

    @abstractmethod
    def report_flags(self) -> list[str]:
        """Returns what ``report`` needs to show the predictions, but for their folder."""

    def _plan(self) -> dict[str, Any]:
        """Opens the folder; returns the cases to predict, how many are done, and what is wrong with others, as JSON."""
        cases, faults = find_inputs(self.request.inputs, self.run.recipe.modalities)
        cases = [case for case in cases if self.request.only is None or case.id in self.request.only]
        unusable = self.folder.name_sources(cases)
        cases = [case for case in cases if case.id not in unusable]
        left = self.folder.open(cases, self.record(), self.request.resume)
        return {
            "cases": [[case.id, list(map(str, case.images))] for case in left],
            "num_done": len(cases) - len(left),
            "changed": list(self.folder.changed),
            "replaced": list(self.folder.replaced),
            "others": list(self.folder.others),
            "warnings": [*self._edited(), *self.cautions(), *self._other_voxels(left)],
            "faults": list(map(str, [*faults, *unusable.values()])),
        }

    def cautions(self) -> list[str]:
        """Returns sentences on how the networks predict that a reader should know."""
        return []

    def _edited(self) -> list[str]:
        """Returns a sentence if predictions that are kept were changed by somebody."""
        if not (edited := self.folder.edited):
            return []
        told = f"what {self.request.output} holds of {shorten_list(edited, 3)} has changed since it was predicted"
        return [f"{told}: --continue keeps it"]

    def _other_voxels(self, cases: Sequence[Case]) -> list[str]:
        """Returns a sentence for each run that saw voxels of another size or shape than these cases have."""
        spacings, lines = spacings_of({case.id: case.images[0] for case in cases}), list[str]()
        for path in (member.run.path for member in self.members):
            with suppress(DataError, OSError, ValueError):  # an exported run does not know its cases
                sentence = other_voxels(read_record(path), spacings)
                lines += [f"{path}: {sentence}" if len(self.members) > 1 else sentence] * bool(sentence)
        return lines

    def distribute(self, number: int) -> Iterator[tuple[Predictor, Image, TargetGrid]]:
        """Yields each run's predictor, the case's image ``c W D H`` as that run takes it, and the grid of its crop.

        Runs that prepare alike share an image.
        """
        preparation: Preparation | None = None
        for at, predictor in enumerate(self.predictors):
            if predictor.run.preparation != preparation:
                preparation = predictor.run.preparation
                image, target = predictor.distribute(partial(self._take, number, at))
            yield predictor, image, target

    def _take(self, number: int, at: int) -> Prepared:
        """Returns a case as one of the runs takes it; on the first rank."""
        prepared = (self.prepared_cases.taken if at else self.prepared_cases.take(number))[at]
        self.folder.voxels[self.prepared_cases.cases[number].id] = join_digests(prepared.voxels)
        return prepared
