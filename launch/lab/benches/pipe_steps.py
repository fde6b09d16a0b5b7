"""A step of micro-batches over a pipe, in one process, or by torch's pipelining: what the bench of pipes times."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lab.benches.other_libraries import torchs_step
from seqpar.cluster.devices import MIB
from seqpar.losses import DiceCE
from seqpar.models.build import build_network
from seqpar.models.network import Network
from seqpar.models.pipelined import PartOfBatch
from seqpar.parallel.consensus import gather_texts, max_over_ranks
from seqpar.parallel.mesh import Mesh
from seqpar.pipeline.cells import Value
from seqpar.pipeline.engine import Engine
from seqpar.pipeline.named_placements import place_cells
from seqpar.pipeline.placement import CellCost, Pipe, StagePlace, cuts_by_size
from seqpar.pipeline.stage_weights import keep_local_weights, places_of_names
from seqpar.pipeline.stages import StageMap
from seqpar.planner.cell_costs import OptimizerBytes, measure_cells
from seqpar.planner.memory_counter import MemoryCounter
from seqpar.settings.config import Config
from seqpar.training.stage_choice import broadcast_costs, seconds_per_byte

CHANNELS, CLASSES = 1, 3
Step = Callable[[], None]


class Bench:
    """A network, and its micro-batches of random numbers, on each of a pipe's ranks."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.net, self.loss_of = self._fresh(), DiceCE()
        dice = torch.Generator().manual_seed(0)
        image = torch.randn(config.batch, CHANNELS, *config.tile, generator=dice)
        label = torch.randint(CLASSES, (config.batch, *config.tile), generator=dice)
        self.micro = PartOfBatch(self.net.layout.cut(image, 0), self.net.layout)
        self.label = self.net.arrange(self.net.layout.cut(label, 0))

    def _fresh(self) -> Network:
        """Returns the network, with the same weights each time."""
        return build_network(self.config, CHANNELS, CLASSES, self.mesh.seq).train()

    @cached_property
    def costs(self) -> tuple[list[CellCost], float]:
        """What each cell costs, and the seconds of a byte between places: the first rank's, on all ranks."""
        costs = measure_cells(self.net, self.net.staged(), self.micro, nullcontext, OptimizerBytes(0.0), 3, self._loss)
        return broadcast_costs(self.mesh, costs, seconds_per_byte(self.mesh.pipe, self.mesh.device))

    def pipe(self, micros: int, schedule: str = "1f1b") -> Pipe:
        """Returns the cells with their measured costs, and equal places for them."""
        staged, (costs, per_byte) = self.net.staged(), self.costs
        places = (StagePlace(),) * self.mesh.pipe.size
        return Pipe(staged.takes, staged.outputs, costs, places, micros, schedule, per_byte)

    def timed(self, way: str, micros: int, repeats: int) -> dict[str, Any]:
        """Returns the least seconds of some steps; of a placement also what was foretold.

        ``way``: placement and objective, or torch's pipelining; "" for one process.
        """
        if not way:
            return {"seconds": self._clock(self._accumulated(micros), repeats)}
        name, _, objective = ("cuts", "", "") if way.startswith("torch") else way.partition(" ")
        pipe = self.pipe(micros)
        stages = place_cells(name, pipe, objective or "makespan")
        timetable = pipe.timetable(stages)
        step = self._torchs(stages, micros) if way.startswith("torch") else self.piped(stages, pipe)
        before = self.mesh.pipe.traffic.total()
        seconds = self._clock(step, repeats)
        return {
            "seconds": seconds,
            "foretold": timetable.seconds,
            "bubble": timetable.bubble,
            "cells": " ".join(f"{cells[0]}-{cells[-1]}" for cells in map(stages.cells, range(stages.num_stages)))
            if stages.num_stages < 5
            else f"{stages.num_stages} stages",
            "sent": (self.mesh.pipe.traffic.total() - before) / (repeats + 1) / 1e6,
        }

    def piped(self, stages: StageMap, pipe: Pipe, again: bool = False) -> Step:
        """Returns a step over the pipe, ``again``: backward computes stages again."""
        net, place = self._fresh(), self.mesh.pipe.index
        staged = net.staged()
        keep_local_weights(net, places_of_names(list(net.state_dict()), staged.owns, stages.place_of_cells), place)
        events = pipe.timetable(stages).events[place]
        engine = Engine(staged, stages, events, self.mesh.pipe, self.mesh.seq, self.mesh.device, again)

        def loss(values: Sequence[Value], micro: int) -> Tensor:
            return self._loss(values) / pipe.micros

        return lambda: engine.step([self.micro] * pipe.micros, loss)

    def _accumulated(self, micros: int) -> Step:
        def step() -> None:
            for _ in range(micros):
                (self.loss_of(self.net(self.micro.part), self.label) / micros).backward()

        return step

    def _torchs(self, stages: StageMap, micros: int) -> Step:
        return torchs_step(self._fresh(), stages, self.micro, self.label, self.loss_of, micros, self.mesh)

    def _loss(self, values: Sequence[Value]) -> Tensor:
        return self.loss_of(values[0][0], self.label)

    def _clock(self, step: Step, repeats: int) -> float:
        """Returns the least seconds of some steps after a first one; ranks begin each step together."""
        seconds = list[float]()
        for _ in range(repeats + 1):
            max_over_ranks(0, self.mesh.world)
            began = time.perf_counter()
            step()
            max_over_ranks(0, self.mesh.world)
            seconds.append(time.perf_counter() - began)
        return min(seconds[1:])


def counted_memory(bench: Bench, schedule: str, again: bool) -> dict[str, Any]:
    """Returns the MiB alive at the worst moment of a step on each place, and what GPipe's formula says of equal ones.

    With cells computed again that is N + L/K x N/M: what stages take of all micro-batches, and all that a K-th of the
    network holds of one; else what it holds of all that are under way. Images, weights and their gradients are apart.
    """
    micros, places = bench.config.accumulate, bench.mesh.pipe.size
    pipe = bench.pipe(micros, schedule)
    pipe = replace(pipe, costs=[replace(cost, state=0) for cost in pipe.costs])
    stages = cuts_by_size(pipe)
    step = bench.piped(stages, pipe, again)
    step()  # values describe themselves, and gradients are made
    with MemoryCounter() as counter:
        step()
    alive = [int(text) / MIB for text in gather_texts(str(counter.most), bench.mesh.world)]
    micro_bytes = sum(cost.held for cost in pipe.costs)
    taken = [sum(pipe.costs[c.value].output for c in stages.enters(stage)) for stage in range(places)]
    under_way = micros if schedule == "gpipe" else min(micros, places)
    formula = micros * max(taken) + micro_bytes / places if again else under_way * micro_bytes / places
    return {
        "MiB that one process holds of a micro-batch": micro_bytes / MIB,
        "MiB by the formula": formula / MIB,
        "planned a place": " ".join(f"{size / MIB:.1f}" for size in pipe.memory(stages)) if not again else "",
        "alive a place": " ".join(f"{size:.1f}" for size in alive),
        "fullest to the formula": max(alive) * MIB / formula,
    }
