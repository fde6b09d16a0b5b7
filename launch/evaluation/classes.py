"""Which classes are scored and which values a label map may hold: as BraTS, a data set or its dataset.json has it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.formats.brats import MEANINGS
from seqpar.data.formats.recognise import Dataset, declared_in

BRATS = {  # how the command line spells the years of the one table
    "2021": "to 2021",
    "2023": "2023",
    "2024-glioma": "2024, glioma after treatment",
    "2024-paediatric": "2024, paediatric",
    "msd": "Medical Segmentation Decathlon",
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


def of_classes(classes: dict[str, tuple[int, ...]]) -> Labels:
    """Returns labels that hold the values of these classes, and 0."""
    return Labels(classes, frozenset({0}.union(*classes.values())))


def of_brats(year: str) -> Labels:
    """Returns the regions of BraTS in the label values of a year."""
    meaning = MEANINGS[BRATS[year]]
    return Labels(dict(meaning.regions), frozenset(meaning.labels.values()))


def of_declared(labels: Mapping[str, int], regions: Mapping[str, tuple[int, ...]], ignore: int | None) -> Labels:
    """Returns labels and regions as a data set declares them; a region of one label is that label by its own name.

    Beside regions, a value without a name of its own is declared, but no class.
    """
    named = {n: v for n, v in labels.items() if v and not (regions and re.fullmatch(r"label \d+", n))}
    members = {name: (value,) for name, value in named.items()} | dict(regions)
    names = {values: name for name, values in members.items()}
    return Labels({name: values for values, name in names.items()}, frozenset({0, *labels.values()}), ignore)


def of_dataset(dataset: Dataset) -> Labels:
    """Returns the classes of a data set."""
    return of_declared(dataset.labels, dataset.regions, dataset.ignore_label)


def read_labels_of(path: Path) -> Labels:
    """Returns the classes that a dataset.json declares, as training takes them."""
    declared = declared_in(path)
    try:
        return of_declared(*declared)
    except ValueError as error:
        raise DataError(path, str(error)) from error


def find_declaration(truth: Path) -> Path | None:
    """Returns the dataset.json in the truth's folder or in the folder above it, None if there is none."""
    folder = truth if truth.is_dir() else truth.parent
    places = folder / "dataset.json", folder.resolve().parent / "dataset.json"
    return next((place for place in places if place.exists()), None)


SETTINGS = {"nsd_tolerance": 1.0, "lesion_wise": False, "empty": "skip"}


def labels_in_files(described: Mapping[str, Any]) -> Labels:
    """Returns the labels and regions of a run in the files' values."""
    values, ignore = described["values"], described["ignore_label"]
    labels = {name: values[n] for name, n in described["labels"].items()}
    regions = {name: tuple(values[n] for n in ids) for name, ids in described["regions"].items()}
    return of_declared(labels, regions, None if ignore is None else values[ignore])
