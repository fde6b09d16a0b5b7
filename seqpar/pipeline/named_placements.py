"""Placements by name: where a pipeline cuts a network."""

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
    """Returns the stages of a named placement, or of explicit cuts such as "3,7".

    "auto" takes the best of exact cuts, exact rings, and cuts by number and by size: the shortest step or, among steps
    that are equally short within the accuracy of the prediction, the one that needs least memory.
    """
    if way in PLACEMENTS:
        return PLACEMENTS[way](pipe, objective)
    return pipe.stages(parse_cuts(way, len(pipe.places), len(pipe.takes)))


def parse_cuts(text: str, count: int, num_cells: int = 0) -> list[int]:
    """Parses "3,7" to the cuts of ``count`` places; raises ValueError if they do not fit ``num_cells`` cells."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(
            f"placement={text!r}: choose {', '.join(PLACEMENTS)}, or the cells before which to cut, such as 3,7"
        )
    cuts = list(map(int, text.split(",")))
    if len(cuts) != count - 1:
        cut = "1 cut makes" if len(cuts) == 1 else f"{len(cuts)} cuts make"
        raise ValueError(
            f"placement={text!r}: {cut} {len(cuts) + 1} stages, but pipe={count} needs {count - 1}: give these, or "
            "placement='auto'"
        )
    if num_cells and not all(a < b for a, b in zip([0, *cuts], [*cuts, num_cells])):
        raise ValueError(f"placement={text!r}: the network has {num_cells} cells: give ascending numbers below that")
    return cuts
