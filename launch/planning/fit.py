"""The smallest group and the largest batch that fit a device."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from seqpar.launch.hardware.devices import GIB
from seqpar.launch.planning.needs import (
    Plan,
    Run,
    memory_of,
    plan,
    planned,
    steps_of,
)
from seqpar.launch.planning.step_counter import extended

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def plans(run: Run, sizes: Iterable[int] = SIZES) -> Iterator[Plan]:
    """Yields the plan of each size of group."""
    for size in sizes:
        try:
            yield plan(run, size)
        except ValueError as error:
            yield Plan(replace(run.config, seqpar=size), run.device, run.ranks or size, why=str(error))


def smallest(found: Iterable[Plan]) -> Plan | None:
    """Returns the plan of the smallest group that fits, None where none does."""
    return next((p for p in found if p.fits), None)


def most_tiles(run: Run, p: Plan) -> int:
    """Returns how many tiles a sequence group of ``p`` may take at once, by what one more of them adds.

    Of tiles so small that one does not fill the loss's run of logits there may be some more.
    """
    unit = p.config.seqpar if p.config.mode == "swap" else 1
    more = replace(p.config, batch=p.config.batch + unit)
    pairs = list(zip(*(steps_of(run, config, p.device, p.ranks) for config in (p.config, more))))

    def fits(times: int) -> bool:
        needs = (sum(memory_of(extended(few, many, times), p.device).values()) for few, many in pairs)
        return max(needs) <= p.device.memory

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return p.config.batch + low * unit


def largest_batch(run: Run, ranks: int, wanted: int) -> Plan:
    """Returns the plan of the largest batch up to ``wanted`` that fits; of one tile, or one for each rank, at least."""
    unit = run.config.seqpar if run.config.mode == "swap" else 1

    def of(tiles: int) -> Plan:
        return planned(replace(run, config=replace(run.config, batch=tiles), timed=False), ranks)

    found = of(wanted)
    if found.fits or wanted == unit:
        return found
    least = of(unit)
    while not found.fits and found.config.batch > unit:  # memory bends upwards: a chord lies above it
        tiles = found.config.batch
        each = (found.total - least.total) / (tiles - unit)
        guess = unit + int((least.device.memory - least.total) / each / unit) * unit
        found = of(max(unit, min(guess, tiles - unit)))
    return found


def refusal(found: Sequence[Plan]) -> str:
    """Returns why nothing fits, and what would take less."""
    possible = [p for p in found if not p.why]
    if not possible:
        return f"no group of ranks can run this: {found[0].why}"
    least = min(possible, key=lambda p: p.total)
    largest = max(("tokens", "decoder", "transient", "optimizer"), key=lambda name: least.memory[name])
    advice = {
        "tokens": "--grad-checkpoint full, or a larger --patch",
        "decoder": "--mode halo" if least.config.mode == "gather" else "a smaller --decoder-width or --tile",
        "transient": "--mode halo or a smaller --tile",
        "optimizer": "a smaller --embed-dim or --depth",
    }[largest]
    return (
        f"nothing fits: --seqpar {least.config.seqpar} needs {least.total / GIB:.1f} GiB on a rank of "
        f"{least.device.name}, which has {least.device.memory / GIB:.1f}; most is for {largest}: try {advice}"
    )
