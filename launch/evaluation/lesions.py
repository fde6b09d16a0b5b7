"""Lesion-wise scores of a predicted mask, as in the BraTS 2023 challenge."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import ndimage

from seqpar.data.boxes import crop, smallest_box
from seqpar.launch.evaluation.metrics import (
    Mask,
    check,
    confusion,
    hd95,
)


class LesionScores(NamedTuple):
    """Lesion-wise Dice and HD95 (mm) of a case, and its numbers of found, missed and falsely predicted lesions."""

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
    missed_distance: float = 374.0,
) -> LesionScores:
    """Returns the lesion-wise scores of BraTS 2023: every lesion weighs the same, however large.

    Components are connected by face, edge or corner. True components whose dilations (by ``dilation`` voxels) touch
    are one lesion. A lesion's match is every predicted component that touches its dilation; both are compared
    undilated. Lesions of up to ``min_volume`` mm³ do not count, though what matches them is no false positive. Any
    other unmatched predicted component, of whatever size, is a false positive: it has Dice 0 and an HD95 of
    ``missed_distance`` mm, as has a missed lesion. Without lesions and false positives the scores are 1 and 0.

    The challenge takes dilation 1 for meningioma and metastases, and volume 2 for metastases. Its HD95 weighs surface
    voxels by area, ours counts them.
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
    lesions, num_lesions = ndimage.label(dilated, neighbours)
    components, num_components = ndimage.label(prediction, neighbours)
    touching = (lesions > 0) & (components > 0)
    matches = np.unique(np.stack([lesions[touching], components[touching]]), axis=1)
    false = num_components - len(np.unique(matches[1]))

    volumes = np.bincount(lesions[truth], minlength=num_lesions + 1) * float(np.prod(spacing))
    lesion_boxes, component_boxes = ndimage.find_objects(lesions), ndimage.find_objects(components)
    dices, distances, num_found = [], [], 0
    for lesion in np.flatnonzero(volumes > min_volume):
        match = matches[1][matches[0] == lesion]
        around = enclosing_box([lesion_boxes[lesion - 1], *(component_boxes[number - 1] for number in match)])
        lesion_mask = truth[around] & (lesions[around] == lesion)
        match_mask = np.isin(components[around], match)
        dices.append(confusion(lesion_mask, match_mask).dice)
        distances.append(hd95(lesion_mask, match_mask, spacing) if len(match) else missed_distance)
        num_found += len(match) > 0
    count = len(dices) + false
    if not count:
        return LesionScores(1.0, 0.0, 0, 0, 0)
    distance = (sum(distances) + missed_distance * false) / count
    return LesionScores(sum(dices) / count, distance, num_found, len(dices) - num_found, false)


def enclosing_box(boxes: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
    """Returns the smallest box around several boxes."""
    return tuple(slice(min(s.start for s in dim), max(s.stop for s in dim)) for dim in zip(*boxes))
