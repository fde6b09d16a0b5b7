"""Phantom heads and necks in CT numbers: nine organs; some cases lack some of them.

Like the brains, a case is defined in physical space and is a function of (seed, case index) alone. Left and right
organs differ only by their side, so that tiles must not be mirrored. Small organs are larger and have more contrast
than in patients, so that a small network learns them in minutes.
"""

import numpy as np

from seqpar.data.phantom import fields
from seqpar.data.phantom.fields import Field, PhantomCase, inside, paint, scan, soft_step, spacing_of, streams

FIELD_OF_VIEW = (176.0, 192.0, 176.0)  # mm
DEFAULT_SIZE = (40, 44, 40)  # 4.4 mm voxels
ORGANS = (
    "brain_stem", "chiasm", "mandible", "optic_nerve_left", "optic_nerve_right", "parotid_left", "parotid_right",
    "submandibular_left", "submandibular_right",
)  # fmt: skip
LABELS = {"background": 0, **{name: number for number, name in enumerate(ORGANS, 1)}}
COMPLETE_EVERY = 3  # every third case shows all organs
HU = {
    "brain_stem": 60.0,
    "chiasm": 75.0,
    "mandible": 1100.0,
    "optic_nerve": 42.0,
    "parotid": 5.0,
    "submandibular": 75.0,
}
place_voxels, random_field = fields.fields_over(FIELD_OF_VIEW)


def make_case(seed: int, index: int, size: tuple[int, int, int] = DEFAULT_SIZE) -> PhantomCase:
    """Returns case ``index`` of the phantom heads and necks ``seed``; its label shows only the ``annotated`` organs."""
    shape_rng, _, contrast_rng, noise_rng = streams(seed, index, size)
    grow = shape_rng.uniform(0.94, 1.06, 3).astype(np.float32)
    place = [(p + 2.5 * random_field(shape_rng, size, 35)) / g for p, g in zip(place_voxels(size), grow)]
    image = _head(shape_rng, place)
    label = np.zeros(size, np.uint8)
    shown = annotated(seed, index)
    for name, depth in _organs(shape_rng, place).items():
        kind = name.removesuffix("_left").removesuffix("_right")
        level = HU[kind] * contrast_rng.normal(1, 0.08) + 5 * random_field(contrast_rng, size, 5)
        paint(image, level, soft_step(depth, 2))
        label[depth > 0] = LABELS[name] if name in shown else 0
    spacing = spacing_of(FIELD_OF_VIEW, size)
    return PhantomCase(scan(noise_rng, image, 8, spacing)[None], label, spacing)


def annotated(seed: int, index: int) -> tuple[str, ...]:
    """Returns the organs that the label of a case shows: all, or all but one to four."""
    if index % COMPLETE_EVERY == 0:
        return ORGANS
    rng = streams(seed, index, DEFAULT_SIZE)[1]
    missing = rng.choice(len(ORGANS), rng.integers(1, 5), replace=False)
    return tuple(name for number, name in enumerate(ORGANS) if number not in missing)


def _head(rng: np.random.Generator, place: list[Field]) -> Field:
    """Returns the image of a head and neck without the nine organs."""
    x, y, z = place
    size, everywhere = x.shape, np.zeros_like(x + y + z)
    skull = inside(place, (0, -6, 34), (66, 80, 56))
    face = inside(place, (0, 20, -22), (56, 62, 70))
    neck = inside([x, y], (0, -8), (52, 54)) + everywhere
    outside = np.maximum(np.maximum(skull, face), np.where(z < -20, neck, neck - 40))
    image = np.full(size, -1000, np.float32)
    paint(image, -90, soft_step(outside + 4, 3))
    muscle = soft_step(random_field(rng, size, 9) + 0.2, 0.5)
    paint(image, -80 + 135 * muscle, soft_step(outside - 2, 3))
    paint(image, 900, soft_step(skull, 3))
    paint(image, 8, soft_step(skull - 7, 2))  # CSF around the brain
    cerebellum = inside(place, (0, -46, -4), (42, 26, 24))
    brain = np.minimum(skull - 10, np.maximum(z - 14, -16 - y) + 6)
    paint(image, 34 + 4 * random_field(rng, size, 5), soft_step(brain, 3))
    paint(image, 36, soft_step(np.minimum(cerebellum, skull - 9), 3))
    paint(image, 5, soft_step(np.minimum(inside(place, (0, -12, -4), (20, 20, 40)), skull - 8), 3))  # cistern
    paint(image, 5, soft_step(inside(place, (0, 26, 8), (27, 16, 14)), 3))
    for side in (-1, 1):
        paint(image, -85, soft_step(inside(place, (side * 28, 56, 4), (17, 34, 15)), 3))  # orbit
        paint(image, 12, soft_step(inside(place, (side * 29, 72, 4), (12, 12, 12)), 2))  # eye
        paint(image, -60, soft_step(inside(place, (side * 50, -4, -30), (15, 24, 28)), 4))  # fat around the glands
        paint(image, -70, soft_step(inside(place, (side * 21, 16, -66), (18, 22, 18)), 4))
    paint(image, -1000, soft_step(inside([x, y], (0, 6), (8, 7)) + soft_step(-z - 22, 4) * 14 - 14, 3))  # airway
    paint(image, 350, soft_step(inside([x, y], (0, -32), (17, 14)) + soft_step(-z - 40, 4) * 14 - 14, 3))  # spine
    paint(image, 1600, soft_step(_arch(place, -46, 5) + 1, 2))  # teeth
    return image


def _arch(place: list[Field], level: float, radius: float) -> Field:
    """Returns approximately the depth in mm below the surface of an arch at the height ``level``, open to the back."""
    x, y, z = place
    bow = y - (52 - x * x / 32)
    across = bow / np.sqrt(1 + (x / 16) ** 2)
    return np.minimum(radius - np.hypot(across, np.maximum(np.abs(z - level) - 4, 0)), y + 2).astype(np.float32)


def _organs(rng: np.random.Generator, place: list[Field]) -> dict[str, Field]:
    """Returns approximately the depth below each organ's surface in mm, negative outside."""
    x, y, z = place
    every = {
        "brain_stem": inside([x, y + 0.2 * z, z], (0, -12, -6), (13, 14, 34)),
        "chiasm": np.maximum(inside(place, (0, 25, 8), (20, 9, 9)), inside(place, (0, 18, 9), (13, 12, 10))),
    }
    ramus = np.minimum(inside([np.abs(x), y], (41, 4), (5, 12)), np.minimum(z + 68, -22 - z))
    every["mandible"] = np.maximum(_arch(place, -62, 6.5), ramus)
    for side, name in ((-1, "left"), (1, "right")):  # the patient's right has the larger coordinates
        along = np.clip((y - 26) / 36, 0, 1)  # from the chiasm to the eye
        nerve = np.hypot(x - side * (12 + 17 * along), z - (8 - 4 * along))
        every[f"optic_nerve_{name}"] = np.minimum(7.5 - nerve, np.minimum(y - 28, 62 - y)).astype(np.float32)
        shift = rng.normal(0, 2, 3)
        parotid = (side * 51 + shift[0], -4 + shift[1], -30 + shift[2])
        every[f"parotid_{name}"] = inside(place, parotid, (11, 19, 23))
        under = (side * 22 + shift[1], 16 + shift[2], -66 + shift[0])
        every[f"submandibular_{name}"] = inside(place, under, (14, 17, 15))
    return every
