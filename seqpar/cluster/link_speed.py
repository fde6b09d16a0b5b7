"""Measures matrix products, collectives and clocks for the planner. Each figure is the slowest rank's.

The smallest collective gives the latency, the largest one, less the latency, the bytes a second that a rank sends: time
= latency + bytes sent / bytes per second, where bytes are what ``Group.traffic`` counts. Where ranks share cores, the
latency is that between pieces of work.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from seqpar.cluster.devices import usable_cores
from seqpar.cluster.torch_setup import set_arithmetic
from seqpar.parallel.collectives import all_gather, all_reduce, exchange_rows
from seqpar.parallel.consensus import gather_texts, max_over_ranks
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.messages import post

KINDS = ("all_gather", "all_to_all", "all_reduce")
OF_PIPE = ("send",)  # what ranks of a pipe do: from one place to the next
SIZES = (2**12, 2**18, 2**22, 2**25)  # bytes that a rank holds
WORK, TIMES = 10, 20  # products between two collectives, and how many of these
PER_CALL_S = 0.5  # larger sizes are left out where one is expected to take longer
GPU_SIDE, CPU_SIDE = 8192, 768  # of the matrices that are multiplied
Collective = Callable[[], object]


def measure_groups(mesh: Mesh, budget_s: float = 20.0) -> dict[str, dict[str, Any]]:
    """Returns latency and bandwidth of each kind of collective by group name; all groups of a name measure at once.

    Of a pipe those of sending to the next place, while the place before sends to this one.
    """
    by_name: dict[str, dict[str, Any]] = {}
    until = time.monotonic() + budget_s
    for group in (mesh.seq, mesh.data, mesh.stage, mesh.world):
        if mesh.world.size == 1 or group.size == 1:
            continue
        twin = next(
            (other for other in (mesh.seq, mesh.data) if other.name in by_name and other.size == group.size), None
        )
        if group.name not in by_name:
            by_name[group.name] = by_name[twin.name] if twin else measure(mesh, group, until)
    if mesh.pipe.size > 1:
        by_name["pipe"] = measure(mesh, mesh.pipe, until, OF_PIPE)
    return by_name


def measure(mesh: Mesh, group: Group, until: float, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Returns the group's size, and for each kind latency_s, bytes_per_s and the seconds by bytes sent.

    After ``until``, on the monotonic clock, two sizes are enough.
    """
    result: dict[str, Any] = {"size": group.size}
    for kind in kinds:
        points: list[tuple[int, float]] = []
        for size in SIZES:
            too_long = len(points) > 1 and (8 * points[-1][1] > PER_CALL_S or time.monotonic() > until)
            if max_over_ranks(int(too_long), mesh.world):
                break
            points.append(_point(mesh, group, kind, size))
        result[kind] = fit(points)
        if _ranks_share_cores(mesh):
            result[kind]["latency_s"] = max(result[kind]["latency_s"], _latency_between_work(mesh, group, kind))
    return result


def _ranks_share_cores(mesh: Mesh) -> bool:
    """Returns whether there are more ranks on a host than cores, so that some wait while others compute."""
    return mesh.device.type == "cpu" and mesh.world.size > max(1, len({*mesh.hosts})) * usable_cores()


def _latency_between_work(mesh: Mesh, group: Group, kind: str) -> float:
    """Returns by how much a small collective lengthens work on cores that ranks share.

    Who comes to it first leaves its core to others, and is late for what follows: a collective alone does not show it.
    """
    call, side = _collective(mesh, group, kind, SIZES[0]), torch.randn(256, 256)

    def work() -> None:
        for _ in range(WORK):
            side @ side

    def between() -> None:
        work()
        call()

    def seconds(act: Collective) -> float:
        max_over_ranks(0, mesh.world)
        began = time.perf_counter()
        for _ in range(TIMES):
            act()
        return slowest(time.perf_counter() - began, mesh) / TIMES

    alone = min(seconds(work) for _ in range(3))
    return max(0.0, statistics.median(seconds(between) for _ in range(3)) - alone)


