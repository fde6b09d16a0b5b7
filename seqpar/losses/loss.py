"""Loss: a weighted sum of terms, whose sums over voxels and samples include all ranks that share them.

Legend: b batch, k classes or regions, s sums, W D H voxels; ``W/s`` where voxels are split over a group.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn

from seqpar.losses.skeletons import MARK, classes_and_marks
from seqpar.losses.soft_labels import SoftLabels
from seqpar.losses.terms import (
    ClassTerm,
    Inside,
    Voxels,
    VoxelTerm,
    check_signs,
    check_weights,
    row_chunks,
    sum_over_voxels,
)
from seqpar.parallel.collectives import all_reduce, all_sum
from seqpar.parallel.consensus import raise_over_groups
from seqpar.parallel.layout import plain_tensor
from seqpar.parallel.mesh import Group, as_group
from seqpar.spatial.box_grid import BoxGrid, refuse_box_alone
from seqpar.spatial.halos import fetch_rows

Work = TypeVar("Work")


@dataclass(frozen=True, eq=False)
class LossGroups:
    """Which of a loss's sums are partial on this rank.

    Get it from a mode (``mode.loss_groups``), or build it from any kind of group that ``as_group`` accepts.

    Args:
        ``voxels``: the group over which one tile's voxels are split; None: each rank has all of them.
        ``samples``: the groups over which the batch's tiles are split: ``data``, and ``seq`` if each rank decodes whole
            samples.
        ``boxes``: how the tile's voxels are cut into boxes, for terms that read neighbours (``"cldice"``).
        ``agrees``: whether the ranks tell each other of wrong labels before they sum; on a GPU they never do.
    """

    voxels: Group | None = None
    samples: tuple[Group, ...] = ()
    boxes: BoxGrid | None = None
    agrees: bool = False

    def __post_init__(self) -> None:
        if self.voxels is not None:
            object.__setattr__(self, "voxels", as_group(self.voxels))
        object.__setattr__(self, "samples", tuple(map(as_group, self.samples)))

    @property
    def num_sample_ranks(self) -> int:
        """The number of ranks over whose losses the batch's loss is averaged, because each has only its own samples."""
        return math.prod(group.size for group in self.samples)

    def coarser(self, scale: Sequence[int]) -> "LossGroups":
        """Returns the groups for logits that each stand for ``scale`` voxels."""
        if self.boxes is None:
            return self
        edges = tuple(tuple(edge // step for edge in each) for each, step in zip(self.boxes.edges, scale))
        return replace(self, boxes=BoxGrid(edges, self.boxes.group))

    def own_work(self, act: Callable[[], Work], device: torch.device) -> Work:
        """Returns ``act()``, which sends nothing; with ``agrees``, what one rank raises is raised on all."""
        agrees = self.agrees and device.type == "cpu" and not torch.compiler.is_compiling()
        error: Exception | None = None
        try:
            done = act()
        except Exception as problem:
            error = problem
            if not agrees:
                raise
        if agrees:
            raise_over_groups(error, [*filter(None, [self.voxels]), *self.samples])
        return done


Number = TypeVar("Number", Tensor, float)
TINY = 1e-12  # divisor of a mean to which nothing contributes, so that it is 0


class LossParts(NamedTuple):
    """The loss, and its unweighted terms by name."""

    total: Tensor
    terms: dict[str, Tensor]


LossOf = Callable[[Any], LossParts]  # takes what the network returns in training


class StepTotals(NamedTuple):
    """What the means of a step divide by: sums over its micro-batches, on all ranks that share them.

    - ``micros``: the number of micro-batches
    - ``voxels``: how many voxels count, or the sum of their weights
    - ``classes``: the weights ``k`` of the classes, summed over samples; None if all are 1
    """

    micros: int
    voxels: Tensor
    classes: Tensor | None


class Loss(nn.Module):
    """A weighted sum of terms of logits and integer labels.

    Every rank returns a loss whose mean over ``data x seq`` is the batch's loss. In a step of several micro-batches
    (``of_step``) means run over all of its samples, however they are split, except Dice over the batch: that is the
    mean of the micro-batches' own.

    If the labels of a sample show only some of the classes, pass ``annotated``, ``b k``: no term counts the other
    classes, nor the voxels labelled as one of them, and the gradient of their logits is exactly zero.

    - ``terms``: the terms, in order
    - ``weights``: of the terms; by default 1 each
    - ``regions``: tuples of label values; each region gets a sigmoid, instead of a softmax over labels
    - ``ignore_label``: label of the voxels that do not count
    - ``class_weights``: of each output, in means over classes, and of voxels by their label; by default 1 each
    - ``soft``: what labels are codes of, if they are labels with doubt
    """

    def __init__(
        self,
        terms: Sequence[VoxelTerm | ClassTerm],
        weights: Sequence[float] = (),
        regions: Sequence[Sequence[int]] = (),
        ignore_label: int | None = None,
        class_weights: Sequence[float] = (),
        soft: SoftLabels | None = None,
    ) -> None:
        super().__init__()
        self.terms, weights = tuple(terms), tuple(weights) or (1.0,) * len(terms)
        check_weights(weights, [term.name for term in self.terms])
        if any(not region for region in regions):
            raise ValueError("a region has no labels: name its labels or remove it")
        self.weights = {term.name: weight for term, weight in zip(self.terms, weights)}
        of_classes = [term for term in self.terms if isinstance(term, ClassTerm)]
        self.reach = max((term.reach for term in of_classes), default=0)
        self.needs_marks, self._has_seen_marks = any(term.needs_marks for term in of_classes), False
        self.regions = tuple(tuple(region) for region in regions)
        check_signs("class weights", class_weights)
        self.ignore_label, self.class_weights, self.soft = ignore_label, tuple(class_weights), soft
        if soft is not None:
            self._refuse_for_soft_labels()
        self._placed_weights = dict[tuple[torch.dtype, torch.device], Tensor]()  # copied to each device once

    def forward(
        self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None, annotated: Tensor | None = None
    ) -> Tensor:
        """Returns the scalar loss of logits ``b k W D H`` and integer labels ``b W D H`` or ``b 1 W D H``."""
        return self.parts(logits, label, loss_groups, annotated).total

    def parts(
        self, logits: Tensor, label: Tensor, loss_groups: LossGroups | None = None, annotated: Tensor | None = None
    ) -> LossParts:
        """Returns the loss and its terms."""
        refuse_box_alone(logits, loss_groups)
        logits, label, groups = plain_tensor(logits), plain_tensor(label), loss_groups or LossGroups()
        sums, weights = self._sums(logits, label, annotated, groups)
        return self._of(sums, self._totals([label], [annotated], groups), groups, weights)

    def of_step(
        self, labels: Sequence[Tensor], loss_groups: LossGroups | None = None, annotated: Sequence[Tensor | None] = ()
    ) -> list[LossOf]:
        """Returns the loss of each micro-batch as a function of its logits; their sum is the loss of the step.

        - ``labels``, ``annotated``: of each micro-batch of the step
        """
        every, groups = list(annotated) or [None] * len(labels), loss_groups or LossGroups()
        totals = self._totals(labels, every, groups)

        def share(label: Tensor, shown: Tensor | None, logits: Tensor) -> LossParts:
            sums, weights = self._sums(logits, label, shown, groups)
            return self._of(sums, totals, groups, weights)

        return [partial(share, *of_micro) for of_micro in zip(labels, every)]

    def _refuse_for_soft_labels(self) -> None:
        """Raises ValueError for what a label with doubt has no meaning for."""
        if unable := [term.name for term in self.terms if not term.takes_soft]:
            raise ValueError(f"labels with doubt: the loss term {unable[0]} takes no probabilities: choose dice or ce")
        if self.ignore_label is not None or self.class_weights:
            raise ValueError("labels with doubt take neither ignore_label nor class_weights: leave them out")

    def of_pieces(self) -> "Loss":
        """Returns the loss without the terms of skeletons, which sums of pieces of a volume (``sums``) do not give."""
        kept = [term for term in self.terms if isinstance(term, VoxelTerm) or not (term.reach or term.needs_marks)]
        loss = copy(self)
        loss.terms, loss.weights = tuple(kept), {term.name: self.weights[term.name] for term in kept}
        loss.reach, loss.needs_marks = 0, False
        return loss

    def weighted(self, terms: Mapping[str, Number]) -> Number:
        """Returns the weighted sum of ``terms``."""
        weighted: list[Number] = [weight * terms[name] for name, weight in self.weights.items()]
        return reduce(operator.add, weighted)

    def sums(self, logits: Tensor, label: Tensor, annotated: Tensor | None = None) -> Tensor:
        """Returns the sums of a piece of one sample; add those of all its pieces and pass them to ``of_sums``."""
        sums, weights = self._sums(logits, label, annotated)
        return torch.cat([sums.sum(0).double(), self._count(label, weights)[None].double()])

    def of_sums(self, sums: Tensor, annotated: Tensor | None = None) -> LossParts:
        """Returns the loss of a sample, given the ``sums`` of all its pieces."""
        own = sums[None, :-1]
        weights = self._weights_of(own, annotated, own.dtype)
        if weights is None:
            return self._of(own, StepTotals(1, sums[-1].clamp(min=1), None), LossGroups(), None)
        return self._of(own, StepTotals(1, sums[-1].clamp(min=TINY), weights.sum(0)), LossGroups(), weights)

    def _sums(
        self, logits: Tensor, label: Tensor, annotated: Tensor | None, loss_groups: LossGroups = LossGroups()
    ) -> tuple[Tensor, Tensor | None]:
        """Returns each sample's sums ``b s`` over this rank's voxels, and the weights ``b k`` of its classes."""
        voxels, device = loss_groups.voxels, logits.device

        def add(logits: Tensor, label: Tensor, weights: Tensor | None, inside: Inside | None = None) -> Tensor:
            return sum_over_voxels(logits, label, partial(self._columns_of_run, weights, annotated), inside, self.reach)

        def fit_and_add() -> tuple[Tensor, Tensor | None]:
            own, weights = self._fitting(logits, label, annotated)
            return add(logits, own, weights), weights

        if not (self.reach and voxels is not None and voxels.size > 1):
            return loss_groups.own_work(fit_and_add, device)
        own, weights = loss_groups.own_work(lambda: self._fitting(logits, label, annotated), device)
        wide, own, inside = self._with_neighbours(logits, own, loss_groups.boxes)
        return loss_groups.own_work(lambda: add(wide, own, weights, inside), device), weights

    def _fitting(self, logits: Tensor, label: Tensor, annotated: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the label without a channel, and its classes' weights ``b k``; raises ValueError if any is wrong."""
        weights = self._weights_of(logits, annotated, torch.promote_types(logits.dtype, torch.float32))
        label = label[:, 0] if label.ndim == logits.ndim and label.shape[1] == 1 else label
        self._refuse_other_shapes(logits, label, weights, annotated)
        if logits.shape[1] == 1 and not self.regions:
            raise ValueError("logits of one output have no class but the background: give two, or regions=((1,),)")
        return label, weights

    def _with_neighbours(self, logits: Tensor, label: Tensor, boxes: BoxGrid | None) -> tuple[Tensor, Tensor, Inside]:
        """Returns the logits and labels of this rank's box and of the voxels around it, and where the box is in them.

        *forward:* a halo exchange along each dimension.
        *backward:* their adjoints, in reverse order.
        """
        if boxes is None:
            raise ValueError(
                "loss_groups without boxes: a term of this loss reads neighbouring voxels: give "
                "LossGroups(voxels=..., boxes=...) with the box grid of the voxels, as net.loss_groups(...) does"
            )
        boxes.refuse_other_box(logits)
        rows = [
            [(max(0, low - self.reach), min(edges[-1], high + self.reach)) for low, high in pairwise(edges)]
            for edges in boxes.edges
        ]
        starts = [rows_of_dim[at][0] for rows_of_dim, at in zip(rows, boxes.place)]
        inside = tuple(slice(low - start, high - start) for (low, high), start in zip(boxes.box, starts))
        return fetch_rows(logits, boxes, rows), fetch_rows(label[:, None], boxes, rows)[:, 0], inside

    def _weights_of(self, samples: Tensor, annotated: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Returns the weight ``b k`` of each sample's classes, 0 for those not annotated; None if all are 1."""
        if self.soft is not None and annotated is not None:
            raise ValueError("annotated: labels with doubt show all classes, so annotated must be None")
        if not self.class_weights:
            return None if annotated is None else annotated.to(dtype)
        place = dtype, samples.device
        if place not in self._placed_weights:
            self._placed_weights[place] = torch.tensor(self.class_weights, dtype=dtype, device=samples.device)
        weights = self._placed_weights[place].expand(len(samples), -1)
        return weights if annotated is None else weights * annotated

    @staticmethod
    def _refuse_other_shapes(logits: Tensor, label: Tensor, weights: Tensor | None, annotated: Tensor | None) -> None:
        """Raises ValueError if labels or weights do not fit the logits."""
        if label.shape != (logits.shape[0], *logits.shape[2:]):
            raise ValueError(
                f"labels of shape {tuple(label.shape)} do not match logits of shape {tuple(logits.shape)}: a label has "
                "the logits' shape, without their channels or with a single one"
            )
        if label.is_floating_point() or label.is_complex():
            raise ValueError(f"labels of {label.dtype}: a label is the whole number of a class; give label.long()")
        for each in (weights, annotated):
            if each is not None and each.shape != logits.shape[:2]:
                raise ValueError(
                    f"class weights of shape {tuple(each.shape)} do not match {tuple(logits.shape[:2])} logits"
                )

    def _columns_of_run(
        self, weights: Tensor | None, annotated: Tensor | None, logits: Tensor, label: Tensor, inside: Inside
    ) -> list[Tensor]:
        """Returns what is to be summed over a chunk of voxels, ``b k ...`` or ``b 1 ...``, one term after the other."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if annotated is not None:  # detached, because softmax would pass gradients to the other logits
            logits = torch.where(_on_voxels(annotated, logits), logits, logits.detach())
        label, marked = classes_and_marks(label) if self.needs_marks else (label, None)
        counted = None if self.ignore_label is None else label != self.ignore_label
        label = label.long() if counted is None else label.long().masked_fill(~counted, 0)
        voxels = Voxels(logits, label, self.regions, marked, counted, self.soft)
        columns = list[Tensor]()  # b k ..., or b 1 ...
        for term in self.terms:
            if isinstance(term, ClassTerm):
                columns += term.each(voxels)
            else:
                columns.append(self._weighted_voxels(term.each(voxels), label, weights)[:, None])
        if counted is not None:
            weight = counted.to(logits.dtype)[:, None]
            columns = [column * weight for column in columns]
        if self.reach:
            columns = [column[(slice(None), slice(None), *inside)] for column in columns]
        return columns

    def _refuse_unmarked(self, labels: Sequence[Tensor], loss_groups: LossGroups) -> None:
        """Raises ValueError, on all ranks that share samples, if labels lack marks; looks until some have them.

        A GPU waits for it.
        """
        if not self.needs_marks or self._has_seen_marks or labels[0].is_meta:
            return
        seen = torch.zeros(2, dtype=torch.long, device=labels[0].device)  # voxels without marks and with them
        for label in map(Tensor.long, labels):
            unmarked = (label > 0) & (label < MARK)
            unmarked = unmarked if self.ignore_label is None else unmarked & (label != self.ignore_label)
            seen += torch.stack([unmarked.sum(), (label >= MARK).sum()])
        for group in (loss_groups.voxels, *loss_groups.samples):
            seen = seen if group is None else all_reduce(seen, group)
        unmarked_voxels, marked_voxels = seen.tolist()
        if unmarked_voxels:
            raise ValueError(
                f"labels with {unmarked_voxels} voxels of the foreground that no skeleton was made for: give this loss "
                "what mark_skeleton(label) returns for whole labels, before they are cut into parts"
            )
        self._has_seen_marks = marked_voxels > 0

    def _weighted_voxels(self, each: Tensor, label: Tensor, weights: Tensor | None) -> Tensor:
        """Returns the loss of each voxel ``b ...``, weighted by its label or by the regions."""
        if self.regions:
            return each.mean(1) if weights is None else (each * _on_voxels(weights, each)).sum(1)
        return each if weights is None else each * _of_labels(weights, label)

    def _totals(
        self, labels: Sequence[Tensor], annotated: Sequence[Tensor | None], loss_groups: LossGroups
    ) -> StepTotals:
        """Returns what the means of a step divide by, given the labels of its micro-batches on this rank."""
        self._refuse_unmarked(labels, loss_groups)

        def weigh_and_count() -> tuple[list[Tensor | None], Tensor]:
            each = [self._weights_of(label, shown, torch.float64) for label, shown in zip(labels, annotated)]
            if self.ignore_label is None and not any(weights is not None for weights in each):
                count = sum(label.numel() for label in labels)  # ranks have equally many samples, but boxes may differ
                return each, torch.full((1,), count * loss_groups.num_sample_ranks, dtype=torch.float64, device=device)
            counts = [self._count(label, weights) for label, weights in zip(labels, each)]
            return each, torch.stack(counts).sum().double()[None]

        device = labels[0].device

        each, own = loss_groups.own_work(weigh_and_count, device)
        weights = [of_micro for of_micro in each if of_micro is not None]
        if weights:
            own = torch.cat([own, torch.cat(weights).sum(0)])
        if self.ignore_label is not None or weights:
            for group in loss_groups.samples:
                own = all_reduce(own, group)
        count = own[0] if loss_groups.voxels is None else all_reduce(own[0], loss_groups.voxels)
        return StepTotals(len(labels), count.clamp(min=TINY if weights else 1), own[1:] if weights else None)

    def _count(self, label: Tensor, weights: Tensor | None) -> Tensor:
        """Returns how many voxels count, or the sum of their weights."""
        if self.ignore_label is None and weights is None:
            return torch.full((), label.numel(), device=label.device)
        return torch.stack([self._count_run(run, weights) for run, _ in row_chunks(label, label[:, None])]).sum()

    def _count_run(self, label: Tensor, weights: Tensor | None) -> Tensor:
        label = classes_and_marks(label)[0] if self.needs_marks else label
        counted = torch.ones_like(label, dtype=torch.bool) if self.ignore_label is None else label != self.ignore_label
        if weights is None:
            return counted.sum()
        if self.regions:
            return (counted.flatten(1).sum(1) * weights.sum(1)).sum()
        return (_of_labels(weights, label.long().masked_fill(~counted, 0)) * counted).sum()

    def _of(self, sums: Tensor, totals: StepTotals, loss_groups: LossGroups, weights: Tensor | None) -> LossParts:
        """Returns a micro-batch's loss, given this rank's sums ``b s`` and the class weights ``b k``."""
        num_means = sum(isinstance(term, VoxelTerm) for term in self.terms)
        num_outputs = (sums.shape[1] - num_means) // max(1, sum(_num_sums(term) for term in self.terms))
        widths = [_num_sums(term) * num_outputs or 1 for term in self.terms]
        terms = dict[str, Tensor]()
        for term, own in zip(self.terms, sums.split(widths, 1)):
            if isinstance(term, ClassTerm):
                terms[term.name] = self._class_mean(term, own, totals, loss_groups, weights)
            else:
                summed = own.sum() if loss_groups.voxels is None else all_sum(own.sum(), loss_groups.voxels)
                terms[term.name] = summed * loss_groups.num_sample_ranks / totals.voxels.to(summed.dtype)
        return LossParts(self.weighted(terms), terms)

    def _class_mean(
        self, term: ClassTerm, sums: Tensor, totals: StepTotals, loss_groups: LossGroups, weights: Tensor | None
    ) -> Tensor:
        """Returns a class term, given its sums ``b (s k)`` and the weights ``b k`` of the classes."""
        sums = rearrange(sums, "b (s k) -> s b k", s=term.num_sums)
        counted = slice(0 if term.background or self.regions else 1, None)  # classes
        sums, weights = sums[:, :, counted], None if weights is None else weights[:, counted]
        if loss_groups.voxels is not None:
            sums = all_sum(sums, loss_groups.voxels)
        if term.batch:
            sums = (sums if weights is None else sums * (weights > 0)).sum(1, keepdim=True)
            for group in loss_groups.samples:
                sums = all_sum(sums, group)
        lost = term.loss(sums)
        if weights is None or totals.classes is None:
            return lost.mean() / totals.micros
        if term.batch:  # a class has the same weight in every sample that shows it
            shown = torch.stack([weights.sum(0), (weights > 0).to(weights.dtype).sum(0)])
            for group in loss_groups.samples:
                shown = all_reduce(shown, group)
            weights = shown[0] / shown[1].clamp(min=1)
            if term.every_class:
                return (weights * lost).mean() / totals.micros
            return (weights * lost).sum() / weights.sum().clamp(min=TINY) / totals.micros
        if term.every_class:
            return (weights * lost).mean() / totals.micros
        total = totals.classes[counted].sum().clamp(min=TINY).to(lost.dtype)
        return (weights * lost).sum() * loss_groups.num_sample_ranks / total


def _on_voxels(each: Tensor, voxels: Tensor) -> Tensor:
    """Reshapes ``b k`` to broadcast against ``b k ...``."""
    return each.view(*each.shape, *[1] * (voxels.ndim - 2))


def _of_labels(weights: Tensor, label: Tensor) -> Tensor:
    """Returns the weight ``b ...`` of each voxel's label."""
    return weights.gather(1, label.flatten(1)).view_as(label)


def _num_sums(term: VoxelTerm | ClassTerm) -> int:
    return term.num_sums if isinstance(term, ClassTerm) else 0
