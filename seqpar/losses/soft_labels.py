"""Labels with doubt, one whole number per voxel: a code of what several readers said, or of each class's probability.

A code is stored, cut, mirrored and sent like the number of a class; only losses and scores decode it. Code 0 is
certainly background. Legend: b batch, k classes or regions, ``...`` voxels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", np.ndarray, Tensor)
Change = Callable[[np.ndarray], np.ndarray]
MOST_BITS = 53  # of a code: float64, in which a warp moves codes, has all smaller whole numbers
LEVELS = 255  # of a probability


def with_several(regions: Collection[Collection[int]]) -> Collection[Collection[int]]:
    """Returns the regions if some has several labels; none otherwise, since each label then speaks for itself."""
    return regions if any(len(region) > 1 for region in regions) else ()


def agreed(shares: Sequence[np.ndarray], whole: float, regions: Collection[Collection[int]] = ()) -> np.ndarray:
    """Returns the class with most shares in each voxel; of equally many, the first.

    With regions, those that fit come first: the class that is in just the regions that have more than half of the
    shares. Else two readers who name different classes of one region would not be a majority for it.

    - ``shares``: of each class, which add up to ``whole``; ``regions``: the numbers of their classes
    """
    stacked = np.stack(shares)
    if not regions:
        return stacked.argmax(0)
    fits = np.zeros(stacked.shape)
    for region in regions:
        has_most = 2 * stacked[sorted(region)].sum(0) > whole
        for number, own in enumerate(fits):
            own += has_most == (number in region)
    return np.where(stacked > 0, fits * (whole + 1) + stacked, -1).argmax(0)


def agreed_values(maps: Sequence[np.ndarray], regions: Collection[Collection[int]] = ()) -> np.ndarray:
    """Returns the value that most label maps agree on in each voxel; of equally many, the smallest."""
    known = np.unique(np.concatenate([np.unique(values) for values in maps]))
    chosen = np.empty(maps[0].shape, known.dtype)
    numbers = [{n for n, value in enumerate(known) if value in region} for region in with_several(regions)]
    for row, *rows in zip(chosen, *maps):  # row by row, since votes take much memory
        votes = [np.sum([own == value for own in rows], 0) for value in known]
        row[...] = known[agreed(votes, len(maps), numbers)]
    return chosen


@dataclass(frozen=True)
class SoftLabels(ABC):
    """How voxels' codes are made of digits; ``num_classes``: the background included."""

    num_classes: int

    def __post_init__(self) -> None:
        if self.num_codes > 2**MOST_BITS:
            raise ValueError(f"{self.described} are more than the {MOST_BITS} bits of a voxel can store: {self._limit}")

    @property
    @abstractmethod
    def base(self) -> int:
        """The number of values of a digit."""

    @property
    @abstractmethod
    def num_digits(self) -> int:
        """The number of digits of a code."""

    @property
    @abstractmethod
    def whole(self) -> int:
        """The number of shares that a voxel's classes have together."""

    @property
    @abstractmethod
    def described(self) -> str:
        """What a voxel stores, in words."""

    @property
    @abstractmethod
    def _limit(self) -> str:
        """What to change if that is too much."""

    @abstractmethod
    def shares(self, code: Array) -> list[Array]:
        """Returns the shares of each class, whole numbers that add up to ``whole``."""

    @abstractmethod
    def possible(self, code: np.ndarray, number: int) -> np.ndarray:
        """Returns the mask of the voxels on which tiles of a class are centred."""

    @abstractmethod
    def resampled(self, code: np.ndarray, of_labels: Change, of_shares: Change) -> np.ndarray:
        """Returns codes on another grid.

        - ``of_labels``: resamples label maps; ``of_shares``: numbers, linearly
        """

    @property
    def num_codes(self) -> int:
        """The number of codes, from 0 on."""
        return int(self.base**self.num_digits)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that has all codes, among those that torch has too."""
        types = (np.uint8, np.int16, np.int32, np.int64)
        return np.dtype(next(kind for kind in types if self.num_codes - 1 <= np.iinfo(kind).max))

    def digits(self, code: Array) -> list[Array]:
        """Returns the digits of codes."""
        wide: Any = code.long() if isinstance(code, Tensor) else code.astype(np.int64)
        return [wide // self.base**number % self.base for number in range(self.num_digits)]

    def join(self, digits: Sequence[np.ndarray]) -> np.ndarray:
        """Returns codes of digits: the inverse of ``digits``."""
        code = np.zeros(digits[0].shape, np.int64)
        for number, digit in enumerate(digits):
            code += digit.astype(np.int64) * self.base**number
        return code.astype(self.dtype)

    def target(self, label: Tensor, dtype: torch.dtype, regions: Sequence[Sequence[int]] = ()) -> Tensor:
        """Returns the probability ``b k ...`` of each class, or of each region, in codes ``b ...``."""
        shares = self.shares(label)
        if regions:
            shares = [reduce(add, (shares[number] for number in region)) for region in regions]
        return torch.stack(shares, 1).to(dtype) / self.whole

    def consensus(self, code: np.ndarray, regions: Collection[Collection[int]] = ()) -> np.ndarray:
        """Returns the class ids that ``agreed`` chooses."""
        regions = with_several(regions)
        ids = np.empty(code.shape, np.uint8 if self.num_classes <= 256 else np.int16)
        for row, own in zip(code, ids):  # row by row, since shares take much memory
            own[...] = agreed(self.shares(row), self.whole, regions)
        return ids


@dataclass(frozen=True)
class Readers(SoftLabels):
    """Each digit is the class that one of ``count`` readers gave; a class has one share per reader."""

    count: int

    @property
    def base(self) -> int:
        return self.num_classes

    @property
    def num_digits(self) -> int:
        return self.count

    @property
    def whole(self) -> int:
        return self.count

    @property
    def described(self) -> str:
        return f"{self.count} readers of {self.num_classes} labels"

    @property
    def _limit(self) -> str:
        most = next(n for n in range(self.count, 0, -1) if self.num_classes**n <= 2**MOST_BITS)
        return f"give at most {most} readers, or join labels"

    def shares(self, code: Array) -> list[Array]:
        digits = self.digits(code)
        return [reduce(add, (1 * (digit == number) for digit in digits)) for number in range(self.num_classes)]

    def possible(self, code: np.ndarray, number: int) -> np.ndarray:
        """Returns the mask of the voxels to which at least one reader gave a class."""
        return np.stack([reduce(np.logical_or, (d == number for d in self.digits(row))) for row in code])

    def disputed(self, code: np.ndarray) -> np.ndarray:
        """Returns the mask of the voxels to which readers gave different labels."""
        return np.stack([np.ptp(self.digits(row), 0) > 0 for row in code])

    def resampled(self, code: np.ndarray, of_labels: Change, of_shares: Change) -> np.ndarray:
        """Returns codes on another grid, on which each reader's labels are resampled by themselves."""
        kind = np.uint8 if self.num_classes <= 256 else np.int16
        return self.join([of_labels(digit.astype(kind)) for digit in self.digits(code)])


