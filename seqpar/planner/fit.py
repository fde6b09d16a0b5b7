"""The smallest group and the largest batch that fit a device."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from seqpar.cluster.devices import GIB
from seqpar.models.build import family_of
from seqpar.planner.needs import Plan, RunToPlan, fits_nodes_evenly, memory_of, plan, steps_of
from seqpar.planner.pipeline_plan import plan_run
from seqpar.planner.step_counter import extrapolate
from seqpar.text import in_flags

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def usual_sizes(node: int) -> list[int]:
    """Returns the group sizes to plan where none is named: those that share nodes of ``node`` ranks evenly."""
    return [size for size in SIZES if fits_nodes_evenly(size, node)]


def plans(run: RunToPlan, sizes: Iterable[int] = SIZES) -> Iterator[Plan]:
    """Yields the plan of each group size; one that cannot be says why."""
    for size in sizes:
        try:
            yield plan(run, size)
        except ValueError as error:
            yield Plan(replace(run.config, seqpar=size), run.device, run.ranks_of(size), why=in_flags(str(error)))


def smallest_that_fits(rows: Iterable[Plan]) -> Plan | None:
    """Returns the first plan that fits, None where none does; ``rows`` are in order of their group size."""
    return next((p for p in rows if p.fits), None)


def most_tiles(run: RunToPlan, p: Plan) -> int:
    """Returns the largest batch of a sequence group of ``p``, estimated by what one more tile adds.

    Where a tile is smaller than the loss's run of logits, slightly more may fit.
    """
    unit = p.config.seqpar if p.config.mode == "swap" else 1
    more = replace(p.config, batch=p.config.batch + unit)
    steps = list(zip(*(steps_of(run, config, p.device, p.ranks) for config in (p.config, more))))

    def fits(times: int) -> bool:
        needs = (sum(memory_of(extrapolate(few, many, times), p.device).values()) for few, many in steps)
        return max(needs) <= p.device.memory

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return p.config.batch + low * unit


def largest_batch(run: RunToPlan, ranks: int, most: int) -> Plan:
    """Returns the plan of the largest batch up to ``most`` that fits; of the least batch where none does.

    The least is one tile, or one tile a rank where mode swap deals them out.
    """
    unit = run.config.seqpar if run.config.mode == "swap" else 1

    def of(tiles: int) -> Plan:
        return plan_run(replace(run, config=replace(run.config, batch=tiles), timed=False), ranks)

    largest = of(most)
    if largest.fits or most == unit:
        return largest
    least = of(unit)
    if run.config.pipe > 1:
        return _by_halves(of, least, unit, most)
    while not largest.fits and largest.config.batch > unit:  # memory is convex in the batch: a chord lies above it
        tiles = largest.config.batch
        per_tile = (largest.total - least.total) / (tiles - unit)
        guess = unit + int((least.device.memory - least.total) / per_tile / unit) * unit
        largest = of(max(unit, min(guess, tiles - unit)))
    return largest


def _by_halves(of: Callable[[int], Plan], least: Plan, unit: int, most: int) -> Plan:
    """Returns the plan of the largest batch that fits where each batch has its own stages; ``most`` does not fit."""
    best, low, high = least, 1, most // unit
    while best.fits and high - low > 1:
        middle = (low + high) // 2
        p = of(middle * unit)
        low, high, best = (middle, high, p) if p.fits else (low, middle, best)
    return best


def why_nothing_fits(rows: Sequence[Plan], exhausted: bool = False) -> str:
    """Returns why no plan fits, and what would need less memory.

    - ``exhausted``: the ways that keep the numbers (``ways``) were tried: only other numbers need less
    """
    possible = [p for p in rows if not p.why]
    if not possible:
        return f"no group of ranks can run this: {rows[0].why}"
    least = min(possible, key=lambda p: p.total)
    return f"nothing fits: {describe_shortage(least)}: try {advice(least, exhausted)}"


def describe_shortage(p: Plan) -> str:
    """Returns what a plan needs, what there is, and what most of it is for."""
    return (
        f"--seqpar {p.config.seqpar} needs {p.total / GIB:.1f} GiB on a rank of {p.device.name}, which has "
        f"{p.device.memory / GIB:.1f}; most is for {_largest_part(p)}"
    )


def _largest_part(p: Plan) -> str:
    return max(("tokens", "decoder", "transient", "optimizer"), key=lambda name: p.memory[name])


def advice(p: Plan, exhausted: bool) -> str:
    """Returns flags that need less memory for the largest part: first those that keep the numbers."""
    kind = family_of(p.config)
    smaller = kind.smaller[_largest_part(p)]
    if exhausted:
        return smaller if p.config.precision == "bf16" else f"--precision bf16, {smaller}"
    again = "--grad-checkpoint full" if p.config.grad_checkpoint != "full" else ""
    auto = "--mode auto" if p.config.mode == "gather" else ""
    same_numbers = {
        "tokens": again,
        "decoder": auto or ("" if kind.attends else again),  # all of a network without tokens counts as decoder
        "transient": auto,
        "optimizer": "" if p.config.shard_weights else "--shard-weights",
    }[_largest_part(p)]
    return f"{same_numbers}, or {smaller}" if same_numbers else smaller
