"""What a config would run, found without data, weights or other ranks; what cannot work is refused here."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace

from seqpar.decoders.modes.choose import MODES, choose_mode
from seqpar.launch.models.segmentation import DECODERS
from seqpar.launch.planning.step_counter import count_step, outline
from seqpar.launch.settings.config import Config
from seqpar.layout import Layout
from seqpar.mesh import Group


def refuse(config: Config) -> None:
    """Refuses a config that cannot work, before anything is allocated, naming the nearest that does."""
    config.check(DECODERS, MODES)
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs a package that is not here: pip install 'seqpar[tensorboard]'")
    if config.weights and not config.resume and not os.path.exists(config.weights):  # a saved run needs them no more
        raise ValueError(f"--weights {config.weights}: no such file; give a safetensors or torch file of weights")
    group = Group("seq", tuple(range(config.seqpar)))
    layout = Layout.of(config.tile, config.patch, config.seqpar, config.split)
    choose_mode(config.mode, group).check(layout, config.batch or None)
    outline(config, group)


def refuse_lonely(config: Config, num_ranks: int) -> None:
    """Refuses what one rank cannot do."""
    if config.shard_weights and num_ranks == 1:
        raise ValueError("--shard-weights shares with other ranks, and 1 was started: start 2 or more, or leave it out")


def rehearsal(config: Config, num_ranks: int, chosen: Sequence[str] = ()) -> str:
    """Returns in words what would run: network, tokens, memory per rank, steps, and how decoding is shared.

    ``chosen`` is how attention would cross ranks, then why, where that was left open.
    """
    group = Group("seq", tuple(range(config.seqpar)))
    net = outline(config, group)
    encoder, decoder = (sum(p.numel() for p in part.parameters()) / 1e6 for part in (net.encoder, net.decoder))
    layout, groups = net.encoder.layout, num_ranks // config.seqpar
    counted = replace(config, attention=chosen[0]) if chosen else config
    step = count_step(counted, 0, 1, 2, lambda done: 0.0, on_gpu=True, data=groups)
    held, kept = step.tokens + step.decoder, step.weights + step.gradients + step.optimiser
    return "\n".join(
        [
            f"would run on {num_ranks} ranks = data {groups} x seq {config.seqpar}; nothing was written",
            f"  network   encoder {encoder:.2f} M + decoder {decoder:.2f} M parameters (one channel, two classes)",
            f"  tokens    {layout.num_tokens} a tile; per rank {' '.join(map(str, layout.counts))}",
            *(f"  attention {why}" for why in chosen[1:2]),
            f"  decoding  {net.mode.check(layout, config.batch)}",
            f"  memory    {held / 2**30:.2f} GiB for backward, {step.transient / 2**30:.2f} more at the worst moment, "
            f"{kept / 2**30:.2f} for weights, gradients and optimiser: per rank",
            f"  steps     {config.steps} of {groups * config.batch * config.accumulate} tiles",
            config.to_json(),
        ]
    )
