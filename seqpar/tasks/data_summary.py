"""What a run trains on, in a few lines: cases, modalities, labels, sizes."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.planner.tile_choice import tile_advice
from seqpar.settings.config import Config
from seqpar.settings.presets import FROM_DATA
from seqpar.tasks.training_data import TrainingData
from seqpar.text import quantity

MAX_CLASSES = 12  # with lines of their own


def summary_of_data(data: TrainingData, fold: str) -> str:
    """Returns the lines that say what a run trains on; reads a small file of each case."""
    dataset, lines = data.dataset, case_lines(data, fold)
    counts = np.array([case.properties.counts for _, case in sorted(dataset.cases.items())])  # by case and class id
    if dataset.regions:
        names = {number: name for name, number in dataset.labels.items()}
        regions = (f"{name} = {' + '.join(names[n] for n in ids)}" for name, ids in dataset.regions.items())
        lines.append(f"  regions, which may overlap: {', '.join(regions)}")
    return "\n".join([*lines, *_class_lines(dataset.labels, counts), *_ignored(dataset.ignore_label)])


def case_lines(data: TrainingData, fold: str) -> list[str]:
    """Returns the lines on cases, modalities and sizes; reads a small file of each case."""
    dataset = data.dataset
    properties = [case.properties for case in dataset.cases.values()]
    sizes = span([p.shape for p in properties], "{:.0f}"), span([p.spacing for p in properties], "{:.3g}")
    split = f"{len(data.train_ids)} to train on, {len(data.held_out_ids)} held out (fold {fold})"
    layout, cases = dataset.described.get("layout", "prepared"), quantity(len(properties), "case")
    return [
        f"data: {dataset.name} ({layout}), {cases}: {split}",
        f"  modalities: {', '.join(dataset.modalities)}",
        f"  prepared in {dataset.path}: {sizes[0]} voxels of {sizes[1]} mm",
    ]


def tile_line(config: Config, flags: Collection[str], preset: str, data: TrainingData | Fingerprint) -> str:
    """Returns a line on a tile that suits the cases better than the preset's, "" where none does.

    - ``flags``: the settings on the command line
    """
    if config.resume or {"tile", "curriculum", "plans"} & set(flags) or preset in FROM_DATA:
        return ""
    if isinstance(data, Fingerprint):
        return tile_advice(config, data.shape, data.spacing)
    properties = [case.properties for case in data.dataset.cases.values()]
    w, d, h = np.median([p.shape for p in properties], 0)
    spacing = np.median([p.spacing for p in properties], 0).tolist()
    return tile_advice(config, (round(w), round(d), round(h)), spacing)


def _class_lines(labels: Mapping[str, int], counts: np.ndarray) -> list[str]:
    """Returns for each label in how many cases it is, and which share of their voxels it has."""
    shares = counts / counts.sum(1, keepdims=True)
    foreground = [(name, number) for name, number in labels.items() if number]
    width = max(len(name) for name, _ in foreground)
    lines = [
        f"  label {name:{width}}  in {np.count_nonzero(counts[:, number])} of {quantity(len(counts), 'case')}, "
        f"{shares[:, number].mean():.2%} of the voxels"
        for name, number in foreground[:MAX_CLASSES]
    ]
    more = len(foreground) - MAX_CLASSES
    return [*lines, f"  … and {more} more labels"] if more > 0 else lines


def _ignored(label: int | None) -> list[str]:
    return [] if label is None else ["  voxels of the ignore label count neither in the loss nor in scores"]


def span(rows: Any, form: str) -> str:
    """Returns the sizes along W, D, H, where they differ between cases from the smallest to the largest."""

    def spelled(sizes: Sequence[float]) -> str:
        return " x ".join(form.format(size) for size in sizes)

    rows = np.asarray(rows)
    low, high = spelled(rows.min(0)), spelled(rows.max(0))
    return low if low == high else f"{low} to {high}"
