"""What a rank's device can do, by its maker or measured; kinds of operations and their cost."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from seqpar.attention.cost_model import CPU, Machine
from seqpar.cluster.host_memory import whole_memory
from seqpar.data.files import read_whole

MATMUL, CONVOLUTION, ATTENTION, OTHER = KINDS = ("matmul", "convolution", "attention", "other")


@dataclass(frozen=True)
class Operation:
    """Calls of a torch operator, ``times`` of them: each ``count`` floating-point operations, and ``size`` bytes read
    and written."""

    kind: str
    count: float
    size: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: int = 1


def operations_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, float]:
    """Returns the kind of an operator's call and its floating-point operations."""
    packet = func._overloadpacket
    name = packet.__name__
    if name.startswith("_scaled_dot_product"):
        backward = "backward" in name
        q, k = args[1:3] if backward else args[:2]
        return ATTENTION, (10.0 if backward else 4.0) * q.numel() * k.shape[2]
    if packet in flop_registry:
        kind = CONVOLUTION if "conv" in name else MATMUL
        return kind, float(flop_registry[packet](*args, **kwargs, out_val=result))
    return OTHER, 0.0


DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
GB, MIB, GIB = 10**9, 2**20, 2**30


@dataclass(frozen=True)
class Link:
    """How a rank reaches the others of a group: bytes a second, and seconds of latency for each exchange.

    ``hop``: seconds that each further message of an exchange adds; None: as many as the first one's.
    """

    bandwidth: float
    latency: float
    hop: float | None = None

    def seconds(self, sent: float, exchanges: float, messages: float) -> float:
        """Returns the seconds of exchanges that send ``sent`` bytes in ``messages`` messages altogether."""
        hop = self.latency if self.hop is None else self.hop
        return sent / self.bandwidth + exchanges * self.latency + (messages - exchanges) * hop


@dataclass(frozen=True)
class Device:
    """A rank's memory in bytes, its operations a second by precision, and its links to other ranks.

    Attributes:
        peak: operations a second by precision.
        shares: the share of ``peak`` that each kind of operation reaches.
        bandwidth: bytes a second of its memory.
        links: by the size of the group, up to ``node`` ranks; ``far`` is the link beyond.
        reserved_bytes: memory that libraries take: a GPU's context, and workspaces of its convolutions and products.
        group_bytes: memory that they take for each group of several ranks that this one is in.
        fragmentation: memory that the allocator loses, as a share of the tensors'.
        launch_seconds: time to start one operation.
        cores: of the machine whose ranks share them, and its memory; 0: each rank has a device of its own.
        share_of_cores: how many of them this rank has.
        measured_rate: returns operations a second of a convolution or an attention on one core; None: use ``peak``.
        source: where the figures come from, in words.
    """

    name: str
    memory: float
    peak: Mapping[str, float]
    shares: Mapping[str, float]
    bandwidth: float
    links: Mapping[int, Link]
    far: Link
    node: int = 8
    reserved_bytes: float = 2.0 * GIB  # this and the share below meet what nnU-Net publishes of its networks
    group_bytes: float = 0.35 * GIB
    fragmentation: float = 0.10
    launch_seconds: float = 5e-6
    cores: int = 0
    share_of_cores: float = 1.0
    measured_rate: Callable[[Operation], float] | None = None
    source: str = "the maker's figures"

    @property
    def on_gpu(self) -> bool:
        return not self.cores

    def of(self, ranks: int) -> "Device":
        """Returns what each of ``ranks`` ranks has."""
        if not self.cores:
            return self
        cores = self.cores / ranks
        return replace(
            self,
            memory=self.memory / ranks,
            peak={name: rate * cores for name, rate in self.peak.items()},
            bandwidth=self.bandwidth * cores,
            share_of_cores=cores,
        )

    def in_groups(self, sizes: Sequence[int]) -> "Device":
        """Returns the device with what libraries take of its memory for groups of these sizes."""
        taken = self.group_bytes * sum(size > 1 for size in sizes)
        return replace(self, reserved_bytes=self.reserved_bytes + taken, group_bytes=0.0)

    def link(self, size: int) -> Link:
        """Returns the link between ranks of a group of that size."""
        if size > self.node:
            return self.far
        return self.links[min((known for known in self.links if known >= size), default=max(self.links))]

    def machine(self, size: int, precision: str) -> Machine:
        """Returns what the choice of an attention strategy depends on."""
        near, far = self.link(min(size, self.node)), self.far
        rate = self.peak[precision] * self.shares[ATTENTION]
        return Machine(near.bandwidth, near.latency, rate, self.on_gpu, self.node, far.bandwidth)

    def clock(self, precision: str) -> "Clock":
        """Returns a function from an operation to its seconds: of arithmetic or of memory, whichever takes longer."""
        rates = tuple(self.peak[precision] * self.shares[kind] if kind != OTHER else 0.0 for kind in KINDS)
        return Clock(rates, self.bandwidth, self.launch_seconds, self.measured_rate, self.share_of_cores)


