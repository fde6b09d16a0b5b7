"""Phantom brains in two groups, healthy and demented, which differ by the volumes of hippocampus and ventricles.

How far a brain has shrunk is drawn for each group, and overlaps; head size, folds, spots of old age and the scanner's
bias field are drawn alike for both. The label of a case is the region in which the groups differ. One modality, T1.
"""

import numpy as np

from seqpar.data.phantom.anatomy import FIELD_OF_VIEW, Anatomy, build_anatomy, place_voxels, random_field, ventricle_of
from seqpar.data.phantom.brain import TISSUES, measure
from seqpar.data.phantom.fields import Field, inside, paint, soft
from seqpar.data.phantom.phantom_case import PhantomCase, spacing_of, streams

CLASSES = ("healthy", "dementia")
DEFAULT_SIZE = (48, 56, 48)  # 4 mm voxels
APART = 4.0  # how far the groups' means lie apart, in standard deviations: 2 of 100 look like the other group
USUAL, WIDER = 0.85, 0.14  # widths of ventricles in the healthy group, and by how much a deviation widens them
T1 = {tissue: float(values[0]) for tissue, values in TISSUES.items()}


def class_of(seed: int, index: int) -> str:
    """Returns the class of a case: both have as many."""
    return CLASSES[(seed + index) % 2]


def make_case(seed: int, index: int, size: tuple[int, int, int] = DEFAULT_SIZE) -> PhantomCase:
    """Returns case ``index`` of the phantom data set ``seed``, the same on every call."""
    shape_rng, shrinking_rng, contrast_rng, noise_rng = streams(seed, index, size)
    shrunken = APART * CLASSES.index(class_of(seed, index)) + shrinking_rng.standard_normal()
    wide, left_over = USUAL + WIDER * shrunken, 1 - 0.08 * shrunken
    wide += 0.05 * shrinking_rng.standard_normal()
    left_over += 0.03 * shrinking_rng.standard_normal()
    grow = np.float32(shape_rng.uniform(0.9, 1.05))  # of the head
    anatomy = build_anatomy(shape_rng, [p / grow for p in place_voxels(size)], max(wide, 0.4))
    whole, left = (_hippocampus(anatomy, part) for part in (1.0, float(np.clip(left_over, 0.3, 1.1))))
    image = _paint(contrast_rng, anatomy, whole, left)
    region = (ventricle_of(anatomy.head, USUAL + WIDER * APART) > 0) | (whole > 0)
    return PhantomCase(
        measure(noise_rng, image[None], anatomy.brain),
        (region & anatomy.brain).astype(np.uint8),
        spacing_of(FIELD_OF_VIEW, size),
    )


def _hippocampus(anatomy: Anatomy, part: float) -> Field:
    """Returns roughly the depth below the surface of both hippocampi in mm; ``part``: of their usual width."""
    head = anatomy.head
    return inside([head.side, head.y, head.z], (27, -6, -27), (9 * part, 20 * (1 + part) / 2, 9 * part))


def _paint(rng: np.random.Generator, anatomy: Anatomy, whole: Field, left: Field) -> Field:
    """Returns the image without noise; where a hippocampus was, and is no more, there is CSF."""
    size, contrast = anatomy.depth.shape, {tissue: value * rng.normal(1, 0.04) for tissue, value in T1.items()}
    image = np.full(size, contrast["white"], np.float32)
    for tissue in ("grey", "old_age", "csf"):
        paint(image, contrast[tissue], anatomy.memberships[tissue])
    paint(image, contrast["csf"], soft(whole, 3))
    paint(image, contrast["grey"], soft(left, 3))
    image *= 1 + 0.03 * random_field(rng, size, 3)
    image *= np.exp(rng.uniform(0.05, 0.2) * random_field(rng, size, 55))
    return image
