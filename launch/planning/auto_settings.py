"""What a run leaves open, chosen by the planner for the device here: group size, batch, how attention crosses ranks.

Nothing is measured here, and all ranks look at the same numbers, so that they choose alike before they talk.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from seqpar.environment import Launcher
from seqpar.launch.hardware.devices import GIB, Device, device_here, measured
from seqpar.launch.job.local_ranks import PARENT
from seqpar.launch.planning.batch_size import choose_batch
from seqpar.launch.planning.fit import largest_batch, refusal
from seqpar.launch.planning.needs import Plan, Run, plan, planned
from seqpar.launch.settings.config import AUTO, Config


def choose(
    config: Config, launcher: Launcher, channels: int, outputs: int
) -> tuple[Config, dict[str, tuple[str, ...]]]:
    """Returns the config with its group's size and its batch, where they were left open, and why they are these.

    Of each choice there is a sentence first, then lines with figures.
    """
    run = Run(config, _device(config, launcher), channels, outputs, timed=False)
    why = dict[str, tuple[str, ...]]()
    if config.seqpar == AUTO:
        config, why["seqpar_choice"] = _choose_size(run, launcher)
    if not config.batch:
        config, told = _choose_batch(replace(run, config=config), max(launcher.world, config.seqpar))
        why["batch_choice"] = (told,)
    return config, why


def choose_attention(
    config: Config, launcher: Launcher, channels: int, outputs: int, before: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, ...]:
    """Returns how attention crosses ranks, where it was left open, and why, a line each; () where there is no choice.

    ``before`` is what was recorded of the ranks of a run that goes on: with as many in a group it keeps its strategy,
    for all are equal, but to rounding.
    """
    if config.attention != "auto" or config.seqpar == 1:
        return ()
    kept = before.get("strategy", "")
    if kept and before["seqpar"] == config.seqpar and not (config.keep_kv and kept == "ulysses"):
        return kept, f"{kept}, as the run began"
    ranks = max(launcher.world, config.seqpar)
    found = planned(Run(config, _device(config, launcher), channels, outputs, timed=False), ranks)
    return found.config.attention, *found.attention_why


def _device(config: Config, launcher: Launcher) -> Device:
    device = device_here(config.device)
    if config.measured:
        device = measured(config.measured, device, config.precision)
    if device.cores:  # other nodes have theirs
        return replace(device, memory=device.memory * launcher.num_nodes, cores=device.cores * launcher.num_nodes)
    # not local_world, which may differ from node to node
    return replace(device, node=launcher.world // launcher.num_nodes if launcher.world > 1 else _devices(config))


def _choose_size(run: Run, launcher: Launcher) -> tuple[Config, tuple[str, ...]]:
    found = []
    for size in _sizes(run.config, launcher):
        ranks = max(launcher.world, size)
        try:
            found.append(plan(replace(run, ranks=ranks), size))
        except ValueError as error:
            found.append(Plan(replace(run.config, seqpar=size), run.device, ranks, why=str(error)))
        if found[-1].fits:
            break
    best = found[-1]
    if not best.fits:
        raise ValueError(f"--seqpar auto: {refusal(found)}")
    lines = tuple(f"seqpar {p.config.seqpar}: {p.why or _needs(p)}" for p in found)
    size = best.config.seqpar
    told = f"--seqpar {size} is the smallest that fits {run.device.name}: {_needs(best)}"
    if not run.config.batch:
        told += f" with --batch {best.config.batch}"
    return replace(run.config, seqpar=size), (told, *lines)


def _choose_batch(run: Run, ranks: int) -> tuple[Config, str]:
    wanted = choose_batch(run.config)
    found = largest_batch(run, ranks, wanted.batch)
    batch = found.config.batch
    if batch == wanted.batch and found.fits:
        told = f"--batch {batch} holds at most what 32 tiles of 96 at patch 16 do, and fits: {_needs(found)}"
    elif found.fits:
        told = f"--batch {batch} is the largest that fits {found.device.name}: {_needs(found)}"
    else:
        told = f"--batch {batch} is the least there can be, though it may not fit {found.device.name}: {_needs(found)}"
    return replace(run.config, batch=batch), told


def _sizes(config: Config, launcher: Launcher) -> Sequence[int]:
    """Returns the sizes that the ranks allow; one process alone may start as many ranks as there are devices."""
    if PARENT in os.environ:  # the process that started these ranks has chosen
        return [launcher.world]
    if launcher.world > 1:
        return [size for size in range(1, launcher.world + 1) if launcher.world % size == 0]
    return range(1, _devices(config) + 1)


def _devices(config: Config) -> int:
    """Returns how many ranks this machine has devices for."""
    on_gpu = config.device != "cpu" and torch.cuda.is_available()
    return torch.cuda.device_count() if on_gpu else os.cpu_count() or 1


def _needs(p: Plan) -> str:
    return f"{p.total / GIB:.2f} GiB of {p.device.memory / GIB:.2f} a rank"
