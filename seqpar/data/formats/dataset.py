"""Case and Dataset, into which every format is read, and the class of each case where volumes have one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError

TABLE = "labels.csv"  # beside the images
Split = tuple[tuple[str, ...], tuple[str, ...]]  # ids to train on, ids to validate on


@dataclass(frozen=True)
class VolumeClasses:
    """The classes of volumes.

    - ``names``: in the order of their numbers
    - ``numbers``: the class of each case
    - ``subjects``: of cases that are not their own; a subject's cases are never on both sides of a split
    - ``splits``: those that the data set defines; empty if they are computed
    - ``folds``: the numbers of these splits, where the data set gives cases those of their folds
    - ``tests``: cases that it keeps aside for tests, which have no part in any split
    """

    names: tuple[str, ...]
    numbers: Mapping[str, int]
    subjects: Mapping[str, str] = field(default_factory=dict)
    splits: tuple[Split, ...] = ()
    tests: tuple[str, ...] = ()
    folds: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns what ``from_json`` reads."""
        return {
            "names": list(self.names),
            "numbers": dict(sorted(self.numbers.items())),
            "subjects": dict(sorted(self.subjects.items())),
            "splits": [[list(part) for part in split] for split in self.splits],
            "tests": list(self.tests),
            "folds": list(self.folds),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "VolumeClasses":
        """Returns the classes that ``to_json`` described."""
        splits = tuple((tuple(train), tuple(held_out)) for train, held_out in value["splits"])
        own = tuple(value["names"]), dict(value["numbers"]), dict(value["subjects"])
        return VolumeClasses(*own, splits, tuple(value.get("tests", ())), tuple(value.get("folds", ())))

    def subject_of(self, case: str) -> str:
        """Returns a case's subject, by default itself."""
        return self.subjects.get(case, case)

    def counts(self, cases: Sequence[str]) -> list[int]:
        """Returns how many of the cases each class has."""
        numbers = [self.numbers[case] for case in cases]
        return [numbers.count(number) for number in range(len(self.names))]


__all__ = ["Case", "Dataset", "Split", "no_labels_error"]


@dataclass(frozen=True)
class Case:
    """One patient: a file per modality (or one 4-D file of them all), and the label where there is one.

    ``annotated``: the values of the classes that the label shows, background apart; None for all.
    """

    id: str
    images: tuple[Path, ...]
    label: Path | None = None
    annotated: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """A data set as its files have it: cases, modalities, and labels by their values in the files."""

    name: str
    root: Path
    layout: str  # the format that was recognised, in words
    cases: tuple[Case, ...]
    modalities: tuple[str, ...]
    labels: dict[str, int]  # background 0 first; empty if there are only images
    regions: dict[str, tuple[int, ...]] = field(default_factory=dict)
    regions_class_order: tuple[int, ...] = ()  # per region, the label that its voxels get
    ignore_label: int | None = None
    splits: tuple[Split, ...] = ()  # those that the data set defines; empty if they are computed
    faults: tuple[DataError, ...] = ()  # what is wrong with single cases, which `cases` leaves out
    joined: dict[int, int] = field(default_factory=dict)  # values in the files that count as another value
    volume_classes: VolumeClasses | None = None  # where each case has one class, and voxels have no labels

    def __post_init__(self) -> None:
        if not self.cases and not self.faults:
            raise DataError(self.root, f"no cases were found in it (read as {self.layout}); name another folder")
        for case in self.cases:
            if case.id.startswith(".") or Path(case.id).name != case.id:
                raise DataError(self.root, f"case id {case.id!r} is no file name; rename the case")
        if self.labels:
            _check_labels(self)

    @property
    def ids(self) -> tuple[str, ...]:
        """Returns the ids of the usable cases, sorted."""
        return tuple(sorted(case.id for case in self.cases))


def no_labels_error(dataset: Dataset) -> DataError:
    """Returns the DataError for a data set without labels that is to be trained on."""
    if (dataset.root / TABLE).is_file():
        return DataError(dataset.root, f"has no label maps, and {TABLE} gives each case a class: add --task classify")
    return DataError(dataset.root, "has no labels to train on; add them (prediction prepares by itself)")


def _check_labels(dataset: Dataset) -> None:
    """Raises DataError if labels, regions, their order and the ignore label contradict each other."""
    values, root = list(dataset.labels.values()), dataset.root
    if values[0] != 0 or min(values) < 0 or len(set(values)) != len(values):
        raise DataError(root, f"its labels are {dataset.labels}; background 0 is needed and each value once")
    if len(values) < 2:
        raise DataError(root, "declares nothing but background; name at least one label")
    if dataset.ignore_label in values:
        raise DataError(root, f"the ignore label {dataset.ignore_label} is a label too; give it its own value")
    for name, members in dataset.regions.items():
        if not members or not set(members) <= set(values):
            raise DataError(root, f"region {name} = {members} is not made of the labels {values}")
    order = dataset.regions_class_order
    if len(order) != len(dataset.regions) or not set(order) <= set(values):
        raise DataError(
            root,
            f"regions_class_order is {list(order)}; with the regions {list(dataset.regions)} it must name "
            "one of the labels for each, the one that the region's voxels get",
        )
