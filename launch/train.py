"""Trains: ``torchrun launch/train.py --seqpar 4 --patch 4``; without --data on built-in phantom brains."""

import io
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from seqpar.collectives import tell_all
from seqpar.environment import Start, flight_recorder, read_start
from seqpar.launch.job import exit_codes
from seqpar.launch.job.local_ranks import die_with_parent, run_local, visible_devices
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.models.segmentation import SegmentationNet, build
from seqpar.launch.planning.auto_settings import choose, choose_attention
from seqpar.launch.planning.batch_size import keep_global_batch
from seqpar.launch.planning.feasibility import refuse, refuse_lonely, rehearsal
from seqpar.launch.runs.journal import Status, describe_run
from seqpar.launch.settings.command_line import continued, parse, refuse_idle
from seqpar.launch.settings.config import AUTO, Config, read_config, seconds
from seqpar.launch.training.data import Material, open_material
from seqpar.launch.training.failure import end
from seqpar.launch.training.trainer import Trainer, global_batch
from seqpar.launch.weights import checkpoint
from seqpar.launch.weights.pretrained import start_from
from seqpar.mesh import Mesh, check_seqpar, seed, start

FIRST_S = 2.0  # before another rank than the first one says why it cannot begin


@dataclass(frozen=True)
class Order:
    """What was asked for: the settings, and where they came from."""

    config: Config
    preset: str
    why: str
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)  # what was left open, and why it is what it is

    @property
    def told(self) -> list[str]:
        """The first line on each choice."""
        return [lines[0] for lines in self.chosen.values()]


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 finished, 75 preempted and resumable; a user's errors are raised."""
    die_with_parent()
    begin = read_start(os.environ)
    try:
        order = _order(arguments, begin)
        if order.config.dry_run:
            return _rehearse(order, begin)
        if order.config.seqpar > begin.world:
            return _start_ranks(order, begin, arguments)
        check_seqpar(order.config.seqpar, begin.world)
        refuse_lonely(order.config, begin.world)
        _refuse_other_run(order.config)
    except ValueError as error:
        if begin.rank == 0:
            raise
        time.sleep(FIRST_S)  # mostly all ranks refuse the same, and the first one's end ends these
        print(f"error: rank {begin.rank} ({begin.host or socket.gethostname()}): {error}", file=sys.stderr, flush=True)
        return exit_codes.code_of(error) or exit_codes.USAGE
    return _run(order, begin)


def _order(arguments: Sequence[str], begin: Start) -> Order:
    default = "paper" if torch.cuda.is_available() else "laptop"
    preset, config, given = parse(arguments, default)
    told = any(text.startswith("--preset") for text in arguments)
    why = "as told" if told else f"the default where there is {'an' if default == 'paper' else 'no'} accelerator"
    if not config.resume and _is_restart(begin) and _holds_run(config.out):
        config = replace(config, resume=True)  # the scheduler runs the same line again
    if config.resume:
        if not config.out:
            raise ValueError("--resume needs --out, the run folder to continue")
        content = read_config(config.out)
        began = content.get("preset", preset)
        if told and preset != began:
            raise ValueError(f"--preset {preset}: the run in {config.out} goes on as it began, {began}: leave it out")
        wish: dict[str, int] = {name: getattr(config, name) for name in ("batch", "accumulate") if name in given}
        config = continued(Config.from_dict(content["config"]), config, given - {"resume", *wish})
        tiles = content["layout"]["data"] * config.batch * config.accumulate
        preset, why = began, f"as the run in {config.out} began"
    refuse_idle(config, given)
    chosen = dict[str, tuple[str, ...]]()
    if config.seqpar == AUTO or not config.batch:
        if config.seqpar != AUTO:
            refuse(config)  # before data is prepared
        config, chosen = choose(config, begin, *_channels(config, begin))
    if config.resume:
        groups = max(begin.world, config.seqpar) // config.seqpar
        config = keep_global_batch(config, tiles, groups, wish)
    refuse(config)
    return Order(config, preset, why, chosen)


def _channels(config: Config, begin: Start) -> tuple[int, int]:
    """Returns the channels of images and outputs of the network."""
    if config.dry_run:
        return 4, 4  # no data is prepared
    material = open_material(config, begin.rank == 0)
    return material.num_channels, material.num_outputs


def _is_restart(begin: Start) -> bool:
    return begin.attempt > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def _holds_run(out: str) -> bool:
    return bool(out) and (Path(out) / "config.json").exists()


def _run(order: Order, begin: Start) -> int:
    config = order.config
    if begin.rank == 0:
        print("\n".join([*order.told, _first_line(order, begin)]), flush=True)
    stopper = Stopper(seconds(config.time_limit))
    material = open_material(config, begin.rank == 0)
    os.environ.update(flight_recorder(os.environ, config.out, torch.__version__))
    with start(config.seqpar, None, config.device, config.start_timeout, config.debug_collectives) as mesh:
        seed(config.seed)
        status = Status(Path(config.out or tell_all(_new_name(order.preset), mesh.world)[0]))
        stopper.there_is_work(
            mesh,
            lambda why: status.write_unless_over("preempted", why, exit_codes.PREEMPTED) if mesh.is_first else None,
        )
        try:
            _agreed(lambda: _open_folder(status) if mesh.is_first else "", mesh)
            trainer = _trainer(order, mesh, material, status)
            verdict = trainer.run(stopper)
        except (Exception, KeyboardInterrupt) as error:
            end(error, config, mesh, status)
    stopper.close()
    return 0 if verdict == "finished" else exit_codes.PREEMPTED


