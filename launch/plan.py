"""Says what a run needs before the queue does: ``python launch/plan.py --tile 128 --patch 4 --preset paper``.

Memory by part, bytes sent, time and MFU for sequence groups of 1 to 64 ranks, and the command line of the smallest
that fits. Takes the flags of train too.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch

from seqpar.launch.hardware.cpu_speed import this_cpu
from seqpar.launch.hardware.devices import DEVICES, GB, Device, device_here, measured
from seqpar.launch.job import exit_codes
from seqpar.launch.planning.answer import answer, header, table
from seqpar.launch.planning.fit import SIZES, plans, refusal, smallest
from seqpar.launch.planning.needs import Run
from seqpar.launch.settings.command_line import parse, refuse_idle
from seqpar.launch.settings.config import AUTO, Config


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
    print(header(run, preset, tile))
    print(table(found))
    best = smallest(found)
    if best is None:
        raise ValueError(refusal(found))
    print("\n".join(["", *answer(run, best, found, preset)]))
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


def main() -> None:
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
