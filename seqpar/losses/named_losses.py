"""The losses by name: each is a function that returns its terms; ``DiceCE`` for loops of your own."""

from collections.abc import Callable, Sequence

from seqpar.losses.loss import Loss
from seqpar.losses.terms import ClassTerm, CrossEntropy, Dice, Focal, LossOptions, Terms


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


LOSSES: dict[str, Callable[[LossOptions], Terms]] = {
    "ce": ce,
    "dice": dice,
    "dice-ce": dice_ce,
    "dice-focal": dice_focal,
    "focal": focal,
}


def has_class_terms(name: str) -> bool:
    """Returns whether the loss of that name has a term per class, which may take ``background`` and ``batch``."""
    return any(isinstance(term, ClassTerm) for term in LOSSES[name](LossOptions()))


def make_loss(
    name: str,
    options: LossOptions,
    weights: Sequence[float] = (),
    regions: Sequence[Sequence[int]] = (),
    ignore_label: int | None = None,
    class_weights: Sequence[float] = (),
) -> Loss:
    """Returns the loss of that name; for ``weights`` and what follows see ``Loss``."""
    return Loss(LOSSES[name](options), weights, regions, ignore_label, class_weights)


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
