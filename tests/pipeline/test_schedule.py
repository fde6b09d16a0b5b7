"""Timetables: every rank has the same, none waits in a circle, and known pipes take as long as theory says."""

import itertools
import random
from collections import Counter, deque

import pytest

from seqpar.pipeline.schedule import Act, Message, StageSeconds, Timetable, in_flight, make_timetable
from seqpar.pipeline.stages import StageMap
from tests.support.pipes import random_stages


def chain(num_stages: int) -> StageMap:
    takes = tuple((cell - 1,) for cell in range(num_stages))
    return StageMap.of_cuts(takes, (num_stages - 1,), range(1, num_stages))


def run_in_rendezvous(stages: StageMap, timetable: Timetable) -> int:
    """Returns how many events took place where one waits for nothing but its turn, and a message for both ends.

    An act raises unless everything that it takes is there; the rest of a pipe that waits in a circle never ran.
    """
    lists, done = [deque(events) for events in timetable.events], 0
    arrived, made = set[Message](), set[Act]()
    moved = True
    while moved:
        moved = False
        for place, events in enumerate(lists):
            if not events:
                continue
            event = events[0]
            if isinstance(event, Act):
                assert stages.places[event.stage] == place
                refuse_early(stages, event, arrived, made)
                made.add(event)
                events.popleft()
            else:
                ends = {stages.places[event.source], stages.places[event.target]}
                if any(not lists[end] or lists[end][0] != event for end in ends):
                    continue
                assert Act(event.is_forward, event.source if event.is_forward else event.target, event.micro) in made
                arrived.add(event)
                for end in ends:
                    lists[end].popleft()
            done, moved = done + 1, True
    return done


def refuse_early(stages: StageMap, act: Act, arrived: set[Message], made: set[Act]) -> None:
    sides = stages.enters(act.stage) if act.is_forward else stages.leaves(act.stage)
    for value, source, target in sides:
        if stages.places[source] != stages.places[target]:
            assert Message(act.is_forward, value, source, target, act.micro) in arrived, (act, value)
        else:
            assert Act(act.is_forward, source if act.is_forward else target, act.micro) in made, (act, value)
    assert act.is_forward or Act(True, act.stage, act.micro) in made
    assert not act.micro or act._replace(micro=act.micro - 1) in made, "micro-batches are out of order"


def random_seconds(dice: random.Random, num_stages: int) -> StageSeconds:
    """Returns seconds of stages, some of which take no time at all."""
    times = [[dice.choice((0.0, dice.random(), 5 * dice.random())) for _ in range(num_stages)] for _ in range(2)]
    return StageSeconds(*times)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_any_network_map_and_cost_runs_through_without_a_circle(schedule: str) -> None:
    dice, several = random.Random(schedule), 0
    for _ in range(200):
        num_places = dice.randint(1, 5)
        stages = random_stages(dice, dice.randint(num_places, 14), num_places)
        micros = dice.randint(1, 6)
        timetable = make_timetable(stages, micros, schedule, random_seconds(dice, stages.num_stages))
        acts, messages = 2 * micros * stages.num_stages, 2 * micros * len(stages.messages)
        assert run_in_rendezvous(stages, timetable) == acts + messages
        several += stages.num_stages > num_places and len(stages.messages) > 3
    assert several > 100  # a place with several stages, and skips


def test_a_list_that_is_out_of_the_common_order_hangs() -> None:
    """The control: two messages of one place in another order."""
    stages = StageMap.of_cuts(((-1,), (0,), (0, 1)), (2,), (2,))
    timetable = make_timetable(stages, 1)
    first, *others = timetable.events
    a, b = (at for at, event in enumerate(first) if isinstance(event, Message) and event.is_forward)
    turned = list(first)
    turned[a], turned[b] = turned[b], turned[a]
    whole = sum(len(events) for events in timetable.events) - len([e for e in first if isinstance(e, Message)])
    assert run_in_rendezvous(stages, timetable) == whole
    assert run_in_rendezvous(stages, Timetable((tuple(turned), *others), 1.0, (1.0, 1.0))) < whole


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "micros"), [(1, 3), (2, 1), (3, 8), (4, 4), (8, 32)])
def test_equal_stages_take_what_theory_says(schedule: str, num_stages: int, micros: int) -> None:
    timetable = make_timetable(chain(num_stages), micros, schedule)
    assert timetable.seconds == pytest.approx(3 * (micros + num_stages - 1))
    assert timetable.bubble == pytest.approx((num_stages - 1) / (micros + num_stages - 1))


