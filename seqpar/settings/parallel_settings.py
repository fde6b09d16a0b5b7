"""The settings of a run that say how its network is cut into stages on different ranks."""

from dataclasses import dataclass
from functools import partial

from seqpar.pipeline.gabra import OBJECTIVES
from seqpar.pipeline.named_placements import PLACEMENTS
from seqpar.pipeline.schedule import SCHEDULES
from seqpar.settings.field import AT_LEAST_1, setting

_layout = partial(setting, topic="layout")


@dataclass(frozen=True)
class PipeSettings:
    """Stages and their places; a part of ``Config``."""

    pipe: int = _layout(
        1, "ranks over which the network's layers are spread, in stages", bounds=AT_LEAST_1, metavar="RANKS"
    )
    pipe_schedule: str = _layout("1f1b", "order of a --pipe's forward and backward passes", choices=SCHEDULES)
    placement: str = _layout("auto", f"cuts of a --pipe: {', '.join(PLACEMENTS)}, or 3,7", metavar="PLACEMENT")
    objective: str = _layout("makespan", "aim of gabra: the shortest step, or as published", choices=tuple(OBJECTIVES))
