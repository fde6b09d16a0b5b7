"""Searches for the smallest group, the largest batch and the largest tile that fit a device; says why nothing fits."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from seqpar.cluster.devices import GIB
from seqpar.models.build import family_of
from seqpar.planner.needs import Plan, RunToPlan, fits_nodes_evenly, memory_of, plan, steps_of
from seqpar.planner.pipeline_plan import plan_run
from seqpar.planner.step_counter import extrapolate
from seqpar.text import in_flags

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
UNIT, LARGEST = 32, 1024  # voxels: the step in which a cube's side grows, and its longest side
SHARED_BY = (1, 2, 4, 8)  # group sizes for which the largest cube is searched


def usual_sizes(node: int) -> list[int]:
    """Returns the group sizes to plan by default: those that divide nodes of ``node`` ranks evenly, or fill them."""
    return [size for size in SIZES if fits_nodes_evenly(size, node)]


def plans(run: RunToPlan, sizes: Iterable[int] = SIZES) -> Iterator[Plan]:
    """Yields the plan of each group size; the plan of a size that cannot run says why."""
    for size in sizes:
        try:
            yield plan(run, size)
        except ValueError as error:
            yield Plan(replace(run.config, seqpar=size), run.device, run.ranks_of(size), why=in_flags(str(error)))


def smallest_that_fits(rows: Iterable[Plan]) -> Plan | None:
    """Returns the first plan that fits, or None; ``rows`` are sorted by group size."""
    return next((p for p in rows if p.fits), None)


def most_tiles(run: RunToPlan, p: Plan) -> int:
    """Returns the largest batch that fits a sequence group of ``p``, extrapolated from what one more tile adds.

    Slightly more may fit if a tile is smaller than the loss's run of logits.
    """
    unit = p.config.seqpar if p.config.mode == "swap" else 1
    more = replace(p.config, batch=p.config.batch + unit)
    steps = list(zip(*(steps_of(run, config, p.device, p.ranks) for config in (p.config, more))))

    def is_too_much(times: int) -> bool:
        needs = (sum(memory_of(extrapolate(few, many, times), p.device).values()) for few, many in steps)
        return max(needs) > p.device.memory

    bound = 1
    while not is_too_much(bound):
        bound *= 2
    return p.config.batch + unit * (bisect_left(range(bound), True, lo=bound // 2 + 1, key=is_too_much) - 1)


def largest_batch(run: RunToPlan, ranks: int, most: int) -> Plan:
    """Returns the plan of the largest batch up to ``most`` that fits; if none fits, of the smallest batch.

    The smallest is one tile, or with mode swap one tile a rank.
    """
    unit = run.config.seqpar if run.config.mode == "swap" else 1

    @cache
    def of(tiles: int) -> Plan:
        return plan_run(replace(run, config=replace(run.config, batch=tiles), timed=False), ranks)

    largest = of(most)
    if largest.fits or most == unit:
        return largest
    least = of(unit)
    if run.config.pipe > 1:  # each batch has its own stages
        if not least.fits:
            return least
        beyond = bisect_left(range(most // unit), True, lo=2, key=lambda count: not of(count * unit).fits)
        return of((beyond - 1) * unit)
    while not largest.fits and largest.config.batch > unit:  # memory is convex in the batch: a chord lies above it
        tiles = largest.config.batch
        per_tile = (largest.total - least.total) / (tiles - unit)
        guess = unit + int((least.device.memory - least.total) / per_tile / unit) * unit
        largest = of(max(unit, min(guess, tiles - unit)))
    return largest


def largest_cube(run: RunToPlan, size: int) -> Plan | None:
    """Returns the plan of the largest cubic tile that groups of ``size`` ranks can train, or None."""
    best: Plan | None = None
    low, high = 1, LARGEST // UNIT
    while low <= high:
        middle = (low + high) // 2
        tile = (middle * UNIT,) * 3
        (p,) = plans(replace(run, config=replace(run.config, tile=tile), timed=False), [size])
        if p.fits:
            best, low = p, middle + 1
        elif p.why and best is None and middle < high:  # the ranks cannot share a cube this small
            low = middle + 1
        else:
            high = middle - 1
    return best


def why_nothing_fits(rows: Sequence[Plan], exhausted: bool = False) -> str:
    """Returns why no plan fits, and what would need less memory.

    - ``exhausted``: options that save memory without changing the result (``memory_savings``) did not suffice
    """
    possible = [p for p in rows if not p.why]
    if not possible:
        return f"no group of ranks can run this: {rows[0].why}"
    least = min(possible, key=lambda p: p.total)
    return f"nothing fits: {describe_shortage(least)}: try {advice(least, exhausted)}"


def describe_shortage(p: Plan) -> str:
    """Returns what a plan needs, what the device has, and what takes most of it."""
    flag = f"--pipe {p.config.pipe}" if p.config.pipe > 1 else f"--seqpar {p.config.seqpar}"
    return (
        f"{flag} needs {p.total / GIB:.1f} GiB on a rank of {p.device.name}, which has "
        f"{p.device.memory / GIB:.1f}; most is for {_largest_part(p)}"
    )


def _largest_part(p: Plan) -> str:
    return max(("tokens", "decoder", "transient", "optimizer"), key=lambda name: p.memory[name])


def advice(p: Plan, exhausted: bool) -> str:
    """Returns flags that save memory in the largest part: first those that do not change the result."""
    family = family_of(p.config)
    smaller = family.smaller[_largest_part(p)]
    if exhausted:
        return smaller if p.config.precision == "bf16" else f"--precision bf16, {smaller}"
    again = "--grad-checkpoint full" if p.config.grad_checkpoint != "full" else ""
    auto = "--mode auto" if p.config.mode == "gather" else ""
    same_result = {
        "tokens": again,
        "decoder": auto or ("" if family.attends else again),  # a network without tokens counts as decoder
        "transient": auto,
        "optimizer": "" if p.config.shard_weights else "--shard-weights",
    }[_largest_part(p)]
    return f"{same_result}, or {smaller}" if same_result else smaller
