"""What a rank's device can do: makers' figures with the share of them that is usually reached, or measured ones.

A rank is one GPU, one die of an MI250X, or its share of this machine's cores.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from seqpar.attention.cost_model import CPU, Machine
from seqpar.launch.hardware.operations import ATTENTION, CONVOLUTION, KINDS, MATMUL, OTHER, Operation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Link:
    """Bytes a second that a rank sends to the others of a group, and seconds that a message takes beside."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Device:
    """A rank's memory in bytes, operations a second by precision, and how it reaches others.

    ``shares`` of ``peak`` are what each kind of operation reaches; ``bandwidth`` is its memory's. ``links`` are by
    group size, up to ``node`` ranks, ``far`` beyond. ``taken`` bytes, and ``slack`` of the rest, are no tensors'.
    ``cores`` of a machine are shared by its ranks, as its memory is; 0: a rank has a device of its own.
    """

    name: str
    memory: float
    peak: Mapping[str, float]
    shares: Mapping[str, float]
    bandwidth: float
    links: Mapping[int, Link]
    far: Link
    node: int = 8
    taken: float = 1.0 * GIB
    slack: float = 0.05
    each: float = 5e-6  # seconds that starting an operation takes
    cores: int = 0
    part: float = 1.0  # of the cores a rank has so many
    tried: Callable[[Operation], float] | None = None  # operations a second of a convolution or attention on a core
    told: str = "the maker's figures"

    @property
    def on_gpu(self) -> bool:
        return not self.cores

    def of(self, ranks: int) -> "Device":
        """Returns what one of so many ranks has."""
        if not self.cores:
            return self
        part = self.cores / ranks
        peak = {name: rate * part for name, rate in self.peak.items()}
        return replace(self, memory=self.memory / ranks, peak=peak, bandwidth=self.bandwidth * part, part=part)

    def link(self, size: int) -> Link:
        """Returns how a rank reaches the others of a group of that size."""
        if size > self.node:
            return self.far
        return self.links[min((known for known in self.links if known >= size), default=max(self.links))]

    def machine(self, size: int, precision: str) -> Machine:
        """Returns what the choice of an attention strategy looks at."""
        near, far = self.link(min(size, self.node)), self.far
        rate = self.peak[precision] * self.shares[ATTENTION]
        return Machine(near.bandwidth, near.latency, rate, self.on_gpu, self.node, far.bandwidth)

    def clock(self, precision: str) -> Callable[[Operation], float]:
        """Returns the seconds of an operation: those of its arithmetic or of its memory, whichever is longer."""
        rates = {kind: self.peak[precision] * self.shares[kind] for kind in KINDS if kind != OTHER}

        def seconds(done: Operation) -> float:
            if done.kind in (CONVOLUTION, ATTENTION) and self.tried is not None:
                return done.count / (self.tried(done) * self.part)
            arithmetic = done.count / rates[done.kind] if done.count else 0.0
            return max(arithmetic, done.size / self.bandwidth) + self.each

        return seconds


def _gpu(
    name: str, memory: float, peak: tuple[float, float, float], bandwidth: float, links: dict[int, float], far: float
) -> Device:
    """Of peaks in fp32, bf16 and fp64; GPUs reach half of them in large products, less elsewhere."""
    rates = dict(zip(("fp32", "bf16", "fp64"), peak))
    reached = {size: Link(rate, 2e-5) for size, rate in links.items()}
    shares = {MATMUL: 0.55, CONVOLUTION: 0.35, ATTENTION: 0.40}
    return Device(name, memory, rates, shares, 0.8 * bandwidth, reached, Link(far, 4e-5))


