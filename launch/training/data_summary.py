"""What a run trains on, in a few lines: cases, modalities, labels, sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.launch.planning.tile_choice import tile_advice
from seqpar.launch.training.data import TrainingData
from seqpar.launch.training.request import RunRequest

MAX_CLASSES = 12  # with lines of their own


def summary_of_data(data: TrainingData, fold: str) -> str:
    """Returns the lines that say what a run trains on; reads a small file of each case."""
    dataset = data.dataset
    properties = [case.properties for _, case in sorted(dataset.cases.items())]
    shapes = np.array([p.shape for p in properties])
    spacings = np.array([p.spacing for p in properties])
    counts = np.array([p.counts for p in properties])  # voxels by case and class id
    split = f"{len(data.train_ids)} to train on, {len(data.held_out_ids)} held out (fold {fold})"
    lines = [
        f"data: {dataset.name} ({dataset.described.get('layout', 'prepared')}), {len(properties)} cases: {split}",
        f"  modalities: {', '.join(dataset.modalities)}",
        f"  prepared in {dataset.path}: {_span(shapes, '{:.0f}')} voxels of {_span(spacings, '{:.3g}')} mm",
    ]
    if dataset.regions:
        names = {number: name for name, number in dataset.labels.items()}
        regions = (f"{name} = {' + '.join(names[n] for n in ids)}" for name, ids in dataset.regions.items())
        lines.append(f"  regions, which may overlap: {', '.join(regions)}")
    return "\n".join([*lines, *_class_lines(dataset.labels, counts), *_ignored(dataset.ignore_label)])


def tile_line(request: RunRequest, data: TrainingData | Fingerprint) -> str:
    """Returns a line on a tile that suits the cases better than the preset's, "" where none does."""
    if request.config.resume or request.flags & {"tile", "curriculum"} or request.preset == "auto":
        return ""
    if isinstance(data, Fingerprint):
        return tile_advice(request.config, data.shape, data.spacing)
    properties = [case.properties for case in data.dataset.cases.values()]
    w, d, h = np.median([p.shape for p in properties], 0)
    spacing = np.median([p.spacing for p in properties], 0).tolist()
    return tile_advice(request.config, (round(w), round(d), round(h)), spacing)


def _class_lines(labels: Mapping[str, int], counts: np.ndarray) -> list[str]:
    """Returns for each label in how many cases it is, and which share of their voxels it has."""
    shares = counts / counts.sum(1, keepdims=True)
    foreground = [(name, number) for name, number in labels.items() if number]
    width = max(len(name) for name, _ in foreground)
    lines = [
        f"  label {name:{width}}  in {np.count_nonzero(counts[:, number])} of {len(counts)} cases, "
        f"{shares[:, number].mean():.2%} of the voxels"
        for name, number in foreground[:MAX_CLASSES]
    ]
    more = len(foreground) - MAX_CLASSES
    return [*lines, f"  … and {more} more labels"] if more > 0 else lines


def _ignored(label: int | None) -> list[str]:
    return [] if label is None else ["  voxels of the ignore label count neither in the loss nor in scores"]


def _span(rows: Any, form: str) -> str:
    """Returns the sizes along W, D, H, where they differ between cases from the smallest to the largest."""

    def spelled(sizes: Sequence[float]) -> str:
        return " x ".join(form.format(size) for size in sizes)

    low, high = spelled(rows.min(0)), spelled(rows.max(0))
    return low if low == high else f"{low} to {high}"
