"""Builds the network of a Config: the encoder, and the decoder that ``--decoder`` names.

A new decoder is one entry of ``DECODERS`` and one function that makes it.
"""

import math
from collections.abc import Callable

import torch

from seqpar.attention.strategies import AttentionOptions
from seqpar.decoders.modes.choose import choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.decoders.primus import PrimusDecoder
from seqpar.decoders.unetr import UnetrDecoder, taps
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.settings.config import Config
from seqpar.mesh import Group
from seqpar.vit.encoder import SeqParViT

Decoder = PlainDecoder | UnetrDecoder | PrimusDecoder
Patch = tuple[int, ...]
Taps = tuple[int, ...]  # the encoder's blocks whose tokens the decoder takes beside the last ones
FOREGROUND = (
    0.02  # with --output-bias a fresh network gives every foreground class this probability: most is background
)


def build(
    config: Config,
    in_channels: int,
    num_outputs: int,
    group: Group,
    has_regions: bool = False,
    device: str = "cpu",
) -> SegmentationNet:
    """Returns the network of a config, its weights drawn from the config's seed: equal on all ranks.

    - ``has_regions``: outputs are regions by themselves; else they are classes, of which the first is background
    - ``device``: on "meta" the network has shapes alone
    """
    torch.manual_seed(config.seed)
    with torch.device(device):
        encoder = _encoder(config, in_channels, group)
        decoder, taken = DECODERS[config.decoder](config, in_channels, num_outputs, encoder.layout.patch)
    if config.output_bias:
        assert decoder.classes.bias is not None
        with torch.no_grad():
            decoder.classes.bias[0 if has_regions else 1 :] = math.log(FOREGROUND / (1 - FOREGROUND))
    return SegmentationNet(encoder, decoder, choose_mode(config.mode, group), taken)


def _encoder(config: Config, in_channels: int, group: Group) -> SeqParViT:
    return SeqParViT(
        in_channels,
        config.tile,
        config.patch,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.heads,
        mlp_ratio=config.mlp_ratio,
        qkv_bias=config.qkv_bias,
        mlp=config.mlp,
        attention_norm=config.attention_norm,
        positions=config.positions,
        dropout=config.dropout,
        drop_path=config.drop_path,
        layer_scale=config.layer_scale or None,
        recompute=config.grad_checkpoint,
        mlp_chunks=config.mlp_chunks,
        attention=AttentionOptions(config.attention, config.keep_kv, config.heads_per_chunk or None),
        group=group,
        split=config.split,
    )


def _plain(config: Config, in_channels: int, num_outputs: int, patch: Patch) -> tuple[Decoder, Taps]:
    return PlainDecoder(config.embed_dim, num_outputs, patch, config.decoder_width), ()


def _unetr(config: Config, in_channels: int, num_outputs: int, patch: Patch) -> tuple[Decoder, Taps]:
    decoder = UnetrDecoder(in_channels, config.embed_dim, num_outputs, patch, config.decoder_width)
    return decoder, taps(config.depth, patch, config.skips)


def _primus(config: Config, in_channels: int, num_outputs: int, patch: Patch) -> tuple[Decoder, Taps]:
    return PrimusDecoder(config.embed_dim, num_outputs, patch), ()


DECODERS: dict[str, Callable[[Config, int, int, Patch], tuple[Decoder, Taps]]] = {
    "plain": _plain,
    "unetr": _unetr,
    "primus": _primus,
}
