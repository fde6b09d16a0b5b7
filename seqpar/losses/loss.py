"""Loss: a weighted sum of terms, whose sums over voxels and samples run over all ranks that share them.

Legend: b batch, k classes or regions, s sums, W D H voxels; ``W/s`` where voxels are spread over a group.
"""

import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from seqpar.collectives import all_reduce, all_sum
from seqpar.losses.groups import LossGroups
from seqpar.losses.terms import ClassTerm, VoxelTerm
from seqpar.losses.voxels import Voxels, runs, sum_over_voxels

Number = TypeVar("Number", Tensor, float)


class LossParts(NamedTuple):
    """The loss, and its terms by name, which are not weighted."""

    total: Tensor
    terms: dict[str, Tensor]


class Loss(nn.Module):
    """A weighted sum of terms, of logits and integer labels.

    Every rank returns a loss whose mean over ``data x seq`` is the batch's loss.

    ``weights``: of the terms, 1 each by default. ``regions``: tuples of label values; a sigmoid for each region
    instead of a softmax over labels. ``ignore_label``: voxels that count nowhere.
    """

    def __init__(
        self,
        terms: Sequence[VoxelTerm | ClassTerm],
        weights: Sequence[float] = (),
        regions: Sequence[Sequence[int]] = (),
        ignore_label: int | None = None,
    ) -> None:
        super().__init__()
        self.terms, weights = tuple(terms), tuple(weights) or (1.0,) * len(terms)
        check_weights(weights, [term.name for term in self.terms])
        if any(not region for region in regions):
            raise ValueError("a region without labels has nothing to learn: name its labels or drop it")
        self.weights = {term.name: weight for term, weight in zip(self.terms, weights)}
        self.regions = tuple(tuple(region) for region in regions)
        self.ignore_label = ignore_label

    def forward(self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None) -> Tensor:
        """Returns the scalar loss of logits ``b k W D H`` and integer labels ``b W D H``."""
        return self.parts(logits, label, loss_groups).total

    def parts(self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None) -> LossParts:
        """Returns the loss and its terms."""
        sums = self._over_voxels(logits, label)
        return self._of(sums, self._count(label), loss_groups or LossGroups())

    def weighted(self, terms: Mapping[str, Number]) -> Number:
        """Returns the loss that these terms make."""
        weighted: list[Number] = [weight * terms[name] for name, weight in self.weights.items()]
        return reduce(operator.add, weighted)

    def sums(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns the sums of a piece of one sample; those of all pieces, added, go to ``of_sums``."""
        sums = self._over_voxels(logits, label).sum(0).double()
        return torch.cat([sums, self._count(label)[None].double()])

    def of_sums(self, sums: Tensor) -> LossParts:
        """Returns the loss of the sample whose pieces' ``sums`` were added."""
        return self._of(sums[None, :-1], sums[-1], LossGroups())

    def _over_voxels(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns each sample's sums ``b s`` over its voxels, term after term."""
        if label.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(f"labels {tuple(label.shape)} do not lie on the logits {tuple(logits.shape)}")
        return sum_over_voxels(logits, label, self._sums_of_run)

    def _sums_of_run(self, logits: Tensor, label: Tensor) -> Tensor:
        """Returns ``_over_voxels`` of so few voxels that all of them are held at once."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        counted = None if self.ignore_label is None else label != self.ignore_label
        label = label.long() if counted is None else label.long().masked_fill(~counted, 0)
        voxels = Voxels(logits, label, self.regions)
        columns = list[Tensor]()  # b k ..., or b 1 ...
        for term in self.terms:
            if isinstance(term, ClassTerm):
                columns += term.each(voxels)
            else:
                each = term.each(voxels)
                columns.append((each.mean(1) if self.regions else each)[:, None])
        if counted is not None:
            weight = counted.to(logits.dtype)[:, None]
            columns = [column * weight for column in columns]
        return torch.cat([rearrange(column, "b k ... -> b k (...)").sum(2) for column in columns], 1)

    def _count(self, label: Tensor) -> Tensor:
        """Returns how many voxels count."""
        if self.ignore_label is None:
            return torch.tensor(label.numel(), device=label.device)
        return torch.stack([(run != self.ignore_label).sum() for _, run in runs(label[:, None], label)]).sum()

    def _of(self, sums: Tensor, count: Tensor, loss_groups: LossGroups) -> LossParts:
        """Returns the loss of sums ``b s`` and of the number of counted voxels, both of this rank."""
        num_means = sum(isinstance(term, VoxelTerm) for term in self.terms)
        num_outputs = (sums.shape[1] - num_means) // max(1, sum(_num_sums(term) for term in self.terms))
        widths = [_num_sums(term) * num_outputs or 1 for term in self.terms]
        terms = dict[str, Tensor]()
        whole_count: Tensor | None = None
        for term, own in zip(self.terms, sums.split(widths, 1)):
            if isinstance(term, ClassTerm):
                terms[term.name] = self._class_mean(term, own, loss_groups)
            else:
                if whole_count is None:
                    whole_count = self._whole_count(count.to(sums.dtype), loss_groups)
                summed = own.sum() if loss_groups.voxels is None else all_sum(own.sum(), loss_groups.voxels)
                terms[term.name] = summed * loss_groups.num_sample_ranks / whole_count.clamp(min=1)
        return LossParts(self.weighted(terms), terms)

    def _whole_count(self, count: Tensor, loss_groups: LossGroups) -> Tensor:
        """Returns the number of counted voxels of the batch."""
        if self.ignore_label is None:  # every rank has as many samples, but boxes may differ
            count = count * loss_groups.num_sample_ranks
        else:
            for group in loss_groups.samples:
                count = all_reduce(count, group)
        return count if loss_groups.voxels is None else all_reduce(count, loss_groups.voxels)

    def _class_mean(self, term: ClassTerm, sums: Tensor, loss_groups: LossGroups) -> Tensor:
        """Returns a term of classes of its sums ``b (s k)``."""
        sums = rearrange(sums, "b (s k) -> s b k", s=term.num_sums)
        if not term.background and not self.regions:
            sums = sums[:, :, 1:]
        if loss_groups.voxels is not None:
            sums = all_sum(sums, loss_groups.voxels)
        if term.batch:
            sums = sums.sum(1, keepdim=True)
            for group in loss_groups.samples:
                sums = all_sum(sums, group)
        return 1 - term.score(sums).mean()


def check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Raises ValueError for weights that the terms ``names`` cannot have."""
    if len(weights) != len(names):
        raise ValueError(f"loss weights {_spaced(weights)}: {len(names)} needed, for {' and '.join(names)}")
    if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ValueError(f"loss weights {_spaced(weights)} must not be negative, nor all zero")


def _spaced(weights: Sequence[float]) -> str:
    return " ".join(f"{weight:g}" for weight in weights)


def _num_sums(term: VoxelTerm | ClassTerm) -> int:
    return term.num_sums if isinstance(term, ClassTerm) else 0
