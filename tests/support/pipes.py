"""Random networks, costs, placements and tensors of pipes, for the tests."""

import random

from seqpar.pipeline.cells import IMAGE
from seqpar.pipeline.placement import CellCost, Pipe, StagePlace
from seqpar.pipeline.stages import StageMap


def random_takes(dice: random.Random, num_cells: int) -> tuple[tuple[int, ...], ...]:
    """Returns cells of which most take the last one's output, and some others of any age, or the image."""
    takes = []
    for cell in range(num_cells):
        first = cell - 1 if dice.random() < 0.8 else dice.randint(IMAGE, cell - 1)
        more = {dice.randint(IMAGE, cell - 1) for _ in range(dice.choice((0, 0, 1, 2)))} - {first}
        takes.append((first, *sorted(more)))
    return tuple(takes)


def random_stages(dice: random.Random, num_cells: int, num_places: int) -> StageMap:
    """Returns cells at any places, of which each has one at least; the loss takes one or two outputs."""
    allocation = [*range(num_places), *(dice.randrange(num_places) for _ in range(num_cells - num_places))]
    dice.shuffle(allocation)
    outputs = sorted({num_cells - 1, dice.randrange(num_cells)})
    return StageMap.of_allocation(random_takes(dice, num_cells), outputs, allocation)


def random_pipe(dice: random.Random, num_cells: int, num_places: int, differ: bool = False) -> Pipe:
    """Returns cells of random costs on places that are alike, or that ``differ``, with little memory."""
    costs = [
        CellCost(dice.random(), 2 * dice.random(), *(dice.randint(low, 9) for low in (1, 0, 0, 0, 0)))
        for _ in range(num_cells)
    ]
    micros, schedule = dice.choice((1, 2, 5)), dice.choice(("gpipe", "1f1b"))
    whole = 1 + sum(cost.state + cost.held * micros for cost in costs)
    places = [
        StagePlace(dice.choice((1.0, 0.5)), whole * dice.choice((0.6, 2.0))) if differ else StagePlace()
        for _ in range(num_places)
    ]
    per_byte = dice.choice((0.0, 0.02))
    at_once, takes = dice.random() < 0.5, random_takes(dice, num_cells)
    return Pipe(takes, (num_cells - 1,), costs, tuple(places), micros, schedule, per_byte, at_once)
