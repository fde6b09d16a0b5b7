"""Prints plans: the table of group sizes, what fits, the command that runs it, and a dry run in words.

``pipeline_printer`` does the same for runs over a pipe.
"""

import dataclasses
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from seqpar.cluster.devices import GB, GIB, MIB
from seqpar.models.build import build_on_meta, family_of
from seqpar.models.network import Network
from seqpar.parallel.mesh import Group
from seqpar.planner.batch_size import runs_over_micro_batch
from seqpar.planner.fit import (
    SHARED_BY,
    UNIT,
    describe_shortage,
    largest_cube,
    most_tiles,
    plans,
    smallest_that_fits,
    why_nothing_fits,
)
from seqpar.planner.memory_saving import flags_of, memory_savings, search_with_savings
from seqpar.planner.needs import Plan, RunToPlan
from seqpar.settings.config import Config
from seqpar.settings.lessons import lessons_of
from seqpar.settings.presets import PRESETS, preset_for_task
from seqpar.terminal import program
from seqpar.text import flag_name, format_sides, quantity

# parts of the memory as the table names them
MEMORY_WORDS = {"transient": "moment", "apart": "libraries and fragments"}


def print_plan(
    run: RunToPlan, sizes: Sequence[int], preset: str, tile: Sequence[int], flags: set[str], note: str = ""
) -> None:
    """Prints a row for each group size, then the command line of the smallest that fits.

    If none fits, options that save memory without changing the result are tried in turn; raises ValueError if they do
    not help either.

    - ``tile``: before padding
    - ``flags``: the settings named on the command line, which stay as they are
    - ``note``: a line to print above the table
    """
    print("\n".join(filter(None, [header(run, preset, tile), note, columns()])), flush=True)
    rows = print_rows(plans(run, sizes))
    if best := smallest_that_fits(rows):
        print("\n".join(["", *recommendation(run, best, rows, preset)]))
        return
    tried = list(rows)
    possible = [p for p in rows if not p.why]
    if possible:
        print(f"\nas asked, {describe_shortage(min(possible, key=lambda p: p.total))}")
        print("trying options that save memory without changing the result:", flush=True)
        for saving, price in memory_savings(run.config, flags):
            print(f"\n{flags_of(saving)}  (adds: {price})", flush=True)
            other = replace(run, config=replace(run.config, **saving))
            rows = print_rows(search_with_savings(other, sizes))
            if best := smallest_that_fits(sorted(rows, key=lambda p: p.config.seqpar)):
                print(f"\ntaken: {flags_of(saving)}, which does not change the result")
                print("\n".join(recommendation(other, best, rows, preset)))
                return
            tried += rows
    raise ValueError(why_nothing_fits(tried, exhausted=True))


def print_largest(run: RunToPlan, sizes: Iterable[int]) -> None:
    """Prints the largest cube that groups of 1, 2, 4 and 8 ranks can train, for those of them in ``sizes``."""
    for size in sizes:
        if size not in SHARED_BY:
            continue
        p = largest_cube(run, size)
        text = f"no cube of {UNIT} or more voxels per side fits"
        if p is not None:
            needs = f"{p.total / GIB:.1f} of {p.device.memory / GIB:.1f} GiB a rank"
            text = f"--tile {p.config.tile[0]}, batch {p.config.batch}: {needs}"
        print(f"--seqpar {size}: {text}", flush=True)


def header(run: RunToPlan, preset: str, tile: Sequence[int]) -> str:
    """Returns the lines above the table: network, tile and device.

    - ``tile``: before padding
    """
    config, device = run.config, run.device
    family = family_of(config)
    padding = "" if tuple(tile) == config.tile else f" padded to {_by(config.tile)}"
    shared = f", {device.cores} cores shared by all ranks" if device.cores else ""
    return "\n".join(
        [
            f"plan: preset {preset}, {family.describe(config)}, mode {config.mode}; {config.precision}",
            f"tile {_by(tile)}{padding}, {family.describe_tile(config)}; {quantity(run.channels, 'channel')}, "
            f"{run.outputs} classes",
            f"{device.name}: {device.memory / GIB:.1f} GiB, {device.peak[config.precision] / 1e12:.3g} TFLOP/s"
            f"{shared} ({device.source})",
            "seqpar: ranks of a tile; model: weights, gradients, optimizer; tokens, decoder: kept for backward",
            "moment: more at the worst moment; rest: input, libraries, fragments; MFU: share of the peak used",
            "",
        ]
    )


