"""The settings that say which ranks share a tile, and how: its tokens, and the stages of the network."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from seqpar.attention.strategies import NAMES
from seqpar.decoders.modes.named_modes import MODES
from seqpar.parallel.layout import SPLITS
from seqpar.pipeline.gabra import OBJECTIVES
from seqpar.pipeline.named_placements import PLACEMENTS
from seqpar.pipeline.schedule import SCHEDULES
from seqpar.settings.field import AT_LEAST_1, SUPERVISED, Circumstances, setting
from seqpar.settings.network_settings import TOKENS

AUTO = 0  # value of --seqpar auto: the planner chooses
_parallel = partial(setting, section="tile and ranks")
_LESSONS = "the lessons of --curriculum have their own"


def _alone(config: Any, here: Circumstances) -> str:
    """Returns why a setting of groups does nothing in a group of one; a sweep over --seqpar may begin with it."""
    return "with --seqpar 1" if here.seqpar == 1 else ""


_shared = partial(_parallel, idle_here=_alone)


@dataclass(frozen=True)
class ParallelSettings:
    """Tiles, the ranks that share one, and stages; a part of ``Config``."""

    tile: tuple[int, ...] = _parallel(
        (96, 96, 96),
        "sides of a tile, the crop of a training step, in voxels: one number or three",
        metavar="VOXELS",
        common=True,
        acts_when=lambda c: not c.curriculum,
        why=_LESSONS,
        fixed="positions and the stages of U-Nets follow from it",
    )
    patch: tuple[int, ...] = _parallel(
        (16, 16, 16),
        "sides of a patch, the block of voxels of one token: 2, 4, 8 or 16, or three of them",
        metavar="VOXELS",
        common=True,
        networks=TOKENS,
        fixed="the weights have its shape",
    )
    seqpar: int = _parallel(
        1,
        "ranks (processes, usually one per GPU) that share a tile; auto: the fewest whose memory suffices",
        bounds=AT_LEAST_1,
        metavar="RANKS",
        common=True,
    )
    split: str = _shared("spatial", "which tokens of a tile a rank holds", choices=SPLITS)
    mode: str = _shared(
        "gather",
        "what a rank decodes: the whole tile (gather), its box (halo), whole samples (swap), one of these two (auto), "
        "or its part as if there were no other (nogather)",
        choices=MODES,
        common=True,
        tasks=SUPERVISED,
    )
    attention: str = _shared(
        "auto",
        f"how attention crosses ranks: auto, {', '.join(NAMES)}, hybrid:U",
        metavar="STRATEGY",
        networks=TOKENS,
        acts_when=lambda c: not c.window,
        why="--window {window} fetches from neighbours",
    )
    keep_kv: bool = _shared(False, "keep gathered keys and values: fewer bytes sent, more memory", networks=TOKENS)
    heads_per_chunk: int = _shared(
        0,
        "heads whose keys and values are gathered at a time; 0: by size",
        metavar="HEADS",
        networks=TOKENS,
        acts_when=lambda c: not c.window,
        why="--window {window} takes all heads at once",
    )
    measured: str = _parallel(
        "",
        "measurements of launch/doctor.py (--json) to choose and plan by",
        metavar="FILE",
        acts_when=lambda c: c.seqpar == AUTO or not c.batch or (c.seqpar > 1 and c.attention == "auto"),
        why="size, batch and attention are given, so that it decides nothing",
    )
    pipe: int = _parallel(
        1, "ranks over which the network's layers are spread, in stages", bounds=AT_LEAST_1, metavar="RANKS"
    )
    pipe_schedule: str = _parallel(
        "1f1b",
        "order of the forward and backward passes of --pipe",
        choices=SCHEDULES,
        acts_when=lambda c: c.pipe > 1,
        why="--pipe is 1",
    )
    placement: str = _parallel(
        "auto",
        f"where --pipe cuts the network: {', '.join(PLACEMENTS)}, or 3,7",
        metavar="PLACEMENT",
        acts_when=lambda c: c.pipe > 1,
        why="--pipe is 1",
    )
    objective: str = _parallel(
        "makespan",
        "what gabra optimises: the time of the busiest place, or the published sum (paper)",
        choices=tuple(OBJECTIVES),
        acts_when=lambda c: c.placement == "gabra",
        why="--placement {placement} has one objective",
    )

    @property
    def group_ranks(self) -> int:
        """The ranks that share a tile: those of all stages."""
        return max(1, self.seqpar) * self.pipe
