"""How many tiles a sequence group takes at once, where nobody says: the paper's 32 at patch 16, less where a
tile holds more."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from seqpar.launch.planning.step_counter import StepSetup, count_step
from seqpar.launch.settings.config import Config

PAPER_BATCH, PAPER_TILE, PAPER_PATCH = 32, 96, 16


def choose_batch(config: Config) -> Config:
    """Returns the config with its batch filled in: as many tiles as hold what 32 of the paper's tiles do."""
    if config.batch:
        return config
    paper = replace(config, tile=(PAPER_TILE,) * 3, patch=PAPER_PATCH, seqpar=1, attention="auto", keep_kv=False)
    paper = replace(paper, grad_checkpoint="none", mlp_chunks=1)
    budget = PAPER_BATCH * held_per_tile(paper)
    most = max(1, min(PAPER_BATCH, int(budget / held_per_tile(config))))
    if config.mode == "swap":  # each rank decodes as many samples
        most = max(1, most // config.seqpar) * config.seqpar
    return replace(config, batch=most)


def keep_global_batch(
    config: Config, wanted: int, num_groups: int, wish: Mapping[str, int] = MappingProxyType({})
) -> Config:
    """Returns the config with batch and accumulation that keep a run's tiles per step on other ranks.

    ``wish`` holds those of the two that were asked for now.
    """
    if wanted % num_groups:
        fits = ", ".join(str(count) for count in range(1, wanted + 1) if wanted % count == 0)
        raise ValueError(
            f"the run has {wanted} tiles a step, which {num_groups} sequence groups cannot share alike: "
            f"resume on so many groups: {fits} (with a larger --seqpar the same ranks make fewer)"
        )
    each = wanted // num_groups
    pairs = [(size, each // size) for size in range(1, each + 1) if each % size == 0]
    wished = wish.get("batch", 0), wish.get("accumulate", 0)
    fitting = [pair for pair in pairs if all(told in (0, kept) for told, kept in zip(wished, pair))]
    if not fitting:
        told = " ".join(f"--{name} {number}" for name, number in wish.items())
        fits = ", ".join(f"--batch {size} --accumulate {count}" for size, count in pairs)
        raise ValueError(f"{told}: the run has {each} tiles a step for each of {num_groups} groups: use {fits}")
    batch, accumulate = config.batch, config.accumulate
    if (batch, accumulate) not in fitting:
        batch, accumulate = max((pair for pair in fitting if pair[0] <= batch), default=fitting[0])
    if config.batch_dice and accumulate != config.accumulate:
        raise ValueError(
            f"with --batch-dice the loss depends on which tiles are computed together, {wanted // config.accumulate} "
            f"so far: keep --accumulate {config.accumulate}, or resume on as many ranks as before"
        )
    return replace(config, batch=batch, accumulate=accumulate)


def held_per_tile(config: Config) -> float:
    """Returns the bytes that the first rank holds for backward per tile."""
    batch = config.batch or (config.seqpar if config.mode == "swap" else 1)
    step = count_step(StepSetup(replace(config, batch=batch)))
    return (step.tokens + step.decoder) / batch
