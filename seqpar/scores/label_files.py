"""Label maps on disk: pairs predictions with their true label maps and scores them."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from seqpar.data.errors import DataError
from seqpar.data.files import SUFFIXES, is_single_volume, strip_suffix
from seqpar.data.formats.annotations import lists_annotations, tables_at, with_annotations
from seqpar.data.formats.brats import read_brats
from seqpar.data.formats.dataset import Case, Dataset
from seqpar.data.formats.recognise import describe, find_dataset, is_folder_of_dataset, read_declaration
from seqpar.data.geometry import Geometry, geometry_difference, to_canonical
from seqpar.data.volumes import output_suffix, read_volume
from seqpar.losses.soft_labels import agreed, agreed_values, with_several
from seqpar.parallel.processes import calls_in_forks
from seqpar.scores.label_classes import Labels, check_values, find_declaration, hidden_classes
from seqpar.scores.label_scores import Scores, class_mask, describe_consensus, score, score_readers
from seqpar.text import quantity

UNCERTAINTY, ENTROPY, DISAGREEMENT = "uncertainty", "entropy", "disagreement"  # a folder next to label maps, and maps
MAX_NAMED = 6  # names of cases in a line
Result = TypeVar("Result")


class Doubt(NamedTuple):
    """How a truth with doubt is written: by several readers, or as the probabilities of labels.

    - ``readers``: the label map of each reader, the truth's own file first
    - ``channels``: the label value that each channel of the truth's file stands for
    - ``joined``: pairs of a value in the files and the one that it is read as
    - ``regions``: whether classes have several labels
    """

    readers: dict[str, Path]
    channels: tuple[int, ...] = ()
    joined: tuple[tuple[int, int], ...] = ()
    regions: bool = False

    @property
    def consensus(self) -> str:
        """The label that the truth has in each voxel, in words."""
        return describe_consensus(len(self.readers), self.regions)

    @property
    def share(self) -> str:
        """What ``Reference.shares`` of several voxels come to, in words."""
        return f"the mean over the {len(self.readers)} readers" if self.readers else "the mean probability in the truth"

    def to_json(self) -> dict[str, Any]:
        """Returns what ``from_json`` reads."""
        return {**self._asdict(), "readers": {name: str(path) for name, path in self.readers.items()}}

    @staticmethod
    def from_json(value: Mapping[str, Any] | None) -> "Doubt | None":
        """Returns the doubt that ``to_json`` described, None of None."""
        if value is None:
            return None
        readers = {str(name): Path(path) for name, path in value["readers"].items()}
        joined = tuple((int(a), int(b)) for a, b in value["joined"])
        return Doubt(readers, tuple(value["channels"]), joined, bool(value.get("regions")))


class Pair(NamedTuple):
    """One case: its name, its two label maps, which values the truth shows (None: all), and its doubt, if any."""

    case: str
    truth: Path
    prediction: Path
    shown: tuple[int, ...] | None = None
    doubt: Doubt | None = None


class Reference(NamedTuple):
    """A true label map ``W D H`` in canonical orientation: of several readers, their consensus and each one's own.

    - ``probabilities``: of label values, if the truth is written so
    """

    values: NDArray[Any]
    geometry: Geometry
    readers: dict[str, NDArray[Any]]
    probabilities: Sequence[tuple[int, NDArray[Any]]] = ()

    @property
    def disputed(self) -> list[NDArray[np.bool_]]:
        """Where several readers gave different labels; an empty list without several readers."""
        if len(self.readers) < 2:  # one, or labels as probabilities
            return []
        return [reduce(np.logical_or, (a != b for a, b in pairwise(self.readers.values())))]

    def shares(self, values: Collection[int]) -> NDArray[Any]:
        """Returns how far each voxel has one of the label ``values``: as a mask, or with doubt as training's target.

        That is the share of the readers who gave it one of them, or the sum of their probabilities.
        """
        if self.probabilities:
            own = (array for value, array in self.probabilities if value in values)
            return reduce(np.add, own, np.zeros(self.values.shape, np.float32))
        if self.readers:
            return np.stack([class_mask(one, values) for one in self.readers.values()]).mean(0, np.float32)
        return class_mask(self.values, values)


class Matched(NamedTuple):
    """Cases with both files, the names of those without a prediction, and what is wrong with others."""

    pairs: list[Pair]
    missing: list[str]
    faults: list[DataError]


def missing_line(cases: Sequence[str]) -> str:
    """Returns a line on cases without a prediction, "" if there are none."""
    shown = ", ".join(cases[:MAX_NAMED]) + ", …" * (len(cases) > MAX_NAMED)
    return f"{quantity(len(cases), 'case')} without a prediction: {shown}" if cases else ""


def dataset_at(truth: Path, declaration: Path | None = None) -> Dataset | None:
    """Returns the data set that a path names, or label maps that show a part of the classes; None of other label maps.

    - ``declaration``: a dataset.json that was named for these, or its folder
    """
    if is_single_volume(truth):
        return _annotated(truth.parent, declaration, truth.name)
    if truth.is_dir() and list_label_files(truth):
        brats = read_brats(truth)  # the one format with images next to their labels
        return brats if brats and brats.labels else _annotated(truth, declaration)
    dataset = describe(truth)
    return with_annotations(dataset, find_dataset(truth)) if dataset.labels else dataset


def _annotated(folder: Path, declaration: Path | None, only: str = "") -> Dataset | None:
    """Returns the label maps of a folder as cases, if some are said to show a part of the classes: by the data set that
    the folder belongs to, or by a list next to them or to a ``declaration``, as of test cases in labelsTs.

    - ``only``: the name of the file that counts; "": all do
    """
    if is_folder_of_dataset(folder):
        dataset, own, place = None, tuple[Case, ...](), folder.resolve()
        with suppress(DataError):  # label maps need no data set
            dataset = with_annotations(describe(folder.parent), folder.parent)
            own = tuple(case for case in dataset.cases if case.label and case.label.parent.resolve() == place)
        if dataset is not None and any(case.annotated is not None for case in own):
            return replace(dataset, cases=tuple(case for case in own if only in ("", case.label and case.label.name)))
        if own and (tables := tables_at(folder)):
            raise DataError(tables[0], f"is not read by training there: move it to {folder.parent}")
        if own:
            return None
    places = [folder] if declaration is None else [folder, declaration]
    listing = next((place for place in places if lists_annotations(place)), None)
    return None if listing is None else _listed(folder, listing, declaration or find_declaration(folder), only)


def _listed(folder: Path, listing: Path, declaration: Path | None, only: str) -> Dataset | None:
    """Returns the label maps of a folder as cases that show what a list says; None if it says nothing of them.

    - ``listing``: the folder, or the JSON file, that has the list; ``only``: as above
    """
    if declaration is None:
        raise DataError(
            listing, "lists annotated classes, and no dataset.json says which labels they have: add one next to it (or "
            "name it to evaluate by --dataset)"
        )  # fmt: skip
    labels, _, ignore = read_declaration(declaration)
    cases = list[Case]()
    for name, files in ({strip_suffix(only): [folder / only]} if only else list_label_files(folder)).items():
        if len(files) > 1:
            raise DataError(files[0], f"is there as {files[1]} too: keep one of them")
        cases.append(Case(name, (), files[0]))
    bare = Dataset(folder.name, folder, "label maps", tuple(cases), (), labels, ignore_label=ignore)
    dataset = with_annotations(bare, listing, with_others=True)
    dataset = dataset if listing == folder and not only else replace(dataset, notes=())  # a list for other cases, too
    return dataset if dataset.notes or any(case.annotated is not None for case in dataset.cases) else None


def folders_of_truth(truth: Path, dataset: Dataset | None) -> set[Path]:
    """Returns the folders that hold the true label maps and their images; none for a single label map."""
    if dataset is None or is_single_volume(truth):
        return {truth} if truth.is_dir() else set()
    return {path.parent for case in dataset.cases for path in case.files}


def list_label_files(folder: Path) -> dict[str, list[Path]]:
    """Returns the label maps of a folder by name without suffix, hidden files left out."""
    cases: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith(SUFFIXES) and not path.name.startswith("."):  # what is no file is refused when it is read
            cases.setdefault(strip_suffix(path.name), []).append(path)
    return cases


def validation_of(path: Path) -> Path | None:
    """Returns the folder with the label maps of a run's last validation, None where the path is no run folder.

    The folder itself if it is the validation of a fold that nnU-Net trained, whose summary is nnU-Net's.
    """
    if path.name == "validation" and (path.parents[1] / "plans.json").is_file():
        return path
    if not (path / "config.json").is_file():
        return None
    if list_label_files(path):
        raise DataError(
            path, "holds a run, whose validation would be scored, and label maps next to it: name its folder "
            "validation, or move the label maps into a folder of their own"
        )  # fmt: skip
    folder = path / "validation"
    if not folder.is_dir() or not list_label_files(folder):
        raise DataError(
            folder, "holds no label map: a finished segmentation leaves them there; give a folder of predictions"
        )
    return folder


def about_held_out(run: Path) -> str:
    """Returns a sentence if a run's validation has other label maps than those of its held-out cases; else ""."""
    try:
        scored = {*list_label_files(run / "validation")}
        content = json.loads((run / "config.json").read_text())
        held_out, count = {*content["dataset"]["held_out"]}, int(content.get("config", {}).get("val_cases", 0))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""
    gone, others = sorted(held_out - scored), sorted(scored - held_out)
    if gone and not others and len(scored) == count:
        held = quantity(len(held_out), "held-out case")
        return f"{run} validated {count} of its {held} (--val-cases {count}): the scores are of no others."
    parts = [f"lacks {quantity(len(gone), 'held-out case')}, such as {gone[0]}"] if gone else []
    if others:
        parts.append(f"has {quantity(len(others), 'case')} that the run did not hold out, such as {others[0]}")
    return f"Caution: {run / 'validation'} {' and '.join(parts)}." if parts else ""