DEVICES: dict[str, Device] = {
    "mi250x": _gpu(  # one die; links of a node's dies are 4, 2 or 1 wide
        "MI250X GCD", 64 * GIB, (47.9e12, 191.5e12, 47.9e12), 1.6e12, {2: 148e9, 4: 77e9, 8: 39e9}, 11.7e9
    ),
    "a100": _gpu("A100 80 GB", 80 * GB, (19.5e12, 312e12, 19.5e12), 2.0e12, {8: 240e9}, 23e9),
    "h100": _gpu("H100 80 GB", 80 * GB, (67e12, 989e12, 67e12), 3.35e12, {8: 360e9}, 48e9),
    "h200": _gpu("H200 141 GB", 141 * GB, (67e12, 989e12, 67e12), 4.8e12, {8: 360e9}, 48e9),
}


def device_here(wish: str = "auto") -> Device:
    """Returns the device that training would use here, the same on all ranks: memory in whole GiB, nothing measured.

    How quick it is, is the maker's word, or a guess where the device is not known.
    """
    if wish == "cpu" or not torch.cuda.is_available():
        return cpu(dict.fromkeys(KINDS, CPU.flops) | {OTHER: 1e10}, "not measured")
    found = torch.cuda.get_device_properties(0)
    return replace(known(found.name) or DEVICES["a100"], name=found.name, memory=float(found.total_memory // GIB * GIB))


def known(name: str) -> Device | None:
    """Returns the GPU that torch calls by such a name; an MI250X shows as two."""
    return next((device for key, device in DEVICES.items() if key in name.lower().replace(" ", "")), None)


def cpu(rates: Mapping[str, float], told: str) -> Device:
    """Returns this machine by one core's rates."""
    peak = rates[MATMUL]
    link = Link(CPU.bandwidth, CPU.latency)
    return Device(
        "this CPU",
        float(_memory_here() // GIB * GIB),
        dict.fromkeys(DTYPES, peak),
        {kind: rates[kind] / peak for kind in (MATMUL, CONVOLUTION, ATTENTION)},
        rates[OTHER],
        {CPU.node: link},
        link,
        CPU.node,
        taken=0.4 * GIB,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        told=told,
    )


def _memory_here() -> int:
    """Returns this machine's bytes, or what the container may use of them."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return whole


def measured(path: str, base: Device, precision: str) -> Device:
    """Returns the device with what the doctor measured and wrote: memory, matrix products, ranks of a node, links."""
    try:
        found = json.loads(Path(path).read_text())
        rates, world, nodes = found["matmul_flops_per_s"], int(found.get("world", 1)), int(found.get("nodes", 1))
        groups = {name: found["groups"][name] for name in ("data", "world", "seq") if name in found.get("groups", {})}
        links = {int(group["size"]): _link(group) for group in groups.values() if group["size"] > 1}
        rate = rates.get(str(DTYPES[precision]).removeprefix("torch."), 0.0) if isinstance(rates, dict) else rates
        memory = float(found.get("memory_bytes", 0))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--measured {path} is not what launch/doctor.py writes as JSON: {error}") from None
    shares = base.shares
    if rate:  # what it measured of products holds for the rest in proportion
        of_a_core = world / base.cores if base.cores else 1.0
        times = rate * of_a_core / (base.peak[precision] * base.shares[MATMUL])
        shares = {kind: share * times for kind, share in base.shares.items()}
    crosses = nodes > 1 and "world" in groups
    return replace(
        base,
        node=world // nodes if world > 1 and (crosses or not base.cores) else base.node,
        shares=shares,
        memory=memory if memory and not base.cores else base.memory,
        links=links or base.links,
        far=_link(groups["world"]) if crosses else base.far,
        told=f"measured, {path}",
    )


def _link(group: Mapping[str, Any]) -> Link:
    """Returns the slowest of a group's collectives; one of them is a message to each of the others."""
    kinds = [group[kind] for kind in ("all_gather", "all_to_all", "all_reduce") if kind in group]
    latency = max(float(kind["latency_s"]) for kind in kinds) / max(int(group["size"]) - 1, 1)
    return Link(min(float(kind["bytes_per_s"]) for kind in kinds), latency)
