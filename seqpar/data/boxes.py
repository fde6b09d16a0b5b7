"""Boxes of voxels, and cases that they are read from: the smallest around a mask, crops, a box of a mapped array.

A box is half-open, ``(from, to)`` per direction, over the last dims of an array: ``W D H`` of ``c W D H``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

Box = tuple[tuple[int, int], ...]
Array = TypeVar("Array", np.ndarray, Tensor)


class CaseArrays(Protocol):
    """A prepared case whose arrays are memory-mapped on access."""

    @property
    def id(self) -> str: ...
    @property
    def image(self) -> np.ndarray: ...  # c W D H, float32
    @property
    def label(self) -> np.ndarray: ...  # W D H, class ids
    @property
    def locations(self) -> dict[int, np.ndarray]: ...  # class id to voxels (n, 3)


@dataclass(frozen=True)
class Unlabelled:
    """A case without labels, seen as one that is all background."""

    case: CaseArrays

    @property
    def id(self) -> str:
        return self.case.id

    @property
    def image(self) -> np.ndarray:
        return self.case.image

    @property
    def label(self) -> np.ndarray:
        """Returns zeros, which take no memory."""
        return np.broadcast_to(np.uint8(0), self.case.image.shape[1:])

    @property
    def locations(self) -> dict[int, np.ndarray]:
        return {}


def smallest_box(mask: np.ndarray) -> Box:
    """Returns the smallest box around all nonzero voxels; the whole array if there are none."""
    bounds = []
    for dim, extent in enumerate(mask.shape):
        inside = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != dim)))
        bounds.append((int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, extent))
    return tuple(bounds)


def crop(array: np.ndarray, box: Box) -> np.ndarray:
    """Returns a box of an array, as a view."""
    return array[_index(box)]


def uncrop(array: np.ndarray, box: Box, shape: Sequence[int], fill: float = 0) -> np.ndarray:
    """Returns an array of ``shape`` with ``array`` in its box and ``fill`` elsewhere: the inverse of `crop`."""
    whole = np.full((*array.shape[: -len(box)], *shape), fill, array.dtype)
    whole[_index(box)] = array
    return whole


def read_box(array: Array, first: Sequence[int], size: Sequence[int], fill: float = 0) -> Array:
    """Returns a copy of a box, with ``fill`` beyond the array; of a mapped array it reads no more than the box.

    first: the box's first voxel, negative if it begins before the array.
    """
    extents = array.shape[-len(size) :]
    inside = [(max(0, at), max(0, at, min(extent, at + side))) for at, side, extent in zip(first, size, extents)]
    part: Any = array[_index(inside)]
    if all(stop - start == side for (start, stop), side in zip(inside, size)):
        return part.clone() if isinstance(array, Tensor) else np.array(part)
    shape = (*array.shape[: -len(size)], *size)
    box = array.new_full(shape, fill) if isinstance(array, Tensor) else np.full(shape, fill, array.dtype)
    if all(start < stop for start, stop in inside):
        box[_index([(start - at, stop - at) for (start, stop), at in zip(inside, first)])] = part
    return box


def _index(box: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
    return (..., *(slice(start, stop) for start, stop in box))
