"""CaseArrays: a case with memory-mapped arrays, from which tiles are cut."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np


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
