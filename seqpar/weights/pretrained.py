"""Starts a run from pretrained weights: ours, MONAI's, those of Primus, MedNeXt, nnU-Net's or nnssl's."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.data.addresses import local_file
from seqpar.models.network import Network
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.settings.config import Config
from seqpar.settings.rules import setting_applies
from seqpar.text import format_sides
from seqpar.weights import checkpoint as checkpoints
from seqpar.weights.facts import WEIGHTS, differing_flags, read_facts
from seqpar.weights.monai_weights import load_monai
from seqpar.weights.nnssl import holds_pretrained_unet, read_pretrained_unet
from seqpar.weights.nnunet_results import PRETRAINING, holds_unet, is_primus, read_checkpoint
from seqpar.weights.nnunet_settings import network_of
from seqpar.weights.nnunet_weights import (
    enlarge_kernels,
    holds_mednext,
    mednext_flags,
    mednext_state,
    trained_state,
)
from seqpar.weights.primus_weights import (
    REBUILDER,
    has_exchanged_axes,
    load_primus,
    load_primus_encoder,
    pretraining_tensor_names,
)
from seqpar.weights.weight_files import (
    State,
    checkpoint_of,
    fit_positions,
    recorded_heads,
    refuse_unusable,
    shorten_list,
    unwrap,
)

OF_CELLS = ("unet.cells.", "resattnet.cells.")  # networks without tokens
STEM = "encoder.patch_embed.proj.weight"
FIRST = (  # take the image
    STEM,
    *(f"encoder.patch_embed.stem.{name}.conv.weight" for name in ("convs.0", "project")),
    *(f"unet.cells.{name}.weight" for name in ("stem.conv", "encoder0_0.conv", "stem")),
)
ENCODER = ("unet.cells.stem.", "unet.cells.encoder")  # begin the names of a U-Net's way down
ALONG_LAST_SIDE = ".norm.norm.weight"  # of norms over the last axis: a weight for each position


class Source(NamedTuple):
    """Weights of a file under our names.

    - ``origin``: whose they are
    - ``left``: names of tensors that are not taken
    - ``parts``: how names of the body begin, where the file has not all of it
    - ``needs``: flags of a network that they fit, if the file tells them
    """

    origin: str
    state: State
    left: list[str]
    parts: tuple[str, ...] = ("",)
    needs: str = ""


def load_pretrained(net: Network, config: Config) -> str:
    """Loads ``config.weights`` into the network; returns a line that says what was taken, what is new, what was left.

    All tensors of the body (an encoder; a U-Net without its heads) must fit. The others are loaded where they fit;
    those of another decoder, or for other classes, keep their initial values. An encoder of images of one channel
    takes images of more: its first weights are repeated over the channels and divided by their number.
    """
    path = weights_file(config.weights)
    checkpoint = checkpoint_of(path)
    refuse_unusable(unwrap(checkpoint, path), path)
    heads = recorded_heads(checkpoint)
    if heads not in (None, config.heads):
        raise ValueError(f"--weights {config.weights} were trained with {heads} heads: use --heads {heads}")
    origin, state, left, parts, needs = _ours(checkpoint, config)
    if config.token_order != "auto" and not origin.startswith("Primus"):
        raise ValueError(
            f"--token-order {config.token_order} would do nothing: --weights {config.weights} are {origin}'s, and "
            "only Primus' have tokens in another order: remove it"
        )
    facts: dict[str, Any] = read_facts(path) if origin == "seqpar" else {"window": 0}
    if origin.startswith("Primus"):
        facts |= _facts_of_primus(state)
    gained = [f"tokens see windows of {config.window}, and saw all"] * (facts.get("window") == 0 < config.window)
    facts = {name: fact for name, fact in facts.items() if fact or name != "window"}
    if f"{facts.get('network')}-k5" == config.network:  # a MedNeXt whose kernels will be enlarged
        facts["network"] = config.network
    theirs, ours = differing_flags(facts, config)
    if theirs:
        known = "--window" not in theirs or setting_applies(config, "window")
        advice = f"use {theirs}" if known else f"--task {config.task} knows no windows, take other weights"
        raise ValueError(f"--weights {config.weights} were trained with {theirs}, and this run has {ours}: {advice}")
    heads = facts.get("heads", heads)
    own = net.state_dict()
    changes = [*gained, *_fit_channels(state, own), *_fit_grid(state, own, net, facts, config)]
    changes += [line for line in [enlarge_kernels(state, own)] if line]
    fitting = {name for name, tensor in state.items() if name in own and own[name].shape == tensor.shape}
    body = {name for name in own if net.in_body(name) and name.startswith(parts)}
    unfit = sorted(body - fitting)
    left_over = sorted(name for name in state if net.in_body(name) and name not in own)
    if unfit or left_over:
        raise ValueError(
            f"--weights {config.weights} ({origin}) do not fit the {net.body}: {shorten_list(unfit + left_over, 4)}; "
            f"they need {needs or _flags(state)}"
        )
    with torch.no_grad():
        for name in fitting:
            own[name].copy_(state[name])
    summary = f"weights from {config.weights} ({origin}): {len(fitting)} of {len(own)} tensors"
    if heads is None and setting_applies(config, "heads"):
        summary += f"; the file does not tell its attention heads, --heads {config.heads} are taken"
    fresh = sorted(name for name in own if name not in fitting)
    left = [*left, *sorted(name for name in state if name not in fitting)]
    lists = [f"new: {_new_parts(fresh)}"] * bool(fresh) + [f"left out: {_counted(left)}"] * bool(left)
    return "; ".join([summary, *changes, *lists])


def weights_file(path: str) -> Path:
    """Returns the file of weights of a path or address; of a run folder the last, or those of its last checkpoint.

    A run that went on after its end, and has not ended again, has weights of that end next to newer checkpoints.
    """
    folder = local_file(path)
    if not folder.is_dir():
        return folder
    if (folder / WEIGHTS).is_file() and not _has_gone_on(folder):
        return folder / WEIGHTS
    if (folder / "checkpoints" / "latest").is_file():
        point = checkpoints.find(folder / "checkpoints", "latest")
        content = dict[str, Any]()
        with suppress(OSError, ValueError):  # a folder of checkpoints alone has none
            content = json.loads((folder / "config.json").read_text())
        checkpoints.refuse_of_other(point, content)
        return point / WEIGHTS
    raise ValueError(
        f"--weights {path}: the folder holds neither {WEIGHTS} nor a checkpoint: name a run folder, or a file"
    )


def _has_gone_on(run: Path) -> bool:
    """Returns whether a run folder says that its training has not ended, and has a checkpoint."""
    status: Any = None
    with suppress(OSError, ValueError):
        status = json.loads((run / "status.json").read_text())
    left = isinstance(status, dict) and status.get("state") in ("running", "preempted", "failed")
    with suppress(OSError, ValueError):
        return left and checkpoints.find(run / "checkpoints", "latest").is_dir()
    return False


def _fit_channels(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Repeats an encoder's first weights, of images of one channel, over those of the network; says so."""
    fitting = [name for name in FIRST if name in state and name in own and state[name].shape[1] == 1]
    count = own[fitting[0]].shape[1] if fitting else 1
    if count == 1:
        return []
    for name in fitting:
        state[name] = state[name].repeat(1, count, *[1] * (state[name].ndim - 2)) / count
    return [f"the first weights, of 1 channel, repeated over {count} and divided by {count}"]


