"""Placements: the exact programmes are the best of all, baselines are what they say, all is judged by timetables."""

import itertools
import random
import time

import pytest

from seqpar.pipeline.best_cuts import best_cuts, best_rings
from seqpar.pipeline.placement import (
    CellCost,
    Pipe,
    StagePlace,
    best_placement,
    cuts_by_size,
    equal_cuts,
    even_cuts,
    pick_placement,
)
from seqpar.pipeline.stages import StageMap
from tests.support.pipes import random_pipe, random_takes


def all_cuts(pipe: Pipe):
    num, count = len(pipe.takes), len(pipe.places)
    for inner in itertools.combinations(range(1, num), count - 1):
        for places in itertools.permutations(range(count)):
            yield StageMap(pipe.takes, pipe.outputs, (0, *inner, num), places)


def all_rings(pipe: Pipe):
    num, count = len(pipe.takes), len(pipe.places)
    for inner in itertools.combinations(range(1, num), 2 * count - 2):
        for order in itertools.permutations(range(count)):
            yield StageMap(pipe.takes, pipe.outputs, (0, *inner, num), (*order, *order[-2::-1]))


@pytest.mark.parametrize(("programme", "every"), [(best_cuts, all_cuts), (best_rings, all_rings)])
@pytest.mark.parametrize("differ", [False, True])
def test_the_exact_programmes_equal_the_best_of_all(programme, every, differ: bool) -> None:
    dice, refused = random.Random(f"{programme.__name__} {differ}"), 0
    for _ in range(40):
        count = dice.randint(1, 3)
        pipe = random_pipe(dice, dice.randint(2 * count - 1, 8), count, differ)
        seconds = [pipe.slowest(stages) for stages in every(pipe) if pipe.fits(stages)]
        try:
            found = programme(pipe)
        except ValueError as problem:
            assert "no placement" in str(problem) and not seconds
            refused += 1
            continue
        assert pipe.fits(found) and pipe.slowest(found) == pytest.approx(min(seconds), rel=1e-12)
    assert (0 < refused < 20) if differ else refused == 0


def test_loads_are_cut_so_that_the_largest_sum_is_least() -> None:
    dice = random.Random(3)
    for _ in range(50):
        loads = [dice.randint(0, 9) for _ in range(dice.randint(1, 9))]
        count = dice.randint(1, len(loads))
        sums = [largest(loads, inner) for inner in itertools.combinations(range(1, len(loads)), count - 1)]
        assert largest(loads, even_cuts(loads, count)) == min(sums)


def largest(loads: list[int], inner) -> int:
    return max(sum(loads[a:b]) for a, b in itertools.pairwise((0, *inner, len(loads))))


def unbalanced() -> Pipe:
    """Returns a U-Net's cells: the last ones, at full resolution, take most of the time, and skips are large."""
    seconds = (2.0, 1.0, 0.5, 0.25, 0.25, 0.5, 1.5, 4.0, 3.0)
    takes = ((-1,), (0,), (1,), (2,), (3,), (4, 2), (5, 1), (6, 0), (7,))
    costs = [CellCost(s, 2 * s, round(8 * s), round(100 * s), 4) for s in seconds]
    return Pipe(takes, (8,), costs, (StagePlace(),) * 2, 8, "1f1b", 0.01)


def test_ways_are_judged_by_the_length_of_their_timetables() -> None:
    pipe = unbalanced()
    seconds = {way: pipe.timetable(way(pipe)).seconds for way in (best_cuts, best_rings, equal_cuts, cuts_by_size)}
    assert seconds[best_cuts] < seconds[equal_cuts]
    assert best_placement(pipe, [equal_cuts, best_cuts]) == best_cuts(pipe)
    assert seconds[best_rings] < seconds[best_cuts] and best_placement(pipe, [best_rings, best_cuts]) == best_cuts(pipe)
    assert max(pipe.memory(best_cuts(pipe))) < 0.9 * max(pipe.memory(best_rings(pipe)))
    assert [len(equal_cuts(pipe).cells(stage)) for stage in range(2)] == [4, 5]


def test_memory_decides_between_steps_that_cannot_be_told_apart() -> None:
    """Within the 8 % by which the clock may turn two foretold lengths round; nearly equal bytes leave it to time."""
    rings, cuts = (28.6, 58.0), (30.1, 31.0)
    assert pick_placement([rings, cuts]) == 1 and pick_placement([cuts, rings]) == 0
    assert pick_placement([rings, (31.0, 31.0)]) == 0, "8.4 % longer"
    assert pick_placement([(28.6, 32.0), cuts]) == 0, "3 % more bytes"
    assert pick_placement([rings, (30.5, 30.0), cuts]) == 2, "of the two that hold about as little the shorter one"


