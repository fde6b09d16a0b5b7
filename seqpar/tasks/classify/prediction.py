"""Gives each case a class.

FOLDER/predictions.csv        written anew after each case, whole
FOLDER/explanations/…         CASE.nii.gz and CASE.png, on request
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from seqpar.data.errors import DataError
from seqpar.data.files import write_text
from seqpar.data.formats.dataset import Case
from seqpar.data.phantom.phantom_files import GENERATED, is_generated
from seqpar.data.volumes import write_volume
from seqpar.data.workers import ReportProgress
from seqpar.models.classifier import Classifier
from seqpar.parallel.consensus import run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.case_stream import CasePrediction, Request, record_of_weights
from seqpar.prediction.prediction_folder import PredictionFolder, is_whole
from seqpar.prediction.run_average import EnsembleMember
from seqpar.prediction.sliding_window import Image
from seqpar.report.cautions import may_be_chance, steps_behind
from seqpar.report.pictures import MAPS, draw_evidence, with_maximum
from seqpar.report.planes import slices_of
from seqpar.report.plots import name_of_run
from seqpar.report.record import read_record
from seqpar.runs.archive import is_archive, read_caution
from seqpar.tasks.classify.explanation import class_logits, explain
from seqpar.tasks.classify.scores import (
    EXPLANATIONS,
    TABLE,
    ClassTable,
    Place,
    place_of_maximum,
    read_class_table,
    row_stamps,
    what_maps_share,
)
from seqpar.text import quantity


class PredictionTable(PredictionFolder):
    """The folder of a table with the probabilities of the cases so far.

    - ``names``: of the classes
    - ``explains``: whether maps and pictures of where a class is seen are written too
    """

    def __init__(self, folder: Path, names: tuple[str, ...], explains: bool = False) -> None:
        super().__init__(folder)
        self.path, self.names, self.explains, self.rows = folder / TABLE, names, explains, dict[str, np.ndarray]()
        self._there = b""  # the table as it was read or written last

    def files_of(self, cases: Sequence[Case]) -> list[Path]:
        explained = cases if self.explains else ()
        return [self.path, *(path for case in explained for path in self.explanation_paths(case))]

    def must_stay(self, previous: Mapping[str, Any], record: Mapping[str, Any], listed: frozenset[str]) -> bool:
        """A table and its explanations are of one network alone; explanations may join a table that has none."""
        if dict(previous) in (record, {**record, "explained": ""}):
            return False
        files = (self.folder / name for name in listed if name == TABLE or name.startswith(f"{EXPLANATIONS}/"))
        return any(path.is_file() and path.stat().st_size for path in files)

    def unfinished(self, cases: Sequence[Case], kept: frozenset[str]) -> list[Case]:
        """Also keeps the lines of other cases."""
        finished, others = set[str](), tuple[str, ...]()
        if self.path.is_file() and self.path.stat().st_size:  # an emptied one has nothing to keep
            whole = {case.id for case in cases if not self.explains or all(map(is_whole, self.explanation_paths(case)))}
            table, cut = read_class_table(self.path, may_be_cut=True), set[str]()
            self._there = self.path.read_bytes()
            if not self._there.endswith(b"\n") and self._is_cut(table.cases[-1]):  # maybe within a number
                cut = {case.id for case in cases} & {*table.cases[-1:]}
            if {*table.names} != {*self.names}:
                raise DataError(
                    self.path, f"has the classes {', '.join(table.names)}, and the network {', '.join(self.names)}; "
                    "choose another --output"
                )  # fmt: skip
            order, others = [table.names.index(name) for name in self.names], table.others
            self.rows = {case: row[order] for case, row in zip(table.cases, table.probabilities) if case not in cut}
            finished = {*kept} & whole & self.rows.keys()
        left = [case for case in cases if case.id not in finished]
        if left and others:
            raise DataError(
                self.path, f"has columns that predict did not write and would remove ({', '.join(others)}); move them "
                "to another file, or choose another --output"
            )  # fmt: skip
        return left

    def _is_cut(self, case: str) -> bool:
        """Returns whether the last row may be cut off: it is shorter than the one that was written, as far as known."""
        now, known = row_stamps(self._there.decode("utf-8-sig"))[case], self._maps.get(case)
        return not isinstance(known, list) or now[:1] < known[:1]

    def holds(self, case: Case) -> bool:
        return case.id in self.rows

    def stamp_of(self, case: Case) -> list[Any] | None:
        row = self.rows.get(case.id)
        return None if row is None else row_stamps(ClassTable(self.names, (case.id,), row[None]).text())[case.id]

    def explanation_paths(self, case: Case) -> tuple[Path, Path]:
        """Returns the map and the picture of where a case's class is seen."""
        folder = self.folder / EXPLANATIONS
        return folder / f"{case.id}.nii.gz", folder / f"{case.id}.png"

    def add(self, case: Case, probabilities: np.ndarray) -> None:
        """Writes the table with one more case; raises DataError if somebody has changed it meanwhile."""
        if self.path.is_file() and self.path.read_bytes() != self._there:
            told = "has changed while predict was at work, and would be replaced; move it elsewhere"
            raise DataError(self.path, f"{told}, or choose another --output")
        self.rows[case.id] = probabilities
        with self.writable():
            self._write()
            self.record_written(case)

    def _write(self) -> None:
        cases = tuple(sorted(self.rows))
        table = ClassTable(self.names, cases, np.stack([self.rows[name] for name in cases]))
        write_text(self.path, table.text())
        self._there = self.path.read_bytes()


