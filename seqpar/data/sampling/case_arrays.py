"""What tiles are cut from: a case whose arrays are mapped."""

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
