"""The halo exchanges of one operation on boxes, one per dimension."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from seqpar.parallel.halo_exchange import (
    HaloPlan,
    WhileWaiting,
    exchange_halos,
    halo_exchange_adjoint,
    start_halo_exchange,
)
from seqpar.parallel.mesh import Group
from seqpar.parallel.row_exchange import Interval, Rows
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.receptive_field import ReceptiveField

_Move = tuple[int, Rows, Rows]  # dimension of ``b c W D H``, the rows that each rank holds, those that it needs


@dataclass(frozen=True)
class Halos:
    """The exchanges, one dimension after the other, that turn a box into the window that an operation reads.

    Later exchanges work on boxes that are already wider, so corners need no messages of their own. Padding outside the
    volume is never sent: the last exchange leaves room for it along all dimensions.
    """

    group: Group
    plans: tuple[HaloPlan, ...] = ()

    @classmethod
    def of(cls, grid: BoxGrid, reaches: Sequence[ReceptiveField]) -> "Halos":
        """Returns the exchanges for ``reaches``; a dimension needs none if every rank needs exactly what it holds."""
        moves, margins = [], []
        for dim, (edges, reach) in enumerate(zip(grid.edges, reaches)):
            owned = tuple(itertools.pairwise(edges))
            if not reach.local and reach.needed != owned:
                line, volume = grid.line(dim), (0, edges[-1])
                inside = [_clip(needed, volume) for needed in reach.needed]
                moves.append((dim + 2, dict(zip(line, owned)), dict(zip(line, inside))))
                margins.append((dim + 2, *_outside(reach.needed[grid.place[dim]], volume)))
        return cls._of_moves(grid.group, moves, margins)

    @classmethod
    def crop(cls, owned: Sequence[Interval], kept: Sequence[Interval]) -> "Halos":
        """Returns the local step from the intervals that this rank has to those that it keeps; it sends nothing.

        Kept intervals may extend beyond the owned ones: the margins are zeros.
        """
        differ = [(dim + 2, have, want) for dim, (have, want) in enumerate(zip(owned, kept)) if have != want]
        moves = [(dim, {0: have}, {0: _clip(want, have)}) for dim, have, want in differ]
        margins = [(dim, *_outside(want, have)) for dim, have, want in differ]
        return cls._of_moves(Group("self"), moves, margins)

    @classmethod
    def _of_moves(cls, group: Group, moves: Sequence[_Move], margins: Sequence[tuple[int, int, int]]) -> "Halos":
        around = [margin for margin in margins if margin[1:] != (0, 0)]
        last = len(moves) - 1
        return cls(
            group, tuple(HaloPlan.of(group, *move, around if at == last else ()) for at, move in enumerate(moves))
        )

    def fetch(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Returns the window of ``x``, with ``fill`` outside the volume.

        *forward:* a halo exchange along each dimension.
        *backward:* their adjoints, in reverse order.
        """
        return exchange_halos(x, self.group, *self.plans, fill=fill) if self.plans else x

    def open(self, x: Tensor, while_waiting: WhileWaiting | None = None) -> Tensor:
        """Returns the window of ``x``, with zeros outside the volume, without a gradient.

        ``while_waiting`` is as in ``start_halo_exchange``.
        """
        return start_halo_exchange(x, self.group, self.plans, while_waiting=while_waiting)

    def close(self, grad: Tensor, while_waiting: Callable[[], None] | None = None) -> Tensor:
        """Returns the adjoint of ``open``, possibly a view of ``grad``, which may be overwritten.

        ``while_waiting`` is as in ``halo_exchange_adjoint``.
        """
        return halo_exchange_adjoint(grad, self.group, self.plans, while_waiting=while_waiting, in_place=True)

    def bytes_to_come(self, x: Tensor) -> int:
        """Returns the size of the halos of ``x`` in bytes, without margins."""
        wide = x.numel()
        for plan in self.plans:
            wide = wide // plan.part_extent * plan.window_extent
        return (wide - x.numel()) * x.element_size()

    def known_rows(self) -> dict[int, Interval]:
        """Returns, for each dimension with halos, the rows of the window that are known before the messages arrive."""
        margins = {dim: around for dim, *around in (self.plans[-1].margins if self.plans else ())}
        return {plan.dim: plan.known_rows(self.group, *margins.get(plan.dim, (0, 0))) for plan in self.plans}


def fetch_rows(
    x: Tensor, grid: BoxGrid, rows: Sequence[Sequence[Interval]], dims: Sequence[int] | None = None
) -> Tensor:
    """Returns the rows of a volume that each rank asks for: a wider box, another one, or all of it.

    *forward:* a halo exchange along each dimension.
    *backward:* their adjoints, in reverse order.

    - ``rows``: along each dimension, the interval that each of its boxes asks for, inside the volume
    - ``dims``: the dimensions of ``x`` along which ``grid`` cuts it; None: the last ones of ``b c W D H``
    """
    halos = Halos.of(grid, [ReceptiveField(edges, tuple(asked)) for edges, asked in zip(grid.edges, rows)])
    if not halos.plans:
        return x
    if dims is None or tuple(dims) == tuple(range(2, x.ndim)):
        return halos.fetch(x)
    count = len(dims)
    last = x.movedim(tuple(dims), tuple(range(-count, 0)))
    window = halos.fetch(last.reshape(1, -1, *last.shape[-count:]))
    return window.view(*last.shape[:-count], *window.shape[2:]).movedim(tuple(range(-count, 0)), tuple(dims))


def _clip(needed: Interval, there: Interval) -> Interval:
    """Returns the part of ``needed`` that is inside ``there``, possibly empty."""
    low, high = (min(max(edge, there[0]), there[1]) for edge in needed)
    return low, high


def _outside(needed: Interval, there: Interval) -> tuple[int, int]:
    """Returns how much of ``needed`` is before and after ``there``."""
    return max(min(needed[1], there[0]) - needed[0], 0), max(needed[1] - max(needed[0], there[1]), 0)