def acts_of(timetable: Timetable, place: int) -> list[tuple[str, int]]:
    return [("B F"[2 * e.is_forward], e.micro) for e in timetable.events[place] if isinstance(e, Act)]


def test_one_stage_a_place_has_the_known_orders() -> None:
    count, micros = 3, 5
    for place in range(count):
        forwards, backwards = [("F", m) for m in range(micros)], [("B", m) for m in range(micros)]
        assert acts_of(make_timetable(chain(count), micros, "gpipe"), place) == forwards + backwards
        warm = count - 1 - place
        steady = itertools.chain.from_iterable(zip(forwards[warm:], backwards))
        want = [*forwards[:warm], *steady, *backwards[micros - warm :]]
        assert acts_of(make_timetable(chain(count), micros, "1f1b"), place) == want


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_stage_holds_more_micro_batches_than_stated(schedule: str) -> None:
    dice = random.Random(7)
    for _ in range(30):
        stages, micros = random_stages(dice, 9, 3), dice.randint(1, 6)
        timetable = make_timetable(stages, micros, schedule, random_seconds(dice, stages.num_stages))
        most, now = Counter[int](), Counter[int]()
        for event in (e for events in timetable.events for e in events if isinstance(e, Act)):
            now[event.stage] += 1 if event.is_forward else -1
            most[event.stage] = max(most[event.stage], now[event.stage])
        limits = {s: in_flight(schedule, stages.num_stages, micros, s) for s in range(stages.num_stages)}
        assert all(most[stage] <= limits[stage] for stage in limits)
        assert schedule == "1f1b" or most == limits


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule='zigzag': choose gpipe or 1f1b"):
        make_timetable(chain(2), 2, "zigzag")


def test_skips_go_directly_to_each_stage_that_takes_them() -> None:
    stages = StageMap.of_cuts(((-1,), (0,), (1,), (2, 0), (3, 0, -1)), (4, 1), (1, 3, 4))
    assert [tuple(message) for message in stages.messages] == [
        (0, 0, 1),
        (0, 0, 2),
        (2, 1, 2),
        (0, 0, 3),
        (1, 1, 3),
        (3, 2, 3),
    ]
    assert [crossing.target for crossing in stages.leaves(0)] == [3, 2, 1]  # gradients add up as in one process
    assert [stages.takes_image(stage) for stage in range(4)] == [True, False, False, True]


def test_cells_of_no_output_neither_run_nor_cross() -> None:
    stages = StageMap.of_cuts(((-1,), (0,), (0,), (2,)), (3,), (1, 2))
    assert [stages.runs(stage) for stage in range(3)] == [[0], [], [2, 3]]
    assert [tuple(message) for message in stages.messages] == [(0, 0, 2)]


@pytest.mark.parametrize(
    ("cuts", "places", "problem"),
    [
        ((0, 2, 2, 4), (0, 1, 2), "cuts 2,2: 4 cells need ascending cuts from 1 to 3"),
        ((0, 2, 5), (0, 1), "cuts 2: 4 cells"),
        ((0, 2, 4), (0, 2), "without gaps"),
        ((0, 2, 4), (0,), "each of 2 stages needs one"),
    ],
)
def test_stages_that_cannot_be_are_refused(cuts: tuple, places: tuple, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        StageMap(((-1,), (0,), (1,), (2,)), (3,), cuts, places)
