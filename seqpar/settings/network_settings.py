"""The settings of the network: encoder, decoder, U-Net, pretraining; and which networks have which of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from seqpar.decoders.named_decoders import DECODERS
from seqpar.decoders.primus import STEMS
from seqpar.settings.field import (
    AT_LEAST_1,
    BELOW_1,
    CHANNELS,
    CHANNELS_OR_0,
    INSIDE_0_1,
    NOT_NEGATIVE,
    VOXELS,
    Bounds,
    Networks,
    setting,
    whole_bounds,
)
from seqpar.vit.tokens import POSITIONS

NORMS = ("own", "batch", "group", "instance")
ENCODERS = ("plain", "hierarchical")
UNETR_WIDTH = 16  # channels at full resolution
_WEIGHTS = "the weights belong to that network"
_network = partial(setting, section="network", fixed=_WEIGHTS)


def is_hierarchical(config: Any) -> bool:
    """Returns whether the network has an encoder of stages."""
    return bool(config.network == "vit" and config.encoder == "hierarchical")


def is_nnunet(config: Any) -> bool:
    """Returns whether the network is one of nnU-Net's."""
    return str(config.network).startswith("nnunet-")


def stages_name_features(stages: str) -> bool:
    """Returns whether ``--stages`` names the features of each stage, as 133:111:32 does."""
    return stages.replace(",", " ").partition(" ")[0].count(":") > 1


TOKENS = Networks(lambda c: c.network == "vit", "vit")
PLAIN = Networks(lambda c: c.network == "vit" and not is_hierarchical(c), "vit with --encoder plain")
HIERARCHICAL = Networks(is_hierarchical, "vit with --encoder hierarchical")
CONVOLUTIONS = Networks(lambda c: c.network != "vit", "U-Nets and resattnet")
UNETS = Networks(lambda c: c.network != "vit" and not c.network.startswith("resattnet"), "U-Nets")
NNUNET = Networks(is_nnunet, "nnunet-plain and nnunet-resenc")
SUPERVISED = Networks(lambda c: is_nnunet(c) or c.network.startswith("mednext-"), "nnunet-… and mednext-…")
WITH_DROPOUT = Networks(lambda c: c.network in ("vit", "unet-hou", "unet-hou-2d"), "vit and Hou et al.'s U-Nets")
_encoder = partial(_network, networks=TOKENS)
_pretraining = partial(setting, section="pretraining", tasks=("pretrain",), networks=TOKENS)


