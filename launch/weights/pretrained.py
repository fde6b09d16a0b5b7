"""Starts a run from pretrained weights: ours, MONAI's, those of Primus or nnU-Net's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.launch.models.build import knows
from seqpar.launch.models.net import Net
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.settings.config import Config, shorten
from seqpar.launch.weights.facts import differing_flags, read_facts
from seqpar.launch.weights.files import checkpoint_of, fit_positions, listed, recorded_heads, unwrap
from seqpar.launch.weights.monai import load_monai
from seqpar.launch.weights.nnunet import trained_state
from seqpar.launch.weights.nnunet_results import is_checkpoint, read_checkpoint
from seqpar.launch.weights.primus import load_primus

U_NET = "unet.cells."


def start_from(net: Net, config: Config) -> str:
    """Loads ``config.weights`` into the network; returns a line that says which tensors were loaded.

    All tensors of the body (an encoder; a U-Net without its heads) must fit. The others are loaded where they fit;
    those of another decoder, or for other classes, keep their initial values.
    """
    checkpoint = checkpoint_of(config.weights)
    heads = recorded_heads(checkpoint)
    if heads not in (None, config.heads):
        raise ValueError(f"--weights {config.weights} were trained with {heads} heads: use --heads {heads}")
    origin, state = _ours(checkpoint, config)
    facts = read_facts(config.weights) if origin == "seqpar" else {}
    theirs, ours = differing_flags(facts, config)
    if theirs:
        raise ValueError(
            f"--weights {config.weights} were trained with {theirs}, and this run has {ours}: use {theirs}"
        )
    heads = facts.get("heads", heads)
    own = net.state_dict()
    if "encoder.pos_embed" in state and "encoder.pos_embed" in own:
        layout = net.layout
        tile = facts.get("tile") if facts.get("patch") == list(config.patch) else None
        if tile or state["encoder.pos_embed"].shape != own["encoder.pos_embed"].shape:
            state["encoder.pos_embed"] = fit_positions(state["encoder.pos_embed"], layout.patch, layout.tile, tile)
    fitting = {name for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
    unfit = sorted(name for name in own if net.in_body(name) and name not in fitting)
    left_over = sorted(name for name in state if net.in_body(name) and name not in own)
    if unfit or left_over:
        raise ValueError(
            f"--weights {config.weights} ({origin}) do not fit the {net.body}: {listed(unfit + left_over, 4)}; "
            f"they need {_flags(state)}"
        )
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(state[name])
    fresh = sorted(name for name in own if name not in fitting)
    summary = f"weights from {config.weights} ({origin}): {len(fitting)} of {len(own)} tensors"
    if heads is None and knows(config, "heads"):
        summary += f"; the file does not tell its attention heads, --heads {config.heads} are taken"
    return summary + (f"; fresh: {listed(fresh, 4)}" if fresh else "")


def _ours(checkpoint: Mapping[str, Any], config: Config) -> tuple[str, dict[str, Tensor]]:
    """Returns whose weights these are, and their tensors under our names."""
    if is_checkpoint(checkpoint):
        return "nnU-Net", trained_state(read_checkpoint(config.weights))
    state = unwrap(checkpoint)
    if any(name.startswith(("encoder.blocks.", U_NET)) for name in state):
        return "seqpar", dict(state)
    loaded: nn.Module
    if any("patch_embedding.position_embeddings" in name for name in state):
        loaded, origin = load_monai(state, tile=config.tile, num_heads=config.heads), "MONAI"
    elif any(name.startswith("eva.") for name in state):
        loaded, origin = load_primus(state, tile=config.tile, num_heads=config.heads), "Primus"
    else:
        raise ValueError(
            f"--weights {config.weights}: names of neither seqpar, MONAI nor Primus, and no checkpoint of nnU-Net's "
            f"({listed(sorted(state), 3)})"
        )
    prefix = "" if isinstance(loaded, SegmentationNet) else "encoder."
    return origin, {prefix + name: tensor for name, tensor in loaded.state_dict().items()}


def _flags(state: Mapping[str, Tensor]) -> str:
    """Returns the flags that make an encoder of these weights' sizes, or says that they are a U-Net's."""
    if any(name.startswith(U_NET) for name in state):
        return "the --network, --features and --stages (or --tile) that they were trained with"
    depth = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.blocks."))
    embed_dim, _, *patch = state["encoder.patch_embed.proj.weight"].shape
    hidden = state["encoder.blocks.0.mlp.fc1.weight"].shape[0]
    has_positions = "encoder.pos_embed" in state
    return (
        f"--patch {shorten(patch)} --embed-dim {embed_dim} --depth {depth} --mlp-ratio {hidden / embed_dim:g} "
        f"{'--qkv-bias' if 'encoder.blocks.0.attn.q_bias' in state else '--no-qkv-bias'} "
        f"--positions {'learned' if has_positions else 'rope'}"
    )
