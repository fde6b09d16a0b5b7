"""Validation in training: whole held-out volumes by sliding window, with the code that predicts and evaluates."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqpar.collectives import all_reduce
from seqpar.data.preparation.cache import PreparedCase
from seqpar.data.workers import Tell
from seqpar.launch.evaluation.scores import Scores, score, summarise
from seqpar.launch.inference.logits_to_labels import to_labels
from seqpar.launch.inference.sliding_window import join_rows, sliding_window
from seqpar.launch.inference.windows import Sliding
from seqpar.launch.job.display import bar, clock
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.runs.journal import Journal
from seqpar.launch.settings.config import Config
from seqpar.launch.training.data import TrainingData
from seqpar.launch.training.pictures import PicturedCase, draw_cases
from seqpar.launch.training.planes import favourite
from seqpar.launch.training.validation_folder import ValidationFolder, label_files
from seqpar.losses import Loss, LossParts
from seqpar.mesh import Mesh

NUM_PICTURED = 3  # cases in validation.png


@dataclass(frozen=True)
class ValidationResult:
    """The row of metrics.jsonl, the printed table, and the score by which the best checkpoint is kept."""

    row: dict[str, Any]
    text: str
    score: float


class Validation:
    """Loss and Dice per class and region on held-out cases; the same on all ranks."""

    def __init__(self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss) -> None:
        self.config, self.mesh, self.data, self.loss = config, mesh, data, loss
        self.ids = data.held_out_ids[: config.val_cases or None]
        self._is_explained = False  # whether a table has said what its columns mean

    def run(
        self, net: SegmentationNet, journal: Journal, stopper: Stopper, keep: bool = False
    ) -> ValidationResult | None:
        """Returns the result, None where all ranks leave before its end; ``keep``: writes RUN/validation too."""
        out, dataset = journal.path.parent, self.data.dataset
        shown = dataset.modalities.index(favourite(dataset.modalities))
        net.eval()
        folder = self._folder(out) if keep and self.mesh.is_first else None
        scores: list[Scores] = []
        losses: list[LossParts] = []
        pictured: list[PicturedCase] = []
        began = time.monotonic()
        for number, name in enumerate(self.ids):
            case = dataset.cases[name]
            prediction = self._predict(net, case, stopper, self._progress(journal, number, began))
            if prediction is None:
                net.train()
                return None
            ids, parts = prediction
            losses.append(parts)
            if folder:
                folder.add(case, ids, dataset.annotated.get(name))
            truth, spacing = np.asarray(case.label), case.properties.spacing
            known: dict[str, Any] = {"ignore": dataset.ignore_label, "hidden": self.data.hidden_classes(name)}
            scores.append(score(truth, ids, self.data.classes, spacing, **known, surfaces=False))
            if self.mesh.is_first and len(pictured) < NUM_PICTURED:
                pictured.append(PicturedCase(name, np.asarray(case.image[shown]), truth, ids, spacing))
        net.train()
        classes = [name for name, value in dataset.labels.items() if value]
        picture = out / "validation.png"
        journal.attempt(lambda: draw_cases(picture, pictured, classes, self.config.neurological))
        result = self._summary(scores, losses)
        return replace(result, text="\n".join([result.text, *folder.close()])) if folder else result

    def _folder(self, out: Path) -> ValidationFolder:
        return ValidationFolder(
            out / "validation", self.data.describe(), lambda: label_files(self.config), self.config.steps
        )

    def _progress(self, journal: Journal, number: int, began: float) -> Tell:
        """Returns a function that shows which share of case ``number`` is done; ``began``: when the first one began."""

        def tell(share: float) -> None:
            done, total = number + share, len(self.ids)
            left = f"{clock((time.monotonic() - began) / done * (total - done))} left" if done else "? left"
            journal.progress([f"validating case {number + 1}/{total} {bar(share)} {share:.0%}", left])

        tell(0.0)
        return tell

    def _predict(
        self, net: SegmentationNet, case: PreparedCase, stopper: Stopper, tell: Tell
    ) -> tuple[np.ndarray, LossParts] | None:
        """Returns the class ids of a case and its loss, None where all ranks leave before its end."""
        sliding = Sliding(self.config.tile, self.config.val_overlap)
        order = self.data.dataset.regions_class_order if self.data.regions else ()
        annotated = self.data.annotated([case.id])
        annotated = None if annotated is None else annotated.to(self.mesh.device)
        sums, rows = torch.zeros((), dtype=torch.float64, device=self.mesh.device), list[torch.Tensor]()
        for slab in sliding_window([net], case.image, sliding, self.mesh, tell):
            if stopper.should_leave():
                return None
            low, high = slab.bounds[self.mesh.world.index : self.mesh.world.index + 2]
            truth = torch.from_numpy(np.array(case.label[low:high])).to(self.mesh.device)
            sums = sums + self.loss.sums(slab.logits[None], truth[None], annotated)
            ids = to_labels(slab.logits, order)
            rows.append(join_rows(ids.to(torch.int16), slab.bounds, self.mesh))
        parts = self.loss.of_sums(all_reduce(sums, self.mesh.world), annotated)
        return torch.cat(rows).numpy(), parts

    def _summary(self, scores: Sequence[Scores], losses: Sequence[LossParts]) -> ValidationResult:
        summary = summarise(scores)
        dice = {name: _nan_to_none(mean["Dice"]) for name, mean in summary["mean"].items()}
        global_dice = {name: _nan_to_none(pooled["Dice"]) for name, pooled in summary["global"].items()}
        terms = {name: float(torch.stack([one.terms[name] for one in losses]).mean()) for name in self.loss.weights}
        row = {
            "loss": self.loss.weighted(terms),
            **{f"{name}_loss": value for name, value in terms.items()},
            "dice": dice,
            "global_dice": global_dice,
            "cases": len(scores),
        }
        known = [value for value in dice.values() if value is not None]
        width = max(len(name) for name in dice)
        lines = [f"validation on {len(scores)} held-out cases: loss {row['loss']:.4f}"]
        lines.append(f"  {'class':{width}}  Dice  global")
        lines += [f"  {name:{width}}  {_cell(dice[name])}  {_cell(global_dice[name])}" for name in dice]
        if not self._is_explained:
            lines.append("  (Dice: mean over cases; global: of the voxels of all cases together)")
            self._is_explained = True
        return ValidationResult(row, "\n".join(lines), sum(known) / len(known) if known else 0.0)


def _nan_to_none(value: float) -> float | None:
    """Returns None, which JSON knows, for NaN: no case has the class."""
    return None if np.isnan(value) else float(value)


def _cell(value: float | None) -> str:
    return " –   " if value is None else f"{value:.3f}"
