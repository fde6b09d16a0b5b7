"""Memory and time of a training step by number of ranks: a hierarchical encoder, and a masked autoencoder.

Measured as in ``memory``. ``share of one process`` is what a rank stores for backward, divided by what one process
stores for the same step, which is counted on shapes without data. ``--large`` takes a whole volume.
"""

import math
from dataclasses import replace
from functools import cache

from lab.benches import memory
from lab.benches.memory import Case, Measured
from lab.benches.series import Row, Series
from seqpar.models.build import family_of
from seqpar.planner.step_counter import StepSetup, count_step
from seqpar.settings.config import Config
from seqpar.vit.masking import num_visible

STAGES = Config(
    tile=(96, 96, 96), patch=(4, 4, 4), encoder="hierarchical", stage_depths=(2, 2, 2), embed_dim=48, heads=3,
    attention="gather-kv", decoder="unetr", decoder_width=8, mode="halo", batch=1, device="cpu",
)  # fmt: skip
WINDOWS = {"all tokens": 0, "windows": 4}
MASKED = Config(
    task="pretrain", tile=(96, 96, 96), patch=(4, 4, 4), embed_dim=192, depth=4, heads=3, rebuild_width=48, batch=1,
    device="cpu",
)  # fmt: skip
VOLUME = replace(MASKED, tile=(240, 240, 156), seqpar=4)
RANKS = (1, 2, 4)


def stages(quick: bool = False) -> list[Series]:
    """Returns one series: a step on each number of ranks, of tokens that all see each other and in windows."""
    config = replace(STAGES, tile=(64, 64, 64)) if quick else STAGES
    cases = [
        Case(name, replace(config, seqpar=ranks, window=window), ranks)
        for name, window in WINDOWS.items()
        for ranks in RANKS
    ]
    what = f"a training step of stages of {' + '.join(map(str, config.stage_depths))} blocks, tile {config.tile[0]}"
    return [memory.series_of(what, cases, 1, 10.0 if quick else 18.0, stages_row)]


def stages_row(case: Case, runs: Measured, first: Measured) -> Row:
    """Returns a case's row of the table; as ``memory.row``."""
    held = sum(r["held"] for r in runs) / len(runs)
    return {
        **memory.row(case, runs, first),
        "net": family_of(case.config).describe(case.config),
        "tokens": math.prod(side // p for side, p in zip(case.config.tile, case.config.patch)),  # before they merge
        "share of one process": held / held_by_one(case.config),
    }


def masked(quick: bool = False) -> list[Series]:
    """Returns one series: a step on each number of ranks."""
    config = replace(MASKED, tile=(48, 48, 48)) if quick else MASKED
    cases = [Case("a step of pretraining", replace(config, seqpar=ranks), ranks) for ranks in RANKS]
    what = f"a step of pretraining, a quarter of the tokens visible, tile {config.tile[0]}"
    return [memory.series_of(what, cases, 1 if quick else 3, 10.0 if quick else 20.0, masked_row)]


def large_masked() -> list[Series]:
    """Returns one series: a step on a whole volume of 240 x 240 x 155 at patch 4."""
    case = Case("a whole volume of 240 x 240 x 155", VOLUME, VOLUME.seqpar, 1)
    return [memory.series_of("a step of pretraining on a whole volume", [case], 1, 900.0, masked_row)]


def masked_row(case: Case, runs: Measured, first: Measured) -> Row:
    """Returns a case's row of the table; as ``memory.row``."""
    config, common = case.config, memory.row(case, runs, first)
    return {
        **common,
        "net": f"ViT {config.embed_dim} x {config.depth}, rebuilt by {config.rebuild_width} x {config.rebuild_blocks}",
        "visible": num_visible(int(runs[0]["tokens"]), config.mask_ratio),
        "share of one process": sum(r["held"] for r in runs) / len(runs) / held_by_one(config),
    }


def held_by_one(config: Config) -> int:
    """Returns the bytes that one process holds for the backward of a step, counted."""
    return _count_held(replace(config, seqpar=1))


@cache
def _count_held(config: Config) -> int:
    step = count_step(StepSetup(config, on_gpu=False))
    return step.tokens + step.decoder
