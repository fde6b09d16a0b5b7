"""Lesion-wise scores of a predicted mask, as in the BraTS 2023 challenge."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seqpar.data.boxes import crop, smallest_box
from seqpar.late_import import late
from seqpar.scores.metrics import Mask, check_comparable, confusion, hd95

ndimage = late("scipy.ndimage")
MARGIN, MIN_VOLUME = 3.0, 50.0  # mm and mm³, as in BraTS 2023
USUAL_TOLERANCE = 1.0  # mm, of the surface Dice
FINE = 4  # voxels within a tolerance from which errors hide in it


class Detection(NamedTuple):
    """How many lesions of a case are found, missed, false, and too small to count."""

    found: int
    missed: int
    false: int
    small: int = 0


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
    margin: float = MARGIN,
    min_volume: float = MIN_VOLUME,
    missed_distance: float = 374.0,
) -> LesionScores:
    """Returns the lesion-wise scores of BraTS 2023: every lesion weighs the same, however large.

    Components are connected by face, edge or corner. True components whose dilations touch are one lesion; they are by
    ``margin`` mm, rounded down to whole voxels in each direction (BraTS: by 3 voxels, which are of 1 mm). A lesion's
    match is every predicted component that touches its dilation; both are compared undilated. Lesions of up to
    ``min_volume`` mm³ do not count, though what matches them is no false positive. Any other unmatched predicted
    component, of whatever size, is a false positive: it has Dice 0 and an HD95 of ``missed_distance`` mm, as has a
    missed lesion. Without lesions and false positives the scores are 1 and 0.

    The challenge takes a margin of 1 for meningioma and metastases, and volume 2 for metastases. Its HD95 weighs
    surface voxels by area, ours counts them.
    """
    matching = _match(truth, prediction, spacing, _steps_of(margin, spacing), min_volume)
    dices, distances = [], []
    for lesion in matching.counted:
        lesion_mask, match_mask = matching.masks(lesion)
        dices.append(confusion(lesion_mask, match_mask).dice)
        distances.append(hd95(lesion_mask, match_mask, spacing) if match_mask.any() else missed_distance)
    detection = matching.detection
    count = len(dices) + detection.false
    if not count:
        return LesionScores(1.0, 0.0, 0, 0, 0)
    distance = (sum(distances) + missed_distance * detection.false) / count
    return LesionScores(sum(dices) / count, distance, *detection[:3])


def detect(
    truth: Mask, prediction: Mask, spacing: Sequence[float], margin: float = MARGIN, min_volume: float = MIN_VOLUME
) -> Detection:
    """Returns how many lesions are found, missed, falsely predicted, and too small to count, by ``lesion_wise``."""
    return _match(truth, prediction, spacing, _steps_of(margin, spacing), min_volume).detection


@dataclass(frozen=True, eq=False)
class Part:
    """A connected part of a mask: what has a number in ``cut``, whose place is ``box``; ``voxels``: how many it has."""

    box: tuple[slice, ...]
    voxels: int
    number: int
    cut: NDArray[Any]

    @property
    def fullest(self) -> tuple[int, ...]:
        """The plane with most of it in each direction."""
        mask = self.cut == self.number
        others = [tuple(d for d in range(mask.ndim) if d != dim) for dim in range(mask.ndim)]
        return tuple(own.start + int(mask.sum(axes).argmax()) for own, axes in zip(self.box, others))


def largest_voxel_ml(rows: Iterable[Mapping[str, float]]) -> float:
    """Returns the volume of the largest voxel behind scores, 0 if they do not tell."""
    sizes = [0.0]
    for row in rows:
        sizes.append(row.get("VoxelMl", 0.0))
        for volume, count in (("VolumeMl", "n_pred"), ("TrueVolumeMl", "n_ref")):
            if row.get(volume) and row.get(count):
                sizes.append(row[volume] / row[count])
    return max(sizes)


def hidden_by_scale(
    cases: Sequence[Mapping[str, Mapping[str, float]]], tolerance: object, regions: bool, sides: Collection[float] = ()
) -> list[str]:
    """Returns sentences if what is scored is so small that fixed millimetres hide errors.

    - ``cases``: the scores of each case's classes; ``tolerance``: of the surface Dice, in mm
    - ``regions``: whether regions are counted, too
    - ``sides``: of the voxels in mm, as far as they are known
    """
    of_cube = (1000 * largest_voxel_ml(row for scores in cases for row in scores.values())) ** (1 / 3)
    side, longest, sentences = min(sides, default=of_cube), max(sides, default=of_cube), list[str]()
    if side and tolerance == USUAL_TOLERANCE > max(FINE * side, longest):  # others were chosen for these data
        sentences.append(
            f"The surface Dice (NSD) has a tolerance of {tolerance:g} mm, up to {tolerance / side:.0f} voxels: "
            "it does not see errors below that. --nsd-tolerance of evaluate sets another."
        )
    if regions and side and max(2 * side, longest) * FINE < MARGIN:
        sentences.append(
            f"Regions are counted with a margin of {MARGIN:g} mm, up to {MARGIN / side:.0f} voxels: what is "
            "predicted within it counts neither as false nor as a region of its own."
        )
    small = list[str]()
    for name in dict.fromkeys(name for scores in cases for name in scores):
        own = [scores[name] for scores in cases if name in scores]
        counted = sum(row.get(key, 0.0) for row in own for key in ("LesionTP", "LesionFN"))
        small += [name] * bool(not counted and sum(row.get("LesionSmall", 0.0) for row in own))
    if regions and small:
        sentences.append(
            f"No true region of {' or '.join(small)} is larger than {MIN_VOLUME:g} mm³: all are too small to count, so "
            "none is found or missed."
        )
    return sentences


def unmatched_parts(
    truth: Mask, prediction: Mask, spacing: Sequence[float], margin: float = MARGIN, min_volume: float = MIN_VOLUME
) -> tuple[list[Part], list[Part]]:
    """Returns the false and the missed lesions that ``detect`` counts, the largest first."""
    matching = _match(truth, prediction, spacing, _steps_of(margin, spacing), min_volume)
    missed = sorted(set(matching.counted) - set(matching.matches[0].tolist()))
    false = sorted(set(range(1, int(matching.components.max(initial=0)) + 1)) - set(matching.matches[1].tolist()))
    true_lesions = np.where(matching.truth, matching.lesions, 0)
    return matching.parts(matching.components, false), matching.parts(true_lesions, missed)


def vanished(mask: Mask, coarse: Mask) -> tuple[int, Mask]:
    """Returns how many connected parts of a mask have no voxel in their place on a coarser grid over the same box, and
    their voxels.
    """
    gone, lost = 0, np.zeros_like(mask)
    if not mask.any():
        return gone, lost
    box = smallest_box(mask)
    numbered, count = ndimage.label(crop(mask, box), np.ones([3] * mask.ndim))
    for number, place in enumerate(ndimage.find_objects(numbered, count), 1):
        ends = zip(place, box, mask.shape, coarse.shape)
        there = tuple(
            slice((own.start + first) * few // many, -(-(own.stop + first) * few // many))
            for own, (first, _), many, few in ends
        )
        if not coarse[there].any():
            gone += 1
            crop(lost, box)[place] |= numbered[place] == number
    return gone, lost


def _steps_of(margin: float, spacing: Sequence[float]) -> list[int]:
    return [math.floor(margin / step + 1e-3) for step in spacing]


@dataclass(frozen=True, eq=False)
class _Matching:
    """Which predicted components match which true lesions.

    ``lesions`` and ``components`` number voxels; ``matches`` holds pairs of such numbers, ``counted`` the lesions that
    are large enough to count. ``start`` is the first voxel of the masks' box.
    """

    truth: Mask
    lesions: NDArray[Any]
    components: NDArray[Any]
    matches: NDArray[Any]  # 2 n
    counted: list[int]
    start: tuple[int, ...]

    def parts(self, numbered: NDArray[Any], numbers: Sequence[int]) -> list[Part]:
        """Returns what has these numbers in the box, the largest first."""
        boxes, voxels = ndimage.find_objects(numbered), np.bincount(numbered.ravel()).tolist()
        parts = list[Part]()
        for number in numbers:
            place = boxes[number - 1]
            box = tuple(slice(own.start + first, own.stop + first) for own, first in zip(place, self.start))
            parts.append(Part(box, voxels[number], number, numbered[place]))
        return sorted(parts, key=lambda part: -part.voxels)

    @property
    def detection(self) -> Detection:
        matched = len(set(self.counted) & set(self.matches[0].tolist()))
        false = int(self.components.max(initial=0)) - len(np.unique(self.matches[1]))
        small = int(self.lesions.max(initial=0)) - len(self.counted)
        return Detection(matched, len(self.counted) - matched, false, small)

    def masks(self, lesion: int) -> tuple[Mask, Mask]:
        """Returns a lesion and what matches it, in the box around both."""
        match = self.matches[1][self.matches[0] == lesion]
        parts = (self._lesion_boxes[lesion - 1], *(self._component_boxes[number - 1] for number in match))
        box = enclosing_box(parts)
        return self.truth[box] & (self.lesions[box] == lesion), np.isin(self.components[box], match)

    @cached_property
    def _lesion_boxes(self) -> list[tuple[slice, ...]]:
        return list(ndimage.find_objects(self.lesions))

    @cached_property
    def _component_boxes(self) -> list[tuple[slice, ...]]:
        return list(ndimage.find_objects(self.components))


def _match(
    truth: Mask, prediction: Mask, spacing: Sequence[float], dilations: Sequence[int], min_volume: float
) -> _Matching:
    """Returns the matches; ``dilations``: in voxels, by direction."""
    check_comparable(truth, prediction, spacing)
    if min(dilations) < 0 or min_volume < 0:
        raise ValueError(f"the margin is {min(dilations)} voxels, min_volume {min_volume}: neither can be negative")
    start = (0,) * truth.ndim
    if truth.any() or prediction.any():
        # No margin for the dilation: what touches outside the box around two voxels touches inside it too.
        box = smallest_box(truth | prediction)
        truth, prediction, start = crop(truth, box), crop(prediction, box), tuple(first for first, _ in box)
    neighbours = np.ones((3,) * truth.ndim, bool)
    components, _ = ndimage.label(prediction, neighbours)
    if not truth.any():  # nothing to dilate
        return _Matching(truth, np.zeros(truth.shape, np.int32), components, np.zeros((2, 0), np.int32), [], start)
    step, dilated = ndimage.generate_binary_structure(truth.ndim, 2), truth
    for number in range(max(dilations)):  # each step only in the directions that still have some to go
        own = tuple(slice(None) if number < count else slice(1, 2) for count in dilations)
        dilated = ndimage.binary_dilation(dilated, step[own])
    lesions, num_lesions = ndimage.label(dilated, neighbours)
    touching = (lesions > 0) & (components > 0)
    matches = np.unique(np.stack([lesions[touching], components[touching]]), axis=1)
    volumes = np.bincount(lesions[truth], minlength=num_lesions + 1) * float(np.prod(spacing))
    return _Matching(truth, lesions, components, matches, np.flatnonzero(volumes > min_volume).tolist(), start)


def enclosing_box(boxes: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
    """Returns the smallest box around several boxes."""
    return tuple(slice(min(s.start for s in dim), max(s.stop for s in dim)) for dim in zip(*boxes))
