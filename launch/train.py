"""Trains: ``torchrun launch/train.py --seqpar 4 --patch 4``; without --data on built-in phantom brains."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from seqpar.collectives import tell_all
from seqpar.decoders.modes import MODES
from seqpar.environment import Start, read_start
from seqpar.launch import checkpoint, exits
from seqpar.launch.batches import choose_batch
from seqpar.launch.config import Config, parse, read_config, seconds
from seqpar.launch.finetune import start_from
from seqpar.launch.journal import Status, describe_run, write_json
from seqpar.launch.local import die_with_parent, run_local, visible_devices
from seqpar.launch.material import Material, open_material
from seqpar.launch.model import DECODERS, SegmentationNet, build
from seqpar.launch.stopping import Stopper
from seqpar.launch.trainer import Trainer, global_batch, keep_global_batch
from seqpar.mesh import Mesh, check_seqpar, seed, start


def act(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 finished, 75 preempted and resumable; a user's errors are raised."""
    die_with_parent()
    default = "paper" if torch.cuda.is_available() else "laptop"
    preset, config, given = parse(arguments, default)
    if config.resume:
        config = _resumed(config, given)
    config.check(DECODERS, MODES)
    begin = read_start(os.environ)
    if config.seqpar > begin.world:
        return _start_ranks(config, begin, arguments)
    check_seqpar(config.seqpar, begin.world)
    config = choose_batch(config, begin.world // config.seqpar)
    if begin.rank == 0:
        print(_first_line(preset, default, config, begin), flush=True)
    if config.dry_run:
        return _rehearsed(config, begin)
    _refuse_other_run(config)
    stopper = Stopper(seconds(config.time_limit))
    material = open_material(config, begin.rank == 0)
    with start(config.seqpar, device=config.device) as mesh:
        seed(config.seed)
        out = _run_folder(config, preset, mesh)
        try:
            code = _train(config, preset, mesh, material, out, stopper)
        except Exception as error:
            _end_in_error(error, config, mesh, out)
    return code


def _train(
    config: Config, preset: str, mesh: Mesh, material: Material, out: Path, stopper: Stopper
) -> int:
    if config.resume:
        saved = checkpoint.find(out / "checkpoints")
        wanted = checkpoint.read_progress(saved).global_batch
        if global_batch(config, mesh) != wanted:
            config = keep_global_batch(config, wanted, mesh.data.size)
    net = build(config, material.num_channels, material.num_outputs, mesh.seq)
    decoding = net.mode.check(net.encoder.layout, config.batch)
    if config.weights and not config.resume:
        told = start_from(net, config)
        if mesh.is_first:
            print(told, flush=True)
    if mesh.is_first:
        layout = {"ranks": mesh.world.size, "data": mesh.data.size, "seqpar": mesh.seq.size, "hosts": mesh.hosts,
                  "attention": net.encoder.attention_choice}
        write_json(out / "config.json", describe_run(config, preset, material.describe(), layout))
        print(f"{_size_line(net, config, mesh)}; {decoding}", flush=True)
        print(f"attention: {net.encoder.attention_choice[0]}", flush=True)
    verdict = Trainer(config, mesh, material, net, out).run(stopper)
    return 0 if verdict == "finished" else exits.PREEMPTED


def _resumed(config: Config, given: set[str]) -> Config:
    """Returns the saved run's config with what the command line says now."""
    if not config.out:
        raise ValueError("--resume needs --out, the run folder to continue")
    saved = Config.from_dict(read_config(config.out)["config"])
    return replace(saved, resume=True, dry_run=False, **{name: getattr(config, name) for name in given - {"resume"}})


def _start_ranks(config: Config, begin: Start, arguments: Sequence[str]) -> int:
    """Starts the missing ranks here, if this is one process on one machine; else says how to start them."""
    script = os.path.relpath(__file__)
    line = f"torchrun --nproc-per-node {config.seqpar} {script} {' '.join(arguments)}"
    if "SLURM_JOB_ID" in os.environ:
        raise ValueError(
            f"--seqpar {config.seqpar} needs {config.seqpar} ranks, {begin.world} came; in this Slurm job use: "
            f"srun -n {config.seqpar} python {script} {' '.join(arguments)}"
        )
    if begin.world > 1:
        raise ValueError(f"--seqpar {config.seqpar} needs {config.seqpar} ranks, {begin.world} came; use: {line}")
    told = f"--seqpar {config.seqpar} needs {config.seqpar} ranks and 1 was started: starting {config.seqpar} here"
    print(f"{told} ({visible_devices()}); the same as: {line}", flush=True)
    if "--out" not in arguments and not config.dry_run:
        arguments = [*arguments, "--out", _new_name("run")]
    return run_local(config.seqpar, [__file__, *arguments])


def _new_name(preset: str) -> str:
    return f"runs/{preset}-{time.strftime('%Y%m%d-%H%M%S')}"


def _first_line(preset: str, default: str, config: Config, begin: Start) -> str:
    chosen = f"preset {preset}" + (" (the default here)" if preset == default else "")
    groups = begin.world // config.seqpar
    return (
        f"seqpar: {chosen}; {begin.world} rank{'s' if begin.world > 1 else ''} = data {groups} x seq {config.seqpar}, "
        f"started by {begin.by}; tile {'x'.join(map(str, config.tile))}, patch {config.patch}, decoder "
        f"{config.decoder}, mode {config.mode}, {config.precision}, {config.batch} tiles per sequence group"
    )


def _size_line(net: SegmentationNet, config: Config, mesh: Mesh) -> str:
    encoder, decoder = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (net.encoder, net.decoder))
    layout = net.encoder.layout
    return (
        f"network: encoder {encoder:.2f} M + decoder {decoder:.2f} M parameters; {layout.num_tokens} tokens a tile, "
        f"{max(layout.counts)} per rank; {config.steps} steps of {global_batch(config, mesh)} tiles"
    )


