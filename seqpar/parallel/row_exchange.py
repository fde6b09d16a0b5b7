"""Rows of a tensor that ranks exchange, and work that is done while they travel."""

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
    """Sends rows of ``source``; what comes is then written into ``target``, or added there in the order of ranks.

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
    meanwhile: Callable[[], None] | None,
) -> None:
    """Starts and ends one exchange after the other, with ``meanwhile`` beside them.

    On a GPU they run on a stream of their own, as each begins where the one before ended. Else ``meanwhile`` runs
    behind the start of the first one.
    """
    if meanwhile is None or not like.is_cuda:
        for exchange in exchanges:
            coming = exchange()
            if meanwhile is not None:
                meanwhile()
                meanwhile = None
            coming.wait()
        return
    here, beside = torch.cuda.current_stream(like.device), _stream_beside(like.device)
    beside.wait_stream(here)
    with torch.cuda.stream(beside), watch.clock.paused():
        for exchange in exchanges:
            exchange().wait()
    meanwhile()
    with watch.waiting(True):
        here.wait_stream(beside)


@cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