@dataclass(frozen=True)
class Clock:
    """Tells the seconds of operations; clocks of equal figures are equal, so that what they timed can be kept.

    ``rates`` are operations a second of each of ``KINDS``; the others are those of ``Device``.
    """

    rates: tuple[float, ...]
    bandwidth: float
    launch_seconds: float
    measured_rate: Callable[[Operation], float] | None = None
    share_of_cores: float = 1.0

    def __call__(self, operation: Operation) -> float:
        if operation.kind in (CONVOLUTION, ATTENTION) and self.measured_rate is not None:
            return operation.count / (self.measured_rate(operation) * self.share_of_cores)
        arithmetic = operation.count / self.rates[KINDS.index(operation.kind)] if operation.count else 0.0
        return max(arithmetic, operation.size / self.bandwidth) + self.launch_seconds


def _gpu(
    name: str,
    memory: float,
    peak: tuple[float, float, float, float],
    bandwidth: float,
    links: dict[int, float],
    far: float,
) -> Device:
    """Returns a GPU by its peaks in fp32, tf32, bf16, fp64: large products reach half of them, other kinds less.

    A hop is what short messages take from rank to rank in a ring: NCCL's own model has 0.5 to 0.9 us in a node, 2.7 us
    to the next one, and so 1.1 us in the mean where a node has 8 ranks.
    """
    rates = dict(zip(("fp32", "tf32", "bf16", "fp64"), peak))
    near = {size: Link(rate, 2e-5, 1e-6) for size, rate in links.items()}
    shares = {MATMUL: 0.55, CONVOLUTION: 0.35, ATTENTION: 0.40}
    return Device(name, memory, rates, shares, 0.8 * bandwidth, near, Link(far, 4e-5, 1e-6))


DEVICES: dict[str, Device] = {
    "mi250x": _gpu(  # one die; links of a node's dies are 4, 2 or 1 wide
        "MI250X GCD", 64 * GIB, (47.9e12, 47.9e12, 191.5e12, 47.9e12), 1.6e12, {2: 148e9, 4: 77e9, 8: 39e9}, 11.7e9
    ),
    "a100": _gpu("A100", 80 * GB, (19.5e12, 156e12, 312e12, 19.5e12), 2.0e12, {8: 240e9}, 23e9),
    "h100": _gpu("H100", 80 * GB, (67e12, 494e12, 989e12, 67e12), 3.35e12, {8: 360e9}, 48e9),
    "h200": _gpu("H200", 141 * GB, (67e12, 494e12, 989e12, 67e12), 4.8e12, {8: 360e9}, 48e9),
}


