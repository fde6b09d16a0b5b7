"""Validation of a classifier in training: each held-out volume in one pass, by the code of predict.

Legend: n cases, k classes.
"""

import math

import torch
from torch import Tensor

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import VolumeClasses
from seqpar.models.network import Network
from seqpar.parallel.collectives import all_reduce
from seqpar.report.pictures import draw_scores
from seqpar.runs.journal import Journal
from seqpar.runs.run_folder import origin_mark
from seqpar.scores.summary_files import write_output
from seqpar.tasks.case_validation import CaseValidation, ValidationResult, when_validated
from seqpar.tasks.classify.data import ClassData
from seqpar.tasks.classify.explanation import class_logits
from seqpar.tasks.classify.scores import ROWS, TABLE, ClassTable, as_json, class_lines, class_summary, row_stamps


class ClassValidation(CaseValidation):
    """Loss and scores of held-out cases; the same on all ranks. Sequence groups take cases in turn."""

    _is_explained = False  # whether scores have said what is in brackets

    @property
    def classes(self) -> VolumeClasses:
        assert isinstance(self.data, ClassData)
        return self.data.volume_classes

    def run(self, net: Network, journal: Journal, stopper: StopRequest, keep: bool = False) -> ValidationResult | None:
        """Returns the result, None where all ranks leave before its end; ``keep``: writes RUN/validation too."""
        net.eval()
        logits = self._logits(net, journal, stopper)
        net.train()
        if logits is None:
            return None
        self.refuse_taken_over()
        classes = self.classes
        numbers = [classes.numbers[name] for name in self.ids]
        table = ClassTable(classes.names, self.ids, logits.softmax(1).numpy())
        folder = journal.path.parent / "validation"
        summary = class_summary(table, {name: classes.names[n] for name, n in zip(self.ids, numbers)}, folder / TABLE)
        parts = self.loss.parts(logits[:, :, None, None, None], torch.tensor(numbers)[:, None, None, None])
        scores = {name: None if math.isnan(value) else value for name, value in summary["scores"].items()}
        row = {
            "loss": float(parts.total),
            **{f"{name}_loss": float(value) for name, value in parts.terms.items()},
            "scores": scores,
            "cases": len(self.ids),
        }
        lines = [
            f"validation on {self.counted}: loss {row['loss']:.4f}",
            *class_lines(summary),
            *["  (in brackets: 95 % confidence intervals)"] * (not self._is_explained),
        ]
        self._is_explained = True
        if keep and self.mesh.is_first:
            summary |= {"step": journal.steps_done, "run_data": self.data.dataset.name}
            summary |= {ROWS: row_stamps(table.text())} | origin_mark(folder.parent)
            try:
                write_output(folder / TABLE, table.text())
                write_output(folder / "summary.json", as_json(summary))
            except DataError as error:
                lines.append(f"warning: {error}")
        picture = journal.path.parent / "validation.png"
        journal.draw(lambda: draw_scores(picture, summary, when_validated(journal, row)))
        best = summary["scores"]["balanced accuracy"]
        return ValidationResult(row, "\n".join(lines), best, {})

    def _logits(self, net: Network, journal: Journal, stopper: StopRequest) -> Tensor | None:
        """Returns the logits ``n k`` of all cases, float64, None where all ranks leave before the last one."""
        data, device = self.mesh.data, self.mesh.device
        table = torch.zeros(len(self.ids), len(self.data.output_names), dtype=torch.float64, device=device)
        for first in self.turns(journal, stopper):
            if first is None:
                return None
            if first + data.index < len(self.ids):
                case = self.data.dataset.cases[self.ids[first + data.index]]
                table[first + data.index] = class_logits([net], case.image, device, self.config.precision)
        return all_reduce(table, data).cpu()
