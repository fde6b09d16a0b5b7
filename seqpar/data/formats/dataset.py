"""Case and Dataset, into which every format is read, and the classes of volumes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqpar.data.errors import DataError

if TYPE_CHECKING:
    from seqpar.losses import SoftLabels

TABLE = "labels.csv"  # next to the images
LISTED = "MONAI list"  # the layout whose files are found in a list, and not in folders
Split = tuple[tuple[str, ...], tuple[str, ...]]  # ids to train on, ids to validate on


@dataclass(frozen=True)
class VolumeClasses:
    """The classes of volumes.

    - ``names``: in the order of their numbers
    - ``numbers``: the class of each case
    - ``subjects``: the subject of each case that is not its own; a split never divides a subject
    - ``splits``: those that the data set defines; empty if they are computed
    - ``folds``: the numbers of these splits, if the data set gives each case a fold number
    - ``tests``: cases set aside for testing, which are in no split
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
        """Returns a case's subject, by default the case itself."""
        return self.subjects.get(case, case)

    def counts(self, cases: Sequence[str]) -> list[int]:
        """Returns the number of cases in each class."""
        numbers = [self.numbers[case] for case in cases]
        return [numbers.count(number) for number in range(len(self.names))]


__all__ = ["Case", "Dataset", "Split", "no_labels_error"]


@dataclass(frozen=True)
class Case:
    """One patient: one file per modality (or one 4-D file with all of them), and the label if there is one.

    - ``annotated``: the values of the classes that the label shows, without the background; None: all of them
    - ``more_labels``: those of further readers, if the data set has several; ``label`` is the first reader's
    """

    id: str
    images: tuple[Path, ...]
    label: Path | None = None
    annotated: tuple[int, ...] | None = None
    more_labels: tuple[Path, ...] = ()

    @property
    def labels(self) -> tuple[Path, ...]:
        """The label files, one per reader; empty if there are none."""
        return () if self.label is None else (self.label, *self.more_labels)

    @property
    def files(self) -> tuple[Path, ...]:
        """The images and the labels."""
        return (*self.images, *self.labels)


@dataclass(frozen=True)
class Dataset:
    """A data set as its files describe it: cases, modalities, and labels with their values in the files."""

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
    faults: tuple[DataError, ...] = ()  # what is wrong with the cases that are missing from `cases`
    joined: dict[int, int] = field(default_factory=dict)  # values in the files that are read as another value
    volume_classes: VolumeClasses | None = None  # if each case has one class and voxels have no labels
    notes: tuple[str, ...] = ()  # what dataset.json says otherwise than the files, though they can be used
    readers: tuple[str, ...] = ()  # whose labels each case has; empty: one label per case
    probabilities: bool = False  # label files are 4-D: the probability of each label

    def __post_init__(self) -> None:
        if not self.cases and not self.faults:
            raise DataError(self.root, f"has no cases (read as {self.layout}); give another folder")
        for case in self.cases:
            if case.id.startswith(".") or Path(case.id).name != case.id:
                raise DataError(self.root, f"case id {case.id!r} is not a valid file name; rename the case")
        if self.labels:
            _check_labels(self)

    @property
    def ids(self) -> tuple[str, ...]:
        """Returns the ids of the usable cases, sorted."""
        return tuple(sorted(case.id for case in self.cases))

    @property
    def soft(self) -> "SoftLabels | None":
        """How labels with doubt are stored; None: each voxel has one class."""
        return soft_labels(len(self.labels), len(self.readers), self.probabilities)

    @property
    def label_channels(self) -> int:
        """The number of channels of a label file: one, or one per label value."""
        return len({*self.labels.values(), *self.joined}) if self.probabilities else 1

    def without(self, broken: Mapping[str, DataError]) -> "Dataset":
        """Returns the data set without cases that cannot be used, given what is wrong with them by id."""
        cases = tuple(case for case in self.cases if case.id not in broken)
        return replace(self, cases=cases, faults=(*self.faults, *broken.values()))


def soft_labels(num_classes: int, num_readers: int, probabilities: bool) -> "SoftLabels | None":
    """Returns how labels with doubt are stored; None if there is one label per voxel."""
    if not (probabilities or num_readers):
        return None
    from seqpar.losses import Probabilities, Readers  # imports torch, which reading a description else does not need

    if probabilities:
        return Probabilities(num_classes)
    return Readers(num_classes, num_readers)


def no_labels_error(dataset: Dataset) -> DataError:
    """Returns the error for training on a data set without labels."""
    if (dataset.root / TABLE).is_file():
        return DataError(dataset.root, f"has no label maps, and {TABLE} gives each case a class: add --task classify")
    return DataError(dataset.root, "has no labels to train on; add them (predict prepares images on its own)")


def _check_labels(dataset: Dataset) -> None:
    """Raises DataError if labels, regions, their order and the ignore label contradict each other."""
    values, root = list(dataset.labels.values()), dataset.root
    if values[0] != 0 or min(values) < 0 or len(set(values)) != len(values) or dataset.labels.get("background", 0) != 0:
        raise DataError(root, f"its labels are {dataset.labels}; they need background 0, and each value only once")
    if len(values) < 2:
        raise DataError(root, "declares only background; add at least one label")
    if dataset.ignore_label in values:
        raise DataError(root, f"the ignore label {dataset.ignore_label} is also a label; give it a value of its own")
    for name, members in dataset.regions.items():
        if not members or not set(members) <= set(values):
            raise DataError(root, f"region {name} = {members} has values other than those of the labels, {values}")
    try:
        soft = dataset.soft
    except ValueError as error:
        raise DataError(root, str(error)) from error
    if soft is not None and dataset.ignore_label is not None:
        declared = "readers" if dataset.readers else "soft_labels"
        raise DataError(root, f'declares both an ignore label and "{declared}"; remove one of them')
    order = dataset.regions_class_order
    if not len({*order}) == len(order) == len(dataset.regions) or not set(order) <= set(values):
        raise DataError(
            root,
            f"regions_class_order is {list(order)}; for each of the regions {list(dataset.regions)} it must give "
            "one label of its own, the one that the region's voxels get",
        )
    written = list(zip(dataset.regions.items(), order))
    for at, ((name, members), value) in enumerate(written):
        if value not in members:
            raise DataError(
                root,
                f"regions_class_order is {list(order)}, which writes region {name} ({' + '.join(map(str, members))}) "
                f"as {value}, which is not in it: give one label of each of {', '.join(dataset.regions)} in this order",
            )
        covering = next((other for (other, own), _ in written[at + 1 :] if set(members) < set(own)), None)
        if covering is not None:
            raise DataError(
                root,
                f"lists region {name} before {covering}, which contains it: label maps are written in this order, and "
                f"{covering} would hide {name}; list {covering} first, with its label in regions_class_order",
            )
