"""Remaps: rows with global numbers move from one assignment to ranks to another, with the adjoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.parallel.collectives import exchange_rows
from seqpar.parallel.mesh import Group


@dataclass(frozen=True, eq=False)
class Remap:
    """Which rows this rank sends to each rank of the group, and where received rows are put.

    - ``sent``: positions among this rank's source rows, grouped by receiving rank
    - ``num_sent``: the number of rows for each rank
    - ``received``: positions among this rank's target rows, grouped by sending rank
    - ``num_received``: the number of rows from each rank
    """

    num_source: int
    num_target: int
    sent: Tensor
    num_sent: tuple[int, ...]
    received: Tensor
    num_received: tuple[int, ...]

    @cached_property
    def _elsewhere(self) -> dict[torch.device, "Remap"]:
        return {}

    def on(self, device: torch.device) -> "Remap":
        """Returns this remap with its positions on ``device``, copied there once."""
        if device.type == "cpu":
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(self, sent=self.sent.to(device), received=self.received.to(device))
        return self._elsewhere[device]

    def reversed(self) -> "Remap":
        """Returns the inverse, for remaps that send each row to one rank."""
        forth = self.sent, self.num_sent
        return Remap(self.num_target, self.num_source, self.received, self.num_received, *forth)


def make_remap(sources: Sequence[Tensor], targets: Sequence[Tensor], me: int) -> Remap:
    """Returns the remap for rank ``me``, where each rank q owns the rows ``sources[q]`` and needs ``targets[q]``.

    Rows are identified by global numbers; each has one owner, and several ranks may need it.
    """
    owner_size = 1 + max(int(ids.max()) for ids in [*sources, *targets] if len(ids))
    position = torch.full((owner_size,), -1)
    owner = torch.full((owner_size,), -1)
    for q, ids in enumerate(sources):
        assert bool((owner[ids] == -1).all()), "an id has two owners"
        owner[ids] = q
        position[ids] = torch.arange(len(ids))
    if any(bool((owner[ids] == -1).any()) for ids in targets):
        raise ValueError("targets contain a row that no rank owns: sources and targets must hold the same rows")
    send = [position[ids[owner[ids] == me]] for ids in targets]
    receive = [(owner[targets[me]] == q).nonzero().flatten() for q in range(len(sources))]
    return Remap(
        len(sources[me]),
        len(targets[me]),
        torch.cat(send),
        tuple(map(len, send)),
        torch.cat(receive),
        tuple(map(len, receive)),
    )


def count_remap(num_sent: Sequence[int], num_received: Sequence[int]) -> Remap:
    """Returns a remap of given numbers of rows to and from each rank, without positions, for tensors without data.

    Each row goes to one rank. Lists of the tokens of a large tile would take gigabytes.
    """
    sent, received = (torch.empty(sum(rows), dtype=torch.int64, device="meta") for rows in (num_sent, num_received))
    return Remap(len(sent), len(received), sent, tuple(num_sent), received, tuple(num_received))


def remap(x: Tensor, group: Group, dim: int, plan: Remap, kind: str = "remap") -> Tensor:
    """Returns the rows along ``dim`` that this rank needs, sent by the ranks that own them.

    *forward:* all-to-all with uneven counts.
    *backward:* the reversed all-to-all; gradients of a row that went to several ranks are added.
    """
    return _Remap.apply(x, group, dim, plan.on(x.device), kind)  # type: ignore[no-any-return]


class _Remap(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, plan: Remap, kind: str) -> Tensor:
        ctx.how = group, dim, plan, kind
        rows = x.movedim(dim, 0)
        ctx.shape = rows.shape
        assert rows.shape[0] == plan.num_source, (x.shape, dim, plan.num_source)
        rows = exchange_rows(rows.index_select(0, plan.sent), group, plan.num_sent, plan.num_received, kind)
        result = rows.new_empty((plan.num_target, *rows.shape[1:])).index_copy_(0, plan.received, rows)
        return result.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, plan, kind = ctx.how
        rows = grad.movedim(dim, 0)
        assert rows.shape == (plan.num_target, *ctx.shape[1:]), (rows.shape, ctx.shape)
        rows = exchange_rows(rows.index_select(0, plan.received), group, plan.num_received, plan.num_sent, kind)
        result = rows.new_zeros(ctx.shape).index_add_(0, plan.sent, rows)  # in the order of ranks
        return result.movedim(0, dim), None, None, None, None
