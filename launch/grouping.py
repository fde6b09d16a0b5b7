"""``--seqpar auto``: the smallest sequence group whose plan fits the memory of this device, the same on all ranks."""

import os
from dataclasses import replace

import torch

from seqpar.environment import Start
from seqpar.launch.config import AUTO, Config
from seqpar.launch.devices import device_here
from seqpar.launch.local import PARENT
from seqpar.launch.plans import Plan, Run, plan, refusal

GIB = 2**30


def choose_seqpar(config: Config, begin: Start, channels: int, outputs: int) -> tuple[Config, tuple[str, ...]]:
    """Returns the config with its group's size, and why it is that one: first a sentence, then a line for each size.

    Nothing is measured, and all ranks look at the same numbers, so that they choose alike before they talk.
    """
    if config.seqpar != AUTO:
        return config, ()
    device = device_here(config.device)
    if device.cores:  # other nodes have theirs
        device = replace(device, memory=device.memory * begin.num_nodes, cores=device.cores * begin.num_nodes)
    found = []
    for size in _sizes(begin):
        ranks = max(begin.world, size)
        run = Run(config, device, channels, outputs, ranks=ranks, as_trained=True)
        try:
            found.append(plan(run, size))
        except ValueError as error:
            found.append(Plan(replace(config, seqpar=size), device, ranks, why=str(error)))
        if found[-1].fits:
            break
    best = found[-1]
    if not best.fits:
        raise ValueError(f"--seqpar auto: {refusal(found)}")
    lines = tuple(f"seqpar {p.config.seqpar}: {p.why or _needs(p)}" for p in found)
    chosen = replace(config, seqpar=best.config.seqpar)
    return chosen, (f"--seqpar {chosen.seqpar} is the smallest that fits {device.name}: {_needs(best)}", *lines)


def _sizes(begin: Start) -> list[int]:
    """Returns the sizes that the ranks allow; one process alone may start as many ranks as there are devices."""
    if PARENT in os.environ:  # the process that started these ranks has chosen
        return [begin.world]
    if begin.world > 1:
        return [size for size in range(1, begin.world + 1) if begin.world % size == 0]
    return list(range(1, max(torch.cuda.device_count(), 1 if torch.cuda.is_available() else os.cpu_count() or 1) + 1))


def _needs(p: Plan) -> str:
    return f"{p.total / GIB:.2f} GiB of {p.device.memory / GIB:.2f} a rank"
