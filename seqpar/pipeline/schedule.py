"""The order in which the places of a pipeline work: GPipe and 1F1B, for any assignment of stages to places.

A timetable is the greedy simulation of a step: whatever can start first starts first, backward before forward. It gives
both the order and the length. Every rank computes the same timetable, and each message has the same position in one
global order in its sender's and its receiver's list. So ranks never wait for each other in a circle, even if sends
block until they are received.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seqpar.pipeline.stages import StageMap

SCHEDULES = ("gpipe", "1f1b")


class Act(NamedTuple):
    """Forward or backward of a stage on a micro-batch."""

    is_forward: bool
    stage: int
    micro: int


class Message(NamedTuple):
    """A value sent from the stage ``source`` to the stage ``target``, or its gradient sent back."""

    is_forward: bool
    value: int
    source: int
    target: int
    micro: int


Event = Act | Message


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage's forward and backward on a micro-batch."""

    forward: Sequence[float]
    backward: Sequence[float]

    @classmethod
    def equal(cls, num_stages: int) -> "StageSeconds":
        """Returns equal stages whose backward takes twice as long as their forward."""
        return cls([1.0] * num_stages, [2.0] * num_stages)

    def of(self, act: Act) -> float:
        return (self.forward if act.is_forward else self.backward)[act.stage]


@dataclass(frozen=True)
class Timetable:
    """A step of a pipeline.

    - ``events``: of each place, in order
    - ``seconds``: until the last place has finished
    - ``busy``: seconds that each place works
    """

    events: tuple[tuple[Event, ...], ...]
    seconds: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The fraction of the step in which places are idle, over all places."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy)) if self.seconds else 0.0


def in_flight(schedule: str, num_stages: int, micros: int, stage: int) -> int:
    """Returns the maximum number of micro-batches for which a stage keeps what its backward needs."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: choose {' or '.join(SCHEDULES)}")
    return micros if schedule == "gpipe" else min(micros, num_stages - stage)


def make_timetable(
    stages: StageMap, micros: int, schedule: str = "1f1b", seconds: StageSeconds | None = None
) -> Timetable:
    """Returns the timetable of ``micros`` micro-batches; all ranks must pass the same ``seconds``.

    In gpipe, all forwards of a stage precede its first backward. In 1f1b, the number of micro-batches that a stage has
    between forward and backward is at most the number of stages from it to the last. In both, a stage takes
    micro-batches in order, so that gradients and running statistics add up as in one process.
    """
    return _Simulation(stages, micros, schedule, seconds or StageSeconds.equal(stages.num_stages)).run()


class _Simulation:
    """The state of a simulated step: acts that wait for others, acts that are ready, and each place's time so far."""

    def __init__(self, stages: StageMap, micros: int, schedule: str, seconds: StageSeconds) -> None:
        self.stages, self.micros, self.schedule, self.seconds = stages, micros, schedule, seconds
        everything = range(stages.num_stages), range(micros)
        self.acts = [Act(f, s, m) for m in everything[1] for s in everything[0] for f in (True, False)]
        self.waits = dict.fromkeys(self.acts, 0)  # number of acts that each waits for
        self.followers: dict[Act, list[Act]] = {act: [] for act in self.acts}
        for stage in everything[0]:
            for micro in everything[1]:
                self._add_rules(stage, micro)
        self.free = [0.0] * stages.num_places
        self.busy = [0.0] * stages.num_places
        self.ready = {act: 0.0 for act in self.acts if not self.waits[act]}
        self.since = dict.fromkeys(self.acts, 0.0)  # end of the last act that each waits for

    def _add_rules(self, stage: int, micro: int) -> None:
        limit = in_flight(self.schedule, self.stages.num_stages, self.micros, stage)
        forward, backward = Act(True, stage, micro), Act(False, stage, micro)
        last = self.micros - 1 if self.schedule == "gpipe" else micro
        self._let_wait(backward, Act(True, stage, last))
        for crossing in self.stages.enters(stage):
            self._let_wait(forward, Act(True, crossing.source, micro))
            self._let_wait(Act(False, crossing.source, micro), backward)
        if micro:
            self._let_wait(forward, Act(True, stage, micro - 1))
            self._let_wait(backward, Act(False, stage, micro - 1))
        if micro >= limit:
            self._let_wait(forward, Act(False, stage, micro - limit))

    def _let_wait(self, act: Act, first: Act) -> None:
        self.waits[act] += 1
        self.followers[first].append(act)

    def _begin(self, act: Act) -> float:
        return max(self.ready[act], self.free[self.stages.places[act.stage]])

    def _turn(self, act: Act) -> tuple[float, bool, int, int]:
        """Returns the priority: earliest start, then backward, older micro-batches, and stages that are almost done."""
        return self._begin(act), act.is_forward, act.micro, -act.stage if act.is_forward else act.stage

    def run(self) -> Timetable:
        order, done = list[Event](), 0
        sent: list[tuple[float, int, Message]] = []  # a heap by time of messages that are not in the order yet
        leaving, number = self._leaving(), 0
        while self.ready:
            act = min(self.ready, key=self._turn)
            begin = self._begin(act)
            while sent and sent[0][0] <= begin:
                order.append(heapq.heappop(sent)[2])
            end = self._do(act, begin)
            order.append(act)
            done += 1
            for message in leaving[act.is_forward, act.stage]:
                heapq.heappush(sent, (end, number, message._replace(micro=act.micro)))
                number += 1
        assert done == len(self.acts), "acts wait for each other"
        order += [message for _, _, message in sorted(sent)]
        return Timetable(self._of_places(order), max(self.free), tuple(self.busy))

    def _do(self, act: Act, begin: float) -> float:
        """Runs an act and returns when it ends."""
        place, seconds = self.stages.places[act.stage], self.seconds.of(act)
        end = self.free[place] = begin + seconds
        self.busy[place] += seconds
        del self.ready[act]
        for follower in self.followers[act]:
            self.waits[follower] -= 1
            self.since[follower] = max(self.since[follower], end)
            if not self.waits[follower]:
                self.ready[follower] = self.since[follower]
        return end

    def _leaving(self) -> dict[tuple[bool, int], list[Message]]:
        """Returns the messages that follow each stage's forward and backward."""
        leaving: dict[tuple[bool, int], list[Message]] = {
            (way, stage): [] for way in (True, False) for stage in range(self.stages.num_stages)
        }
        for value, source, target in self.stages.messages:
            leaving[True, source].append(Message(True, value, source, target, 0))
            leaving[False, target].append(Message(False, value, source, target, 0))
        return leaving

    def _of_places(self, order: Sequence[Event]) -> tuple[tuple[Event, ...], ...]:
        lists: list[list[Event]] = [[] for _ in self.free]
        for event in order:
            ends = [event.stage] if isinstance(event, Act) else [event.source, event.target]
            for stage in ends:
                lists[self.stages.places[stage]].append(event)
        return tuple(map(tuple, lists))