def columns() -> str:
    """Returns the table's two header lines: GiB on the fullest rank, GB sent a step, seconds a step."""
    groups = f"{'':>6} {'':<10} | {'GiB on the fullest rank':^47} | {'GB sent':^13} | {'a step':^13}"
    names = f"{'seqpar':>6} {'attention':<10} | {'model':>7}{'tokens':>8}{'decoder':>8}{'moment':>8}{'rest':>7}"
    return f"{groups}\n{names}{'total':>9} | {'seq':>6} {'all':>6} | {'s':>7} {'MFU':>5}"


def row(p: Plan) -> str:
    """Returns the line of a group size; ``!`` marks a total that exceeds the device's memory."""
    if p.why:
        why = p.why if len(p.why) <= 88 else p.why[:87] + "…"
        return f"{p.config.seqpar:>6} {why}"
    size = {name: value / GIB for name, value in p.memory.items()}
    model = size["weights"] + size["gradients"] + size["optimizer"]
    strategy = "windows" if p.config.window else p.config.attention
    strategy = strategy if p.config.seqpar > 1 and family_of(p.config).attends else "-"
    seq, world = p.sent["seq"] / GB, p.sent["world"] / GB
    too_much = " " if p.fits else "!"
    return (
        f"{p.config.seqpar:>6} {strategy:<10} | {model:>7.2f}{size['tokens']:>8.2f}{size['decoder']:>8.2f}"
        f"{size['transient']:>8.2f}{size['input'] + size['apart']:>7.2f}{p.total / GIB:>8.2f}{too_much} | "
        f"{seq:>6.2f} {world:>6.2f} | {p.step_seconds:>7.3g} {p.mfu:>5.0%}"
    )


def print_rows(rows: Iterable[Plan]) -> list[Plan]:
    """Prints plans one by one, as they are computed; returns all of them."""
    every = list[Plan]()
    for p in rows:
        print(row(p), flush=True)
        every.append(p)
    if any(not p.why and not p.fits for p in every):
        device = every[0].device
        size = f"the {device.memory / GIB:.1f} GiB of the device" if device.on_gpu else "a rank's share of the memory"
        print(f"{'':>6} ! exceeds {size}", flush=True)
    return every


def recommendation(run: RunToPlan, best: Plan, rows: Sequence[Plan], preset: str) -> list[str]:
    """Returns the lines below the table: what the smallest group that fits needs, and its command line.

    - ``rows``: the plans of all sizes that were computed with the settings of ``best``
    """
    parts = ", ".join(f"{MEMORY_WORDS.get(name, name)} {value / MIB:.0f}" for name, value in best.memory.items())
    seconds = ", ".join(f"{name} {value:.3g}" for name, value in best.seconds.items())
    size, tiles = best.config.seqpar, most_tiles(run, best)
    fits = f"--seqpar {size} {'is the smallest of these that fits' if len(rows) > 1 else 'fits'}"
    unfused = _unfused(rows, size) if family_of(best.config).attends else ""
    sentences = [
        *_global_batches(run, rows),
        f"{fits}, with up to {quantity(tiles, 'tile')} a group{unfused}",
        f"MiB on the fullest rank: {parts}",
        f"seconds a step: {seconds}",
    ]
    return [*(textwrap.fill(line, 98, subsequent_indent="  ") for line in sentences), "", command(best, preset)]


