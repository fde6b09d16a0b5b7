"""The task of labelling voxels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from seqpar.data.formats.recognise import read_dataset
from seqpar.runs.metrics_tail import SCORES, MetricsTail, what_is_not_found
from seqpar.tasks.task import Task

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

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
    from seqpar.tasks.segment.validation import SegmentationValidation
    from seqpar.tasks.training_data import TrainingData


class Segmentation(Task):
    """Each voxel has a label."""

    name = "segment"
    score = SCORES[name]
    does = "labels voxels, and no whole cases"
    predictions = "label maps"
    idle_flags = {"predict": {"explain": False, "explain_by": ""}}

    def read_dataset(self, path: str) -> Dataset:
        return read_dataset(path)

    def open_data(self, config: Config, is_first: bool) -> TrainingData:
        from seqpar.tasks.segment.data import open_data

        return open_data(config, is_first)

    def read_headers(self, config: Config) -> Fingerprint:
        from seqpar.tasks.segment.data import read_headers

        return read_headers(config)

    def describe(self, fingerprint: Fingerprint, config: Config) -> str:
        from seqpar.tasks.segment.data import describe_data

        return describe_data(fingerprint, config)

    def summary(self, data: TrainingData, config: Config) -> str:
        from seqpar.tasks.segment.data import summary_of_data

        return summary_of_data(data, config)

    def validation(
        self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss, refuse_taken_over: Callable[[], None]
    ) -> SegmentationValidation:
        from seqpar.tasks.segment.validation import SegmentationValidation

        return SegmentationValidation(config, mesh, data, loss.of_pieces(), refuse_taken_over)

    def next_lines(self, out: Path) -> list[str]:
        """Returns the commands that usually follow, after a warning if some classes are not found."""
        rows = [row for row in MetricsTail(out / "metrics.jsonl").read() if row["kind"] == "val"]
        if caution := what_is_not_found(rows):
            from seqpar.report.record import count_present
            from seqpar.runs.run_folder import data_of_run, kind_of_validated, untaught_classes

            data = data_of_run(out)
            kind, untaught = kind_of_validated(data), untaught_classes(data)
            caution = what_is_not_found(rows, count_present(out, rows), kind, untaught)
        return [*([f"warning: {caution}"] if caution else []), *super().next_lines(out)]

    def predict(self, request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> list[str]:
        from seqpar.tasks.segment.prediction import LabelMapPrediction

        return LabelMapPrediction(request, members, mesh).predict()

    def evaluate(self, options: argparse.Namespace) -> int:
        from seqpar.tasks.segment.evaluation import LabelMapEvaluation

        return LabelMapEvaluation(options).run()

    def page(self, options: argparse.Namespace, record: RunRecord) -> FinishedPage:
        from seqpar.tasks.segment.page import segment_page

        return segment_page(options, record)

    def compare(self, records: Mapping[str, RunRecord], gaps: list[str]) -> Comparison:
        from seqpar.report.several_runs import compare_segmentations
        from seqpar.tasks.training_data import sides_of_each

        return replace(compare_segmentations(records, gaps), cautions=sides_of_each(records))
