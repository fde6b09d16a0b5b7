"""What a rank does in forward, loss and backward of UNETR, and how long summing gradients takes afterwards.

torch's profiler adds up each operator's own time, on one thread a rank; the wait clock adds up this rank's waits for
others. The rest is between operators.
"""

import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lab.benches.memory import average_gradients
from lab.benches.series import Row, Runs, Series, alternate, measure_apart
from lab.benches.step import CHANNELS, CLASSES, TILE, Step, unetr
from seqpar.cluster.torch_setup import keep_memory
from seqpar.parallel.rendezvous import start

KINDS = {  # the first whose part of a name an operator's has
    "convolutions": ("conv",),
    "products": ("mm", "attention"),  # of the encoder
    "messages": ("c10d", "gloo", "param_comms"),
    "copies": ("copy_", "cat", "fill_", "zero_", "pad"),
}
CASES = {"1 rank": (1, "gather"), "2 ranks": (2, "halo")}
SETTLED = ("norms, sums, activations", "waits", "between operators", "gradient sums")


def seconds_by_kind(operators: Iterable[Any]) -> Counter[str]:
    """Returns the seconds of operators by kind, "" for those of none; those of autograd and Python are left out."""
    seconds = Counter[str]()
    for operator in operators:
        name = operator.key
        if name.startswith(("aten::", "c10d", "gloo")):
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "")
            seconds[kind] += operator.self_cpu_time_total / 1e6  # type: ignore[assignment]
    return seconds


def series(quick: bool = False) -> list[Series]:
    """Returns one series: ours on one rank and on two in halo, one thread each."""

    def measure(case: str) -> dict[str, float]:
        ranks, mode = CASES[case]
        return measure_apart("step_profile", [mode], ranks, 1)

    what = f"what a rank does in a step of UNETR, tile {TILE}, batch 1, one thread a rank"
    turns = 1 if quick else 3
    return [Series(what, tuple(CASES), turns, 30.0, partial(alternate, tuple(CASES), measure), _row)]


def _row(case: str, runs: Runs) -> Row:
    """Returns the medians of a case's turns, in seconds."""
    names = ("clock_s", "processor_s", *KINDS, *SETTLED)
    return {"ranks": case, "mode": CASES[case][1]} | {
        name: statistics.median(run[name] for run in runs[case]) for name in names
    }


def _worker(mode: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_memory()  # as in training
    with start(int(os.environ["WORLD_SIZE"]), device="cpu") as mesh:
        image, label = torch.randn(1, CHANNELS, *[TILE] * 3), torch.randint(0, CLASSES, (1, *[TILE] * 3))
        step = Step(unetr(mode, mesh), image, label, mesh)
        step()  # the first one takes longer
        mesh.world.watch.clock.measure()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            began, processor = time.perf_counter(), time.process_time()
            step.differentiate()
            clock, processor = time.perf_counter() - began, time.process_time() - processor
        waits, began = mesh.world.watch.clock.take_waited(), time.perf_counter()
        average_gradients(step.net, mesh)
        sums = time.perf_counter() - began
        by_kind = seconds_by_kind(profiled.key_averages())
        left = clock - by_kind.total() - waits
        shown = {"clock_s": clock, "processor_s": processor, **{name: by_kind[name] for name in KINDS}}
        shown |= dict(zip(SETTLED, (by_kind[""], waits, left, sums)))
        if mesh.is_first:
            print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    _worker(sys.argv[1])