def _global_batches(run: RunToPlan, rows: Sequence[Plan]) -> list[str]:
    """Returns a sentence on the global batch of each size that can run."""
    sizes = dict[str, list[str]]()
    for p in rows:
        if not p.why:
            sizes.setdefault(tiles_per_step(p.config, p.ranks), []).append(str(p.config.seqpar))
    lines = [f"seqpar {', '.join(group)}: {text}" for text, group in sizes.items()]
    numbers = {p.ranks // p.config.seqpar * p.config.batch * p.config.accumulate for p in rows if not p.why}
    if len(numbers) > 1:
        keeps_tiles_together = runs_over_micro_batch(run.config) and "batch" not in run.fixed
        how = "the batch" if keeps_tiles_together else "accumulation"
        lines.append(
            f"--global-batch N fixes it through {how}, --groups N through the same number of groups at every size"
        )
    return lines


def tiles_per_step(config: Config, num_ranks: int) -> str:
    """Returns the global batch of a config on ``num_ranks`` ranks, and its factors."""
    groups = num_ranks // config.group_ranks
    factors = f"{quantity(groups, 'group')} x batch {config.batch} x accumulate {config.accumulate}"
    tiles = groups * config.batch * config.accumulate
    return f"global batch {quantity(tiles, 'tile')} = {factors}"


def _unfused(rows: Sequence[Plan], chosen: int) -> str:
    """Returns which size would fit if attention stored its scores; nothing if it is the chosen one."""
    sizes = [p.config.seqpar for p in rows if p.fits_unfused]
    if not sizes:
        return f"; without a fused attention kernel, {'it would not' if len(rows) == 1 else 'none would'} fit"
    return "" if min(sizes) == chosen else f"; without a fused attention kernel, --seqpar {min(sizes)} would be needed"


def command(p: Plan, preset: str) -> str:
    """Returns the command line that runs the plan."""
    config = replace(p.config, device="cpu") if p.device.cores else p.config  # auto would take a GPU
    line = shlex.join([*program("train"), *_flags(config, preset)])
    if p.ranks <= p.device.node:
        return f"torchrun --nproc-per-node {p.ranks} {line}"
    nodes, rest = divmod(p.ranks, p.device.node)
    tasks = f"-N {nodes + 1} -n {p.ranks}" if rest else f"-N {nodes} --ntasks-per-node {p.device.node}"
    return f"srun {tasks} python {line}"


def _flags(config: Config, preset: str) -> list[str]:
    """Returns the flags that turn the preset into the config."""
    own, line = PRESETS[preset](), ["--preset", preset]
    start = replace(preset_for_task(own, config.task, preset), task=own.task)
    for f in dataclasses.fields(Config):
        value: Any = getattr(config, f.name)
        if value == getattr(start, f.name) and f.name != "seqpar" or value == ():
            continue
        if isinstance(value, bool):
            line.append(f"--{'' if value else 'no-'}{flag_name(f.name)}")
        else:
            words = format_sides(value).split() if f.name == "patch" else value if isinstance(value, tuple) else [value]
            line += [f"--{flag_name(f.name)}", *map(str, words)]
    return line


def describe_dry_run(
    config: Config, preset: str, p: Plan, channels: int, outputs: int, data: str, steps: int, stages: Sequence[str] = ()
) -> str:
    """Describes what would run: settings, data, network, tokens, memory per rank, steps, how ranks share decoding.

    - ``preset``: from which the settings are told apart
    - ``p``: the plan of ``config`` on the device here
    - ``data``: the line that describes the data set
    - ``steps``: how many steps this lesson trains
    - ``stages``: lines on the stages of a pipe
    """
    pipe = f"pipe {config.pipe} x " if config.pipe > 1 else ""
    memory, groups = p.memory, p.ranks // config.group_ranks
    net = build_on_meta(config, Group("seq", tuple(range(config.seqpar))), channels, outputs)
    layout, several = net.layout, config.seqpar > 1
    per_rank = f"; per rank {' '.join(map(str, layout.counts))}" if several else ""
    model = memory["weights"] + memory["gradients"] + memory["optimizer"]
    decoding = describe_decoding(net, config)  # which refuses a batch that the mode cannot share
    verdict = "fits" if p.fits else "does not fit; plan finds what does, also for other devices"
    return "\n".join(
        [
            f"would run on {quantity(p.ranks, 'rank')} = data {groups} x {pipe}seq {config.seqpar}; "
            "nothing was written",
            f"  settings  {shlex.join(_flags(replace(config, dry_run=False), preset))}",
            f"  data      {data}",
            f"  network   {net.describe()}",
            f"  tile      {family_of(config).describe_tile(config)}{per_rank}",
            *(f"  attention {why}" for why in p.attention_why[:1] if several),
            *[f"  decoding  {decoding}"] * several,
            *(f"  {'' if number else 'stages':<9} {line}" for number, line in enumerate(stages)),
            f"  memory    {p.total / GIB:.2f} GiB a rank, of {p.device.memory / GIB:.2f} of {p.device.name}: {verdict}",
            f"            {(memory['tokens'] + memory['decoder']) / GIB:.2f} for backward, "
            f"{memory['transient'] / GIB:.2f} more at the worst moment, {model / GIB:.2f} for weights, gradients and "
            "optimizer, the rest for input and libraries",
            f"  steps     {steps}; {tiles_per_step(config, p.ranks)}",
        ]
    )


def describe_decoding(net: Network, config: Config) -> str:
    """Returns how ranks share decoding; raises ValueError if the mode refuses the batch."""
    line = net.mode.check(net.layout, config.batch)
    return line if net.group.size > 1 else "each rank decodes whole tiles"


def describe_lessons(config: Config) -> str:
    """Returns a curriculum's lessons, a line each; "" without a curriculum."""
    if not config.curriculum:
        return ""
    lines = []
    for lesson in lessons_of(config):
        each = lesson.config
        tiles = f"{each.batch} x {each.accumulate}" if each.accumulate > 1 else str(each.batch)
        centred = ", centred on labelled voxels" if lesson.foreground == 1 else ""
        steps = f"steps {lesson.steps.start + 1} to {lesson.steps.stop}"
        lines.append(f"  tile {_by(each.tile)}, {tiles} a group: {steps}{centred}")
    return "\n".join([f"curriculum of {quantity(len(lines), 'lesson')}:", *lines])


def _by(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))
