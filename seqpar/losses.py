"""Losses of boxes that equal the loss of the whole tile: every sum that a loss divides by runs over all who share it.

Legend: b batch, k classes or regions, W D H voxels; ``W/s`` where voxels are spread over a group.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.collectives import all_reduce, all_sum
from seqpar.mesh import Group

RUN = 1 << 20  # logits of which chances and targets are there at a time


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
        """Over how many ranks' losses the batch's loss is averaged, each of them holding only its own samples."""
        return math.prod(group.size for group in self.samples)


class LossParts(NamedTuple):
    """The two terms of the loss; the loss is their weighted sum."""

    dice: Tensor
    cross_entropy: Tensor


class DiceCE(nn.Module):
    """Soft Dice + cross-entropy as in nnU-Net (plus one: 0 is perfect).

    Softmax over labels, or, with ``regions`` (tuples of label values), a sigmoid for each region. Background is
    left out of Dice unless ``background``; ``batch_dice`` sums over the batch before it divides. Voxels of
    ``ignore_label`` count nowhere. Every rank returns a loss whose mean over ``data x seq`` is the batch's loss.
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
        parts = self.parts(logits, label, loss_groups)
        return self.dice_weight * parts.dice + self.ce_weight * parts.cross_entropy

    def parts(self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None) -> LossParts:
        """Returns the Dice and cross-entropy terms, unweighted."""
        loss_groups = loss_groups or LossGroups()
        sums = self._over_voxels(logits, label)
        return LossParts(self._dice(sums[:, 1:], loss_groups), self._mean(sums[:, 0].sum(), label, loss_groups))

    def sums(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns what the loss of one sample is made of, to be added over any pieces of it: see ``of_sums``."""
        sums = self._over_voxels(logits, label).sum(0).double()
        return torch.cat([sums[:1], self._count(label)[None], sums[1:]])

    def of_sums(self, sums: Tensor) -> LossParts:
        """Returns the terms of the sample whose pieces' ``sums`` were added."""
        ce, count, *_ = sums
        both, either = sums[2:].chunk(2)
        if not self.background and not self.regions:
            both, either = both[1:], either[1:]
        return LossParts(self._ratio(both, either), ce / count.clamp(min=1))

    def _over_voxels(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns sums over each sample's voxels, ``b 1+2k``: of cross-entropy, and of each class's
        chance x target and chance + target."""
        if label.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(f"labels {tuple(label.shape)} do not lie on the logits {tuple(logits.shape)}")
        return _OverVoxels.apply(logits, label, self._summed)  # type: ignore[no-any-return]

    def _summed(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the sums of these voxels, all of which are looked at together."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counted = None if self.ignore_label is None else label != self.ignore_label
        label = label.long() if counted is None else label.long().masked_fill(~counted, 0)
        if self.regions:
            target = self._region_masks(label, logits.dtype)
            chance = logits.sigmoid()
            voxelwise = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
        else:
            classes = torch.arange(logits.shape[1], device=label.device).view(-1, *[1] * (label.ndim - 1))
            target = (label[:, None] == classes).to(logits.dtype)
            chance = logits.softmax(1)
            voxelwise = F.cross_entropy(logits, label, reduction="none")
        if counted is not None:
            weight = counted.to(logits.dtype)
            voxelwise, chance, target = voxelwise * weight, chance * weight[:, None], target * weight[:, None]
        terms = (voxelwise[:, None], chance * target, chance + target)
        return torch.cat([term.flatten(2).sum(2) for term in terms], 1)

    def _count(self, label: Tensor) -> Tensor:
        """Returns how many voxels count."""
        if self.ignore_label is None:
            return torch.tensor(label.numel(), device=label.device)
        return torch.stack([(run != self.ignore_label).sum() for _, run in _runs(label[:, None], label)]).sum()

    def _region_masks(self, label: Tensor, dtype: torch.dtype) -> Tensor:
        masks = [torch.isin(label, torch.tensor(region, device=label.device)) for region in self.regions]
        return torch.stack(masks, 1).to(dtype)

    def _mean(self, summed: Tensor, label: Tensor, loss_groups: LossGroups) -> Tensor:
        """Returns the batch's mean over counted voxels; each of ``samples``' ranks adds its own samples' share."""
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
        """Returns the Dice term of ``b 2k`` sums."""
        sums = torch.stack(sums.chunk(2, 1))  # 2 b k
        if not self.background and not self.regions:
            sums = sums[:, :, 1:]
        if loss_groups.voxels is not None:
            sums = all_sum(sums, loss_groups.voxels)
        if self.batch_dice:
            sums = sums.sum(1, keepdim=True)
            for group in loss_groups.samples:
                sums = all_sum(sums, group)
        return self._ratio(*sums)

    def _ratio(self, both: Tensor, either: Tensor) -> Tensor:
        return 1 - ((2 * both + self.smooth) / (either + self.smooth).clamp(min=1e-8)).mean()


class _OverVoxels(Function):
    """What ``summed`` makes of all voxels, in runs of rows: of chances, targets and products, one run's are there.

    Logits and labels alone are held; the backward looks at each run again.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, summed: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.summed = summed
        ctx.save_for_backward(logits, label)
        first, *rest = (summed(*run) for run in _runs(logits, label))
        for more in rest:
            first += more
        return first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, label = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        for (mine, truth), (place, _) in zip(_runs(logits, label), _runs(dlogits, label)):
            with torch.enable_grad():
                leaf = mine.detach().requires_grad_()
                (found,) = torch.autograd.grad(ctx.summed(leaf, truth), leaf, grad)
            place.copy_(found)
        return dlogits, None, None


def _runs(logits: Tensor, label: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Returns logits ``b k W D H`` and labels in runs along W of at most RUN logits, a row at least."""
    row = logits[:, :, :1].numel()
    rows = max(1, RUN // max(row, 1))
    return zip(logits.split(rows, 2), label.split(rows, 1))