@dataclass(frozen=True)
class Probabilities(SoftLabels):
    """Each digit is the probability of a class except the background, in ``LEVELS`` shares."""

    @property
    def base(self) -> int:
        return LEVELS + 1

    @property
    def num_digits(self) -> int:
        return self.num_classes - 1

    @property
    def whole(self) -> int:
        return LEVELS

    @property
    def described(self) -> str:
        return f"probabilities of {self.num_classes} labels"

    @property
    def _limit(self) -> str:
        return f"give at most {MOST_BITS // 8 + 1} labels, the background included, or join labels"

    def shares(self, code: Array) -> list[Array]:
        digits: list[Array] = self.digits(code)
        background: Any = LEVELS - reduce(add, digits)
        return [background, *digits]

    def possible(self, code: np.ndarray, number: int) -> np.ndarray:
        """Returns the mask of the voxels in which a class has a probability of at least one half."""
        return np.stack([2 * self.shares(row)[number] >= LEVELS for row in code])

    def resampled(self, code: np.ndarray, of_labels: Change, of_shares: Change) -> np.ndarray:
        """Returns codes on another grid, on which probabilities are resampled linearly and rounded again."""
        return self.encode(np.stack([of_shares(share.astype(np.float32)) for share in self.shares(code)]))

    def encode(self, probabilities: np.ndarray) -> np.ndarray:
        """Returns the codes of probabilities ``k ...``, which are scaled so that each voxel's have the sum 1.

        They are rounded to whole shares whose sum is ``whole``: down, and the largest remainders up.
        """
        scaled = np.maximum(probabilities, 0)
        scaled = scaled * (LEVELS / scaled.sum(0))
        shares = np.floor(scaled)
        left = LEVELS - shares.sum(0)
        places = np.argsort(np.argsort(shares - scaled, 0, kind="stable"), 0, kind="stable")
        return self.join(list((shares + (places < left))[1:]))
