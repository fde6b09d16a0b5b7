"""Starts and stops processes, picks the device, builds the groups ``data`` x ``seq``, seeds.

``seq`` is innermost: consecutive ranks share a tile, so that a sequence group stays inside a node. A group of
one needs no process group; everything above takes the same path with it.
"""

import os
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from seqpar.environment import Start, read_start
from seqpar.watchdog import Watch, these

START_S = 900.0  # hundreds of nodes that read one file system have been seen to need 600 s


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

    begin: Start
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

    def hasten(self, limit_s: float, act: Callable[[str], None] | None = None) -> None:
        """From now on a rank that keeps the others waiting longer than this ends the run, and is named to ``act``.

        Called by all ranks once everything has run once: starting, compiling and searching for kernels take longer
        than anything that comes later.
        """
        for group in (self.world, self.seq, self.data):
            if group.handle is not None:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit_s), group.handle)
        self.world.watch.begin(limit_s, act)

    def settle(self) -> None:
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
            dist.all_reduce(torch.zeros(1), group=self.world.handle)  # on the CPU: gloo, also beside nccl
            dist.barrier(group=self.world.handle)
            self.world.watch.end()
            dist.destroy_process_group()
            for group in (self.world, self.data, self.seq):
                group.leave()


def start(
    seqpar: int = 1,
    env: Mapping[str, str] | None = None,
    device: str = "auto",
    timeout_s: float = START_S,
    check: bool = False,
) -> Mesh:
    """Returns the mesh of the processes that torchrun, Slurm or MPI started, or of this one alone.

    ``check`` announces every message and collective before it is sent: slow, and names ranks that differ.
    """
    begin = read_start(os.environ if env is None else env)
    check_seqpar(seqpar, begin.world)
    if begin.warning:
        print(f"warning: {begin.warning}", file=sys.stderr, flush=True)
    place = pick_device(begin, device)
    until = time.monotonic() + timeout_s
    store = _meet(begin, timeout_s) if begin.world > 1 else None
    return join(begin, store, seqpar, place, timeout_s, check, until)


def check_seqpar(seqpar: int, world: int) -> None:
    """Refuses a sequence group that does not fit the ranks, naming the sizes that do."""
    if seqpar < 1 or world % seqpar:
        fits = [size for size in range(1, world + 1) if world % size == 0]
        more = f", or start a multiple of {seqpar} ranks" if seqpar > 0 else ""
        raise ValueError(
            f"--seqpar {seqpar} does not fit the {world} started rank(s): "
            f"use --seqpar {' or '.join(map(str, fits))}{more}"
        )


