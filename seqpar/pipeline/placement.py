"""What a pipeline places, and how placements are compared: by the length of their timetable, then by their memory.

Every rank computes the same result from the same costs: the rank that measures them sends them to the others.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from seqpar.pipeline.cells import IMAGE, cells_needed
from seqpar.pipeline.schedule import StageSeconds, Timetable, in_flight, make_timetable
from seqpar.pipeline.stages import StageMap, Takes

Number = TypeVar("Number", int, float)
# Steps whose predicted lengths differ by less count as equal: measured times were 0.95 to 1.02 of the prediction.
TIMES_ALIKE = 1.08
BYTES_ALIKE = 1.05


@dataclass(frozen=True)
class CellCost:
    """What a cell costs per micro-batch.

    - ``forward``, ``backward``: seconds on a place of speed 1
    - ``output``: bytes of its output
    - ``held``: bytes that it keeps for backward
    - ``state``: bytes of its weights with gradients and optimizer states, independent of micro-batches
    - ``moment``: additional bytes while it runs
    - ``update``: additional bytes while its weights are updated
    """

    forward: float
    backward: float
    output: int = 0
    held: int = 0
    state: int = 0
    moment: int = 0
    update: int = 0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class StagePlace:
    """A place of the pipeline: its relative speed, and how many bytes its stages may use."""

    speed: float = 1.0
    memory: float = math.inf

    def __post_init__(self) -> None:
        if self.speed <= 0 or self.memory <= 0:
            raise ValueError(f"{self}: speed and memory must be positive")


@dataclass(frozen=True)
class Pipe:
    """A network's cells and the places on which they are put.

    - ``takes``, ``outputs``: as in ``StageMap``
    - ``costs``: of each cell
    - ``places``: in the order of the pipe group
    - ``micros``, ``schedule``: of the step
    - ``seconds_per_byte``: time per byte of a message, during which both ends are busy
    - ``updates_at_once``: whether a place updates all its weights at once rather than in turn
    """

    takes: Takes
    outputs: tuple[int, ...]
    costs: Sequence[CellCost]
    places: tuple[StagePlace, ...]
    micros: int = 1
    schedule: str = "1f1b"
    seconds_per_byte: float = 0.0
    updates_at_once: bool = False

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.takes):
            raise ValueError(f"got {len(self.costs)} costs for {len(self.takes)} cells")
        check_num_cells(len(self.takes), len(self.places))

    def stages(self, inner: Sequence[int]) -> StageMap:
        """Returns one stage per place, cut before the cells ``inner``."""
        return StageMap.of_cuts(self.takes, self.outputs, inner)

    def timetable(self, stages: StageMap) -> Timetable:
        """Returns the simulated step of a placement."""
        return make_timetable(stages, self.micros, self.schedule, self.stage_seconds(stages))

    def stage_seconds(self, stages: StageMap) -> StageSeconds:
        """Returns each stage's seconds, including its messages."""
        sent = [0] * stages.num_stages
        for crossing in stages.messages:
            sent[crossing.source] += self.costs[crossing.value].output
            sent[crossing.target] += self.costs[crossing.value].output
        both = []
        for way in ("forward", "backward"):
            own = [sum(getattr(self.costs[c], way) for c in stages.cells(s)) for s in range(stages.num_stages)]
            speeds = [self.places[place].speed for place in stages.places]
            both.append([a / speed + self.seconds_per_byte * b for a, speed, b in zip(own, speeds, sent)])
        return StageSeconds(*both)

    def memory(self, stages: StageMap) -> list[int]:
        """Returns each place's peak memory in bytes: weights and states, and what a step or its update adds."""
        together, every = sum if self.updates_at_once else max, list[int]()
        for place, saved in enumerate(self.saved(stages)):
            own = [self.costs[c] for c in stages.cells_at(place)]
            step, update = saved + max(cost.moment for cost in own), together(cost.update for cost in own)
            every.append(sum(cost.state for cost in own) + max(step, update))
        return every

    def saved(self, stages: StageMap) -> list[int]:
        """Returns the bytes that each place keeps for the backward of all micro-batches in flight.

        A stage's inputs from other places are included.
        """
        every = [0] * stages.num_places
        for stage, place in enumerate(stages.places):
            alive = in_flight(self.schedule, stages.num_stages, self.micros, stage)
            taken = sum(self.costs[c.value].output for c in stages.enters(stage) if stages.is_message(c))
            every[place] += alive * (taken + sum(self.costs[cell].held for cell in stages.cells(stage)))
        return every

    def fits(self, stages: StageMap) -> bool:
        """Returns whether every place has enough memory for its stages."""
        return all(held <= place.memory for held, place in zip(self.memory(stages), self.places))

    def slowest(self, stages: StageMap) -> float:
        """Returns the seconds of the slowest place per micro-batch, which the exact searches minimize.

        A value that crosses a place's border counts there once, forward and backward, wherever it goes.
        """
        worst = 0.0
        for place, at in zip(self.places, map(stages.cells_at, range(stages.num_places))):
            own = sum(self.costs[cell].seconds for cell in at)
            worst = max(worst, own / place.speed + 2 * self.seconds_per_byte * self._crossing_bytes(at))
        return worst

    def _crossing_bytes(self, cells: Sequence[int]) -> int:
        inside = set(cells)
        crossing = [v for v, members in enumerate(self.members) if members & inside and members - inside]
        return sum(self.costs[value].output for value in crossing)

    @cached_property
    def members(self) -> tuple[frozenset[int], ...]:
        """For each value, the cells that make or take it; the loss takes the outputs at the last cell."""
        last = len(self.takes) - 1
        members = [{value} for value in range(last + 1)]
        for cell in cells_needed(self.takes, self.outputs):
            for value in self.takes[cell]:
                if value != IMAGE:
                    members[value].add(cell)
        for value in self.outputs:
            members[value].add(last)
        return tuple(map(frozenset, members))


