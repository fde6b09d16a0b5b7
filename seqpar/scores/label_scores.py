"""Scores of label maps in memory: of one case, and the summary of many; validation and evaluation both use it.

A class that is in neither mask has no Dice and no distance. How it counts is a choice:
``skip``   what has no value (0 / 0) is NaN and left out of means, as in nnU-Net; if only one mask is empty, the
           distance is the volume's diagonal, which no distance exceeds.
``brats``  as in the challenge: two empty masks score 1 (HD95 and volume error 0); if only one mask is empty, the
           distance is 374 mm, and the sensitivity is 0 if it is the true one.
The lesion-wise scores have their own rules for this.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from statistics import fmean, median
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from seqpar.scores import lesions
from seqpar.scores.metrics import Confusion, DistanceNotMeasured, Mask, Masks, centreline_recall, hd95_of, nsd_of
from seqpar.text import rounded

EmptyPolicy = Literal["skip", "brats"]
Classes = Mapping[str, tuple[int, ...]]  # the labels that make up each class: one, or several for a region
Scores = dict[str, dict[str, float]]  # per class: metric → value
BRATS_DISTANCE = 374.0  # mm, the rounded diagonal of a BraTS volume
COUNTS = ("TP", "FP", "FN", "TN")
METRICS = {
    "HD95": hd95_of,
    "NSD": nsd_of,
}
COLUMNS = ("Dice", "IoU", *METRICS, "VolumeError", "Sensitivity", "Specificity")
EXTRA_COLUMNS = ("LesionDice", "LesionHD95", "CentrelineRecall")  # of those who ask for them
UNLABELLED_ML = "UnlabelledMl"  # in ml, of a truth with an ignore label: what no score counts
READER_COLUMNS = ("ReaderDice", "InterReaderDice", "DisputedMl")  # of data with several readers
WORDS = (  # of a table, for people: a column and what it is
    ("labels", "the values in the files that make up a class"),
    ("mean, median", "over cases"),
    ("global", "over the voxels of all cases together"),
    ("IoU", "intersection over union"),
    ("HD95", "95th percentile of the distances from one surface to the other, the larger of both ways, in mm"),
    ("", "the image's diagonal (with --empty brats: 374) if only one map has the class"),
    ("NSD", "share of both surfaces that is within --nsd-tolerance of the other"),
    ("VolumeError", "predicted minus true volume, as a share of the true one; in the mean, signs cancel"),
    ("", "as for Sensitivity, only cases with the class count (unless --empty brats)"),
    ("Sensitivity", "share of the true voxels that are predicted"),
    ("Specificity", "share of the other voxels that are not predicted"),
    ("cases", "how many of all have a Dice"),
)
DASH_WORDS = (("–", "no case has such a score"),)
LESION_WORDS = (
    ("LesionDice", "mean over true lesions above 50 mm³ and false ones of any size (BraTS 2023); missed or false: 0"),
    ("", "1 if a case has neither, even if smaller ones are missed; this counts in means,"),
    ("", "also of a class that no case has"),
    ("LesionHD95", "the same in mm; missed or false: 374 (made for voxels of 1 mm)"),
)
CENTRELINE_WORDS = (
    ("CentrelineRecall", "share of the true centre line that is predicted; false branches cost nothing"),
)
READER_WORDS = (
    ("ReaderDice", "mean of the Dice with each reader"),
    ("InterReaderDice", "mean Dice of each two readers"),
    ("DisputedMl", "volume in ml that some readers give to the class, and others do not"),
)


def describe_consensus(readers: int, of_regions: bool = False) -> str:
    """Returns what a truth with doubt has in each voxel, in words; ``readers``: none of probabilities."""
    if of_regions:
        who = "both readers" if readers == 2 else f"most of the {readers} readers"
        return f"the voxels that {f'{who} gave to' if readers else 'are more probably in than outside of'} each region"
    if not readers:
        return "the most probable label of a voxel"
    if readers == 2:
        return "the label that both readers gave a voxel; if they differ, the smaller value, mostly the background"
    return f"the label that most of the {readers} readers gave a voxel; in a tie, the smallest value"


def words_of(
    lesion_wise: bool, centreline: bool, dashes: bool, truth: str = "", readers: bool = False, is_part: bool = False
) -> list[str]:
    """Returns what the columns of a table mean, a line for each.

    - ``dashes``: whether it has cells without a number
    - ``truth``: what it is, if it has doubt; ``readers``: whether several gave it
    - ``is_part``: whether a part of it has the ignore label
    """
    words = [*WORDS, *LESION_WORDS * lesion_wise, *CENTRELINE_WORDS * centreline, *READER_WORDS * readers]
    words += DASH_WORDS * dashes + (("truth", "what has the ignore label counts nowhere"),) * is_part
    words[:0] = [("truth", truth)] * bool(truth)
    width = max(len(name) for name, _ in words)
    return [f"  {name:{width}}  {text}" for name, text in words]


def class_mask(labels: NDArray[Any], values: Iterable[int]) -> Mask:
    """Returns the mask of the voxels whose label is one of ``values``."""
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
    centreline: bool = False,
    empty: EmptyPolicy = "skip",
    surfaces: bool = True,
    hidden: Collection[str] = (),
    voxel_ml: float | None = None,
) -> Scores:
    """Returns the scores of one case per class. Distances, ``spacing`` and ``nsd_tolerance`` are in mm.

    ``ignore`` is a true label whose voxels belong to no class. ``lesion_wise`` adds the scores of BraTS 2023,
    ``centreline`` the share of the true skeleton that is predicted (``CentrelineRecall``).
    ``surfaces=False`` leaves out what takes most of the time: ``HD95``, ``NSD``, and how many lesions are found
    (``LesionTP``), missed (``LesionFN``), false (``LesionFP``) and too small to count (``LesionSmall``).
    ``VolumeError`` is relative and signed, ``VolumeErrorMl``, ``VolumeMl`` and ``TrueVolumeMl`` are in ml; with
    ``ignore``, ``UnlabelledMl`` is the volume that has this label, and all others leave it out. ``hidden``
    names classes that the truth does not show: they have no scores. ``voxel_ml`` is the volume of a voxel; None: of a
    box with its ``spacing``.
    """
    if truth.shape != prediction.shape:
        raise ValueError(f"truth has shape {truth.shape}, prediction {prediction.shape}: they must be equal")
    if empty not in get_args(EmptyPolicy):
        raise ValueError(f"empty is {empty!r}: choose one of {', '.join(get_args(EmptyPolicy))}")
    if not classes:
        raise ValueError("there is no class to score: give at least one, such as {'tumour': (1,)}")
    where_counted = None if ignore is None else truth != ignore
    if where_counted is not None and not where_counted.any():
        hidden = classes  # nothing is known of a truth that is not labelled at all
    diagonal = math.dist([0.0] * truth.ndim, [size * step for size, step in zip(truth.shape, spacing)])
    scores = {}
    for name, labels in classes.items():
        true_mask, mask = class_mask(truth, labels), class_mask(prediction, labels)
        counted = where_counted
        if name in hidden:  # nothing counts
            counted = np.zeros(truth.shape, bool)
        if counted is not None:
            true_mask &= counted
            mask &= counted
        row = score_masks(true_mask, mask, spacing, nsd_tolerance, counted, surfaces, voxel_ml)
        if centreline:
            row["CentrelineRecall"] = centreline_recall(true_mask, mask)
        apply_empty_policy(row, empty, diagonal)
        if surfaces:
            detection = lesions.detect(true_mask, mask, spacing)
            row |= {f"Lesion{key}": count for key, count in zip(("TP", "FN", "FP", "Small"), detection)}
        if lesion_wise:
            lesion_scores = lesions.lesion_wise(true_mask, mask, spacing, missed_distance=BRATS_DISTANCE)
            row |= {"LesionDice": lesion_scores.dice, "LesionHD95": lesion_scores.hd95}
        if name in hidden:
            row = {metric: value if metric in COUNTS else math.nan for metric, value in row.items()}
        if where_counted is not None:
            ml = math.prod(spacing) / 1000 if voxel_ml is None else voxel_ml
            row[UNLABELLED_ML] = float(np.count_nonzero(~where_counted) * ml)
        scores[name] = row
    return scores


def score_readers(
    readers: Mapping[str, NDArray[Any]],
    prediction: NDArray[Any],
    classes: Classes,
    voxel_ml: float,
    empty: EmptyPolicy = "skip",
) -> Scores:
    """Returns per class how well a prediction and several readers agree, each with each.

    - ``Dice_NAME``: of the prediction with a reader, ``ReaderDice``: their mean
    - ``InterReaderDice``: the mean over each two readers
    - ``DisputedMl``: the volume that some readers give to the class, and not all
    """

    def dice(first: Mask, second: Mask) -> float:
        total = np.count_nonzero(first) + np.count_nonzero(second)
        if not total:
            return 1.0 if empty == "brats" else math.nan
        return 2 * np.count_nonzero(first & second) / total

    scores = {}
    for name, labels in classes.items():
        masks = {reader: class_mask(own, labels) for reader, own in readers.items()}
        mask = class_mask(prediction, labels)
        row = {f"Dice_{reader}": dice(mask, own) for reader, own in masks.items()}
        row["ReaderDice"] = _mean(row.values())
        row["InterReaderDice"] = _mean(dice(*two) for two in combinations(masks.values(), 2))
        disputed = np.any([*masks.values()], 0) & ~np.all([*masks.values()], 0)
        row["DisputedMl"] = np.count_nonzero(disputed) * voxel_ml
        scores[name] = row
    return scores


def _mean(values: Iterable[float]) -> float:
    known = without_nan(values)
    return fmean(known) if known else math.nan


def score_masks(
    truth: Mask,
    prediction: Mask,
    spacing: Sequence[float],
    nsd_tolerance: float,
    counted: Mask | None,
    surfaces: bool = True,
    voxel_ml: float | None = None,
) -> dict[str, float]:
    """Returns the scores of one class as defined, with NaN and infinity; ``counted`` masks the voxels that count."""
    masks = Masks(truth, prediction, tuple(spacing), nsd_tolerance, surfaces)
    c = masks.confusion
    if counted is not None:  # both masks are empty where nothing counts, so only TN is too large
        c = Confusion(c.tp, c.fp, c.fn, c.tn - int(np.count_nonzero(~counted)))
    ml = math.prod(spacing) / 1000 if voxel_ml is None else voxel_ml
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
        "VolumeErrorMl": (c.fp - c.fn) * ml,
        "VolumeMl": (c.tp + c.fp) * ml,
        "TrueVolumeMl": (c.tp + c.fn) * ml,
        "Sensitivity": c.sensitivity,
        "Specificity": c.specificity,
    }
    for name, metric in METRICS.items():
        with suppress(DistanceNotMeasured):
            row[name] = metric(masks)
    return row


def apply_empty_policy(row: dict[str, float], empty: EmptyPolicy, diagonal: float) -> None:
    """Replaces the scores of a class that is missing in one or both masks by those of the policy."""
    for name in METRICS:  # a distance to a mask that is empty
        if math.isinf(row.get(name, 0.0)):
            row[name] = BRATS_DISTANCE if empty == "brats" else diagonal
    if empty == "brats" and not row["n_ref"]:
        if row["n_pred"]:
            row |= {name: 0.0 for name in ("Sensitivity", "CentrelineRecall") if name in row}
        else:
            perfect = {"Dice": 1.0, "IoU": 1.0, "NSD": 1.0, "Sensitivity": 1.0, "HD95": 0.0, "VolumeError": 0.0}
            perfect["CentrelineRecall"] = 1.0
            row |= {name: value for name, value in perfect.items() if name in row}


def summarise(rows: Sequence[Scores]) -> dict[str, Any]:
    """Returns mean, median and number of values over the cases, per class and metric, and global scores.

    ``mean`` weighs all cases the same; ``global`` pools the voxels of all cases, so that a case weighs by its size.
    ``foreground_mean`` is the mean of the classes' means, ``present`` the mean Dice over the cases that have a class.
    NaN is left out everywhere.
    """
    if not rows:
        raise ValueError("there is no case to summarise")
    summary: dict[str, Any] = {"num_cases": len(rows)}
    summary |= {kind: {} for kind in ("mean", "median", "num_values", "global")}
    for name, first in rows[0].items():
        values = {metric: without_nan(row[name][metric] for row in rows) for metric in first}
        summary["mean"][name] = {metric: fmean(v) if v else math.nan for metric, v in values.items()}
        summary["median"][name] = {metric: median(v) if v else math.nan for metric, v in values.items()}
        summary["num_values"][name] = {metric: len(v) for metric, v in values.items()}
        pooled = Confusion(*(int(sum(row[name][count] for row in rows)) for count in COUNTS))
        summary["global"][name] = {"Dice": pooled.dice, "IoU": pooled.iou, "Sensitivity": pooled.sensitivity}
        summary["global"][name] |= {"Specificity": pooled.specificity, "VolumeError": pooled.volume_error}
    means = list(summary["mean"].values())
    over_classes = {metric: without_nan(mean[metric] for mean in means) for metric in means[0]}
    present = {name: [mean_where_present(rows, name, one) for one in ("Dice", "Sensitivity")] for name in rows[0]}
    summary["present"] = present
    each = {name: [row[name] for row in rows] for name in rows[0]}
    summary["zeros_of_absent"] = {n: sum(r.get("n_ref", 1) == r["Dice"] == 0 for r in own) for n, own in each.items()}
    summary["foreground_mean"] = {metric: fmean(v) if v else math.nan for metric, v in over_classes.items()}
    return summary


def without_nan(values: Iterable[float]) -> list[float]:
    """Returns the values that are not NaN."""
    return [value for value in values if not math.isnan(value)]


FEW, TOO_FEW = 5, "too few to tell"  # cases; what is said instead of an interval of fewer


def mean_where_present(rows: Iterable[Scores], name: str, metric: str = "Dice") -> float:
    """Returns the mean score of a class over the cases whose truth has it; NaN if none has, or if it is not known."""
    has_it = (row[name] for row in rows if name in row and row[name].get("n_ref", 1) != 0)
    return _mean(row.get(metric, math.nan) for row in has_it)


def where_known(row: Mapping[str, float]) -> str:
    """Returns where the truth is known, in words, as scores of a case or their mean tell; "" of an ordinary truth."""
    is_part = row.get(UNLABELLED_ML, 0.0) > 0
    return "in the labelled part" if is_part else "in the readers' consensus" * (READER_COLUMNS[-1] in row)


def not_measured(cases: Iterable[Scores]) -> str:
    """Returns how many of the distances were not measured, as one map lacks the class; "" if all were."""
    rows = [row for scores in cases for row in scores.values() if not math.isnan(row["HD95"])]
    count = sum(bool(row["n_ref"]) != bool(row["n_pred"]) for row in rows)
    return f" ({count} of {len(rows)} replaced: one map lacks the class)" if count else ""


def why_no_dice(row: Mapping[str, float]) -> str:
    """Returns why a class has no Dice in a case; "" if it has one."""
    if not math.isnan(row.get("Dice", math.nan)):
        return ""
    where = ", where labelled" * (row.get(UNLABELLED_ML, 0.0) > 0)
    return "not annotated" if math.isnan(row.get("n_ref", 0)) else f"in neither map{where}"


def format_dice(row: Mapping[str, float], places: int) -> str:
    """Returns the Dice of a class in a case; if it has none, why."""
    why = why_no_dice(row)
    return f"– ({why})" if why else rounded(row["Dice"], places)


def format_table(summary: dict[str, Any], classes: Classes) -> str:
    """Returns a summary as a text table: mean, median and global scores per class, and how many cases have a Dice."""
    first = next(iter(summary["mean"].values()))
    columns = [c for c in (*COLUMNS, *EXTRA_COLUMNS, *READER_COLUMNS) if c in first]
    lines = [["class", "labels", "", *columns, "cases"]]
    for name, labels in classes.items():
        for number, kind in enumerate(
            ("mean", "median", "global")[: 3 if summary["num_cases"] > 1 else 1]
        ):  # else alike
            cells = [name, "+".join(map(str, labels))] if number == 0 else ["", ""]
            scores = summary[kind][name]
            places = {column: 2 if column.endswith(("HD95", "Ml")) else 4 for column in columns}
            cells += [kind, *(rounded(scores[c], n) if c in scores else "" for c, n in places.items())]
            counts = summary["num_values"][name]
            cases = f"{counts['Dice']}/{summary['num_cases']}"
            cells = _with_counts(cells, columns, counts) if number == 0 else cells
            lines.append([*cells, cases if number == 0 else ""])
    widths = [max(map(len, column)) for column in zip(*lines)]
    rows = []
    for line in lines:  # the first three columns are text, the others numbers
        cells = [cell.rjust(w) if i > 2 else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths))]
        rows.append("  ".join(cells).rstrip())
    return "\n".join(rows)


def _with_counts(cells: Sequence[str], columns: Sequence[str], counts: Mapping[str, int]) -> list[str]:
    """Returns a line's cells, of a Dice with and between readers with their numbers of cases, where these differ."""
    known = {column: counts[column] for column in READER_COLUMNS[:2] if column in columns and column in counts}
    told = {column: f" ({n})" for column, n in known.items()} if len({counts["Dice"], *known.values()}) > 1 else {}
    return [*cells[:3], *(f"{cell}{told.get(column, '')}" for column, cell in zip(columns, cells[3:]))]


DEFAULT_SETTINGS = {"nsd_tolerance": 1.0, "lesion_wise": False, "centreline": False, "empty": "skip"}
