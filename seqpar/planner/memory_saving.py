"""Options that save memory without changing a run's result, and the smallest group that fits with them.

Each step of the ladder adds to the one before, the cheapest in time first. Settings named on the command line stay as
they are.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from seqpar.models.build import family_of
from seqpar.planner.needs import Plan, RunToPlan, config_for_group_size, plan_complete_config
from seqpar.settings.config import Config
from seqpar.settings.rules import setting_applies
from seqpar.text import flag_name

MemorySaving = Mapping[str, Any]  # settings by name
CHUNKS = 8
# what each step adds, and its price
LADDER: tuple[tuple[MemorySaving, str], ...] = (
    ({"mode": "auto"}, "each rank decodes its box or its samples, not the whole tile"),
    ({"mlp_chunks": CHUNKS}, "the MLP's forward runs again in backward"),
    ({"grad_checkpoint": "attention"}, "attention's forward runs again too, with its messages"),
    ({"grad_checkpoint": "full"}, "the whole forward of each block, or cell of a U-Net, runs again in backward"),
    ({"shard_weights": True}, "weights are gathered for each block, forward and backward"),
)


def memory_savings(config: Config, named: Collection[str]) -> Iterator[tuple[MemorySaving, str]]:
    """Yields what a config can change to save memory, step by step, each with the price of what it adds.

    - ``named``: settings named on the command line, which stay as they are
    """
    taken = dict[str, Any]()
    for added, price in LADDER:
        new = {
            name: value
            for name, value in added.items()
            if name not in named and setting_applies(config, name) and _changes(config, name, value)
        }
        if new:
            taken |= new
            yield dict(taken), price


def _changes(config: Config, name: str, value: Any) -> bool:
    """Returns whether a setting saves more memory than the config's, and computes the same."""
    now = getattr(config, name)
    if name == "mode":
        return now in ("gather", "swap")  # nogather computes something else, and halo already saves what auto does
    if name == "grad_checkpoint":
        return now != "full" and now != value and value in family_of(config).recomputed
    if name == "shard_weights" and config.pipe > 1:
        return False
    return bool(now < value)


def flags_of(saving: MemorySaving) -> str:
    """Returns settings as flags."""
    return " ".join(f"--{flag_name(name)}" + ("" if value is True else f" {value}") for name, value in saving.items())


def search_with_savings(run: RunToPlan, sizes: Sequence[int]) -> Iterator[Plan]:
    """Yields plans of a few of the sizes as they are counted; the smallest that fits is the smallest of all.

    A larger group needs less memory on each rank, so the largest size comes first, and a bisection follows only if it
    fits. If ranks share one machine's memory, the smallest group needs the least, and only that is counted.
    """
    configs = [config for size in sizes if (config := _possible(run, size)) is not None]
    if run.device.cores:
        configs = configs[:1]
    low, high, at = 0, len(configs), len(configs) - 1
    while low < high:
        config = configs[at]
        p = plan_complete_config(replace(run, config=config), run.ranks_of(config.seqpar))
        yield p
        if p.fits:
            high = at
        else:
            low = at + 1
        at = (low + high) // 2


def _possible(run: RunToPlan, size: int) -> Config | None:
    """Returns the config of a group size, or None if it cannot run."""
    try:
        return config_for_group_size(run, size)
    except ValueError:
        return None