def check_num_cells(num_cells: int, num_places: int) -> None:
    """Raises ValueError if there are fewer cells than places."""
    if not 1 <= num_places <= num_cells:
        raise ValueError(
            f"pipe={num_places}: the network has {num_cells} cells, and each place needs one: use a smaller `pipe`"
        )


def equal_cuts(pipe: Pipe) -> StageMap:
    """Returns stages with equal numbers of cells."""
    count, num_cells = len(pipe.places), len(pipe.takes)
    return pipe.stages([num_cells * stage // count for stage in range(1, count)])


def cuts_by_size(pipe: Pipe) -> StageMap:
    """Returns the cut whose largest stage has the fewest bytes, counting weights twice.

    This is what torchgpipe's ``balance_by_size`` approximates by a heuristic.
    """
    sizes = [cost.held + 2 * cost.state for cost in pipe.costs]
    return pipe.stages(even_cuts(sizes, len(pipe.places)))


def even_cuts(loads: Sequence[Number], count: int) -> list[int]:
    """Returns where to cut ``loads`` into ``count`` runs such that the largest sum is minimal."""
    num = len(loads)
    totals = [loads[0] * 0]
    for load in loads:
        totals.append(totals[-1] + load)
    best = [[math.inf] * (num + 1) for _ in range(count + 1)]  # by number of runs and number of loads
    cut = [[0] * (num + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for runs in range(1, count + 1):
        for end in range(runs, num + 1):
            worst = [max(best[runs - 1][start], totals[end] - totals[start]) for start in range(runs - 1, end)]
            best[runs][end] = min(worst)
            cut[runs][end] = runs - 1 + worst.index(best[runs][end])
    inner, end = list[int](), num
    for runs in range(count, 1, -1):
        end = cut[runs][end]
        inner.insert(0, end)
    return inner


def best_placement(pipe: Pipe, ways: Sequence[Callable[[Pipe], StageMap]]) -> StageMap:
    """Returns the best placement of ``ways``, as ``pick_placement`` defines it.

    Ways that find none within the memory are skipped; if all fail, raises the first one's ValueError.
    """
    found, problems = list[StageMap](), list[ValueError]()
    for way in ways:
        try:
            stages = way(pipe)
        except ValueError as problem:
            problems.append(problem)
            continue
        if pipe.fits(stages):
            found.append(stages)
    if not found:
        raise problems[0] if problems else ValueError("no placement fits the memory: use more places")
    return found[pick_placement([(pipe.timetable(stages).seconds, max(pipe.memory(stages))) for stages in found])]


def pick_placement(every: Sequence[tuple[float, float]]) -> int:
    """Returns the index of the placement to take, given each one's seconds per step and the bytes of its fullest place.

    Among the steps that are the shortest within the accuracy of the prediction, takes the one that needs least memory,
    and the shorter one if their memory is about the same.
    """
    shortest = min(seconds for seconds, _ in every)
    short = [at for at, (seconds, _) in enumerate(every) if seconds <= TIMES_ALIKE * shortest]
    least = min(every[at][1] for at in short)
    return min((at for at in short if every[at][1] <= BYTES_ALIKE * least), key=lambda at: every[at][0])