def refuse_missing(paths: Iterable[Path]) -> None:
    """Raises DataError for the first path where nothing is."""
    for path in paths:
        if not path.exists():
            raise DataError(path, "does not exist: give a folder of label maps, or one file")


def match_cases(
    truth: Path,
    prediction: Path,
    dataset: Dataset | None = None,
    only: Collection[str] | None = None,
    common: bool = False,
    regions: Collection[Collection[int]] = (),
) -> Matched:
    """Pairs predictions with their true label maps.

    ``truth`` and ``prediction`` are two files, or two folders whose files are paired by name without suffix. With a
    ``dataset``, its cases and their label files are the truth. ``only``: the cases that are looked at; None for all.
    ``common``: those that both have, and nothing is said of others. ``regions``: the values of each class.
    """
    refuse_missing((truth, prediction) if dataset is None else (prediction,))
    if is_single_volume(truth) and prediction.is_file():
        annotated = dataset.cases[0].annotated if dataset and dataset.cases else None
        return Matched([Pair(strip_suffix(truth.name), truth, prediction, annotated)], [], [])
    if prediction.is_file() or is_single_volume(truth):
        raise ValueError(f"{truth} and {prediction}: give two folders or two files")
    pairs, missing, faults = list[Pair](), list[str](), list[DataError]()
    shown, doubts = dict[str, tuple[int, ...] | None](), dict[str, Doubt]()
    if dataset is not None:
        faults += dataset.faults
        truth_files = {case.id: [case.label] for case in dataset.cases if case.label is not None}
        shown = {case.id: case.annotated for case in dataset.cases}
        doubts = doubts_of(dataset, regions)
    else:
        truth_files = list_label_files(truth)
    if not truth_files:
        raise (faults or [DataError(truth, f"holds no label map ({' or '.join(SUFFIXES)})")])[0]
    predicted_files = list_label_files(prediction)
    if only is not None:
        truth_files = {case: files for case, files in truth_files.items() if case in only}
        predicted_files = {case: files for case, files in predicted_files.items() if case in only}
        if not truth_files and not faults:
            raise DataError(truth, f"holds none of the cases that the run kept for tests, such as {min(only)}")
    if common:
        predicted_files = {case: files for case, files in predicted_files.items() if case in truth_files}
        truth_files = {case: files for case, files in truth_files.items() if case in predicted_files} or truth_files
    for case in sorted(truth_files | predicted_files):
        truths, predictions = truth_files.get(case, []), predicted_files.get(case, [])
        duplicates = next((files for files in (truths, predictions) if len(files) > 1), None)
        if duplicates:
            faults.append(DataError(duplicates[0], f"is there as {duplicates[1]} too: keep one of them"))
        elif not predictions:
            missing.append(case)
        elif not truths:
            faults.append(DataError(predictions[0], f"has no truth of this name in {truth}"))
        else:
            pairs.append(Pair(case, truths[0], predictions[0], shown.get(case), doubts.get(case)))
    if not pairs and not faults:
        part = " that the run kept for tests" * (only is not None)
        raise DataError(prediction, f"holds no prediction of a case in {truth}{part}: name files as the cases, such as "
                        f"{missing[0]}{output_suffix(truth_files[missing[0]][0])}")  # fmt: skip
    return Matched(pairs, missing, faults)


