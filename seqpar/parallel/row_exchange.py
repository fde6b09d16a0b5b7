"""Exchanges rows of tensors between ranks, and runs other work while they are in transit."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import AwaitedTensor, post
from seqpar.parallel.watchdog import Watch

Interval = tuple[int, int]  # half-open
Rows = Mapping[int, Interval]  # by place in the group


def start_exchange(
    source: Tensor, send: Rows, target: Tensor, receive: Rows, group: Group, dim: int, kind: str, add: bool
) -> AwaitedTensor[None]:
    """Sends rows of ``source``; received rows are written to ``target``, or added to it in rank order.

    Rows that this rank keeps are always written: if ``add`` is set, ``target`` must hold zeros there.
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
    pending = post({place: piece.contiguous() for place, piece in pieces.items()}, buffers, group, kind)

    def arrive() -> None:
        for place in sorted(slots):
            if add:
                slots[place].add_(buffers[place])
            elif buffers[place] is not slots[place]:
                slots[place].copy_(buffers[place])

    return AwaitedTensor(pending, arrive)


def run_on_stream_in_order(
    exchanges: Sequence[Callable[[], AwaitedTensor[None]]],
    like: Tensor,
    watch: Watch,
    while_waiting: Callable[[], None] | None,
) -> None:
    """Runs one exchange after the other, overlapped with ``while_waiting``.

    On a GPU the exchanges run on a stream of their own, because each starts where the one before ended. Otherwise
    ``while_waiting`` runs right after the first exchange has started.
    """
    if while_waiting is None or not like.is_cuda:
        for exchange in exchanges:
            coming = exchange()
            if while_waiting is not None:
                while_waiting()
                while_waiting = None
            coming.wait()
        return
    here, beside = torch.cuda.current_stream(like.device), _stream_beside(like.device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside), watch.clock.paused():
        for exchange in exchanges:
            exchange().wait()
    while_waiting()
    with watch.waiting(True):
        here.wait_stream(beside)


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