def pick_device(begin: Start, wish: str = "auto") -> torch.device:
    """Returns this rank's device and makes it current: index 0 where one is visible, else the local rank."""
    if wish not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device {wish}: choose auto, cpu or cuda (cuda is also AMD's name in torch)")
    visible = torch.cuda.device_count() if wish != "cpu" else 0
    if wish == "cuda" and visible == 0:
        raise ValueError("--device cuda: this process sees no GPU; ask the scheduler for one or use --device cpu")
    if visible == 0:
        return torch.device("cpu")
    if visible > 1 and begin.local_rank >= visible:
        raise ValueError(
            f"local rank {begin.local_rank} has no GPU of its own: {visible} are visible and "
            f"{begin.local_world} ranks run on this node; start at most {visible} ranks a node"
        )
    place = torch.device("cuda", 0 if visible == 1 else begin.local_rank)
    torch.cuda.set_device(place)
    return place


def _meet(begin: Start, timeout_s: float) -> dist.Store:
    limit = timedelta(seconds=timeout_s)
    host = begin.rank == 0 and not begin.agent_store
    _check_name(begin)
    if not host:
        _await_listener(begin, timeout_s)
    try:
        meeting = dist.TCPStore(begin.address, begin.port, begin.world, host, timeout=limit, wait_for_workers=False)
    except (dist.DistError, RuntimeError) as error:
        raise ConnectionError(
            f"rank {begin.rank} ({begin.by}): no meeting at {begin.address}:{begin.port}: another job may use this "
            f"port, or MASTER_ADDR is not rank 0's; export another MASTER_PORT ({str(error).splitlines()[0]})"
        ) from None
    return dist.PrefixStore(f"seqpar/{begin.job}/{begin.attempt}", meeting)


def _check_name(begin: Start) -> None:
    """Refuses an address that this host cannot look up, which torch would try for minutes."""
    try:
        socket.getaddrinfo(begin.address, begin.port)
    except OSError as error:
        raise ConnectionError(
            f"rank {begin.rank} ({begin.by}) on {socket.gethostname()} does not know the host {begin.address} "
            f"({error.strerror}): export MASTER_ADDR=$(hostname -i) on the node of rank 0, before srun"
        ) from None


def _await_listener(begin: Start, timeout_s: float) -> None:
    """Waits until rank 0 listens; torch's own client would wait twice as long, and fill the log meanwhile."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((begin.address, begin.port), timeout=max(0.1, until - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"rank {begin.rank} ({begin.by}): rank 0 does not answer at {begin.address}:{begin.port} within "
                    f"{timeout_s:.0f} s; check that rank 0 started, and MASTER_ADDR and MASTER_PORT ({error.strerror})"
                ) from None
            time.sleep(0.1)


def join(
    begin: Start,
    store: dist.Store | None,
    seqpar: int,
    device: torch.device,
    timeout_s: float = START_S,
    check: bool = False,
    until: float | None = None,
) -> Mesh:
    """Returns the mesh of ``begin.world`` processes that meet at ``store`` (None where there is but one).

    ``until``: when the time is over that was there for meeting too; each step gets what is left, a tenth at least.
    """
    until = time.monotonic() + timeout_s if until is None else until
    check_seqpar(seqpar, begin.world)
    if store is None:
        return Mesh(begin, device, Group("world"), Group("data"), Group("seq"), (begin.host or socket.gethostname(),))
    hosts = _roll_call(begin, store, _left_s(until, timeout_s))
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=dist.PrefixStore("world", store),
        rank=begin.rank,
        world_size=begin.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    everyone = tuple(range(begin.world))
    watch = Watch(begin.rank, hosts, dist.PrefixStore("watch", store), check)
    watch.start_limit_s = timeout_s
    world = Group("world", everyone, begin.rank, dist.group.WORLD, watch=watch)
    seq = _split("seq", [everyone[at : at + seqpar] for at in range(0, begin.world, seqpar)], watch)
    data = _split("data", [everyone[at::seqpar] for at in range(seqpar)], watch)
    if begin.rank == 0:
        _warn_of_crossing(hosts, seqpar)
    groups = (world, seq, data)
    warm = {g.name: warm_up(g, store, device, _left_s(until, timeout_s)) for g in groups if g.handle is not None}
    own = store.clone() if hasattr(store, "clone") else store  # never busy with what the main thread waits for
    return Mesh(begin, device, world, data, seq, hosts, warm, dist.PrefixStore("beside", own))


def pretend(size: int) -> Group:
    """Returns a sequence group of which only the first rank is there: messages go nowhere and bring nothing.

    It is for measuring that rank's own work, and can be had once in a process.
    """
    if size == 1:
        return Group("seq")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return Group("seq", tuple(range(size)), 0, dist.group.WORLD)


def _roll_call(begin: Start, store: dist.Store, timeout_s: float) -> tuple[str, ...]:
    """Returns every rank's host; names those that never came."""
    keys = [f"host/{rank}" for rank in range(begin.world)]
    store.set(keys[begin.rank], begin.host or socket.gethostname())
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except (dist.DistError, RuntimeError):
        try:
            missing = these([rank for rank, key in enumerate(keys) if not store.check([key])])
        except (dist.DistError, RuntimeError):  # it counted the ranks, gave up first and names them
            missing = "some, which rank 0 names,"
        raise TimeoutError(
            f"of {begin.world} ranks, {missing} did not start within {timeout_s:.0f} s; "
            "look at their logs, or start fewer"
        ) from None
    return tuple(store.get(key).decode() for key in keys)


def _left_s(until: float, timeout_s: float) -> float:
    return max(0.1 * timeout_s, until - time.monotonic())


def _split(name: str, parts: Sequence[Sequence[int]], watch: Watch) -> Group:
    """Returns the one of ``parts`` that holds this rank; every rank makes all process groups, in one order."""
    mine: Group | None = None
    limit = timedelta(seconds=watch.start_limit_s)  # else torch's, of half an hour
    for ranks in parts:
        handle = dist.new_group(list(ranks), timeout=limit) if len(ranks) > 1 else None
        if watch.rank in ranks:
            mine = Group(name, tuple(ranks), list(ranks).index(watch.rank), handle, watch=watch)
    assert mine is not None
    return mine


def _warn_of_crossing(hosts: Sequence[str], seqpar: int) -> None:
    for first in range(0, len(hosts), seqpar):
        inside = list(dict.fromkeys(hosts[first : first + seqpar]))
        if len(inside) > 1:
            print(
                f"warning: the sequence group of ranks {first}…{first + seqpar - 1} crosses nodes "
                f"{', '.join(inside)}: every attention layer will use the network. Let --seqpar divide the "
                "ranks of a node.",
                file=sys.stderr,
                flush=True,
            )


def warm_up(group: Group, store: dist.Store, device: torch.device, timeout_s: float) -> float:
    """Returns the seconds of a first small sum over ``group``; names the group and the ranks that hang it."""
    limit = timedelta(seconds=timeout_s)
    keys = [f"warm/{group}/{rank}" for rank in group.ranks]
    store.set(keys[group.index], "here")
    began = time.perf_counter()
    try:
        store.wait(keys, limit)
        for place in {torch.device("cpu"), device}:
            work = dist.all_reduce(torch.ones(1, device=place), group=group.handle, async_op=True)
            assert work is not None
            work.wait(limit)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (dist.DistError, RuntimeError) as error:
        missing = [rank for rank, key in zip(group.ranks, keys) if not store.check([key])]
        why = f"{these(missing)} never came" if missing else str(error).splitlines()[0]
        raise TimeoutError(f"the {group} hangs in its first sum ({timeout_s:.0f} s): {why}") from None
    return time.perf_counter() - began


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
        dist.broadcast(tensor.data, group.ranks[0], group=group.handle)
