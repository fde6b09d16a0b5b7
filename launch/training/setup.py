"""Builds the trainer and prints what it will do."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from seqpar.consensus import gather_texts, raise_together
from seqpar.launch.models.build import build
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.planning.auto_settings import choose_attention
from seqpar.launch.runs.run_folder import Status, describe_run, read_config
from seqpar.launch.settings.config import Config
from seqpar.launch.training.data import TrainingData
from seqpar.launch.training.request import RunRequest
from seqpar.launch.training.trainer import Trainer, global_batch
from seqpar.launch.weights import checkpoint
from seqpar.launch.weights.pretrained import start_from
from seqpar.mesh import Mesh


def make_trainer(order: RunRequest, mesh: Mesh, material: TrainingData, status: Status) -> Trainer:
    """Returns the trainer, and has said and written what it will do."""
    config, out = order.config, status.path.parent
    _refuse_other_choices(config, mesh)
    saved = checkpoint.find_together(out / "checkpoints", mesh.world) if config.resume else None
    net, attention_why = _built(config, mesh, material, read_config(out)["layout"] if saved else {})
    decoding = net.mode.check(net.encoder.layout, config.batch)
    weights_line = _load_weights(net, config, mesh) if config.weights and not saved else ""
    layout = {"ranks": mesh.world.size, "data": mesh.data.size, "seqpar": mesh.seq.size, "hosts": mesh.hosts}
    layout |= {"strategy": str(net.encoder.attention), "attention": attention_why, **order.chosen}
    described = describe_run(config, order.preset, material.describe(), layout)
    if mesh.is_first:
        print(f"{_size_line(net, config, mesh)}; {decoding}", flush=True)
        print(f"attention: {attention_why[0]}" + (f"\n{weights_line}" if weights_line else ""), flush=True)
    return Trainer(config, mesh, material, net, status, described, saved)


def _load_weights(net: SegmentationNet, config: Config, mesh: Mesh) -> str:
    """Returns the line of ``start_from``; what hinders it on one rank is raised on all."""
    line, error = "", None
    try:
        line = start_from(net, config)
    except ValueError as problem:
        error = problem
    raise_together(error, mesh.world)
    return line


def _built(
    config: Config, mesh: Mesh, material: TrainingData, before: Mapping[str, Any]
) -> tuple[SegmentationNet, Sequence[str]]:
    """Returns the network, and why attention crosses ranks as it does: where that was open, by the first rank's word.

    ``before`` is what was recorded of the ranks of a run that goes on.
    """
    sizes = material.num_channels, material.num_outputs
    chosen = choose_attention(config, mesh.launcher, *sizes, before)
    strategy, *why = gather_texts("\n".join(chosen), mesh.world)[0].split("\n")
    net = build(replace(config, attention=strategy or config.attention), *sizes, mesh.seq, bool(material.regions))
    return net, why or net.encoder.attention_choice


def _size_line(net: SegmentationNet, config: Config, mesh: Mesh) -> str:
    encoder, decoder = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (net.encoder, net.decoder))
    layout = net.encoder.layout
    return (
        f"network: encoder {encoder:.2f} M + decoder {decoder:.2f} M parameters; {layout.num_tokens} tokens a tile, "
        f"{max(layout.counts)} per rank; {config.steps} steps of {global_batch(config, mesh)} tiles"
    )


def _refuse_other_choices(config: Config, mesh: Mesh) -> None:
    """Refuses ranks that chose differently, for the memory of their devices is not the same."""
    every = dict.fromkeys(gather_texts(f"--seqpar {config.seqpar} --batch {config.batch}", mesh.world))
    if len(every) > 1:
        raise ValueError(f"ranks have different memory and chose {' and '.join(every)}: give one of these")


def open_folder(status: Status) -> None:
    """Makes the run folder and writes that the run has begun."""
    try:
        (status.path.parent / "checkpoints").mkdir(parents=True, exist_ok=True)
        status.write("running")
    except OSError as error:
        raise ValueError(
            f"--out {status.path.parent} cannot be written ({error.strerror}): name another, or make room"
        ) from None
