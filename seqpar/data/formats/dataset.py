"""Case and Dataset: the one description that all formats are read into."""

from dataclasses import dataclass, field
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.formats.volume_classes import TABLE, Split, VolumeClasses

__all__ = ["Case", "Dataset", "Split", "unlabelled"]


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


def unlabelled(dataset: Dataset) -> DataError:
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
