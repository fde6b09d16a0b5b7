"""From slabs of logits to class ids on the grid of the case's own crop, a few rows at a time.

Where a case was resampled for the network, its logits are resampled back first, linearly and slab by slab: those of
all classes never lie at the case's own resolution at once. Legend: k classes, w rows of a slab, W D H voxels; ``/s``
after the letter that is spread over all ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from seqpar.consensus import agree
from seqpar.data.preparation.preparation import TargetGrid
from seqpar.data.preparation.transforms import blend, neighbours, resample
from seqpar.launch.inference.sliding_window import Slab, join_rows
from seqpar.mesh import Mesh
from seqpar.messages import post

ROWS_AT_ONCE = 8  # at the case's own resolution

WriteRows = Callable[[int, Tensor], None]  # takes the first row's number and rows ``k w D H`` of probabilities


class NotFinite(ValueError):
    """A network whose logits are NaN or infinite."""


def slabs_to_labels(
    slabs: Iterator[Slab],
    shape: Sequence[int],
    target: TargetGrid,
    mesh: Mesh,
    regions_class_order: Sequence[int] = (),
    write_rows: WriteRows | None = None,
) -> Tensor:
    """Returns class ids ``W D H`` on the grid ``target``, of logits on the grid ``shape``; the same on all ranks.

    ``write_rows`` takes the probabilities; pass it on all ranks or none, it is called on the first one alone.
    """
    resampler = _SlabResampler(shape, target, mesh)
    ids, finite = list[Tensor](), True
    for slab in slabs:
        bounds = resampler.add(slab)
        longest = max(high - low for low, high in pairwise(bounds))
        own_ids = []
        for offset in range(0, longest, ROWS_AT_ONCE):
            starts = [min(low + offset, high) for low, high in pairwise(bounds)]
            ends = [min(low + offset + ROWS_AT_ONCE, high) for low, high in pairwise(bounds)]
            logits = resampler.rows(starts[mesh.world.index], ends[mesh.world.index])
            finite &= bool(torch.isfinite(logits).all())
            own_ids.append(to_labels(logits, regions_class_order).to(torch.int16))
            if write_rows is not None:
                probabilities = logits.sigmoid() if regions_class_order else logits.softmax(0)
                _send_to_first(probabilities, list(zip(starts, ends)), mesh, write_rows)
        if own_ids:
            ids.append(join_rows(torch.cat(own_ids), bounds, mesh))
    if agree(not finite, mesh.world):
        raise NotFinite("the network's logits are NaN or infinite: check the intensities, or take another checkpoint")
    return torch.cat(ids)


def _send_to_first(rows: Tensor, intervals: Sequence[tuple[int, int]], mesh: Mesh, write_rows: WriteRows) -> None:
    """Hands every rank's rows ``k w D H`` to ``write_rows`` on the first rank; ``intervals`` says which each has."""
    world, rows = mesh.world, rows.contiguous()
    if not mesh.is_first:
        post({0: rows}, {}, world, "probabilities").wait()
        return
    received = {
        rank: rows.new_empty((len(rows), intervals[rank][1] - intervals[rank][0], *rows.shape[2:]))
        for rank in world.peers
    }
    post({}, received, world, "probabilities").wait()
    for rank, piece in sorted({0: rows, **received}.items()):
        if piece.numel():
            write_rows(intervals[rank][0], piece)


class _SlabResampler:
    """Resamples logits to another grid, slab by slab; a rank gets the row before its own from the rank that has it."""

    def __init__(self, shape: Sequence[int], target: TargetGrid, mesh: Mesh) -> None:
        self.to_shape, self.mesh = target.shape, mesh
        self.is_identity = tuple(shape) == self.to_shape
        nearest = target.nearest
        self.below, self.above, self.weight = neighbours(shape[0], self.to_shape[0], nearest == 0)  # of each new row
        self.nearest = None if nearest in (None, 0) else nearest - 1  # among the directions of a row
        self._slab_end: Tensor | None = None  # k 1 D H, on the first rank: the last row of the slab before
        self._logits = torch.empty(0)  # k w/s D H, the rows from which this rank interpolates
        self._first_row = 0  # the number of the first of them

    def add(self, slab: Slab) -> tuple[int, ...]:
        """Takes a slab; returns the bounds, in new rows, of what each rank can interpolate now."""
        rank = self.mesh.world.index
        if self.is_identity:
            self._first_row, self._logits = slab.bounds[rank], slab.logits
            return slab.bounds
        row_before = self._exchange_last_rows(slab)
        self._first_row = slab.bounds[rank] - (0 if row_before is None else 1)
        self._logits = slab.logits if row_before is None else torch.cat([row_before, slab.logits], 1)
        return tuple(np.searchsorted(self.above, slab.bounds).tolist())

    def _exchange_last_rows(self, slab: Slab) -> Tensor | None:
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
        """Returns logits ``k w D H`` of the new rows low to high."""
        if self.is_identity:
            return self._logits[:, low - self._first_row : high - self._first_row]
        below, above = (index[low:high] - self._first_row for index in (self.below, self.above))
        rows = blend(self._logits, 1, below, above, self.weight[low:high])
        return resample(rows, self.to_shape[1:], self.nearest)


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
