"""Plans a run before it is queued: ``python launch/plan.py --tile 128 --patch 4 --preset paper``.

Prints memory, bytes sent, time and MFU for groups of 1 to 64 ranks, and the command line of the smallest that fits.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.cpu_speed import measure_cpu
from seqpar.cluster.devices import DEVICES, GB, Device, device_here, measured
from seqpar.data.addresses import describe_download, is_missing
from seqpar.models.build import NETWORK_NAMES, family_of
from seqpar.planner.fit import usual_sizes
from seqpar.planner.needs import RunToPlan
from seqpar.planner.pipeline_printer import print_pipe
from seqpar.planner.preset_from_data import plan_from_data
from seqpar.planner.printer import print_largest, print_plan
from seqpar.prediction.prediction_memory import print_prediction
from seqpar.settings.checks import LARGEST_TILE
from seqpar.settings.command_line import naming_preset, parse, ranks_or_auto, shortened_warmup
from seqpar.settings.config import Config
from seqpar.settings.field import whole_bounds
from seqpar.settings.parallel_settings import AUTO
from seqpar.settings.parser import Parser, check_numbers
from seqpar.settings.presets import start_of_auto
from seqpar.settings.rules import refuse_settings_without_effect
from seqpar.tasks.lookup import task_of
from seqpar.text import flag_name
from seqpar.training.open_settings import config_to_plan
from seqpar.weights.nnunet_settings import with_plans


def act(arguments: Sequence[str]) -> int:
    """Prints the plan and returns 0; raises where no group fits."""
    parser = _parser()
    own, rest = parser.parse_known_args(list(arguments))
    on_gpu = own.device != "cpu"
    preset, config, flags = parse(rest, "paper", NETWORK_NAMES, tuple(parser._option_string_actions), on_gpu)
    if "curriculum" in flags:
        raise ValueError("--curriculum: plan each lesson by itself, with --tile; train --dry-run plans all of them")
    if config.resume:
        raise ValueError("--resume: plan does not read the run in --out: train --resume --dry-run plans it")
    _refuse_with_pipe(own, config)
    with naming_preset(preset, flags):
        return _plan(own, preset, config, flags, on_gpu)


def _plan(own: argparse.Namespace, preset: str, config: Config, flags: set[str], on_gpu: bool) -> int:
    """Plans what the command line asks for, without a preset's lessons."""
    config = replace(config, curriculum="", pipe=1 if own.pipe is None else own.pipe or 2)
    if is_missing(config.weights):
        print(describe_download(config.weights), flush=True)
    config, planned = with_plans(config, flags)
    family_of(config)  # refuses a network of another task
    refuse_settings_without_effect(config, flags - {"measured"})  # seconds are planned with it in any case
    config, warmup = shortened_warmup(config, flags)
    device = _device(own, config)
    if preset == "auto":
        preset, config = start_of_auto(on_gpu), _planned_from_data(own, config, flags | planned, device)
    config, own.channels, own.classes = config_to_plan(config, tuple(own.volume or ()), own.channels, own.classes)
    sizes = [config.seqpar] if config.seqpar != AUTO and "seqpar" in flags else usual_sizes(device.node)
    sizes = [size for size in sizes if size <= (own.ranks or size)]
    if own.largest_tile and own.volume:
        raise ValueError("--volume would do nothing: --largest-tile looks for one of its own: remove it")
    if own.predict:
        return print_prediction(config, own.volume or (), device, sizes, own.channels, own.classes)
    tile = tuple(own.volume or config.tile)
    unit = family_of(replace(config, tile=tile)).unit(replace(config, tile=tile))
    config = replace(config, tile=tuple(math.ceil(side / step) * step for side, step in zip(tile, unit)))
    fixed = {name: getattr(config, name) for name in flags & {"batch", "accumulate"}}
    run = RunToPlan(config, device, own.channels, own.classes, ranks=own.ranks, groups=own.groups or 1, fixed=fixed)
    if own.largest_tile:
        print_largest(run, sizes)
    elif config.pipe > 1:
        print_pipe(run, own.pipe, preset, tile)
    else:
        print_plan(run, sizes, preset, tile, flags, warmup)
    return 0


