"""Weighted sums of windows over a volume: each rank adds up its own rows, with what the others computed for them.

Legend: b windows, k classes, W D H voxels, w rows; ``/s`` after the letter that is spread over ranks.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.parallel.mesh import Mesh
from seqpar.parallel.messages import post
from seqpar.prediction.window_grid import Region, WindowGrid, local_slices, whole_box


class WindowBlock(NamedTuple):
    """Which logits a rank of a group holds: from the first to the last (excluded) of its windows, a box of each."""

    windows: tuple[int, int]  # numbers among the group's windows
    box: Region


class _Piece(NamedTuple):
    """A piece of a window's logits that the rank ``source`` sends."""

    source: int
    sample: int  # the window's number in the source's logits
    window: int
    slab: int
    region: Region


class WindowSums:
    """The slabs that are not complete yet: on each rank the weighted logits of its rows, and the sums of weights.

    The windows come in rounds: ``open`` names the windows of a round, ``deliver`` takes their logits, once for each
    view (a network with its flips), ``close`` adds them up; both of some slabs, or of all. ``weights`` ``W D H`` are
    those of a window's voxels; ``num_views`` is how often ``deliver`` is called in a round.
    """

    def __init__(self, window_grid: WindowGrid, weights: Tensor, num_classes: int, mesh: Mesh, num_views: int) -> None:
        self.window_grid, self.weights, self.num_classes, self.mesh = window_grid, weights, num_classes, mesh
        self.num_views, self.keeps_one = num_views, len(window_grid.corners) == 1  # a mean of one needs no weights
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}  # k w/s D H, w/s D H
        self._regions: dict[tuple[int, int], Region] = {}  # of this round, by window and slab
        self._logits: dict[tuple[int, int], Tensor] = {}  # the sums over views in these regions

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the sums."""
        return self.weights.dtype

    def open(self, windows: Sequence[int]) -> None:
        """Begins a round over ``windows``."""
        whole_window = whole_box(self.window_grid.tile)
        for window in windows:
            for slab, region in self.window_grid.pieces(window, whole_window, self.mesh.world.index):
                self._regions[window, slab] = region

    def deliver(
        self,
        logits: Tensor | None,
        blocks: Sequence[WindowBlock],
        turns: Sequence[Sequence[int]],
        slabs: Sequence[int] = (),
    ) -> None:
        """Sends this rank's logits ``b k W/s D/s H/s`` of its group's windows to the ranks that add them up.

        ``logits`` is None where the group has no window. ``blocks`` says which logits each rank of a group holds,
        ``turns`` lists the windows of each group. ``slabs``: those to send; none: all.
        """
        rank, group = self.mesh.world.index, self.mesh.data.index
        sends: dict[int, list[Tensor]] = {}
        for target in range(self.mesh.world.size):
            pieces = [p for p in self._pieces(blocks, turns[group], group, target, slabs) if p.source == rank]
            sends[target] = [self._cut(logits, blocks[self.mesh.seq.index].box, piece) for piece in pieces]
        awaited: dict[int, list[_Piece]] = defaultdict(list)
        for number, turn in enumerate(turns):
            for piece in self._pieces(blocks, turn, number, rank, slabs):
                awaited[piece.source].append(piece)
        received = self._exchange(sends, awaited)
        for source, pieces in sorted(awaited.items()):
            for piece, values in zip(pieces, received[source]):
                self._add(piece, values)

    def _cut(self, logits: Tensor | None, box: Region, piece: _Piece) -> Tensor:
        """Returns a piece of this rank's logits, which lie in ``box`` of each window."""
        assert logits is not None
        corner = [start + low for start, (low, _) in zip(self.window_grid.corners[piece.window], box)]
        return logits[piece.sample][(slice(None), *local_slices(piece.region, corner))].to(self.weights.dtype)

    def _add(self, piece: _Piece, values: Tensor) -> None:
        """Adds a piece to the round's logits; the first one that fills its region is taken without a copy."""
        key = piece.window, piece.slab
        region = self._regions[key]
        if key not in self._logits and piece.region == region:
            self._logits[key] = values
            return
        if key not in self._logits:
            self._logits[key] = self._zeros(region)
        self._logits[key][(slice(None), *local_slices(piece.region, [low for low, _ in region]))] += values

    def _pieces(
        self, blocks: Sequence[WindowBlock], turn: Sequence[int], group: int, target: int, slabs: Sequence[int]
    ) -> Iterator[_Piece]:
        """Yields the pieces of a group's windows that the rank ``target`` needs, in some slabs or in all.

        Where several ranks hold the same logits, a rank that needs a piece and holds it keeps it, and the others are
        served by these ranks in turn: nothing travels twice.
        """
        holders: dict[WindowBlock, list[int]] = defaultdict(list)
        for number, block in enumerate(blocks):
            holders[block].append(group * self.mesh.seq.size + number)
        for block, ranks in holders.items():
            source = target if target in ranks else ranks[target % len(ranks)]
            first, end = block.windows
            for number in range(first, min(end, len(turn))):
                for slab, region in self.window_grid.pieces(turn[number], block.box, target, slabs):
                    yield _Piece(source, number - first, turn[number], slab, region)

    def _exchange(
        self, sends: dict[int, list[Tensor]], awaited: dict[int, list[_Piece]]
    ) -> dict[int, Sequence[Tensor]]:
        """Returns the awaited pieces by source, its own included; two ranks exchange one message."""
        world = self.mesh.world
        messages = {rank: torch.cat([x.flatten() for x in sends[rank]]) for rank in world.peers if sends[rank]}
        shapes = {source: [self._shape(piece.region) for piece in pieces] for source, pieces in awaited.items()}
        buffers = {
            source: self.weights.new_empty(sum(map(math.prod, shapes[source])))
            for source in awaited
            if source != world.index
        }
        post(messages, buffers, world, "windows").wait()
        received: dict[int, Sequence[Tensor]] = {world.index: sends[world.index]}
        for source, buffer in buffers.items():
            flat = buffer.split([math.prod(shape) for shape in shapes[source]])
            received[source] = [values.view(shape) for values, shape in zip(flat, shapes[source])]
        return received

    def close(self, slabs: Sequence[int] = ()) -> None:
        """Ends a round, in some slabs or in all: weights its windows and adds them up, in window order."""
        for window, slab in [key for key in self._regions if not slabs or key[1] in slabs]:
            region, values = self._regions.pop((window, slab)), self._logits.pop((window, slab))
            if self.keeps_one:
                self._slabs[slab] = values, self.weights.new_ones(())
                continue
            if slab not in self._slabs:
                zeros = self._zeros(self._slab_region(slab)).to(self.dtype)
                self._slabs[slab] = zeros, torch.zeros_like(zeros[0])
            sums = self._slabs[slab]
            weight = self.weights[local_slices(region, self.window_grid.corners[window])]
            place = local_slices(region, [low for low, _ in self._slab_region(slab)])
            self._weigh(values, weight, sums[0][(slice(None), *place)], sums[1][place])

    def _weigh(self, values: Tensor, weight: Tensor, logits: Tensor, weights: Tensor) -> None:
        """Adds a window's logits, summed over views, and weights to the sums in its place."""
        # Product and sum apart: fused, they round otherwise at the end of a vector than within it.
        logits += weight * values
        weights += weight

    def finish(self, slab: int) -> Tensor:
        """Returns the mean logits ``k w/s D H`` of a complete slab, and forgets it."""
        if slab not in self._slabs:  # this rank has no rows of it
            return self._zeros(self._slab_region(slab))
        return self._mean(*self._slabs.pop(slab))

    def _mean(self, logits: Tensor, weights: Tensor) -> Tensor:
        return logits.div_(weights.mul_(self.num_views))

    def _slab_region(self, slab: int) -> Region:
        """Returns this rank's rows of a slab, as a region of the volume."""
        return (self.window_grid.rows(slab, self.mesh.world.index), *whole_box(self.window_grid.shape[1:]))

    def _shape(self, region: Region) -> tuple[int, ...]:
        return (self.num_classes, *(high - low for low, high in region))

    def _zeros(self, region: Region) -> Tensor:
        return self.weights.new_zeros(self._shape(region))


class HalfSums(WindowSums):
    """Sums that are rounded to half precision after each window, bit for bit as nnU-Net takes those of a network.

    ``num_views`` are the flips of that network, over which logits are averaged before they are weighted.
    """

    dtype = torch.half  # type: ignore[assignment]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.keeps_one = False

    def _weigh(self, values: Tensor, weight: Tensor, logits: Tensor, weights: Tensor) -> None:
        logits += values.div_(self.num_views).mul_(weight)
        weights += weight

    def finish(self, slab: int) -> Tensor:
        """Returns the mean logits of a complete slab in half precision."""
        return super().finish(slab).half()

    def _mean(self, logits: Tensor, weights: Tensor) -> Tensor:
        return logits.div_(weights)
