"""From slabs of logits to class ids on the grid of the case's own crop, a few rows at a time, and the temperature that
fits logits best.

Where a case was resampled for the network, its logits are resampled back first, linearly and slab by slab: those of
all classes never lie at the case's own resolution at once. Legend: k classes, w rows of a slab, W D H voxels; ``/s``
after the letter that is spread over all ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from seqpar.data.preparation.prepared_case import TargetGrid
from seqpar.data.preparation.transforms import blend, neighbours, resample
from seqpar.losses.soft_labels import SoftLabels
from seqpar.parallel.consensus import max_over_ranks
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.messages import post
from seqpar.prediction.sliding_window import FinishedRows, join_rows
from seqpar.prediction.window_grid import rows_at_once

PARTS = 8  # of the classes, resampled one after the other
WriteRows = Callable[[int, Tensor], None]  # takes the first row's number and rows ``k w D H`` of probabilities
RowsOf = Callable[[Tensor], Tensor]  # what is written of rows of probabilities


class NotFinite(ValueError):
    """A network whose logits are NaN or infinite."""


def slabs_to_labels(
    slabs: Iterator[FinishedRows],
    shape: Sequence[int],
    target: TargetGrid,
    mesh: Mesh,
    regions_class_order: Sequence[int] = (),
    write_rows: WriteRows | None = None,
    refuse_nan: bool = True,
    halves: bool = False,
    temperature: float = 1.0,
    rows_of: RowsOf | None = None,
) -> Tensor:
    """Returns class ids ``W D H`` on the grid ``target``, of logits on the grid ``shape``; the same on all ranks.

    An id takes one byte where none is above 255. ``write_rows`` takes the probabilities; pass it on all ranks or none,
    it is called on the first one alone. ``halves``: round resampled logits to half precision.
    ``refuse_nan``: raise ``NotFinite`` where logits are NaN or infinite. ``temperature``: what logits are divided by
    before they become probabilities, which changes no id. ``rows_of`` makes of a rank's probabilities what
    ``write_rows`` takes, by default themselves.
    """
    resampler, ids, finite = _SlabResampler(shape, target, mesh), torch.empty(0), True
    for slab in slabs:
        if not ids.numel():
            most = max(regions_class_order, default=len(slab.logits) - 1)
            ids = torch.empty(target.shape, dtype=torch.uint8 if most < 256 else torch.int16)
        bounds = resampler.add(slab)
        del slab  # or its logits would be alive while the next one is made
        own_ids = list[Tensor]()
        for intervals in _steps(bounds, resampler.rows_at_once):
            logits = resampler.rows(*intervals[mesh.world.index])
            logits = logits.half().float() if halves else logits
            finite = finite and (not refuse_nan or _is_finite(logits))
            own_ids.append(to_labels(logits, regions_class_order).to(ids.dtype))
            if write_rows is not None:
                logits = logits if temperature == 1 else logits / temperature
                probabilities = [logits.sigmoid() if regions_class_order else logits.softmax(0)]
                del logits
                if rows_of is not None:
                    probabilities = [rows_of(probabilities.pop())]
                _send_to_first(probabilities.pop(), intervals, mesh, write_rows)
            else:
                del logits
        resampler.release()
        if own_ids:
            ids[bounds[0] : bounds[-1]] = join_rows(torch.cat(own_ids), bounds, mesh)
    if refuse_nan and max_over_ranks(not finite, mesh.world):
        raise NotFinite("the network's logits are NaN or infinite: check the intensities, or take another checkpoint")
    return ids


def _steps(bounds: Sequence[int], rows: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the intervals of at most ``rows`` rows that the ranks take at a time; rank r's are between its bounds."""
    longest = max(high - low for low, high in pairwise(bounds))
    for offset in range(0, longest, rows):
        yield [(min(low + offset, high), min(low + offset + rows, high)) for low, high in pairwise(bounds)]


def _is_finite(logits: Tensor) -> bool:
    """Returns whether all values are finite, without a copy of them."""
    return not logits.numel() or all(map(math.isfinite, torch.stack(torch.aminmax(logits)).tolist()))


