"""How processes find each other: the store where they meet, each rank's device, and the groups of the mesh."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from seqpar.parallel.launcher import LAZY_GROUPS, SHARE_GPU, Launcher, read_launcher, shared_gpu_settings
from seqpar.parallel.meeting import START_S, Meeting
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.processes import allow_open_files
from seqpar.parallel.roll_call import StartLimit, locate_rank, roll_call
from seqpar.parallel.shared_memory import SharedMemory, link_groups
from seqpar.parallel.watchdog import Watch, format_ranks
from seqpar.text import quantity


def start(
    seqpar: int = 1,
    env: Mapping[str, str] | None = None,
    device: str = "auto",
    timeout_s: float = START_S,
    check: bool = False,
    pipe: int = 1,
    meeting: Meeting | None = None,
) -> Mesh:
    """Sets up the mesh of the processes that torchrun, Slurm or MPI started, or of this process alone.

    Use it as a context manager: at its end all ranks wait for each other and leave. The mesh has the groups ``seq``
    (ranks that share a tile), ``data`` (ranks that hold the same part of other tiles) and ``world``, and those of a
    pipeline (see ``Mesh``); each group has ``index``, ``size`` and ``handle``, torch's process group.

    Args:
        ``seqpar``: number of ranks per sequence group.
        ``env``: the launcher's environment variables; None: those of this process.
        ``device``: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        ``timeout_s``: time limit for the whole start, in seconds.
        ``check``: announce every message and collective before it is sent; slow, but a mismatch raises an error that
            names the ranks.
        ``pipe``: number of places over which a network's stages are spread.
        ``meeting``: the meeting of these processes, if they have already met.
    """
    launcher = read_launcher(os.environ if env is None else env)
    check_seqpar(seqpar, launcher.world, pipe)
    if launcher.world > 1 and dist.is_initialized():
        raise ValueError("torch.distributed is initialised already: start the ranks once and use that mesh throughout, "
                         "or pass torch's groups as group=")  # fmt: skip
    if launcher.warning:
        print(f"warning: {launcher.warning}", file=sys.stderr, flush=True)
    own_device = pick_device(launcher, device)
    until = time.monotonic() + timeout_s
    store = (meeting or Meeting(launcher)).store(timeout_s)
    return join(launcher, store, seqpar, own_device, timeout_s, check, until, pipe)


def init_mesh(
    seq: int = 1, pipe: int = 1, device: str = "auto", timeout_s: float = START_S, check: bool = False
) -> Mesh:
    """Sets up the mesh ``data`` x ``pipe`` x ``seq`` of the processes that torchrun, Slurm or MPI started.

    Alone, a process is a mesh of one rank. Use the mesh as a context manager, or call ``mesh.stop()`` at the end. The
    ranks of ``mesh.seq`` share a tile; those of ``mesh.data`` work on different tiles.

    Args:
        ``seq``: number of ranks that share a tile.
        ``pipe``, ``device``, ``timeout_s``, ``check``: as in ``start``.
    """
    try:
        return start(seq, device=device, timeout_s=timeout_s, check=check, pipe=pipe)
    except ValueError as error:  # which names the argument of ``start``
        raise ValueError(str(error).replace("seqpar=", "seq=")) from error


def check_seqpar(seqpar: int, world: int, pipe: int = 1) -> None:
    """Raises ValueError unless ``seqpar`` times ``pipe`` divides the number of ranks, and names sizes that do."""
    for name, value in (("seqpar", seqpar), ("pipe", pipe)):
        if not isinstance(value, int):
            raise ValueError(f"{name}={value!r}: give a whole number of ranks")
    if pipe != 1:
        if pipe < 1 or seqpar < 1 or world % (pipe * seqpar):
            least = max(1, pipe) * max(1, seqpar)
            raise ValueError(
                f"pipe={pipe} with seqpar={seqpar} does not fit {quantity(world, 'started rank')}: "
                f"start a multiple of {least} ranks, or change one of them"
            )
        return
    if seqpar < 1 or world % seqpar:
        fits = [size for size in range(1, world + 1) if world % size == 0]
        more = f", or start a multiple of {seqpar} ranks" if seqpar > 0 else ""
        raise ValueError(
            f"seqpar={seqpar} does not fit {quantity(world, 'started rank')}: "
            f"use seqpar={' or '.join(map(str, fits))}{more}"
        )


def pick_device(launcher: Launcher, kind: str = "auto") -> torch.device:
    """Returns this rank's device and makes it current: GPU 0 if only one is visible, else that of the local rank.

    - ``kind``: auto, cpu or cuda
    """
    visible = count_gpus(launcher, kind)
    if visible == 0:
        return torch.device("cpu")
    device = torch.device("cuda", 0 if visible == 1 else launcher.local_rank)
    torch.cuda.set_device(device)
    return device


def count_gpus(launcher: Launcher, kind: str = "auto") -> int:
    """Returns the number of GPUs for ranks of this node, 0 if they compute on CPUs; makes none current.

    Raises ``ValueError`` if this rank has no device of the kind.
    """
    if kind not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={kind!r}: choose auto, cpu or cuda (torch also calls AMD's GPUs cuda)")
    visible = torch.cuda.device_count() if kind != "cpu" else 0
    if kind == "cuda" and visible == 0:
        raise ValueError("device='cuda': no GPU is visible; ask the scheduler for one or use device='cpu'")
    if visible > 1 and launcher.local_rank >= visible:
        raise ValueError(
            f"local rank {launcher.local_rank} has no GPU of its own: {visible} are visible and "
            f"{launcher.local_world} ranks run on this node; start at most {visible} ranks per node"
        )
    return visible


def join(
    launcher: Launcher,
    store: dist.Store | None,
    seqpar: int,
    device: torch.device,
    timeout_s: float = START_S,
    check: bool = False,
    until: float | None = None,
    pipe: int = 1,
) -> Mesh:
    """Returns the mesh of ``launcher.world`` processes that meet at ``store``, which is None for a single process.

    - ``until``: the ``time.monotonic`` at which ``timeout_s`` ends, if the meeting has used some of it. Each step gets
      the time that is left, at least a tenth of ``timeout_s``
    """
    until = time.monotonic() + timeout_s if until is None else until
    check_seqpar(seqpar, launcher.world, pipe)
    if store is None:
        alone = _groups(np.zeros((1, 1, 1), int), Group("world"), None)
        alone[0].watch.start_limit_s = timeout_s
        return Mesh(launcher, device, *alone, (launcher.host or socket.gethostname(),))
    allow_open_files(launcher.world)
    on_gpu = device.type == "cuda"
    memory = SharedMemory(launcher.rank, is_offered=not on_gpu)
    own = locate_rank(launcher, device, address=memory.address, sizes=(seqpar, pipe))
    places = roll_call(launcher, store, own, _left_s(until, timeout_s))
    hosts = tuple(place.host for place in places)
    if on_gpu and os.environ.get(SHARE_GPU) == "1":
        os.environ.update(shared_gpu_settings(os.environ, launcher.rank))
    limit = StartLimit(store, launcher.rank, launcher.world, lambda: _left_s(until, timeout_s))
    everyone = tuple(range(launcher.world))
    with limit.making("world", everyone):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("world", store),
            rank=launcher.rank,
            world_size=launcher.world,
            timeout=timedelta(seconds=timeout_s),
            device_id=_eager_device(device, os.environ),
        )
    watch = Watch(launcher.rank, hosts, dist.PrefixStore("watch", store), check)
    watch.start_limit_s = timeout_s
    world = Group("world", everyone, launcher.rank, dist.group.WORLD, watch=watch)
    groups = _groups(np.arange(launcher.world).reshape(-1, pipe, seqpar), world, limit)
    if launcher.rank == 0:
        _warn_of_crossing(hosts, seqpar)
    # not blocked while the main thread waits; made before the first sums, after which the rank that hosts it may leave
    own_store = store.clone() if hasattr(store, "clone") else store
    for group in {id(group.handle): group for group in groups}.values():
        if group.handle is not None:
            first_collective(group, store, device, _left_s(until, timeout_s))
    memory.connect([place.address for place in places], _left_s(until, timeout_s))
    memory.timeout_s = timeout_s
    link_groups(memory, {group.handle.group_name: group.ranks for group in groups if group.handle is not None})
    return Mesh(launcher, device, *groups, hosts, dist.PrefixStore("beside", own_store))


def _eager_device(device: torch.device, env: Mapping[str, str]) -> torch.device | None:
    """Returns the GPU whose groups connect when they are made, one after the other over all ranks.

    Returns None if each group connects at its first message, which disjoint groups do concurrently: faster from
    hundreds of ranks on, but a group that cannot connect is found later.
    """
    return device if device.type == "cuda" and env.get(LAZY_GROUPS) != "1" else None


def _groups(
    ranks: np.ndarray, world: Group, limit: StartLimit | None
) -> tuple[Group, Group, Group, Group, Group, Group, Group]:
    """Returns the groups of a mesh in its order, the world first; ``ranks`` has the axes data, pipe and seq.

    Groups of the same ranks share a process group, except ``pipe``, whose messages overlap with others.
    """
    num_data, pipe, seqpar = ranks.shape
    data = _split("data", ranks.transpose(1, 2, 0).reshape(-1, num_data), world.watch, limit)
    seq = _split("seq", ranks.reshape(-1, seqpar), world.watch, limit)
    if pipe == 1:
        line = Group("pipe", (world.index,), watch=world.watch)
        return world, data, seq, line, world, seq, data
    line = _split("pipe", ranks.transpose(0, 2, 1).reshape(-1, pipe), world.watch, limit)
    stage = _split("stage", ranks.transpose(1, 0, 2).reshape(pipe, -1), world.watch, limit, (data, seq))
    tile = _split("tile", ranks.reshape(num_data, -1), world.watch, limit, (world,))
    others = _split("others", ranks.transpose(2, 0, 1).reshape(seqpar, -1), world.watch, limit, (world,))
    return world, data, seq, line, stage, tile, others


def fake_group(size: int) -> Group:
    """Returns a sequence group in which only the first rank exists: messages go nowhere and bring nothing.

    It serves to measure that rank's own work, and can be made once per process.
    """
    if size == 1:
        return Group("seq")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return Group("seq", tuple(range(size)), 0, dist.group.WORLD)


def _left_s(until: float, timeout_s: float) -> float:
    return max(0.1 * timeout_s, until - time.monotonic())


def _split(name: str, parts: np.ndarray, watch: Watch, limit: StartLimit | None, like: Sequence[Group] = ()) -> Group:
    """Returns the group that this rank is in, among the rows of ``parts``.

    Every rank creates all process groups in the same order, unless a group of ``like`` has the same size: it then has
    the same ranks, because all groups split the ranks evenly and in order.
    """
    mine: Group | None = None
    timeout = timedelta(seconds=watch.start_limit_s)  # torch's default is half an hour
    rows = list(map(tuple, parts.tolist()))
    shared = next((group for group in like if group.ranks in rows), None)
    for ranks in rows:
        handle = None if shared is None else shared.handle
        if len(ranks) > 1 and shared is None:
            assert limit is not None
            with limit.making(name, ranks):
                handle = dist.new_group(list(ranks), timeout=timeout)
        if watch.rank in ranks:
            mine = Group(name, ranks, ranks.index(watch.rank), handle, watch=watch)
    assert mine is not None
    return mine


def _warn_of_crossing(hosts: Sequence[str], seqpar: int) -> None:
    for first in range(0, len(hosts), seqpar):
        inside = list(dict.fromkeys(hosts[first : first + seqpar]))
        if len(inside) > 1:
            print(
                f"warning: the sequence group of ranks {first}…{first + seqpar - 1} spans nodes "
                f"{', '.join(inside)}: every attention layer will use the network. Choose a size that divides the "
                "number of ranks per node.",
                file=sys.stderr,
                flush=True,
            )


def _places_of(device: torch.device) -> tuple[torch.device, ...]:
    """Returns the devices of a group's tensors, in the order in which all ranks try them."""
    return tuple(dict.fromkeys((torch.device("cpu"), device)))


