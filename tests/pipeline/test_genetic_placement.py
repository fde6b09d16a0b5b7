"""GABRA: always feasible, never worse than before, the best of all on small instances; the paper's objective."""

import itertools
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

import seqpar.pipeline.gabra as gabra_module
from seqpar.pipeline.best_cuts import best_cuts
from seqpar.pipeline.gabra import (
    OBJECTIVES,
    Search,
    cross,
    gabra,
    gabra_stages,
    invert,
    is_feasible,
    loads_and_capacities,
    select,
)
from seqpar.pipeline.placement import CellCost, Pipe, StagePlace


def instance(dice: random.Random, num: int, count: int, equal: bool) -> tuple[np.ndarray, np.ndarray]:
    loads = np.array([dice.randint(1, 9) for _ in range(num)], float)
    shares = np.array([1.0 if equal else dice.choice((0.5, 1.0, 2.0)) for _ in range(count)])
    return loads, np.maximum(1.5 * loads.sum() * shares / shares.sum(), loads.max())


def every_value(loads: np.ndarray, capacities: np.ndarray, objective: str) -> list[float]:
    allocations = (np.array(a) for a in itertools.product(range(len(capacities)), repeat=len(loads)))
    return [OBJECTIVES[objective](a, loads, capacities) for a in allocations if is_feasible(a, loads, capacities)]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_it_equals_the_best_of_all_on_small_instances(objective: str) -> None:
    dice = random.Random(objective)
    for number in range(6):
        loads, capacities = instance(dice, 5, 3, equal=number % 2 == 0)
        found = gabra(loads, capacities, objective, Search(population=40, turns=600, mutation=0.5, seed=number))
        assert found.value == pytest.approx(max(every_value(loads, capacities, objective)), rel=1e-12)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_it_is_always_feasible_and_its_best_never_falls(objective: str) -> None:
    dice, rose = random.Random(objective), 0
    for number in range(20):
        loads, capacities = instance(dice, dice.randint(4, 20), dice.randint(1, 4), equal=number % 2 == 0)
        found = gabra(loads, capacities, objective, Search(turns=100, seed=number))
        assert is_feasible(np.array(found.devices), loads, capacities)
        assert all(a <= b for a, b in itertools.pairwise(found.history)) and len(found.history) == 101
        assert found.value == found.history[-1] == OBJECTIVES[objective](np.array(found.devices), loads, capacities)
        assert found == gabra(loads, capacities, objective, Search(turns=100, seed=number))
        rose += found.history[-1] > found.history[0]
    assert rose > 0


def test_the_papers_objective_is_one_number_where_devices_are_equal() -> None:
    loads, capacities = instance(random.Random(0), 8, 3, equal=True)
    assert len(set(every_value(loads, capacities, "paper"))) == 1
    assert len(set(every_value(loads, capacities, "makespan"))) > 5  # the control
    loads, capacities = instance(random.Random(1), 6, 3, equal=False)
    assert len(set(every_value(loads, capacities, "paper"))) > 5


def made(operator: Callable[[np.random.Generator], np.ndarray]) -> set[tuple[int, ...]]:
    """Returns everything that an operator makes in many draws."""
    rng = np.random.default_rng(0)
    return {tuple(operator(rng).tolist()) for _ in range(2000)}


def test_crossover_takes_a_head_of_one_parent_and_the_rest_of_the_other() -> None:
    one, other = np.arange(6), np.arange(6) + 10
    assert made(lambda rng: cross(one, other, rng)) == {(*one[:at], *other[at:]) for at in range(1, 6)}


def test_inversion_reverses_any_segment() -> None:
    genes = tuple(range(6))
    segments = itertools.combinations(range(7), 2)
    wanted = {genes[:low] + genes[low:high][::-1] + genes[high:] for low, high in segments}
    assert made(lambda rng: invert(np.array(genes), rng)) == wanted


def test_the_better_of_two_is_selected() -> None:
    rng, values, draws = np.random.default_rng(0), [3.0, 1.0, 4.0, 2.0], 8000
    counts = np.bincount([select(values, rng) for _ in range(draws)], minlength=4) / draws
    ranks = np.argsort(np.argsort(values))
    assert np.abs(counts - (2 * ranks + 1) / 16).max() < 0.02, "the best of n is the better with 1 - (1 - 1/n)^2"


