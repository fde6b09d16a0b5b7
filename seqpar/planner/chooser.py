"""Chooses what a run leaves open, for the device here: group size, batch, attention, lessons, places of a pipe.

Nothing is measured, and all ranks see the same numbers, so they choose alike before they communicate.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from seqpar.cluster.devices import GIB, Device, device_here, measured
from seqpar.models.build import family_of
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.processes import PARENT
from seqpar.planner.attention_choice import is_attention_open
from seqpar.planner.batch_size import choose_batch, papers_batch
from seqpar.planner.fit import largest_batch, plans, why_nothing_fits
from seqpar.planner.needs import Plan, RunToPlan, plan_complete_config
from seqpar.planner.pipeline_plan import Cells, PlacementOptions, spread_over
from seqpar.settings.config import Config
from seqpar.settings.curriculum import format_curriculum, in_micro_batches, parse_curriculum
from seqpar.settings.parallel_settings import AUTO
from seqpar.text import in_flags

Choices = dict[str, tuple[str, ...]]  # why, by the choice's name: a sentence, then lines with figures


def choose_group_and_batch(config: Config, launcher: Launcher, channels: int, outputs: int) -> tuple[Config, Choices]:
    """Returns the config with group size and batch filled in where they are open, and the reasons."""
    run = RunToPlan(config, device_of(config, launcher), channels, outputs, timed=False)
    why = Choices()
    if config.seqpar == AUTO:
        config, why["seqpar_choice"] = _choose_size(run, launcher)
    if not config.batch:
        config, sentence = _choose_batch(replace(run, config=config), max(launcher.world, config.group_ranks))
        why["batch_choice"] = (sentence,)
    return config, why


def _choose_size(run: RunToPlan, launcher: Launcher) -> tuple[Config, tuple[str, ...]]:
    tried = list[Plan]()
    for p in plans(replace(run, ranks=launcher.world if launcher.world > 1 else None), _sizes(run.config, launcher)):
        tried.append(p)
        if p.fits:
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


def _choose_batch(run: RunToPlan, ranks: int) -> tuple[Config, str]:
    target = choose_batch(run.config)
    best = largest_batch(run, ranks, target.batch)
    batch = best.config.batch
    if batch == target.batch and best.fits:
        why = "is the paper's" if papers_batch(run.config) else "needs no more memory than 32 tiles of 96 at patch 16"
        why = "is usual" if family_of(run.config).usual_batch else why
        sentence = f"--batch {batch} {why}, and fits: {_needs(best)}"
    elif best.fits:
        sentence = f"--batch {batch} is the largest that fits {best.device.name}: {_needs(best)}"
    else:
        sentence = f"--batch {batch} is the smallest possible, though it may not fit {best.device.name}: {_needs(best)}"
    return replace(run.config, batch=batch), sentence


def _needs(p: Plan) -> str:
    where = "on the fullest rank of the pipe" if p.config.pipe > 1 else "a rank"
    return f"{p.total / GIB:.2f} GiB of {p.device.memory / GIB:.2f} {where}"


def choose_attention(
    config: Config, launcher: Launcher, channels: int, outputs: int, before: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, ...]:
    """Returns the name of the attention strategy that the plan takes, then why, line by line; () if none is open.

    - ``before``: the recorded layout of a resumed run, which keeps its strategy on as many ranks a group: strategies
      differ by rounding
    """
    if not is_attention_open(config):
        return ()
    previous = before.get("strategy", "")
    if previous and before["seqpar"] == config.seqpar and not (config.keep_kv and previous == "ulysses"):
        return previous, f"{previous}, as the run began"
    best = plan_here(config, launcher, channels, outputs)
    return best.config.attention, *best.attention_why


def plan_here(config: Config, launcher: Launcher, channels: int, outputs: int) -> Plan:
    """Returns the plan of a complete config without a pipe on the device here and the launcher's ranks."""
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


