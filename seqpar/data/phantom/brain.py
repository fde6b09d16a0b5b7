"""Phantom brains: with tumours in four modalities, and healthy or demented in T1.

A case is a function of (seed, case index) alone and defined in physical space: another size shows the same head at
another resolution, except for measurement noise. Tissues are painted over one another with soft edges. To make the task
hard, some healthy tissue resembles tumours and is not labelled: CSF (bright in T2), lesions of old age (FLAIR), vessels
(T1c).

Healthy and demented brains differ in the volumes of hippocampus and ventricles, whose distributions overlap; everything
else has the same distribution in both groups. Their label is the region in which the groups differ.
"""

import numpy as np
from numpy.typing import NDArray

from seqpar.data.phantom.anatomy import FIELD_OF_VIEW, Anatomy, build_anatomy, place_voxels, random_field, ventricle_of
from seqpar.data.phantom.fields import Field, Mask, PhantomCase, inside, paint, soft_step, spacing_of, streams
from seqpar.late_import import late

ndimage = late("scipy.ndimage")
MODALITIES = ("t1n", "t1c", "t2w", "t2f")  # T1, T1c, T2, FLAIR under their BraTS 2023 names
LABELS = {"background": 0, "NCR": 1, "ED": 2, "ET": 3}
DEFAULT_SIZE = (96, 112, 96)  # 2 mm voxels
HEALTHY_EVERY = 8  # every eighth case has no tumour
#                           T1    T1c   T2    FLAIR
TISSUES = {
    "white": np.array([0.84, 0.86, 0.34, 0.43]),
    "grey": np.array([0.58, 0.61, 0.52, 0.57]),
    "csf": np.array([0.22, 0.24, 0.97, 0.17]),
    "vessel": np.array([0.50, 1.12, 0.30, 0.36]),
    "old_age": np.array([0.62, 0.64, 0.64, 0.76]),
    "NCR": np.array([0.36, 0.38, 0.84, 0.56]),
    "ED": np.array([0.56, 0.58, 0.80, 1.00]),
    "ET": np.array([0.60, 1.08, 0.62, 0.72]),
}


def make_case(seed: int, index: int, size: tuple[int, int, int] = DEFAULT_SIZE) -> PhantomCase:
    """Returns case ``index`` of the phantom data set ``seed``, the same on every call."""
    shape_rng, tumour_rng, contrast_rng, noise_rng = streams(seed, index, size)
    position = place_voxels(size)
    anatomy = build_anatomy(shape_rng, position)
    healthy = (seed + index) % HEALTHY_EVERY == HEALTHY_EVERY - 1
    label = np.zeros(size, np.uint8) if healthy else _tumours(tumour_rng, position, anatomy)
    image = _intensities(contrast_rng, anatomy, label)
    return PhantomCase(measure(noise_rng, image, anatomy.brain), label, spacing_of(FIELD_OF_VIEW, size))


def _tumours(rng: np.random.Generator, position: list[Field], anatomy: Anatomy) -> NDArray[np.uint8]:
    """Returns the label of one to three tumours: necrosis within an enhancing ring within oedema."""
    size = anatomy.depth.shape
    lumps, fingers = random_field(rng, size, 7), random_field(rng, size, 3.5)
    white = 1 - np.maximum(anatomy.memberships["grey"], anatomy.memberships["csf"])
    whole, core, necrosis = (np.zeros(size, bool) for _ in range(3))
    unenhanced = np.zeros(size, bool)  # cores of non-enhancing tumours
    for number in range(rng.choice([1, 2, 3], p=[0.5, 0.3, 0.2])):
        centre = _centre(rng, anatomy.depth)
        radius = rng.uniform(8, 14) if number == 0 else rng.uniform(5, 9)
        axes = rng.uniform(0.75, 1.25, 3)
        rotation = np.linalg.qr(rng.standard_normal((3, 3)))[0].astype(np.float32)
        rotated = [sum(rotation[i, j] * (position[j] - centre[j]) for j in range(3)) for i in range(3)]
        distance = np.sqrt(sum((a / np.float32(r)) ** 2 for a, r in zip(rotated, axes)))
        rough = distance / np.float32(radius) + 0.13 * lumps + 0.05 * fingers
        tumour = (rough < 1) & anatomy.brain
        # oedema follows white matter
        extent = rng.uniform(1.3, 2.0)
        swollen = rough + 0.3 * fingers + 0.12 * lumps - 0.9 * (white - 0.6) < extent
        whole |= swollen & (distance < 2.4 * radius)
        kind = rng.choice(["ring", "filled", "dull"], p=[0.68, 0.16, 0.16])
        if kind == "ring":
            necrosis |= rough < 1 - rng.uniform(3.0, 6.0) / radius + 0.08 * fingers
        elif kind == "dull":
            unenhanced |= tumour
        core |= tumour
    whole = (whole & (anatomy.memberships["csf"] < 0.5) & anatomy.brain) | core
    whole |= ndimage.binary_dilation(core) & anatomy.brain  # at least one voxel of oedema around each core
    ring = core & ~(unenhanced | (necrosis & ndimage.binary_erosion(core)))
    return np.select([ring, core, whole], [3, 1, 2], 0).astype(np.uint8)


def _centre(rng: np.random.Generator, depth: Field) -> list[float]:
    """Returns a random point in mm in the upper brain, away from its surface and the midline."""
    while True:
        centre = [rng.uniform(-55, 55), rng.uniform(-70, 70), rng.uniform(-25, 50)]
        voxel = tuple(int((c / mm + 0.5) * n) for c, mm, n in zip(centre, FIELD_OF_VIEW, depth.shape))
        if 9 < depth[voxel] < 45 and abs(centre[0]) > 12:
            return centre


