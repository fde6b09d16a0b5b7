"""Loads and exports weights of MONAI's ViT and UNETR, versions 0.7 to 1.6.

Legend: e embedding, c channels, n tokens, p voxels of a patch along a direction.
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.unetr import USUAL, BlockStyle, UnetrDecoder, skip_blocks
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.layout import Layout, per_axis
from seqpar.parallel.mesh import AnyGroup
from seqpar.vit.blocks import Mlp
from seqpar.vit.encoder import SeqParViT
from seqpar.vit.tokens import sincos_positions
from seqpar.weights.weight_files import (
    State,
    checkpoint_of,
    drop_keys,
    fit_positions,
    last_number,
    load_strict,
    recorded_heads,
    rename,
    unwrap,
    weight_and_bias,
)

log = logging.getLogger(__name__)
POSITIONS = "vit.patch_embedding.position_embeddings"
EMBED = "vit.patch_embedding.patch_embeddings"
STEM = "encoder1.layer.conv1.conv.weight"
_OF_BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
# Some versions register these, none uses them: a class token without classes, cross-attention in every block.
_DEAD = re.compile(r"vit\.patch_embedding\.cls_token$|vit\.blocks\.\d+\.(norm_cross_attn|cross_attn)\.")


def load_monai(
    state_dict: Mapping[str, Any] | str | Path,
    tile: int | Sequence[int] = (96, 96, 96),
    num_heads: int | None = None,
    group: AnyGroup | None = None,
    mode: str = "auto",
    split: str = "spatial",
    trained_tile: int | Sequence[int] | None = None,
    patch: int | Sequence[int] | None = None,
) -> SeqParViT | SegmentationNet:
    """Returns a network with the weights of MONAI's ``UNETR``, or an encoder with those of its ``ViT``.

    All sizes except the number of heads are read off the shapes. Images have two dimensions or three.

    - ``state_dict``: also a checkpoint that holds one, or the path or address of its file
    - ``tile``: voxels of a tile, one number or one per dimension
    - ``num_heads``: needed unless the checkpoint's ``hyper_parameters`` contain it. Shapes do not show it: with a
      wrong number the weights load, but the outputs are wrong
    - ``group``: the ranks that share a tile: ours or torch's; None: this process alone
    - ``mode``: of the decoder
    - ``trained_tile``: needed if the weights were trained on a tile that is neither ``tile`` nor a cube
    - ``patch``: needed if the perceptron embedding of a ViT does not show it
    """
    checkpoint = checkpoint_of(state_dict)
    ours, levels, style = _translated(unwrap(checkpoint), trained_tile or tile, patch)
    depth, has_bias = last_number(ours, r"encoder\.blocks\.") + 1, "encoder.blocks.0.attn.q_bias" in ours
    embed_dim, in_channels, *cube = ours["encoder.patch_embed.proj.weight"].shape
    if patch is not None and per_axis(patch, "patch", len(cube)) != tuple(cube):
        raise ValueError(f"{patch=}, but the weights have patch {tuple(cube)}; leave patch= out")
    expected = (1 << levels,) * len(cube)
    if levels and tuple(cube) != expected:
        raise ValueError(f"a UNETR of {levels} levels has patch {expected}, but the weights have {tuple(cube)}")
    num_heads = num_heads or recorded_heads(checkpoint)
    if num_heads is None:
        raise ValueError(
            f"the weights (embedding {embed_dim}) do not tell their number of attention heads: give num_heads=, the "
            "one that they were trained with (MONAI's own default is 12)"
        )
    sides = (tile,) * len(cube) if isinstance(tile, int) else tuple(tile)
    if len(sides) != len(cube):
        raise ValueError(
            f"tile={sides}: the weights are for images of {len(cube)} dimensions: give {len(cube)} numbers"
        )
    trained = None if trained_tile is None else per_axis(trained_tile, "trained_tile", len(cube))
    hidden_dim = ours["encoder.blocks.0.mlp.fc1.weight"].shape[0]
    with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten
        encoder = SeqParViT(
            in_channels, sides, cube, embed_dim, depth, num_heads, hidden_dim / embed_dim, has_bias,
            group=group, split=split,
        )  # fmt: skip
        ours["encoder.pos_embed"] = fit_positions(ours["encoder.pos_embed"], cube, sides, trained)
        if not levels:
            load_strict(encoder, {name.removeprefix("encoder."): tensor for name, tensor in ours.items()})
            return encoder
        num_classes, width = ours["decoder.classes.weight"].shape[:2]
        decoder = UnetrDecoder(in_channels, embed_dim, num_classes, cube, width, style.norm, style.residual)
    net = SegmentationNet(encoder, decoder, choose_mode(mode, encoder.group), skip_blocks(depth, cube))
    load_strict(net, ours)
    return net


def _translated(
    state: State, tile: int | Sequence[int], patch: int | Sequence[int] | None
) -> tuple[State, int, BlockStyle]:
    """Returns the state under our names, the number of levels of the decoder (0 for a ViT), and its blocks' style."""
    if any(name.startswith("swinViT.") for name in state):
        raise ValueError(
            "these are weights of MONAI's SwinUNETR, which neither load_monai nor seqpar.convert supports: use UNETR "
            "or a convolutional network"
        )
    has_decoder = any(re.match(r"(encoder|decoder)\d|out\.", name) for name in state)
    if not has_decoder:
        state = {f"vit.{name.removeprefix('vit.')}": tensor for name, tensor in state.items()}
    state = drop_keys(state, [*filter(_DEAD.match, state), *_idle_shortcuts(state)], "MONAI does not use them")
    state = _convolved(state, tile, patch)
    depth = max(1, last_number(state, r"vit\.blocks\.") + 1)
    levels = max(1, last_number(state, "encoder")) if has_decoder else 0
    has_bias = any(name.endswith("attn.qkv.bias") for name in state)
    what = "MONAI's UNETR" if has_decoder else "MONAI's ViT"
    style = _style_of(state) if has_decoder else USUAL
    ours = rename(state, monai_names(depth, has_bias, levels, _widens(state, STEM), style), what)
    if has_bias:
        _split_biases(ours, depth)
    for name in _plane_kernels(ours):
        ours[name] = ours[name][..., None]
    return ours, levels, style


