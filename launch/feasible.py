"""What a config would run, found without data, weights or other ranks; what cannot work is refused here."""

import importlib.util
import os

import torch

from seqpar.decoders.modes import MODES, choose_mode
from seqpar.launch.batches import saved_per_tile
from seqpar.launch.config import Config
from seqpar.launch.model import DECODERS, SegmentationNet, build
from seqpar.layout import Layout
from seqpar.mesh import Group


def refuse(config: Config) -> None:
    """Refuses a config that cannot work, before anything is allocated, naming the nearest that does."""
    config.check(DECODERS, MODES)
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs a package that is not here: pip install 'seqpar[tensorboard]'")
    if config.weights and not os.path.exists(config.weights):
        raise ValueError(f"--weights {config.weights}: no such file; give a safetensors or torch file of weights")
    group = Group("seq", tuple(range(config.seqpar)))
    layout = Layout.of(config.tile, config.patch, config.seqpar, config.split)
    choose_mode(config.mode, group).check(layout, config.batch or None)
    _outline(config, group)


def _outline(config: Config, group: Group, channels: int = 1, outputs: int = 2) -> SegmentationNet:
    """Returns the network without its numbers: built as always, so that every part refuses what it cannot."""
    state = torch.get_rng_state()
    net = build(config, channels, outputs, group, device="meta")
    torch.set_rng_state(state)
    return net


def rehearsal(config: Config, num_ranks: int) -> str:
    """Returns in words what would run: network, tokens, memory per rank, steps, and how decoding is shared."""
    group = Group("seq", tuple(range(config.seqpar)))
    net = _outline(config, group)
    encoder, decoder = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (net.encoder, net.decoder))
    layout, groups = net.encoder.layout, num_ranks // config.seqpar
    width = {"fp32": 4, "bf16": 2, "fp64": 8}[config.precision]
    held = saved_per_tile(config) * config.batch * width / 2**30
    weights = (encoder + decoder) * 1e6 * (8 if config.precision == "fp64" else 4) * 4 / 2**30
    return "\n".join(
        [
            f"would run on {num_ranks} ranks = data {groups} x seq {config.seqpar}; nothing was written",
            f"  network   encoder {encoder:.2f} M + decoder {decoder:.2f} M parameters (one channel, two classes)",
            f"  tokens    {layout.num_tokens} a tile; per rank {' '.join(map(str, layout.counts))}",
            f"  decoding  {net.mode.check(layout, config.batch)}",
            f"  memory    about {held:.2f} GB for backward and {weights:.2f} GB for weights and optimiser per rank",
            f"  steps     {config.steps} of {groups * config.batch * config.accumulate} tiles",
            config.to_json(),
        ]
    )
