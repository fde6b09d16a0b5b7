"""Numbered rows from one ownership by ranks to another, with the adjoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.mesh import Group
from seqpar.messages import post


@dataclass(frozen=True)
class Remap:
    """From one ownership of numbered things to another: who sends which of his rows where."""

    num_source: int
    num_target: int
    send: Mapping[int, Tensor]  # to each place: positions among my source rows
    place: Mapping[int, Tensor]  # from each place: positions among my target rows


def plan_remap(sources: Sequence[Tensor], targets: Sequence[Tensor], me: int) -> Remap:
    """Returns how rows move when rank q owns the ids ``sources[q]`` and wants ``targets[q]``; an id has one owner."""
    owner_size = 1 + max(int(ids.max()) for ids in [*sources, *targets] if len(ids))
    position = torch.full((owner_size,), -1)
    owner = torch.full((owner_size,), -1)
    for q, ids in enumerate(sources):
        assert bool((owner[ids] == -1).all()), "an id has two owners"
        owner[ids] = q
        position[ids] = torch.arange(len(ids))
    if any(bool((owner[ids] == -1).any()) for ids in targets):
        raise ValueError("a wanted row has no owner: the two ownerships do not hold the same things")
    send = {q: position[ids[owner[ids] == me]] for q, ids in enumerate(targets)}
    place = {q: (owner[targets[me]] == q).nonzero().flatten() for q in range(len(sources))}
    return Remap(len(sources[me]), len(targets[me]), send, place)


def remap(x: Tensor, group: Group, dim: int, plan: Remap, kind: str = "remap") -> Tensor:
    """Returns the rows along ``dim`` that this rank wants of what all own.

    *forward:* an all-to-all with uneven counts.
    *backward:* the reversed all-to-all; gradients of a row that went to several ranks are added.
    """
    return _Move.apply(x, group, dim, plan, kind)  # type: ignore[no-any-return]


class _Move(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, plan: Remap, kind: str) -> Tensor:
        ctx.how = group, dim, plan, kind
        rows = x.movedim(dim, 0)
        ctx.shape = rows.shape
        assert rows.shape[0] == plan.num_source, (x.shape, dim, plan.num_source)
        result = rows.new_empty((plan.num_target, *rows.shape[1:]))
        got = _swap_rows(rows, group, plan.send, plan.place, kind)
        for q, piece in got.items():
            result[plan.place[q].to(x.device)] = piece
        return result.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, plan, kind = ctx.how
        rows = grad.movedim(dim, 0)
        assert rows.shape == (plan.num_target, *ctx.shape[1:]), (rows.shape, ctx.shape)
        result = rows.new_zeros(ctx.shape)
        got = _swap_rows(rows, group, plan.place, plan.send, kind)
        for q in sorted(got):
            result.index_add_(0, plan.send[q].to(grad.device), got[q])
        return result.movedim(0, dim), None, None, None, None


def _swap_rows(
    rows: Tensor, group: Group, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], kind: str
) -> dict[int, Tensor]:
    pieces = {q: rows.index_select(0, ids.to(rows.device)) for q, ids in send.items()}
    got = {q: rows.new_empty((len(receive[q]), *rows.shape[1:])) for q in group.peers}
    post({q: pieces[q] for q in group.peers}, got, group, kind).wait()
    got[group.index] = pieces[group.index]
    return got
