"""Postprocessing of label maps: removes connected components, and learns where keeping the largest one raises Dice."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.late_import import late
from seqpar.scores.label_classes import Labels, hidden_classes
from seqpar.scores.label_files import Pair, map_pairs, read_label_map, read_reference
from seqpar.scores.label_scores import without_nan
from seqpar.scores.summary_files import class_key

ndimage = late("scipy.ndimage")

POSTPROCESSING = "postprocessing.json"
_KEEP_LARGEST = "remove_all_but_largest_component_from_segmentation"  # nnU-Net's name
Steps = tuple[tuple[int, ...], ...]  # of each step the label values whose largest component is kept
Dices = Mapping[str, float]


def _split(text: str) -> tuple[str, str]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(voxels|mm3|)", text)
    if match is None:
        raise ValueError(f"min_component={text!r}: give a volume in mm3, such as 50, or a count, such as 20voxels")
    return match[1], match[2] or "mm3"


def parse_min_component(text: str, voxel_mm3: float) -> int:
    """Returns the number of voxels from which a component is kept, from "50", "50mm3" or "20voxels"."""
    number, unit = _split(text)
    voxels = float(number) if unit == "voxels" else float(number) / voxel_mm3
    return math.ceil(voxels - 1e-6)


def describe_min_component(text: str) -> str:
    """Returns the size from which components are kept as people write it; "" if all are, or if it is none."""
    try:
        number, unit = _split(text)
    except ValueError:
        return ""
    removes = float(number) > (1 if unit == "voxels" else 0)
    return f"{number} {unit.replace('mm3', 'mm³')}" * removes


def drop_small_components(
    ids: np.ndarray, min_voxels: int, regions: Collection[Sequence[int]] = (), regions_class_order: Sequence[int] = ()
) -> np.ndarray:
    """Returns class ids without the connected components of a region, or else of a class, below ``min_voxels``.

    Voxels that share a corner are connected. A voxel that drops out of a region gets the label of the last region in
    the order that it stays in, so that no region loses a voxel to another's filter; if there is none, background.
    """
    if min_voxels <= 1:
        return ids
    if not regions:
        regions_class_order = [value for value in np.unique(ids).tolist() if value]
        regions = [(value,) for value in regions_class_order]
    remaining, dropped = np.zeros_like(ids), np.zeros(ids.shape, bool)
    for members, label in zip(regions, regions_class_order):
        mask = np.isin(ids, members)
        components, sizes = _components(mask)
        is_small = sizes < min_voxels
        is_small[0] = False  # component 0 is everything outside the mask
        dropped |= is_small[components]
        remaining[mask & ~is_small[components]] = label
    return np.where(dropped, remaining, ids)


def keep_largest(labels: np.ndarray, steps: Steps) -> np.ndarray:
    """Returns label values where, step by step, all but the largest component of some values became background.

    Voxels that share a corner are connected, and components as large as the largest all stay, as in nnU-Net.
    """
    for values in steps:
        components, sizes = _components(np.isin(labels, values))
        sizes[0] = 0
        labels = np.where((sizes < sizes.max())[components] & (components > 0), labels.dtype.type(0), labels)
    return labels


def _components(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each voxel's component, 0 outside the mask, and the voxels of each component."""
    components, _ = ndimage.label(mask, np.ones((3,) * mask.ndim, bool))
    return components, np.bincount(components.reshape(-1))


