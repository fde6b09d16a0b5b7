"""The losses by name: each is a function that returns its terms."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seqpar.losses.loss import Loss
from seqpar.losses.skeletons import ClDice, SkeletonRecall
from seqpar.losses.soft_labels import SoftLabels
from seqpar.losses.terms import ClassFocal, ClassTerm, CrossEntropy, Dice, Focal, LossOptions, Terms, Voxels, VoxelTerm

EPSILON = 0.1  # of LesionDice: added to the denominator alone
ORGAN, LESION = 8.0, 16.0  # weights of their voxels in WeightedCrossEntropy; the background's is 1

FALSE_ALARMS, MISSES = 0.3, 0.7  # their weights in Tversky
TVERSKY_SMOOTH = 1e-5  # added to numerator and denominator, so that a class that is absent and not predicted scores 1


class LesionDice(ClassTerm):
    """Soft Dice of the last output; ``batch``: of sums over the batch ("global"), else the mean over cases."""

    num_sums, background, every_class = 2, True, True

    def __init__(self, batch: bool) -> None:
        self.name, self.batch = "dice_global" if batch else "dice_per_case", batch

    def each(self, voxels: Voxels) -> Sequence[Tensor]:
        """Returns probability x target, and probability + target."""
        return voxels.probability * voxels.target, voxels.probability + voxels.target

    def score(self, sums: Tensor) -> Tensor:
        """Returns the Dice score of each class."""
        both, either = sums
        return 2 * both / (either + EPSILON)

    def loss(self, sums: Tensor) -> Tensor:
        """Returns one minus the lesion's score, times the number of classes, over which the mean is taken."""
        lost = 1 - self.score(sums)
        is_last = torch.arange(lost.shape[1], device=lost.device) == lost.shape[1] - 1
        return lost * (is_last * lost.shape[1])


class Tversky(ClassTerm):
    """Tversky's index with the weights of Salehi et al.: Dice in which misses weigh more than false alarms."""

    name, num_sums, takes_soft = "tversky", 3, True

    def __init__(self, background: bool, batch: bool) -> None:
        self.background, self.batch = background, batch

    def each(self, voxels: Voxels) -> Sequence[Tensor]:
        """Returns hits, false alarms and misses."""
        p, t = voxels.probability, voxels.target
        return p * t, p * (1 - t), (1 - p) * t

    def score(self, sums: Tensor) -> Tensor:
        """Returns Tversky's index of each class."""
        hits, false_alarms, misses = sums
        return (hits + TVERSKY_SMOOTH) / (hits + FALSE_ALARMS * false_alarms + MISSES * misses + TVERSKY_SMOOTH)


class WeightedCrossEntropy(VoxelTerm):
    """The mean over voxels of cross-entropy times the weight of the voxel's label."""

    name = "ce"

    def each(self, voxels: Voxels) -> Tensor:
        """Returns the weighted cross-entropy."""
        lost = CrossEntropy().each(voxels)
        last = voxels.target[:, -1]
        if voxels.regions:
            organ, lesion = voxels.target.amax(1, keepdim=True), last[:, None]
        else:
            organ, lesion = (voxels.label > 0).to(last.dtype), last
        return lost * (1 + organ * (ORGAN - 1) + lesion * (LESION - ORGAN))


def lesion_dice_ce() -> Terms:
    """Returns Dice of the lesion per case, the same of all cases at once, and weighted cross-entropy."""
    return [LesionDice(batch=False), LesionDice(batch=True), WeightedCrossEntropy()]


def dice_ce(options: LossOptions) -> Terms:
    """Soft Dice and cross-entropy."""
    return [options.dice, CrossEntropy()]


def dice(options: LossOptions) -> Terms:
    """Soft Dice alone."""
    return [options.dice]


def ce(options: LossOptions) -> Terms:
    """Cross-entropy."""
    return [CrossEntropy()]


def focal(options: LossOptions) -> Terms:
    """The focal loss."""
    return [Focal(options.gamma)]


