"""The loss of Hou et al.: Dice of the lesion, per case and global, and a cross-entropy that weighs lesion and organ.

The lesion is the last output. Legend: b batch, k classes or regions, ``...`` voxels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from seqpar.losses.terms import ClassTerm, CrossEntropy, Terms, VoxelTerm
from seqpar.losses.voxels import Voxels

EPSILON = 0.1  # added to Dice's denominator alone
ORGAN, LESION = 8.0, 16.0  # weights of their voxels; the background's is 1


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
