"""Label files on disk: which prediction belongs to which truth, and their scores."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.data.errors import DataError
from seqpar.data.formats.brats import read_brats
from seqpar.data.formats.recognise import Dataset, describe
from seqpar.data.geometry import Geometry, differs, to_canonical
from seqpar.data.volumes import SUFFIXES, read_volume
from seqpar.launch.evaluation.classes import Labels
from seqpar.launch.evaluation.scores import Scores, score


class Pair(NamedTuple):
    """One case: its name and its two files."""

    case: str
    truth: Path
    prediction: Path


def dataset_at(truth: Path) -> Dataset | None:
    """Returns the data set that a path names, None where it is a label map or a folder of them."""
    if truth.is_file() and truth.suffix != ".json":
        return None
    if truth.is_dir() and list_cases(truth):
        flat = read_brats(truth)  # the one format whose images lie beside their labels
        return flat if flat and flat.labels else None
    return describe(truth)


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


def match(truth: Path, prediction: Path, dataset: Dataset | None = None) -> tuple[list[Pair], list[DataError]]:
    """Returns the cases that have both files, and what is wrong with the others.

    They belong together by name without suffix, or by the name of the case where the truth is a data set.
    """
    for path in (truth, prediction) if dataset is None else (prediction,):
        if not path.exists():
            raise DataError(path, "does not exist: give a folder of NIfTI label maps, or one file")
    if dataset is None and truth.is_file() and prediction.is_file():
        return [Pair(case_name(truth), truth, prediction)], []
    if prediction.is_file() or (dataset is None and truth.is_file()):
        raise ValueError(f"{truth} and {prediction}: give two folders or two files")
    pairs, faults = list[Pair](), list[DataError]()
    if dataset is not None:
        faults += dataset.faults
        true_files = {case.id: [case.label] for case in dataset.cases if case.label is not None}
    else:
        true_files = list_cases(truth)
    if not true_files:
        raise (faults or [DataError(truth, f"holds no label map ({' or '.join(SUFFIXES)})")])[0]
    files = list_cases(prediction)
    for case in sorted(true_files | files):
        of_case = true_files.get(case, []), files.get(case, [])
        twice = next((f for f in of_case if len(f) > 1), None)
        if twice:
            faults.append(DataError(twice[0], f"is there as {twice[1].name} too: keep one of them"))
        elif not of_case[1]:
            faults.append(DataError(prediction / f"{case}.nii.gz", "is missing, the truth has this case"))
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
