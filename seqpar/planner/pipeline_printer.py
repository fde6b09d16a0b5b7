"""Prints plans of runs over a pipe: cells, every placement, and what the same ranks could do without a pipe."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from seqpar.cluster.devices import GIB, MIB
from seqpar.parallel.launcher import Launcher
from seqpar.pipeline.gabra import loads_and_capacities
from seqpar.pipeline.placement import Pipe
from seqpar.pipeline.stages import StageMap
from seqpar.planner.chooser import device_of, fewest_places
from seqpar.planner.needs import Plan, RunToPlan, plan
from seqpar.planner.pipeline_plan import (
    SIZES,
    Cells,
    PlacementOptions,
    PlacementResult,
    measure_or_count_cells,
    plan_counted,
)
from seqpar.planner.printer import command, header, tiles_per_step
from seqpar.settings.config import Config
from seqpar.settings.parallel_settings import AUTO
from seqpar.text import in_flags, quantity

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
    tiles = tiles_per_step(best.plan.config, best.plan.ranks)
    print("\n".join([*describe_timetable(best.pipe), "", tiles, ""]), flush=True)
    for line in comparison(run, best.plan):
        print(line, flush=True)
    print(f"\n{command(best.plan, preset)}")


def cell_table(cells: Cells, spread: PlacementOptions) -> list[str]:
    """Returns a line for each cell: what it costs on a micro-batch, and at which place the best placement puts it."""
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
    """Returns a line for each placement: step and bubble in the simulated timetable, bytes, and the cut."""
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
    return [*lines, "* chosen; ! exceeds a rank's memory; MiB sent: per micro-batch, forward and backward"]


def _cut(row: PlacementResult) -> str:
    """Returns each stage's range of cells, with its place unless places are in order."""
    assert row.stages is not None
    stages = row.stages
    runs = [(stages.cells(stage), place) for stage, place in enumerate(stages.places)]
    in_order = stages.places == tuple(range(stages.num_places))
    text = " ".join(f"{cells[0]}-{cells[-1]}{'' if in_order else f'@{place}'}" for cells, place in runs)
    return text if len(text) < 36 else f"{stages.num_stages} stages"


def describe_timetable(pipe: Pipe) -> list[str]:
    """Returns notes on the timetable, and on GABRA's own objective."""
    count, micros = len(pipe.places), pipe.micros
    idle = (count - 1) / (micros + count - 1)
    lines = [f"equal stages would wait for {idle:.0%} of a step: (K-1)/(M+K-1)"]
    if micros == 1:
        lines.append(
            "--accumulate 1: stages run one after the other without overlap; a larger --accumulate overlaps them, and "
            "with --seqpar and --mode halo all ranks work on one tile at the same time"
        )
    loads, capacities = loads_and_capacities(pipe)
    if len(set(capacities)) == 1:
        lines.append(
            f"GABRA's own objective is {sum(loads) / capacities[0]:.4g} for every feasible allocation, because all "
            "places are equal: it cannot prefer one; --objective makespan can"
        )
    return [text for line in lines for text in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def comparison(run: RunToPlan, p: Plan) -> Iterator[str]:
    """Yields lines on what a step of the same ranks and tiles takes, with this pipe and without one."""
    yield f"{'same ranks, same tiles per step':<56}{'s a step':>9}{'GiB a rank':>12}"
    yield _line(_flags(p.config, p.ranks), p)
    for config in alternatives_without_pipe(p):
        flags = _flags(config, p.ranks)
        try:
            yield _line(flags, plan(replace(run, config=config, ranks=p.ranks, fixed={}), config.seqpar))
        except ValueError as problem:
            yield f"{flags:<56} {in_flags(str(problem))[:42]}"


def alternatives_without_pipe(p: Plan) -> Iterator[Config]:
    """Yields configs without a pipe that train as many tiles per step on the plan's ranks."""
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
    return f"pipe of {stages.num_places}: {', '.join(runs)} ({why}); a stop request waits for the end of a step"


def describe_step(pipe: Pipe, stages: StageMap) -> str:
    """Returns how long a placement's simulated step takes, how much of it is waiting, and what each place holds."""
    timetable, alone = pipe.timetable(stages), pipe.micros * sum(cost.seconds for cost in pipe.costs)
    sizes = ", ".join(f"{size / GIB:.2g}" for size in pipe.memory(stages))
    return (
        f"a step should take {timetable.seconds:.3g} s without data and updates, {alone:.3g} s on one rank; ranks of "
        f"the pipe wait for {timetable.bubble:.0%} of it; they hold {sizes} GiB of weights, states and activations"
    )


def warn_no_overlap(config: Config) -> list[str]:
    """Returns a line if a step has too few micro-batches for stages to work at the same time."""
    if config.accumulate > 1:
        return []
    return [
        "--accumulate 1: stages run one after the other and nothing overlaps; each rank needs only its stage's memory. "
        "With --seqpar and --mode halo instead of --pipe, all ranks work on the tile at the same time"
    ]


def plan_pipe_here(config: Config, launcher: Launcher, channels: int, outputs: int) -> tuple[Plan, list[str]]:
    """Returns the plan of a complete config's fullest place on the device here, and lines on its stages.

    Costs are counted; nothing is allocated or measured. If no placement fits, the plan's memory says so.
    """
    run = RunToPlan(config, device_of(config, launcher), channels, outputs, timed=False)
    counted, pipe, placed = plan_counted(run, max(launcher.world, config.group_ranks))
    assert placed.stages is not None
    why = f"--placement {config.placement} by counted costs; training measures them"
    return counted, [describe_stages(placed.stages, why), describe_step(pipe, placed.stages), *warn_no_overlap(config)]
