"""Scores of a predicted mask against the true one: boolean arrays of any number of dims, spacing in mm.

If both masks are empty, overlaps (0 / 0) and distances are NaN. If only one is, overlaps and the surface Dice are 0
and distances infinite. How such values count in a mean is the caller's choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from seqpar.data.boxes import crop, smallest_box
from seqpar.late_import import late

ndimage, morphology = late("scipy.ndimage"), late("skimage.morphology")  # batchgenerators needs both
Mask = NDArray[np.bool_]
Distances = NDArray[np.float64]


def check_comparable(truth: Mask, prediction: Mask, spacing: Sequence[float] | None = None) -> None:
    """Raises ValueError if two masks cannot be compared."""
    if truth.dtype != np.bool_ or prediction.dtype != np.bool_:
        raise ValueError(f"masks are {truth.dtype} and {prediction.dtype}: pass boolean arrays (labels == 1)")
    if truth.shape != prediction.shape:
        raise ValueError(f"truth has shape {truth.shape}, prediction {prediction.shape}: they must be equal")
    if spacing is not None and (len(spacing) != truth.ndim or not all(0 < s < np.inf for s in spacing)):
        raise ValueError(f"spacing is {tuple(spacing)}: give {truth.ndim} positive numbers, one per dim, in mm")


def ratio(numerator: float, denominator: float) -> float:
    """Returns the quotient, NaN for 0 / 0."""
    return float(numerator / denominator) if denominator else float("nan")


@dataclass(frozen=True)
class Confusion:
    """Voxel counts; their sum over cases gives the global scores, in which every voxel weighs the same."""

    tp: int = 0
    fp: int = 0
    fn: int = 0
    tn: int = 0

    def __add__(self, other: "Confusion") -> "Confusion":
        return Confusion(self.tp + other.tp, self.fp + other.fp, self.fn + other.fn, self.tn + other.tn)

    @property
    def dice(self) -> float:
        return ratio(2 * self.tp, 2 * self.tp + self.fp + self.fn)

    @property
    def iou(self) -> float:
        return ratio(self.tp, self.tp + self.fp + self.fn)

    @property
    def sensitivity(self) -> float:
        return ratio(self.tp, self.tp + self.fn)

    @property
    def specificity(self) -> float:
        return ratio(self.tn, self.tn + self.fp)

    @property
    def volume_error(self) -> float:
        """(predicted − true) / true volume, signed; NaN if the truth is empty."""
        return ratio(self.fp - self.fn, self.tp + self.fn)


class DistanceNotMeasured(Exception):
    """Says that a metric needs what a quick comparison leaves out."""


@dataclass(frozen=True)
class Masks:
    """A class of one case, as metrics take it: two masks, with what several metrics need computed once.

    ``tolerance``: in mm, of the surface Dice; ``surfaces``: whether distances are measured, which takes most time.
    """

    truth: Mask
    prediction: Mask
    spacing: tuple[float, ...]
    tolerance: float = 1.0
    surfaces: bool = True

    @cached_property
    def confusion(self) -> Confusion:
        """The voxel counts."""
        return confusion(self.truth, self.prediction)

    @cached_property
    def distances(self) -> tuple[Distances, Distances]:
        """The distances in mm between the surfaces, in both directions; raises NotMeasured in a quick comparison."""
        if not self.surfaces:
            raise DistanceNotMeasured
        return surface_distances(self.truth, self.prediction, self.spacing)


def hd95_of(masks: Masks) -> float:
    """Returns the 95 % Hausdorff distance in mm."""
    return hausdorff(masks.distances)


def nsd_of(masks: Masks) -> float:
    """Returns the normalised surface Dice at the tolerance."""
    return surface_dice(masks.distances, masks.tolerance)


def centreline_recall(truth: Mask, prediction: Mask) -> float:
    """Returns the share of the truth's skeleton that is predicted, clDice's topology sensitivity; NaN without truth."""
    box = smallest_box(truth)
    skeleton = morphology.skeletonize(crop(truth, box)) if truth.any() else crop(truth, box)
    return ratio(int(np.count_nonzero(skeleton & crop(prediction, box))), int(np.count_nonzero(skeleton)))


def confusion(truth: Mask, prediction: Mask) -> Confusion:
    """Returns the voxel counts of two masks."""
    check_comparable(truth, prediction)
    tp, num_true, num_predicted = (int(np.count_nonzero(m)) for m in (truth & prediction, truth, prediction))
    fp, fn = num_predicted - tp, num_true - tp
    return Confusion(tp, fp, fn, truth.size - tp - fp - fn)


def surface(mask: Mask) -> Mask:
    """Returns the mask's voxels that share a face with the background; outside the array is background."""
    return mask & ~ndimage.binary_erosion(mask)


def surface_distances(truth: Mask, prediction: Mask, spacing: Sequence[float]) -> tuple[Distances, Distances]:
    """Returns the distances in mm from each surface voxel of the prediction to the truth's surface, and the reverse.

    They are computed in the box around both masks, which is exact: all surface voxels lie in it, and what it cuts off
    is background, as is everything outside the array. A search tree instead of the distance transform is two to eight
    times faster on smooth shapes, but nine times slower on scattered predictions.
    """
    check_comparable(truth, prediction, spacing)
    if not truth.any() or not prediction.any():
        infinite = [np.full(int(surface(mask).sum()), np.inf) for mask in (prediction, truth)]
        return infinite[0], infinite[1]
    box = smallest_box(truth | prediction)
    true_surface, predicted_surface = surface(crop(truth, box)), surface(crop(prediction, box))
    to_truth = ndimage.distance_transform_edt(~true_surface, sampling=tuple(spacing))[predicted_surface]
    to_prediction = ndimage.distance_transform_edt(~predicted_surface, sampling=tuple(spacing))[true_surface]
    return to_truth, to_prediction


def hausdorff(distances: tuple[Distances, Distances], percent: float = 95.0) -> float:
    """Returns the larger of the two directions' percentiles (linear between ranks); NaN if both are empty.

    This is MONAI's symmetric definition: surface voxels count once each, and the percentile is taken in each
    direction before the larger is chosen (others pool both directions, or weigh voxels by surface area).
    """
    if not all(len(d) for d in distances):
        return float("inf") if any(len(d) for d in distances) else float("nan")
    return max(float(np.percentile(d, percent)) for d in distances)


def surface_dice(distances: tuple[Distances, Distances], tolerance: float) -> float:
    """Returns the part of both surfaces within a tolerance (mm) of the other one; NaN if both are empty.

    Compared in float32, so that a distance that equals the tolerance but for rounding lies within it.
    """
    if not 0 <= tolerance < np.inf:
        raise ValueError(f"tolerance is {tolerance}: give a distance in mm, 0 or more")
    near = sum(int(np.count_nonzero(d.astype(np.float32) <= np.float32(tolerance))) for d in distances)
    return ratio(near, sum(len(d) for d in distances))


def hd95(truth: Mask, prediction: Mask, spacing: Sequence[float]) -> float:
    """Returns the 95 % Hausdorff distance in mm."""
    return hausdorff(surface_distances(truth, prediction, spacing))


def nsd(truth: Mask, prediction: Mask, spacing: Sequence[float], tolerance: float) -> float:
    """Returns the normalised surface Dice at a tolerance in mm."""
    return surface_dice(surface_distances(truth, prediction, spacing), tolerance)
