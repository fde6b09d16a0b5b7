"""How a grid is spread over a group, which interval of it each rank needs for an operation, and how it comes.

A dimension of extent L is cut at ``edges`` 0 < ... < L; ranks are the raster over the product of all dimensions'
intervals, last dimension fastest, as in ``Layout.cuts``. The rules (``sliding``, ``spreading``, ``enlarging``) give
the output's edges and each rank's input interval from numbers that all ranks know: they refuse, or not, alike.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from seqpar.halo_exchange import Interval, Margins, close_window, open_window, window
from seqpar.layout import Bounds
from seqpar.mesh import Group


@dataclass(frozen=True)
class Spread:
    """The boxes that the ranks of ``group`` hold of a grid: where each spatial dimension is cut."""

    edges: tuple[Bounds, ...]
    group: Group

    def __post_init__(self) -> None:
        for edges in self.edges:
            if len(edges) < 2 or edges[0] != 0 or any(a >= b for a, b in itertools.pairwise(edges)):
                raise ValueError(f"edges {edges} must begin at 0 and ascend: every rank needs a box with voxels")
        if math.prod(self.parts) != self.group.size:
            raise ValueError(f"edges {self.edges} make {math.prod(self.parts)} boxes for the {self.group}")

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Into how many intervals each dimension is cut."""
        return tuple(len(edges) - 1 for edges in self.edges)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """The whole grid's extents."""
        return tuple(edges[-1] for edges in self.edges)

    @cached_property
    def place(self) -> tuple[int, ...]:
        """Which interval of each dimension this rank holds."""
        steps = [math.prod(self.parts[dim + 1 :]) for dim in range(len(self.parts))]
        return tuple(self.group.index // step % count for step, count in zip(steps, self.parts))

    @cached_property
    def box(self) -> tuple[Interval, ...]:
        """This rank's half-open interval of each dimension."""
        return tuple((edges[at], edges[at + 1]) for edges, at in zip(self.edges, self.place))

    @cached_property
    def sides(self) -> tuple[int, ...]:
        """The extents of this rank's box."""
        return tuple(high - low for low, high in self.box)

    def line(self, dim: int) -> range:
        """Returns the places in the group whose boxes differ from this rank's along ``dim`` only, in order."""
        step = math.prod(self.parts[dim + 1 :])
        first = self.group.index - self.place[dim] * step
        return range(first, first + step * self.parts[dim], step)

    def scaled(self, times: int | Sequence[int]) -> "Spread":
        """Returns the spread of a grid with ``times`` as many points along each dimension."""
        factors = (times,) * len(self.edges) if isinstance(times, int) else tuple(times)
        return Spread(tuple(tuple(e * f for e in edges) for edges, f in zip(self.edges, factors)), self.group)

    def fits(self, x: Tensor) -> bool:
        """Returns whether ``b c W D H`` holds this rank's box."""
        return x.ndim == len(self.edges) + 2 and tuple(x.shape[2:]) == self.sides


@dataclass(frozen=True)
class Reach:
    """What an operation does to one dimension: where its output is cut, and the input that each interval needs.

    ``local`` where the dimension is whole on every rank and the operation itself pads it by ``padding`` each side;
    otherwise all that it needs is in ``needed``, reaching out of the volume where it pads.
    """

    edges: Bounds
    needed: tuple[Interval, ...]
    local: bool = False
    padding: int = 0


def sliding(edges: Bounds, span: int, stride: int, pads: tuple[int, int], what: str, ceil_mode: bool = False) -> Reach:
    """Returns the reach of a window of ``span`` voxels (kernel with its dilation) that moves by ``stride``.

    The output at o reads [o stride - pad, o stride - pad + span); a rank holds those whose o stride is in its box,
    the last one all that remain.
    """
    extent = edges[-1]
    count = (extent + sum(pads) - span + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= extent + pads[0]:
        count -= 1
    cut = _cut_at([-(-edge // stride) for edge in edges], count, edges, what)
    needed = tuple((a * stride - pads[0], (b - 1) * stride - pads[0] + span) for a, b in itertools.pairwise(cut))
    local = len(edges) == 2 and pads[0] == pads[1]
    return Reach(cut, needed, local, pads[0] if local else 0)


def spreading(
    edges: Bounds, kernel: int, stride: int, padding: int, dilation: int, output_padding: int, what: str
) -> Reach:
    """Returns the reach of a transposed convolution, whose input i adds to outputs i stride - padding + dilation t."""
    extent, span = edges[-1], dilation * (kernel - 1)
    count = (extent - 1) * stride - 2 * padding + span + output_padding + 1
    cut = _cut_at([edge * stride for edge in edges], count, edges, what)
    needed = []
    for a, b in itertools.pairwise(cut):
        low = min(max(-(-(a + padding - span) // stride), 0), extent - 1)
        high = max(min((b - 1 + padding) // stride + 1, extent), low + 1)  # one at least: no empty convolution
        needed.append((low, high))
    return Reach(cut, tuple(needed), len(edges) == 2, padding if len(edges) == 2 else 0)


def enlarging(edges: Bounds, factor: int, halo: int) -> Reach:
    """Returns the reach of an enlargement by ``factor`` that reads ``halo`` voxels of each neighbour."""
    needed = tuple((max(a - halo, 0), min(b + halo, edges[-1])) for a, b in itertools.pairwise(edges))
    return Reach(tuple(edge * factor for edge in edges), needed, len(edges) == 2)


def _cut_at(wanted: Sequence[int], count: int, edges: Bounds, what: str) -> Bounds:
    """Returns the output's edges; refuses an empty output, and ranks that would hold none of it."""
    if count < 1:
        raise ValueError(f"{what} leaves nothing of extent {edges[-1]}: use a larger --tile or a smaller kernel")
    cut = (*(min(at, count) for at in wanted[:-1]), count)
    if any(a >= b for a, b in itertools.pairwise(cut)):
        raise ValueError(
            f"{what} turns the intervals at {edges} into ones at {cut}: a rank would hold no output; use a smaller "
            "--seqpar, a larger --tile, or --mode gather"
        )
    return cut


@dataclass(frozen=True)
class Move:
    """One exchange: along which dimension of ``b c W D H``, what each rank holds of it and what it needs."""

    dim: int
    owned: Mapping[int, Interval]
    needed: Mapping[int, Interval]


@dataclass(frozen=True)
class Halos:
    """The exchanges, dimension after dimension, that turn a box into the window that an operation reads.

    Later ones act on boxes that are already wider, so that corners come without messages of their own. What lies
    outside of the volume travels nowhere: the last exchange makes room for it along all dimensions.
    """

    group: Group
    moves: tuple[Move, ...] = ()
    margins: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, spread: Spread, reaches: Sequence[Reach]) -> "Halos":
        """Returns the exchanges of ``reaches``; dimensions in which no rank needs another interval have none."""
        moves, margins = [], []
        for dim, (edges, reach) in enumerate(zip(spread.edges, reaches)):
            owned = tuple(itertools.pairwise(edges))
            if not reach.local and reach.needed != owned:
                line, volume = spread.line(dim), (0, edges[-1])
                inside = [_clip(needed, volume) for needed in reach.needed]
                moves.append(Move(dim + 2, dict(zip(line, owned)), dict(zip(line, inside))))
                margins.append((dim + 2, *_outside(reach.needed[spread.place[dim]], volume)))
        return cls(spread.group, tuple(moves), tuple(m for m in margins if m[1:] != (0, 0)))

    @classmethod
    def crop(cls, given: Sequence[Interval], wanted: Sequence[Interval]) -> "Halos":
        """Returns the move, without any message, from what this rank has to the part of it that counts."""
        differ = [(dim + 2, have, want) for dim, (have, want) in enumerate(zip(given, wanted)) if have != want]
        moves = [Move(dim, {0: have}, {0: _clip(want, have)}) for dim, have, want in differ]
        margins = [(dim, *_outside(want, have)) for dim, have, want in differ]
        return cls(Group("self"), tuple(moves), tuple(m for m in margins if m[1:] != (0, 0)))

    def _each(self) -> Iterator[tuple[Move, Margins]]:
        for move in self.moves:
            yield move, self.margins if move is self.moves[-1] else ()

    def fetch(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Returns the window of ``x``, filled outside of the volume.

        *forward:* ``window`` along each dimension.
        *backward:* their adjoints, in reverse.
        """
        for move, margins in self._each():
            x = window(x, self.group, move.dim, move.owned, move.needed, fill=fill, margins=margins)
        return x

    def open(self, x: Tensor) -> Tensor:
        """Returns the window of ``x`` with zeros outside of the volume, without a gradient."""
        for move, margins in self._each():
            x = open_window(x, self.group, move.dim, move.owned, move.needed, margins=margins)
        return x

    def close(self, grad: Tensor) -> Tensor:
        """Returns the adjoint of ``open``."""
        for move, margins in reversed(list(self._each())):
            grad = close_window(grad, self.group, move.dim, move.owned, move.needed, margins=margins)
        return grad


def _clip(needed: Interval, there: Interval) -> Interval:
    """Returns the part of an interval that is there, possibly empty."""
    low, high = (min(max(edge, there[0]), there[1]) for edge in needed)
    return low, high


def _outside(needed: Interval, there: Interval) -> tuple[int, int]:
    """Returns how much of an interval lies before and behind what is there."""
    return max(min(needed[1], there[0]) - needed[0], 0), max(needed[1] - max(needed[0], there[1]), 0)


def after(spread: Spread, reaches: Sequence[Reach]) -> Spread:
    """Returns how an operation's output is spread."""
    return Spread(tuple(reach.edges for reach in reaches), spread.group)
