"""How long a list of runs takes on n devices: side by side, or one after the other, each on all of them.

``TABLE_I`` is what DistMIS measured of 32 runs, on up to 32 V100 GPUs, four to a node.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def makespan(lengths: Sequence[float], workers: int) -> float:
    """Returns when the last of runs ends that begin in their order, each on the worker that is free first."""
    if workers < 1:
        raise ValueError(f"{workers} workers: at least 1 is needed")
    free = [0.0] * workers
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


def speedup_of_equal(count: int, workers: int) -> float:
    """Returns how many times as fast ``count`` runs of equal length are on so many workers."""
    return count / math.ceil(count / workers)


@dataclass(frozen=True)
class Scaling:
    """What a sweep takes on so many devices, in seconds; NaN for a way that cannot be taken with them.

    - ``side_by_side``: each run on the devices of one run
    - ``one_by_one``: each run on all devices, one after the other
    """

    devices: int
    side_by_side: float
    one_by_one: float


def scale(
    lengths: Sequence[float], devices_per_run: int, sizes: Sequence[int], on_all: Callable[[int], Sequence[float]]
) -> list[Scaling]:
    """Returns what runs take on each number of devices.

    - ``lengths``: seconds of each run on the devices of one run
    - ``on_all``: returns the seconds of each run on so many devices, () where they cannot be used
    """
    every = []
    for size in sizes:
        at_a_time = size // devices_per_run
        side_by_side = makespan(lengths, at_a_time) if at_a_time else math.nan
        every.append(Scaling(size, side_by_side, sum(on_all(size)) or math.nan))
    return every


def _seconds(clock: str) -> int:
    hours, minutes, seconds = map(int, clock.split(":"))
    return (hours * 60 + minutes) * 60 + seconds


# by number of GPUs: seconds of 32 runs one after the other on all of them, and side by side on one each
TABLE_I = {
    gpus: Scaling(gpus, float(_seconds(experiments)), float(_seconds(data)))
    for gpus, data, experiments in (
        (1, "44:18:02", "44:20:19"),
        (2, "23:09:28", "22:24:39"),
        (4, "15:09:35", "11:32:20"),
        (8, "7:41:12", "7:03:17"),
        (12, "5:59:59", "5:35:22"),
        (16, "4:26:50", "4:11:54"),
        (32, "3:21:44", "2:55:06"),
    )
}
