"""Refuses a training that needs more memory than its hosts have free, before its first step.

A GPU's allocator raises an error when memory runs out; on a CPU, allocation succeeds and the system later kills the
process without a message.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

from seqpar.cluster.devices import GIB, MIB, device_here
from seqpar.cluster.exit_codes import TooLittleMemory
from seqpar.cluster.host_memory import Memory, memory_here
from seqpar.parallel.consensus import gather_texts, run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.planner.batch_size import runs_over_micro_batch
from seqpar.planner.fit import advice, largest_batch
from seqpar.planner.memory_saving import flags_of, memory_savings
from seqpar.planner.needs import Plan, RunToPlan, plan, plan_complete_config
from seqpar.settings.config import Config


def refuse_beyond_free(config: Config, mesh: Mesh, channels: int, outputs: int) -> None:
    """Raises the same ``TooLittleMemory`` on all ranks if a host has less memory free than its ranks need.

    - ``config``: complete, with a named attention strategy
    - ``channels``, ``outputs``: of the images and of the network
    """
    if mesh.device.type != "cpu" or config.pipe > 1:  # checked when stages are placed
        return
    hosts, memories = mesh.hosts or ("this host",), _memories(mesh)
    if why := run_on_rank0(lambda: _shortage(config, hosts, memories, channels, outputs), mesh.world):
        raise TooLittleMemory(why)


def free_shares(mesh: Mesh) -> list[float]:
    """Returns the free bytes of each rank: its share, if the ranks of a host share memory."""
    if mesh.device.type != "cpu":
        return [float(text) for text in gather_texts(str(torch.cuda.mem_get_info(mesh.device)[0]), mesh.world)]
    shares = _shares(mesh.hosts, _memories(mesh))
    return [shares[host] for host in mesh.hosts]


def _memories(mesh: Mesh) -> list[Memory]:
    """Returns the memory of each rank's host, as it sees it."""
    texts = gather_texts(json.dumps(asdict(memory_here())), mesh.world)
    return [Memory(**json.loads(text)) for text in texts]


def _shares(hosts: Sequence[str], memories: Sequence[Memory]) -> dict[str, float]:
    """Returns the free bytes of each of a host's ranks, by host."""
    by_host = _by_host(hosts, memories)
    return {host: min(seen, key=lambda m: m.free).free / len(seen) for host, seen in by_host.items()}


def _by_host(hosts: Sequence[str], memories: Sequence[Memory]) -> dict[str, list[Memory]]:
    by_host: dict[str, list[Memory]] = {}
    for host, memory in zip(hosts, memories):
        by_host.setdefault(host, []).append(memory)
    return by_host


def _shortage(config: Config, hosts: Sequence[str], memories: Sequence[Memory], channels: int, outputs: int) -> str:
    """Returns what is needed, what is free and what to change; "" if memory suffices.

    - ``hosts``, ``memories``: of each rank, as it sees them
    """
    by_host, shares = _by_host(hosts, memories), _shares(hosts, memories)
    tightest = min(shares, key=lambda host: shares[host])
    # libraries are already loaded
    device = replace(device_here("cpu"), memory=shares[tightest] * len(hosts), reserved_bytes=0.0, fragmentation=0.0)
    run = RunToPlan(config, device, channels, outputs, timed=False)
    need = plan_complete_config(run, len(hosts))
    if need.fits:
        return ""
    seen = by_host[tightest]
    memory = min(seen, key=lambda m: m.free)
    sharing = f"its {len(seen)} ranks, {_size(shares[tightest])} each" if len(seen) > 1 else "the rank there"
    return (
        f"too little memory for the first step: a rank needs {_size(need.total)} ({_parts(need.memory)}), and "
        f"{tightest} has {_size(memory.free)} free for {sharing} (of {_size(memory.whole)}, "
        f"{memory.limit}): {_remedy(run, need)}"
    )


def _remedy(run: RunToPlan, need: Plan) -> str:
    """Returns what to change: a smaller batch with the same tiles per step, a setting that saves memory, or others."""
    config = run.config
    most = largest_batch(run, need.ranks, config.batch)
    batch, flags = _divisor(config, most.config.batch), ""
    is_tied = bool(runs_over_micro_batch(config))
    keeps_tiles = is_tied and config.resume
    if batch < config.batch and not keeps_tiles:
        config = replace(config, batch=batch, accumulate=config.accumulate * config.batch // batch, global_batch=0)
        flags = f"--batch {batch}"
        if not is_tied:
            flags += f" --accumulate {config.accumulate}"
    if most.fits and flags:
        return f"use {flags}"
    # no setting saves what the tiles themselves take
    savings = memory_savings(config, ()) if most.memory["input"] < most.device.memory else ()
    for saving, _ in savings:
        try:
            if plan(replace(run, config=replace(config, **saving), ranks=need.ranks), config.seqpar).fits:
                return f"use {flags} {flags_of(saving)}".replace("  ", " ")
        except ValueError:  # this setting does not work on these ranks
            continue
    others = "more sequence groups, " if keeps_tiles else ""
    return f"try {others}{advice(most, exhausted=True)}"


def _divisor(config: Config, most: int) -> int:
    """Returns the largest batch up to ``most`` that divides the config's."""
    unit = config.seqpar if config.mode == "swap" else 1
    return max(size for size in range(unit, max(most, unit) + 1, unit) if config.batch % size == 0)


def _parts(memory: Mapping[str, float]) -> str:
    model = memory["weights"] + memory["gradients"] + memory["optimizer"]
    parts = {"model": model, **{name: memory[name] for name in ("input", "tokens", "decoder")}}
    listed = ", ".join(f"{name} {_size(size)}" for name, size in parts.items())
    return f"{listed}, worst moment {_size(memory['transient'])}"


def _size(number: float) -> str:
    return f"{number / GIB:.2f} GiB" if number >= GIB / 10 else f"{number / MIB:.1f} MiB"
