"""Point-to-point messages: posted, counted in bytes, and waited for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seqpar.parallel.mesh import Group
from seqpar.parallel.shared_memory import LARGEST
from seqpar.parallel.watchdog import Watch

Result = TypeVar("Result")
# The dtypes that NCCL supports; others, such as labels of many classes (int16), are sent as bytes.
_SUPPORTED = frozenset(
    (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    + (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
)


class Pending:
    """Posted messages; keeps their tensors alive until ``wait``."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor], watch: Watch | None = None) -> None:
        self._works, self._tensors, self._watch = works, tensors, watch

    def wait(self) -> None:
        if self._watch is not None and self._works:
            on_gpu = self._tensors[0].is_cuda
            patience = None if on_gpu else self._watch.patience
            with self._watch.waiting(on_gpu):
                for work in self._works:
                    work.wait() if patience is None else work.wait(patience)
        self._works, self._tensors = (), ()


class AwaitedTensor(Generic[Result]):
    """A result whose messages are still in transit; ``wait`` may be called once.

    - ``finish``: returns the result once ``pending`` has completed; it is then released with the tensors that it holds
    """

    def __init__(self, pending: Pending, finish: Callable[[], Result]) -> None:
        self._pending, self._finish = pending, finish

    def wait(self) -> Result:
        self._pending.wait()
        finish = self._finish
        del self._finish
        return finish()


def post(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: Group, kind: str) -> Pending:
    """Posts messages to and from other ranks of ``group``, at most one in each direction per pair.

    Empty tensors are skipped on both sides.

    - ``sends``: by index in the group, the tensor to send
    - ``receives``: by index in the group, the tensor to receive into
    - ``kind``: the name under which the bytes are counted
    """
    outgoing = [(q, t) for q, t in sends.items() if t.numel()]
    incoming = [(q, t) for q, t in receives.items() if t.numel()]
    assert all(t.is_contiguous() for _, t in outgoing + incoming)
    group.count(kind, sum(t.numel() * t.element_size() for _, t in outgoing), len(outgoing))
    if any(t.is_meta for _, t in outgoing + incoming):
        return Pending((), ())
    group.watch.enter(kind, group)
    if group.watch.check:
        described_sides = (
            {group.ranks[q]: f"{kind} of {t.numel()} {t.dtype}" for q, t in side} for side in (outgoing, incoming)
        )
        group.watch.announce(group.name, *described_sides)
    return Pending(start_messages(outgoing, incoming, group), [t for _, t in outgoing + incoming], group.watch)


def start_messages(
    outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]], group: Group
) -> list[Any]:
    """Starts messages without counting or announcing them, and returns what to wait for."""
    link, works = group.link, list[Any]()
    if link is not None:
        sends = {group.ranks[q]: t for q, t in outgoing if t.nbytes <= LARGEST}
        receives = {group.ranks[q]: t for q, t in incoming if t.nbytes <= LARGEST}
        if sends or receives:
            works.append(link.memory.start(sends, receives, link.channel))
        outgoing = [(q, t) for q, t in outgoing if t.nbytes > LARGEST]
        incoming = [(q, t) for q, t in incoming if t.nbytes > LARGEST]
    place = group.places or range(group.size)
    ops = [dist.P2POp(dist.isend, sendable(t), group=group.handle, group_peer=place[q]) for q, t in outgoing]
    ops += [dist.P2POp(dist.irecv, sendable(t), group=group.handle, group_peer=place[q]) for q, t in incoming]
    return works + (dist.batch_isend_irecv(ops) if ops else [])


def sendable(x: Tensor) -> Tensor:
    """Returns a contiguous tensor, or a view of its bytes if its dtype is not supported by NCCL."""
    return x if x.dtype in _SUPPORTED else x.view(-1).view(torch.uint8)


def check_collective(kind: str, group: Group, what: str = "") -> None:
    """Records that this rank enters a collective; with ``check`` set, raises unless all ranks enter the same one."""
    group.watch.enter(kind, group)
    if group.watch.check and group.size > 1:
        group.watch.compare(group.name, group.ranks, f"{kind} {what}".strip())


def shape_and_dtype(x: Tensor) -> str:
    """Returns a tensor's shape and dtype in words."""
    return f"of {' x '.join(map(str, x.shape)) or 'a number'} {x.dtype}"
