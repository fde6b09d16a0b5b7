"""Scores of label maps in memory: one case, and the summary of many; validation and evaluation both use it.

Empty cases count by a stated policy, since a region that is in neither mask has no Dice and no distance:
``skip``   what has no value (0 / 0) is NaN and left out of means, as in nnU-Net; where one mask alone is
           empty the distance is the volume's diagonal, which no distance exceeds.
``brats``  the challenge's: nothing predicted where nothing is scores 1 (HD95 and volume error 0); where one
           mask alone is empty the distance is 374 mm, and where it is the true one the sensitivity is 0.
The lesion-wise scores state their own rules for this.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from seqpar.launch.evaluation import metrics
from seqpar.launch.evaluation.metrics import Confusion, Mask

Empty = Literal["skip", "brats"]
Classes = Mapping[str, tuple[int, ...]]  # the labels that make up each class: one, or several for a region
Scores = dict[str, dict[str, float]]  # per class: metric → value

BRATS_LOST = 374.0  # mm, the rounded diagonal of a BraTS volume
COUNTS = ("TP", "FP", "FN", "TN")
COLUMNS = ("Dice", "IoU", "HD95", "NSD", "VolumeError", "Sensitivity", "Specificity")
LESION_COLUMNS = ("LesionDice", "LesionHD95")


def select(labels: NDArray[Any], values: Iterable[int]) -> Mask:
    """Returns where a label map has one of some values."""
    mask = np.zeros(labels.shape, bool)
    for value in values:
        mask |= labels == value
    return mask


def score(
    truth: NDArray[Any],
    prediction: NDArray[Any],
    classes: Classes,
    spacing: Sequence[float],
    *,
    ignore: int | None = None,
    nsd_tolerance: float = 1.0,
    lesion_wise: bool = False,
    empty: Empty = "skip",
    surfaces: bool = True,
) -> Scores:
    """Returns the scores of one case per class; voxels whose true label is ``ignore`` belong to no class.

    Without ``surfaces``, ``HD95`` and ``NSD`` are left out: they take most of the time.

    ``VolumeError`` is relative and signed, ``VolumeErrorMl`` in ml; distances and the tolerance are in mm.
    """
    if truth.shape != prediction.shape:
        raise ValueError(f"truth has shape {truth.shape}, prediction {prediction.shape}: they must be equal")
    if empty not in get_args(Empty):
        raise ValueError(f"empty is {empty!r}: choose one of {', '.join(get_args(Empty))}")
    if not classes:
        raise ValueError("there is no class to score: give at least one, such as {'tumour': (1,)}")
    counted = None if ignore is None else truth != ignore
    diagonal = math.dist([0.0] * truth.ndim, [size * step for size, step in zip(truth.shape, spacing)])
    scores = {}
    for name, labels in classes.items():
        true_mask, mask = select(truth, labels), select(prediction, labels)
        if counted is not None:
            true_mask &= counted
            mask &= counted
        row = score_masks(true_mask, mask, spacing, nsd_tolerance, counted, surfaces)
        settle(row, empty, diagonal)
        if lesion_wise:
            lesions = metrics.lesion_wise(true_mask, mask, spacing, lost=BRATS_LOST)
            row |= {f"Lesion{key}": value for key, value in zip(("Dice", "HD95", "TP", "FN", "FP"), lesions)}
        scores[name] = row
    return scores


def score_masks(
    truth: Mask,
    prediction: Mask,
    spacing: Sequence[float],
    nsd_tolerance: float,
    counted: Mask | None,
    surfaces: bool = True,
) -> dict[str, float]:
    """Returns the scores of one class, as the definitions give them: NaN and infinity included."""
    c = metrics.confusion(truth, prediction)
    if counted is not None:  # both masks are empty where nothing counts, so that only TN holds too much
        c = Confusion(c.tp, c.fp, c.fn, c.tn - int(np.count_nonzero(~counted)))
    row = {
        "Dice": c.dice,
        "IoU": c.iou,
        "FP": c.fp,
        "TP": c.tp,
        "FN": c.fn,
        "TN": c.tn,
        "n_pred": c.tp + c.fp,
        "n_ref": c.tp + c.fn,
        "VolumeError": c.volume_error,
        "VolumeErrorMl": (c.fp - c.fn) * math.prod(spacing) / 1000,
        "Sensitivity": c.sensitivity,
        "Specificity": c.specificity,
    }
    if surfaces:
        distances = metrics.surface_distances(truth, prediction, spacing)
        row |= {"HD95": metrics.hausdorff(distances), "NSD": metrics.surface_dice(distances, nsd_tolerance)}
    return row


def settle(row: dict[str, float], empty: Empty, diagonal: float) -> None:
    """Returns nothing; puts into one class's scores what the policy says for empty masks."""
    if math.isinf(row.get("HD95", 0.0)):
        row["HD95"] = BRATS_LOST if empty == "brats" else diagonal
    if empty == "brats" and not row["n_ref"]:
        if row["n_pred"]:
            row["Sensitivity"] = 0.0
        else:
            perfect = {"Dice": 1.0, "IoU": 1.0, "NSD": 1.0, "Sensitivity": 1.0, "HD95": 0.0, "VolumeError": 0.0}
            row |= {name: value for name, value in perfect.items() if name in row}


