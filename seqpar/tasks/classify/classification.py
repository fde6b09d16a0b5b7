"""The task of giving each volume a class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from seqpar.data.errors import DataError
from seqpar.data.formats.class_lists import read_class_dataset
from seqpar.runs.metrics_tail import SCORES
from seqpar.tasks.task import Task

if TYPE_CHECKING:
    import argparse

    from seqpar.data.formats.dataset import Dataset
    from seqpar.data.preparation.fingerprint import Fingerprint
    from seqpar.losses import Loss
    from seqpar.parallel.mesh import Mesh
    from seqpar.prediction.case_stream import Request
    from seqpar.prediction.run_average import EnsembleMember
    from seqpar.report.record import RunRecord
    from seqpar.report.run_page import FinishedPage
    from seqpar.report.several_runs import Comparison
    from seqpar.settings.config import Config
    from seqpar.tasks.classify.validation import ClassValidation
    from seqpar.tasks.training_data import TrainingData

_OF_WINDOWS = {"window": None, "force": False, "overlap": None, "weights": None, "window_batch": None, "mirror": None}
_OF_LABEL_MAPS = {
    "probabilities": False,
    "npz": False,
    "dicom_seg": False,
    "statistics": False,
    "uncertainty": False,
    "temperature": None,
    "min_component": "0",
    "postprocessing": None,
}
_OF_VOXEL_SCORES = {
    "dataset": None,
    "regions": None,
    "brats": None,
    "lesion_wise": False,
    "centreline": False,
    "nsd_tolerance": 1.0,
    "empty": "skip",
    "common": False,
    "find_best": None,
    "calibration": False,
}


class Classification(Task):
    """Each volume has a class."""

    name = "classify"
    score = SCORES[name]
    does = "gives each case one class"
    predictions = "classes of cases"
    train_command = ("train", "--task", name)
    idle_flags = {"predict": _OF_WINDOWS | _OF_LABEL_MAPS, "evaluate": _OF_VOXEL_SCORES}

    def read_dataset(self, path: str) -> Dataset:
        return read_class_dataset(path)

    def open_data(self, config: Config, is_first: bool) -> TrainingData:
        from seqpar.tasks.classify.data import open_class_data

        return open_class_data(config, is_first)

    def read_headers(self, config: Config) -> Fingerprint:
        from seqpar.tasks.classify.data import read_class_headers

        return read_class_headers(config)

    def describe(self, fingerprint: Fingerprint, config: Config) -> str:
        from seqpar.tasks.classify.data import describe_classes

        return describe_classes(fingerprint, config)

    def summary(self, data: TrainingData, config: Config) -> str:
        from seqpar.tasks.classify.data import summary_of_classes

        return summary_of_classes(data, config)

    def validation(
        self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss, refuse_taken_over: Callable[[], None]
    ) -> ClassValidation:
        from seqpar.tasks.classify.validation import ClassValidation

        return ClassValidation(config, mesh, data, loss, refuse_taken_over)

    def fold_numbers(self, data: str) -> Sequence[int]:
        """Returns the folds in the table, or those computed from subjects."""
        from seqpar.data.formats.splits import numbered_splits

        classes = read_class_dataset(data).volume_classes
        assert classes is not None
        return list(numbered_splits(classes, by_patient=False))

    def with_tile(self, config: Config, source: Fingerprint | TrainingData) -> Config:
        """Returns the config with a tile that holds every case."""
        from seqpar.data.preparation.fingerprint import Fingerprint
        from seqpar.data.preparation.recipe import PrepareSettings
        from seqpar.tasks.classify.data import with_tile

        if isinstance(source, Fingerprint):
            return with_tile(config, source.largest(PrepareSettings.spaced(config.spacing).spacing))
        return replace(config, tile=source.tiles.tile_size)

    def tile_advice(
        self, config: Config, flags: Collection[str], preset: str, source: Fingerprint | TrainingData
    ) -> str:
        return ""  # a tile is a whole case

    def caution(self, run: Path) -> str:
        """Returns a sentence if nothing shows that the network has learned."""
        from seqpar.report.cautions import may_be_chance
        from seqpar.report.record import read_record
        from seqpar.runs.archive import is_archive, read_caution

        return read_caution(run) if is_archive(run) else may_be_chance(read_record(run))

    def next_lines(self, out: Path) -> list[str]:
        """Returns the commands that usually follow, after a warning if nothing shows that the network has learned."""
        caution = self.caution(out)
        return [*([f"warning: {caution}"] if caution else []), *super().next_lines(out)]

    def predict(self, request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> list[str]:
        from seqpar.tasks.classify.prediction import ClassPrediction

        return ClassPrediction(request, members, mesh).predict()

    def has_predictions(self, path: Path) -> bool:
        from seqpar.scores.label_files import list_label_files
        from seqpar.tasks.classify.scores import find_table

        table = find_table(path)
        if table is not None and path.is_dir() and any(map(list_label_files, (path, table.parent))):
            raise DataError(
                path, f"holds label maps and {table.name}: name {table} to score the classes, or move it elsewhere to "
                "score the label maps"
            )  # fmt: skip
        return table is not None

    def evaluate(self, options: argparse.Namespace) -> int:
        from seqpar.tasks.classify.evaluation import ClassEvaluation

        self.refuse_idle_flags("evaluate", options, "the predictions are classes, not label maps")
        return ClassEvaluation(options).run()

    def page(self, options: argparse.Namespace, record: RunRecord) -> FinishedPage:
        from seqpar.tasks.classify.page import class_page

        return class_page(options, record)

    def compare(self, records: Mapping[str, RunRecord], gaps: list[str]) -> Comparison:
        from seqpar.report.cautions import may_be_chance
        from seqpar.report.several_runs import read_all
        from seqpar.tasks.classify.evaluation import compare_classifiers, guessed_by_each
        from seqpar.tasks.classify.page import read_class_scores
        from seqpar.tasks.training_data import sides_of_each

        scored = read_all(records, read_class_scores, gaps)
        guessed = guessed_by_each(scored, [name for name, record in records.items() if may_be_chance(record)])
        return replace(compare_classifiers(scored), cautions=[*guessed, *sides_of_each(records)])
