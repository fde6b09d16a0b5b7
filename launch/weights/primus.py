"""Loads and exports weights of Primus, by the names in dynamic-network-architectures, the networks of nnU-Net.

Legend: e embedding, n tokens.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpar.decoders.modes.choose import choose_mode
from seqpar.decoders.primus import PrimusDecoder
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.weights.files import (
    State,
    checkpoint_of,
    drop,
    fill,
    fit_positions,
    last_number,
    rename,
    unwrap,
    weight_and_bias,
)
from seqpar.mesh import AnyGroup
from seqpar.vit.blocks import GatedMlp
from seqpar.vit.encoder import SeqParViT

HEADS = {396: 6, 792: 12, 864: 12, 1056: 16}  # embedding -> heads, of the published sizes S, B, M, L
POSITIONS, MASK = "eva.pos_embed", "mask_token"


def load_primus(
    state_dict: Mapping[str, Any] | str | Path,
    tile: int | Sequence[int] = (96, 96, 96),
    num_heads: int | None = None,
    group: AnyGroup | None = None,
    mode: str = "auto",
    split: str = "spatial",
    trained_tile: Sequence[int] | None = None,
) -> SegmentationNet:
    """Returns a network with the weights of a Primus (version 1, whose patch embedding is one convolution).

    All sizes except the number of heads are read off the shapes.

    - ``state_dict``: also a checkpoint that holds one, or the path of its file
    - ``num_heads``: needed only for sizes that were not published
    - ``group``: the ranks that share a tile: ours or torch's; None: this process alone
    - ``mode``: of the decoder
    - ``trained_tile``: needed where the weights were trained on a tile that is neither ``tile`` nor a cube
    """
    state = unwrap(checkpoint_of(state_dict))
    state = drop(state, {MASK} & state.keys(), "they replace masked tokens in pretraining")
    depth = max(1, last_number(state, r"eva\.blocks\.") + 1)
    stages = max(1, last_number(state, r"up_projection\.decode\.") + 1)
    has = {piece: any(piece in name for name in state) for piece in _OPTIONS}
    ours = rename(state, primus_names(depth, stages, has), "Primus")
    for at in range(depth):
        block = f"encoder.blocks.{at}.attn."
        ours[f"{block}qkv.weight"] = torch.cat([ours.pop(f"{block}{kind}.weight") for kind in "qkv"])
    embed_dim, in_channels, *cube = ours["encoder.patch_embed.proj.weight"].shape
    heads = num_heads or HEADS.get(embed_dim)
    if heads is None:
        raise ValueError(f"no published Primus has an embedding of {embed_dim}: give num_heads=")
    sides = (tile,) * len(cube) if isinstance(tile, int) else tuple(tile)
    hidden_dim = ours["encoder.blocks.0.mlp.fc1.weight"].shape[0]
    with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten
        encoder = SeqParViT(
            in_channels, sides, cube, embed_dim, depth, heads, hidden_dim / embed_dim, has["q_proj.bias"],
            positions="learned+rope" if has[POSITIONS] else "rope", layer_scale=0.1 if has["gamma_1"] else None,
            group=group, split=split, mlp="swiglu", attention_norm=has["attn.norm"],
        )  # fmt: skip
        decoder = PrimusDecoder(embed_dim, ours["decoder.classes.bias"].shape[0], cube)
    if has[POSITIONS]:
        ours["encoder.pos_embed"] = fit_positions(ours["encoder.pos_embed"], cube, sides, trained_tile)
    net = SegmentationNet(encoder, decoder, choose_mode(mode, encoder.group))
    fill(net, ours)
    return net


def export_primus(net: nn.Module) -> State:
    """Returns the network's weights as the state dict that Primus loads with ``strict=True``.

    - ``net``: a network such as ``load_primus`` returns
    """
    if not (isinstance(net, SegmentationNet) and isinstance(net.decoder, PrimusDecoder)):
        raise ValueError(
            f"Primus loads the weights of a SegmentationNet with a PrimusDecoder, not of a {type(net).__name__}"
        )
    encoder = net.encoder
    _refuse_foreign(encoder)
    state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    depth = len(encoder.blocks)
    for at in range(depth):
        block = f"encoder.blocks.{at}.attn."
        weights = state.pop(f"{block}qkv.weight").chunk(3)
        state |= {f"{block}{kind}.weight": weight.clone() for kind, weight in zip("qkv", weights)}
    has = {option: ours in state for option, ours in _OPTIONS.items()}
    names = primus_names(depth, len(net.decoder.ups) + 1, has)
    theirs = rename(state, {ours: their for their, ours in names.items()}, "a network that Primus has")
    return theirs | {MASK: encoder.norm.weight.new_zeros(1, 1, encoder.embed_dim)}


# Parameters that a Primus may lack: a piece of the key there -> a parameter that shows it here.
_OPTIONS = {
    POSITIONS: "encoder.pos_embed",
    "gamma_1": "encoder.blocks.0.ls1.gamma",
    "attn.norm": "encoder.blocks.0.attn.norm.weight",
    "q_proj.bias": "encoder.blocks.0.attn.q_bias",
}


def primus_names(depth: int, stages: int, has: Mapping[str, bool]) -> dict[str, str]:
    """Returns a mapping from Primus' names to ours.

    Its separate weights of queries, keys and values are rows of our ``attn.qkv.weight``.

    - ``stages``: upsampling steps of the decoder
    - ``has``: which of the optional parameters there are
    """
    names = weight_and_bias("down_projection.proj", "encoder.patch_embed.proj")
    names |= weight_and_bias("eva.norm", "encoder.norm")
    if has[POSITIONS]:
        names[POSITIONS] = "encoder.pos_embed"
    inner = {name: name for name in ("norm1", "norm2", "attn.proj", "mlp.norm", "mlp.fc2")}
    inner |= {"mlp.fc1_g": "mlp.gate", "mlp.fc1_x": "mlp.fc1"}
    if has["attn.norm"]:
        inner["attn.norm"] = "attn.norm"
    for at in range(depth):
        theirs, ours = f"eva.blocks.{at}.", f"encoder.blocks.{at}."
        for their, our in inner.items():
            names |= weight_and_bias(theirs + their, ours + our)
        names |= {f"{theirs}attn.{kind}_proj.weight": f"{ours}attn.{kind}.weight" for kind in "qkv"}
        if has["q_proj.bias"]:
            names |= {f"{theirs}attn.{kind}_proj.bias": f"{ours}attn.{kind}_bias" for kind in "qv"}
        if has["gamma_1"]:
            names |= {f"{theirs}gamma_{branch}": f"{ours}ls{branch}.gamma" for branch in (1, 2)}
    for at in range(stages - 1):
        names |= weight_and_bias(f"up_projection.decode.{at}.0", f"decoder.ups.{at}")
        names |= weight_and_bias(f"up_projection.decode.{at}.1", f"decoder.norms.{at}")
    return names | weight_and_bias(f"up_projection.decode.{stages - 1}", "decoder.classes")


def _refuse_foreign(encoder: SeqParViT) -> None:
    """Raises if the encoder computes anything that Primus does not."""
    faults = []
    if not encoder.rotates:
        faults.append(f"positions {encoder.positions} (it rotates)")
    elif (encoder.embed_dim // encoder.num_heads) % 6:
        faults.append(f"heads of width {encoder.embed_dim // encoder.num_heads} (multiples of 6)")
    if any(not isinstance(block.mlp, GatedMlp) for block in encoder.blocks):
        faults.append("ungated MLP")
    if any(isinstance(module, nn.LayerNorm) and module.eps != 1e-5 for module in encoder.modules()):
        faults.append("norms of another eps than 1e-5")
    if faults:
        raise ValueError(f"Primus has no {', no '.join(faults)}; save such a network with write_weights")