def _send_to_first(rows: Tensor, intervals: Sequence[tuple[int, int]], mesh: Mesh, write_rows: WriteRows) -> None:
    """Hands every rank's rows ``k w D H`` to ``write_rows`` on the first rank, one rank's after the other's.

    ``intervals`` says which rows each rank has.
    """
    world = mesh.world
    if not mesh.is_first:
        post({0: rows.contiguous()}, {}, world, "probabilities").wait()
        return
    template = rows[:, :0].clone()
    for rank, (low, high) in enumerate(intervals):
        if rank:
            rows = template.new_empty((len(template), high - low, *template.shape[2:]))
            post({}, {rank: rows}, world, "probabilities").wait()
        if low < high:
            write_rows(low, rows)
        del rows


class _SlabResampler:
    """Resamples logits to another grid, slab by slab; a rank gets the row before its own from the rank that has it."""

    def __init__(self, shape: Sequence[int], target: TargetGrid, mesh: Mesh) -> None:
        self.to_shape, self.mesh = target.shape, mesh
        self.is_identity = tuple(shape) == self.to_shape
        nearest = target.nearest
        self.below, self.above, self.weight = neighbours(shape[0], self.to_shape[0], nearest == 0)  # of each new row
        self.nearest = None if nearest in (None, 0) else nearest - 1  # among the directions of a row
        self._slab_end: Tensor | None = None  # k 1 D H, on the first rank: the last row of the slab before
        self._row_before: Tensor | None = None  # k 1 D H, of this rank's rows
        self._logits = torch.empty(0)  # k w/s D H, this rank's rows
        self._first_row = 0  # the number of the first row, or of the row before it

    @property
    def rows_at_once(self) -> int:
        """How many new rows a step takes."""
        return rows_at_once(len(self._logits), self.to_shape[1:], self._logits.element_size())

    def add(self, slab: FinishedRows) -> tuple[int, ...]:
        """Takes a slab; returns the bounds, in new rows, of what each rank can interpolate now."""
        rank = self.mesh.world.index
        self._first_row, self._logits = slab.bounds[rank], slab.logits
        if self.is_identity:
            return slab.bounds
        self._row_before = self._exchange_last_rows(slab)
        self._first_row -= 0 if self._row_before is None else 1
        return tuple(np.searchsorted(self.above, slab.bounds).tolist())

    def release(self) -> None:
        """Drops the slab's logits."""
        self._logits, self._row_before = self._logits[:, :0].clone(), None

    def _exchange_last_rows(self, slab: FinishedRows) -> Tensor | None:
        """Returns the row before this rank's rows; the first rank keeps the slab's last row for the next slab."""
        world = self.mesh.world
        num_busy = sum(low < high for low, high in pairwise(slab.bounds))  # the first ranks have rows
        last_row = slab.logits[:, -1:].contiguous()
        next_rank = (world.index + 1) % num_busy
        sends = {next_rank: last_row} if world.index < num_busy and next_rank != world.index else {}
        receives = {}
        if world.index < num_busy and num_busy > 1:
            receives = {(world.index - 1) % num_busy: last_row.new_empty((len(last_row), 1, *last_row.shape[2:]))}
        post(sends, receives, world, "rows").wait()
        received = next(iter(receives.values()), last_row if num_busy == 1 and world.index == 0 else None)
        if world.index > 0:
            return received
        row_before, self._slab_end = self._slab_end, received
        return row_before

    def rows(self, low: int, high: int) -> Tensor:
        """Returns logits ``k w D H`` of the new rows low to high; some classes at a time, as each step makes copies."""
        if self.is_identity:
            return self._logits[:, low - self._first_row : high - self._first_row]
        rows = self._logits.new_empty((len(self._logits), high - low, *self.to_shape[1:]))
        step = -(-len(rows) // PARTS)
        for first in range(0, len(rows) if low < high else 0, step):
            classes = slice(first, first + step)
            rows[classes] = resample(self._between(classes, low, high), self.to_shape[1:], self.nearest)
        return rows

    def _between(self, classes: slice, low: int, high: int) -> Tensor:
        """Returns logits ``k w D H`` of the new rows low to high, in the directions D and H as they were."""
        first, end = int(self.below[low]) - self._first_row, int(self.above[high - 1]) + 1 - self._first_row
        if self._row_before is None:
            old_rows = self._logits[classes, first:end]
        else:
            old_rows = self._logits[classes, max(first - 1, 0) : end - 1]
            old_rows = old_rows if first else torch.cat([self._row_before[classes], old_rows], 1)
        below, above = (index[low:high] - first - self._first_row for index in (self.below, self.above))
        return blend(old_rows, 1, below, above, self.weight[low:high])


def to_labels(logits: Tensor, regions_class_order: Sequence[int] = ()) -> Tensor:
    """Returns class ids ``w D H`` of logits ``k w D H``: the class with the largest logit.

    Where the outputs are regions that may overlap, ``regions_class_order`` names each region's label: every region
    with a probability above one half writes its label, later ones over earlier ones.
    """
    if not regions_class_order:
        return logits.argmax(0)
    if len(regions_class_order) != len(logits):
        raise ValueError(f"{len(logits)} regions were predicted, but regions_class_order is {regions_class_order}")
    ids = torch.zeros(logits.shape[1:], dtype=torch.int64, device=logits.device)
    for region, label in zip(logits, regions_class_order):
        ids[region > 0] = label  # a logit above 0 is a probability above one half
    return ids


def entropy_of(probabilities: Tensor, are_regions: bool) -> Tensor:
    """Returns the entropy ``w D H`` of probabilities ``k w D H`` in nats; of regions the sum over each one's own."""
    entropy = torch.zeros_like(probabilities[0])
    for one in probabilities:
        entropy += torch.special.entr(one)
        if are_regions:
            entropy += torch.special.entr(1 - one)
    return entropy


def with_entropy(probabilities: Tensor, are_regions: bool, alone: bool) -> Tensor:
    """Returns probabilities ``k w D H`` with their entropy as one more channel, or that channel ``alone``."""
    entropy = entropy_of(probabilities, are_regions)[None]
    return entropy if alone else torch.cat([probabilities, entropy])


TEMPERATURES = tuple(2 ** (step / 8) for step in range(-16, 25))  # from 1/4 to 8
MOST_VOXELS = 2**20  # of a case, for its temperature
_AT_ONCE = 2**22  # numbers


def negative_likelihoods(
    logits: Tensor, truth: Tensor, regions: Sequence[Sequence[int]] = (), ignore: int | None = None,
    soft: SoftLabels | None = None,
) -> Tensor:  # fmt: skip
    """Returns the negative log-likelihood ``t`` of labels at each of ``TEMPERATURES``, summed over voxels v.

    Of regions it is also summed over these, which have a sigmoid each.

    - ``logits``: ``k v``; ``truth``: ``v``
    - ``ignore``: label of the voxels that do not count
    - ``soft``: what the truth is codes of, whose likelihood is the mean over their probabilities
    """
    if ignore is not None:
        counted = truth != ignore
        logits, truth = logits[:, counted], truth[counted]
    scales = torch.tensor([1 / one for one in TEMPERATURES], device=logits.device)[:, None, None]
    sums, step = scales.new_zeros(len(scales), dtype=torch.float64), max(1, _AT_ONCE // (len(scales) * len(logits)))
    for some, labels in zip(logits.float().split(step, 1), truth.long().split(step)):
        scaled = scales * some  # t k v
        target = None if soft is None else soft.target(labels[None], scaled.dtype, regions)[0]
        if regions:
            inside = target
            if inside is None:
                inside = torch.stack([torch.isin(labels, labels.new_tensor(region)) for region in regions])
            own = torch.nn.functional.softplus(scaled) - scaled * inside
        else:
            true = some.gather(0, labels[None]) if target is None else (some * target).sum(0, keepdim=True)
            own = scaled.logsumexp(1) - scales[:, 0] * true
        sums += own.flatten(1).double().sum(1)
    return sums


def step_between(voxels: int, area: int) -> int:
    """Returns the step from one voxel of a case to the next that counts, so that at most ``MOST_VOXELS`` do.

    It has no divisor in common with ``area``, the voxels of one slice: else some lines of every slice would be missed.
    """
    step = max(1, -(-voxels // MOST_VOXELS))
    while math.gcd(step, area) > 1:
        step += 1
    return step


def best_temperature(likelihoods: Sequence[float]) -> float | None:
    """Returns the temperature with the least negative log-likelihood, by a parabola through the three lowest.

    None if no voxel counted, or if some logit was not finite.
    """
    if not all(map(math.isfinite, likelihoods)) or not any(likelihoods):
        return None
    at = min(range(len(likelihoods)), key=likelihoods.__getitem__)
    if at in (0, len(likelihoods) - 1):
        return TEMPERATURES[at]
    left, least, right = likelihoods[at - 1 : at + 2]
    curvature = left - 2 * least + right
    shift = (left - right) / (2 * curvature) if curvature else 0.0
    return float(TEMPERATURES[at] * 2 ** (shift / 8))
