"""Loss: a weighted sum of terms, whose sums over voxels and samples include all ranks that share them.

Legend: b batch, k classes or regions, s sums, W D H voxels; ``W/s`` where voxels are split over a group.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from seqpar.losses.terms import ClassTerm, VoxelTerm
from seqpar.losses.voxels import Voxels, row_chunks, sum_over_voxels
from seqpar.parallel.collectives import all_reduce, all_sum
from seqpar.parallel.mesh import Group, as_group


@dataclass(frozen=True, eq=False)
class LossGroups:
    """Which of a loss's sums are partial on this rank.

    Get it from a mode (``mode.loss_groups``), or build it from any kind of group that ``as_group`` accepts.

    Args:
        ``voxels``: the group over which one tile's voxels are split; None: each rank has all of them.
        ``samples``: the groups over which the batch's tiles are split: ``data``, and ``seq`` if each rank decodes whole
            samples.
    """

    voxels: Group | None = None
    samples: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if self.voxels is not None:
            object.__setattr__(self, "voxels", as_group(self.voxels))
        object.__setattr__(self, "samples", tuple(map(as_group, self.samples)))

    @property
    def num_sample_ranks(self) -> int:
        """The number of ranks over whose losses the batch's loss is averaged, because each has only its own samples."""
        return math.prod(group.size for group in self.samples)


Number = TypeVar("Number", Tensor, float)
TINY = 1e-12  # divisor of a mean to which nothing contributes, so that it is 0


class LossParts(NamedTuple):
    """The loss, and its unweighted terms by name."""

    total: Tensor
    terms: dict[str, Tensor]


