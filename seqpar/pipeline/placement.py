"""What a pipe has to place, and how a placement is judged: by the length of its timetable, then by what it holds.

Every rank computes the same from the same costs: who measures them tells the others.
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
# steps whose lengths differ by less may be in the other order by the clock, which ran 0.95 to 1.02 of what was foretold
TIMES_ALIKE = 1.08
BYTES_ALIKE = 1.05


@dataclass(frozen=True)
class CellCost:
    """What a cell costs on a micro-batch.

    - ``forward``, ``backward``: seconds on a place of speed 1
    - ``output``: bytes of what it gives
    - ``held``: bytes that it keeps for backward
    - ``state``: bytes of its weights with gradients and optimizer states, whatever the micro-batches
    - ``moment``: bytes that are alive beside these while it runs
    - ``update``: bytes that are alive beside weights and states while its weights are updated
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
    """A place of the pipe: how fast it is beside others, and how many bytes its stages may hold."""

    speed: float = 1.0
    memory: float = math.inf

    def __post_init__(self) -> None:
        if self.speed <= 0 or self.memory <= 0:
            raise ValueError(f"{self}: speed and memory must be positive")


@dataclass(frozen=True)
class Pipe:
    """A network's cells and the places to which they go.

    - ``takes``, ``outputs``: as in ``StageMap``
    - ``costs``: of each cell
    - ``places``: in the order of the pipe group
    - ``micros``, ``schedule``: of the step
    - ``seconds_per_byte``: for which both ends of a message are busy
    - ``updates_at_once``: whether a place updates all its weights at once, else in turn
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
            raise ValueError(f"{len(self.costs)} costs came for {len(self.takes)} cells")
        check_num_cells(len(self.takes), len(self.places))

    def stages(self, inner: Sequence[int]) -> StageMap:
        """Returns one stage a place, cut before the cells ``inner``."""
        return StageMap.of_cuts(self.takes, self.outputs, inner)

    def timetable(self, stages: StageMap) -> Timetable:
        """Returns the simulated step of a placement."""
        return make_timetable(stages, self.micros, self.schedule, self.stage_seconds(stages))

    def stage_seconds(self, stages: StageMap) -> StageSeconds:
        """Returns each stage's seconds, those of what it sends and receives included."""
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
        """Returns the bytes of each place at its worst: weights and states, and what a step or its update adds."""
        together, every = sum if self.updates_at_once else max, list[int]()
        for place, saved in enumerate(self.saved(stages)):
            own = [self.costs[c] for c in stages.cells_at(place)]
            step, update = saved + max(cost.moment for cost in own), together(cost.update for cost in own)
            every.append(sum(cost.state for cost in own) + max(step, update))
        return every

    def saved(self, stages: StageMap) -> list[int]:
        """Returns the bytes of each place that backward needs of all micro-batches under way.

        What a stage took from other places is among them.
        """
        every = [0] * stages.num_places
        for stage, place in enumerate(stages.places):
            alive = in_flight(self.schedule, stages.num_stages, self.micros, stage)
            taken = sum(self.costs[c.value].output for c in stages.enters(stage) if stages.is_message(c))
            every[place] += alive * (taken + sum(self.costs[cell].held for cell in stages.cells(stage)))
        return every

    def fits(self, stages: StageMap) -> bool:
        """Returns whether every place has the memory for its stages."""
        return all(held <= place.memory for held, place in zip(self.memory(stages), self.places))

    def slowest(self, stages: StageMap) -> float:
        """Returns the seconds of the slowest place on a micro-batch: what the exact programmes minimise.

        A value that crosses a place's border counts once there, forward and backward, wherever it goes.
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
        """Of each value the cells that make it or take it; the loss takes outputs at the last cell."""
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
    """Raises ValueError where there are fewer cells than places."""
    if not 1 <= num_places <= num_cells:
        raise ValueError(f"--pipe {num_places}: the network has {num_cells} cells, and each rank needs one: use fewer")


def equal_cuts(pipe: Pipe) -> StageMap:
    """Returns stages of equally many cells."""
    count, num_cells = len(pipe.places), len(pipe.takes)
    return pipe.stages([num_cells * stage // count for stage in range(1, count)])


def cuts_by_size(pipe: Pipe) -> StageMap:
    """Returns the cut whose largest stage holds fewest bytes, weights twice, as torchgpipe's ``balance_by_size``.

    torchgpipe comes near to it by a heuristic; here it is the least.
    """
    sizes = [cost.held + 2 * cost.state for cost in pipe.costs]
    return pipe.stages(even_cuts(sizes, len(pipe.places)))


def even_cuts(loads: Sequence[Number], count: int) -> list[int]:
    """Returns where to cut ``loads`` into ``count`` runs so that the largest sum is least."""
    num = len(loads)
    totals = [loads[0] * 0]
    for load in loads:
        totals.append(totals[-1] + load)
    best = [[math.inf] * (num + 1) for _ in range(count + 1)]  # of the first so many loads in so many runs
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
    """Returns the placement to take of those ways, see ``pick_placement``.

    A way that finds none within the memory is left out; raises its ValueError where no way finds one.
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
        raise problems[0] if problems else ValueError("no placement fits the memory: use more stages")
    return found[pick_placement([(pipe.timetable(stages).seconds, max(pipe.memory(stages))) for stages in found])]


def pick_placement(every: Sequence[tuple[float, float]]) -> int:
    """Returns which placement to take, by the seconds of each one's step and the bytes of its fullest place.

    Of those whose step is the shortest, as far as that can be foretold, the one that holds least; the shorter one where
    they hold about as much.
    """
    shortest = min(seconds for seconds, _ in every)
    short = [at for at, (seconds, _) in enumerate(every) if seconds <= TIMES_ALIKE * shortest]
    least = min(every[at][1] for at in short)
    return min((at for at in short if every[at][1] <= BYTES_ALIKE * least), key=lambda at: every[at][0])