def fit(points: list[tuple[int, float]]) -> dict[str, Any]:
    """Fits latency and bandwidth to points (bytes sent, seconds), smallest first."""
    latency, (sent, seconds) = min(seconds for _, seconds in points), points[-1]
    moving = seconds - latency
    return {
        "latency_s": latency,
        "bytes_per_s": sent / (moving if moving > 0.1 * seconds else seconds),
        "seconds": [[sent, seconds] for sent, seconds in points],
    }


def _point(mesh: Mesh, group: Group, kind: str, size: int) -> tuple[int, float]:
    """Returns the bytes that a rank sends in one collective of ``size`` bytes, and its seconds."""
    call = _collective(mesh, group, kind, size)
    before = group.traffic[kind]
    call()
    sent = group.traffic[kind] - before
    return sent, slowest(time_of(call, mesh), mesh)


def _collective(mesh: Mesh, group: Group, kind: str, size: int) -> Collective:
    if kind == "send":
        return lambda: send_to_next(mesh, group, size, kind)
    rows = torch.zeros(max(1, size // 4 // group.size), group.size, device=mesh.device).t().contiguous()
    if kind == "all_gather":
        return lambda: all_gather(rows, group, 0, [group.size] * group.size, kind)
    if kind == "all_to_all":
        return lambda: exchange_rows(rows, group, [1] * group.size, [1] * group.size, kind)
    return lambda: all_reduce(rows, group, kind)


def send_to_next(mesh: Mesh, group: Group, size: int, kind: str) -> None:
    """Sends bytes to the next place of a group (the last one to the first), and waits for the same number."""
    outgoing = torch.zeros(size, dtype=torch.uint8, device=mesh.device)
    incoming = torch.empty_like(outgoing)
    following, before = (group.index + 1) % group.size, (group.index - 1) % group.size
    post({following: outgoing}, {before: incoming}, group, kind).wait()


def time_of(call: Collective, mesh: Mesh, budget_s: float = 0.1) -> float:
    """Returns the median seconds of the calls that fit into the budget, equally many on all ranks."""
    first = _once(call, mesh)
    repeats = max(1, min(20, int(budget_s * 1e9 / max(1, max_over_ranks(int(first * 1e9), mesh.world)))))
    return statistics.median(_once(call, mesh) for _ in range(repeats))


def _once(call: Collective, mesh: Mesh) -> float:
    mesh.synchronize()
    began = time.perf_counter()
    call()
    mesh.synchronize()
    return time.perf_counter() - began


def slowest(seconds: float, mesh: Mesh) -> float:
    """Returns the slowest rank's seconds."""
    return max_over_ranks(int(seconds * 1e9), mesh.world) / 1e9


def matmul_speeds(mesh: Mesh) -> dict[str, float]:
    """Returns this rank's floating-point operations a second in matrix products, by the numbers' type."""
    on_gpu = mesh.device.type == "cuda"
    side, speeds = GPU_SIDE if on_gpu else CPU_SIDE, {}
    kinds = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}
    for name, dtype in kinds.items() if on_gpu else (("float32", torch.float32),):
        set_arithmetic(name)
        a = torch.randn(side, side, device=mesh.device, dtype=dtype)
        a @ a
        speeds[name] = 2 * side**3 / time_of(partial(torch.matmul, a, a), mesh, 0.3)
    return speeds


def clock_offsets(mesh: Mesh, rounds: int = 5) -> list[float]:
    """Returns how many seconds each rank's clock is ahead of the first one's, to within the time of a collective."""
    offsets = []
    for _ in range(rounds):
        max_over_ranks(0, mesh.world)
        clocks = [float(text) for text in gather_texts(repr(time.time()), mesh.world)]
        offsets.append([clock - clocks[0] for clock in clocks])
    return [statistics.median(of_rank) for of_rank in zip(*offsets)]