def _fit_grid(
    state: dict[str, Tensor], own: Mapping[str, Tensor], net: Network, facts: Mapping[str, Any], config: Config
) -> list[str]:
    """Resizes learned positions to the network's grid of tokens where they are of another; says so."""
    name = "encoder.pos_embed"
    if name not in state or name not in own:
        return []
    tile, before = facts.get("tile") if facts.get("patch") == list(config.patch) else None, state[name]
    if tile or before.shape != own[name].shape:
        state[name] = fit_positions(before, config.patch, net.layout.tile, tile)
    if state[name] is before:
        return []
    grid = (side // voxels for side, voxels in zip(net.layout.tile, config.patch))
    return [f"positions resized from {before.shape[1]} tokens to {'x'.join(map(str, grid))}"]


def _new_parts(names: Sequence[str]) -> str:
    """Returns up to four tensors by name, more by part; of a U-Net, whose parts are one, the first four."""
    return shorten_list(names, 4) if len(names) <= 4 or names[0].startswith(OF_CELLS) else _counted(names)


def _counted(names: Iterable[str]) -> str:
    """Returns how many tensors each part of another network has."""
    parts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(f"{part} ({count})" for part, count in parts.items())


def _ours(checkpoint: Mapping[str, Any], config: Config) -> Source:
    """Returns the weights of a checkpoint under our names."""
    if holds_unet(checkpoint):
        results = read_checkpoint(weights_file(config.weights))
        state = trained_state(results)
        unknown = results.folds[0].unknown_trainer
        known = "which is not one of its own trainers; all tensors fit the plan's network"
        return Source(f"nnU-Net, by {unknown}, {known}" if unknown else "nnU-Net", state, [])
    if holds_pretrained_unet(checkpoint):
        pretrained = read_pretrained_unet(checkpoint, config.weights)
        settings = network_of(pretrained.architecture, pretrained.file_axes, config.weights)
        needs = f'--network {settings["network"]} --stages "{settings["stages"]}"'
        return Source("nnssl, the encoder", pretrained.encoder_state(), [], ENCODER, needs)
    state = unwrap(checkpoint)
    if any(name.startswith(("encoder.blocks.", *OF_CELLS)) for name in state):
        return Source("seqpar", dict(state), [])
    if holds_mednext(state):
        architecture, renamed = mednext_state(state, reverse_axes=True)
        return Source("MedNeXt", renamed, [], needs=mednext_flags(architecture))
    loaded: nn.Module
    left, origin = list[str](), "MONAI"
    if any("patch_embedding.position_embeddings" in name for name in state):
        loaded = load_monai(state, tile=config.tile, num_heads=config.heads)
    elif is_primus(state):
        left, origin = sorted(pretraining_tensor_names(state)), "Primus"
        order = config.token_order
        if PRETRAINING in checkpoint or any(name.startswith(REBUILDER) for name in left):
            # what makes voxels of tokens makes images there
            left += sorted(name for name in state if name.startswith("up_projection."))
            origin = "Primus, pretrained"
            loaded = encoder = load_primus_encoder(checkpoint, config.tile, config.heads, order, True)
        else:
            loaded = load_primus(checkpoint, config.tile, config.heads, token_order=order, reverse_axes=True)
            encoder = loaded.encoder
        if has_exchanged_axes(checkpoint, order):
            origin += ", tokens in the order h w d"
        table, positions, layout = state.get("eva.pos_embed"), encoder.pos_embed, encoder.layout
        if table is not None and positions is not None and table.shape != positions.shape:
            origin += f", positions resized from {table.shape[1]} tokens to {'x'.join(map(str, layout.grid))}"
    else:
        raise ValueError(
            f"--weights {config.weights}: names of neither seqpar, MONAI, Primus nor MedNeXt; no nnU-Net checkpoint "
            f"({shorten_list(sorted(state), 3)})"
        )
    prefix = "" if isinstance(loaded, SegmentationNet) else "encoder."
    return Source(origin, {prefix + name: tensor for name, tensor in loaded.state_dict().items()}, left)


def _facts_of_primus(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the settings of a Primus that shapes do not tell of its network."""
    return {"mlp": "swiglu", "positions": "learned+rope" if "encoder.pos_embed" in state else "rope"}


def _flags(state: Mapping[str, Tensor]) -> str:
    """Returns the flags that make an encoder of these weights' sizes, or says that they have no encoder of tokens."""
    if any(name.startswith(OF_CELLS) for name in state):
        lengths = [len(tensor) for name, tensor in state.items() if name.endswith(ALONG_LAST_SIDE)]
        last = f", and a --tile whose last side is {max(lengths)}" if lengths else ""
        return f"the --network, --features and --stages (or --tile) that they were trained with{last}"
    norms = sorted(name for name in state if re.fullmatch(r"encoder\.blocks\.\d+\.norm1\.weight", name))
    depths = Counter(len(state[name]) for name in norms)  # of stages, by their widths
    how = f"--depth {len(norms)}"
    if len(depths) > 1:
        how = f"--encoder hierarchical --stage-depths {' '.join(str(depths[width]) for width in sorted(depths))}"
    if STEM in state:
        embed_dim, _, *patch = state[STEM].shape
        stem = ""
    else:
        embed_dim, patch = len(state["encoder.norm.weight"]), [8, 8, 8]
        stem = f"--stem {'primus-v3' if 'encoder.patch_embed.scales.0' in state else 'primus-v2'} "
    hidden = state["encoder.blocks.0.mlp.fc1.weight"].shape[0]
    first = "encoder.blocks.0."
    positions = "learned" if "encoder.pos_embed" in state else "rope"
    more = [" --mlp swiglu"] * (f"{first}mlp.gate.weight" in state)
    more += [" --attention-norm"] * (f"{first}attn.norm.weight" in state)
    more += [" --layer-scale 0.1"] * (f"{first}ls1.gamma" in state)
    return (
        f"{stem}--patch {format_sides(patch)} --embed-dim {embed_dim} {how} --mlp-ratio {hidden / embed_dim:.6g} "
        f"{'--qkv-bias' if f'{first}attn.q_bias' in state else '--no-qkv-bias'} "
        f"--positions {positions + '+rope' if positions == 'learned' and more else positions}{''.join(more)}"
    )
