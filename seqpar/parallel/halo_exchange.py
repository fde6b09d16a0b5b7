"""Halo exchange: fetches the rows that a rank needs of a dimension that is split over ranks, with its adjoint.

A rank's *part* is what it owns of the dimension; its *window* is what an operation reads there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import AwaitedTensor, post
from seqpar.parallel.row_exchange import Interval, Rows, run_on_stream_in_order, start_exchange

NOTHING = (0, 0)
Margins = Sequence[tuple[int, int, int]]  # dimension, rows before, rows after
WhileWaiting = Callable[[Tensor], None]
Box = tuple[slice, ...]
_Arrived = tuple[Box, Tensor]  # rows that are received next to the window, and where they belong in it


@dataclass(frozen=True)
class HaloPlan:
    """Which rows of dimension ``dim`` this rank sends and receives; the adjoint swaps the two.

    This rank itself is in both ``send`` and ``receive`` with the rows it keeps; ranks that exchange nothing are
    omitted.

    - ``send``: for each rank of the group, by index, the rows of this rank's part that it needs
    - ``receive``: for each rank of the group, by index, the rows of this rank's window that it owns
    - ``margins``: padding around the window, along any dimensions, which is never sent
    """

    dim: int
    part_extent: int
    window_extent: int  # without margins
    send: Rows
    receive: Rows
    margins: Margins = ()

    def keeps_part(self, group: Group) -> bool:
        """Returns whether this rank's window contains all of its part."""
        return self.send.get(group.index, NOTHING) == (0, self.part_extent)

    def known_rows(self, group: Group, before: int, behind: int) -> Interval:
        """Returns the rows of the window that need no message: this rank's own rows and the margins next to them."""
        low, high = self.receive.get(group.index, NOTHING)
        return low and low + before, high + before + (behind if high == self.window_extent else 0)

    @classmethod
    def of(cls, group: Group, dim: int, owned: Rows, needed: Rows, margins: Margins = ()) -> "HaloPlan":
        """Returns the plan for a dimension where each rank owns ``owned`` and needs ``needed``.

        Both map an index in ``group`` to an interval of the whole dimension; ranks that are missing take no part. What
        a rank needs may be smaller than what it owns, elsewhere, or span several neighbours.
        """
        part, window = owned[group.index], needed[group.index]
        send = {place: _rows_of(part, needed[place]) for place in owned}
        receive = {place: _rows_of(window, owned[place]) for place in owned}
        return cls(
            dim, part[1] - part[0], window[1] - window[0], _without_empty(send), _without_empty(receive), tuple(margins)
        )


def exchange_halos(x: Tensor, group: Group, *plans: HaloPlan, kind: str = "window", fill: float = 0.0) -> Tensor:
    """Returns the window around this rank's part ``x``, with margins of ``fill``.

    If several ``plans`` are given, each handles one dimension, in this order: later ones send rows that earlier ones
    have already widened, so corners need no messages of their own.

    *forward:* each rank sends the rows of its part that others need.
    *backward:* the gradient of every received row goes back to its owner, which adds it.
    """
    return _Window.apply(x, group, plans, kind, fill)  # type: ignore[no-any-return]


