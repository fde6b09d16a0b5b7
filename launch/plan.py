"""Says what a run needs before the queue does: ``python launch/plan.py --tile 128 --patch 4 --preset paper``.

Memory by part, bytes sent, time and MFU for sequence groups of 1 to 64 ranks, and the command line of the smallest
that fits. Takes the flags of train too.
"""

import argparse
import dataclasses
import math
import os
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from seqpar.launch.hardware.cpu_speed import this_cpu
from seqpar.launch.hardware.devices import DEVICES, GB, Device, device_here, measured
from seqpar.launch.job import exit_codes
from seqpar.launch.planning.needs import SIZES, Plan, Run, most_tiles, plans, refusal, smallest
from seqpar.launch.settings.command_line import parse, refuse_idle
from seqpar.launch.settings.config import AUTO, PRESETS, Config, dashed

MIB, GIB = 2**20, 2**30


def act(arguments: Sequence[str]) -> int:
    """Returns 0 when a group fits; refuses what nothing fits."""
    own, rest = _parser().parse_known_args(list(arguments))
    preset, config, given = parse(rest, "paper")
    refuse_idle(config, given - {"measured"})  # seconds are planned with it in any case
    tile = tuple(own.volume or config.tile)
    padded = tuple(math.ceil(side / config.patch) * config.patch for side in tile)
    config = replace(config, tile=padded)
    run = Run(config, _device(own, config), own.channels, own.classes, ranks=own.ranks)
    sizes = [config.seqpar] if config.seqpar != AUTO and "seqpar" in given else SIZES
    found = list(plans(run, [size for size in sizes if size <= (own.ranks or size)]))
    print(_header(run, preset, tile))
    print(table(found))
    best = smallest(found)
    if best is None:
        raise ValueError(refusal(found))
    print("\n".join(["", *_answer(run, best, found, preset)]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "plan", description=__doc__, allow_abbrev=False, epilog="All flags of train are taken as well: train --help."
    )
    here = "the GPU here, else mi250x"
    parser.add_argument(
        "--device", choices=[*DEVICES, "cpu"], help=f"what to plan for ({here}); cpu: this machine, measured"
    )
    parser.add_argument("--memory", type=float, metavar="GB", help="memory of a rank, if it is another")
    parser.add_argument("--volume", type=int, nargs=3, metavar="N", help="a whole volume as the tile, in voxels")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks in all (one sequence group)")
    parser.add_argument("--node", type=int, metavar="N", help="ranks that a node has, if it is another number")
    parser.add_argument("--channels", type=int, default=4, metavar="N", help="channels of the images (4)")
    parser.add_argument("--classes", type=int, default=4, metavar="N", help="classes, background among them (4)")
    return parser


def _device(own: argparse.Namespace, config: Config) -> Device:
    for name in ("ranks", "node", "channels", "classes", "memory"):
        value = getattr(own, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: it must be at least 1")
    name = own.device or ("" if torch.cuda.is_available() else "mi250x")
    if name == "cpu":
        found = this_cpu(config.precision)
    else:
        found = DEVICES[name] if name else device_here()
    if config.measured:
        found = measured(config.measured, found, config.precision)
    found = replace(found, memory=own.memory * GB) if own.memory else found
    found = replace(found, node=own.node) if own.node else found
    if own.ranks and own.ranks > found.node and own.ranks % found.node:
        fits = own.ranks // found.node * found.node
        raise ValueError(
            f"--ranks {own.ranks} do not fill nodes of {found.node}: plan for {fits} or {fits + found.node}, or say "
            "with --node how many a node has"
        )
    return found


def _header(run: Run, preset: str, tile: Sequence[int]) -> str:
    config, device = run.config, run.device
    tokens = math.prod(side // config.patch for side in config.tile)
    padding = "" if tuple(tile) == config.tile else f" padded to {_by(config.tile)}"
    shared = f", {device.cores} cores that ranks share" if device.cores else ""
    return "\n".join(
        [
            f"plan: preset {preset}, {config.depth} blocks x {config.embed_dim}, {config.heads} heads; "
            f"{config.decoder} decoder, mode {config.mode}; {config.precision}",
            f"tile {_by(tile)}{padding}, patch {config.patch}: {tokens} tokens; {run.channels} channels, "
            f"{run.outputs} classes",
            f"{device.name}: {device.memory / GIB:.1f} GiB, {device.peak[config.precision] / 1e12:.3g} TFLOP/s"
            f"{shared} ({device.told})",
            "",
        ]
    )


def table(found: Sequence[Plan]) -> str:
    """Returns a row for each group size, in GiB a rank, GB a rank and step, and seconds."""
    columns = f"{'':>6} {'':<10} | {'GiB on the fullest rank':^47} | {'GB sent':^13} | {'a step':^13}"
    names = f"{'seqpar':>6} {'attention':<10} | {'model':>7}{'tokens':>8}{'decoder':>8}{'moment':>8}{'rest':>7}"
    lines = [columns, f"{names}{'total':>9} | {'seq':>6} {'all':>6} | {'s':>7} {'MFU':>5}"]
    return "\n".join([*lines, *map(_row, found)])


def _row(p: Plan) -> str:
    if p.why:
        why = p.why if len(p.why) <= 88 else p.why[:87] + "…"
        return f"{p.config.seqpar:>6} {why}"
    size = {name: value / GIB for name, value in p.memory.items()}
    model = size["weights"] + size["gradients"] + size["optimiser"]
    strategy = p.config.attention if p.config.seqpar > 1 else "-"
    seq, world = p.sent["seq"] / GB, p.sent["world"] / GB
    too_much = " " if p.fits else "!"
    return (
        f"{p.config.seqpar:>6} {strategy:<10} | {model:>7.2f}{size['tokens']:>8.2f}{size['decoder']:>8.2f}"
        f"{size['transient']:>8.2f}{size['input'] + size['apart']:>7.2f}{p.total / GIB:>8.2f}{too_much} | "
        f"{seq:>6.2f} {world:>6.2f} | {p.step_seconds:>7.3g} {p.mfu:>5.0%}"
    )


def _answer(run: Run, best: Plan, found: Sequence[Plan], preset: str) -> list[str]:
    parts = ", ".join(f"{name} {value / MIB:.0f}" for name, value in best.memory.items())
    spent = ", ".join(f"{name} {value:.3g}" for name, value in best.seconds.items())
    size, tiles = best.config.seqpar, most_tiles(run, best)
    fits = f"--seqpar {size} {'is the smallest of these that fits' if len(found) > 1 else 'fits'}"
    unfused = next((p for p in found if p.fits_unfused), None)
    if len(found) == 1:
        needs = "would fit too" if unfused else "would not fit"
    else:
        needs = f"would need --seqpar {unfused.config.seqpar}" if unfused else "would fit none of them"
    told = [
        f"{fits}, with up to {tiles} tile{'s' if tiles > 1 else ''} a group; attention that is not fused {needs}",
        f"MiB on the fullest rank: {parts}",
        f"seconds a step: {spent}",
    ]
    return [*(textwrap.fill(line, 98, subsequent_indent="  ") for line in told), "", command(best, preset)]


def command(p: Plan, preset: str) -> str:
    """Returns the line that runs the plan."""
    script = os.path.relpath(Path(__file__).with_name("train.py"))
    config = replace(p.config, device="cpu") if p.device.cores else p.config  # else a GPU that is there is taken
    line = f"{script} {shlex.join(flags(config, preset))}"
    if p.ranks <= p.device.node:
        return f"torchrun --nproc-per-node {p.ranks} {line}"
    return f"srun -N {p.ranks // p.device.node} --ntasks-per-node {p.device.node} python {line}"


def flags(config: Config, preset: str) -> list[str]:
    """Returns the flags that make the config of the preset."""
    start, found = PRESETS[preset](), ["--preset", preset]
    for f in dataclasses.fields(Config):
        value: Any = getattr(config, f.name)
        if value == getattr(start, f.name) and f.name != "seqpar":
            continue
        if isinstance(value, bool):
            found.append(f"--{'' if value else 'no-'}{dashed(f.name)}")
        else:
            found += [f"--{dashed(f.name)}", *map(str, value if isinstance(value, tuple) else [value])]
    return found


def _by(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides))


def main() -> None:
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
