"""Chooses what a run leaves open, for the device here: the group's size, the batch, how attention crosses ranks.

Nothing is measured, and all ranks look at the same numbers, so that they choose alike before they communicate.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from seqpar.cluster.devices import GIB, Device, device_here, measured
from seqpar.cluster.start_ranks import PARENT
from seqpar.models.build import family_of
from seqpar.parallel.launcher import Launcher
from seqpar.planner.attention_choice import is_open
from seqpar.planner.batch_size import choose_batch, papers_batch
from seqpar.planner.fit import largest_batch, why_nothing_fits
from seqpar.planner.needs import Plan, RunToPlan, plan, plan_complete_config
from seqpar.settings.config import AUTO, Config
from seqpar.text import in_flags


def choose_group_and_batch(
    config: Config, launcher: Launcher, channels: int, outputs: int
) -> tuple[Config, dict[str, tuple[str, ...]]]:
    """Returns the config with the group's size and the batch filled in where they are open, and the reasons.

    The reasons of a choice are a sentence, then lines with figures.
    """
    run = RunToPlan(config, device_of(config, launcher), channels, outputs, timed=False)
    why = dict[str, tuple[str, ...]]()
    if config.seqpar == AUTO:
        config, why["seqpar_choice"] = _choose_size(run, launcher)
    if not config.batch:
        config, sentence = _choose_batch(replace(run, config=config), max(launcher.world, config.group_ranks))
        why["batch_choice"] = (sentence,)
    return config, why


def choose_attention(
    config: Config, launcher: Launcher, channels: int, outputs: int, before: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, ...]:
    """Returns the name of the attention strategy that the plan takes, then why, line by line; () where none is open.

    ``before`` is the recorded layout of a run that is resumed. On as many ranks in a group it keeps its strategy:
    strategies differ by rounding.
    """
    if not is_open(config):
        return ()
    previous = before.get("strategy", "")
    if previous and before["seqpar"] == config.seqpar and not (config.keep_kv and previous == "ulysses"):
        return previous, f"{previous}, as the run began"
    best = plan_here(config, launcher, channels, outputs)
    return best.config.attention, *best.attention_why


def plan_here(config: Config, launcher: Launcher, channels: int, outputs: int) -> Plan:
    """Returns the plan of a complete config on the device here and the launcher's ranks."""
    ranks = max(launcher.world, config.seqpar)
    return plan_complete_config(RunToPlan(config, device_of(config, launcher), channels, outputs, timed=False), ranks)


def device_of(config: Config, launcher: Launcher) -> Device:
    """Returns the device of each rank of a run that is started here."""
    device = device_here(config.device)
    if config.measured:
        device = measured(config.measured, device, config.precision)
    if device.cores:  # other nodes have theirs
        return replace(device, memory=device.memory * launcher.num_nodes, cores=device.cores * launcher.num_nodes)
    # not local_world, which may differ from node to node
    return replace(device, node=launcher.world // launcher.num_nodes if launcher.world > 1 else _devices(config))


def _choose_size(run: RunToPlan, launcher: Launcher) -> tuple[Config, tuple[str, ...]]:
    tried = []
    for size in _sizes(run.config, launcher):
        ranks = max(launcher.world, size)
        try:
            tried.append(plan(replace(run, ranks=ranks), size))
        except ValueError as error:
            tried.append(Plan(replace(run.config, seqpar=size), run.device, ranks, why=in_flags(str(error))))
        if tried[-1].fits:
            break
    best = tried[-1]
    if not best.fits:
        raise ValueError(f"--seqpar auto: {why_nothing_fits(tried)}")
    lines = tuple(f"seqpar {p.config.seqpar}: {p.why or _needs(p)}" for p in tried)
    size = best.config.seqpar
    sentence = f"--seqpar {size} is the smallest that fits {run.device.name}: {_needs(best)}"
    if not run.config.batch:
        sentence += f" with --batch {best.config.batch}"
    return replace(run.config, seqpar=size), (sentence, *lines)


def _choose_batch(run: RunToPlan, ranks: int) -> tuple[Config, str]:
    target = choose_batch(run.config)
    best = largest_batch(run, ranks, target.batch)
    batch = best.config.batch
    if batch == target.batch and best.fits:
        why = "is the paper's" if papers_batch(run.config) else "holds at most what 32 tiles of 96 at patch 16 do"
        why = "is usual" if family_of(run.config).usual_batch else why
        sentence = f"--batch {batch} {why}, and fits: {_needs(best)}"
    elif best.fits:
        sentence = f"--batch {batch} is the largest that fits {best.device.name}: {_needs(best)}"
    else:
        sentence = (
            f"--batch {batch} is the least there can be, though it may not fit {best.device.name}: {_needs(best)}"
        )
    return replace(run.config, batch=batch), sentence


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
    where = "on the fullest rank of the pipe" if p.config.pipe > 1 else "a rank"
    return f"{p.total / GIB:.2f} GiB of {p.device.memory / GIB:.2f} {where}"