def read_label_map(path: Path) -> tuple[NDArray[Any], Geometry]:
    """Returns a label map ``W D H`` as integers in canonical orientation, and the geometry of its file."""
    array, geometry, _ = read_volume(path)
    if len(array) != 1:
        raise DataError(path, f"holds {len(array)} channels: a label map has one value per voxel")
    values = to_canonical(array[0], geometry.orientation)
    if values.dtype.kind == "f":
        whole = np.rint(values)
        if not np.allclose(values, whole, rtol=0, atol=1e-3):
            raise DataError(path, "holds values that are not whole numbers: a label map is needed")
        values = whole.astype(np.int32)
    return values, geometry


def doubts_of(dataset: Dataset, regions: Collection[Collection[int]] = ()) -> dict[str, Doubt]:
    """Returns how the truth of each case is written, if its labels have doubt; else nothing; ``regions``: of scores."""
    if not (dataset.readers or dataset.probabilities):
        return {}
    joined = tuple(dataset.joined.items())
    channels = tuple(sorted({*dataset.labels.values(), *dataset.joined})) if dataset.probabilities else ()
    more = channels, joined, bool(with_several(regions))
    return {case.id: Doubt(dict(zip(dataset.readers, case.labels)), *more) for case in dataset.cases}


def read_reference(
    truth: Path, doubt: Doubt | None, declared: frozenset[int] | None = None, regions: Collection[Collection[int]] = ()
) -> Reference:
    """Returns a true label map; of one with doubt, what most readers agree on or is most probable.

    - ``declared``: values that label maps may have; None: any; ``regions``: the values of each class
    """
    if doubt is None:
        values, geometry = read_label_map(truth)
        if declared is not None:
            check_values(truth, values, declared)
        return Reference(values, geometry, {})
    if doubt.channels:
        array, geometry, _ = read_volume(truth)
        if len(array) != len(doubt.channels):
            raise DataError(truth, f"holds {len(array)} channels: {len(doubt.channels)} probabilities are needed")
        array, joined = to_canonical(array, geometry.orientation), dict(doubt.joined)
        sums = dict[int, NDArray[Any]]()  # before the most probable is taken, as training does
        for value, channel in zip((joined.get(value, value) for value in doubt.channels), array):
            sums[value] = sums[value] + channel if value in sums else channel
        own = [{n for n, value in enumerate(sums) if value in region} for region in with_several(regions)]
        most = np.asarray([*sums])[agreed([*sums.values()], 1, own)]
        return Reference(most, geometry, {}, [*sums.items()])
    maps, first = dict[str, NDArray[Any]](), None
    for name, path in doubt.readers.items():
        values, geometry = read_label_map(path)
        first = first or geometry
        if (difference := geometry_difference(geometry, first)) is not None:
            raise DataError(path, f"does not lie on {truth}: {difference}; draw it on the same image")
        if declared is not None:
            check_values(path, values, declared)
        maps[name] = _joined(values, doubt)
    assert first is not None
    return Reference(agreed_values(list(maps.values()), regions), first, maps)