@pytest.mark.parametrize(("first", "taken"), [(2.9, 1), (2.5, 2)])
def test_a_cut_that_holds_half_as_much_is_taken_if_its_step_is_as_short(first: float, taken: int) -> None:
    """The middle cell holds all; at the first place for two micro-batches, at the second for one."""
    seconds, held = (first, 3.0 - first, 3.0), (1, 100, 1)
    costs = [CellCost(s, 2 * s, 1, size) for s, size in zip(seconds, held)]
    pipe = Pipe(((-1,), (0,), (1,)), (2,), costs, (StagePlace(),) * 2, 8)
    cuts = {cell: pipe.stages([cell]) for cell in (1, 2)}
    assert pipe.timetable(cuts[2]).seconds < pipe.timetable(cuts[1]).seconds
    assert max(pipe.memory(cuts[2])) > 1.9 * max(pipe.memory(cuts[1]))
    assert best_placement(pipe, [lambda pipe: cuts[1], lambda pipe: cuts[2]]) == cuts[taken]


def test_rings_keep_skips_at_home_where_pooling_is_a_cell() -> None:
    takes = ((-1,), (0,), (1,), (2,), (3,), (4,), (5, 2), (6,), (7, 0), (8,))
    costs = [CellCost(1.0, 2.0, output) for output in (64, 8, 16, 2, 4, 16, 16, 64, 64, 3)]
    pipe = Pipe(takes, (9,), costs, (StagePlace(),) * 2, 8, "1f1b", 0.001)
    sent = [sum(pipe.costs[m.value].output for m in way(pipe).messages) for way in (best_cuts, best_rings)]
    assert best_rings(pipe).places == (0, 1, 0) and 3 * sent[1] < sent[0]


def test_a_placement_beyond_the_memory_is_not_taken() -> None:
    pipe = unbalanced()
    narrow = Pipe(pipe.takes, pipe.outputs, pipe.costs, (StagePlace(memory=3000), StagePlace()), 8, "gpipe", 0.01)
    assert not narrow.fits(best_cuts(pipe)) and narrow.fits(best_cuts(narrow))
    with pytest.raises(ValueError, match="no placement of 9 cells on 2 places fits"):
        best_placement(Pipe(pipe.takes, pipe.outputs, pipe.costs, (StagePlace(memory=9),) * 2, 8), [best_cuts])
    place_bytes = narrow.memory(best_cuts(narrow))
    assert place_bytes[0] <= 3000 < place_bytes[1]
    alternating = Pipe(pipe.takes, pipe.outputs, pipe.costs, (StagePlace(memory=3000), StagePlace()), 8, "1f1b", 0.01)
    assert alternating.memory(best_cuts(narrow)) < place_bytes  # fewer micro-batches are under way


def test_a_faster_place_gets_more() -> None:
    takes = tuple((cell - 1,) for cell in range(9))
    pipe = Pipe(takes, (8,), [CellCost(1.0, 2.0)] * 9, (StagePlace(), StagePlace(2.0)), 4)
    found = best_cuts(pipe)
    assert [len(found.cells_at(place)) for place in range(2)] == [3, 6]


def test_thirty_seven_cells_on_eight_places_take_a_second() -> None:
    dice = random.Random(1)
    costs = [CellCost(dice.random(), dice.random(), 5) for _ in range(37)]
    pipe = Pipe(random_takes(dice, 37), (36,), costs, (StagePlace(),) * 8, 8, "1f1b", 0.001)
    began = time.process_time()
    cuts, rings = best_cuts(pipe), best_rings(pipe)
    assert pipe.timetable(cuts).seconds > 0 and pipe.timetable(rings).seconds > 0
    assert time.process_time() - began < 20  # about one; this only catches a programme of another order


def test_too_many_places_are_refused() -> None:
    with pytest.raises(
        ValueError, match="pipe=3: the network has 2 cells, and each place needs one: use a smaller `pipe`"
    ):
        Pipe(((-1,), (0,)), (1,), [CellCost(1, 1)] * 2, (StagePlace(),) * 3)
    with pytest.raises(ValueError, match="rings of 2 places need 3 cells, but the network has 2"):
        best_rings(Pipe(((-1,), (0,)), (1,), [CellCost(1, 1)] * 2, (StagePlace(),) * 2))