class ClassPrediction(CasePrediction):
    """Writes the probability of each class for each case, the mean of all runs, and where the first run sees it."""

    what = "classes"
    truth = "the data set with labels.csv"
    page = "scores and cases on one page"
    folder: PredictionTable

    def __init__(self, request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> None:
        super().__init__(request, members, mesh)
        self.way = ""  # in which an explanation is found
        self.places = dict[str, Place]()  # of the maxima of explanations
        if request.explain_by is not None:
            self.way = cast(Classifier, self.predictors[0].nets[0]).known_way(request.explain_by)
        self.folder = PredictionTable(request.output, self.run.outputs, bool(self.way))

    def record(self) -> dict[str, Any]:
        runs = [record_of_weights(member) | {"precision": member.settings.precision} for member in self.members]
        return {"task": "classify", "runs": runs, "explained": self.way}

    def announce(self, cases: str) -> None:
        ranks, names = quantity(self.mesh.world.size, "rank"), ", ".join(self.run.outputs)
        self.shown.say(f"predicting the classes of {cases} ({names}) with {self.weights_line}; {ranks}")

    def report_flags(self) -> list[str]:
        return ["--truth", "TRUTH"]

    def other_files(self) -> list[str]:
        lines = [f"maps of the evidence, with pictures: {self.folder.folder / EXPLANATIONS}"] if self.way else []
        given = {case: self.run.outputs[int(row.argmax())] for case, row in self.folder.rows.items()}
        if shared := what_maps_share(self.places, given):
            lines.append(f"warning: {shared}")
        for member in self.members:
            path, steps = member.run.path, steps_behind({"weights": {str(file): "" for file in member.weights}})
            with suppress(DataError):  # its scores may be gone
                record = None if is_archive(path) else read_record(path)
                other = next((step for step in steps if record and step != record.weights.step), None)
                caution = read_caution(path) if record is None else may_be_chance(record, other)
                lines += [f"warning: {path}: {caution}"] if caution else []
        return lines

    def predict_case(self, number: int, case: Case, tell: ReportProgress) -> str:
        every, images = list[Tensor](), list[Image]()
        for predictor, image, _ in self.distribute(number):
            images.append(image)
            logits = class_logits(predictor.nets, image, self.mesh.device, predictor.settings.precision)
            every.append(logits.softmax(0))
        probabilities = torch.stack(every).mean(0).cpu()
        seen: tuple[np.ndarray, tuple[float, ...]] | None = None
        if self.way:
            first, own = self.predictors[0], int(probabilities.argmax())
            seen = explain(first.nets, images[0], own, self.mesh.device, first.settings.precision, self.way)

        def write() -> None:
            if seen is not None:
                self._write_explanation(case, *seen, probabilities)
            self.folder.add(case, probabilities.numpy())

        run_on_rank0(write, self.mesh.world)
        return ", ".join(f"{name} {p:.3f}" for name, p in zip(self.run.outputs, probabilities.tolist()))

    def _write_explanation(self, case: Case, seen: np.ndarray, step: Sequence[float], probabilities: Tensor) -> None:
        """Writes where a class is seen, in the source's geometry, and a picture of it over the first modality."""
        prepared, number = self.prepared_cases.taken[0], int(probabilities.argmax())
        properties, (map_path, picture_path) = prepared.properties, self.folder.explanation_paths(case)
        title = f"{case.id}: predicted {self.run.outputs[number]} (probability {probabilities[number]:.3f})"
        several = f"{len(self.members)} runs, with the map of the first"
        title += f" by {name_of_run(self.run.path, 'run') if len(self.members) == 1 else several}"
        title += f" {GENERATED}" if is_generated(case.images[0]) else ""
        neurological = self.run.config.neurological
        if (place := place_of_maximum(seen)) is not None:
            self.places[case.id] = place
        with self.folder.writable():
            map_path.parent.mkdir(exist_ok=True)
            source = with_maximum(self.run.preparation.channel_to_source(seen, properties), seen.max())
            write_volume(map_path, source, properties.geometry, np.float32)
            about = f"{MAPS[self.way]} map for {self.run.outputs[number]}"
            slices = slices_of(properties.geometry, properties.box, properties.shape)
            image = prepared.image[0]
            drawn = image, seen, properties.spacing, slices, neurological, about, step
            draw_evidence(picture_path, title, *drawn)
