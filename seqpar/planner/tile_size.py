"""How large a tile so many devices train."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from seqpar.cluster.devices import GIB
from seqpar.planner.needs import Plan, RunToPlan, plan

UNIT, LARGEST = 32, 1024  # voxels by which cubes grow, and where they end
SIZES = (1, 2, 4, 8)  # ranks that share a tile


def print_largest(run: RunToPlan, sizes: Iterable[int]) -> int:
    """Prints the largest cube that each of the ``sizes`` trains, of 1, 2, 4 and 8 ranks; returns 0, an exit code."""
    for line in largest_cubes(run, [size for size in sizes if size in SIZES]):
        print(line, flush=True)
    return 0


def largest_cubes(run: RunToPlan, sizes: Iterable[int]) -> Iterator[str]:
    """Yields a line for each group size: the largest cube that it trains."""
    for size in sizes:
        best = _largest(run, size)
        text = f"no cube of {UNIT} or more voxels a side fits"
        if best is not None:
            needs = f"{best.total / GIB:.1f} of {best.device.memory / GIB:.1f} GiB a rank"
            text = f"--tile {best.config.tile[0]}, batch {best.config.batch}: {needs}"
        yield f"--seqpar {size}: {text}"


def _largest(run: RunToPlan, size: int) -> Plan | None:
    """Returns the plan of the largest cube that fits, by halving; None where the smallest does not."""
    best: Plan | None = None
    low, high = 1, LARGEST // UNIT
    while low <= high:
        middle = (low + high) // 2
        p = _plan_of(run, size, middle * UNIT)
        if p is not None and p.fits:
            best, low = p, middle + 1
        elif p is None and best is None and middle < high:  # so small a cube cannot be shared
            low = middle + 1
        else:
            high = middle - 1
    return best


def _plan_of(run: RunToPlan, size: int, side: int) -> Plan | None:
    try:
        return plan(replace(run, config=replace(run.config, tile=(side,) * 3), timed=False), size)
    except ValueError:
        return None
