"""A weighted sum of terms, and the ranks over which its sums run."""

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
    """Which sums are partial on this rank.

    A mode makes them (``mode.loss_groups``); by hand, torch's own groups are taken too.

    - ``voxels``: the group over which one tile's voxels are spread
    - ``samples``: groups over which the batch's tiles are spread (``data``, and ``seq`` where each rank decodes whole
      samples)
    """

    voxels: Group | None = None
    samples: tuple[Group, ...] = ()

    def __post_init__(self) -> None:
        if self.voxels is not None:
            object.__setattr__(self, "voxels", as_group(self.voxels))
        object.__setattr__(self, "samples", tuple(map(as_group, self.samples)))

    @property
    def num_sample_ranks(self) -> int:
        """How many ranks' losses are averaged to the batch's loss because each holds only its own samples."""
        return math.prod(group.size for group in self.samples)


Number = TypeVar("Number", Tensor, float)
TINY = 1e-12  # what a mean divides by where nothing counts, so that it is 0


class LossParts(NamedTuple):
    """The loss, and its terms by name, which are not weighted."""

    total: Tensor
    terms: dict[str, Tensor]


class Loss(nn.Module):
    """A weighted sum of terms, of logits and integer labels.

    Every rank returns a loss whose mean over ``data x seq`` is the batch's loss.

    ``weights``: of the terms, 1 each by default. ``regions``: tuples of label values; a sigmoid for each region
    instead of a softmax over labels. ``ignore_label``: voxels that count nowhere. ``class_weights``: of each output,
    in means over classes and of voxels by their label; 1 each by default.

    Samples whose labels show only some of the classes come with ``annotated``, ``b k``: no term sees the others,
    nor the voxels that are labelled as one of them, and the gradient at their logits is exactly zero.
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
            raise ValueError("a region without labels has nothing to learn: name its labels or drop it")
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
        """Returns the loss that these terms make."""
        weighted: list[Number] = [weight * terms[name] for name, weight in self.weights.items()]
        return reduce(operator.add, weighted)

    def sums(self, logits: Tensor, label: Tensor, annotated: Tensor | None = None) -> Tensor:
        """Returns the sums of a piece of one sample; those of all pieces, added, go to ``of_sums``."""
        weights = self._weights_of(logits, annotated)
        sums = self._over_voxels(logits, label, weights, annotated).sum(0).double()
        return torch.cat([sums, self._count(label, weights)[None].double()])

    def of_sums(self, sums: Tensor, annotated: Tensor | None = None) -> LossParts:
        """Returns the loss of the sample whose pieces' ``sums`` were added."""
        own = sums[None, :-1]
        return self._of(own, sums[-1], LossGroups(), self._weights_of(own, annotated))

    def _weights_of(self, like: Tensor, annotated: Tensor | None) -> Tensor | None:
        """Returns the weight ``b k`` of each sample's classes, 0 where they are not annotated; None for 1 each."""
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
        """Returns each sample's sums ``b s`` over its voxels, term after term."""
        if label.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(f"labels {tuple(label.shape)} do not lie on the logits {tuple(logits.shape)}")
        for each in (weights, annotated):
            if each is not None and each.shape != logits.shape[:2]:
                raise ValueError(f"class weights {tuple(each.shape)} are not of the logits' {tuple(logits.shape[:2])}")
        return sum_over_voxels(logits, label, lambda run, truth: self._sums_of_run(run, truth, weights, annotated))

    def _sums_of_run(self, logits: Tensor, label: Tensor, weights: Tensor | None, annotated: Tensor | None) -> Tensor:
        """Returns ``_over_voxels`` of so few voxels that all of them are held at once."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if annotated is not None:  # a softmax would reach the others' logits too
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
        """Returns what a voxel loses ``b ...``, by the weights of its label or of the regions."""
        if self.regions:
            return each.mean(1) if weights is None else (each * _on_voxels(weights, each)).sum(1)
        return each if weights is None else each * _of_labels(weights, label)

    def _count(self, label: Tensor, weights: Tensor | None) -> Tensor:
        """Returns how many voxels count, or what they weigh."""
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
        """Returns the loss of sums ``b s``, of what the voxels weigh together, and of the classes' weights ``b k``.

        All are those of this rank.
        """
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
        """Returns the number of counted voxels of the batch, or what they weigh."""
        if self.ignore_label is None and not is_weighted:  # every rank has as many samples, but boxes may differ
            count = count * loss_groups.num_sample_ranks
        else:
            for group in loss_groups.samples:
                count = all_reduce(count, group)
        return count if loss_groups.voxels is None else all_reduce(count, loss_groups.voxels)

    def _class_mean(self, term: ClassTerm, sums: Tensor, loss_groups: LossGroups, weights: Tensor | None) -> Tensor:
        """Returns a term of classes of its sums ``b (s k)`` and of the classes' weights ``b k``."""
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
            return 1 - term.score(sums).mean()
        lost = 1 - term.score(sums)
        if term.batch:  # a class weighs what it weighs in any sample that shows it
            shown = torch.stack([weights.sum(0), (weights > 0).to(weights.dtype).sum(0)])
            for group in loss_groups.samples:
                shown = all_reduce(shown, group)
            weights = shown[0] / shown[1].clamp(min=1)
            return (weights * lost).sum() / weights.sum().clamp(min=TINY)
        total = weights.sum()
        for group in loss_groups.samples:
            total = all_reduce(total, group)
        return (weights * lost).sum() * loss_groups.num_sample_ranks / total.clamp(min=TINY)


def check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Raises ValueError for weights that the terms ``names`` cannot have."""
    if len(weights) != len(names):
        raise ValueError(f"loss weights {_spaced(weights)}: {len(names)} needed, for {' and '.join(names)}")
    check_signs("loss weights", weights)


def check_signs(what: str, weights: Sequence[float]) -> None:
    """Raises ValueError for weights of which one is negative or not finite, or all are zero; none are fine."""
    if not all(0 <= weight < float("inf") for weight in weights) or (weights and not any(weights)):
        raise ValueError(f"{what} {_spaced(weights)} must not be negative, nor all zero")


def _on_voxels(each: Tensor, voxels: Tensor) -> Tensor:
    """Returns ``b k`` so that it broadcasts to ``b k ...``."""
    return each.view(*each.shape, *[1] * (voxels.ndim - 2))


def _of_labels(weights: Tensor, label: Tensor) -> Tensor:
    """Returns the weight ``b ...`` of each voxel's label."""
    return weights.gather(1, label.flatten(1)).view_as(label)


def _spaced(weights: Sequence[float]) -> str:
    return " ".join(f"{weight:g}" for weight in weights)


def _num_sums(term: VoxelTerm | ClassTerm) -> int:
    return term.num_sums if isinstance(term, ClassTerm) else 0
