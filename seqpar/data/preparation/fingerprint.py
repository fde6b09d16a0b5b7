"""Reads from a data set's headers, before anything is prepared: shapes, spacings, channels, classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case, Dataset, Split, VolumeClasses, no_labels_error
from seqpar.data.geometry import Geometry
from seqpar.data.preparation.prepared_case import refuse_mismatch, resampled_shape
from seqpar.data.volumes import read_geometry
from seqpar.data.workers import ReportProgress, default_workers, map_in_processes, no_item_progress

Sides = tuple[int, int, int]
Millimetres = tuple[float, float, float]
LEAST_CROP = 1 / 8  # what cropping leaves of a volume: half of each side, and usually more
CASES_OF_A_WORKER = 64  # whose headers one process reads at least: starting it takes as long


@dataclass(frozen=True)
class Fingerprint:
    """A summary of a data set; ``shapes`` (W D H) and ``spacings`` (mm) are those of each case in canonical axes.

    ``labels``: the names of voxel labels, or of volume classes if there are ``volume_classes``.
    """

    name: str
    layout: str
    ids: tuple[str, ...]
    splits: tuple[Split, ...]
    modalities: tuple[str, ...]
    labels: tuple[str, ...]
    regions: tuple[str, ...]
    shapes: tuple[Sides, ...]
    spacings: tuple[Millimetres, ...]
    volume_classes: VolumeClasses | None = None

    def outputs(self, targets: str) -> tuple[str, ...]:
        """Returns the names of a network's outputs: regions if it has some and ``targets`` wants them, else labels."""
        if targets == "sigmoids":
            return self.labels[1:]
        return self.regions if self.regions and targets == "regions" else self.labels

    @property
    def shape(self) -> Sides:
        """The median number of voxels in each direction."""
        w, d, h = (int(side) for side in np.median(self.shapes, 0))
        return w, d, h

    def largest(self, target: str | Millimetres) -> Sides:
        """Returns the smallest size that contains every case; ``target``: the spacing, as for preparation."""
        shapes = np.array(self.shapes)
        if target != "source":
            sizes = self.spacing if target == "median" else target
            shapes = np.ceil(shapes * np.array(self.spacings) / np.array(sizes))
        w, d, h = (int(side) for side in shapes.max(0))
        return w, d, h

    @property
    def spacing(self) -> Millimetres:
        """The median voxel size in each direction, in mm."""
        return median_spacing(self.spacings)


def median_spacing(spacings: Sequence[Millimetres]) -> Millimetres:
    """Returns the median voxel size in each direction."""
    w, d, h = (float(size) for size in np.median(spacings, 0))
    return w, d, h


def read_fingerprint(dataset: Dataset, labelled: bool = True, spacing: str | Millimetres = "source") -> Fingerprint:
    """Returns the fingerprint of a data set, from the headers of each case's files.

    - ``spacing``: that of the prepared cases

    Raises DataError for the first unusable case, and, if ``labelled``, for a data set without labels.
    """
    if dataset.faults:
        raise dataset.faults[0]
    outputs = tuple(dataset.labels) if dataset.volume_classes is None else dataset.volume_classes.names
    if labelled and not outputs:
        raise no_labels_error(dataset)
    shapes, spacings, read = list[Sides](), list[Millimetres](), read_geometries(dataset, spacing=spacing)
    for case in dataset.cases:
        if dataset.labels and case.label is None:
            raise DataError(case.images[0], "has no label; add it, or remove the image")
        geometry = read[case.id]
        if isinstance(geometry, DataError):
            raise geometry
        shapes.append(geometry.canonical_shape)
        spacings.append(geometry.canonical_spacing)
    return Fingerprint(
        dataset.name,
        dataset.layout,
        dataset.ids,
        dataset.splits,
        dataset.modalities,
        outputs,
        tuple(dataset.regions),
        tuple(shapes),
        tuple(spacings),
        dataset.volume_classes,
    )


def read_geometries(
    dataset: Dataset,
    workers: int | None = None,
    beat: Callable[[], None] = lambda: None,
    spacing: str | Millimetres = "source",
) -> dict[str, Geometry | DataError]:
    """Returns the geometry of each case by id, from its files' headers, or why it cannot be used.

    - ``workers``: processes; 0: this one (default: the number of cores, at most 8)
    - ``beat``: called about once a second
    - ``spacing``: that of the prepared cases, which may leave nothing of a case, or more than memory holds
    """
    workers = min(default_workers() if workers is None else workers, len(dataset.cases) // CASES_OF_A_WORKER)
    shares = [dataset.cases[first :: max(workers, 1)] for first in range(max(workers, 1))]
    read, work = dict[str, Geometry | DataError](), _Headers(dataset.modalities, spacing, dataset.label_channels)
    for _, outcome in map_in_processes(work, shares, workers, lambda _: beat()):
        if isinstance(outcome, dict):  # else its process was killed, and preparation will tell of its cases
            read |= outcome
    return read


@dataclass(frozen=True)
class _Headers:
    """Reads the headers of some cases."""

    modalities: tuple[str, ...]
    spacing: str | Millimetres
    label_channels: int

    def __call__(
        self, cases: Sequence[Case], tell: ReportProgress = no_item_progress
    ) -> dict[str, Geometry | DataError]:
        read = dict[str, Geometry | DataError]()
        for case in cases:
            try:
                read[case.id] = self._geometry(case)
            except DataError as fault:
                read[case.id] = fault
        return read

    def _geometry(self, case: Case) -> Geometry:
        first: Geometry | None = None
        for path in case.files:
            geometry, num_channels = read_geometry(path)
            first = first or geometry
            refuse_mismatch(case, path, geometry, num_channels, first, self.modalities, self.label_channels)
        assert first is not None
        if not isinstance(self.spacing, str):
            shape, own = first.canonical_shape, first.canonical_spacing
            resampled_shape(shape, own, self.spacing, len(self.modalities), case, LEAST_CROP)
        return first
