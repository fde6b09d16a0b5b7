"""Loads and exports weights of Primus, by the names in dynamic-network-architectures, the networks of nnU-Net.

Legend: e embedding, n tokens.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seqpar.data.formats.nnunet_plans import patch_size_of
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.primus import ConvStem, PrimusDecoder, StemKind
from seqpar.models.masked_network import MaskedNet
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.layout import per_axis
from seqpar.parallel.mesh import AnyGroup, as_group
from seqpar.settings.run_settings import TOKEN_ORDERS
from seqpar.vit.blocks import GatedMlp
from seqpar.vit.encoder import SeqParViT
from seqpar.weights.nnunet_results import PRETRAINING
from seqpar.weights.nnunet_weights import name_in_block, second_names, without_copies
from seqpar.weights.weight_files import (
    State,
    checkpoint_of,
    drop_keys,
    fit_positions,
    last_number,
    load_strict,
    rename,
    unwrap,
    weight_and_bias,
)

SIZES = {  # embedding, blocks and heads of the published networks, by the names that nnU-Net has for them
    "PrimusS": (396, 12, 6),
    "PrimusB": (792, 12, 12),
    "PrimusM": (864, 16, 12),
    "PrimusL": (1056, 24, 16),
}
STEM, POSITIONS, MASK = "down_projection.proj.weight", "eva.pos_embed", "mask_token"
FINAL = "down_projection.final_proj.weight"  # the last convolution of version 2 and 3's stem
REBUILDER = "decoder."  # begins the names of what rebuilds hidden patches in a pretraining
# Orders of tokens in pretrainings without one, by how their trainers' names begin: nnssl's, and what is written here.
_ORDERS = {"ModelGenesisEva": "hwd", "VolumeFusionEva": "hwd", "SimMIMEva": "whd", "seqpar": "whd"}


def load_primus(
    state_dict: Mapping[str, Any] | str | Path,
    tile: int | Sequence[int] = (96, 96, 96),
    num_heads: int | None = None,
    group: AnyGroup | None = None,
    mode: str = "auto",
    split: str = "spatial",
    trained_tile: int | Sequence[int] | None = None,
    token_order: str = "auto",
    reverse_axes: bool = False,
) -> SegmentationNet:
    """Returns a network with the weights of a Primus, PrimusV2 or PrimusV3.

    All sizes except the number of heads are read off the shapes. Of an nnssl pretraining, whose names are those of
    Primus and a second, smaller one's under ``decoder.``, the latter is ignored.

    - ``state_dict``: also a checkpoint that holds one, or the path or address of its file
    - ``num_heads``: needed only for sizes that were not published
    - ``group``: the ranks that share a tile: ours or torch's; None: this process alone
    - ``mode``: of the decoder
    - ``trained_tile``: needed if the weights were trained on a tile that is neither ``tile`` nor a cube
    - ``token_order``: the order of the network's tokens: "whd", "hwd" (the first two axes exchanged, as in most
      pretrainings and in Primus before July 2025), or "auto": for a pretraining, what its trainer used (hwd if a
      second network rebuilds hidden patches), else whd
    - ``reverse_axes``: for images whose axes are in the order of their files, and ``tile`` too. nnU-Net, and so
      Primus, reads the last axis first, then transposes as the plans in a checkpoint say; ``trained_tile`` is
      always in that order
    """
    encoder, ours = _encoder(state_dict, tile, num_heads, group, split, trained_tile, token_order, reverse_axes)
    if "decoder.classes.bias" not in ours:
        raise ValueError(
            "these weights hold only the encoder of a Primus, which segments nothing: use load_primus_encoder, or "
            "start a training from them"
        )
    with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten
        decoder = PrimusDecoder(encoder.embed_dim, ours["decoder.classes.bias"].shape[0], encoder.layout.patch)
    net = SegmentationNet(encoder, decoder, choose_mode(mode, encoder.group))
    load_strict(net, ours)
    return net


def load_primus_encoder(
    state_dict: Mapping[str, Any] | str | Path,
    tile: int | Sequence[int] = (96, 96, 96),
    num_heads: int | None = None,
    token_order: str = "auto",
    reverse_axes: bool = False,
) -> SeqParViT:
    """Returns the encoder of a Primus, or of a pretraining of one; arguments as of ``load_primus``."""
    encoder, ours = _encoder(state_dict, tile, num_heads, None, "spatial", None, token_order, reverse_axes)
    prefix = "encoder."
    load_strict(
        encoder, {name.removeprefix(prefix): tensor for name, tensor in ours.items() if name.startswith(prefix)}
    )
    return encoder


def _encoder(
    state_dict: Mapping[str, Any] | str | Path,
    tile: int | Sequence[int],
    num_heads: int | None,
    group: AnyGroup | None,
    split: str,
    trained_tile: int | Sequence[int] | None,
    token_order: str,
    reverse_axes: bool,
) -> tuple[SeqParViT, State]:
    """Returns an encoder of a Primus' sizes, and all that its weights are, under our names."""
    checkpoint = checkpoint_of(state_dict)
    state, trained_tile = unwrap(checkpoint), trained_tile or planned_tile(checkpoint)
    exchanged = has_exchanged_axes(checkpoint, token_order)
    state = drop_keys(state, pretraining_tensor_names(state), "they rebuild masked tokens in pretraining")
    depth = max(1, last_number(state, r"eva\.blocks\.") + 1)
    stages = last_number(state, r"up_projection\.decode\.") + 1
    has = {piece: any(piece in name for name in state) for piece in _OPTIONS}
    stem = stem_of(state)
    ours = rename(without_copies(state), primus_names(depth, stages, has, stem), "Primus")
    embed_dim, in_channels, *cube = _embedding(state)
    heads = num_heads or next((heads for width, _, heads in SIZES.values() if width == embed_dim), None)
    if heads is None:
        raise ValueError(f"no published Primus has an embedding of {embed_dim}: give num_heads=")
    trained = None if trained_tile is None else per_axis(trained_tile, "trained_tile", len(cube))
    if exchanged:
        exchange_tokens(ours, heads, trained and [side // p for side, p in zip(trained, cube)])
    sides = (tile,) * len(cube) if isinstance(tile, int) else tuple(tile)
    order = file_axes(checkpoint) if reverse_axes else (0, 1, 2)
    theirs = tuple(sides[order.index(axis)] for axis in range(3))
    if has[POSITIONS]:
        ours["encoder.pos_embed"] = fit_positions(ours["encoder.pos_embed"], cube, theirs, trained)
    if reverse_axes:
        turn_images(ours, heads, order, [side // p for side, p in zip(theirs, cube)])
        cube = [cube[axis] for axis in order]
    if stem is not None:
        stem.group = as_group(group)
    for at in range(depth):
        block = f"encoder.blocks.{at}.attn."
        ours[f"{block}qkv.weight"] = torch.cat([ours.pop(f"{block}{kind}.weight") for kind in "qkv"])
    hidden_dim = ours["encoder.blocks.0.mlp.fc1.weight"].shape[0]
    with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten
        encoder = SeqParViT(
            in_channels, sides, cube, embed_dim, depth, heads, hidden_dim / embed_dim, has["q_proj.bias"],
            positions="learned+rope" if has[POSITIONS] else "rope", layer_scale=0.1 if has["gamma_1"] else None,
            patch_embed=stem, group=group, split=split, mlp="swiglu", attention_norm=has["attn.norm"],
        )  # fmt: skip
    return encoder, ours


def file_axes(checkpoint: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the axis of a Primus for each axis W D H of a file: by nnU-Net's plans if it has any, else reversed."""
    settings = checkpoint.get("init_args")
    try:
        forward = list(settings["plans"]["transpose_forward"])  # type: ignore[index]
        return tuple(forward.index(2 - axis) for axis in range(3))
    except (ValueError, KeyError, TypeError):  # a pretraining, or somebody else's
        return 2, 1, 0


def settings_of_primus(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run whose network has these weights; the heads only if the size was published."""
    state = unwrap(checkpoint)
    embed_dim, _, *cube = _embedding(state)
    has = {piece: any(piece in name for name in state) for piece in _OPTIONS}
    version = "primus-v3" if any("proj_to_tokens" in name for name in state) else "primus-v2"
    published = next(({"heads": heads} for width, _, heads in SIZES.values() if width == embed_dim), {})
    return published | {
        "network": "vit", "encoder": "plain", "decoder": "primus", "stem": version if FINAL in state else "patch",
        "patch": tuple(cube[axis] for axis in file_axes(checkpoint)), "embed_dim": embed_dim,
        "depth": last_number(state, r"eva\.blocks\.") + 1, "mlp": "swiglu",
        "mlp_ratio": len(state["eva.blocks.0.mlp.fc1_x.weight"]) / embed_dim, "qkv_bias": has["q_proj.bias"],
        "attention_norm": has["attn.norm"], "positions": "learned+rope" if has[POSITIONS] else "rope",
        "layer_scale": 0.1 if has["gamma_1"] else 0.0,
    }  # fmt: skip


def planned_tile(checkpoint: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the tile that a checkpoint says it was trained on, where its learned positions, if any, are of that.

    nnssl's say it in what they ask of a plan, nnU-Net's in the plans that they were trained with.
    """
    plan, state = checkpoint.get(PRETRAINING), unwrap(checkpoint)
    sides = plan.get("pretrain_patch_size") if isinstance(plan, Mapping) else _planned_patch(checkpoint)
    if not isinstance(sides, (list, tuple)) or not {STEM, FINAL} & state.keys():
        return None
    count = math.prod(side // p for side, p in zip(sides, _embedding(state)[2:]))
    return tuple(sides) if POSITIONS not in state or count == state[POSITIONS].shape[1] else None


def _planned_patch(checkpoint: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Returns the patch size of the plans in an nnU-Net checkpoint, None where it has none."""
    settings = checkpoint.get("init_args")
    try:
        return patch_size_of(settings["plans"], settings["configuration"])  # type: ignore[index]
    except (ValueError, KeyError, TypeError):  # somebody else's checkpoint
        return None


def pretraining_tensor_names(state: State) -> set[str]:
    """Returns the names of a pretraining's tensors that segment nothing: the mask token, and what rebuilds."""
    return {name for name in state if name == MASK or name.startswith(REBUILDER)}


def has_exchanged_axes(checkpoint: Mapping[str, Any], token_order: str) -> bool:
    """Returns whether weights belong to tokens whose first two axes are exchanged; see ``load_primus``."""
    if token_order not in TOKEN_ORDERS:
        raise ValueError(f"token_order={token_order!r}: choose {', '.join(TOKEN_ORDERS)}")
    if token_order != "auto":
        return token_order == "hwd"
    if any(name.startswith(REBUILDER) for name in unwrap(checkpoint)):
        return True
    if PRETRAINING not in checkpoint:
        return False
    trainer = str(checkpoint.get("trainer_name"))
    orders = [order for start, order in _ORDERS.items() if trainer.startswith(start)]
    if not orders:
        raise ValueError(
            f"the file of a pretraining by {trainer} does not tell the order of its tokens, unlike those with "
            f"{REBUILDER}* and those by {', '.join(_ORDERS)}: give `token_order`, whd or hwd"
        )
    return orders[0] == "hwd"


def export_primus(net: nn.Module, reverse_axes: bool = False, transpose_forward: Sequence[int] = (0, 1, 2)) -> State:
    """Returns the network's weights as the state dict that Primus loads with ``strict=True``.

    Of a masked autoencoder, only those of the encoder, which are what nnU-Net takes from a pretraining.

    - ``net``: a network such as ``load_primus`` returns, or a masked autoencoder
    - ``reverse_axes``: for a network that was trained here, on images in the axis order of their files; the exported
      one takes the last axis first, as nnU-Net does
    - ``transpose_forward``: then, of the plans that will use the weights
    """
    if sorted(transpose_forward) != [0, 1, 2] or (tuple(transpose_forward) != (0, 1, 2) and not reverse_axes):
        raise ValueError(
            f"transpose_forward {tuple(transpose_forward)}: the axes 0, 1 and 2 in some order are needed, and "
            "reverse_axes=True"
        )
    decodes = isinstance(net, SegmentationNet) and isinstance(net.decoder, PrimusDecoder)
    if not (decodes or isinstance(net, MaskedNet)):
        raise ValueError(
            "Primus loads the weights of a SegmentationNet with a PrimusDecoder, or those of a masked autoencoder's "
            f"encoder, not of a {type(net).__name__}"
        )
    assert isinstance(net, (SegmentationNet, MaskedNet))
    encoder = net.encoder
    _refuse_foreign(encoder)
    whole = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    state = {name: tensor for name, tensor in whole.items() if name.startswith(("encoder.", "decoder."))}
    depth = len(encoder.blocks)
    for at in range(depth):
        block = f"encoder.blocks.{at}.attn."
        weights = state.pop(f"{block}qkv.weight").chunk(3)
        state |= {f"{block}{kind}.weight": weight.clone() for kind, weight in zip("qkv", weights)}
    if reverse_axes:
        turn_images(state, encoder.num_heads, [2 - axis for axis in transpose_forward], encoder.layout.grid)
    has = {option: ours in state for option, ours in _OPTIONS.items()}
    stem = encoder.patch_embed if isinstance(encoder.patch_embed, ConvStem) else None
    stages = len(net.decoder.ups) + 1 if decodes else 0  # type: ignore[union-attr, arg-type]
    names = primus_names(depth, stages, has, stem)
    theirs = rename(state, {ours: their for their, ours in names.items()}, "a network that Primus has")
    for name in _stem_names(stem) if stem is not None else ():
        theirs |= dict.fromkeys(second_names(name), theirs[name])
    return theirs | ({MASK: encoder.norm.weight.new_zeros(1, 1, encoder.embed_dim)} if decodes else {})


# Parameters that a Primus may lack: a piece of the key there -> a parameter that shows it here.
_OPTIONS = {
    POSITIONS: "encoder.pos_embed",
    "gamma_1": "encoder.blocks.0.ls1.gamma",
    "attn.norm": "encoder.blocks.0.attn.norm.weight",
    "q_proj.bias": "encoder.blocks.0.attn.q_bias",
}


def stem_of(state: State) -> ConvStem | None:
    """Returns a fresh stem of the sizes of a PrimusV2's or V3's, None for weights of version 1."""
    if FINAL not in state:
        return None
    stages = last_number(state, r"down_projection\.stages\.") + 1
    places = ["stem", *(f"stages.{level}" for level in range(stages))]
    widths = tuple(len(state[f"down_projection.{place}.blocks.0.conv1.conv.weight"]) for place in places)
    has_skips = any("proj_to_tokens" in name for name in state)
    kind = StemKind(widths, "leaky_relu" if has_skips else "relu", has_skips)  # V3 adds skips, and changes both
    embed_dim, in_channels, *_ = _embedding(state)
    with torch.random.fork_rng(devices=[]):  # what the constructors draw is overwritten
        return ConvStem(in_channels, embed_dim, kind)


def _embedding(state: State) -> tuple[int, ...]:
    """Returns the embedding, the channels of an image, and the voxels of a patch along each axis."""
    if FINAL not in state:
        return tuple(state[STEM].shape)
    side = 2 << last_number(state, r"down_projection\.stages\.")
    return len(state[FINAL]), state["down_projection.stem.blocks.0.conv1.conv.weight"].shape[1], side, side, side


def _stem_names(stem: ConvStem | None) -> dict[str, str]:
    """Returns a mapping from Primus' names of what embeds patches to ours."""
    if stem is None:
        return weight_and_bias("down_projection.proj", "encoder.patch_embed.proj")
    names = {}
    for ours in stem.state_dict():
        place, _, rest = ours.partition(".")
        level, _, inner = rest.partition(".")
        theirs = {
            "stem": f"stem.blocks.0.{name_in_block(rest, False)}",
            "stages": f"stages.{level}.blocks.0.{name_in_block(inner, True)}",
            "final": f"final_proj.{rest}",
            "skips": f"proj_to_tokens.{rest}",
            "scales": f"scale_proj_to_tokens.{rest}",
        }[place]
        names[f"down_projection.{theirs}"] = f"encoder.patch_embed.{ours}"
    return names


def primus_names(depth: int, stages: int, has: Mapping[str, bool], stem: ConvStem | None = None) -> dict[str, str]:
    """Returns a mapping from Primus' names to ours.

    Its separate weights of queries, keys and values are rows of our ``attn.qkv.weight``.

    - ``stages``: upsampling steps of the decoder; 0: there is none
    - ``has``: which of the optional parameters there are
    - ``stem``: of version 2 or 3
    """
    names = _stem_names(stem)
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
    return names | (weight_and_bias(f"up_projection.decode.{stages - 1}", "decoder.classes") if stages else {})


def _refuse_foreign(encoder: SeqParViT) -> None:
    """Raises if the encoder computes anything that Primus does not."""
    faults = []
    if not encoder.rotates:
        faults.append(f"positions {encoder.positions} (it rotates)")
    elif (encoder.embed_dim // encoder.num_heads) % 6:
        faults.append(f"heads of width {encoder.embed_dim // encoder.num_heads} (multiples of 6)")
    if len(encoder.stages) > 1:
        faults.append("an encoder of several stages")
    if encoder.window:
        faults.append("attention in windows")
    if any(not isinstance(block.mlp, GatedMlp) for block in encoder.blocks):
        faults.append("ungated MLP")
    if any(isinstance(module, nn.LayerNorm) and module.eps != 1e-5 for module in encoder.modules()):
        faults.append("norms of another eps than 1e-5")
    if faults:
        raise ValueError(f"Primus has no {', no '.join(faults)}; save such a network with write_weights")


TABLE = "encoder.pos_embed"
OF_AXES = (".attn.q.weight", ".attn.k.weight", ".attn.q_bias")  # ends of the names of what rotary positions turn


def exchange_tokens(state: State, num_heads: int, grid: Sequence[int] | None = None) -> None:
    """Makes weights of tokens ``(h w d)``, under our names, those of the same network of tokens ``(w h d)``.

    - ``grid``: of the tile that they were trained on; None: a cube. Its sides w and h must be equal
    """
    count = state[TABLE].shape[1] if TABLE in state else 0
    sides = (round(count ** (1 / 3)),) * 3 if grid is None else tuple(grid)
    if sides[0] != sides[1] or (TABLE in state and math.prod(sides) != count):
        known = "" if grid is None else f" but {'x'.join(map(str, sides))}"
        raise ValueError(
            f"token order hwd: the weights have {count} positions, which are no cube{known}: weights trained with "
            "exchanged axes only fit a grid whose first two sides are equal"
        )
    _turn_positions(state, num_heads, (1, 0, 2), sides)


def turn_images(state: State, num_heads: int, order: Sequence[int], grid: Sequence[int]) -> None:
    """Makes weights, under our names, those of the same network for images whose axes are in another order.

    - ``order``: the axis before of each axis afterwards
    - ``grid``: of the learned positions, along the axes before
    """
    for name, tensor in state.items():
        if tensor.ndim == 5:  # kernels
            state[name] = tensor.permute(0, 1, *(2 + axis for axis in order)).contiguous()
    _turn_positions(state, num_heads, order, grid)


def _turn_positions(state: State, num_heads: int, order: Sequence[int], grid: Sequence[int]) -> None:
    """Reorders the axes of learned positions, and what rotary ones of these axes turn."""
    if TABLE in state:
        whole = state[TABLE].unflatten(1, tuple(grid))
        state[TABLE] = whole.permute(0, *(1 + axis for axis in order), 4).flatten(1, 3)
    for name, tensor in state.items():
        if name.endswith(OF_AXES):
            by_head = tensor.unflatten(0, (num_heads, -1))  # a f e, or a f
            third = by_head.shape[1] // 6 * 2
            *pieces, rest = by_head.split([third, third, third, by_head.shape[1] - 3 * third], 1)
            state[name] = torch.cat([*(pieces[axis] for axis in order), rest], 1).flatten(0, 1)
