"""The healthy head of a phantom case: the soft membership of each voxel in each tissue.

Axes are right-left, back-front, down-up in mm, with 0 in the middle of the field of view.
"""

from dataclasses import dataclass

import numpy as np

from seqpar.data.phantom import fields
from seqpar.data.phantom.fields import Field, Mask, inside, soft_step

FIELD_OF_VIEW = (192.0, 224.0, 192.0)  # mm
place_voxels, random_field = fields.fields_over(FIELD_OF_VIEW)


@dataclass(frozen=True)
class Anatomy:
    """A healthy head: its brain, and the membership of each voxel in each tissue, from 0 to 1."""

    depth: Field  # mm below the brain's surface
    brain: Mask
    memberships: dict[str, Field]
    head: "Head"


@dataclass(frozen=True)
class Head:
    """Each voxel's coordinates in the head, and its depth in mm below the surface of the brain and its parts."""

    x: Field
    y: Field
    z: Field
    side: Field  # mm from the midline
    upper: Field  # of cerebrum with temporal lobes
    cerebellum: Field
    stem: Field
    depth: Field


def build_anatomy(rng: np.random.Generator, place: list[Field], wide: float | None = None) -> Anatomy:
    """Returns a random healthy head, which is asymmetric; its ventricles are ``wide`` times as wide as usual."""
    head = _head(rng, place)
    grey, csf = _cortex(rng, head)
    wide = rng.uniform(0.75, 1.5) if wide is None else wide
    ventricle = ventricle_of(head, wide)
    nuclei = np.maximum(
        inside([head.side, head.y, head.z], (14, -8, 0), (10, 15, 9)),
        inside([head.side, head.y, head.z], (26, 8, 0), (7, 19, 11)),
    )
    grey = np.maximum(grey, 0.8 * soft_step(nuclei, 3))
    csf = np.maximum(csf, soft_step(ventricle, 1.6))
    old_age = _old_age(rng, head, ventricle) * (1 - grey)
    memberships = {"grey": grey, "old_age": old_age, "csf": csf, "vessel": _vessels(rng, head)}
    return Anatomy(head.depth, head.depth > 0, memberships, head)


def _head(rng: np.random.Generator, place: list[Field]) -> Head:
    size = tuple(p.size for p in place)
    grow = rng.uniform(0.93, 1.06, 3).astype(np.float32)
    x, y, z = ((p + 3.5 * random_field(rng, size, 28)) / g for p, g in zip(place, grow))
    side = np.abs(x)
    front = 1 - 0.13 * y / 84  # the forehead is narrower
    cerebrum = inside([x / front, y, np.where(z < 0, z * 1.55, z)], (0, 0, -4), (68, 86, 68))
    temporal = inside([side, y, z], (42, 8, -30), (23, 44, 21))
    upper = np.maximum(cerebrum, temporal)
    cerebellum = inside([side, y, z], (22, -46, -46), (32, 31, 25))
    stem = inside([x, y + 0.25 * (z + 40), z], (0, -10, -48), (13, 14, 40))
    return Head(x, y, z, side, upper, cerebellum, stem, np.maximum(upper, np.maximum(cerebellum, stem)))


def _cortex(rng: np.random.Generator, head: Head) -> tuple[Field, Field]:
    """Returns grey matter and CSF of the folded surface; sulci run along the zeros of a random field."""
    y, z = head.y, head.z
    reach = np.clip(1 - (head.depth - 5) / 18, 0, 1)
    fold = np.abs(random_field(rng, head.depth.shape, 4.6, band=True))
    fold = fold + 0.6 * (1 - np.clip(5 * reach, 0, 1))  # deep in the brain they end
    callosum = inside([y, np.minimum(z + 10, 0) * 0.3 + np.maximum(z + 10, 0)], (0, 0), (48, 26))
    cleft = np.minimum(
        head.depth, np.where(callosum < 0, head.side, 30)
    )  # the corpus callosum joins the hemispheres below it
    open_sulci = rng.uniform(0.12, 0.3)
    grey = np.maximum(soft_step(1.05 * reach - fold, 0.35), soft_step(4.2 - cleft, 1.6))
    csf = np.maximum(soft_step(open_sulci * reach - fold, 0.3), soft_step(1.0 - cleft, 1.4))
    low = soft_step(head.cerebellum - np.maximum(head.upper, head.stem), 2.0)
    leaves = soft_step(0.35 - np.cos((z + 0.3 * y + 1.2 * fold) * (2 * np.pi / 6.5)), 1.2)
    leaves = np.maximum(leaves, soft_step(4 - head.cerebellum, 2)) * soft_step(19 - head.cerebellum, 8)
    grey = grey * (1 - low) + low * leaves
    csf = csf * (1 - low) + low * soft_step(0.6 - head.cerebellum, 1.5)
    inner = 1 - soft_step(head.stem - 3, 2)
    return grey * inner, csf * inner


def ventricle_of(head: Head, wide: float) -> Field:
    """Returns approximately the depth below the ventricles' surface in mm; they are ``wide`` times as wide as usual."""
    side, y, z = head.side, head.y, head.z
    bend = 0.006 * (y - 6) ** 2  # the horns lead away from the midline, the posterior ones downwards
    body = inside([side - bend, y, z + 0.5 * bend], (7 + 3 * wide, -4, 12), (5.5 * wide, 44, 8 * wide))
    horn = inside([side + 0.3 * y, y, z], (21, -20, -12), (5 * wide, 22, 6 * wide))
    third = inside([side, y, z], (0, -4, -4), (2.2 * wide, 13, 11))
    return np.maximum(np.maximum(body, horn), third)


def _old_age(rng: np.random.Generator, head: Head, ventricle: Field) -> Field:
    """Returns lesions of old age, bright in FLAIR: spots in white matter and caps on the ventricles."""
    age = rng.uniform(0.0, 1.0)
    spots = soft_step(random_field(rng, head.depth.shape, 4.5) - (3.3 - 1.1 * age), 0.5)
    caps = soft_step(ventricle + 1.0 + 2.5 * age * random_field(rng, head.depth.shape, 7), 2.5)
    return np.maximum(spots * soft_step(head.depth - 12, 6), caps * soft_step(np.abs(head.y) - 20, 10))


def _vessels(rng: np.random.Generator, head: Head) -> Field:
    """Returns vessels, bright in T1c: arteries, the sagittal sinus, the choroid plexus."""
    size, z = head.depth.shape, head.z
    course = np.hypot(random_field(rng, size, 9, band=True), random_field(rng, size, 9, band=True))
    sinus = 3.2 - np.hypot(head.x, np.minimum(head.upper, np.where(z > 0, 30, 90)) - 2)
    plexus = 1.6 - np.hypot(head.side - 12, z - 8 - 0.004 * head.y**2)
    tubes = np.maximum(soft_step(0.13 - course, 0.14), soft_step(sinus, 2))
    return np.maximum(tubes, soft_step(plexus, 2) * soft_step(16 - np.abs(head.y), 4))