def dice_focal(options: LossOptions) -> Terms:
    """LAMP's: soft Dice and the focal loss of each class, as means over samples and classes, missing ones included."""
    return [options.dice_of(every_class=True), ClassFocal(options.gamma)]


def lesion(options: LossOptions) -> Terms:
    """Hou et al.'s: Dice of the last label, per case and of all cases at once, and weighted cross-entropy."""
    return lesion_dice_ce()


def tversky(options: LossOptions) -> Terms:
    """Tversky's index alone, for small structures: misses weigh 0.7, false alarms 0.3."""
    return [Tversky(options.background, options.batch)]


def skeleton_recall(options: LossOptions) -> Terms:
    """Kirchhoff et al.'s: soft Dice, cross-entropy and the recall on the labels' skeletons."""
    return [options.dice, CrossEntropy(), SkeletonRecall(options.background, options.batch)]


def cldice(options: LossOptions) -> Terms:
    """Soft Dice, cross-entropy and centreline Dice."""
    return [options.dice, CrossEntropy(), ClDice(options.background, options.batch)]


LOSSES: dict[str, Callable[[LossOptions], Terms]] = {
    "ce": ce,
    "cldice": cldice,
    "dice": dice,
    "dice-ce": dice_ce,
    "dice-focal": dice_focal,
    "focal": focal,
    "lesion-dice-ce": lesion,
    "skeleton-recall": skeleton_recall,
    "tversky": tversky,
}


def has_class_terms(name: str) -> bool:
    """Returns whether the named loss has a term per class to which ``background`` and ``batch`` apply."""
    terms = zip(*(LOSSES[name](LossOptions(background=background)) for background in (False, True)))
    return any(isinstance(one, ClassTerm) and one.background != other.background for one, other in terms)


def needs_marks(name: str) -> bool:
    """Returns whether the named loss takes labels that ``mark_skeleton`` has marked."""
    return Loss(LOSSES[name](LossOptions())).needs_marks


def takes_soft_labels(name: str) -> bool:
    """Returns whether the named loss takes labels with doubt, whose targets are probabilities."""
    return all(term.takes_soft for term in LOSSES[name](LossOptions()))


def has_batch_terms(name: str, batch: bool) -> bool:
    """Returns whether the named loss, with ``batch`` as in ``LossOptions``, has a term of sums over the batch."""
    return any(isinstance(term, ClassTerm) and term.batch for term in LOSSES[name](LossOptions(batch=batch)))


def make_loss(
    name: str,
    options: LossOptions = LossOptions(),  # noqa: B008  immutable
    weights: Sequence[float] = (),
    regions: Sequence[Sequence[int]] = (),
    ignore_label: int | None = None,
    class_weights: Sequence[float] = (),
    soft: SoftLabels | None = None,
) -> Loss:
    """Returns the named loss, such as ``"dice-ce"`` or ``"dice-focal"``.

    Args:
        ``name``: one of ``LOSSES``.
        ``options``: of its terms.
        ``weights``, ``regions``, ``ignore_label``, ``class_weights``, ``soft``: as in ``Loss``.
    """
    if name not in LOSSES:
        raise ValueError(f"name={name!r}: choose one of {', '.join(LOSSES)}")
    return Loss(LOSSES[name](options), weights, regions, ignore_label, class_weights, soft)


class DiceCE(Loss):
    """Soft Dice plus cross-entropy, as in nnU-Net, except that 1 is added so that a perfect prediction has loss 0.

    Args:
        ``regions``: tuples of label values; each region gets a sigmoid, instead of a softmax over labels.
        ``background``: whether label 0 counts in Dice.
        ``batch_dice``: compute Dice from sums over the batch instead of each sample's.
        ``smooth``: added to Dice's numerator and denominator.
        ``ignore_label``: label of the voxels that do not count.
        ``dice_weight``, ``ce_weight``: weights of the two terms.
        ``squared``: square the probabilities in Dice's denominator, as in V-Net.

    Example::

        loss_fn, loss_groups = DiceCE(), net.mode.loss_groups(mesh.data)
        loss_fn(logits, label, loss_groups).backward()
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