class Loss(nn.Module):
    """A weighted sum of terms of logits and integer labels.

    Every rank returns a loss whose mean over ``data x seq`` is the batch's loss.

    If the labels of a sample show only some of the classes, pass ``annotated``, ``b k``: no term counts the other
    classes, nor the voxels labelled as one of them, and the gradient of their logits is exactly zero.

    - ``terms``: the terms, in order
    - ``weights``: of the terms; by default 1 each
    - ``regions``: tuples of label values; each region gets a sigmoid, instead of a softmax over labels
    - ``ignore_label``: label of the voxels that do not count
    - ``class_weights``: of each output, in means over classes, and of voxels by their label; by default 1 each
    """

    def __init__(
        self,
        terms: Sequence[VoxelTerm | ClassTerm],
        weights: Sequence[float] = (),
        regions: Sequence[Sequence[int]] = (),
        ignore_label: int | None = None,
        class_weights: Sequence[float] = (),
    ) -> None:
        super().__init__()
        self.terms, weights = tuple(terms), tuple(weights) or (1.0,) * len(terms)
        check_weights(weights, [term.name for term in self.terms])
        if any(not region for region in regions):
            raise ValueError("a region has no labels: name its labels or remove it")
        self.weights = {term.name: weight for term, weight in zip(self.terms, weights)}
        self.regions = tuple(tuple(region) for region in regions)
        check_signs("class weights", class_weights)
        self.ignore_label, self.class_weights = ignore_label, tuple(class_weights)
        self._placed_weights = dict[tuple[torch.dtype, torch.device], Tensor]()  # copied to each device once

    def forward(
        self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None, annotated: Tensor | None = None
    ) -> Tensor:
        """Returns the scalar loss of logits ``b k W D H`` and integer labels ``b W D H``."""
        return self.parts(logits, label, loss_groups, annotated).total

    def parts(
        self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None, annotated: Tensor | None = None
    ) -> LossParts:
        """Returns the loss and its terms."""
        weights = self._weights_of(logits, annotated)
        sums = self._over_voxels(logits, label, weights, annotated)
        return self._of(sums, self._count(label, weights), loss_groups or LossGroups(), weights)

    def weighted(self, terms: Mapping[str, Number]) -> Number:
        """Returns the weighted sum of ``terms``."""
        weighted: list[Number] = [weight * terms[name] for name, weight in self.weights.items()]
        return reduce(operator.add, weighted)

    def sums(self, logits: Tensor, label: Tensor, annotated: Tensor | None = None) -> Tensor:
        """Returns the sums of a piece of one sample; add those of all its pieces and pass them to ``of_sums``."""
        weights = self._weights_of(logits, annotated)
        sums = self._over_voxels(logits, label, weights, annotated).sum(0).double()
        return torch.cat([sums, self._count(label, weights)[None].double()])

    def of_sums(self, sums: Tensor, annotated: Tensor | None = None) -> LossParts:
        """Returns the loss of a sample, given the ``sums`` of all its pieces."""
        own = sums[None, :-1]
        return self._of(own, sums[-1], LossGroups(), self._weights_of(own, annotated))

    def _weights_of(self, like: Tensor, annotated: Tensor | None) -> Tensor | None:
        """Returns the weight ``b k`` of each sample's classes, 0 for those not annotated; None if all are 1."""
        if annotated is None and not self.class_weights:
            return None
        dtype = torch.promote_types(like.dtype, torch.float32)
        if not self.class_weights:
            return annotated.to(dtype)  # type: ignore[union-attr]
        place = dtype, like.device
        if place not in self._placed_weights:
            self._placed_weights[place] = torch.tensor(self.class_weights, dtype=dtype, device=like.device)
        weights = self._placed_weights[place].expand(len(like), -1)
        return weights if annotated is None else weights * annotated

    def _over_voxels(self, logits: Tensor, label: Tensor, weights: Tensor | None, annotated: Tensor | None) -> Tensor:
        """Returns each sample's sums ``b s`` over its voxels, one term after the other."""
        if label.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(f"labels of shape {tuple(label.shape)} do not match logits of shape {tuple(logits.shape)}")
        for each in (weights, annotated):
            if each is not None and each.shape != logits.shape[:2]:
                raise ValueError(
                    f"class weights of shape {tuple(each.shape)} do not match {tuple(logits.shape[:2])} logits"
                )
        return sum_over_voxels(logits, label, lambda run, truth: self._sums_of_run(run, truth, weights, annotated))

    def _sums_of_run(self, logits: Tensor, label: Tensor, weights: Tensor | None, annotated: Tensor | None) -> Tensor:
        """Computes ``_over_voxels`` for a chunk of voxels that fits in memory at once."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if annotated is not None:  # detached, because softmax would pass gradients to the other logits
            logits = torch.where(_on_voxels(annotated, logits), logits, logits.detach())
        counted = None if self.ignore_label is None else label != self.ignore_label
        label = label.long() if counted is None else label.long().masked_fill(~counted, 0)
        voxels = Voxels(logits, label, self.regions)
        columns = list[Tensor]()  # b k ..., or b 1 ...
        for term in self.terms:
            if isinstance(term, ClassTerm):
                columns += term.each(voxels)
            else:
                columns.append(self._weighted_voxels(term.each(voxels), label, weights)[:, None])
        if counted is not None:
            weight = counted.to(logits.dtype)[:, None]
            columns = [column * weight for column in columns]
        return torch.cat([rearrange(column, "b k ... -> b k (...)").sum(2) for column in columns], 1)

    def _weighted_voxels(self, each: Tensor, label: Tensor, weights: Tensor | None) -> Tensor:
        """Returns the loss of each voxel ``b ...``, weighted by its label or by the regions."""
        if self.regions:
            return each.mean(1) if weights is None else (each * _on_voxels(weights, each)).sum(1)
        return each if weights is None else each * _of_labels(weights, label)

    def _count(self, label: Tensor, weights: Tensor | None) -> Tensor:
        """Returns how many voxels count, or the sum of their weights."""
        if self.ignore_label is None and weights is None:
            return torch.full((), label.numel(), device=label.device)
        return torch.stack([self._count_run(run, weights) for run, _ in row_chunks(label, label[:, None])]).sum()

    def _count_run(self, label: Tensor, weights: Tensor | None) -> Tensor:
        counted = torch.ones_like(label, dtype=torch.bool) if self.ignore_label is None else label != self.ignore_label
        if weights is None:
            return counted.sum()
        if self.regions:
            return (counted.flatten(1).sum(1) * weights.sum(1)).sum()
        return (_of_labels(weights, label.long().masked_fill(~counted, 0)) * counted).sum()

    def _of(self, sums: Tensor, count: Tensor, loss_groups: LossGroups, weights: Tensor | None) -> LossParts:
        """Returns the loss, given this rank's sums ``b s``, its voxels' total weight, and class weights ``b k``."""
        num_means = sum(isinstance(term, VoxelTerm) for term in self.terms)
        num_outputs = (sums.shape[1] - num_means) // max(1, sum(_num_sums(term) for term in self.terms))
        widths = [_num_sums(term) * num_outputs or 1 for term in self.terms]
        terms = dict[str, Tensor]()
        whole_count: Tensor | None = None
        for term, own in zip(self.terms, sums.split(widths, 1)):
            if isinstance(term, ClassTerm):
                terms[term.name] = self._class_mean(term, own, loss_groups, weights)
            else:
                if whole_count is None:
                    whole_count = self._whole_count(count.to(sums.dtype), loss_groups, weights is not None)
                    whole_count = whole_count.clamp(min=1 if weights is None else TINY)
                summed = own.sum() if loss_groups.voxels is None else all_sum(own.sum(), loss_groups.voxels)
                terms[term.name] = summed * loss_groups.num_sample_ranks / whole_count
        return LossParts(self.weighted(terms), terms)

    def _whole_count(self, count: Tensor, loss_groups: LossGroups, is_weighted: bool) -> Tensor:
        """Returns the number of voxels of the batch that count, or the sum of their weights."""
        if self.ignore_label is None and not is_weighted:  # ranks have equally many samples, but boxes may differ
            count = count * loss_groups.num_sample_ranks
        else:
            for group in loss_groups.samples:
                count = all_reduce(count, group)
        return count if loss_groups.voxels is None else all_reduce(count, loss_groups.voxels)

    def _class_mean(self, term: ClassTerm, sums: Tensor, loss_groups: LossGroups, weights: Tensor | None) -> Tensor:
        """Returns a class term, given its sums ``b (s k)`` and the weights ``b k`` of the classes."""
        sums = rearrange(sums, "b (s k) -> s b k", s=term.num_sums)
        if not term.background and not self.regions:
            sums = sums[:, :, 1:]
            weights = None if weights is None else weights[:, 1:]
        if loss_groups.voxels is not None:
            sums = all_sum(sums, loss_groups.voxels)
        if term.batch:
            sums = (sums if weights is None else sums * (weights > 0)).sum(1, keepdim=True)
            for group in loss_groups.samples:
                sums = all_sum(sums, group)
        if weights is None:
            return term.loss(sums).mean()
        lost = term.loss(sums)
        if term.batch:  # a class has the same weight in every sample that shows it
            shown = torch.stack([weights.sum(0), (weights > 0).to(weights.dtype).sum(0)])
            for group in loss_groups.samples:
                shown = all_reduce(shown, group)
            weights = shown[0] / shown[1].clamp(min=1)
            if term.every_class:
                return (weights * lost).mean()
            return (weights * lost).sum() / weights.sum().clamp(min=TINY)
        if term.every_class:
            return (weights * lost).mean()
        total = weights.sum()
        for group in loss_groups.samples:
            total = all_reduce(total, group)
        return (weights * lost).sum() * loss_groups.num_sample_ranks / total.clamp(min=TINY)


def check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Raises ValueError unless the weights fit the terms ``names``."""
    if len(weights) != len(names):
        raise ValueError(f"loss weights {_spaced(weights)}: expected {len(names)}, for {' and '.join(names)}")
    check_signs("loss weights", weights)


def check_signs(what: str, weights: Sequence[float]) -> None:
    """Raises ValueError if a weight is negative or not finite, or if all are zero; an empty sequence is fine."""
    if not all(0 <= weight < float("inf") for weight in weights) or (weights and not any(weights)):
        raise ValueError(f"{what} {_spaced(weights)} must be finite, not negative, and not all zero")


def _on_voxels(each: Tensor, voxels: Tensor) -> Tensor:
    """Reshapes ``b k`` to broadcast against ``b k ...``."""
    return each.view(*each.shape, *[1] * (voxels.ndim - 2))


def _of_labels(weights: Tensor, label: Tensor) -> Tensor:
    """Returns the weight ``b ...`` of each voxel's label."""
    return weights.gather(1, label.flatten(1)).view_as(label)


def _spaced(weights: Sequence[float]) -> str:
    return " ".join(f"{weight:g}" for weight in weights)


def _num_sums(term: VoxelTerm | ClassTerm) -> int:
    return term.num_sums if isinstance(term, ClassTerm) else 0
