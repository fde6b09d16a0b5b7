"""Phantom abdomens in CT numbers: a liver with lesions and vessels, below ribs and lungs; two labels.

Like the brains, a case is defined in physical space and is a function of (seed, case index) alone. It also has tissue
that resembles liver and lesions and is not labelled: spleen and muscle, gall bladder, the bowel.
"""

import numpy as np

from seqpar.data.phantom import fields
from seqpar.data.phantom.fields import Field, PhantomCase, inside, paint, scan, soft_step, spacing_of, streams

FIELD_OF_VIEW = (288.0, 240.0, 240.0)  # mm
DEFAULT_SIZE = (72, 60, 60)  # 4 mm voxels
LABELS = {"background": 0, "liver": 1, "lesion": 2}
HEALTHY_EVERY = 8  # every eighth case has no lesion
place_voxels, random_field = fields.fields_over(FIELD_OF_VIEW)


def make_case(seed: int, index: int, size: tuple[int, int, int] = DEFAULT_SIZE) -> PhantomCase:
    """Returns case ``index`` of the phantom livers ``seed``, the same on every call."""
    shape_rng, lesion_rng, contrast_rng, noise_rng = streams(seed, index, size)
    grow = shape_rng.uniform(0.93, 1.05, 3).astype(np.float32)
    place = [(p + 4 * random_field(shape_rng, size, 40)) / g for p, g in zip(place_voxels(size), grow)]
    image, cavity, dome = _trunk(shape_rng, place)
    liver = _liver(place, cavity, dome)
    healthy = (seed + index) % HEALTHY_EVERY == HEALTHY_EVERY - 1
    lesions = np.full(size, -1, np.float32) if healthy else _lesions(lesion_rng, place, liver)
    level = contrast_rng.normal(105, 8)  # HU of the liver
    _paint_organs(image, contrast_rng, place, level)
    paint(image, level + 4 * random_field(contrast_rng, size, 6), soft_step(liver, 3))
    tubes = np.hypot(*(random_field(shape_rng, size, 15, band=True) for _ in range(2)))
    paint(image, level + contrast_rng.uniform(40, 65), soft_step(0.3 - tubes, 0.2) * soft_step(liver - 3, 3))
    darker = contrast_rng.uniform(35, 60) * (1 + 0.15 * random_field(contrast_rng, size, 5))
    paint(image, level - darker, soft_step(lesions, 2.5) * soft_step(liver, 3))
    label = np.select([(lesions > 0) & (liver > 0), liver > 0], [2, 1], 0).astype(np.uint8)
    spacing = spacing_of(FIELD_OF_VIEW, size)
    return PhantomCase(scan(noise_rng, image, 12, spacing)[None], label, spacing)


def _trunk(rng: np.random.Generator, place: list[Field]) -> tuple[Field, Field, Field]:
    """Returns the image of a body without organs, and the depths in mm below its cavity's wall and the diaphragm."""
    x, y, z = place
    size = x.shape
    depth = inside([x, y], (0, 0), (134, 96)) + np.zeros_like(z)
    fat = rng.uniform(8, 18)
    cavity = depth - (fat + 14)
    dome = 68 - 0.0035 * ((x - 45) ** 2 + y**2) - z
    image = np.full(size, -1000, np.float32)
    paint(image, -100, soft_step(depth, 3))
    paint(image, 55 + 6 * random_field(rng, size, 5), soft_step(depth - fat, 4))
    bowel = soft_step(random_field(rng, size, 14) - 0.3, 0.4)
    paint(image, -95 + 130 * bowel, soft_step(cavity, 4))
    paint(image, -850 + 40 * random_field(rng, size, 6), soft_step(cavity, 4) * soft_step(-dome, 4))
    slope = np.cos((z + 0.5 * y + rng.uniform(0, 30)) * (2 * np.pi / 30))
    open_front = soft_step(70 - np.abs(y), 6) + soft_step(-y - 70, 6)  # ribs end next to the breastbone
    ribs = soft_step(4.5 - np.abs(cavity + 8), 3) * soft_step(slope - 0.5, 0.4) * np.clip(open_front, 0, 1)
    paint(image, 420, ribs)
    spine = inside([x, y], (0, -66), (20, 18)) + np.zeros_like(z)
    paint(image, 230 + 60 * np.cos(z * (2 * np.pi / 32)), soft_step(spine, 3))
    paint(image, 190, soft_step(inside([x, y], (-10, -38), (9, 9)) + np.zeros_like(z), 3))  # aorta
    paint(image, 140, soft_step(inside([x, y], (16, -36), (11, 9)) + np.zeros_like(z), 3))  # caval vein
    return image, cavity, dome


def _liver(place: list[Field], cavity: Field, dome: Field) -> Field:
    """Returns approximately the depth below the liver's surface in mm, negative outside."""
    right, left = inside(place, (58, 2, 8), (66, 68, 62)), inside(place, (-6, 34, 24), (60, 34, 34))
    hollow = np.maximum(_gall_bladder(place), inside([place[0], place[1]], (12, -40), (15, 14)))
    return np.minimum(np.minimum(np.maximum(right, left), -hollow), np.minimum(cavity - 2, dome - 2))


def _gall_bladder(place: list[Field]) -> Field:
    return inside(place, (34, 42, -22), (14, 20, 24))


def _paint_organs(image: Field, rng: np.random.Generator, place: list[Field], level: float) -> None:
    """Paints spleen, kidneys, stomach and gall bladder: not labelled, but some are as bright as liver or lesions."""
    paint(image, level + rng.normal(12, 8), soft_step(inside(place, (-84, -28, 22), (26, 42, 42)), 3))
    for side in (-1, 1):
        kidney = inside(place, (side * 52, -46, -48), (24, 22, 46))
        paint(image, 170, soft_step(kidney, 3))
        paint(image, 30, soft_step(kidney - 13, 4))
    stomach = inside(place, (-58, 34, 22), (30, 36, 34))
    paint(image, rng.normal(45, 15), soft_step(stomach, 3))
    paint(image, -900, soft_step(stomach - 10, 3) * soft_step(place[1] - 46, 3))  # air rises to the front
    paint(image, rng.normal(12, 5), soft_step(_gall_bladder(place), 3))


def _lesions(rng: np.random.Generator, place: list[Field], liver: Field) -> Field:
    """Returns approximately the depth below the surface of one to five lesions in mm, centred in the liver."""
    size = liver.shape
    rough = 0.12 * random_field(rng, size, 8)
    rows = np.argwhere(liver > min(8.0, 0.6 * float(liver.max())))
    every = np.full(size, -np.inf, np.float32)
    for number in range(rng.integers(1, 6)):
        radius = rng.uniform(18, 28) if number == 0 else rng.uniform(12, 20)
        row = tuple(rows[int(rng.random() * len(rows))])
        centre = tuple(float(p[row]) for p in place)
        lesion = inside(place, centre, tuple(radius * rng.uniform(0.8, 1.25, 3)))
        every = np.maximum(every, lesion + radius * rough)
    return every
