"""From logits of many classes to labels: slab by slab over the ranks, against all classes' logits in one place.

A small U-Net of 105 outputs passes over a whole volume, whose labels are taken on a finer grid. ``alive`` counts the
bytes on the fullest rank, without weights; seconds are those of a run that counts nothing.
"""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lab.benches.apart import measure_apart
from lab.benches.series import Row, Runs, Series, alternate, ratio
from seqpar.data.preparation.preparation import TargetGrid
from seqpar.data.preparation.transforms import resample
from seqpar.models.build import build_network
from seqpar.parallel.collectives import all_gather
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.rendezvous import start
from seqpar.planner.memory_counter import MemoryCounter
from seqpar.prediction import window_grid
from seqpar.prediction.logits_to_labels import slabs_to_labels, to_labels
from seqpar.prediction.sliding_window import FinishedRows, join_rows, whole_volume
from seqpar.settings.config import Config

CLASSES, SHAPE, TO_SHAPE = 105, (64, 64, 72), (96, 96, 112)
STEPS = 256  # in which a volume's logits are taken, as a large one's are: this one would be done in a few
WAYS = ("all held", "slab by slab")
NETWORK = Config(network="nnunet-plain", tile=(32, 32, 32), features=4, stages="333:111 333:222 333:222", mode="auto")


def series(quick: bool = False) -> list[Series]:
    """Returns one series: both ways on one rank, two and, unless quick, four."""
    return [of_shapes(SHAPE, TO_SHAPE, CLASSES, (1, 2) if quick else (1, 2, 4), 1 if quick else 3)]


def of_shapes(
    shape: Sequence[int], to_shape: Sequence[int], num_classes: int, worlds: Sequence[int], turns: int
) -> Series:
    """Returns the series for a volume of ``shape`` whose labels are taken on ``to_shape``."""
    cases = {f"{way}, {world} ranks": (way, world) for world in worlds for way in WAYS}
    sizes = json.dumps([shape, to_shape, num_classes])

    def measure(case: str) -> dict[str, float]:
        way, world = cases[case]
        return measure_apart("labels", [way, sizes], world, 1)

    def row(case: str, runs: Runs) -> Row:
        way, world = cases[case]
        all_at_once = runs[f"{WAYS[0]}, {world} ranks"]
        return {
            "labels": way,
            "ranks": world,
            "classes": num_classes,
            "voxels": "x".join(map(str, shape)),
            "to": "x".join(map(str, to_shape)),
            "alive MB": statistics.median(run["alive"] for run in runs[case]) / 1e6,
            "to all held": ratio([run["alive"] for run in runs[case]], [run["alive"] for run in all_at_once]),
            "s": statistics.median(run["seconds"] for run in runs[case]),
            "time to all held": ratio([run["seconds"] for run in runs[case]], [run["seconds"] for run in all_at_once]),
        }

    what = f"labels of {num_classes} classes, by all logits in one place and slab by slab"
    return Series(what, tuple(cases), turns, 20.0 * len(cases), partial(alternate, tuple(cases), measure), row)


def all_held(slabs: Iterator[FinishedRows], shape: Sequence[int], target: TargetGrid, mesh: Mesh) -> Tensor:
    """Returns class ids, as one would without slabs: all logits are gathered, and the first rank resamples them."""
    whole = torch.cat([join_rows(slab.logits, slab.bounds, mesh, 1) for slab in slabs], 1)
    return to_labels(resample(whole, target.shape)) if mesh.is_first else torch.zeros(target.shape, dtype=torch.int64)


def _worker(way: str, shape: Sequence[int], to_shape: Sequence[int], num_classes: int) -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    window_grid.BYTES_AT_ONCE = 4 * num_classes * math.prod(shape) // STEPS
    take = all_held if way == WAYS[0] else slabs_to_labels
    with start(int(os.environ["WORLD_SIZE"]), device="cpu") as mesh:
        net = build_network(NETWORK, 1, num_classes, mesh.seq).eval()
        image = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
        with MemoryCounter() as counter:
            take(whole_volume([net], image, mesh), shape, TargetGrid(tuple(to_shape)), mesh)
        began = time.perf_counter()
        take(whole_volume([net], image, mesh), shape, TargetGrid(tuple(to_shape)), mesh)
        seconds = time.perf_counter() - began
        alive = all_gather(torch.tensor([float(counter.most)]), mesh.world, 0, [1] * mesh.world.size, "bench")
        if mesh.is_first:
            print(json.dumps({"alive": float(alive.max()), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    _worker(sys.argv[1], *json.loads(sys.argv[2]))
