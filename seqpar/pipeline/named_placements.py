"""Placements by name: where a pipe cuts a network."""

import re
from collections.abc import Callable

from seqpar.pipeline.best_cuts import best_cuts, best_rings
from seqpar.pipeline.gabra import gabra_stages
from seqpar.pipeline.placement import Pipe, best_placement, cuts_by_size, equal_cuts
from seqpar.pipeline.stages import StageMap

_Way = Callable[[Pipe, str], StageMap]


def _auto(pipe: Pipe, objective: str) -> StageMap:
    return best_placement(pipe, [best_cuts, best_rings, equal_cuts, cuts_by_size])


PLACEMENTS: dict[str, _Way] = {
    "auto": _auto,
    "cuts": lambda pipe, objective: best_cuts(pipe),
    "rings": lambda pipe, objective: best_rings(pipe),
    "gabra": gabra_stages,
    "by-size": lambda pipe, objective: cuts_by_size(pipe),
    "equal": lambda pipe, objective: equal_cuts(pipe),
}


def place_cells(way: str, pipe: Pipe, objective: str = "makespan") -> StageMap:
    """Returns the stages of a placement by its name, or of cuts such as "3,7".

    auto is the best of exact cuts, exact rings, and cuts by number and by size: the shortest step, or one as short as
    far as can be foretold that holds less.
    """
    if way in PLACEMENTS:
        return PLACEMENTS[way](pipe, objective)
    return pipe.stages(parse_cuts(way, len(pipe.places), len(pipe.takes)))


def parse_cuts(text: str, count: int, num_cells: int = 0) -> list[int]:
    """Returns the cuts of "3,7" for ``count`` places; raises ValueError for what cannot be, on so many cells."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(
            f"--placement {text}: choose {', '.join(PLACEMENTS)}, or the cells before which to cut, such as 3,7"
        )
    cuts = list(map(int, text.split(",")))
    if len(cuts) != count - 1:
        cut = "1 cut makes" if len(cuts) == 1 else f"{len(cuts)} cuts make"
        raise ValueError(
            f"--placement {text}: {cut} {len(cuts) + 1} stages, and --pipe is {count}: give {count - 1}, or "
            "--placement auto"
        )
    if num_cells and not all(a < b for a, b in zip([0, *cuts], [*cuts, num_cells])):
        raise ValueError(
            f"--placement {text}: the network has {num_cells} cells: ascending numbers below it are needed"
        )
    return cuts