@dataclass(frozen=True)
class Learned:
    """The steps that raise the mean Dice over cases, and each class's mean before and after them."""

    steps: Steps
    before: Dices
    after: Dices

    def content(self, classes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Returns the content of postprocessing.json, as nnU-Net writes it."""

        def means(dices: Dices) -> dict[str, Any]:
            own = {class_key(classes[name]): {"Dice": dice} for name, dice in dices.items()}
            return {"foreground_mean": {"Dice": mean_of(dices)}, "mean": own}

        return {
            "input_folder": means(self.before),
            "postprocessed": means(self.after),
            "postprocessing_fns": [_KEEP_LARGEST] * len(self.steps),
            "postprocessing_kwargs": [{"labels_or_regions": list(values)} for values in self.steps],
            "written_by": "seqpar",
        }


def mean_of(dices: Dices) -> float:
    """Returns the mean over classes; NaN if one of them has none."""
    return fmean(dices.values())


def learn_postprocessing(pairs: Sequence[Pair], labels: Labels, workers: int = 1) -> Learned:
    """Returns the postprocessing that nnU-Net would choose from predictions and their truth.

    First the largest component of all labels together is kept, if that raises the mean and lowers no class; then that
    of each class or region by itself, where that raises its own Dice. ``workers`` processes score.
    """
    foreground = tuple(sorted(labels.declared - {0}))
    before = after = _mean_dices(pairs, labels, (), workers)
    steps: Steps = ()
    tried = _mean_dices(pairs, labels, (foreground,), workers)
    if mean_of(tried) > mean_of(before) and not any(tried[name] < dice for name, dice in before.items()):
        steps, after = (foreground,), tried
    classes = sorted(labels.classes.items(), key=lambda item: -len(item[1]))  # regions from the outermost on
    for name, values in classes if len(classes) > 1 else ():
        tried = _mean_dices(pairs, labels, (*steps, values), workers)
        if tried[name] > after[name]:
            steps, after = (*steps, values), tried
    return Learned(steps, before, after)


def _mean_dices(pairs: Sequence[Pair], labels: Labels, steps: Steps, workers: int) -> Dices:
    """Returns each class's mean Dice over the cases that have one."""
    rows = list[Dices]()
    for _, result in map_pairs(partial(_dices, labels=labels, steps=steps), pairs, workers):
        if isinstance(result, DataError):
            raise result
        rows.append(result)
    values = {name: without_nan(row[name] for row in rows) for name in labels.classes}
    return {name: fmean(each) if each else math.nan for name, each in values.items()}


def _dices(pair: Pair, labels: Labels, steps: Steps) -> Dices:
    truth = read_reference(pair.truth, pair.doubt, regions=labels.classes.values()).values
    prediction = keep_largest(read_label_map(pair.prediction)[0], steps)
    known = truth != (-1 if labels.ignore is None else labels.ignore)
    dices, hidden = dict[str, float](), hidden_classes(labels.classes, pair.shown)
    for name, values in labels.classes.items():
        wanted, found = (np.isin(volume, values) & known for volume in (truth, prediction))
        total = np.count_nonzero(wanted) + np.count_nonzero(found)
        is_scored = total > 0 and name not in hidden
        dices[name] = 2 * np.count_nonzero(wanted & found) / total if is_scored else math.nan
    return dices


def read_postprocessing(path: Path) -> Steps:
    """Returns the steps of a postprocessing.json, ours or nnU-Net's."""
    content = read_json(path)
    try:
        functions, arguments = content["postprocessing_fns"], content["postprocessing_kwargs"]
        steps = [_flat(argument["labels_or_regions"]) for argument in arguments]
        known = len(functions) == len(steps) and set(functions) <= {_KEEP_LARGEST}
    except (KeyError, TypeError, RecursionError):
        raise DataError(path, "is no postprocessing.json: give what evaluate --find-best, or nnU-Net, wrote") from None
    if known and not all(steps):
        raise DataError(path, "has a step without labels: name some, or remove the step")
    if not known:
        raise DataError(path, f"has steps other than nnU-Net's {_KEEP_LARGEST}: {functions}; remove it")
    return tuple(steps)


def _flat(values: Any) -> tuple[int, ...]:
    """Returns the label values of a label, a region, or a list of both."""
    if isinstance(values, str | bool):  # the letters of a text are texts again, and a bool is an int
        raise TypeError(f"{values!r} is no label")
    if isinstance(values, int):
        return (values,)
    return tuple(sorted({value for each in values for value in _flat(each)}))