def test_children_are_made_by_these_operators() -> None:
    """Without crossover and inversion a child is a selected parent; with both it may be neither parent's gene order."""
    individuals, values = [np.arange(6), np.arange(6) + 10], [0.0, 1.0]

    def children(crossover: float, mutation: float) -> set[tuple[int, ...]]:
        search = Search(crossover=crossover, mutation=mutation)
        return made(lambda rng: gabra_module._child(individuals, values, search, rng))

    parents = {tuple(parent.tolist()) for parent in individuals}
    assert children(0, 0) == parents
    crossed = children(1, 0)
    assert len(crossed) == 2 + 2 * 5 and parents < crossed
    inverted = children(0, 1)
    assert len(inverted) == 2 * 16 and {tuple(sorted(child)) for child in inverted} == parents


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_new_feasible_child_takes_the_place_of_the_worst_and_any_other_is_dropped(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, capacities = instance(random.Random(2), 9, 3, equal=False)
    turns, make = list[tuple[list, list, np.ndarray]](), gabra_module._child

    def watched(individuals: list, values: list, *more: object) -> np.ndarray:
        child = make(individuals, values, *more)
        turns.append((list(individuals), list(values), child))
        return child

    monkeypatch.setattr(gabra_module, "_child", watched)
    gabra(loads, capacities, objective, Search(turns=200))
    kinds = set[str]()
    for (individuals, values, child), (after, values_after, _) in itertools.pairwise(turns):
        is_known = any((child == other).all() for other in individuals)
        kind = "known" if is_known else "new" if is_feasible(child, loads, capacities) else "too full"
        kinds.add(kind)
        if kind == "new":
            worst = int(np.argmin(values))
            individuals[worst], values[worst] = child, OBJECTIVES[objective](child, loads, capacities)
        assert values == values_after and all((a == b).all() for a, b in zip(individuals, after))
    assert kinds == {"known", "new", "too full"} and len(turns) == 200


def test_its_search_is_the_papers_where_that_says_it() -> None:
    assert Search() == Search(population=20, turns=500, crossover=0.8, mutation=0.2, seed=0)


def test_a_place_holds_a_quarter_more_than_its_share_and_the_longest_cell_at_least() -> None:
    def capacities(*seconds: float) -> list[float]:
        costs = [CellCost(each, 0, 10) for each in seconds]
        takes = tuple((cell - 1,) for cell in range(len(costs)))
        return loads_and_capacities(Pipe(takes, (len(costs) - 1,), costs, (StagePlace(),) * 2, 2, "1f1b", 0.01))[1]

    assert capacities(4.0, 4.0, 4.0, 4.0) == [1.25 * 8, 1.25 * 8] and capacities(9.0, 1.0) == [9, 9]


def test_thirty_seven_partitions_on_eight_devices_take_less_than_a_second() -> None:
    loads = np.random.default_rng(0).random(37)
    began = time.thread_time()  # of this thread alone: others on the machine do not count
    gabra(loads, np.full(8, 1.25 * loads.sum() / 8), "makespan")
    assert time.thread_time() - began < 1  # 0.1 measured


def test_its_stages_are_no_shorter_than_the_exact_cuts() -> None:
    dice = random.Random(5)
    costs = [CellCost(dice.random(), 2 * dice.random(), 10) for _ in range(12)]
    takes = tuple((cell - 1,) for cell in range(12))
    pipe = Pipe(takes, (11,), costs, (StagePlace(),) * 3, 6, "1f1b", 0.01)
    exact = pipe.timetable(best_cuts(pipe)).seconds
    for objective in OBJECTIVES:
        stages = gabra_stages(pipe, objective)
        assert set(stages.places) == {0, 1, 2}
        assert pipe.timetable(stages).seconds >= exact


@pytest.mark.parametrize(
    ("loads", "capacities", "objective", "problem"),
    [
        ([1.0, 1.0], [2.0] * 3, "paper", "2 partitions are too few for 3 devices"),
        ([1.0, 5.0], [4.0, 4.0], "paper", "within the capacities 4, 4"),
        ([1.0, 5.0], [6.0, 6.0], "best", "objective='best': choose makespan or paper"),
    ],
)
def test_what_cannot_be_placed_is_refused(loads, capacities, objective: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        gabra(loads, capacities, objective)
