"""Which classes are scored and which values a label map may hold, as BraTS or a data set declares them."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.data.errors import DataError
from seqpar.data.formats.brats import LABEL_SCHEMES
from seqpar.data.formats.dataset import Dataset
from seqpar.data.formats.recognise import read_declaration

BRATS = {  # the command line's names for the label tables of BraTS
    "2021": "to 2021",
    "2023": "2023",
    "2024-glioma": "2024, glioma after treatment",
    "2024-paediatric": "2024, paediatric",
    "msd": "Medical Segmentation Decathlon",
}


@dataclass(frozen=True)
class Labels:
    """The classes to score.

    ``classes`` maps a name to its label values (several for a region), ``declared`` holds every value that a label
    map may have, ``ignore`` is the true value whose voxels are left out. ``undeclared`` holds the classes that
    only the command line names.
    """

    classes: dict[str, tuple[int, ...]]
    declared: frozenset[int]
    ignore: int | None = None
    undeclared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("there is no class to score: declare at least one label other than 0")
        names: dict[tuple[int, ...], str] = {}
        for name, labels in self.classes.items():
            if labels in names:
                raise ValueError(f"classes {names[labels]} and {name} are both {labels}: keep one of them")
            names[labels] = name


def hidden_classes(classes: Mapping[str, tuple[int, ...]], shown: Collection[int] | None) -> tuple[str, ...]:
    """Returns the classes that a label does not show, of the values that it shows (None: all)."""
    return () if shown is None else tuple(name for name, values in classes.items() if not set(values) <= set(shown))


def labels_of_classes(classes: dict[str, tuple[int, ...]]) -> Labels:
    """Returns labels that declare the values of these classes, and 0."""
    return Labels(classes, frozenset({0}.union(*classes.values())))


def labels_of_brats(year: str) -> Labels:
    """Returns the regions of BraTS in the label values of a year, a key of ``BRATS``."""
    meaning = LABEL_SCHEMES[BRATS[year]]
    return Labels(dict(meaning.regions), frozenset(meaning.labels.values()))


def labels_of_declaration(
    labels: Mapping[str, int], regions: Mapping[str, tuple[int, ...]], ignore: int | None
) -> Labels:
    """Returns the labels and regions that a data set declares; a region of one label replaces that label.

    Where there are regions, a value without a name of its own ("label 3") is declared, but no class.
    """
    named = {n: v for n, v in labels.items() if v and not (regions and re.fullmatch(r"label \d+", n))}
    members = {name: (value,) for name, value in named.items()} | dict(regions)
    names = {values: name for name, values in members.items()}
    return Labels({name: values for values, name in names.items()}, frozenset({0, *labels.values()}), ignore)


def labels_of_dataset(dataset: Dataset) -> Labels:
    """Returns the classes of a data set."""
    return labels_of_declaration(dataset.labels, dataset.regions, dataset.ignore_label)


def read_declared_labels(path: Path) -> Labels:
    """Returns the classes that a dataset.json declares, the same as in training."""
    declared = read_declaration(path)
    try:
        return labels_of_declaration(*declared)
    except ValueError as error:
        raise DataError(path, str(error)) from error


def find_declaration(truth: Path) -> Path | None:
    """Returns the dataset.json in the folder of the truth or in the one above, None if there is none."""
    folder = truth if truth.is_dir() else truth.parent
    places = folder / "dataset.json", folder.resolve().parent / "dataset.json"
    return next((place for place in places if place.exists()), None)


def learned_regions(
    labels: Mapping[str, int], regions: Mapping[str, tuple[int, ...]], targets: str
) -> dict[str, tuple[int, ...]]:
    """Returns what a network learns by sigmoids, as ``--targets`` says: regions, each label, or nothing."""
    if targets == "sigmoids":
        return {name: (value,) for name, value in labels.items() if value}
    return dict(regions) if targets == "regions" else {}


def labels_of_run(dataset: Mapping[str, Any]) -> Labels:
    """Returns the labels and regions of a run in the files' values, from "dataset" in its config.json."""
    values, ignore = dataset["values"], dataset["ignore_label"]
    labels = {name: values[n] for name, n in dataset["labels"].items()}
    regions = {name: tuple(values[n] for n in ids) for name, ids in dataset["regions"].items()}
    declared = labels_of_declaration(labels, regions, None if ignore is None else values[ignore])
    return with_joined(declared, joined_in(dataset))


def joined_in(dataset: Mapping[str, Any]) -> dict[int, int]:
    """Returns which of the files' values a run read as which other, from "dataset" in its config.json."""
    return {int(value): int(other) for value, other in (dataset.get("recipe") or {}).get("joined") or ()}


def with_joined(labels: Labels, joined: Mapping[int, int]) -> Labels:
    """Returns labels that also declare the files' values which count as another."""
    if not joined:
        return labels
    classes = {
        name: (*values, *(value for value, counts_as in joined.items() if counts_as in values))
        for name, values in labels.classes.items()
    }
    return Labels(classes, labels.declared | joined.keys(), labels.ignore)


def with_declared_by(truth: Path, dataset: Dataset | None, labels: Labels) -> Labels:
    """Returns a run's classes with what else a truth may hold and what it leaves open, as its own dataset.json says.

    - ``dataset``: that the truth is, if it is one
    """
    try:
        own = choose_labels(truth, dataset)
    except (DataError, ValueError, OSError):  # it need not declare any
        return labels
    return replace(labels, declared=labels.declared | own.declared, ignore=own.ignore)


def choose_labels(
    truth: Path,
    dataset: Dataset | None,
    declaration: Path | None = None,
    regions: Sequence[tuple[str, tuple[int, ...]]] = (),
    brats: str = "",
    otherwise: Callable[[], Labels | None] = lambda: None,
) -> Labels:
    """Returns the labels to score.

    ``brats`` (a key of ``BRATS``) decides alone. Else the labels are those of ``declaration`` (a dataset.json), of the
    ``dataset`` that the truth is, or of a dataset.json next to the truth; ``regions`` replaces their classes. Without
    any of these they are what ``otherwise`` returns.
    """
    if brats:
        return labels_of_brats(brats)
    if dataset is not None and dataset.modalities and not declaration:  # else it is label maps alone
        declared: Labels | None = labels_of_dataset(dataset)
    else:
        path = declaration or find_declaration(truth)
        declared = read_declared_labels(path) if path else None
    if not regions:
        if not (declared := declared or otherwise()):
            where = f"there is no dataset.json in {truth} or above it"
            raise ValueError(f"{where}: declare the labels by --dataset, --regions or --brats")
        return declared
    if len({name for name, _ in regions}) < len(regions):
        raise ValueError("--regions names a region twice")
    labels = labels_of_classes(dict(regions))
    known, ignore = (declared.declared, declared.ignore) if declared else (frozenset({0}), None)
    undeclared = {name: values for name, values in regions if not {*known, ignore}.intersection(values)}
    return Labels(labels.classes, labels.declared | known, ignore, undeclared)


def check_values(path: Path, values: NDArray[Any], declared: frozenset[int]) -> None:
    """Raises DataError if a label map holds a value that is not declared."""
    undeclared = sorted(set(np.unique(values).tolist()) - declared)
    if undeclared:
        raise DataError(
            path,
            f"holds {undeclared[:5]}, which is not among the declared labels {sorted(declared)}: "
            "declare it (dataset.json or --regions NAME=VALUE) or choose the preset that has it",
        )
