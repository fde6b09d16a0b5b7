"""Validation in training: whole held-out volumes by sliding window, with the code that predicts and evaluates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqpar.collectives import all_reduce
from seqpar.data.preparation.cache import PreparedCase
from seqpar.launch.evaluation.scores import Scores, score, summarise
from seqpar.launch.inference.logits_to_labels import to_labels
from seqpar.launch.inference.sliding_window import join_rows, sliding_window
from seqpar.launch.inference.windows import Sliding
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.runs.journal import Journal
from seqpar.launch.settings.config import Config
from seqpar.launch.training.data import TrainingData
from seqpar.launch.training.pictures import Shown, draw_cases
from seqpar.launch.training.validation_folder import HeldOut, true_files
from seqpar.losses import DiceCE, LossParts
from seqpar.mesh import Mesh

PICTURED = 3  # cases in validation.png


@dataclass(frozen=True)
class Found:
    """What a validation says: the journal's row, the table, and the number by which the best is kept."""

    row: dict[str, Any]
    text: str
    score: float


class Validation:
    """Loss and Dice per class and region on held-out cases; the same on all ranks."""

    def __init__(self, config: Config, mesh: Mesh, material: TrainingData, loss: DiceCE) -> None:
        self.config, self.mesh, self.material, self.loss = config, mesh, material, loss
        self.ids = material.held_out_ids[: config.val_cases or None]

    def run(self, net: SegmentationNet, journal: Journal, stopper: Stopper, keep: bool = False) -> Found | None:
        """Returns the result, None where the run has to leave first; ``keep`` leaves label maps and all scores."""
        out, labels = journal.path.parent, self.material.dataset.labels
        net.eval()
        kept = self._keep(out) if keep and self.mesh.is_first else None
        rows: list[Scores] = []
        losses: list[LossParts] = []
        shown: list[Shown] = []
        for name in self.ids:
            case = self.material.dataset.cases[name]
            predicted = self._predict(net, case, stopper)
            if predicted is None:
                net.train()
                return None
            found, parts = predicted
            losses.append(parts)
            if kept:
                kept.add(case, found)
            truth, spacing = np.asarray(case.label), case.properties.spacing
            ignored = self.material.dataset.ignore_label
            rows.append(score(truth, found, self.material.classes, spacing, ignore=ignored, surfaces=False))
            if self.mesh.is_first and len(shown) < PICTURED:
                shown.append(Shown(name, np.asarray(case.image[self._channel()]), truth, found, spacing))
        net.train()
        journal.attempt(lambda: draw_cases(out / "validation.png", shown, [name for name, v in labels.items() if v]))
        result = self._summary(rows, losses)
        return replace(result, text="\n".join([result.text, *kept.close()])) if kept else result

    def _keep(self, out: Path) -> HeldOut:
        described = self.material.describe()
        return HeldOut(out / "validation", described, lambda: true_files(self.config), self.config.steps)

    def _predict(
        self, net: SegmentationNet, case: PreparedCase, stopper: Stopper
    ) -> tuple[np.ndarray, LossParts] | None:
        """Returns the case's class ids, and its loss."""
        sliding = Sliding(self.config.tile, self.config.val_overlap)
        label, order = case.label, self.material.dataset.regions_class_order
        sums, rows = torch.zeros((), dtype=torch.float64, device=self.mesh.device), list[torch.Tensor]()
        for slab in sliding_window([net], case.image, sliding, self.mesh):
            if stopper.here():
                return None
            low, high = slab.bounds[self.mesh.world.index : self.mesh.world.index + 2]
            truth = torch.from_numpy(np.array(label[low:high])).to(self.mesh.device)
            sums = sums + self.loss.sums(slab.logits[None], truth[None])
            ids = to_labels(slab.logits, order if self.material.regions else ())
            rows.append(join_rows(ids.to(torch.int16), slab.bounds, self.mesh))
        parts = self.loss.of_sums(all_reduce(sums, self.mesh.world))
        return torch.cat(rows).numpy(), parts

    def _channel(self) -> int:
        """Returns the modality on which a tumour is seen best, the first where none is known."""
        names = [name.lower() for name in self.material.dataset.modalities]
        return next((i for i, name in enumerate(names) if name in ("flair", "t2f", "t2-flair")), 0)

    def _summary(self, rows: Sequence[Scores], losses: Sequence[LossParts]) -> Found:
        summary = summarise(rows)
        dice = {name: _plain(mean["Dice"]) for name, mean in summary["mean"].items()}
        pooled = {name: _plain(found["Dice"]) for name, found in summary["global"].items()}
        terms = {
            "dice_loss": float(torch.stack([parts.dice for parts in losses]).mean()),
            "ce_loss": float(torch.stack([parts.cross_entropy for parts in losses]).mean()),
        }
        row = {
            "loss": self.loss.weighted(*terms.values()),
            **terms,
            "dice": dice,
            "global_dice": pooled,
            "cases": len(rows),
        }
        known = [value for value in dice.values() if value is not None]
        cells = [(name, dice[name], pooled[name]) for name in dice]
        width = max(len(name) for name in dice)
        lines = [f"validation on {len(rows)} held-out cases: loss {row['loss']:.4f}"]
        lines.append(f"  {'class':{width}}  Dice  global")
        lines += [f"  {name:{width}}  {_shown(mean)}  {_shown(whole)}" for name, mean, whole in cells]
        return Found(row, "\n".join(lines), sum(known) / len(known) if known else 0.0)


def _plain(value: float) -> float | None:
    """Returns a number that JSON knows: NaN (no case has the class) becomes null."""
    return None if np.isnan(value) else float(value)


def _shown(value: float | None) -> str:
    return " –   " if value is None else f"{value:.3f}"