def fewest_places(
    run: RunToPlan, config: Config, cells: Cells, sizes: Sequence[int], say: Callable[[str], None]
) -> PlacementOptions:
    """Returns the fewest places that fit; raises ValueError if none of the ``sizes`` does.

    - ``say``: called with a line on each size that does not fit
    """
    too_large = list[Plan]()
    for size in sizes:
        try:
            spread = spread_over(run, config, cells, size)
        except ValueError as problem:
            if len(sizes) == 1:
                raise
            say(f"--pipe {size}: {in_flags(str(problem))}")
            continue
        if spread.plan.fits:
            return spread
        too_large.append(spread.plan)
        say(f"--pipe {size}: {spread.plan.total / GIB:.2f} GiB on the fullest rank, which is too much")
    why = f"no --pipe from {sizes[0]} to {sizes[-1]} is possible: see above"
    raise ValueError(why_nothing_fits(too_large) if too_large else why)


def has_open_lessons(config: Config) -> bool:
    """Returns whether a lesson of the curriculum leaves its tile or batch open."""
    return any(not entry.tile or not entry.batch for entry in parse_curriculum(config.curriculum))


def fill_pipeline(config: Config, flags: set[str]) -> tuple[Config, Choices]:
    """Returns the config whose preset's lessons have enough micro-batches for the places of a pipe, and why.

    - ``flags``: the settings named on the command line, which may set the micro-batches of a step themselves
    """
    typed = flags & {"curriculum", "accumulate", "global_batch"}
    if config.pipe == 1 or config.resume or typed or not config.curriculum:
        return config, {}
    lessons = in_micro_batches(config.curriculum, 2 * config.pipe)
    why = f"--curriculum {lessons}: with --pipe {config.pipe} each step's tiles are split into micro-batches"
    return replace(config, curriculum=lessons), {"micro_batches": (why,)}


def choose_lessons(
    config: Config, launcher: Launcher, largest: Sequence[int] = (), channels: int = 1, outputs: int = 2
) -> tuple[Config, Choices]:
    """Returns the config with the tile and batch of each lesson of its curriculum filled in, and the reasons.

    - ``largest``: voxels per direction that hold every case; padded to the network's unit, a whole volume's tile
    - ``channels``, ``outputs``: of the data; used where a batch is open
    """
    entries = [replace(entry, tile=entry.tile or tuple(largest)) for entry in parse_curriculum(config.curriculum)]
    if any(entry.micros for entry in entries):  # a resumed run has the number of the lesson that it was in
        entries = [replace(entry, micros=entry.micros or config.accumulate) for entry in entries]
    config = family_of(config).pinned(replace(config, tile=entries[0].tile))
    unit = family_of(config).unit(config)
    entries = [replace(entry, tile=_padded(entry.tile, unit)) if entry.is_whole else entry for entry in entries]
    accumulate, why = config.accumulate, Choices()
    configs = [
        replace(config, tile=entry.tile, batch=entry.batch, accumulate=entry.micros or accumulate) for entry in entries
    ]
    if config.seqpar == AUTO:
        answers = [choose_group_and_batch(each, launcher, channels, outputs) for each in configs]
        config, reasons = max(answers, key=lambda answer: answer[0].seqpar)
        why["seqpar_choice"] = reasons["seqpar_choice"]
        configs = [replace(each, seqpar=config.seqpar) for each in configs]
    for number, each in enumerate(configs):
        if not each.batch:
            configs[number], reasons = choose_group_and_batch(each, launcher, channels, outputs)
            (sentence,) = reasons["batch_choice"]
            why[f"batch_choice_{number + 1}"] = (f"tile {'x'.join(map(str, each.tile))}: {sentence}",)
    filled = [replace(entry, batch=each.batch) for entry, each in zip(entries, configs)]
    return replace(configs[0], accumulate=accumulate, curriculum=format_curriculum(filled)), why


def _padded(sides: Sequence[int], unit: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.ceil(side / step) * step for side, step in zip(sides, unit))
