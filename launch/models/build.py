"""Builds the network of a Config: the encoder, and the decoder that ``--decoder`` names."""

import math

import torch

from seqpar.attention.strategies import AttentionOptions
from seqpar.choices import choices_in
from seqpar.decoders import choices
from seqpar.decoders.modes.choose import choose_mode
from seqpar.decoders.sizes import Sizes
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.settings.config import Config
from seqpar.mesh import Group
from seqpar.vit.encoder import SeqParViT

DECODERS = choices_in(choices)
# with --output-bias a fresh network gives every foreground class this probability: most is background
FOREGROUND = 0.02


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
        decoder = DECODERS[config.decoder].of(_sizes(config, in_channels, num_outputs, encoder.layout.patch))
    if config.output_bias:
        assert decoder.classes.bias is not None
        with torch.no_grad():
            decoder.classes.bias[0 if has_regions else 1 :] = math.log(FOREGROUND / (1 - FOREGROUND))
    return SegmentationNet(encoder, decoder, choose_mode(config.mode, group), decoder.taps)


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


def _sizes(config: Config, in_channels: int, num_outputs: int, patch: tuple[int, ...]) -> Sizes:
    return Sizes(in_channels, config.embed_dim, num_outputs, patch, config.decoder_width, config.depth, config.skips)