def _rehearsed(config: Config, begin: Start) -> int:
    """Says the whole config and how tokens would be shared out; allocates and writes nothing."""
    if begin.rank == 0:
        print(config.to_json())
    return 0


def _refuse_other_run(config: Config) -> None:
    if config.out and not config.resume and (Path(config.out) / "config.json").exists():
        raise ValueError(f"--out {config.out} holds a run already: add --resume to continue it, or name another folder")


def _run_folder(config: Config, preset: str, mesh: Mesh) -> Path:
    """Returns the run folder, the same on all ranks, there and writable."""
    out = Path(config.out or tell_all(_new_name(preset), mesh.world)[0])
    problem = ""
    if mesh.is_first:
        try:
            (out / "checkpoints").mkdir(parents=True, exist_ok=True)
            Status(out).write("running", 0)
        except OSError as error:
            problem = f"--out {out} cannot be written ({error.strerror}): name another folder or make room"
    for told in tell_all(problem, mesh.world):
        if told:
            raise ValueError(told)
    return out


def _end_in_error(error: Exception, config: Config, mesh: Mesh, out: Path) -> Any:
    """Writes the verdict, says why, and leaves at once: peers may be gone, and nobody waits for them."""
    code = exits.code_of(error)
    text = str(error)
    if code == exits.MEMORY:
        text = f"out of memory on rank {mesh.world.index}: {_thriftier(config)} ({text.splitlines()[0][:120]})"
    elif code is None and _lost_contact(error):
        text = f"rank {mesh.world.index} lost contact with its peers: {text.splitlines()[0][:160]}"
    elif code is None:
        raise error
    Status(out).fail(-1, text, code or 1)
    first = mesh.is_first or code == exits.MEMORY or code is None
    if first:
        print(f"error: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os._exit(code or 1)


def _lost_contact(error: Exception) -> bool:
    marks = ("Connection closed", "Connection reset", "Timed out", "timeout", "peer", "Broken pipe", "NCCL")
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks)


def _thriftier(config: Config) -> str:
    if config.batch > 1:
        return f"use --batch {config.batch // 2} --accumulate {2 * config.accumulate}"
    if not config.grad_checkpoint:
        return "use --grad-checkpoint, or a larger --seqpar"
    return "use a larger --seqpar, a larger --patch or a smaller --tile"


def main() -> None:
    sys.exit(exits.run(act))


if __name__ == "__main__":
    main()