class _Window(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, plans: Sequence[HaloPlan], kind: str, fill: float) -> Tensor:
        ctx.how = group, plans, kind
        ctx.shape = x.shape
        return start_halo_exchange(x, group, plans, kind, fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, plans, kind = ctx.how
        result = halo_exchange_adjoint(grad.clone() if len(plans) > 1 else grad, group, plans, kind)
        assert result.shape == ctx.shape, (result.shape, ctx.shape)
        return result, None, None, None, None


def start_halo_exchange(
    x: Tensor,
    group: Group,
    plans: Sequence[HaloPlan],
    kind: str = "window",
    fill: float = 0.0,
    while_waiting: WhileWaiting | None = None,
) -> Tensor:
    """Computes ``exchange_halos`` without a gradient.

    The part is copied into the window once; messages are then sent from and received into the window, one dimension
    after the other.

    - ``while_waiting``: called with the window while messages are in transit, if the window contains all of the part;
      each halo is zero until it returns
    """
    if not _keep_parts(plans, group):
        for plan in plans:
            x = _open_one(x, group, plan, kind, fill)
        return x
    if not plans:
        return x
    assert all(x.shape[plan.dim] == plan.part_extent for plan in plans), (x.shape, plans)
    shape, own = list(x.shape), x
    for plan in plans:
        shape[plan.dim] = plan.window_extent
        low, high = plan.send.get(group.index, NOTHING)
        own = own.narrow(plan.dim, low, high - low)
    result, inner = _with_margins(x, shape, plans[-1].margins, fill)
    _own_rows(inner, plans, group).copy_(own)
    if while_waiting is None:
        for at, plan in enumerate(plans):
            wide = _own_rows(inner, plans[at + 1 :], group)  # widened along the dimensions before
            rows = wide, _in_window(plan, group), wide, _others(plan.receive, group)
            start_exchange(*rows, group, plan.dim, kind, add=False).wait()
        return result
    _zero_halos(inner, plans, group)  # kernels that mix all voxels, as by FFT, would spread what the memory held before
    arrived = list[_Arrived]()
    exchanges = [partial(_exchange_apart, inner, plans, at, group, kind, arrived) for at in range(len(plans))]
    run_on_stream_in_order(exchanges, x, group.watch, partial(while_waiting, result))
    for box, rows_of_box in arrived:
        inner[box].copy_(rows_of_box)
    return result


def _exchange_apart(
    window: Tensor, plans: Sequence[HaloPlan], at: int, group: Group, kind: str, arrived: list[_Arrived]
) -> AwaitedTensor[None]:
    """Receives the rows of ``plans[at]`` next to the window, which others may read meanwhile, into ``arrived``.

    The next dimension's messages include these rows.
    """
    plan, box = plans[at], [slice(None)] * window.ndim
    for later in plans[at + 1 :]:
        box[later.dim] = slice(*later.receive.get(group.index, NOTHING))

    def boxes(rows: Rows) -> dict[int, Box]:
        return {place: (*box[: plan.dim], slice(*along), *box[plan.dim + 1 :]) for place, along in rows.items()}

    pieces = {place: _read(window, own, arrived) for place, own in boxes(_in_window(plan, group)).items()}
    slots = boxes(_others(plan.receive, group))
    buffers = {place: window.new_empty(window[slot].shape) for place, slot in slots.items()}
    pending = post(pieces, buffers, group, kind)
    return AwaitedTensor(pending, lambda: arrived.extend((slots[place], buffers[place]) for place in slots))


def _read(window: Tensor, box: Box, arrived: Sequence[_Arrived]) -> Tensor:
    """Returns the contiguous rows of a box, of which some may have arrived next to the window."""
    if not arrived:
        return window[box].contiguous()
    piece = window[box].clone(memory_format=torch.contiguous_format)
    for other, rows in arrived:
        both = [_common(*pair) for pair in zip(box, other, window.shape)]
        if all(low < high for low, high, *_ in both):
            into = tuple(slice(low - start, high - start) for low, high, start, _ in both)
            piece[into].copy_(rows[tuple(slice(low - start, high - start) for low, high, _, start in both)])
    return piece


def _common(own: slice, other: slice, extent: int) -> tuple[int, int, int, int]:
    """Returns the interval that two slices of a dimension share, and where each of them starts."""
    (a, b, _), (c, d, _) = own.indices(extent), other.indices(extent)
    return max(a, c), min(b, d), a, c


def halo_exchange_adjoint(
    grad: Tensor,
    group: Group,
    plans: Sequence[HaloPlan],
    kind: str = "window",
    while_waiting: Callable[[], None] | None = None,
    in_place: bool = False,
) -> Tensor:
    """Returns the adjoint of ``start_halo_exchange``: the sum of all ranks' window gradients for this rank's part.

    With several plans, ``grad`` is overwritten: received rows are added to it before the part is copied out.

    - ``while_waiting``: called while messages are in transit
    - ``in_place``: always write to ``grad``, and return a view of it if the part is contiguous there
    """
    if not _keep_parts(plans, group):
        for plan in reversed(plans):
            grad = _close_one(grad, group, plan, kind)
        return grad
    if not plans:
        return grad
    whole = grad  # with its margins, in the memory format of the result
    for dim, before, behind in plans[-1].margins:
        grad = grad.narrow(dim, before, grad.shape[dim] - before - behind)
    assert all(grad.shape[plan.dim] == plan.window_extent for plan in plans), (grad.shape, plans)
    exchanges: list[Callable[[], AwaitedTensor[None]]] = []
    for at in reversed(range(1, len(plans))):
        wide, plan = _own_rows(grad, plans[at + 1 :], group), plans[at]
        rows = wide, _others(plan.receive, group), wide, _in_window(plan, group)
        exchanges.append(partial(start_exchange, *rows, group, plan.dim, kind, add=True))
    shape = list(grad.shape)
    for plan in plans:
        shape[plan.dim] = plan.part_extent
    keeps = all(plan.keeps_part(group) for plan in plans)
    result = _own_rows(grad, plans, group)
    own: Tensor | None = None
    if not (in_place and keeps and result.is_contiguous(memory_format=_order(whole))):
        result = own = _empty_like(whole, shape)
        if not keeps:
            result.zero_()
        for plan in plans:
            low, high = plan.send.get(group.index, NOTHING)
            own = own.narrow(plan.dim, low, high - low)

    def last() -> AwaitedTensor[None]:
        if own is not None:
            own.copy_(_own_rows(grad, plans, group))
        first, wide = plans[0], _own_rows(grad, plans[1:], group)
        rows = wide, _others(first.receive, group), result, _others(first.send, group)
        return start_exchange(*rows, group, first.dim, kind, add=True)

    run_on_stream_in_order([*exchanges, last], whole, group.watch, while_waiting)
    return result


def _keep_parts(plans: Sequence[HaloPlan], group: Group) -> bool:
    """Returns whether everything that this rank sends is also in its window, so that messages can be sent from there.

    Ranks may differ in this: their messages are the same either way.
    """
    keeps = all(plan.keeps_part(group) for plan in plans)
    sends_nothing = not any(_others({**plan.send, **plan.receive}, group) for plan in plans)
    return (keeps or sends_nothing) and not any(plan.margins for plan in plans[:-1])


def _own_rows(window: Tensor, plans: Sequence[HaloPlan], group: Group) -> Tensor:
    """Returns the part of a window that this rank owns, along the dimensions of ``plans``."""
    for plan in plans:
        low, high = plan.receive.get(group.index, NOTHING)
        window = window.narrow(plan.dim, low, high - low)
    return window


def _zero_halos(window: Tensor, plans: Sequence[HaloPlan], group: Group) -> None:
    """Writes zeros to all rows of a window, without margins, that this rank does not own."""
    for plan in plans:
        low, high = plan.receive.get(group.index, NOTHING)
        window.narrow(plan.dim, 0, low).zero_()
        window.narrow(plan.dim, high, plan.window_extent - high).zero_()
        window = window.narrow(plan.dim, low, high - low)


def _in_window(plan: HaloPlan, group: Group) -> Rows:
    """Returns the positions in this rank's window of the rows that others need."""
    shift = plan.receive.get(group.index, NOTHING)[0] - plan.send.get(group.index, NOTHING)[0]
    return {place: (low + shift, high + shift) for place, (low, high) in _others(plan.send, group).items()}


def _others(rows: Rows, group: Group) -> Rows:
    return {place: interval for place, interval in rows.items() if place != group.index}


def _open_one(x: Tensor, group: Group, plan: HaloPlan, kind: str, fill: float) -> Tensor:
    """Returns the window along one dimension."""
    assert x.shape[plan.dim] == plan.part_extent, (x.shape, plan)
    shape = list(x.shape)
    shape[plan.dim] = plan.window_extent
    result, inner = _with_margins(x, shape, plan.margins, fill)
    start_exchange(x, plan.send, inner, plan.receive, group, plan.dim, kind, add=False).wait()
    return result


def _with_margins(x: Tensor, shape: list[int], margins: Margins, fill: float) -> tuple[Tensor, Tensor]:
    """Returns an empty tensor of ``shape`` with margins of ``fill`` around it, and the view of it without margins."""
    for dim, before, behind in margins:
        shape[dim] += before + behind
    result = inner = _empty_like(x, shape)
    for dim, before, behind in margins:
        inner.narrow(dim, 0, before).fill_(fill)
        inner.narrow(dim, shape[dim] - behind, behind).fill_(fill)
        inner = inner.narrow(dim, before, shape[dim] - before - behind)
    return result, inner


def _close_one(grad: Tensor, group: Group, plan: HaloPlan, kind: str) -> Tensor:
    """Returns the adjoint of ``_open_one``."""
    for dim, before, behind in plan.margins:
        grad = grad.narrow(dim, before, grad.shape[dim] - before - behind)
    assert grad.shape[plan.dim] == plan.window_extent, (grad.shape, plan)
    shape = list(grad.shape)
    shape[plan.dim] = plan.part_extent
    result = _empty_like(grad, shape).zero_()
    start_exchange(grad, plan.receive, result, plan.send, group, plan.dim, kind, add=True).wait()
    return result


def _rows_of(interval: Interval, other: Interval) -> Interval:
    """Returns the rows of ``interval``, counted from its start, that are also in ``other``."""
    low = max(interval[0], other[0])
    return low - interval[0], max(low, min(interval[1], other[1])) - interval[0]


def _without_empty(rows: Rows) -> Rows:
    return {place: (low, high) for place, (low, high) in rows.items() if high > low}


def _empty_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns an empty tensor of ``shape`` in the memory format of ``x``."""
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_order(x))


def _order(x: Tensor) -> torch.memory_format:
    last = x.ndim == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)
    return torch.channels_last_3d if last else torch.contiguous_format
