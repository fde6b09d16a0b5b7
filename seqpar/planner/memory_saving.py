"""Ways to need less memory that keep a run's numbers, and the smallest group that fits with one of them.

Each way adds to the one before, so that what costs least time comes first. Settings that a command line names stay as
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
# what each adds, and its price
LADDER: tuple[tuple[MemorySaving, str], ...] = (
    ({"mode": "auto"}, "each rank decodes its box or its samples, not the whole tile"),
    ({"mlp_chunks": CHUNKS}, "the MLP's forward runs again in backward"),
    ({"grad_checkpoint": "attention"}, "attention's forward runs again too, with its messages"),
    ({"grad_checkpoint": "full"}, "the whole forward of each block, or cell of a U-Net, runs again in backward"),
    ({"shard_weights": True}, "weights are gathered for each block, forward and backward"),
)


def memory_savings(config: Config, named: Collection[str]) -> Iterator[tuple[MemorySaving, str]]:
    """Yields the ways that there are for a config, each with the price of what it adds.

    - ``named``: settings of the command line, which stay as they are
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
    """Returns whether a setting does more than the config has, and computes the same."""
    now = getattr(config, name)
    if name == "mode":
        return now in ("gather", "swap")  # nogather computes something else, auto is what halo does at least
    if name == "grad_checkpoint":
        return now != "full" and now != value and value in family_of(config).recomputed
    if name == "shard_weights" and config.pipe > 1:
        return False
    return bool(now < value)


def flags_of(way: MemorySaving) -> str:
    """Returns a way as flags."""
    return " ".join(f"--{flag_name(name)}" + ("" if value is True else f" {value}") for name, value in way.items())


def search_with_savings(run: RunToPlan, sizes: Sequence[int]) -> Iterator[Plan]:
    """Yields plans as they are counted, of few of the sizes; the smallest of those that fit is the smallest of all.

    A larger group needs less memory on each rank: the largest size comes first, and only if it fits are the others
    searched, by halves. Where ranks share one machine's memory, the smallest group needs least.
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
    """Returns the config of a group size, None where there is none."""
    try:
        return config_for_group_size(run, size)
    except ValueError:
        return None