def _intensities(rng: np.random.Generator, anatomy: Anatomy, label: NDArray[np.uint8]) -> Field:
    """Returns the image ``(c, W, D, H)`` without noise; contrasts differ from case to case."""
    size = label.shape
    values = {name: value * rng.normal(1, 0.04, 4) for name, value in TISSUES.items()}
    image = np.empty((4, *size), np.float32)
    image[:] = values["white"][:, None, None, None]
    parts = dict(anatomy.memberships)
    vessel = parts.pop("vessel")
    texture = random_field(rng, size, 3)
    contrast = rng.uniform(0.7, 1.0)  # of the tumour in this case
    spacing = [mm / n for mm, n in zip(FIELD_OF_VIEW, size)]
    for name, weight in parts.items():
        _paint(image, values[name], weight)
    patchy = {"NCR": 0.15, "ED": 0.2, "ET": 0.25}
    for name in ("ED", "ET", "NCR") if label.any() else ():
        edge = ndimage.gaussian_filter((label == LABELS[name]).astype(np.float32), [1.3 / s for s in spacing])
        _paint(image, values[name], np.clip(edge * (1 + patchy[name] * texture) * contrast, 0, 1))
    _paint(image, values["vessel"], vessel)
    image *= 1 + 0.03 * texture
    for modality in range(4):
        image[modality] *= np.exp(rng.uniform(0.05, 0.16) * random_field(rng, size, 55))
    return image


def _paint(image: Field, value: NDArray[np.float64], weight: Field) -> None:
    for channel, v in zip(image, value):
        channel += weight * (np.float32(v) - channel)


def measure(rng: np.random.Generator, image: Field, brain: Mask) -> NDArray[np.int16]:
    """Returns the image as a scanner stores it: blurred, noisy, in arbitrary units, 0 outside the brain."""
    scale = rng.uniform(300, 1500, len(image))
    noise = rng.uniform(0.025, 0.06, len(image))
    out = np.zeros(image.shape, np.int16)
    for channel in range(len(image)):
        signal = ndimage.gaussian_filter(image[channel], 0.45)
        real, imaginary = rng.standard_normal((2, *brain.shape), np.float32) * np.float32(noise[channel])
        measured = np.hypot(signal + real, imaginary) * np.float32(scale[channel])
        out[channel] = np.where(brain, np.clip(np.rint(measured), 1, 32767), 0)
    return out


CLASSES = ("healthy", "dementia")
DEMENTIA_SIZE = (48, 56, 48)  # 4 mm voxels
APART = 4.0  # distance of the groups' means in standard deviations: 2 of 100 look like the other group
USUAL, WIDER = 0.85, 0.14  # width of ventricles in the healthy group, and how much one standard deviation widens them
T1 = {tissue: float(values[0]) for tissue, values in TISSUES.items()}


def class_of(seed: int, index: int) -> str:
    """Returns the class of a case; both classes are equally frequent."""
    return CLASSES[(seed + index) % 2]


def make_dementia_case(seed: int, index: int, size: tuple[int, int, int] = DEMENTIA_SIZE) -> PhantomCase:
    """Returns case ``index`` of the phantom data set ``seed``, the same on every call."""
    shape_rng, shrinking_rng, contrast_rng, noise_rng = streams(seed, index, size)
    shrunken = APART * CLASSES.index(class_of(seed, index)) + shrinking_rng.standard_normal()
    wide, left_over = USUAL + WIDER * shrunken, 1 - 0.08 * shrunken
    wide += 0.05 * shrinking_rng.standard_normal()
    left_over += 0.03 * shrinking_rng.standard_normal()
    grow = np.float32(shape_rng.uniform(0.9, 1.05))  # of the head
    anatomy = build_anatomy(shape_rng, [p / grow for p in place_voxels(size)], max(wide, 0.4))
    whole, left = (_hippocampus(anatomy, part) for part in (1.0, float(np.clip(left_over, 0.3, 1.1))))
    image = _paint_dementia(contrast_rng, anatomy, whole, left)
    region = (ventricle_of(anatomy.head, USUAL + WIDER * APART) > 0) | (whole > 0)
    return PhantomCase(
        measure(noise_rng, image[None], anatomy.brain),
        (region & anatomy.brain).astype(np.uint8),
        spacing_of(FIELD_OF_VIEW, size),
    )


def _hippocampus(anatomy: Anatomy, part: float) -> Field:
    """Returns approximately the depth below the surface of both hippocampi in mm; ``part``: of the usual width."""
    head = anatomy.head
    return inside([head.side, head.y, head.z], (27, -6, -27), (9 * part, 20 * (1 + part) / 2, 9 * part))


def _paint_dementia(rng: np.random.Generator, anatomy: Anatomy, whole: Field, left: Field) -> Field:
    """Returns the image without noise; CSF takes the place of what the hippocampi have lost."""
    size, contrast = anatomy.depth.shape, {tissue: value * rng.normal(1, 0.04) for tissue, value in T1.items()}
    image = np.full(size, contrast["white"], np.float32)
    for tissue in ("grey", "old_age", "csf"):
        paint(image, contrast[tissue], anatomy.memberships[tissue])
    paint(image, contrast["csf"], soft_step(whole, 3))
    paint(image, contrast["grey"], soft_step(left, 3))
    image *= 1 + 0.03 * random_field(rng, size, 3)
    image *= np.exp(rng.uniform(0.05, 0.2) * random_field(rng, size, 55))
    return image
