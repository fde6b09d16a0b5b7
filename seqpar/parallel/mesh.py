"""The mesh ``data`` x ``pipe`` x ``seq`` of all processes, its groups of ranks, and equal seeds and initial weights.

``seq`` is innermost: consecutive ranks share a tile, so that a sequence group stays inside a node. Next is ``pipe``,
whose places hold different stages of the network. A group of one needs no process group, and all code above takes the
same path with it. ``rendezvous`` builds a mesh.
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
from torch.distributed.device_mesh import DeviceMesh

from seqpar.parallel.launcher import Launcher
from seqpar.parallel.shared_memory import Linked, links
from seqpar.parallel.watchdog import Watch, format_ranks


@dataclass(frozen=True, eq=False)
class Group:
    """An ordered group of ranks that work together, including this process.

    A copied module shares its group with the original. A pickled group remembers the name of its process group and
    finds it again among those of the process that loads it.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0  # this process's position among the ranks
    handle: dist.ProcessGroup | None = None
    traffic: Counter[str] = field(default_factory=Counter)  # bytes that this rank sent, by kind
    places: tuple[int, ...] | None = None  # in a subgroup: its members' indices in the group whose handle it uses
    watch: Watch = field(default_factory=Watch)
    messages: Counter[str] = field(default_factory=Counter)  # messages that this rank sent, by kind
    exchanges: Counter[str] = field(default_factory=Counter)  # batches of messages sent together, by kind

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def link(self) -> Linked | None:
        """How the ranks reach each other through shared memory; None if they use the process group's backend."""
        return None if self.handle is None else links.get(self.handle.group_name)

    @property
    def peers(self) -> list[int]:
        """The other members' indices, starting with the next one, so that no rank is addressed by all at once."""
        return [(self.index + step) % self.size for step in range(1, self.size)]

    def part(self, members: Sequence[int]) -> "Group":
        """Returns a subgroup of the members at these indices; its traffic is counted in this group.

        This process must be a member. A subgroup only sends point-to-point messages.
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
        """Drops the process group and its threads: one that outlives the Python interpreter aborts the process."""
        object.__setattr__(self, "handle", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        name = "" if self.handle is None else self.handle.group_name
        return _find_group, (self.name, self.ranks, name, self.places)

    def __str__(self) -> str:
        return f"{self.name} group of {format_ranks(self.ranks)}"


def _find_group(name: str, ranks: tuple[int, ...], handle_name: str, places: tuple[int, ...] | None) -> Group:
    """Returns the pickled group of these ranks, with the process group of that name in this process."""
    if len(ranks) == 1:
        return Group(name, ranks)
    try:
        handle = dist.distributed_c10d._resolve_process_group(handle_name)  # type: ignore[arg-type]
        among = dist.get_process_group_ranks(handle)
        found = tuple(among[place] for place in places or range(len(among)))
        if found != ranks or dist.get_rank() not in ranks:
            raise ValueError(f"it has {format_ranks(found)}")
    except (RuntimeError, ValueError, LookupError):
        raise ValueError(
            f"this was saved in a {name} group of {format_ranks(ranks)}, which does not exist here: load it on the "
            "same ranks once their groups are made, or save state_dict() and load that into a network built for this "
            "group"
        ) from None
    return Group(name, ranks, ranks.index(dist.get_rank()), handle, places=places, watch=_watch_of(handle))


AnyGroup = Group | dist.ProcessGroup | DeviceMesh  # what a user may pass; ``as_group`` converts it


def as_group(group: AnyGroup | None, name: str = "seq") -> Group:
    """Converts a user's ``group`` argument to a ``Group``.

    Args:
        ``group``: a ``Group``, torch's ``ProcessGroup``, or a one-dimensional ``DeviceMesh``; None stands for this
            process alone.
        ``name``: the name of the group in messages and errors.
    """
    if group is None:
        return Group(name)
    if isinstance(group, Group):
        return group
    if isinstance(group, DeviceMesh):
        group = _line_of(group)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"the {name} group does not contain this process: give each rank the group that it is in")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"a {type(group).__name__} is not a group of ranks: give group=mesh.seq of seqpar.init_mesh, torch's "
            "ProcessGroup, or a one-dimensional DeviceMesh"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    return Group(name, ranks, dist.get_rank(group), group if len(ranks) > 1 else None, watch=_watch_of(group))


def _watch_of(handle: dist.ProcessGroup) -> Watch:
    """Returns the watch of a process group that somebody else has made, over torch's own store."""
    if dist.get_backend(handle) == "fake":
        return Watch(dist.get_rank())
    store = dist.distributed_c10d._get_default_store()
    return Watch(dist.get_rank(), store=dist.PrefixStore(f"seqpar/{handle.group_name}", store))


