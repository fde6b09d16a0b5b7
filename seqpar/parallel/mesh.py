"""The mesh ``data`` x ``pipe`` x ``seq`` of all processes and its groups of ranks; equal seeds and first weights.

``seq`` is innermost: consecutive ranks share a tile, so that a sequence group stays inside a node; then ``pipe``, whose
places hold different stages of the network. A group of one needs no process group, and everything above takes the same
path with it. ``rendezvous`` builds a mesh.
"""

import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from seqpar.parallel.launcher import Launcher
from seqpar.parallel.watchdog import Watch, format_ranks


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that work together, in order, one of which is this process."""

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0  # this process's place among the ranks
    handle: dist.ProcessGroup | None = None
    traffic: Counter[str] = field(default_factory=Counter)  # bytes that this rank sent, by kind
    places: tuple[int, ...] | None = None  # of a part: where its members stand in the group whose handle it uses
    watch: Watch = field(default_factory=Watch)
    messages: Counter[str] = field(default_factory=Counter)  # that this rank sent, by kind
    exchanges: Counter[str] = field(default_factory=Counter)  # of messages that travel together, by kind

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def peers(self) -> list[int]:
        """The other members' places; each rank begins behind itself, so that no rank is asked by all at once."""
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def part(self, members: Sequence[int]) -> "Group":
        """Returns the members at these places as a group of its own, whose bytes are counted in this one.

        This process must be among them. Such a group sends messages between pairs only.
        """
        if list(members) == list(range(self.size)):
            return self
        ranks = tuple(self.ranks[place] for place in members)
        places = tuple(self.places[place] if self.places else place for place in members)
        place = list(members).index(self.index)
        counters = self.messages, self.exchanges
        return Group(self.name, ranks, place, self.handle, self.traffic, places, self.watch, *counters)

    def count(self, kind: str, sent: int, messages: int) -> None:
        """Counts the bytes and messages that this rank sends in one exchange."""
        self.traffic[kind] += sent
        self.messages[kind] += messages
        self.exchanges[kind] += messages > 0

    def leave(self) -> None:
        """Drops the process group and its threads: one that outlives Python aborts the process."""
        object.__setattr__(self, "handle", None)

    def __str__(self) -> str:
        return f"{self.name} group of {format_ranks(self.ranks)}"


AnyGroup = Group | dist.ProcessGroup | DeviceMesh  # what a library's user may have; ``as_group`` makes it ours


def as_group(group: AnyGroup | None, name: str = "seq") -> Group:
    """Returns ranks as a group of ours; every function that takes ``group`` from a user calls it.

    - ``group``: ours, torch's ``ProcessGroup``, or a ``DeviceMesh`` of one direction; None: this process alone
    - ``name``: how messages and errors call the ranks
    """
    if group is None:
        return Group(name)
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh):
        group = _line_of(group)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"the {name} group does not hold this process: give each rank the group that it is in")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group={group!r} is no group of ranks: give mesh.seq of seqpar.start, a ProcessGroup of torch, or a "
            "DeviceMesh of one direction"
        )
    ranks, watch = tuple(dist.get_process_group_ranks(group)), Watch(dist.get_rank())
    return Group(name, ranks, dist.get_rank(group), group if len(ranks) > 1 else None, watch=watch)


def _line_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the process group of a mesh of one direction."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        one = f"mesh[{names[-1]!r}]" if names else "one with mesh_dim_names=(..., 'seq'), as mesh['seq']"
        raise ValueError(f"a DeviceMesh of {mesh.ndim} directions came, where ranks in a line are needed: give {one}")
    if mesh.get_coordinate() is None:
        raise ValueError("the DeviceMesh does not hold this process: give each rank the mesh that it is in")
    return mesh.get_group()


def warn_without_group(what: str) -> None:
    """Warns, on the first of several ranks, that ``what`` was given no group and so shares no tile.

    That is right for plain data parallelism, and a costly mistake where ranks were meant to share a tile.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0:
        warnings.warn(
            f"{what} trains on {dist.get_world_size()} ranks without group=: each computes everything, as is right "
            "where each has a tile of its own. To share a tile, give group=: mesh.seq of seqpar.start, a ProcessGroup, "
            "or a DeviceMesh of one direction",
            stacklevel=3,
        )


@dataclass(frozen=True, eq=False)
class Mesh:
    """All processes as ``data`` x ``pipe`` x ``seq``; a context manager that stops what ``rendezvous.start`` began.

    - ``data``: ranks at the same place of other tiles; ``seq``: ranks that share a tile, of one stage
    - ``pipe``: ranks with other stages of the same parts; a place's index is its place
    - ``stage``: ranks of the same place of the pipe, which hold the same weights: ``data`` x ``seq``
    - ``tile``: ranks that share a tile, of all stages: ``pipe`` x ``seq``
    - ``others``: ranks at the same place of other sequence groups: ``data`` x ``pipe``
    """

    launcher: Launcher
    device: torch.device
    world: Group
    data: Group
    seq: Group
    pipe: Group
    stage: Group
    tile: Group
    others: Group
    hosts: tuple[str, ...] = ()  # every rank's node
    store: Any = None  # for a thread beside the main one; None in a process alone

    @property
    def is_first(self) -> bool:
        return self.world.index == 0

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups; several may have the same ranks."""
        return self.world, self.seq, self.data, self.pipe, self.stage, self.tile, self.others

    @property
    def places(self) -> list[int]:
        """The place of each rank of the world in its pipe."""
        return [rank // self.seq.size % self.pipe.size for rank in range(self.world.size)]

    def without_stages(self) -> "Mesh":
        """Returns the same ranks as ``data`` x ``seq``, for whole networks: ``data`` is then ``others``."""
        alone = Group("pipe", (self.world.ranks[self.world.index],), watch=self.world.watch)
        return replace(self, data=self.others, pipe=alone, stage=self.world, tile=self.seq)

    def line(self) -> DeviceMesh:
        """Returns all ranks, ``data`` x ``seq``, as a one-dimensional ``DeviceMesh`` of torch."""
        assert self.world.handle is not None
        return DeviceMesh.from_group(self.world.handle, self.device.type)

    def set_timeout(self, limit_s: float, act: Callable[[str], None] | None = None) -> None:
        """Limits every collective from now on to ``limit_s`` seconds; who keeps the others longer is named to ``act``.

        All ranks call this once everything has run once: starting, compiling and searching for kernels take longer
        than anything that comes later.
        """
        for group in self.groups:
            if group.handle is not None:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group.handle)
        self.world.watch.begin(limit_s, act)

    def synchronize(self) -> None:
        """Waits until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.stop()

    def stop(self) -> None:
        """Waits for all ranks and leaves the process group; without the barrier gloo aborts now and then."""
        if dist.is_initialized():
            with self.world.watch.waiting(False):
                dist.all_reduce(torch.zeros(1), group=self.world.handle)  # on the CPU: gloo, also beside nccl
                dist.barrier(group=self.world.handle)
            self.world.watch.end()
            dist.destroy_process_group()
            for group in self.groups:
                group.leave()


def seed(number: int) -> None:
    """Seeds Python, NumPy and torch; called alike on all ranks, so that they build equal weights."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def equal_weights(module: nn.Module, group: Group) -> None:
    """Copies the first rank's parameters and buffers to every rank of ``group``."""
    if group.size == 1:
        return
    group.watch.enter("first weights", group)
    for tensor in [*module.parameters(), *module.buffers()]:
        with group.watch.waiting(tensor.is_cuda):
            dist.broadcast(tensor.data, group.ranks[0], group=group.handle)
