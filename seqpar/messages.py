"""Point-to-point messages under way, counted."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from seqpar.mesh import Group
from seqpar.watchdog import Watch

Result = TypeVar("Result")


class Pending:
    """Messages under way; keeps their tensors alive until ``wait``."""

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


class Coming(Generic[Result]):
    """A result under way: what ``finish`` makes once ``pending`` has arrived. It is handed out once, and let go."""

    def __init__(self, pending: Pending, finish: Callable[[], Result]) -> None:
        self._pending, self._finish = pending, finish

    def wait(self) -> Result:
        self._pending.wait()
        finish = self._finish
        del self._finish
        return finish()


def post(sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], group: Group, kind: str) -> Pending:
    """Returns the messages to and from other places of ``group``; empty ones are left out on both sides."""
    going = [(q, t) for q, t in sends.items() if t.numel()]
    coming = [(q, t) for q, t in receives.items() if t.numel()]
    assert all(t.is_contiguous() for _, t in going + coming)
    group.count(kind, sum(t.numel() * t.element_size() for _, t in going), len(going))
    if any(t.is_meta for _, t in going + coming):
        return Pending((), ())
    place = group.places or range(group.size)
    ops = [dist.P2POp(dist.isend, t, group=group.handle, group_peer=place[q]) for q, t in going]
    ops += [dist.P2POp(dist.irecv, t, group=group.handle, group_peer=place[q]) for q, t in coming]
    group.watch.enter(kind, group)
    if group.watch.check:
        told = [{group.ranks[q]: f"{kind} of {t.numel()} {t.dtype}" for q, t in side} for side in (going, coming)]
        group.watch.announce(group.name, *told)
    return Pending(dist.batch_isend_irecv(ops) if ops else (), [t for _, t in going + coming], group.watch)


def expect(kind: str, group: Group, what: str = "") -> None:
    """Notes that all ranks of the group now enter something together; where they are checked, that they do."""
    group.watch.enter(kind, group)
    if group.watch.check and group.size > 1:
        group.watch.compare(group.name, group.ranks, f"{kind} {what}".strip())


def described(x: Tensor) -> str:
    return f"of {' x '.join(map(str, x.shape)) or 'a number'} {x.dtype}"
