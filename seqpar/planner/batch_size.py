"""The default batch of a sequence group, and what a step is on more or fewer groups: its micro-batches, its rate.

``--scale-lr``: as a run begins, the rate grows with the sequence groups, and an epoch keeps its number of tiles.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from seqpar.losses import has_batch_terms
from seqpar.models.build import family_of
from seqpar.planner.step_counter import StepSetup, count_step
from seqpar.settings.config import Config
from seqpar.text import flag_name, quantity

SCALED = {"lr", "iterations"}  # settings that a resumed run keeps as they were scaled when it began
PAPER_BATCH, PAPER_TILE, PAPER_PATCH = 32, 96, 16
PAPERS = {(96, 16, 0): 32, (128, 16, 0): 16, (96, 4, 4): 1}  # tile, patch, group (0: any): tiles a group in the paper


def choose_batch(config: Config) -> Config:
    """Returns the config with its batch filled in if it is open: the network's usual one.

    For a ViT that is the paper's batch if the paper trained such a config; else as many tiles as need the memory of
    the paper's 32 at patch 16.
    """
    if config.batch:
        return config
    if batch := papers_batch(config):
        return replace(config, batch=batch)
    most = family_of(config).usual_batch or _most_by_memory(config)
    if config.mode == "swap":  # each rank decodes as many samples
        most = max(1, most // config.seqpar) * config.seqpar
    return replace(config, batch=most)


def papers_batch(config: Config) -> int:
    """Returns the paper's batch of a sequence group for such a config; 0 if the paper did not train one."""
    cubes = len(set(config.tile)) == 1 == len(set(config.patch))
    sizes = (config.depths, config.embed_dim, config.heads, config.window) == (12, 768, 12, 0) and cubes
    if (
        not sizes
        or (config.network, config.decoder, config.precision) != ("vit", "plain", "fp32")
        or config.mode not in ("gather", "nogather")
    ):
        return 0
    settings = config.tile[0], config.patch[0]
    return PAPERS.get((*settings, 0)) or PAPERS.get((*settings, config.seqpar), 0)


def _most_by_memory(config: Config) -> int:
    """Returns how many tiles fit in the memory of the paper's batch."""
    paper = replace(config, tile=(PAPER_TILE,) * 3, patch=(PAPER_PATCH,) * 3, seqpar=1, attention="auto", keep_kv=False)
    paper = replace(paper, grad_checkpoint="none", mlp_chunks=1, encoder="plain")
    budget = PAPER_BATCH * saved_per_tile(paper)
    return max(1, min(PAPER_BATCH, int(budget / saved_per_tile(config))))


def runs_over_micro_batch(config: Config) -> str:
    """Returns what runs over the tiles of a micro-batch, so that results depend on how a step is split; "" if nothing.

    Other means run over all tiles of a step, however it is split.
    """
    if has_batch_terms(config.loss, config.batch_dice):
        return "--batch-dice" if config.batch_dice else f"--loss {config.loss}"
    return "batch norm" if family_of(config).has_batch_norm(config) else ""