HANG_SHARE = 0.9  # of the time limit: an error that comes earlier is not its expiry


def first_collective(group: Group, store: dist.Store, device: torch.device, timeout_s: float) -> None:
    """Sums over ``group`` for the first time.

    Raises TimeoutError with the missing ranks if that hangs, and ConnectionError with the reason if it fails.
    """
    limit, began = timedelta(seconds=timeout_s), time.monotonic()
    keys = [f"warm/{group}/{rank}" for rank in group.ranks]
    store.set(keys[group.index], "here")
    try:
        store.wait(keys, limit)
        for place in _places_of(device):
            began = time.monotonic()
            work = dist.all_reduce(torch.ones(1, device=place), group=group.handle, async_op=True)
            assert work is not None
            work.wait(limit)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except (dist.DistError, RuntimeError) as error:
        taken_s, lines = time.monotonic() - began, [line for line in str(error).splitlines() if line.strip()]
        if taken_s < HANG_SHARE * timeout_s:  # NCCL gives its reason in the lines after the first
            why = "; ".join(lines[:4])
            raise ConnectionError(f"the first sum over the {group} failed after {taken_s:.1f} s: {why}") from error
        missing = [rank for rank, key in zip(group.ranks, keys) if not store.check([key])]
        why = f"{format_ranks(missing)} never came" if missing else lines[0]
        raise TimeoutError(f"the first sum over the {group} did not finish within {timeout_s:.0f} s: {why}") from None
