"""Scores of a predicted mask against the true one: boolean arrays of any number of dims, spacing in mm.

Where there is nothing to measure a score is NaN: 0 / 0 (both masks empty) and distances between two empty
masks. Where exactly one mask is empty, overlaps and the surface Dice are 0 and distances infinite. What such
values count for in a mean is a policy, which the caller of this file states.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from seqpar.data.boxes import crop, smallest_box

Mask = NDArray[np.bool_]
Distances = NDArray[np.float64]


def check(truth: Mask, prediction: Mask, spacing: Sequence[float] | None = None) -> None:
    """Returns nothing; raises where two masks cannot be compared."""
    if truth.dtype != np.bool_ or prediction.dtype != np.bool_:
        raise ValueError(f"masks are {truth.dtype} and {prediction.dtype}: pass boolean arrays (labels == 1)")
    if truth.shape != prediction.shape:
        raise ValueError(f"truth has shape {truth.shape}, prediction {prediction.shape}: they must be equal")
    if spacing is not None and (len(spacing) != truth.ndim or not all(0 < s < np.inf for s in spacing)):
        raise ValueError(f"spacing is {tuple(spacing)}: give {truth.ndim} positive numbers, one a dim, in mm")


def ratio(numerator: float, denominator: float) -> float:
    """Returns the quotient, NaN for 0 / 0."""
    return float(numerator / denominator) if denominator else float("nan")


@dataclass(frozen=True)
class Confusion:
    """Voxel counts; the sum over cases gives the global scores, whose voxels all weigh the same."""

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
        """(predicted − true) / true volume: signed; NaN where the truth is empty."""
        return ratio(self.fp - self.fn, self.tp + self.fn)


def confusion(truth: Mask, prediction: Mask) -> Confusion:
    """Returns the voxel counts of two masks."""
    check(truth, prediction)
    tp, num_true, num_predicted = (int(np.count_nonzero(m)) for m in (truth & prediction, truth, prediction))
    fp, fn = num_predicted - tp, num_true - tp
    return Confusion(tp, fp, fn, truth.size - tp - fp - fn)


def surface(mask: Mask) -> Mask:
    """Returns the mask's voxels that share a face with the background; beyond the border is background."""
    return mask & ~ndimage.binary_erosion(mask)


def surface_distances(truth: Mask, prediction: Mask, spacing: Sequence[float]) -> tuple[Distances, Distances]:
    """Returns distances in mm, from each surface voxel of the prediction to the truth's surface, and back.

    Taken in the box around both masks, which is exact: all surface voxels lie in it, and what it cuts off is
    background, as is everything beyond a volume's border. A distance transform, not a search tree: the
    tree is two to eight times faster on smooth shapes, but nine times slower on scattered predictions.
    """
    check(truth, prediction, spacing)
    if not truth.any() or not prediction.any():
        lost = [np.full(int(surface(mask).sum()), np.inf) for mask in (prediction, truth)]
        return lost[0], lost[1]
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


class LesionScores(NamedTuple):
    """Lesion-wise Dice and HD95 of a case, and its numbers of found, missed and falsely predicted lesions."""

    dice: float
    hd95: float
    found: int
    missed: int
    false: int


def lesion_wise(
    truth: Mask,
    prediction: Mask,
    spacing: Sequence[float],
    dilation: int = 3,
    min_volume: float = 50.0,
    lost: float = 374.0,
) -> LesionScores:
    """Returns the scores of the BraTS 2023 challenge, whose lesions count alike, however large.

    True components (neighbours by face, edge or corner) whose dilations touch are one lesion. A lesion's
    match is every predicted component that touches its dilation; the two are compared undilated. Lesions of
    up to ``min_volume`` mm³ do not count, though what matches them is no false positive; any other unmatched
    predicted component is one, of whatever size, with Dice 0 and HD95 ``lost``, as has a missed lesion.
    Without lesions and false positives the scores are 1 and 0. The challenge takes dilation 1 for meningioma
    and metastases, and volume 2 for metastases. Its HD95 weighs surface voxels by area, ours counts them.
    """
    check(truth, prediction, spacing)
    if dilation < 0 or min_volume < 0:
        raise ValueError(f"dilation is {dilation}, min_volume {min_volume}: neither can be negative")
    if not (truth.any() or prediction.any()):
        return LesionScores(1.0, 0.0, 0, 0, 0)
    # No margin for the dilation: what touches outside the box around two voxels touches inside it too.
    box = smallest_box(truth | prediction)
    truth, prediction = crop(truth, box), crop(prediction, box)
    neighbours = np.ones((3,) * truth.ndim, bool)
    step = ndimage.generate_binary_structure(truth.ndim, 2)
    # An iteration count of 0 would mean "until nothing changes" to scipy.
    dilated = ndimage.binary_dilation(truth, step, iterations=dilation) if dilation else truth
    grown, num_lesions = ndimage.label(dilated, neighbours)
    parts, num_parts = ndimage.label(prediction, neighbours)
    touching = (grown > 0) & (parts > 0)
    matches = np.unique(np.stack([grown[touching], parts[touching]]), axis=1)
    false = num_parts - len(np.unique(matches[1]))

    volumes = np.bincount(grown[truth], minlength=num_lesions + 1) * float(np.prod(spacing))
    grown_boxes, part_boxes = ndimage.find_objects(grown), ndimage.find_objects(parts)
    dices, distances, num_found = [], [], 0
    for lesion in np.flatnonzero(volumes > min_volume):
        match = matches[1][matches[0] == lesion]
        around = hull([grown_boxes[lesion - 1], *(part_boxes[part - 1] for part in match)])
        its_truth = truth[around] & (grown[around] == lesion)
        its_match = np.isin(parts[around], match)
        dices.append(confusion(its_truth, its_match).dice)
        distances.append(hd95(its_truth, its_match, spacing) if len(match) else lost)
        num_found += len(match) > 0
    count = len(dices) + false
    if not count:
        return LesionScores(1.0, 0.0, 0, 0, 0)
    distance = (sum(distances) + lost * false) / count
    return LesionScores(sum(dices) / count, distance, num_found, len(dices) - num_found, false)


def hull(boxes: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
    """Returns the smallest box around several."""
    return tuple(slice(min(s.start for s in dim), max(s.stop for s in dim)) for dim in zip(*boxes))