def _joined(values: NDArray[Any], doubt: Doubt) -> NDArray[Any]:
    for value, counts_as in doubt.joined:
        values = np.where(values == value, counts_as, values)
    return values


def refuse_unknown(labels: Labels, pairs: Iterable[Pair]) -> None:
    """Raises ValueError for a class that no data set declares and no label map has; reads no more maps than it must."""
    left, seen = dict(labels.undeclared), set[int]()
    files = ((path, doubt) for pair in pairs for path, doubt in ((pair.truth, pair.doubt), (pair.prediction, None)))
    for path, doubt in files:
        if not left:
            return
        try:
            reference = read_reference(path, doubt)
            for own in (reference.values, *reference.readers.values()):
                seen |= set(np.unique(own).tolist())
        except DataError:  # which scoring names
            return
        left = {name: values for name, values in left.items() if seen.isdisjoint(values)}
    if seen and left:
        name, values = next(iter(left.items()))
        known = sorted(seen | labels.declared.difference(*labels.undeclared.values()))
        raise ValueError(
            f"--regions {name}={','.join(map(str, values))}: no label map and no dataset.json has such a value, "
            f"they have {known}: name one of those, or declare it by --dataset"
        )


def score_pair(pair: Pair, labels: Labels, settings: dict[str, Any]) -> Scores:
    """Returns the scores of one case, read from its two files; ``settings`` are keyword arguments of ``score``."""
    ignored = frozenset() if labels.ignore is None else frozenset({labels.ignore})
    truth, geometry, readers = read_reference(
        pair.truth, pair.doubt, labels.declared | ignored, labels.classes.values()
    )[:3]
    prediction, predicted_geometry = read_label_map(pair.prediction)
    if (difference := geometry_difference(predicted_geometry, geometry)) is not None:
        problem = f"does not lie on {pair.truth}: {difference}; write it in the geometry of the source"
        raise DataError(pair.prediction, problem)
    check_values(pair.prediction, prediction, labels.declared)
    known: dict[str, Any] = {"ignore": labels.ignore, "hidden": hidden_classes(labels.classes, pair.shown)}
    known["voxel_ml"] = geometry.voxel_ml
    spacing = geometry.canonical_spacing
    scores = score(truth, prediction, labels.classes, spacing, **known, **settings)
    if readers:
        agreement = score_readers(readers, prediction, labels.classes, geometry.voxel_ml, settings["empty"])
        scores = {name: row | agreement[name] for name, row in scores.items()}
    return scores


def score_pairs(
    pairs: Sequence[Pair], labels: Labels, settings: dict[str, Any], workers: int = 1
) -> Iterator[tuple[Pair, Scores | DataError]]:
    """Yields, case by case in order, its scores or what is wrong with its files; ``workers`` processes score them."""
    yield from map_pairs(partial(score_pair, labels=labels, settings=settings), pairs, workers)


def map_pairs(
    work: Callable[[Pair], Result], pairs: Sequence[Pair], workers: int = 1
) -> Iterator[tuple[Pair, Result | DataError]]:
    """Yields, case by case in order, what ``work`` returns of it, or what is wrong with its files."""
    if workers < 1:
        raise ValueError(f"workers is {workers}: at least 1 is needed")
    if workers == 1:
        for pair in pairs:
            try:
                yield pair, work(pair)
            except DataError as error:
                yield pair, error
        return
    with closing(calls_in_forks(work, pairs, workers)) as calls:
        try:
            for pair, call in zip(pairs, calls):
                try:
                    yield pair, call.result()
                except DataError as error:
                    yield pair, error
        except BrokenProcessPool as error:
            raise MemoryError(
                f"a worker was killed, perhaps because memory ran out: lower --workers {workers}"
            ) from error
