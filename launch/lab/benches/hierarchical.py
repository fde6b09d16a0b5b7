"""Measures memory and time of a training step of an encoder of stages by ranks, where all tokens see each other and in
windows.

Measured as in ``memory``. ``share of one process`` is what a rank holds for backward to what one process holds of the
same step, which is counted on shapes without data.
"""

import math
from dataclasses import replace

from lab.benches import memory
from lab.benches.masked import held_by_one
from lab.benches.memory import Case, Measured
from lab.benches.series import Row, Series
from seqpar.models.build import family_of
from seqpar.settings.config import Config

STAGES = Config(
    tile=(96, 96, 96), patch=(4, 4, 4), encoder="hierarchical", stage_depths=(2, 2, 2), embed_dim=48, heads=3,
    attention="gather-kv", decoder="unetr", decoder_width=8, mode="halo", batch=1, device="cpu",
)  # fmt: skip
RANKS = (1, 2, 4)
WINDOWS = {"all tokens": 0, "windows": 4}


def series(quick: bool = False) -> list[Series]:
    """Returns one series: a step on each number of ranks, of tokens that all see each other and in windows."""
    config = replace(STAGES, tile=(64, 64, 64)) if quick else STAGES
    cases = [
        Case(name, replace(config, seqpar=ranks, window=window), ranks)
        for name, window in WINDOWS.items()
        for ranks in RANKS
    ]
    what = f"a training step of stages of {' + '.join(map(str, config.stage_depths))} blocks, tile {config.tile[0]}"
    return [memory.series_of(what, cases, 1, 10.0 if quick else 18.0, row)]


def row(case: Case, runs: Measured, first: Measured) -> Row:
    """Returns a case's row of the table; as ``memory.row``."""
    held = sum(r["held"] for r in runs) / len(runs)
    return {
        **memory.row(case, runs, first),
        "net": family_of(case.config).describe(case.config),
        "tokens": math.prod(side // p for side, p in zip(case.config.tile, case.config.patch)),  # before they merge
        "share of one process": held / held_by_one(case.config),
    }
