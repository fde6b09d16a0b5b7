"""The planner's answer on a pipe: its cells, each way of placing them, and what else so many ranks could do."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seqpar.cluster.devices import GIB, MIB
from seqpar.pipeline.gabra import loads_and_capacities
from seqpar.pipeline.placement import Pipe
from seqpar.planner.answer import command, header
from seqpar.planner.fit import why_nothing_fits
from seqpar.planner.needs import Plan, RunToPlan, config_for_group_size, plan_complete_config
from seqpar.planner.pipeline_plan import (
    SIZES,
    Cells,
    PlacementResult,
    chosen,
    config_with_places,
    measure_or_count_cells,
    pipe_of,
    placements,
    plan_of,
)
from seqpar.settings.config import AUTO, Config
from seqpar.text import in_flags, quantity

WIDTH = 98


@dataclass(frozen=True)
class PlacementOptions:
    """A network spread over so many places: every way of placing it, the best one, and its plan."""

    pipe: Pipe
    ways: list[PlacementResult]
    best: PlacementResult
    plan: Plan


def print_pipe(run: RunToPlan, pipe: int, preset: str, tile: Sequence[int]) -> int:
    """Prints the plan of so many places, by default of the fewest that fit; returns 0, or raises where none fits.

    - ``pipe``: AUTO looks at 2 to 16
    - ``tile``: before padding
    """
    config = replace(run.config, batch=run.config.batch or 1)
    cells = measure_or_count_cells(run, config)
    print(f"{header(run, preset, tile)}\n{len(cells.costs)} cells, micro-batches of {config.batch}: {cells.source}\n")
    best = _fewest(run, config, cells, [size for size in SIZES if size <= len(cells.costs)] if pipe == AUTO else [pipe])
    print("\n".join([*cell_table(cells, best), "", *way_table(best), ""]), flush=True)
    print("\n".join([*describe_timetable(best.pipe), "", tiles_a_step(best.plan), ""]), flush=True)
    for line in comparison(run, best.plan):
        print(line, flush=True)
    print(f"\n{command(best.plan, preset)}")
    return 0


def _fewest(run: RunToPlan, config: Config, cells: Cells, sizes: Sequence[int]) -> PlacementOptions:
    """Returns the fewest places that fit, after a line on each that does not; raises ValueError where none does."""
    plans = list[Plan]()
    for size in sizes:
        try:
            spread = spread_over(run, config, cells, size)
        except ValueError as problem:
            if len(sizes) == 1:
                raise
            print(f"--pipe {size}: {in_flags(str(problem))}", flush=True)
            continue
        if spread.plan.fits:
            return spread
        plans.append(spread.plan)
        print(f"--pipe {size}: {_gib(spread.plan)} GiB on the fullest rank, too much", flush=True)
    why = f"no number of places from {sizes[0]} to {sizes[-1]} can be: see above"
    raise ValueError(why_nothing_fits(plans) if plans else why)


def spread_over(run: RunToPlan, config: Config, cells: Cells, size: int) -> PlacementOptions:
    """Returns the cells on so many places; raises ValueError where that cannot be."""
    config, ranks = config_with_places(run, config, size)
    pipe = pipe_of(cells, config, run.device.of(ranks))
    ways = list(placements(pipe, config.placement))
    best = chosen(ways, config)
    return PlacementOptions(pipe, ways, best, plan_of(run, config, cells, pipe, best, ranks))


def cell_table(cells: Cells, spread: PlacementOptions) -> list[str]:
    """Returns the lines of the cells: what each costs on a micro-batch, and where the best way puts it."""
    assert spread.best.stages is not None
    places = spread.best.stages.place_of_cells
    head = f"{'cell':>4} {'':<34}{'ms forward':>11}{'backward':>10}{'MiB given':>11}{'held':>9}{'state':>9}{'place':>7}"
    lines = [head]
    for number, (name, cost) in enumerate(zip(cells.names, spread.pipe.costs)):
        size = f"{cost.output / MIB:>11.2f}{cost.held / MIB:>9.2f}{cost.state / MIB:>9.2f}"
        time = f"{1e3 * cost.forward:>11.3g}{1e3 * cost.backward:>10.3g}"
        lines.append(f"{number:>4} {name[:33]:<34}{time}{size}{places[number]:>7}")
    return lines


def way_table(spread: PlacementOptions) -> list[str]:
    """Returns the lines of the ways: step and bubble by the simulated timetable, bytes, and the cut."""
    pipe = spread.pipe
    alone = pipe.micros * sum(cost.seconds for cost in pipe.costs)
    head = f"{'--placement':<16}{'s a step':>9}{'to one':>8}{'bubble':>8}{'MiB sent':>10}{'GiB held':>10}  cells"
    lines = [
        f"--pipe {len(pipe.places)}, {pipe.schedule}, {quantity(pipe.micros, 'micro-batch')}; one rank takes "
        f"{alone:.3g} s",
        head,
    ]
    for row in spread.ways:
        name = f"{row.way}{f', {row.objective}' if row.objective else ''}"
        if row.timetable is None or row.stages is None:
            lines.append(f"{name:<16} {row.why[:80]}")
            continue
        mark = "*" if row is spread.best else " " if row.fits else "!"
        lines.append(
            f"{name:<15}{mark}{row.seconds:>9.3g}{row.seconds / alone:>8.2f}{row.timetable.bubble:>8.0%}"
            f"{row.sent / MIB:>10.2f}{max(row.held) / GIB:>10.2f}  {_cut(row)}"
        )
    return [*lines, "* taken; ! more than a rank has; MiB sent: of a micro-batch, there and back"]


def _cut(row: PlacementResult) -> str:
    """Returns the runs of cells, and their places where they are not in order."""
    assert row.stages is not None
    stages = row.stages
    runs = [(stages.cells(stage), place) for stage, place in enumerate(stages.places)]
    in_order = stages.places == tuple(range(stages.num_places))
    text = " ".join(f"{cells[0]}-{cells[-1]}{'' if in_order else f'@{place}'}" for cells, place in runs)
    return text if len(text) < 36 else f"{stages.num_stages} stages"


def describe_timetable(pipe: Pipe) -> list[str]:
    """Returns what there is to say of the timetable and of GABRA's own objective."""
    count, micros = len(pipe.places), pipe.micros
    idle = (count - 1) / (micros + count - 1)
    lines = [f"equal stages would wait for {idle:.0%} of a step: (K-1)/(M+K-1)"]
    if micros == 1:
        lines.append(
            "--accumulate 1: stages run one after the other, with the memory of one each and without overlap; a larger "
            "one overlaps them, and --seqpar with --mode halo works on one tile together"
        )
    loads, capacities = loads_and_capacities(pipe)
    if len(set(capacities)) == 1:
        lines.append(
            f"GABRA's own objective is {sum(loads) / capacities[0]:.4g} for every feasible allocation, since places "
            "are equal: it has nothing to find; --objective makespan has"
        )
    return [text for line in lines for text in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def tiles_a_step(p: Plan) -> str:
    """Returns the sentence on the global batch."""
    groups, config = p.ranks // p.config.group_ranks, p.config
    tiles = groups * config.batch * config.accumulate
    return f"global batch {tiles} = {groups} x batch {config.batch} x accumulate {config.accumulate}"


def comparison(run: RunToPlan, p: Plan) -> Iterator[str]:
    """Yields lines on what else as many ranks could do with as many tiles a step: what a step takes and needs."""
    yield f"{'as many ranks, as many tiles a step':<56}{'s a step':>9}{'GiB a rank':>12}"
    yield _line(_flags(p.config, p.ranks), p)
    for config in alternatives_without_pipe(p):
        flags = _flags(config, p.ranks)
        try:
            run_of = replace(run, config=config, ranks=p.ranks, fixed={})
            yield _line(
                flags,
                plan_complete_config(replace(run_of, config=config_for_group_size(run_of, config.seqpar)), p.ranks),
            )
        except ValueError as problem:
            yield f"{flags:<56} {in_flags(str(problem))[:42]}"


def alternatives_without_pipe(p: Plan) -> Iterator[Config]:
    """Yields configs without a pipe that give a plan's ranks as many tiles a step."""
    config = p.config
    usual = Config()
    plain = replace(config, pipe=1, placement=usual.placement, objective=usual.objective)
    yield replace(plain, seqpar=config.group_ranks, mode=config.mode if config.mode == "swap" else "halo")
    if config.accumulate % config.pipe == 0:  # its places become sequence groups
        more_groups = replace(plain, accumulate=config.accumulate // config.pipe)
        yield more_groups
        yield replace(more_groups, shard_weights=True)


def _flags(config: Config, ranks: int) -> str:
    groups = ranks // config.group_ranks
    shape = [f"{quantity(groups, 'group')}:"] + [f"--pipe {config.pipe}"] * (config.pipe > 1)
    shape += [f"--seqpar {config.seqpar} --mode {config.mode}"] * (config.seqpar > 1)
    return " ".join([*shape, *["--shard-weights"] * config.shard_weights, f"--accumulate {config.accumulate}"])


def _line(flags: str, p: Plan) -> str:
    return f"{flags:<56}{p.step_seconds:>9.3g}{_gib(p):>12}{'' if p.fits else '!'}"


def _gib(p: Plan) -> str:
    return f"{p.total / GIB:.2f}"