@dataclass(frozen=True)
class NetworkSettings:
    """The network of a run; a part of ``Config``."""

    network: str = _network(
        "vit",
        "network: a Vision Transformer with a decoder, a U-Net, or with --task classify a 3D-ResAttNet",
        metavar="NAME",
        common=True,
    )
    encoder: str = _encoder("plain", "tokens of one size, or stages between which they merge", choices=ENCODERS)
    stage_depths: tuple[int, ...] = _network(
        (2, 2), "hierarchical: blocks of each stage", metavar="BLOCKS", networks=HIERARCHICAL
    )
    window: int = _encoder(
        0,
        "side of the windows in which tokens see each other; 0: all do",
        bounds=NOT_NEGATIVE,
        metavar="TOKENS",
        tasks=VOXELS,
    )
    stem: str = _network(
        "patch",
        "how patches become tokens: by one linear layer, or by the residual convolutions of PrimusV2 or V3 (--patch 8)",
        choices=("patch", *STEMS),
        tasks=VOXELS,
        networks=PLAIN,
    )
    depth: int = _network(12, "transformer blocks", bounds=whole_bounds(1, 1000), metavar="BLOCKS", networks=PLAIN)
    embed_dim: int = _encoder(768, "width of a token", bounds=CHANNELS, metavar="CHANNELS")
    heads: int = _encoder(12, "attention heads", bounds=AT_LEAST_1, metavar="HEADS")
    mlp_ratio: float = _encoder(
        4.0,
        "hidden width of the MLP over --embed-dim",
        bounds=Bounds(lambda value: 0 < value <= 1000, "it must be above 0 and at most 1000"),
        metavar="RATIO",
    )
    mlp: str = _encoder("gelu", "MLP of the blocks", choices=("gelu", "swiglu"))
    qkv_bias: bool = _encoder(True, "biases on queries and values")
    attention_norm: bool = _encoder(False, "norm over the joined heads (EVA-02, Primus)")
    positions: str = _encoder("learned", "position encoding", choices=POSITIONS)
    dropout: float = _network(
        0.0, "share of activations dropped", bounds=BELOW_1, metavar="SHARE", networks=WITH_DROPOUT
    )
    drop_path: float = _encoder(
        0.0, "share of residual branches dropped in the last block", bounds=BELOW_1, metavar="SHARE"
    )
    layer_scale: float = _encoder(0.0, "initial value of layer scale; 0: none", bounds=NOT_NEGATIVE, metavar="VALUE")
    pooling: str = _encoder(
        "mean",
        "vit with --task classify: mean of the tokens, or a class token",
        choices=("mean", "token"),
        tasks=("classify",),
    )
    decoder: str = _encoder("plain", "decoder of the tokens", choices=tuple(DECODERS), common=True, tasks=VOXELS)
    skips: str = _network(
        "monai",
        "blocks whose tokens the unetr decoder takes",
        choices=("monai", "paper"),
        tasks=VOXELS,
        networks=PLAIN,
        acts_when=lambda c: c.decoder == "unetr",
        why="--decoder {decoder} takes no skips",
    )
    decoder_width: int = _encoder(
        128,
        "channels of the decoder (unetr: of its finest level)",
        bounds=CHANNELS,
        metavar="CHANNELS",
        tasks=VOXELS,
        acts_when=lambda c: c.decoder != "primus",
        why="--decoder primus derives its width from the tokens'",
    )
    features: int = _network(
        0,
        "U-Nets, resattnet: channels of the first stage; 0: as published",
        bounds=CHANNELS_OR_0,
        metavar="CHANNELS",
        networks=CONVOLUTIONS,
        acts_when=lambda c: not c.features or not (is_nnunet(c) and stages_name_features(c.stages)),
        why="--stages names the features of each stage",
        gives_way=lambda preset, c: is_nnunet(c) and stages_name_features(c.stages),
    )
    norm: str = _network(
        "own",
        "U-Nets: norm of all layers; group: 8 groups, unet-distmis: as released",
        choices=NORMS,
        tasks=VOXELS,
        networks=UNETS,
    )
    stages: str = _network(
        "",
        "nnunet-…: kernel and stride of each stage, as in '133:111 333:122 333:222'; then features, convolutions down "
        "and up: 133:111:32:2:2; none: by the tile",
        metavar="STAGES",
        tasks=VOXELS,
        networks=NNUNET,
    )
    plans: str = _network(
        "",
        "nnunet-…: nnU-Net's plans.json (or FILE:CONFIGURATION), which gives network, tile, batch, spacing and kind of "
        "Dice unless a flag does",
        metavar="FILE",
        tasks=VOXELS,
        networks=NNUNET,
    )
    deep_supervision: bool = _network(
        False, "nnunet-…, mednext-…: also train the logits of coarser levels", tasks=VOXELS, networks=SUPERVISED
    )
    output_bias: bool = _encoder(True, "start with output biases that make foreground rare", tasks=VOXELS)

    @property
    def window_rule(self) -> str:
        """Where sliding windows lie and what they weigh: networks that nnU-Net has too predict as it does."""
        is_primus = self.network == "vit" and self.decoder == "primus"
        return "nnU-Net" if is_nnunet(self) or is_primus else "stride"

    @property
    def depths(self) -> int | tuple[int, ...]:
        """The blocks of the encoder, or of each of its stages."""
        return self.depth if self.encoder == "plain" else self.stage_depths


def with_decoder_of_stages(values: Mapping[str, Any], usual_decoder: str) -> dict[str, Any]:
    """Returns the settings of a command line; an encoder of stages gets the decoder that takes the tokens of all.

    - ``usual_decoder``: the preset's; if it is another one, its width does not fit this one
    """
    if values.get("encoder") != "hierarchical" or "decoder" in values or usual_decoder == "unetr":
        return dict(values)
    return {"decoder_width": UNETR_WIDTH, **values, "decoder": "unetr"}


def check_stages(depths: Sequence[int]) -> None:
    """Raises ValueError for numbers that are no blocks of stages."""
    if len(depths) < 2 or min(depths) < 1:
        typed = " ".join(map(str, depths))
        raise ValueError(f"--stage-depths {typed}: give the blocks of two stages or more, such as 2 2 6")


@dataclass(frozen=True)
class PretrainingSettings:
    """What is hidden, and what rebuilds it; a part of ``Config``."""

    mask_ratio: float = _pretraining(
        0.75, "share of a tile's tokens that is hidden", bounds=INSIDE_0_1, metavar="SHARE"
    )
    rebuild_blocks: int = _pretraining(
        2, "blocks that rebuild hidden tokens", bounds=whole_bounds(1, 1000), metavar="BLOCKS", fixed=_WEIGHTS
    )
    rebuild_width: int = _pretraining(
        0, "width of their tokens; 0: the encoder's", bounds=CHANNELS_OR_0, metavar="CHANNELS", fixed=_WEIGHTS
    )
    normalised_targets: bool = _pretraining(
        False, "rebuild patches minus their mean, divided by their standard deviation"
    )
