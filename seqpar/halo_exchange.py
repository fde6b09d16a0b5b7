"""The halo exchange: the rows that a rank needs of a dimension that is spread over ranks, with its adjoint.

A rank's *part* is what it owns of the dimension, its *window* what an operation reads there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.mesh import Group
from seqpar.messages import post

Interval = tuple[int, int]  # half-open
Rows = Mapping[int, Interval]  # by place in the group
Margins = Sequence[tuple[int, int, int]]  # dimension, how many before, how many behind


@dataclass(frozen=True)
class HaloPlan:
    """Which rows of dimension ``dim`` this rank sends and receives; the adjoint swaps the two.

    ``send``: for each place in the group, the rows of this rank's part that it needs. ``receive``: the rows of this
    rank's window that it owns. This rank itself is among both with the rows that it keeps; ranks that exchange
    nothing are left out. ``margins`` are laid around the window, along any dimensions, and sent nowhere.
    """

    dim: int
    part_extent: int
    window_extent: int  # without margins
    send: Rows
    receive: Rows
    margins: Margins = ()

    @classmethod
    def of(cls, group: Group, dim: int, owned: Rows, needed: Rows, margins: Margins = ()) -> "HaloPlan":
        """Returns the plan of a dimension of which each rank holds ``owned`` and needs ``needed``.

        Both are intervals of the whole dimension by place in ``group``; ranks that are not in them take no part.
        What a rank needs may be smaller than what it owns, lie elsewhere, or reach over several neighbours.
        """
        part, window = owned[group.index], needed[group.index]
        send = {place: _rows_of(part, needed[place]) for place in owned}
        receive = {place: _rows_of(window, owned[place]) for place in owned}
        return cls(
            dim, part[1] - part[0], window[1] - window[0], _without_empty(send), _without_empty(receive), tuple(margins)
        )


def window(x: Tensor, group: Group, plan: HaloPlan, kind: str = "window", fill: float = 0.0) -> Tensor:
    """Returns this rank's window, of which ``x`` is its part; the margins around it hold ``fill``.

    *forward:* each rank sends the rows of its part that others need.
    *backward:* the gradient of every received row goes back to its owner, which adds up what comes.
    """
    return _Window.apply(x, group, plan, kind, fill)  # type: ignore[no-any-return]


class _Window(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, plan: HaloPlan, kind: str, fill: float) -> Tensor:
        ctx.how = group, plan, kind
        ctx.shape = x.shape
        return open_window(x, group, plan, kind, fill)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result = close_window(grad, *ctx.how)
        assert result.shape == ctx.shape, (result.shape, ctx.shape)
        return result, None, None, None, None


def open_window(x: Tensor, group: Group, plan: HaloPlan, kind: str = "window", fill: float = 0.0) -> Tensor:
    """Returns ``window``'s result, without a gradient."""
    assert x.shape[plan.dim] == plan.part_extent, (x.shape, plan)
    shape = list(x.shape)
    shape[plan.dim] = plan.window_extent
    for dim, before, behind in plan.margins:
        shape[dim] += before + behind
    result = inner = _empty_like(x, shape)
    for dim, before, behind in plan.margins:
        inner.narrow(dim, 0, before).fill_(fill)
        inner.narrow(dim, shape[dim] - behind, behind).fill_(fill)
        inner = inner.narrow(dim, before, shape[dim] - before - behind)
    _exchange(x, plan.send, inner, plan.receive, group, plan.dim, kind, add=False)
    return result


def close_window(grad: Tensor, group: Group, plan: HaloPlan, kind: str = "window") -> Tensor:
    """Returns the adjoint of ``open_window``: what all ranks' windows have for this rank's part, added."""
    for dim, before, behind in plan.margins:
        grad = grad.narrow(dim, before, grad.shape[dim] - before - behind)
    assert grad.shape[plan.dim] == plan.window_extent, (grad.shape, plan)
    shape = list(grad.shape)
    shape[plan.dim] = plan.part_extent
    result = _empty_like(grad, shape).zero_()
    _exchange(grad, plan.receive, result, plan.send, group, plan.dim, kind, add=True)
    return result


def _exchange(
    source: Tensor, send: Rows, target: Tensor, receive: Rows, group: Group, dim: int, kind: str, add: bool
) -> None:
    """Sends rows of ``source``, and writes those that come into ``target``, or adds them in the order of ranks.

    The rows that this rank keeps are always written: ``target`` holds zeros where others are added.
    """
    pieces = {place: source.narrow(dim, low, high - low) for place, (low, high) in send.items()}
    slots = {place: target.narrow(dim, low, high - low) for place, (low, high) in receive.items()}
    if group.index in slots:
        slots.pop(group.index).copy_(pieces.pop(group.index))
    buffers = {
        place: slot
        if slot.is_contiguous() and not add
        else torch.empty_like(slot, memory_format=torch.contiguous_format)
        for place, slot in slots.items()
    }
    post({place: piece.contiguous() for place, piece in pieces.items()}, buffers, group, kind).wait()
    for place in sorted(slots):
        if add:
            slots[place].add_(buffers[place])
        elif buffers[place] is not slots[place]:
            slots[place].copy_(buffers[place])


def _rows_of(interval: Interval, other: Interval) -> Interval:
    """Returns which rows of ``interval``, counted from its begin, lie in ``other`` too."""
    low = max(interval[0], other[0])
    return low - interval[0], max(low, min(interval[1], other[1])) - interval[0]


def _without_empty(rows: Rows) -> Rows:
    return {place: (low, high) for place, (low, high) in rows.items() if high > low}


def _empty_like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns an empty tensor of that shape in the memory format of ``x``."""
    last = x.ndim == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)
    order = torch.channels_last_3d if last else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)
