"""Losses of boxes that equal the loss of the whole tile: every sum that a loss divides by runs over all who share it.

Legend: b batch, k classes or regions, W D H voxels; ``W/s`` where voxels are spread over a group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.collectives import all_reduce, total
from seqpar.mesh import Group


@dataclass(frozen=True, eq=False)
class Share:
    """Which sums are partial on this rank.

    ``voxels``: the group over which one tile's voxels are spread. ``samples``: groups over which the batch's
    tiles are spread (``data``, and ``seq`` where each rank decodes whole samples).
    """

    voxels: Group | None = None
    samples: tuple[Group, ...] = ()

    @property
    def num_shares(self) -> int:
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

    def forward(self, logits: Tensor, label: Tensor, share: Share | None = None) -> Tensor:
        """Returns the scalar loss of logits ``b k W D H`` and integer labels ``b W D H``."""
        parts = self.parts(logits, label, share)
        return self.dice_weight * parts.dice + self.ce_weight * parts.cross_entropy

    def parts(self, logits: Tensor, label: Tensor, share: Share | None = None) -> LossParts:
        """Returns the Dice and cross-entropy terms, unweighted."""
        share = share or Share()
        voxelwise, chance, target, counted = self._terms(logits, label)
        return LossParts(self._dice(chance, target, share), self._mean(voxelwise, counted, share))

    def sums(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns what the loss of one sample is made of, to be added over any pieces of it: see ``of_sums``."""
        voxelwise, chance, target, counted = self._terms(logits, label)
        count = voxelwise.numel() if counted is None else int(counted.sum())
        space = (0, *range(2, chance.ndim))
        both, either = (chance * target).sum(space), (chance + target).sum(space)
        return torch.cat([voxelwise.sum()[None], voxelwise.new_tensor([count]), both, either]).double()

    def of_sums(self, sums: Tensor) -> LossParts:
        """Returns the terms of the sample whose pieces' ``sums`` were added."""
        ce, count, *_ = sums
        both, either = sums[2:].chunk(2)
        if not self.background and not self.regions:
            both, either = both[1:], either[1:]
        return LossParts(self._ratio(both, either), ce / count.clamp(min=1))

    def _terms(self, logits: Tensor, label: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns cross-entropy per voxel ``b W D H``, chances and targets ``b k W D H``, and which voxels count."""
        if label.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(f"labels {tuple(label.shape)} do not lie on the logits {tuple(logits.shape)}")
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
        return voxelwise, chance, target, counted

    def _region_masks(self, label: Tensor, dtype: torch.dtype) -> Tensor:
        masks = [torch.isin(label, torch.tensor(region, device=label.device)) for region in self.regions]
        return torch.stack(masks, 1).to(dtype)

    def _mean(self, voxelwise: Tensor, counted: Tensor | None, share: Share) -> Tensor:
        """Returns the batch's mean over counted voxels; each of ``samples``' ranks adds its own samples' share."""
        if counted is None:  # every rank has as many samples, but boxes may differ
            count = voxelwise.new_tensor(voxelwise.numel() * share.num_shares)
        else:
            count = counted.sum().to(voxelwise.dtype)
            for group in share.samples:
                count = all_reduce(count, group)
        if share.voxels is not None:
            count = all_reduce(count, share.voxels)
        summed = voxelwise.sum()
        if share.voxels is not None:
            summed = total(summed, share.voxels)
        return summed * share.num_shares / count.clamp(min=1)

    def _dice(self, chance: Tensor, target: Tensor, share: Share) -> Tensor:
        if not self.background and not self.regions:
            chance, target = chance[:, 1:], target[:, 1:]
        space = tuple(range(2, chance.ndim))
        sums = torch.stack([(chance * target).sum(space), (chance + target).sum(space)])  # 2 b k
        if share.voxels is not None:
            sums = total(sums, share.voxels)
        if self.batch_dice:
            sums = sums.sum(1, keepdim=True)
            for group in share.samples:
                sums = total(sums, group)
        return self._ratio(*sums)

    def _ratio(self, both: Tensor, either: Tensor) -> Tensor:
        return 1 - ((2 * both + self.smooth) / (either + self.smooth).clamp(min=1e-8)).mean()