def _line_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the process group of a one-dimensional mesh."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        one = f"mesh[{names[-1]!r}]" if names else "one with mesh_dim_names=(..., 'seq'), as mesh['seq']"
        raise ValueError(f"expected a one-dimensional DeviceMesh, got one of {mesh.ndim} dimensions: give {one}")
    if mesh.get_coordinate() is None:
        raise ValueError("the DeviceMesh does not contain this process: give each rank the mesh that it is in")
    return mesh.get_group()


def warn_without_group(what: str) -> None:
    """Warns, on the first of several ranks, that ``what`` was built without a group and so shares no tile.

    This is right for plain data parallelism, and a costly mistake if ranks were meant to share a tile.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_rank() == 0:
        warnings.warn(
            f"{what} trains on {dist.get_world_size()} ranks without group=: each computes everything, which is right "
            "if each has its own tile. To share a tile, give group=: mesh.seq of seqpar.start, a ProcessGroup, "
            "or a one-dimensional DeviceMesh",
            stacklevel=3,
        )


@dataclass(frozen=True, eq=False)
class Mesh:
    """All processes as ``data`` x ``pipe`` x ``seq``; as a context manager it leaves the process groups at its end.

    - ``data``: ranks that hold the same part of other tiles
    - ``seq``: ranks of one stage that share a tile
    - ``pipe``: ranks that hold other stages of the same parts; an index in this group is called a place
    - ``stage``: ranks at the same place of their pipe, which hold the same weights: ``data`` x ``seq``
    - ``tile``: ranks of all stages that share a tile: ``pipe`` x ``seq``
    - ``others``: ranks with the same index in other sequence groups: ``data`` x ``pipe``
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
    store: Any = None  # for threads other than the main one; None in a single process

    @property
    def is_first(self) -> bool:
        return self.world.index == 0

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups; several may have the same ranks."""
        return self.world, self.seq, self.data, self.pipe, self.stage, self.tile, self.others

    @property
    def places(self) -> list[int]:
        """Each rank's place in its pipe, in order of world ranks."""
        return [rank // self.seq.size % self.pipe.size for rank in range(self.world.size)]

    def without_stages(self) -> "Mesh":
        """Returns the same ranks as ``data`` x ``seq``, for whole networks; ``data`` is then ``others``."""
        alone = Group("pipe", (self.world.ranks[self.world.index],), watch=self.world.watch)
        return replace(self, data=self.others, pipe=alone, stage=self.world, tile=self.seq)

    def line(self) -> DeviceMesh:
        """Returns all ranks, ``data`` x ``seq``, as torch's one-dimensional ``DeviceMesh``."""
        assert self.world.handle is not None
        return DeviceMesh.from_group(self.world.handle, self.device.type)

    def set_timeout(self, limit_s: float, act: Callable[[str], None] | None = None) -> None:
        """Limits every collective from now on to ``limit_s`` seconds, and reports ranks that exceed it to ``act``.

        All ranks call it once everything has run once, because start-up, compilation and kernel searches take longer
        than anything that follows.
        """
        for group in self.groups:
            if group.handle is not None:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group.handle)
        self.world.watch.begin(limit_s, act)

    def synchronize(self) -> None:
        """Waits until the device has finished all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __enter__(self) -> "Mesh":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.stop()

    def stop(self) -> None:
        """Waits for all ranks and destroys the process groups; without the barrier gloo aborts occasionally."""
        if dist.is_initialized():
            self.world.watch.enter("the end", self.world)
            with self.world.watch.waiting(False):
                dist.all_reduce(torch.zeros(1), group=self.world.handle)  # on the CPU, so gloo even if NCCL is used
                dist.barrier(group=self.world.handle)
            self.world.watch.end()
            dist.destroy_process_group()
            for link in list(links.values()):
                link.memory.close()
            links.clear()
            for group in self.groups:
                group.leave()


def group_of_all() -> Group:
    """Returns the group of all ranks if somebody has initialised torch's process groups, else that of this process."""
    return as_group(dist.group.WORLD if dist.is_initialized() else None)


def seed(number: int) -> None:
    """Seeds Python, NumPy and torch; called with the same number on all ranks, so that they build equal weights."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)
