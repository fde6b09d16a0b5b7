"""Times a step over a pipe of two ranks against one process on both cores, and its placements against each other.

Each placement is first predicted by its simulated timetable, from cells measured in the same processes, and then
measured. Gradients accumulate; there is no optimizer. Each turn has new processes, which run all placements one after
the other. ``one process`` is a step with accumulation. A step's bubble is the share of two ranks' time beyond the work
of one process on one core. torch's pipelining gets the exact cut and the same schedule.
"""

import json
import os
import statistics
import sys
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lab.benches.pipe_steps import Bench, counted_memory
from lab.benches.series import Row, Runs, Series, measure_apart, ratio, stream_apart
from seqpar.parallel.rendezvous import start
from seqpar.settings.config import Config

CORES = 2
NET = Config(
    network="nnunet-plain",
    tile=(48, 48, 48),
    features=8,
    stages="333:111 333:222 333:222 333:222",
    batch=1,
    accumulate=8,
)
ONE, ALONE, TORCH = "one process, 2 threads", "one process, 1 thread", "torch's pipelining, cuts"
WAYS = ("equal", "cuts", "rings", "by-size", "gabra makespan", "gabra paper", TORCH)
MICROS = (1, 2, 4, 8, 16)
HELD = (("gpipe", 2, False), ("1f1b", 2, False), ("gpipe", 2, True), ("gpipe", 4, False), ("gpipe", 4, True))


@dataclass(frozen=True)
class Job:
    """What new processes measure: placements with some numbers of micro-batches, or the memory of schedules."""

    config: Config
    ways: tuple[str, ...] = ()
    micros: tuple[int, ...] = ()
    held: tuple[tuple[str, int, bool], ...] = ()
    repeats: int = 3

    @classmethod
    def decode(cls, text: str) -> "Job":
        """Returns the job that a line of JSON describes."""
        values = json.loads(text)
        values["config"] = Config.from_dict(values["config"])
        for name in ("ways", "micros", "held"):
            values[name] = tuple(tuple(v) if isinstance(v, list) else v for v in values[name])
        return cls(**values)


def series(quick: bool = False) -> list[Series]:
    """Returns the series: placements, then bubbles by micro-batches, then bytes that are held."""
    if quick:
        small = replace(NET, tile=(32, 32, 32), accumulate=4)
        return [of_ways(small, ("equal", "cuts"), 1, 1), of_micros(small, (1, 4), 1), of_memory(small, HELD[:3])]
    return [of_ways(NET, WAYS, 2, 3), of_micros(NET, MICROS, 2), of_memory(NET, HELD)]


def of_ways(config: Config, ways: Sequence[str], turns: int, repeats: int) -> Series:
    """Returns the series of placements, after one process on both cores and on one."""
    cases = (ONE, ALONE, *ways)

    def measure(turns: int) -> Generator[tuple[str, Any], None, None]:
        job = Job(config, tuple(ways), (config.accumulate,), repeats=repeats)
        for _ in range(turns):
            for case, threads in ((ONE, CORES), (ALONE, 1)):
                yield case, measure_apart("pipe", [json.dumps(asdict(replace(job, ways=())))], 1, threads)
            for run in stream_apart("pipe", [json.dumps(asdict(job))], CORES, 1):
                yield run["case"], run

    def row(case: str, runs: Runs) -> Row:
        return way_row(case, config.accumulate, runs)

    what = f"a step of {config.accumulate} micro-batches of nnU-Net's plain network, tile {config.tile[0]}, on 2 cores"
    return Series(what, cases, turns, 12.0 * len(cases), measure, row)


