"""Starts and stops processes, picks the device, builds the groups ``data`` x ``seq``, seeds.

``seq`` is innermost: consecutive ranks share a tile, so that a sequence group stays inside a node. A group of
one needs no process group; everything above takes the same path with it.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from seqpar.environment import Launcher
from seqpar.watchdog import Watch, these


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that share something, in order; ``index`` is this process's place among them.

    ``places`` is set where the group is a part of another, and talks in pairs through that one's process group:
    it says where the members stand there.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: dist.ProcessGroup | None = None
    traffic: Counter[str] = field(default_factory=Counter)  # bytes that this rank sent, by kind
    places: tuple[int, ...] | None = None
    watch: Watch = field(default_factory=Watch)
    messages: Counter[str] = field(default_factory=Counter)  # how many that was, by kind

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def peers(self) -> list[int]:
        """The other members' places, each rank beginning behind itself so that no one is asked by all at once."""
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def part(self, members: Sequence[int]) -> "Group":
        """Returns the members at these places, this process among them, as a group that counts its bytes here."""
        if list(members) == list(range(self.size)):
            return self
        ranks = tuple(self.ranks[place] for place in members)
        places = tuple(self.places[place] if self.places else place for place in members)
        place = list(members).index(self.index)
        return Group(self.name, ranks, place, self.handle, self.traffic, places, self.watch, self.messages)

    def count(self, kind: str, sent: int, messages: int) -> None:
        """Adds what this rank sends."""
        self.traffic[kind] += sent
        self.messages[kind] += messages

    def leave(self) -> None:
        """Lets the process group go, and its threads with it: one that outlives Python itself aborts the process."""
        object.__setattr__(self, "handle", None)

    def __str__(self) -> str:
        return f"{self.name} group of {these(self.ranks)}"


@dataclass(frozen=True, eq=False)
class Mesh:
    """All processes as ``data`` x ``seq``; a context manager that stops what ``start`` began."""

    launcher: Launcher
    device: torch.device
    world: Group
    data: Group
    seq: Group
    hosts: tuple[str, ...] = ()
    warm_up_s: dict[str, float] = field(default_factory=dict)
    store: Any = None  # for a thread beside the main one; None in a process alone

    @property
    def is_first(self) -> bool:
        return self.world.index == 0

    def line(self) -> DeviceMesh:
        """Returns all ranks, ``data`` x ``seq``, as torch's own mesh of one direction."""
        assert self.world.handle is not None
        return DeviceMesh.from_group(self.world.handle, self.device.type)

    def set_timeout(self, limit_s: float, act: Callable[[str], None] | None = None) -> None:
        """From now on a rank that keeps the others waiting longer than this ends the run, and is named to ``act``.

        Called by all ranks once everything has run once: starting, compiling and searching for kernels take longer
        than anything that comes later.
        """
        for group in (self.world, self.seq, self.data):
            if group.handle is not None:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group.handle)
        self.world.watch.begin(limit_s, act)

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.stop()

    def stop(self) -> None:
        """Waits for all ranks, then leaves; without the barrier gloo aborts now and then."""
        if dist.is_initialized():
            with self.world.watch.waiting(False):
                dist.all_reduce(torch.zeros(1), group=self.world.handle)  # on the CPU: gloo, also beside nccl
                dist.barrier(group=self.world.handle)
            self.world.watch.end()
            dist.destroy_process_group()
            for group in (self.world, self.data, self.seq):
                group.leave()


def seed(number: int) -> None:
    """Seeds python, numpy and torch alike on every rank, so that all build equal weights."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def equal_weights(module: nn.Module, group: Group) -> None:
    """Gives every rank of ``group`` the first one's parameters and buffers."""
    if group.size == 1:
        return
    group.watch.enter("first weights", group)
    for tensor in [*module.parameters(), *module.buffers()]:
        with group.watch.waiting(tensor.is_cuda):
            dist.broadcast(tensor.data, group.ranks[0], group=group.handle)