def _refuse_with_pipe(own: argparse.Namespace, config: Config) -> None:
    """Refuses what a plan of stages does not answer."""
    for name in ("predict", "largest_tile"):
        if own.pipe is not None and getattr(own, name):
            raise ValueError(f"--{flag_name(name)} with --pipe: it knows no stages: leave one of both out")
    if own.pipe is not None and config.seqpar == AUTO:
        raise ValueError("--seqpar auto with --pipe: stages are planned for one size: give --seqpar a number")


def _planned_from_data(own: argparse.Namespace, config: Config, flags: set[str], device: Device) -> Config:
    """Returns the config of --preset auto for --data, after saying why; its channels and classes are the data's."""
    if typed := [name for name in ("channels", "classes") if getattr(own, name) is not None]:
        raise ValueError(f"--{typed[0]} would do nothing: --preset auto takes it from --data: remove it")
    fingerprint = task_of(config).read_headers(config)
    own.channels, own.classes = len(fingerprint.modalities), len(fingerprint.outputs(config.targets))
    config, why = plan_from_data(config, flags, fingerprint, device, own.ranks or config.group_ranks)
    print("\n".join(line for lines in why.values() for line in lines), end="\n\n", flush=True)
    return config


def _parser() -> argparse.ArgumentParser:
    about = str(__doc__).partition("\n\n")[2]
    parser = Parser("plan", description=about, epilog="All flags of train are taken as well: seqpar-train --help all.")
    device = "device to plan for (default: this machine's GPU, else mi250x); cpu: this machine, measured for seconds"
    parser.add_argument("--device", choices=[*DEVICES, "cpu"], help=device)
    memory = "memory of a rank, on a CPU of all its ranks together, in 10^9 bytes (default: the device's)"
    parser.add_argument("--memory", type=float, metavar="GB", help=memory)
    volume = "sides of a whole volume to take as the tile, in voxels (default: --tile)"
    parser.add_argument("--volume", type=int, nargs=3, metavar=("W", "D", "H"), help=volume)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--largest-tile", action="store_true", help="only print how large a cube 1, 2, 4, 8 ranks train")
    pipe = "ranks over which the network's layers are spread: compares all placements; auto: the fewest that fit"
    parser.add_argument("--pipe", type=ranks_or_auto, metavar="RANKS", help=pipe)
    predict = "plan prediction of --volume instead of training: by windows of --tile, and in a whole pass"
    kind.add_argument("--predict", action="store_true", help=predict)
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--ranks", type=int, metavar="RANKS", help="ranks of the run (default: those of its groups)")
    groups = "groups of ranks that share a tile, the same number at every size (default: 1)"
    ranks.add_argument("--groups", type=int, metavar="GROUPS", help=groups)
    node = "ranks on a node (default: 8; cpu: all)"
    parser.add_argument("--node", type=int, metavar="RANKS", help=node)
    channels = "channels of the images (default: those of --data, else 4)"
    parser.add_argument("--channels", type=int, metavar="CHANNELS", help=channels)
    classes = "classes, background included (default: those of --data, else 4)"
    parser.add_argument("--classes", type=int, metavar="CLASSES", help=classes)
    return parser


def _device(own: argparse.Namespace, config: Config) -> Device:
    names, most = ("ranks", "groups", "node", "channels", "memory"), 1_000_000
    check_numbers(own, volume=whole_bounds(1, LARGEST_TILE), **dict.fromkeys(names, whole_bounds(1, most)))
    check_numbers(own, classes=whole_bounds(2, most))  # the background and another
    name = own.device or ("" if torch.cuda.is_available() else "mi250x")
    if name == "cpu":  # measuring takes minutes with the largest tiles, of which no seconds are printed
        device = device_here("cpu") if own.largest_tile else measure_cpu(config.precision)
    else:
        device = DEVICES[name] if name else device_here()
    if config.measured:
        device = measured(config.measured, device, config.precision)
    if own.memory:
        device = replace(device, memory=own.memory * GB, source=f"{device.source}; --memory {own.memory:g}")
    device = replace(device, node=own.node) if own.node else device
    if own.ranks and own.ranks > device.node and own.ranks % device.node:
        fits = own.ranks // device.node * device.node
        raise ValueError(
            f"--ranks {own.ranks} do not fill nodes of {device.node}: plan for {fits} or {fits + device.node}, or say "
            "with --node how many a node has"
        )
    return device


def main() -> None:
    exit_codes.leave(exit_codes.run(act, prints_result=True))


if __name__ == "__main__":
    main()