def _trainer(order: Order, mesh: Mesh, material: Material, status: Status) -> Trainer:
    """Returns the trainer, and has said and written what it will do."""
    config, out = order.config, status.path.parent
    _refuse_other_choices(config, mesh)
    saved = checkpoint.find_together(out / "checkpoints", mesh.world) if config.resume else None
    net, attention_why = _built(config, mesh, material, read_config(out)["layout"] if saved else {})
    decoding = net.mode.check(net.encoder.layout, config.batch)
    told = _agreed(lambda: start_from(net, config), mesh) if config.weights and not saved else ""
    layout = {"ranks": mesh.world.size, "data": mesh.data.size, "seqpar": mesh.seq.size, "hosts": mesh.hosts}
    layout |= {"strategy": str(net.encoder.attention), "attention": attention_why, **order.chosen}
    described = describe_run(config, order.preset, material.describe(), layout)
    if mesh.is_first:
        print(f"{_size_line(net, config, mesh)}; {decoding}", flush=True)
        print(f"attention: {attention_why[0]}" + (f"\n{told}" if told else ""), flush=True)
    return Trainer(config, mesh, material, net, status, described, saved)


def _built(
    config: Config, mesh: Mesh, material: Material, before: Mapping[str, Any]
) -> tuple[SegmentationNet, Sequence[str]]:
    """Returns the network, and why attention crosses ranks as it does: where that was open, by the first rank's word.

    ``before`` is what was recorded of the ranks of a run that goes on.
    """
    sizes = material.num_channels, material.num_outputs
    chosen = choose_attention(config, mesh.begin, *sizes, before)
    strategy, *why = tell_all("\n".join(chosen), mesh.world)[0].split("\n")
    net = build(replace(config, attention=strategy or config.attention), *sizes, mesh.seq, bool(material.regions))
    return net, why or net.encoder.attention_choice


def _start_ranks(order: Order, begin: Start, arguments: Sequence[str]) -> int:
    """Starts the missing ranks here, if this is one process on one machine; else says how to start them."""
    count, typed = order.config.seqpar, shlex.join(arguments)
    script = os.path.relpath(__file__)
    line = f"torchrun --nproc-per-node {count} {script} {typed}"
    lacking = f"--seqpar {count} needs {count} ranks, and {begin.world} came"
    if "SLURM_JOB_ID" in os.environ:
        raise ValueError(f"{lacking}; in this Slurm job use: srun -n {count} python {script} {typed}")
    if begin.world > 1:
        raise ValueError(f"{lacking}; use: {line}")
    told = f"--seqpar {count} needs {count} ranks and 1 was started: starting {count} here"
    print(f"{told} ({visible_devices()}); the same as: {line}", flush=True)
    return run_local(count, [__file__, *arguments])


def _new_name(preset: str) -> str:
    return f"runs/{preset}-{time.strftime('%Y%m%d-%H%M%S')}"


def _first_line(order: Order, begin: Start) -> str:
    config, groups = order.config, begin.world // order.config.seqpar
    return (
        f"seqpar: preset {order.preset} ({order.why}); {begin.world} rank{'s' if begin.world > 1 else ''} = data "
        f"{groups} x seq {config.seqpar}, started by {begin.by}; tile {'x'.join(map(str, config.tile))}, patch "
        f"{config.patch}, decoder {config.decoder}, mode {config.mode}, {config.precision}, {config.batch} "
        f"tile{'s' if config.batch > 1 else ''} per sequence group"
        + (f", {config.accumulate} times a step" if config.accumulate > 1 else "")
    )


def _size_line(net: SegmentationNet, config: Config, mesh: Mesh) -> str:
    encoder, decoder = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (net.encoder, net.decoder))
    layout = net.encoder.layout
    return (
        f"network: encoder {encoder:.2f} M + decoder {decoder:.2f} M parameters; {layout.num_tokens} tokens a tile, "
        f"{max(layout.counts)} per rank; {config.steps} steps of {global_batch(config, mesh)} tiles"
    )


def _rehearse(order: Order, begin: Start) -> int:
    """Says what would run; allocates and writes nothing, and needs no other rank."""
    count = max(begin.world, order.config.seqpar)
    check_seqpar(order.config.seqpar, count)
    refuse_lonely(order.config, count)
    if begin.rank == 0:
        print("\n".join([*order.told, _first_line(order, replace(begin, world=count))]))
        print(rehearsal(order.config, count, choose_attention(order.config, begin, *_channels(order.config, begin))))
    return 0


def _refuse_other_run(config: Config) -> None:
    if not config.resume and _holds_run(config.out):
        raise ValueError(f"--out {config.out} holds a run already: add --resume to continue it, or name another folder")


def _refuse_other_choices(config: Config, mesh: Mesh) -> None:
    """Refuses ranks that chose differently, for the memory of their devices is not the same."""
    every = dict.fromkeys(tell_all(f"--seqpar {config.seqpar} --batch {config.batch}", mesh.world))
    if len(every) > 1:
        raise ValueError(f"ranks have different memory and chose {' and '.join(every)}: give one of these")


def _open_folder(status: Status) -> str:
    try:
        (status.path.parent / "checkpoints").mkdir(parents=True, exist_ok=True)
        status.write("running")
    except OSError as error:
        told = f"--out {status.path.parent} cannot be written ({error.strerror}): name another, or make room"
        raise ValueError(told) from None
    return ""


def _agreed(act: Callable[[], str], mesh: Mesh) -> str:
    """Returns what ``act`` returns; what hinders it on any rank is raised on all."""
    found, hindered = "", None
    try:
        found = act()
    except ValueError as error:
        hindered = error
    for rank, told in enumerate(tell_all(str(hindered or ""), mesh.world)):
        if told:
            raise hindered or ValueError(f"rank {rank}: {told}")
    return found


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know every sign
    sys.exit(exit_codes.run(act))


if __name__ == "__main__":
    main()
