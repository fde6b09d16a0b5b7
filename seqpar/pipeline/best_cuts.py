"""Exact searches for the cuts whose slowest place is as fast as possible, within every place's memory.

Legend: P places, n cells. Equal places are interchangeable, so a state is how many places of each kind have been used:
P + 1 states if all are equal, 2^P if all differ.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from seqpar.pipeline.placement import Pipe, StagePlace
from seqpar.pipeline.schedule import in_flight
from seqpar.pipeline.stages import StageMap

Used = tuple[int, ...]  # how many places of each kind
Array = np.ndarray


def best_cuts(pipe: Pipe) -> StageMap:
    """Returns one stage per place, such that the slowest place, including its messages, is as fast as possible.

    If places differ, the search also decides which takes which stage. Raises ValueError if no cut leaves every place
    within its memory.
    """
    kinds, num = _Kinds(pipe.places), len(pipe.takes)
    totals, sent = _Totals(pipe), _sent_of_runs(pipe)
    before: dict[Used, Array] = {kinds.none: np.where(np.arange(num + 1) == 0, 0.0, np.inf)}  # by the next cell
    came: dict[tuple[Used, int], tuple[Used, int]] = {}
    for stage in range(len(pipe.places)):
        alive = in_flight(pipe.schedule, len(pipe.places), pipe.micros, stage)
        after: dict[Used, Array] = {}
        for used, worst in before.items():
            for place, then in kinds.next(used):
                seconds = totals.seconds / place.speed + 2 * pipe.seconds_per_byte * sent
                seconds[totals.bytes(alive) > place.memory] = np.inf
                slowest = np.maximum(worst[:, None], seconds)  # by the stage's first cell and the first cell after it
                least, start = slowest.min(0), slowest.argmin(0)
                better = least < after.setdefault(then, np.full(num + 1, np.inf))
                after[then][better] = least[better]
                came.update({(then, end): (used, int(start[end])) for end in np.flatnonzero(better).tolist()})
        before = after
    if not np.isfinite(before[kinds.all][num]):
        raise ValueError(_no_fit(pipe))
    used, cuts, chosen = kinds.all, [num], list[int]()
    while cuts[0]:
        earlier, start = came[used, cuts[0]]
        chosen.insert(0, kinds.place_of(earlier, used))
        used = earlier
        cuts.insert(0, start)
    return StageMap(pipe.takes, pipe.outputs, tuple(cuts), tuple(chosen))


def best_rings(pipe: Pipe) -> StageMap:
    """Returns the fastest nested stages: each place but one has a piece at either end, so that skips stay on one place.

    The innermost place has one stage, the others have two. Raises ValueError like ``best_cuts``.
    """
    count, num = len(pipe.places), len(pipe.takes)
    if num < 2 * count - 1:
        raise ValueError(f"rings of {count} places need {2 * count - 1} cells, but the network has {num}")
    kinds, rings = _Kinds(pipe.places), _Rings(pipe)
    layers: list[dict[Used, dict[tuple[int, int], _Ring]]] = [{kinds.none: {(0, num): _Ring(0.0)}}]
    for ring in range(count - 1):
        layers.append(rings.inside(layers[-1], ring, kinds))
    best: tuple[float, Used, tuple[int, int]] = (math.inf, kinds.none, (0, num))
    for used, cores in layers[-1].items():
        (place, _) = next(kinds.next(used))
        for core, found in cores.items():
            seconds = max(found.worst, rings.core_seconds(core, place))
            best = min(best, (seconds, used, core))
    if best[0] == math.inf:
        raise ValueError(_no_fit(pipe))
    _, used, core = best
    low, high, chosen = [core[0]], [core[1]], [kinds.place_of(used, kinds.all)]
    for layer in reversed(layers[1:]):
        found = layer[used][core]
        chosen.insert(0, kinds.place_of(found.used, used))
        used, core = found.used, found.outer
        low.insert(0, core[0])
        high.append(core[1])
    return StageMap(pipe.takes, pipe.outputs, (*low, *high), (*chosen, *reversed(chosen[:-1])))


class _Kinds:
    """Groups of equal places."""

    def __init__(self, places: Sequence[StagePlace]) -> None:
        self.kinds = list(dict.fromkeys(places))
        self.members = [[at for at, place in enumerate(places) if place == kind] for kind in self.kinds]
        self.none: Used = (0,) * len(self.kinds)
        self.all: Used = tuple(map(len, self.members))

    def next(self, used: Used) -> Iterator[tuple[StagePlace, Used]]:
        """Yields each kind with an unused place, and the state after using one."""
        for number, kind in enumerate(self.kinds):
            if used[number] < self.all[number]:
                yield kind, (*used[:number], used[number] + 1, *used[number + 1 :])

    def place_of(self, before: Used, after: Used) -> int:
        """Returns the place that is used between two states."""
        (number,) = [number for number, (a, b) in enumerate(zip(before, after)) if a != b]
        return self.members[number][before[number]]


class _Totals:
    """Seconds and bytes of the cells ``[first, end)``, as arrays over both; seconds of empty ranges are infinite."""

    def __init__(self, pipe: Pipe) -> None:
        def runs(values: Sequence[float]) -> Array:
            sums = np.concatenate([[0.0], np.cumsum(values)])
            return sums[None, :] - sums[:, None]

        self.seconds = runs([cost.seconds for cost in pipe.costs])
        self.held, self.state = runs([cost.held for cost in pipe.costs]), runs([cost.state for cost in pipe.costs])
        num = len(pipe.costs)
        self.seconds[np.tril_indices(num + 1)] = np.inf
        self.moment = _worst_of_runs([cost.moment for cost in pipe.costs])
        updates = [cost.update for cost in pipe.costs]
        self.update = runs(updates) if pipe.updates_at_once else _worst_of_runs(updates)
        before, sizes = _members_before(pipe)
        inside = before[None, :, :] > before[:, None, :]
        self.taken = (inside & _made_before(num)[:, None, :]) @ sizes  # bytes received from earlier cells

    def bytes(self, alive: int) -> Array:
        """Returns the bytes of a place that holds these cells, with ``alive`` micro-batches in flight."""
        return self.state + np.maximum(alive * (self.held + self.taken) + self.moment, self.update)


def _worst_of_runs(sizes: Sequence[int]) -> Array:
    """Returns the maximum over the cells ``[first, end)``."""
    worst = np.zeros((len(sizes) + 1, len(sizes) + 1))
    for first in range(len(sizes)):
        worst[first, first + 1 :] = np.maximum.accumulate(sizes[first:])
    return worst


def _members_before(pipe: Pipe) -> tuple[Array, Array]:
    """Returns how many members of each value come before each cell, and the size of each value in bytes."""
    counts = np.zeros((len(pipe.takes) + 1, len(pipe.takes)), int)
    for value, members in enumerate(pipe.members):
        for member in members:
            counts[member + 1 :, value] += 1
    return counts, np.array([cost.output for cost in pipe.costs], float)


def _made_before(num: int) -> Array:
    """Returns, for each cell and for the end, which values are made before it."""
    return np.arange(num)[None, :] < np.arange(num + 1)[:, None]


def _sent_of_runs(pipe: Pipe) -> Array:
    """Returns the bytes of the values that cross the borders of the cells ``[first, end)``."""
    before, sizes = _members_before(pipe)
    inside = before[None, :, :] - before[:, None, :]
    return ((inside > 0) & (inside < before[-1])) @ sizes


@dataclass(frozen=True)
class _Ring:
    """The fastest rings around a core: the seconds of the slowest, and the core and state before the last ring."""

    worst: float
    used: Used = ()
    outer: tuple[int, int] = (0, 0)


class _Rings:
    """Cells of a core ``[first, end)``, and of the pieces on either side of a core inside it."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe, self.num, self.count = pipe, len(pipe.takes), len(pipe.places)
        self.totals, (self.before, self.sizes) = _Totals(pipe), _members_before(pipe)
        self.core_bytes = _sent_of_runs(pipe)
        self._sent: dict[tuple[int, int], Array] = {}

    def inside(
        self, layer: dict[Used, dict[tuple[int, int], _Ring]], ring: int, kinds: _Kinds
    ) -> dict[Used, dict[tuple[int, int], _Ring]]:
        """Returns the fastest ways to add a ring inside those of ``layer``, by state and core."""
        result: dict[Used, dict[tuple[int, int], _Ring]] = {}
        for used, cores in layer.items():
            for place, then in kinds.next(used):
                best = result.setdefault(then, {})
                for outer, found in cores.items():
                    slowest = np.maximum(found.worst, self._ring_seconds(outer, ring, place))
                    for low, high in np.argwhere(np.isfinite(slowest)).tolist():
                        core = outer[0] + low, outer[0] + high
                        if slowest[low, high] < best.get(core, _Ring(math.inf)).worst:
                            best[core] = _Ring(float(slowest[low, high]), used, outer)
        return result

    def core_seconds(self, core: tuple[int, int], place: StagePlace) -> float:
        """Returns the seconds of the innermost place, infinite if its memory is too small."""
        alive = in_flight(self.pipe.schedule, 2 * self.count - 1, self.pipe.micros, self.count - 1)
        if self.totals.bytes(alive)[core] > place.memory:
            return math.inf
        seconds = self.totals.seconds[core] / place.speed
        return float(seconds + 2 * self.pipe.seconds_per_byte * self.core_bytes[core])

    def _ring_seconds(self, outer: tuple[int, int], ring: int, place: StagePlace) -> Array:
        """Returns the seconds of both pieces around each core ``[low, high)``, counted from the outer core's start."""
        first, end = outer
        low, high = np.s_[first, first : end + 1], np.s_[first : end + 1, end]  # pieces [first, low) and [high, end)
        totals, schedule = self.totals, (self.pipe.schedule, 2 * self.count - 1, self.pipe.micros)
        early, late = in_flight(*schedule, ring), in_flight(*schedule, 2 * self.count - 2 - ring)
        seconds = (totals.seconds[low][:, None] + totals.seconds[high][None, :]) / place.speed
        seconds = seconds + 2 * self.pipe.seconds_per_byte * self._ring_bytes(outer)
        state = totals.state[low][:, None] + totals.state[high][None, :]
        of_micro = totals.held + totals.taken
        micro_bytes = early * of_micro[low][:, None] + late * of_micro[high][None, :]
        moment = np.maximum(totals.moment[low][:, None], totals.moment[high][None, :])
        together = np.add if self.pipe.updates_at_once else np.maximum
        update = together(totals.update[low][:, None], totals.update[high][None, :])
        rows = np.arange(end - first + 1)
        of_step = micro_bytes + moment - late * self._at_home(outer)
        full = state + np.maximum(of_step, update) > place.memory
        seconds[full | (rows[:, None] >= rows[None, :])] = np.inf
        return seconds

    def _at_home(self, outer: tuple[int, int]) -> Array:
        """Returns the bytes that the later piece takes from the earlier one."""
        first, end = outer
        made = _made_before(self.num)
        made_early = made[first : end + 1] & ~made[first]
        taken_late = (self.before[end] > self.before[first : end + 1]) & made[first : end + 1]
        return made_early.astype(float) @ (taken_late * self.sizes).T

    def _ring_bytes(self, outer: tuple[int, int]) -> Array:
        if outer not in self._sent:
            first, end = outer
            within = self.before[first : end + 1]
            inside = (within - within[0])[:, None, :] + (within[-1] - within)[None, :, :]
            self._sent[outer] = ((inside > 0) & (inside < self.before[-1])) @ self.sizes
        return self._sent[outer]


def _no_fit(pipe: Pipe) -> str:
    least = min(place.memory for place in pipe.places)
    return (
        f"no placement of {len(pipe.takes)} cells on {len(pipe.places)} places fits a memory of {least / 2**30:.3g} "
        "GiB: use a larger `pipe`, a smaller `batch`, or schedule='1f1b'"
    )