def _plane_kernels(ours: State, ndim: int = 4) -> list[str]:
    """Returns the names of a decoder's kernels that have two dimensions in MONAI, and a third of extent 1 here."""
    return [name for name, tensor in ours.items() if name.startswith("decoder.") and tensor.ndim == ndim]


def _style_of(state: State) -> BlockStyle:
    """Returns the style of a UNETR's blocks."""
    has_norm, has_statistics = (f"encoder1.layer.norm1.{name}" in state for name in ("weight", "running_mean"))
    if has_norm != has_statistics:
        raise ValueError(
            "these are weights of a UNETR whose norm is neither instance norm without weights nor batch norm: load "
            "them into MONAI's own UNETR, which seqpar.convert(net, mesh.seq) spreads over ranks"
        )
    has_shortcuts = any(name.startswith("decoder") and ".conv3." in name for name in state)
    return BlockStyle("batch" if has_norm else "instance", has_shortcuts)


def export_monai(net: nn.Module, version: str = "1.6", proj_type: str = "conv") -> State:
    """Returns the weights as the state dict that MONAI's ``UNETR`` or ``ViT`` loads with ``strict=True``.

    From 1.4 on MONAI registers weights that it does not use; they are zero.

    - ``net``: a network for ``UNETR``, an encoder for ``ViT``
    - ``version``: of the MONAI that will load them
    - ``proj_type``: how MONAI's network embeds patches, ``"conv"`` or ``"perceptron"``
    """
    if proj_type not in ("conv", "perceptron"):
        raise ValueError(f"proj_type={proj_type!r}: choose 'conv' or 'perceptron'")
    encoder = net.encoder if isinstance(net, SegmentationNet) else net
    if not isinstance(encoder, SeqParViT):
        raise ValueError(
            f"MONAI loads the weights of a SeqParViT or of a network of one and UNETR, not of a {type(net).__name__}"
        )
    release = tuple(int(number) for number in version.split(".")[:2])
    if release < (1, 0):
        raise ValueError(f"weights are exported for MONAI 1.0 and later, not for {version}")
    _refuse_foreign(net, encoder)
    has_decoder, depth = net is not encoder, len(encoder.blocks)
    state = {name if has_decoder else f"encoder.{name}": t.detach().clone() for name, t in net.state_dict().items()}
    state["encoder.pos_embed"] = _position_table(encoder)
    has_bias = "encoder.blocks.0.attn.q_bias" in state
    for at in range(depth) if has_bias else ():
        q, v = (state.pop(f"encoder.blocks.{at}.attn.{kind}_bias") for kind in "qv")
        state[f"encoder.blocks.{at}.attn.qkv.bias"] = torch.cat([q, torch.zeros_like(q), v])
    if len(encoder.layout.patch) == 2:
        state |= {name: state[name][..., 0] for name in _plane_kernels(state, 5)}
    style: BlockStyle = net.decoder.style if isinstance(net, SegmentationNet) else USUAL  # type: ignore[assignment]
    names = monai_names(depth, has_bias, 4 if has_decoder else 0, "decoder.stem.conv3.weight" in state, style)
    theirs = rename(state, {ours: their for their, ours in names.items()}, "a network that MONAI has")
    theirs |= _dead_weights(encoder, release, has_bias)
    if proj_type == "perceptron":  # channels fastest
        weight, bias = theirs.pop(f"{EMBED}.weight"), theirs.pop(f"{EMBED}.bias")
        theirs |= {f"{EMBED}.1.weight": weight.movedim(1, -1).flatten(1), f"{EMBED}.1.bias": bias}
    return theirs if has_decoder else {name.removeprefix("vit."): tensor for name, tensor in theirs.items()}


