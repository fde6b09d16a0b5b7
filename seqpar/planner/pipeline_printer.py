"""Prints plans of runs over a pipe: cells, every placement of them, and what else as many ranks could do."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from seqpar.cluster.devices import GIB, MIB
from seqpar.parallel.launcher import Launcher
from seqpar.pipeline.gabra import loads_and_capacities
from seqpar.pipeline.placement import Pipe
from seqpar.pipeline.stages import StageMap
from seqpar.planner.chooser import device_of, fewest_places
from seqpar.planner.needs import Plan, RunToPlan, config_for_group_size, plan_complete_config
from seqpar.planner.pipeline_plan import (
    SIZES,
    Cells,
    PlacementOptions,
    PlacementResult,
    measure_or_count_cells,
    plan_counted,
)
from seqpar.planner.printer import command, header
from seqpar.settings.config import AUTO, Config
from seqpar.text import quantity

WIDTH = 98


def print_pipe(run: RunToPlan, pipe: int, preset: str, tile: Sequence[int]) -> None:
    """Prints the plan of a pipe of ``pipe`` places; raises ValueError if none fits.

    - ``pipe``: AUTO takes the fewest of 2 to 16 that fit
    - ``tile``: before padding
    """
    config = replace(run.config, batch=run.config.batch or 1)
    cells = measure_or_count_cells(run, config)
    print(f"{header(run, preset, tile)}\n{len(cells.costs)} cells, micro-batches of {config.batch}: {cells.source}\n")
    sizes = [size for size in SIZES if size <= len(cells.costs)] if pipe == AUTO else [pipe]
    best = fewest_places(run, config, cells, sizes, say=lambda line: print(line, flush=True))
    print("\n".join([*cell_table(cells, best), "", *way_table(best), ""]), flush=True)
    print("\n".join([*describe_timetable(best.pipe), "", tiles_a_step(best.plan), ""]), flush=True)
    for line in comparison(run, best.plan):
        print(line, flush=True)
    print(f"\n{command(best.plan, preset)}")


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
            yield f"{flags:<56} {str(problem)[:42]}"


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


def describe_stages(stages: StageMap, why: str) -> str:
    """Returns which cells each stage has, at which place it runs, and why."""
    every = [(stages.cells(stage), place) for stage, place in enumerate(stages.places)]
    runs = [f"stage {number} = cells {own[0]}-{own[-1]} at place {place}" for number, (own, place) in enumerate(every)]
    return f"pipe of {stages.num_places}: {', '.join(runs)} ({why}); leaving waits for the end of a step"


def describe_step(pipe: Pipe, stages: StageMap) -> str:
    """Returns how long the simulated step of a placement takes, how much of it is waiting, and what places hold."""
    timetable, alone = pipe.timetable(stages), pipe.micros * sum(cost.seconds for cost in pipe.costs)
    sizes = ", ".join(f"{size / GIB:.2g}" for size in pipe.memory(stages))
    return (
        f"a step should take {timetable.seconds:.3g} s without data and updates, {alone:.3g} s on one rank; ranks of "
        f"the pipe wait for {timetable.bubble:.0%} of it; they hold {sizes} GiB of weights, states and values"
    )


def warn_no_overlap(config: Config) -> list[str]:
    """Returns a line if a step has too few micro-batches for stages to work at the same time."""
    if config.accumulate > 1:
        return []
    return [
        "--accumulate 1: stages work one after the other, each rank with the memory of its own, and nothing overlaps: "
        "with --seqpar and --mode halo in place of --pipe all ranks work on the tile at the same time"
    ]


def plan_pipe_here(config: Config, launcher: Launcher, channels: int, outputs: int) -> tuple[Plan, list[str]]:
    """Returns the plan of a complete config's fullest place on the device here, and lines on its stages.

    Costs are counted; nothing is allocated or measured. If no placement fits, the plan's memory says so.
    """
    run = RunToPlan(config, device_of(config, launcher), channels, outputs, timed=False)
    plan, pipe, placed = plan_counted(run, max(launcher.world, config.group_ranks))
    assert placed.stages is not None
    why = f"--placement {config.placement} by counted costs; training measures them"
    return plan, [describe_stages(placed.stages, why), describe_step(pipe, placed.stages), *warn_no_overlap(config)]