def way_row(case: str, micros: int, runs: Runs) -> Row:
    """Returns the row of a placement; figures and ratios are medians over turns."""

    def column(name: str, of: str = case) -> list[float]:
        return [run[name] for run in runs.get(of, []) if name in run]

    def middle(name: str) -> float | str:
        return statistics.median(column(name)) if column(name) else ""

    seconds, alone = column("seconds"), column("seconds", ALONE)
    is_piped = case not in (ONE, ALONE)
    bubbles = [1 - one / (CORES * step) for one, step in zip(alone, seconds)] if is_piped else []
    return {
        "placement": case,
        "cells": runs[case][0].get("cells", ""),
        "micro-batches": micros,
        "s foretold": middle("foretold"),
        "s a step": middle("seconds"),
        "clock to foretold": ratio(seconds, column("foretold")),
        "to one process": ratio(seconds, column("seconds", ONE)),
        "foretold to equal": ratio(column("foretold"), column("foretold", "equal")),
        "to equal": ratio(seconds, column("seconds", "equal")) if is_piped else "",
        "bubble foretold": middle("bubble"),
        "bubble": statistics.median(bubbles) if bubbles else "",
        "(K-1)/(M+K-1)": (CORES - 1) / (micros + CORES - 1) if is_piped else "",
        "MB sent": middle("sent"),
    }


def of_micros(config: Config, micros: Sequence[int], turns: int) -> Series:
    """Returns the series of the exact cut by number of micro-batches: its bubble next to that of equal stages."""
    cases = {f"{number} micro-batches": number for number in micros}

    def measure(turns: int) -> Generator[tuple[str, Any], None, None]:
        job = Job(config, ("cuts",), tuple(micros), repeats=2)
        for _ in range(turns):
            alone = measure_apart("pipe", [json.dumps(asdict(replace(job, ways=(), micros=(4,))))], 1, 1)
            for run in stream_apart("pipe", [json.dumps(asdict(job))], CORES, 1):
                yield f"{run['micros']} micro-batches", {**run, "alone": alone["seconds"] / 4 * run["micros"]}

    def row(case: str, runs: Runs) -> Row:
        middle = {
            n: statistics.median(run[n] for run in runs[case]) for n in ("foretold", "seconds", "bubble", "alone")
        }
        number = cases[case]
        return {
            "micro-batches": number,
            "s foretold": middle["foretold"],
            "s a step": middle["seconds"],
            "bubble foretold": middle["bubble"],
            "bubble": 1 - middle["alone"] / (CORES * middle["seconds"]),
            "(K-1)/(M+K-1)": (CORES - 1) / (number + CORES - 1),
        }

    what = "the bubble of the exact cut on 2 ranks, by micro-batches"
    return Series(what, tuple(cases), turns, 25.0, measure, row)


def of_memory(config: Config, held: Sequence[tuple[str, int, bool]]) -> Series:
    """Returns the series of bytes held per place, against GPipe's formula N + L/K x N/M."""
    cases = {_name(*one): one for one in held}

    def measure(turns: int) -> Generator[tuple[str, Any], None, None]:
        for _ in range(turns):
            for ranks in sorted({places for _, places, _ in held}):
                own = tuple(one for one in held if one[1] == ranks)
                for run in stream_apart("pipe", [json.dumps(asdict(Job(config, held=own)))], ranks, 1):
                    yield run.pop("case"), run

    def row(case: str, runs: Runs) -> Row:
        schedule, places, again = cases[case]
        return {"schedule": schedule, "places": places, "computed again": "yes" if again else "no", **runs[case][0]}

    what = f"bytes alive on each place, {config.accumulate} micro-batches"
    return Series(what, tuple(cases), 1, 10.0 * len(cases), measure, row)


def _name(schedule: str, places: int, again: bool) -> str:
    return f"{schedule}, {places} places{', computed again' if again else ''}"


def _worker(job: Job) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with start(1, device="cpu", pipe=ranks) as mesh:
        bench = Bench(job.config, mesh)
        for schedule, _, again in job.held:
            line = {"case": _name(schedule, ranks, again), **counted_memory(bench, schedule, again)}
            if mesh.is_first:
                print(json.dumps(line), flush=True)
        for micros in job.micros:
            for way in job.ways or ("",):
                line = {"case": way, "micros": micros, **bench.timed(way, micros, job.repeats)}
                if mesh.is_first:
                    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    _worker(Job.decode(sys.argv[1]))