def monai_names(depth: int, has_bias: bool, levels: int, wide_stem: bool, style: BlockStyle = USUAL) -> dict[str, str]:
    """Returns a mapping from MONAI's names to ours.

    Our ``attn.qkv.bias`` is no parameter here: it stands for the biases of queries, keys and values together.

    - ``levels``: of the decoder, 0 for a ViT
    - ``wide_stem``: whether the shortcut of the image's block is a convolution
    - ``style``: of the decoder's blocks
    """
    names = {POSITIONS: "encoder.pos_embed"}
    names |= weight_and_bias(EMBED, "encoder.patch_embed.proj") | weight_and_bias("vit.norm", "encoder.norm")
    inner = {"norm1": "norm1", "norm2": "norm2", "attn.out_proj": "attn.proj"}
    inner |= {"mlp.linear1": "mlp.fc1", "mlp.linear2": "mlp.fc2"}
    for at in range(depth):
        theirs, ours = f"vit.blocks.{at}.", f"encoder.blocks.{at}."
        for their, our in inner.items():
            names |= weight_and_bias(theirs + their, ours + our)
        for kind in ("weight", "bias") if has_bias else ("weight",):
            names[f"{theirs}attn.qkv.{kind}"] = f"{ours}attn.qkv.{kind}"
    return names | _decoder_names(levels, wide_stem, style) if levels else names


def _decoder_names(levels: int, wide_stem: bool, style: BlockStyle) -> dict[str, str]:
    names: dict[str, str] = {}
    norms = {1: "activate1.norm", 2: "activate2.norm", 3: "activate2.other_norm"}

    def block(theirs: str, ours: str, widens: bool) -> None:
        for number in (1, 2, 3) if widens and style.residual else (1, 2):
            names[f"{theirs}.conv{number}.conv.weight"] = f"{ours}.conv{number}.weight"
            for name in _OF_BATCH_NORM if style.norm == "batch" else ():
                names[f"{theirs}.norm{number}.{name}"] = f"{ours}.{norms[number]}.{name}"

    block("encoder1.layer", "decoder.stem", wide_stem)
    for level in range(1, levels):
        theirs, ours = f"encoder{level + 1}", f"decoder.branches.{level - 1}"
        names[f"{theirs}.transp_conv_init.conv.weight"] = f"{ours}.first.weight"
        for at in range(levels - level - 1):
            names[f"{theirs}.blocks.{at}.0.conv.weight"] = f"{ours}.ups.{at}.weight"
            block(f"{theirs}.blocks.{at}.1", f"{ours}.blocks.{at}", False)
    for at in range(levels):
        theirs, ours = f"decoder{levels + 1 - at}", f"decoder.stages.{at}"
        names[f"{theirs}.transp_conv.conv.weight"] = f"{ours}.up.weight"
        block(f"{theirs}.conv_block", f"{ours}.block", True)
    return names | weight_and_bias("out.conv.conv", "decoder.classes")


def _widens(state: State, conv: str) -> bool:
    return conv in state and state[conv].shape[0] != state[conv].shape[1]


def _idle_shortcuts(state: State) -> list[str]:
    """Returns the shortcut convolutions of blocks as wide as their input: MONAI before 0.9 never used them."""
    shortcuts = {name: name.replace(".conv3.", ".conv1.") for name in state if name.endswith(".conv3.conv.weight")}
    return [name for name, first in shortcuts.items() if first in state and not _widens(state, first)]


