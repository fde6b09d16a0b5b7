"""Intervals of a dimension that is spread over ranks, as other ranks need them: halos, with their adjoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.mesh import Group
from seqpar.messages import post

Interval = tuple[int, int]
Margins = Sequence[tuple[int, int, int]]  # dimension, how many before, how many behind


def window(
    x: Tensor,
    group: Group,
    dim: int,
    owned: Mapping[int, Interval],
    needed: Mapping[int, Interval],
    kind: str = "window",
    fill: float = 0.0,
    margins: Margins = (),
) -> Tensor:
    """Returns the interval ``needed[me]`` of a dimension of which each rank holds ``owned``.

    The mappings go from places in ``group`` to half-open intervals; ranks that are not in them take no part.
    Needs may be smaller than what is owned, lie elsewhere, or reach over several neighbours. ``margins`` of
    ``fill`` are laid around the result, along any dimensions, without another copy.

    *forward:* each rank sends what of its interval others need.
    *backward:* the gradient of every received slice goes back and is added.
    """
    return _Window.apply(x, group, dim, dict(owned), dict(needed), kind, fill, margins)  # type: ignore[no-any-return]


class _Window(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Group,
        dim: int,
        owned: dict[int, Interval],
        needed: dict[int, Interval],
        kind: str,
        fill: float,
        margins: Margins,
    ) -> Tensor:
        ctx.how = group, dim, owned, needed, kind, margins
        ctx.shape = x.shape
        return open_window(x, group, dim, owned, needed, kind, fill, margins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        result = close_window(grad, *ctx.how)
        assert result.shape == ctx.shape, (result.shape, ctx.shape)
        return result, None, None, None, None, None, None, None


def _overlap(a: Interval, b: Interval) -> Interval:
    low = max(a[0], b[0])
    return low, max(low, min(a[1], b[1]))


def _room(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns an empty tensor of that shape whose values lie in the order of those of ``x``."""
    last = x.ndim == 5 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last_3d)
    order = torch.channels_last_3d if last else torch.contiguous_format
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=order)


def open_window(
    x: Tensor,
    group: Group,
    dim: int,
    owned: Mapping[int, Interval],
    needed: Mapping[int, Interval],
    kind: str = "window",
    fill: float = 0.0,
    margins: Margins = (),
) -> Tensor:
    """Returns ``window``'s result, without a gradient."""
    me, mine, want = group.index, owned[group.index], needed[group.index]
    assert x.shape[dim] == mine[1] - mine[0], (x.shape, dim, owned)
    shape = list(x.shape)
    shape[dim] = want[1] - want[0]
    for side, before, behind in margins:
        shape[side] += before + behind
    whole = result = _room(x, shape)
    for side, before, behind in margins:
        result.narrow(side, 0, before).fill_(fill)
        result.narrow(side, shape[side] - behind, behind).fill_(fill)
        result = result.narrow(side, before, shape[side] - before - behind)
    sends, receives, places = {}, {}, {}
    for q in owned:
        low, high = _overlap(mine, needed[q])
        piece = x.narrow(dim, low - mine[0], high - low) if high > low else None
        low, high = _overlap(owned[q], want)
        place = result.narrow(dim, low - want[0], high - low) if high > low else None
        if q == me:
            if place is not None and piece is not None:
                place.copy_(piece)
            continue
        if piece is not None:
            sends[q] = piece.contiguous()
        if place is not None:
            receives[q], places[q] = place.contiguous(), place
    post(sends, receives, group, kind).wait()
    for q, place in places.items():
        if receives[q].data_ptr() != place.data_ptr():
            place.copy_(receives[q])
    return whole


def close_window(
    grad: Tensor,
    group: Group,
    dim: int,
    owned: Mapping[int, Interval],
    needed: Mapping[int, Interval],
    kind: str = "window",
    margins: Margins = (),
) -> Tensor:
    """Returns the adjoint of ``open_window``: what all ranks have for this one's interval, added."""
    for side, before, behind in margins:
        grad = grad.narrow(side, before, grad.shape[side] - before - behind)
    me, mine, want = group.index, owned[group.index], needed[group.index]
    assert grad.shape[dim] == want[1] - want[0], (grad.shape, dim, needed)
    shape = list(grad.shape)
    shape[dim] = mine[1] - mine[0]
    result = _room(grad, shape).zero_()
    sends, receives, places = {}, {}, {}
    for q in owned:
        low, high = _overlap(owned[q], want)
        piece = grad.narrow(dim, low - want[0], high - low) if high > low else None
        low, high = _overlap(mine, needed[q])
        place = result.narrow(dim, low - mine[0], high - low) if high > low else None
        if q == me:
            if place is not None and piece is not None:
                place.copy_(piece)
            continue
        if piece is not None:
            sends[q] = piece.contiguous()
        if place is not None:
            receives[q], places[q] = torch.empty_like(place, memory_format=torch.contiguous_format), place
    post(sends, receives, group, kind).wait()
    for q in sorted(places):
        places[q].add_(receives[q])
    return result
