"""Phantom vessels in CT numbers: branching trees of one to three voxels in about a thousandth of the volume.

Like the brains, a case is defined in physical space and is a function of (seed, case index) alone. Bright lumps that
are no vessels keep a threshold from finding them.
"""

import numpy as np
from numpy.typing import NDArray

from seqpar.data.phantom import fields
from seqpar.data.phantom.fields import PhantomCase, inside, paint, scan, soft_step, spacing_of, streams

FIELD_OF_VIEW = (96.0, 96.0, 96.0)  # mm
DEFAULT_SIZE = (96, 96, 96)  # 1 mm voxels
LABELS = {"background": 0, "vessel": 1}
TISSUE, VESSEL, LUMP = 40.0, 330.0, 300.0  # HU
RADII = (1.45, 1.0, 0.4)  # mm, of trunk, branches and twigs: three, two and one voxel across
LENGTHS = (30.0, 22.0, 16.0)  # mm
STEP = 0.4  # mm between the points of a course
Points = NDArray[np.float64]  # n 3, in mm
place_voxels, random_field = fields.fields_over(FIELD_OF_VIEW)


def make_case(seed: int, index: int, size: tuple[int, int, int] = DEFAULT_SIZE) -> PhantomCase:
    """Returns case ``index`` of the phantom vessels ``seed``."""
    shape_rng, lump_rng, contrast_rng, noise_rng = streams(seed, index, size)
    place, spacing = place_voxels(size), spacing_of(FIELD_OF_VIEW, size)
    image = TISSUE + 12 * random_field(contrast_rng, size, 9) + 6 * random_field(contrast_rng, size, 3)
    for _ in range(int(lump_rng.integers(4, 9))):
        centre, radii = lump_rng.uniform(-42, 42, 3), lump_rng.uniform(1.5, 5, 3)
        paint(image, LUMP * lump_rng.uniform(0.6, 1.1), soft_step(inside(place, tuple(centre), tuple(radii)), 1))
    label = np.zeros(size, np.uint8)
    for _ in range(int(shape_rng.integers(2, 4))):
        start = shape_rng.uniform(-30, 30, 3)
        start[2] = -44.0
        for points, radius in _tree(shape_rng, start, np.array([0.0, 0.0, 1.0])):
            _draw(label, points, radius, spacing)
    paint(image, VESSEL * contrast_rng.uniform(0.8, 1.2), label.astype(np.float32))
    return PhantomCase(scan(noise_rng, image, 12, spacing, blur=0.6)[None], label, spacing)


def _tree(rng: np.random.Generator, start: Points, towards: Points, level: int = 0) -> list[tuple[Points, float]]:
    """Returns the courses of a vessel and of all that leave it, with their radii in mm."""
    points, towards = _course(rng, start, towards, LENGTHS[level] * rng.uniform(0.8, 1.2))
    found = [(points, RADII[level])]
    if level + 1 < len(RADII):
        aside = np.cross(towards, rng.standard_normal(3))
        aside *= rng.uniform(0.5, 0.9) / np.linalg.norm(aside)
        for side in (-1, 1):
            found += _tree(rng, points[-1], towards + side * aside, level + 1)
    return found


def _course(rng: np.random.Generator, start: Points, towards: Points, length: float) -> tuple[Points, Points]:
    """Returns the points of a winding course inside the field of view, and its last direction."""
    points, half = [start], np.array(FIELD_OF_VIEW) / 2
    for _ in range(round(length / STEP)):
        back = -0.3 * (points[-1] / half) ** 5  # away from the borders
        towards = towards + back + 0.1 * rng.standard_normal(3)
        towards = towards / np.linalg.norm(towards)
        points.append(np.clip(points[-1] + STEP * towards, 1 - half, half - 1))
    return np.array(points), towards


def _draw(label: NDArray[np.uint8], points: Points, radius: float, spacing: fields.Extent) -> None:
    """Labels the voxels that a course passes through, and those whose centres are within ``radius`` of it."""
    sides = np.array(spacing)
    steps = max(1, int(np.ceil(STEP / sides.min() / 0.5)))  # a course leaves out no voxel, however small they are
    shares = np.linspace(0, 1, steps, endpoint=False)[:, None, None]
    points = (points[:-1] + shares * (points[1:] - points[:-1])).reshape(-1, 3)
    at = (points + np.array(FIELD_OF_VIEW) / 2) / sides  # in voxels, from the corner
    own = at.astype(int)
    reach = np.ceil(radius / sides).astype(int)
    for offset in np.ndindex(*(2 * reach + 1)):
        voxels = own + offset - reach
        distance = np.linalg.norm((voxels + 0.5 - at) * sides, axis=1)
        near = (distance <= radius) | (voxels == own).all(1)
        voxels = voxels[near & ((voxels >= 0) & (voxels < label.shape)).all(1)]
        label[tuple(voxels.T)] = 1