def _convolved(state: State, tile: int | Sequence[int], patch: int | Sequence[int] | None) -> State:
    """Returns the state with a perceptron embedding (channels fastest) rewritten as the equal convolution."""
    if f"{EMBED}.1.weight" not in state:
        return state
    state = dict(state)
    weight, bias = state.pop(f"{EMBED}.1.weight"), state.pop(f"{EMBED}.1.bias", None)
    dims = 3 if isinstance(tile, int) else len(tile)
    voxels = math.prod((tile,) * dims if isinstance(tile, int) else tile)
    if STEM in state:
        dims, per_patch = state[STEM].ndim - 2, weight.shape[1] / state[STEM].shape[1]
    elif POSITIONS in state:
        per_patch = voxels / state[POSITIONS].shape[1]
    else:
        per_patch = 0.0
    edge = round(per_patch ** (1 / dims))
    cube = (edge,) * dims if patch is None else per_axis(patch, "patch", dims)
    if edge**dims != per_patch and patch is None or not math.prod(cube) or weight.shape[1] % math.prod(cube):
        raise ValueError(
            f"a perceptron embedding of {weight.shape[1]} inputs fits no cubic patch of tile {tile}: give patch=, the "
            "voxels along each direction"
        )
    channels_last = weight.unflatten(1, (*cube, -1))  # e p p p c
    state[f"{EMBED}.weight"] = channels_last.movedim(-1, 1).contiguous()
    return state if bias is None else state | {f"{EMBED}.bias": bias}


def _split_biases(ours: State, depth: int) -> None:
    """Replaces the biases of queries, keys and values by those of queries and values, in place.

    Without a rotation, a key's bias adds the same number to all logits of a query, and softmax removes it.
    """
    lost = 0.0
    for at in range(depth):
        q, k, v = ours.pop(f"encoder.blocks.{at}.attn.qkv.bias").chunk(3)
        ours[f"encoder.blocks.{at}.attn.q_bias"], ours[f"encoder.blocks.{at}.attn.v_bias"] = q, v
        lost = max(lost, float(k.abs().max()))
    log.info("biases of keys dropped (up to %.2g): attention is the same without them", lost)


def _refuse_foreign(net: nn.Module, encoder: SeqParViT) -> None:
    """Raises if the network computes anything that MONAI's classes do not."""
    faults = []
    if encoder.rotates:
        faults.append(f"positions {encoder.positions} (it has learned ones)")
    if len(encoder.stages) > 1:
        faults.append("an encoder of several stages")
    if encoder.window:
        faults.append("attention in windows")
    if any(not isinstance(block.mlp, Mlp) for block in encoder.blocks):
        faults.append("a gated MLP")
    if any(isinstance(module, nn.LayerNorm) and module.eps != 1e-5 for module in encoder.modules()):
        faults.append("norms of another eps than 1e-5")
    if isinstance(net, SegmentationNet):
        if not isinstance(net.decoder, UnetrDecoder):
            faults.append(f"a {type(net.decoder).__name__}")
        shape = (encoder.layout.patch, len(encoder.blocks), net.taps)
        if shape != ((16,) * len(encoder.layout.patch), 12, (3, 6, 9)):
            faults.append(f"patch {shape[0]} with {shape[1]} blocks and taps {shape[2]} (only 16, 12, (3, 6, 9))")
    if faults:
        raise ValueError(f"MONAI has no {', no '.join(faults)}; save such a network with write_weights")


def _position_table(encoder: SeqParViT) -> Tensor:
    """Returns the positions as a table ``1 n e``, as MONAI stores them."""
    like, layout = encoder.norm.weight, Layout(encoder.layout.tile, encoder.layout.patch)
    if encoder.pos_embed is not None:
        return encoder.pos_embed.detach().clone()
    if encoder.positions == "sincos":
        return sincos_positions(layout, 0, encoder.embed_dim, like)
    return like.new_zeros(1, layout.num_tokens, encoder.embed_dim)


def _dead_weights(encoder: SeqParViT, release: tuple[int, ...], has_bias: bool) -> State:
    """Returns zeros for the parameters that MONAI registers in each block and never uses."""
    wide, zeros = encoder.embed_dim, encoder.norm.weight.new_zeros
    shapes: dict[str, tuple[int, ...]] = {}
    if release >= (1, 4):
        shapes |= {"norm_cross_attn.weight": (wide,), "norm_cross_attn.bias": (wide,)}
    if (1, 4) <= release < (1, 6):
        shapes |= {"cross_attn.out_proj.weight": (wide, wide), "cross_attn.out_proj.bias": (wide,)}
        shapes |= {f"cross_attn.to_{kind}.weight": (wide, wide) for kind in "qkv"}
        shapes |= {f"cross_attn.to_{kind}.bias": (wide,) for kind in "qkv" if has_bias}
    names = (f"vit.blocks.{at}." for at in range(len(encoder.blocks)))
    return {block + name: zeros(shape) for block in names for name, shape in shapes.items()}
