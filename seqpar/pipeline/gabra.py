"""GABRA, the genetic algorithm that places partitions of a network on devices, as its paper has it.

The paper ("Hybrid parallelism for 3D residual attention networks", Algorithm 1) maximises the sum of load over capacity
of each partition's device. Where capacities are equal that sum is the same for every allocation, so that the search
has nothing to find: "makespan", the seconds of the fullest device, is the other objective.

What the paper leaves open, and what is taken here: 20 individuals, 500 turns; each parent is the better of two drawn
at random; crossover at one point (its probability of 0.8 is the paper's); a fifth of the children have a segment
reversed; a child that is known already, or not feasible, is dropped, but its turn counts, or the search need not end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seqpar.pipeline.placement import Pipe
from seqpar.pipeline.stages import StageMap

Array = np.ndarray
Objective = Callable[[Array, Array, Array], float]  # of allocation, loads and capacities; more is better
ATTEMPTS = 1000  # to draw a feasible allocation
SLACK = 1.25  # how much more than its share a place may get, where nobody states capacities


def paper_objective(allocation: Array, loads: Array, capacities: Array) -> float:
    """Returns the paper's sum of load over capacity."""
    return float((loads / capacities[allocation]).sum())


def makespan(allocation: Array, loads: Array, capacities: Array) -> float:
    """Returns the negated time of the fullest place, a capacity being a speed."""
    return -float((np.bincount(allocation, loads, len(capacities)) / capacities).max())


OBJECTIVES: dict[str, Objective] = {"makespan": makespan, "paper": paper_objective}


@dataclass(frozen=True)
class Search:
    """How GABRA searches; the defaults are those of this file's head."""

    population: int = 20
    turns: int = 500
    crossover: float = 0.8
    mutation: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.population < 2 or self.turns < 0 or not (0 <= self.crossover <= 1 and 0 <= self.mutation <= 1):
            raise ValueError(f"{self}: two individuals at least, and probabilities from 0 to 1")


@dataclass(frozen=True)
class Allocation:
    """Where each partition goes, its objective, and the best objective at the start and after every turn."""

    devices: tuple[int, ...]
    value: float
    history: tuple[float, ...]


def gabra(
    loads: Sequence[float], capacities: Sequence[float], objective: str = "paper", search: Search | None = None
) -> Allocation:
    """Returns the best allocation that the search meets: feasible, and the same for the same arguments.

    Feasible: no device gets more than its capacity, and each gets a partition. Raises ValueError where none is found.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"--objective {objective}: choose {' or '.join(OBJECTIVES)}")
    search, p, d = search or Search(), np.asarray(loads, float), np.asarray(capacities, float)
    if len(p) < len(d):
        raise ValueError(f"{len(p)} partitions cannot give each of {len(d)} devices one")
    dice, judge = np.random.default_rng(search.seed), OBJECTIVES[objective]
    people = [_draw(p, d, dice) for _ in range(search.population)]
    values = [judge(allocation, p, d) for allocation in people]
    best, value = people[int(np.argmax(values))], max(values)
    known, history = {allocation.tobytes() for allocation in people}, [value]
    for _ in range(search.turns):
        child = _child(people, values, search, dice)
        if is_feasible(child, p, d) and child.tobytes() not in known:
            worst = int(np.argmin(values))
            known = (known - {people[worst].tobytes()}) | {child.tobytes()}
            people[worst], values[worst] = child, judge(child, p, d)
            if values[worst] > value:
                best, value = child, values[worst]
        history.append(value)
    return Allocation(tuple(best.tolist()), value, tuple(history))


def is_feasible(allocation: Array, loads: Array, capacities: Array) -> bool:
    """Returns whether no device has more than its capacity, and each has a partition."""
    full = np.bincount(allocation, loads, len(capacities)) > capacities * (1 + 1e-9)
    return not full.any() and bool((np.bincount(allocation, minlength=len(capacities)) > 0).all())


def _draw(loads: Array, capacities: Array, dice: np.random.Generator) -> Array:
    """Returns a random feasible allocation; in the last attempts the largest partitions are placed first."""
    for attempt in range(ATTEMPTS):
        order = dice.permutation(len(loads))
        if attempt > ATTEMPTS // 2:
            order = order[np.argsort(-loads[order], kind="stable")]
        allocation, left = np.zeros(len(loads), int), capacities * (1 + 1e-9)
        for at in order:
            fits = np.flatnonzero(left >= loads[at])
            if not len(fits):
                break
            allocation[at] = dice.choice(fits)
            left[allocation[at]] -= loads[at]
        else:
            if is_feasible(allocation, loads, capacities):
                return allocation
    raise ValueError(
        f"{len(loads)} partitions of {loads.sum():.3g} in all were not made to fit the capacities "
        f"{', '.join(f'{capacity:.3g}' for capacity in capacities)}: allow more, or use fewer devices"
    )


def _child(people: Sequence[Array], values: Sequence[float], search: Search, dice: np.random.Generator) -> Array:
    """Returns what selection, crossover and inversion make of two individuals."""

    def select() -> Array:
        return people[max(dice.integers(len(people), size=2), key=lambda number: values[number])]

    one, other = select(), select()
    child = one.copy()
    if dice.random() < search.crossover and len(child) > 1:
        at = dice.integers(1, len(child))
        child[at:] = other[at:]
    if dice.random() < search.mutation:
        low, high = sorted(dice.choice(len(child) + 1, 2, replace=False))
        child[low:high] = child[low:high][::-1].copy()
    return child


def loads_and_capacities(pipe: Pipe) -> tuple[list[float], list[float]]:
    """Returns what GABRA places: each cell's seconds, and each place's capacity.

    That is ``SLACK`` times its share of all seconds by its speed, and the longest cell's at least.
    """
    loads = [cost.seconds for cost in pipe.costs]
    speed = sum(place.speed for place in pipe.places)
    return loads, [max(max(loads), SLACK * sum(loads) * place.speed / speed) for place in pipe.places]


def gabra_stages(pipe: Pipe, objective: str = "makespan", search: Search | None = None) -> StageMap:
    """Returns the stages that GABRA finds: cells are the partitions, and their seconds the loads."""
    allocation = gabra(*loads_and_capacities(pipe), objective, search)
    return StageMap.of_allocation(pipe.takes, pipe.outputs, allocation.devices)
