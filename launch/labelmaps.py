"""Label files on disk: which values mean what, which prediction belongs to which truth, and their scores."""

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.data.faults import DataError
from seqpar.data.geometry import Geometry, differs, to_canonical
from seqpar.data.volumes import SUFFIXES, read_volume
from seqpar.launch.scoring import Scores, score

BRATS = {
    "2021": {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)},
    "2023": {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)},
}


@dataclass(frozen=True)
class Labels:
    """The classes to score, all values that a label map may hold, and the true value that is left out."""

    classes: dict[str, tuple[int, ...]]
    declared: frozenset[int]
    ignore: int | None = None

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("there is no class to score: declare at least one label other than 0")
        names: dict[tuple[int, ...], str] = {}
        for name, labels in self.classes.items():
            if labels in names:
                raise ValueError(f"classes {names[labels]} and {name} both are {labels}: keep one of them")
            names[labels] = name


class Pair(NamedTuple):
    """One case: its name and its two files."""

    case: str
    truth: Path
    prediction: Path


def labels_of(classes: dict[str, tuple[int, ...]]) -> Labels:
    """Returns labels that hold the values of these classes, and 0."""
    return Labels(classes, frozenset({0}.union(*classes.values())))


def read_dataset_labels(path: Path) -> Labels:
    """Returns the labels that a dataset.json declares, in nnU-Net's manner or the decathlon's."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(path, f"is no readable JSON file ({error})") from error
    found: Any = content.get("labels") if isinstance(content, dict) else None
    try:
        if all(key.isdigit() for key in found):  # the decathlon's: value to name
            found = {name: int(key) for key, name in found.items()}
        values = {n: tuple(map(int, v)) if isinstance(v, list) else (int(v),) for n, v in found.items()}
    except (TypeError, ValueError, AttributeError) as error:
        needed = '"labels" such as {"background": 0, "tumour": 1, "whole": [1, 2]}'
        raise DataError(path, f"declares no labels that can be read: give {needed}") from error
    ignore = values.pop("ignore", None)
    classes = {name: labels for name, labels in values.items() if set(labels) != {0}}
    declared = {0}.union(*values.values())
    try:
        return Labels(classes, frozenset(declared), ignore[0] if ignore else None)
    except ValueError as error:
        raise DataError(path, str(error)) from error


def find_dataset(truth: Path) -> Path | None:
    """Returns the dataset.json in the truth's folder or in the folder above it, None if there is none."""
    folder = truth if truth.is_dir() else truth.parent
    places = folder / "dataset.json", folder.resolve().parent / "dataset.json"
    return next((place for place in places if place.exists()), None)


def case_name(path: Path) -> str:
    """Returns a file's name without suffix."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def list_cases(folder: Path) -> dict[str, list[Path]]:
    """Returns the NIfTI files of a folder by case name, hidden ones left out."""
    cases: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith(SUFFIXES) and path.is_file() and not path.name.startswith("."):
            cases.setdefault(case_name(path), []).append(path)
    return cases


def match(truth: Path, prediction: Path) -> tuple[list[Pair], list[DataError]]:
    """Returns the cases that have both files, by name without suffix, and what is wrong with the others."""
    for path in (truth, prediction):
        if not path.exists():
            raise DataError(path, "does not exist: give a folder of NIfTI label maps, or one file")
    if truth.is_file() and prediction.is_file():
        return [Pair(case_name(truth), truth, prediction)], []
    if truth.is_file() or prediction.is_file():
        raise ValueError(f"{truth} and {prediction}: give two folders or two files")
    true_files, files = list_cases(truth), list_cases(prediction)
    if not true_files:
        raise DataError(truth, f"holds no label map ({' or '.join(SUFFIXES)})")
    pairs, faults = [], []
    for case in sorted(true_files | files):
        of_case = true_files.get(case, []), files.get(case, [])
        twice = next((f for f in of_case if len(f) > 1), None)
        if twice:
            faults.append(DataError(twice[0], f"is there as {twice[1].name} too: keep one of them"))
        elif not of_case[1]:
            faults.append(DataError(prediction / of_case[0][0].name, "is missing, the truth has this case"))
        elif not of_case[0]:
            faults.append(DataError(of_case[1][0], f"has no truth of this name in {truth}"))
        else:
            pairs.append(Pair(case, of_case[0][0], of_case[1][0]))
    return pairs, faults


def read_labels(path: Path) -> tuple[NDArray[Any], Geometry]:
    """Returns a label map as integers, canonical, and where it lies."""
    array, geometry, _ = read_volume(path)
    if len(array) != 1:
        raise DataError(path, f"holds {len(array)} channels: a label map has one value a voxel")
    values = to_canonical(array[0], geometry.orientation)
    if values.dtype.kind == "f":
        whole = np.rint(values)
        if not np.allclose(values, whole, rtol=0, atol=1e-3):
            raise DataError(path, "holds values that are no whole numbers: a label map is needed")
        values = whole.astype(np.int32)
    return values, geometry


def check_values(path: Path, values: NDArray[Any], declared: frozenset[int]) -> None:
    """Returns nothing; raises where a label map holds a value that has no meaning."""
    undeclared = sorted(set(np.unique(values).tolist()) - declared)
    if undeclared:
        raise DataError(
            path,
            f"holds {undeclared[:5]}, which is not among the declared labels {sorted(declared)}: "
            "declare it (dataset.json or --regions NAME=VALUE) or choose the preset that it belongs to",
        )


def score_pair(pair: Pair, labels: Labels, options: dict[str, Any]) -> Scores:
    """Returns the scores of one case, read from its two files."""
    truth, geometry = read_labels(pair.truth)
    prediction, found = read_labels(pair.prediction)
    if (how := differs(geometry, found)) is not None:
        raise DataError(pair.prediction, f"does not lie on the truth: {how}; write it in the geometry of the source")
    ignored = frozenset() if labels.ignore is None else frozenset({labels.ignore})
    check_values(pair.truth, truth, labels.declared | ignored)
    check_values(pair.prediction, prediction, labels.declared)
    return score(truth, prediction, labels.classes, geometry.canonical_spacing, ignore=labels.ignore, **options)


def score_pairs(
    pairs: Sequence[Pair], labels: Labels, options: dict[str, Any], workers: int = 1
) -> Iterator[tuple[Pair, Scores | DataError]]:
    """Returns, case by case in order, the scores or what is wrong with its files."""
    if workers < 1:
        raise ValueError(f"workers is {workers}: at least 1 is needed")
    if workers == 1:
        for pair in pairs:
            try:
                yield pair, score_pair(pair, labels, options)
            except DataError as error:
                yield pair, error
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        futures: list[Future[Scores]] = [pool.submit(score_pair, pair, labels, options) for pair in pairs]
        try:
            for pair, future in zip(pairs, futures):
                try:
                    yield pair, future.result()
                except DataError as error:
                    yield pair, error
        except BrokenProcessPool as error:
            raise MemoryError(f"a worker was killed, perhaps for want of memory: lower {workers=}") from error
        finally:
            pool.shutdown(cancel_futures=True)
