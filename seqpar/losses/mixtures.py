"""The losses that there are: each is a function that returns its terms."""

from dataclasses import dataclass

from seqpar.losses.terms import ClassTerm, CrossEntropy, Dice, Focal, VoxelTerm

Terms = list[VoxelTerm | ClassTerm]


@dataclass(frozen=True)
class LossOptions:
    """What terms may depend on: ``gamma`` of ``Focal``, the others of ``Dice``."""

    squared: bool = False
    background: bool = False
    batch: bool = False
    gamma: float = 2.0
    smooth: float = 1e-5

    @property
    def dice(self) -> Dice:
        """Soft Dice with these options."""
        return Dice(self.squared, self.background, self.batch, self.smooth)


def dice_ce(options: LossOptions) -> Terms:
    """Returns soft Dice and cross-entropy."""
    return [options.dice, CrossEntropy()]


def dice(options: LossOptions) -> Terms:
    """Returns soft Dice alone."""
    return [options.dice]


def ce(options: LossOptions) -> Terms:
    """Returns cross-entropy."""
    return [CrossEntropy()]


def focal(options: LossOptions) -> Terms:
    """Returns the focal loss."""
    return [Focal(options.gamma)]


def dice_focal(options: LossOptions) -> Terms:
    """Returns soft Dice and the focal loss."""
    return [options.dice, Focal(options.gamma)]
