"""PhantomCase, its random streams, and fields over its field of view: waves, soft edges, ellipsoids.

Random fields are drawn as a few waves over the field of view and then sampled at the voxels, so that every resolution
shows the same field.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.late_import import late

fft, ndimage = late("scipy.fft"), late("scipy.ndimage")
Extent = tuple[float, float, float]
Field = NDArray[np.float32]
Mask = NDArray[np.bool_]


def place_voxels(size: tuple[int, int, int], extent: Extent) -> list[Field]:
    """Returns the voxel centres in mm, one broadcastable array per axis; ``extent``: of the field of view in mm."""
    axes = [(np.arange(n, dtype=np.float32) + 0.5) / n * mm - mm / 2 for n, mm in zip(size, extent)]
    return list(np.meshgrid(*axes, indexing="ij", sparse=True))


def random_field(
    rng: np.random.Generator, size: tuple[int, ...], scale: float, band: bool = False, *, extent: Extent
) -> Field:
    """Returns a smooth random field of about unit variance, correlated over ``scale`` mm.

    - ``band``: omit the slow waves too
    - ``extent``: of the field of view in mm
    """
    coarse = [max(4, 2 * round(mm / scale / 2.4)) for mm in extent]
    waves = fft.rfftn(rng.standard_normal(coarse, dtype=np.float32))
    steps = [mm / n for mm, n in zip(extent, coarse)]
    frequency = np.meshgrid(
        *(fft.fftfreq(n, d) for n, d in zip(coarse[:-1], steps)),
        fft.rfftfreq(coarse[-1], steps[-1]),
        indexing="ij",
        sparse=True,
    )
    power = (2 * np.pi * scale) ** 2 * sum(f**2 for f in frequency) / 2
    gain = np.exp(-power) - (np.exp(-4 * power) if band else 0)
    gain *= np.prod(size) / np.prod(coarse) / np.sqrt(np.mean(gain**2))
    waves = fft.fftshift(waves * gain, axes=(0, 1))
    for axis, (n, m) in enumerate(zip(coarse, size)):  # the same waves at more (or fewer) voxels
        from_size, to_size = (n, m) if axis < 2 else (n // 2 + 1, m // 2 + 1)
        start = (from_size // 2 - to_size // 2) if axis < 2 else 0
        lower, upper = max(0, start), min(from_size, start + to_size)
        pad = [(0, 0)] * 3
        pad[axis] = (lower - start, start + to_size - upper)
        waves = np.pad(waves.take(np.arange(lower, upper), axis=axis), pad)
    return fft.irfftn(fft.ifftshift(waves, axes=(0, 1)), s=size).astype(np.float32)


def fields_over(extent: Extent) -> tuple[partial[list[Field]], partial[Field]]:
    """Returns ``place_voxels`` and ``random_field`` for a field of view; ``extent``: its sides in mm."""
    return partial(place_voxels, extent=extent), partial(random_field, extent=extent)


def soft_step(distance: Any, width: float) -> Field:
    """Returns 1 where ``distance`` is well above 0, 0 where it is well below, and a ramp of ``width`` in between."""
    return np.clip(np.asarray(distance, np.float32) / np.float32(width) + np.float32(0.5), 0, 1)


def inside(place: list[Any], centre: tuple[float, ...], radii: tuple[float, ...]) -> Field:
    """Returns approximately the depth below the surface of an ellipsoid in mm, negative outside."""
    squares = sum(((p - c) / r) ** 2 for p, c, r in zip(place, centre, radii))
    return np.asarray((1 - np.sqrt(squares)) * min(radii), np.float32)


def paint(image: Field, value: float | NDArray[np.floating[Any]], weight: Field) -> None:
    """Paints ``value`` over the image with the opacity ``weight``."""
    image += weight * (np.asarray(value, np.float32) - image)


def scan(rng: np.random.Generator, image: Field, noise: float, spacing: Extent, blur: float = 1.5) -> NDArray[np.int16]:
    """Returns CT numbers as a scanner stores them; ``noise``: its standard deviation in HU; ``blur``: in mm."""
    blurred = ndimage.gaussian_filter(image, [blur / side for side in spacing])
    measured = blurred + np.float32(noise) * rng.standard_normal(image.shape, np.float32)
    return np.clip(np.rint(measured), -1024, 3071).astype(np.int16)


NUM_STREAMS = 4


@dataclass(frozen=True)
class PhantomCase:
    """One case: image ``(c, W, D, H)`` int16, label ``(W, D, H)`` uint8, spacing in mm."""

    image: NDArray[np.int16]
    label: NDArray[np.uint8]
    spacing: tuple[float, float, float]

    @property
    def affine(self) -> NDArray[np.float64]:
        """The matrix from voxel indices to mm, with the middle of the volume at 0."""
        affine = np.diag([*self.spacing, 1.0])
        affine[:3, 3] = [-s * (n - 1) / 2 for s, n in zip(self.spacing, self.label.shape)]
        return affine


def spacing_of(extent: Extent, size: tuple[int, int, int]) -> tuple[float, float, float]:
    """Returns the voxels' sides in mm."""
    (w, d, h), (x, y, z) = size, extent
    return x / w, y / d, z / h


def streams(seed: int, index: int, size: tuple[int, int, int]) -> list[np.random.Generator]:
    """Returns a case's generators, one per purpose so that none shifts another's draws; checks the numbers."""
    if seed < 0 or index < 0:
        raise ValueError(f"a phantom's seed and case index must be at least 0, got {seed} and {index}")
    if len(size) != 3 or min(size) < 16:
        raise ValueError(f"a phantom's size must be three numbers of voxels, each at least 16, got {size}")
    return [np.random.default_rng([seed, index, stream]) for stream in range(NUM_STREAMS)]
