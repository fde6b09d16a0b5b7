"""The losses that there are: each is a function that returns its terms."""

from dataclasses import dataclass

from seqpar.losses.terms import ClassTerm, CrossEntropy, Dice, Focal, VoxelTerm

Terms = list[VoxelTerm | ClassTerm]


@dataclass(frozen=True)
class LossOptions:
    """What terms may depend on: ``squared``, ``background``, ``batch`` of ``Dice``, ``gamma`` of ``Focal``."""

    squared: bool = False
    background: bool = False
    batch: bool = False
    gamma: float = 2.0


def dice_ce(options: LossOptions) -> Terms:
    """Returns soft Dice and cross-entropy."""
    return [Dice(options.squared, options.background, options.batch), CrossEntropy()]


def focal(options: LossOptions) -> Terms:
    """Returns the focal loss."""
    return [Focal(options.gamma)]


def dice_focal(options: LossOptions) -> Terms:
    """Returns soft Dice and the focal loss."""
    return [Dice(options.squared, options.background, options.batch), Focal(options.gamma)]