def summarise(rows: Sequence[Scores]) -> dict[str, Any]:
    """Returns, over the cases' scores: mean, median and number of values per class and metric, global scores.

    Global scores pool the voxels of all cases, so that a case weighs by its size (``mean`` weighs cases
    alike). ``foreground_mean`` is the mean over classes of the means. NaN is left out everywhere.
    """
    if not rows:
        raise ValueError("there is no case to summarise")
    summary: dict[str, Any] = {"num_cases": len(rows)}
    summary |= {kind: {} for kind in ("mean", "median", "num_values", "global")}
    for name, first in rows[0].items():
        values = {metric: present(row[name][metric] for row in rows) for metric in first}
        summary["mean"][name] = {metric: fmean(v) if v else math.nan for metric, v in values.items()}
        summary["median"][name] = {metric: median(v) if v else math.nan for metric, v in values.items()}
        summary["num_values"][name] = {metric: len(v) for metric, v in values.items()}
        pooled = Confusion(*(int(sum(row[name][count] for row in rows)) for count in COUNTS))
        summary["global"][name] = {"Dice": pooled.dice, "IoU": pooled.iou, "Sensitivity": pooled.sensitivity}
        summary["global"][name] |= {"Specificity": pooled.specificity, "VolumeError": pooled.volume_error}
    means = list(summary["mean"].values())
    over_classes = {metric: present(mean[metric] for mean in means) for metric in means[0]}
    summary["foreground_mean"] = {metric: fmean(v) if v else math.nan for metric, v in over_classes.items()}
    return summary


def present(values: Iterable[float]) -> list[float]:
    """Returns the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


def table(summary: dict[str, Any], classes: Classes) -> str:
    """Returns a summary as text: per class mean, median and global scores, and how many cases have a Dice."""
    first = next(iter(summary["mean"].values()))
    columns = [c for c in (*COLUMNS, *LESION_COLUMNS) if c in first]
    lines = [["class", "labels", "", *columns, "cases"]]
    for name, labels in classes.items():
        for number, kind in enumerate(("mean", "median", "global")):
            cells = [name, "+".join(map(str, labels))] if number == 0 else ["", ""]
            found = summary[kind][name]
            places = {column: 2 if column.endswith("HD95") else 4 for column in columns}
            cells += [kind, *(f"{found[c]:.{n}f}" if c in found else "" for c, n in places.items())]
            num = f"{summary['num_values'][name]['Dice']}/{summary['num_cases']}"
            lines.append([*cells, num if number == 0 else ""])
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = []
    for line in lines:  # the first three columns are text, the others numbers
        cells = [cell.rjust(w) if i > 2 else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)
