"""Weighted sums of windows over a volume, each rank adding up its own rows; what it needs comes from the others.

Legend: b windows, k classes, W D H voxels, w rows; ``/s`` after the letter that is spread over ranks.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from seqpar.launch.inference.windows import Region, WindowGrid, whole_box, within
from seqpar.mesh import Mesh
from seqpar.messages import post


class Block(NamedTuple):
    """Where logits lie on a rank of a group: which of the group's windows, and which box of each."""

    samples: tuple[int, int]
    box: Region


class _Route(NamedTuple):
    """A piece of a window's logits on its way from the rank ``source``."""

    source: int
    sample: int  # in the source's block
    window: int
    slab: int
    region: Region


class WindowSums:
    """The slabs under way on this rank: weighted logits, and the weights, of its rows."""

    def __init__(self, course: WindowGrid, weights: Tensor, num_classes: int, mesh: Mesh) -> None:
        self.course, self.weights, self.num_classes, self.mesh = course, weights, num_classes, mesh
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}  # k w/s D H, w/s D H
        self._regions: dict[tuple[int, int], Region] = {}  # of this round, by (window, slab)
        self._windows: dict[tuple[int, int], Tensor] = {}  # sums over the views, in these regions

    def open(self, windows: Sequence[int]) -> None:
        """Begins a round over ``windows``."""
        for window in windows:
            for slab, region in self.course.pieces(window, whole_box(self.course.tile), self.mesh.world.index):
                self._regions[window, slab] = region

    def deliver(self, logits: Tensor | None, blocks: Sequence[Block], turns: Sequence[Sequence[int]]) -> None:
        """Takes this rank's logits of its group's windows, ``b k W/s D/s H/s``, to the ranks that need them.

        ``blocks`` says where each rank of a group has logits; ``turns`` are the windows of each group.
        """
        world, group = self.mesh.world, self.mesh.data.index
        mine, wide = blocks[self.mesh.seq.index], self.weights.dtype
        sends: dict[int, list[Tensor]] = {}
        for target in range(world.size):
            routes = [r for r in self._routes(blocks, turns[group], group, target) if r.source == world.index]
            sends[target] = []
            for route in routes:
                assert logits is not None
                corner = [at + low for at, (low, _) in zip(self.course.corners[route.window], mine.box)]
                piece = logits[route.sample][(slice(None), *within(route.region, corner))]
                sends[target].append(piece.to(wide))
        coming: dict[int, list[_Route]] = defaultdict(list)
        for number, turn in enumerate(turns):
            for route in self._routes(blocks, turn, number, world.index):
                coming[route.source].append(route)
        pieces = self._exchange(sends, coming)
        for source, routes in sorted(coming.items()):
            for route, piece in zip(routes, pieces[source]):
                self._add(route, piece)

    def _add(self, route: _Route, piece: Tensor) -> None:
        at = route.window, route.slab
        region = self._regions[at]
        if at not in self._windows and route.region == region:
            self._windows[at] = piece
            return
        if at not in self._windows:
            self._windows[at] = self._zeros(region)
        self._windows[at][(slice(None), *within(route.region, [low for low, _ in region]))] += piece

    def _routes(self, blocks: Sequence[Block], turn: Sequence[int], group: int, target: int) -> Iterator[_Route]:
        """Yields the pieces of a group's windows that ``target`` needs.

        Where several ranks hold the same logits, those that need a piece have it, and the others are served by
        turns: nothing travels twice.
        """
        size = self.mesh.seq.size
        holders: dict[Block, list[int]] = defaultdict(list)
        for place, block in enumerate(blocks):
            holders[block].append(group * size + place)
        for block, ranks in holders.items():
            source = target if target in ranks else ranks[target % len(ranks)]
            first, end = block.samples
            for sample in range(first, min(end, len(turn))):
                for slab, region in self.course.pieces(turn[sample], block.box, target):
                    yield _Route(source, sample - first, turn[sample], slab, region)

    def _exchange(self, sends: dict[int, list[Tensor]], coming: dict[int, list[_Route]]) -> dict[int, Sequence[Tensor]]:
        """Returns what came from each rank, piece by piece; between two ranks it is one message."""
        world = self.mesh.world
        going = {q: torch.cat([piece.flatten() for piece in sends[q]]) for q in world.peers if sends[q]}
        shapes = {
            q: [(self.num_classes, *(high - low for low, high in route.region)) for route in routes]
            for q, routes in coming.items()
        }
        buffers = {q: self.weights.new_empty(sum(map(math.prod, shapes[q]))) for q in coming if q != world.index}
        post(going, buffers, world, "windows").wait()
        pieces: dict[int, Sequence[Tensor]] = {world.index: sends[world.index]}
        for q, buffer in buffers.items():
            cut = buffer.split([math.prod(shape) for shape in shapes[q]])
            pieces[q] = [piece.view(shape) for piece, shape in zip(cut, shapes[q])]
        return pieces

    def close(self) -> None:
        """Ends a round: its windows are weighted and added, in window order."""
        for (window, slab), region in self._regions.items():
            if len(self.course.corners) == 1:  # a mean of one needs no weights
                self._slabs[slab] = self._windows[window, slab], self.weights.new_ones(())
                continue
            if slab not in self._slabs:
                bounds, at = self.course.bounds[slab], self.mesh.world.index
                empty = self._zeros(((bounds[at], bounds[at + 1]), *whole_box(self.course.shape[1:])))
                self._slabs[slab] = empty, torch.zeros_like(empty[0])
            logits, weights = self._slabs[slab]
            weight = self.weights[within(region, self.course.corners[window])]
            rows = self.course.bounds[slab][self.mesh.world.index]
            here = within(region, [rows, *[0] * (len(region) - 1)])
            # Product and sum apart: fused, they round otherwise at the end of a vector than within it.
            logits[(slice(None), *here)] += weight * self._windows[window, slab]
            weights[here] += weight
        self._regions, self._windows = {}, {}

    def finish(self, slab: int, num_views: int) -> Tensor:
        """Returns the mean logits ``k w/s D H`` of a slab whose windows have all been added, and forgets it."""
        bounds, at = self.course.bounds[slab], self.mesh.world.index
        if slab not in self._slabs:
            return self._zeros(((bounds[at], bounds[at + 1]), *whole_box(self.course.shape[1:])))
        logits, weights = self._slabs.pop(slab)
        return logits.div_(weights.mul_(num_views))

    def _zeros(self, region: Region) -> Tensor:
        return self.weights.new_zeros((self.num_classes, *(high - low for low, high in region)))
