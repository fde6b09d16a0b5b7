"""Remaps: rows with global numbers go from one ownership by ranks to another, with the adjoint."""

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
    """Which rows this rank sends to each place of the group, and where those that come are put."""

    num_source: int
    num_target: int
    send: Mapping[int, Tensor]  # for each place: positions among this rank's source rows
    receive: Mapping[int, Tensor]  # for each place: positions among this rank's target rows


def plan_remap(sources: Sequence[Tensor], targets: Sequence[Tensor], me: int) -> Remap:
    """Returns the remap of rank ``me`` when each rank q owns the rows ``sources[q]`` and needs ``targets[q]``.

    Rows are known by their global numbers; each has one owner, and may be needed by several ranks.
    """
    owner_size = 1 + max(int(ids.max()) for ids in [*sources, *targets] if len(ids))
    position = torch.full((owner_size,), -1)
    owner = torch.full((owner_size,), -1)
    for q, ids in enumerate(sources):
        assert bool((owner[ids] == -1).all()), "an id has two owners"
        owner[ids] = q
        position[ids] = torch.arange(len(ids))
    if any(bool((owner[ids] == -1).any()) for ids in targets):
        raise ValueError("a row that is needed has no owner: the two ownerships do not hold the same rows")
    send = {q: position[ids[owner[ids] == me]] for q, ids in enumerate(targets)}
    receive = {q: (owner[targets[me]] == q).nonzero().flatten() for q in range(len(sources))}
    return Remap(len(sources[me]), len(targets[me]), send, receive)


def remap(x: Tensor, group: Group, dim: int, plan: Remap, kind: str = "remap") -> Tensor:
    """Returns the rows along ``dim`` that this rank needs of those that all own.

    *forward:* an all-to-all with uneven counts.
    *backward:* the reversed all-to-all; gradients of a row that went to several ranks are added.
    """
    return _Remap.apply(x, group, dim, plan, kind)  # type: ignore[no-any-return]


class _Remap(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, plan: Remap, kind: str) -> Tensor:
        ctx.how = group, dim, plan, kind
        rows = x.movedim(dim, 0)
        ctx.shape = rows.shape
        assert rows.shape[0] == plan.num_source, (x.shape, dim, plan.num_source)
        result = rows.new_empty((plan.num_target, *rows.shape[1:]))
        pieces = _exchange(rows, group, plan.send, plan.receive, kind)
        for q, piece in pieces.items():
            result[plan.receive[q].to(x.device)] = piece
        return result.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, plan, kind = ctx.how
        rows = grad.movedim(dim, 0)
        assert rows.shape == (plan.num_target, *ctx.shape[1:]), (rows.shape, ctx.shape)
        result = rows.new_zeros(ctx.shape)
        pieces = _exchange(rows, group, plan.receive, plan.send, kind)
        for q in sorted(pieces):
            result.index_add_(0, plan.send[q].to(grad.device), pieces[q])
        return result.movedim(0, dim), None, None, None, None


def _exchange(
    rows: Tensor, group: Group, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], kind: str
) -> dict[int, Tensor]:
    """Returns the rows that each place has for this rank, its own among them."""
    outgoing = {q: rows.index_select(0, positions.to(rows.device)) for q, positions in send.items()}
    incoming = {q: rows.new_empty((len(receive[q]), *rows.shape[1:])) for q in group.peers}
    post({q: outgoing[q] for q in group.peers}, incoming, group, kind).wait()
    return {**incoming, group.index: outgoing[group.index]}
