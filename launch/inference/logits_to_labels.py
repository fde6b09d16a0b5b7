"""From slabs of logits to class ids on the grid of the case's own crop, a few rows at a time.

Where a case was resampled for the network, its logits are taken back first, linearly and slab by slab: those of all
classes never lie at the case's own resolution at once. Legend: k classes, w rows of a slab, W D H voxels; ``/s``
after the letter that is spread over all ranks.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from seqpar.consensus import agree
from seqpar.data.preparation.transforms import blend, neighbours, resample
from seqpar.launch.inference.sliding_window import Slab, join_rows
from seqpar.mesh import Mesh
from seqpar.messages import post

AT_ONCE = 8  # rows at the case's own resolution

Keep = Callable[[int, Tensor], None]  # takes rows ``k w D H`` of probabilities that begin at a row


class NotFinite(ValueError):
    """A network that answered with NaN or infinity."""


def decide(
    slabs: Iterator[Slab],
    shape: Sequence[int],
    to_shape: Sequence[int],
    mesh: Mesh,
    regions_class_order: Sequence[int] = (),
    keep: Keep | None = None,
) -> Tensor:
    """Returns class ids ``W D H`` on the grid ``to_shape``, of logits on the grid ``shape``; the same on all ranks.

    ``keep`` is given the probabilities, on the first rank only, but must be given on all ranks or none.
    """
    back = _Back(shape, to_shape, mesh)
    found, finite = list[Tensor](), True
    for slab in slabs:
        bounds = back.take(slab)
        widest = max(high - low for low, high in zip(bounds, bounds[1:]))
        pieces = []
        for offset in range(0, widest, AT_ONCE):
            ends = [min(offset, high - low) for low, high in zip(bounds, bounds[1:])]
            parts = [(low + end, min(low + end + AT_ONCE, high)) for low, high, end in zip(bounds, bounds[1:], ends)]
            logits = back.rows(*parts[mesh.world.index])
            finite &= bool(torch.isfinite(logits).all())
            pieces.append(to_labels(logits, regions_class_order).to(torch.int16))
            if keep is not None:
                probabilities = logits.sigmoid() if regions_class_order else logits.softmax(0)
                _bring(probabilities, parts, mesh, keep)
        if pieces:
            found.append(join_rows(torch.cat(pieces), bounds, mesh))
    if agree(not finite, mesh.world):
        raise NotFinite("the network answers with NaN or infinity: look at the intensities, or take another checkpoint")
    return torch.cat(found)


def _bring(rows: Tensor, parts: Sequence[tuple[int, int]], mesh: Mesh, keep: Keep) -> None:
    """Hands all ranks' rows ``k w D H`` to ``keep`` on the first rank."""
    world, rows = mesh.world, rows.contiguous()
    if not mesh.is_first:
        post({0: rows}, {}, world, "probabilities").wait()
        return
    coming = {q: rows.new_empty((len(rows), parts[q][1] - parts[q][0], *rows.shape[2:])) for q in world.peers}
    post({}, coming, world, "probabilities").wait()
    for q, piece in sorted({0: rows, **coming}.items()):
        if piece.numel():
            keep(parts[q][0], piece)


class _Back:
    """Takes logits back to another grid, rows first; a rank needs the row before its own, and gets it."""

    def __init__(self, shape: Sequence[int], to_shape: Sequence[int], mesh: Mesh) -> None:
        self.extent, self.to_shape, self.mesh = shape[0], tuple(to_shape), mesh
        self.same = tuple(shape) == self.to_shape
        self.low, self.reached, self.weight = neighbours(shape[0], self.to_shape[0])  # each new row's two
        self.before: Tensor | None = None  # k 1 D H, on the first rank: the last row of the slab before
        self.begin = 0
        self.held = torch.empty(0)

    def take(self, slab: Slab) -> tuple[int, ...]:
        """Returns the bounds, in new rows, of what each rank can now make of a slab."""
        if self.same:
            self.begin, self.held = slab.bounds[self.mesh.world.index], slab.logits
            return slab.bounds
        me = self.mesh.world.index
        before = self._pass_on(slab)
        self.begin = slab.bounds[me] - (0 if before is None else 1)
        self.held = slab.logits if before is None else torch.cat([before, slab.logits], 1)
        return tuple(np.searchsorted(self.reached, slab.bounds).tolist())

    def _pass_on(self, slab: Slab) -> Tensor | None:
        """Returns the row before this rank's rows; the last row of the slab waits on the first rank for the next."""
        world, bounds = self.mesh.world, slab.bounds
        busy = sum(low < high for low, high in zip(bounds, bounds[1:]))  # the first ranks
        last = slab.logits[:, -1:].contiguous()
        following = (world.index + 1) % busy
        sends = {following: last} if world.index < busy and following != world.index else {}
        receives = {}
        if world.index < busy and busy > 1:
            receives = {(world.index - 1) % busy: slab.logits.new_empty((len(last), 1, *last.shape[2:]))}
        post(sends, receives, world, "rows").wait()
        came = next(iter(receives.values()), last if busy == 1 and world.index == 0 else None)
        if world.index > 0:
            return came
        before, self.before = self.before, came
        return before

    def rows(self, low: int, high: int) -> Tensor:
        """Returns logits ``k w D H`` of the new rows low to high."""
        if self.same:
            return self.held[:, low - self.begin : high - self.begin]
        first = self.low[low:high] - self.begin
        second = self.reached[low:high] - self.begin
        return resample(blend(self.held, 1, first, second, self.weight[low:high]), self.to_shape[1:])


def to_labels(logits: Tensor, regions_class_order: Sequence[int] = ()) -> Tensor:
    """Returns class ids ``w D H`` of logits ``k w D H``: the largest, or, where the classes are regions that may
    overlap, those of the regions above one half, written over each other in the order given."""
    if not regions_class_order:
        return logits.argmax(0)
    if len(regions_class_order) != len(logits):
        raise ValueError(f"{len(logits)} regions were predicted, but regions_class_order is {regions_class_order}")
    ids = torch.zeros(logits.shape[1:], dtype=torch.int64, device=logits.device)
    for region, label in zip(logits, regions_class_order):
        ids[region > 0] = label  # a logit above 0 is a probability above one half
    return ids


def join_labels(slabs: Iterator[Slab], mesh: Mesh, regions_class_order: Sequence[int] = ()) -> Tensor:
    """Returns the class ids ``W D H`` of all slabs, on the CPU of every rank, as uint8 (int16 beyond 256 classes)."""
    rows = []
    for slab in slabs:
        ids = to_labels(slab.logits, regions_class_order)
        small = max(len(slab.logits), *regions_class_order, 0) <= 256
        rows.append(join_rows(ids.to(torch.uint8 if small else torch.int16), slab.bounds, mesh))
    return torch.cat(rows)