def keep_global_batch(
    config: Config, global_batch: int, num_groups: int, flags: Mapping[str, int] = MappingProxyType({})
) -> Config:
    """Returns the config with the batch and accumulation that keep a run's tiles per step on a new number of ranks.

    - ``global_batch``: the run's tiles per step, over all groups
    - ``flags``: batch and accumulate, if set on the command line
    """
    if global_batch % num_groups:
        raise ValueError(
            f"the run has {quantity(global_batch, 'tile')} a step, which {num_groups} sequence groups cannot share "
            f"evenly: resume with one of these numbers of groups: {_divisors(global_batch)} (a larger --seqpar makes "
            "fewer groups of the same ranks)"
        )
    if what := runs_over_micro_batch(config):
        return _keep_micro_batches(config, global_batch // config.accumulate, num_groups, flags, what)
    batch, accumulate = _choose_pair(config, global_batch // num_groups, num_groups, flags, "the run has")
    return replace(config, batch=batch, accumulate=accumulate)


def _keep_micro_batches(config: Config, together: int, num_groups: int, flags: Mapping[str, int], what: str) -> Config:
    """Returns the config with the batch that computes the same tiles together as before.

    - ``together``: tiles of a micro-batch over all groups
    - ``what``: runs over them
    """
    unit = config.seqpar if config.mode == "swap" else 1
    begun = f"with {what} results depend on which tiles are computed together, {quantity(together, 'tile')} in this run"
    if together % num_groups or together // num_groups % unit:
        numbers = ", ".join(str(count) for count in range(1, together + 1) if together % (count * unit) == 0)
        advice = f"resume with one of these numbers of groups: {numbers}" if numbers else "resume with --mode halo"
        ranks = f", each of {unit} ranks with --mode swap," if unit > 1 else ""
        raise ValueError(f"{begun}: {num_groups} sequence groups{ranks} cannot share them evenly: {advice}")
    kept = {"batch": together // num_groups, "accumulate": config.accumulate}
    if any(kept[name] != number for name, number in flags.items()):
        typed = " ".join(f"--{name} {number}" for name, number in flags.items())
        raise ValueError(
            f"{typed}: {begun}: keep --accumulate {config.accumulate} (here with --batch {kept['batch']}), or remove "
            "these flags"
        )
    return replace(config, batch=kept["batch"], accumulate=kept["accumulate"])


def hold_global_batch(config: Config, num_groups: int, flags: Mapping[str, int] = MappingProxyType({})) -> Config:
    """Returns the config with the batch and accumulation that make ``--global-batch`` tiles per step.

    - ``flags``: batch and accumulate, if set on the command line
    """
    number, flags = config.global_batch, {name: size for name, size in flags.items() if size}
    if number % num_groups:
        below = number // num_groups * num_groups
        nearest = " or ".join(f"--global-batch {size}" for size in (below, below + num_groups) if size)
        raise ValueError(
            f"--global-batch {number}: {num_groups} sequence groups cannot share it evenly: use {nearest}, or one of "
            f"these numbers of groups: {_divisors(number)}"
        )
    if not flags and runs_over_micro_batch(config):  # the same tiles stay together on any number of groups
        flags = {"accumulate": config.accumulate}
    each = number // num_groups
    batch, accumulate = _choose_pair(config, each, num_groups, flags, f"--global-batch {number} is")
    return replace(config, batch=batch, accumulate=accumulate)


def describe_global_batch(before: Config, now: Config, num_groups: int) -> str:
    """Returns a line on how ``--global-batch`` is reached; ``before`` is the config without it."""
    if now.accumulate != before.accumulate:
        how = "by accumulation"
    elif now.batch != before.batch:
        what = runs_over_micro_batch(now)
        how = "by the batch" + (f", because {what} keeps tiles together" if what else "")
    else:
        how = "as without this flag"
    groups = quantity(num_groups, "group")
    return f"--global-batch {now.global_batch}: {groups} x batch {now.batch} x accumulate {now.accumulate}, {how}"


def _choose_pair(config: Config, each: int, num_groups: int, flags: Mapping[str, int], has: str) -> tuple[int, int]:
    """Returns batch and accumulation that make ``each`` tiles a group.

    They are the config's if possible, else those with the largest batch below the config's.
    """
    unit, tiles = config.seqpar if config.mode == "swap" else 1, quantity(each, "tile")
    groups = quantity(num_groups, "group")
    if each % unit:
        raise ValueError(
            f"--mode swap: {has} {tiles} a step for each of {groups}, which must divide by --seqpar {unit}: use "
            f"--mode auto or halo, or tiles a step that divide by {num_groups * unit}"
        )
    pairs = [(size, each // size) for size in range(unit, each + 1, unit) if each % size == 0]
    required = flags.get("batch", 0), flags.get("accumulate", 0)
    fitting = [pair for pair in pairs if all(number in (0, kept) for number, kept in zip(required, pair))]
    if not fitting:
        line = " ".join(f"--{name} {number}" for name, number in flags.items())
        fits = ", ".join(f"--batch {size} --accumulate {count}" for size, count in pairs)
        raise ValueError(f"{line}: {has} {tiles} a step for each of {groups}: use {fits}")
    if (config.batch, config.accumulate) in fitting:
        return config.batch, config.accumulate
    return max((pair for pair in fitting if pair[0] <= config.batch), default=fitting[0])


def _divisors(number: int) -> str:
    return ", ".join(str(count) for count in range(1, number + 1) if number % count == 0)


def saved_per_tile(config: Config) -> float:
    """Returns the bytes per tile that the first rank saves for backward."""
    batch = config.batch or (config.seqpar if config.mode == "swap" else 1)
    step = count_step(StepSetup(replace(config, batch=batch)))
    return (step.tokens + step.decoder) / batch


def scale_learning_rate(config: Config, num_groups: int) -> tuple[Config, str]:
    """Returns the config of a run that begins on ``num_groups`` sequence groups, and a line on its rate and steps."""
    own = replace(config, lr=config.lr * num_groups, iterations=max(1, config.iterations // num_groups))
    groups = f"{num_groups} sequence group{'s' if num_groups > 1 else ''}"
    return own, f"--scale-lr: {groups}, so the rate is {own.lr:g}, and an epoch has {own.iterations} steps"


def settings_at_start(config: Config, num_groups: int) -> Config:
    """Returns the config with which a run begins on ``num_groups`` sequence groups."""
    return scale_learning_rate(config, num_groups)[0] if config.scale_lr else config


def keeps_scaled_rate(saved: Config, now: Config, names: Collection[str], num_groups: int = 0) -> bool:
    """Returns whether a resumed run keeps its scaled rate and steps, after refusing others.

    - ``now``: the config of the command line; ``names``: the settings in it
    - ``num_groups``: on which the run began; 0: it is not known
    """
    if not saved.scale_lr or "scale_lr" in names and not now.scale_lr:
        return False
    factor = saved.lr / now.lr
    whole = factor >= 1 and abs(factor - (num_groups or round(factor))) < 1e-6 * factor
    steps = now.iterations >= saved.iterations
    if num_groups:
        steps = max(1, now.iterations // num_groups) == saved.iterations
    is_as_it_began = {"lr": whole, "iterations": steps}
    for name in SCALED.intersection(names):
        if not is_as_it_began[name]:
            value = getattr(saved, name)
            raise ValueError(
                f"--{flag_name(name)}: a resumed run keeps what --scale-lr made of it, {value:g}: remove it, or "
                f"set it by --no-scale-lr --{flag_name(name)}"
            )
    return True
