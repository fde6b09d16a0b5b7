"""GABRA, the published genetic algorithm that places partitions of a network on devices.

The paper (Akintoye et al., "A Hybrid Parallelization Approach for Distributed and Scalable Deep Learning", Algorithm 1)
maximizes the sum of load over capacity of each partition's device. If capacities are equal, that sum is the same for
every allocation, so the search has nothing to optimize; "makespan", the seconds of the busiest device, is the
alternative objective, which ``--placement gabra`` takes unless ``--objective paper`` asks for the published one.

What the paper leaves open is chosen as follows: 20 individuals, 500 turns; each parent is the better of two drawn at
random (its text has chromosomes of lower fitness selected, which would not maximize); one-point crossover (its
probability of 0.8 is the paper's); a fifth of the children have a segment reversed; a child that is a duplicate or not
feasible is dropped, but its turn counts, so that the search always ends.

Its equations 1 and 2 update each partition with gradients that are as many steps old as it is deep. Training over a
pipe is synchronous here: all stages step with gradients of the same batch, since every layout computes what one process
does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seqpar.pipeline.placement import Pipe
from seqpar.pipeline.stages import StageMap

Array = np.ndarray
Objective = Callable[[Array, Array, Array], float]  # takes allocation, loads and capacities; higher is better
ATTEMPTS = 1000  # at drawing a feasible allocation
SLACK = 1.25  # a place's default capacity, as a multiple of its share


def paper_objective(allocation: Array, loads: Array, capacities: Array) -> float:
    """Returns the paper's sum of load over capacity."""
    return float((loads / capacities[allocation]).sum())


def makespan(allocation: Array, loads: Array, capacities: Array) -> float:
    """Returns the negative time of the busiest place, taking capacities as speeds."""
    return -float((np.bincount(allocation, loads, len(capacities)) / capacities).max())


OBJECTIVES: dict[str, Objective] = {"makespan": makespan, "paper": paper_objective}


@dataclass(frozen=True)
class Search:
    """The parameters of GABRA's search; see the module's docstring for the defaults."""

    population: int = 20
    turns: int = 500
    crossover: float = 0.8
    mutation: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.population < 2 or self.turns < 0 or not (0 <= self.crossover <= 1 and 0 <= self.mutation <= 1):
            raise ValueError(f"{self}: needs at least two individuals, and probabilities in [0, 1]")


@dataclass(frozen=True)
class Allocation:
    """The device of each partition, the objective, and the best objective at the start and after every turn."""

    devices: tuple[int, ...]
    value: float
    history: tuple[float, ...]


def gabra(
    loads: Sequence[float], capacities: Sequence[float], objective: str = "paper", search: Search | None = None
) -> Allocation:
    """Returns the best feasible allocation that the search finds; the result is deterministic.

    An allocation is feasible if no device exceeds its capacity and each has a partition. Raises ValueError if none is
    found.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r}: choose {' or '.join(OBJECTIVES)}")
    search, p, d = search or Search(), np.asarray(loads, float), np.asarray(capacities, float)
    if len(p) < len(d):
        raise ValueError(f"{len(p)} partitions are too few for {len(d)} devices: each needs one")
    rng, judge = np.random.default_rng(search.seed), OBJECTIVES[objective]
    individuals = [_draw(p, d, rng) for _ in range(search.population)]
    values = [judge(allocation, p, d) for allocation in individuals]
    best, value = individuals[int(np.argmax(values))], max(values)
    known, history = {allocation.tobytes() for allocation in individuals}, [value]
    for _ in range(search.turns):
        child = _child(individuals, values, search, rng)
        if is_feasible(child, p, d) and child.tobytes() not in known:
            worst = int(np.argmin(values))
            known = (known - {individuals[worst].tobytes()}) | {child.tobytes()}
            individuals[worst], values[worst] = child, judge(child, p, d)
            if values[worst] > value:
                best, value = child, values[worst]
        history.append(value)
    return Allocation(tuple(best.tolist()), value, tuple(history))


def is_feasible(allocation: Array, loads: Array, capacities: Array) -> bool:
    """Returns whether no device exceeds its capacity and each has a partition."""
    full = np.bincount(allocation, loads, len(capacities)) > capacities * (1 + 1e-9)
    return not full.any() and bool((np.bincount(allocation, minlength=len(capacities)) > 0).all())


def _draw(loads: Array, capacities: Array, rng: np.random.Generator) -> Array:
    """Returns a random feasible allocation; later attempts place the largest partitions first."""
    for attempt in range(ATTEMPTS):
        order = rng.permutation(len(loads))
        if attempt > ATTEMPTS // 2:
            order = order[np.argsort(-loads[order], kind="stable")]
        allocation, left = np.zeros(len(loads), int), capacities * (1 + 1e-9)
        for at in order:
            fits = np.flatnonzero(left >= loads[at])
            if not len(fits):
                break
            allocation[at] = rng.choice(fits)
            left[allocation[at]] -= loads[at]
        else:
            if is_feasible(allocation, loads, capacities):
                return allocation
    raise ValueError(
        f"found no allocation of {len(loads)} partitions, {loads.sum():.3g} in total, within the capacities "
        f"{', '.join(f'{capacity:.3g}' for capacity in capacities)}: increase them, or use fewer devices"
    )


def _child(individuals: Sequence[Array], values: Sequence[float], search: Search, rng: np.random.Generator) -> Array:
    """Returns a child of two selected individuals, after crossover and inversion."""
    one, other = (individuals[select(values, rng)] for _ in range(2))
    child = one.copy()
    if rng.random() < search.crossover and len(child) > 1:
        child = cross(one, other, rng)
    if rng.random() < search.mutation:
        child = invert(child, rng)
    return child


def select(values: Sequence[float], rng: np.random.Generator) -> int:
    """Returns the better of two individuals that are drawn at random, by its number."""
    return int(max(rng.integers(len(values), size=2), key=lambda number: values[number]))


def cross(one: Array, other: Array, rng: np.random.Generator) -> Array:
    """Returns the first genes of ``one`` and the last genes of ``other``, at least one of each."""
    at = rng.integers(1, len(one))
    return np.concatenate([one[:at], other[at:]])


def invert(child: Array, rng: np.random.Generator) -> Array:
    """Returns the child with a segment of its genes in reverse order."""
    low, high = sorted(rng.choice(len(child) + 1, 2, replace=False))
    return np.concatenate([child[:low], child[low:high][::-1], child[high:]])


def loads_and_capacities(pipe: Pipe) -> tuple[list[float], list[float]]:
    """Returns GABRA's input for a pipeline: each cell's seconds, and each place's capacity.

    A capacity is ``SLACK`` times the place's share of all seconds by speed, but at least the longest cell's seconds.
    """
    loads = [cost.seconds for cost in pipe.costs]
    speed = sum(place.speed for place in pipe.places)
    return loads, [max(max(loads), SLACK * sum(loads) * place.speed / speed) for place in pipe.places]


def gabra_stages(pipe: Pipe, objective: str = "makespan", search: Search | None = None) -> StageMap:
    """Returns the stages that GABRA finds, with cells as partitions and their seconds as loads."""
    allocation = gabra(*loads_and_capacities(pipe), objective, search)
    return StageMap.of_allocation(pipe.takes, pipe.outputs, allocation.devices)
