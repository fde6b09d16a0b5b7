"""Remaps: rows with global numbers go from one ownership by ranks to another, with the adjoint."""

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
    """Which rows this rank sends to each place of the group, and where those that come are put.

    - ``sent``: positions among this rank's source rows, those for the first place first; ``num_sent``: for each place
    - ``received``, ``num_received``: positions among its target rows of what comes from each place
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
        """Returns the same with its positions on a device, where they are copied once."""
        if device.type == "cpu":
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(self, sent=self.sent.to(device), received=self.received.to(device))
        return self._elsewhere[device]

    def reversed(self) -> "Remap":
        """Returns the way back, for rows that each went to one rank."""
        forth = self.sent, self.num_sent
        return Remap(self.num_target, self.num_source, self.received, self.num_received, *forth)


def make_remap(sources: Sequence[Tensor], targets: Sequence[Tensor], me: int) -> Remap:
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


def remap(x: Tensor, group: Group, dim: int, plan: Remap, kind: str = "remap") -> Tensor:
    """Returns the rows along ``dim`` that this rank needs of those that all own.

    *forward:* an all-to-all with uneven counts.
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
