"""What tiles are cut from: a case whose arrays are mapped."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class CaseArrays(Protocol):
    """A prepared case, whose arrays are mapped on access."""

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
    """A case whose voxels have no labels, as one that is all background."""

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