def device_here(device: str = "auto") -> Device:
    """Returns the device that training would use here, the same on all ranks: memory in whole GiB, nothing measured.

    Its speed is the maker's figure, or a guess where torch's name of it is not known. ``device`` is the flag of train.
    """
    if device == "cpu" or not torch.cuda.is_available():
        return cpu(dict.fromkeys(KINDS, CPU.flops) | {OTHER: 1e10}, "not measured")
    gpu = torch.cuda.get_device_properties(0)
    return replace(gpu_by_name(gpu.name) or DEVICES["a100"], name=gpu.name, memory=float(gpu.total_memory // GIB * GIB))


def gpu_by_name(name: str) -> Device | None:
    """Returns the GPU that torch calls by such a name; an MI250X shows as two devices."""
    return next((device for key, device in DEVICES.items() if key in name.lower().replace(" ", "")), None)


def cpu(rates: Mapping[str, float], source: str) -> Device:
    """Returns this machine by one core's rates: operations a second by kind, and of ``OTHER`` bytes a second."""
    peak = rates[MATMUL]
    link = Link(CPU.bandwidth, CPU.latency)
    return Device(
        "this CPU",
        float(whole_memory() // GIB * GIB),
        dict.fromkeys(DTYPES, peak),
        {kind: rates[kind] / peak for kind in (MATMUL, CONVOLUTION, ATTENTION)},
        rates[OTHER],
        {CPU.node: link},
        link,
        CPU.node,
        reserved_bytes=0.4 * GIB,
        fragmentation=0.05,
        group_bytes=0.0,
        cores=usable_cores(),
        source=source,
    )


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_devices(on_gpu: bool) -> int:
    """Returns how many GPUs, or cores, this machine has for this process."""
    return torch.cuda.device_count() if on_gpu else usable_cores()


def measured(path: str, base: Device, precision: str) -> Device:
    """Returns ``base`` with what the doctor's JSON file says of memory, matrix products, ranks of a node and links."""
    try:
        record = json.loads(read_whole(Path(path)))
        rates, (world, nodes) = record["matmul_flops_per_s"], (int(record.get(name, 1)) for name in ("world", "nodes"))
        if not 1 <= nodes <= world:
            raise ValueError(f"world is {world} and nodes {nodes}")
        groups = {name: record["groups"][name] for name in ("data", "world", "seq") if name in record.get("groups", {})}
        links = {int(group["size"]): _slowest_link(group) for group in groups.values() if group["size"] > 1}
        name = precision if precision == "tf32" else str(DTYPES[precision]).removeprefix("torch.")
        rate = rates.get(name, 0.0) if isinstance(rates, dict) else rates
        rate, memory = _of_speed(rate or 0.0, zero=True), _of_speed(record.get("memory_bytes", 0), zero=True)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(f"--measured {path} is not what launch/doctor.py writes as JSON: {error}") from None
    if other := _measured_elsewhere(base, str(record.get("device", "")), rates):
        raise ValueError(f"--measured {path} was measured on {other}, and the plan is for {base.name}: use --device")
    shares = base.shares
    if rate:  # other kinds of operations are scaled as matrix products are
        ranks_a_core = world / base.cores if base.cores else 1.0
        times = rate * ranks_a_core / (base.peak[precision] * base.shares[MATMUL])
        shares = {kind: share * times for kind, share in base.shares.items()}
    crosses = nodes > 1 and "world" in groups
    return replace(
        base,
        node=world // nodes if world > 1 and (crosses or not base.cores) else base.node,
        shares=shares,
        memory=memory if memory and not base.cores else base.memory,
        links=links or base.links,
        far=_slowest_link(groups["world"]) if crosses else base.far,
        source=f"measured, {path}",
    )


def _measured_elsewhere(base: Device, made: str, rates: Any) -> str:
    """Returns on what else than ``base`` the doctor has measured, as far as that is known; else "".

    - ``made``: what torch calls the device; ``rates``: of matrix products by type, which on a CPU has a single one
    """
    known = gpu_by_name(made)
    if base.on_gpu:
        is_cpu = known is None and isinstance(rates, dict) and set(rates) == {"float32"}
        return f"a CPU ({made})" if is_cpu else made if known and known.name not in base.name else ""
    return made if known else ""


def _slowest_link(group: Mapping[str, Any]) -> Link:
    """Returns the slowest of a group's collectives; each of them sends a message to every other rank."""
    kinds = [group[kind] for kind in ("all_gather", "all_to_all", "all_reduce") if kind in group]
    latency = max(_of_speed(kind["latency_s"]) for kind in kinds) / max(int(group["size"]) - 1, 1)
    return Link(min(_of_speed(kind["bytes_per_s"]) for kind in kinds), latency)


_TOO_MUCH = 1e24  # of bytes, operations or seconds: nothing has that


def _of_speed(value: Any, zero: bool = False) -> float:
    """Returns a measured number; raises ValueError for one that nothing can have; ``zero``: 0 if it is not known."""
    number = float(value)
    if not (number < _TOO_MUCH and (number > 0 or zero and number == 0)):
        raise ValueError(f"{value} is no speed, time or size")
    return number
