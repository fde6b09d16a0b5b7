"""Losses by name. A new one is a function that returns its terms, here or in its own file, and a line of LOSSES."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seqpar.losses.loss import Loss
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


LOSSES: dict[str, Callable[[LossOptions], Terms]] = {
    "dice-ce": dice_ce,
    "focal": focal,
    "dice-focal": dice_focal,
}


def make_loss(
    name: str,
    options: LossOptions,
    weights: Sequence[float] = (),
    regions: Sequence[Sequence[int]] = (),
    ignore_label: int | None = None,
) -> Loss:
    """Returns the loss of that name; for ``weights`` and what follows see ``Loss``."""
    return Loss(LOSSES[name](options), weights, regions, ignore_label)


class DiceCE(Loss):
    """Soft Dice + cross-entropy as in nnU-Net (plus one, so that 0 is perfect).

    ``background``: whether label 0 counts in Dice. ``batch_dice``: divide sums over the batch instead of each
    sample's. ``squared``: the probabilities in Dice's denominator, as in V-Net. ``smooth``: added to numerator and
    denominator of Dice. ``dice_weight``, ``ce_weight``: of the two terms. The others are those of ``Loss``.
    """

    def __init__(
        self,
        regions: Sequence[Sequence[int]] = (),
        background: bool = False,
        batch_dice: bool = False,
        smooth: float = 1e-5,
        ignore_label: int | None = None,
        dice_weight: float = 1.0,
        ce_weight: float = 1.0,
        squared: bool = False,
    ) -> None:
        terms: Terms = [Dice(squared, background, batch_dice, smooth), CrossEntropy()]
        super().__init__(terms, (dice_weight, ce_weight), regions, ignore_label)
