"""Reads from a data set's headers, before anything is prepared: shapes, spacings, channels, classes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Dataset, Split, VolumeClasses, no_labels_error
from seqpar.data.volumes import read_geometry

Sides = tuple[int, int, int]
Millimetres = tuple[float, float, float]


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


def read_fingerprint(dataset: Dataset, labelled: bool = True) -> Fingerprint:
    """Returns the fingerprint of a data set, from the headers of each case's images.

    Raises DataError for the first unusable case, and, if ``labelled``, for a data set without labels.
    """
    if dataset.faults:
        raise dataset.faults[0]
    outputs = tuple(dataset.labels) if dataset.volume_classes is None else dataset.volume_classes.names
    if labelled and not outputs:
        raise no_labels_error(dataset)
    shapes, spacings = list[Sides](), list[Millimetres]()
    for case in dataset.cases:
        if dataset.labels and case.label is None:
            raise DataError(case.images[0], "has no label; add it, or remove the image")
        geometry, num_channels = read_geometry(case.images[0])
        num_channels += len(case.images) - 1
        if num_channels != len(dataset.modalities):
            needed = f"{len(dataset.modalities)} modalities are needed ({', '.join(dataset.modalities)})"
            raise DataError(case.images[0], f"has {num_channels} channels with the other files of its case; {needed}")
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
