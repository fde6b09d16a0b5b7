"""Losses of parts that equal the loss of the whole tile.

Every sum that a loss divides by runs over all ranks that share it. Legend: b batch, k classes or regions, W D H
voxels; ``W/s`` where voxels are spread over a group.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.collectives import all_reduce, all_sum
from seqpar.mesh import Group

RUN = 1 << 20  # logits of which probabilities and targets are held at a time
Number = TypeVar("Number", Tensor, float)


@dataclass(frozen=True, eq=False)
class LossGroups:
    """Which sums are partial on this rank.

    ``voxels``: the group over which one tile's voxels are spread. ``samples``: groups over which the batch's
    tiles are spread (``data``, and ``seq`` where each rank decodes whole samples).
    """

    voxels: Group | None = None
    samples: tuple[Group, ...] = ()

    @property
    def num_sample_ranks(self) -> int:
        """How many ranks' losses are averaged to the batch's loss because each holds only its own samples."""
        return math.prod(group.size for group in self.samples)


class LossParts(NamedTuple):
    """The loss and its two terms, which are not weighted."""

    total: Tensor
    dice: Tensor
    cross_entropy: Tensor


class DiceCE(nn.Module):
    """Soft Dice + cross-entropy as in nnU-Net (plus one, so that 0 is perfect).

    Every rank returns a loss whose mean over ``data x seq`` is the batch's loss.

    ``regions``: tuples of label values; a sigmoid for each region instead of a softmax over labels.
    ``background``: whether label 0 counts in Dice. ``batch_dice``: divide sums over the batch instead of each
    sample's. ``smooth``: added to numerator and denominator of Dice. ``ignore_label``: voxels that count nowhere.
    ``dice_weight``, ``ce_weight``: of the two terms in the loss.
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
    ) -> None:
        super().__init__()
        if dice_weight < 0 or ce_weight < 0 or dice_weight + ce_weight == 0:
            raise ValueError(f"loss weights {dice_weight} and {ce_weight} must not be negative, nor both zero")
        if any(not region for region in regions):
            raise ValueError("a region without labels has nothing to learn: name its labels or drop it")
        self.regions = tuple(tuple(region) for region in regions)
        self.background, self.batch_dice, self.smooth = background, batch_dice, smooth
        self.ignore_label, self.dice_weight, self.ce_weight = ignore_label, dice_weight, ce_weight

    def forward(self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None) -> Tensor:
        """Returns the scalar loss of logits ``b k W D H`` and integer labels ``b W D H``."""
        return self.parts(logits, label, loss_groups).total

    def parts(self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None) -> LossParts:
        """Returns the loss and its terms."""
        loss_groups = loss_groups or LossGroups()
        sums = self._over_voxels(logits, label)
        dice = self._dice(sums[:, 1:], loss_groups)
        cross_entropy = self._mean(sums[:, 0].sum(), label, loss_groups)
        return LossParts(self.weighted(dice, cross_entropy), dice, cross_entropy)

    def weighted(self, dice: Number, cross_entropy: Number) -> Number:
        """Returns the loss that these terms make."""
        return self.dice_weight * dice + self.ce_weight * cross_entropy

    def sums(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the sums of a piece of one sample; those of all pieces, added, go to ``of_sums``."""
        sums = self._over_voxels(logits, label).sum(0).double()
        return torch.cat([sums[:1], self._count(label)[None], sums[1:]])

    def of_sums(self, sums: Tensor) -> LossParts:
        """Returns the loss of the sample whose pieces' ``sums`` were added."""
        summed, count = sums[0], sums[1]
        both, either = rearrange(sums[2:], "(two k) -> two k", two=2)
        if not self.background and not self.regions:
            both, either = both[1:], either[1:]
        dice, cross_entropy = self._dice_of(both, either), summed / count.clamp(min=1)
        return LossParts(self.weighted(dice, cross_entropy), dice, cross_entropy)

    def _over_voxels(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns sums over each sample's voxels, ``b 1+2k``: of cross-entropy, and of each class's
        probability x target and probability + target."""
        if label.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(f"labels {tuple(label.shape)} do not lie on the logits {tuple(logits.shape)}")
        return _OverVoxels.apply(logits, label, self._sums_of_run)  # type: ignore[no-any-return]

    def _sums_of_run(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns ``_over_voxels`` of so few voxels that all of them are held at once."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counted = None if self.ignore_label is None else label != self.ignore_label
        label = label.long() if counted is None else label.long().masked_fill(~counted, 0)
        if self.regions:
            target = self._region_masks(label, logits.dtype)
            probability = logits.sigmoid()
            voxelwise = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
        else:
            classes = torch.arange(logits.shape[1], device=label.device).view(-1, *[1] * (label.ndim - 1))
            target = (label[:, None] == classes).to(logits.dtype)
            probability = logits.softmax(1)
            voxelwise = F.cross_entropy(logits, label, reduction="none")
        if counted is not None:
            weight = counted.to(logits.dtype)
            voxelwise = voxelwise * weight
            probability, target = probability * weight[:, None], target * weight[:, None]
        terms = (voxelwise[:, None], probability * target, probability + target)
        return torch.cat([rearrange(term, "b k ... -> b k (...)").sum(2) for term in terms], 1)

    def _count(self, label: Tensor) -> Tensor:
        """Returns how many voxels count."""
        if self.ignore_label is None:
            return torch.tensor(label.numel(), device=label.device)
        return torch.stack([(run != self.ignore_label).sum() for _, run in _runs(label[:, None], label)]).sum()

    def _region_masks(self, label: Tensor, dtype: torch.dtype) -> Tensor:
        masks = [torch.isin(label, torch.tensor(region, device=label.device)) for region in self.regions]
        return torch.stack(masks, 1).to(dtype)

    def _mean(self, summed: Tensor, label: Tensor, loss_groups: LossGroups) -> Tensor:
        """Returns what this rank adds to the batch's mean over counted voxels, whose sum over its own is ``summed``."""
        count = self._count(label).to(summed.dtype)
        if self.ignore_label is None:  # every rank has as many samples, but boxes may differ
            count *= loss_groups.num_sample_ranks
        else:
            for group in loss_groups.samples:
                count = all_reduce(count, group)
        if loss_groups.voxels is not None:
            count = all_reduce(count, loss_groups.voxels)
            summed = all_sum(summed, loss_groups.voxels)
        return summed * loss_groups.num_sample_ranks / count.clamp(min=1)

    def _dice(self, sums: Tensor, loss_groups: LossGroups) -> Tensor:
        """Returns the Dice term of the sums of probability x target and probability + target."""
        sums = rearrange(sums, "b (two k) -> two b k", two=2)
        if not self.background and not self.regions:
            sums = sums[:, :, 1:]
        if loss_groups.voxels is not None:
            sums = all_sum(sums, loss_groups.voxels)
        if self.batch_dice:
            sums = sums.sum(1, keepdim=True)
            for group in loss_groups.samples:
                sums = all_sum(sums, group)
        return self._dice_of(*sums)

    def _dice_of(self, both: Tensor, either: Tensor) -> Tensor:
        return 1 - ((2 * both + self.smooth) / (either + self.smooth).clamp(min=1e-8)).mean()


class _OverVoxels(Function):
    """Sums that ``sums_of_run`` takes over all voxels, a run of rows after the other.

    Probabilities, targets and their products exist for one run at a time. Only logits and labels are saved for
    backward, which goes through the runs again.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, sums_of_run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.sums_of_run = sums_of_run
        ctx.save_for_backward(logits, label)
        first, *rest = (sums_of_run(*run) for run in _runs(logits, label))
        for more in rest:
            first += more
        return first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, label = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        for (run, truth), (drun, _) in zip(_runs(logits, label), _runs(dlogits, label)):
            with torch.enable_grad():
                leaf = run.detach().requires_grad_()
                (dleaf,) = torch.autograd.grad(ctx.sums_of_run(leaf, truth), leaf, grad)
            drun.copy_(dleaf)
        return dlogits, None, None


def _runs(logits: Tensor, label: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Returns logits ``b k W D H`` and labels in runs along W of at most ``RUN`` logits, a row at least."""
    row = logits[:, :, :1].numel()
    rows = max(1, RUN // max(row, 1))
    return zip(logits.split(rows, 2), label.split(rows, 1))
