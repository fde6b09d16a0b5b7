"""Builds the network of a Config."""

import math

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


DECODERS = ("plain", "unetr", "primus")


FOREGROUND = 0.02  # what a fresh network believes of every voxel: most of an image is background


def build(
    config: Config,
    in_channels: int,
    num_outputs: int,
    group: Group,
    has_regions: bool = False,
    device: str = "cpu",
) -> SegmentationNet:
    """Returns the network of a config, its weights drawn from the config's seed: equal on all ranks.

    Its outputs are labels of which the first is background, or, with ``has_regions``, regions by themselves. On the
    device "meta" it has shapes alone.
    """
    torch.manual_seed(config.seed)
    with torch.device(device):
        encoder, decoder, chosen = _parts(config, in_channels, num_outputs, group)
    assert decoder.classes.bias is not None
    with torch.no_grad():
        decoder.classes.bias[0 if has_regions else 1 :] = math.log(FOREGROUND / (1 - FOREGROUND))
    return SegmentationNet(encoder, decoder, choose_mode(config.mode, group), chosen)


def _parts(
    config: Config, in_channels: int, num_outputs: int, group: Group
) -> tuple[SeqParViT, Decoder, tuple[int, ...]]:
    """Returns encoder, decoder, and the encoder's blocks that the decoder takes."""
    encoder = SeqParViT(
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
    patch, chosen = encoder.layout.patch, tuple[int, ...]()
    decoder: Decoder
    if config.decoder == "unetr":
        decoder = UnetrDecoder(in_channels, config.embed_dim, num_outputs, patch, config.decoder_width)
        chosen = taps(config.depth, patch, config.skips)
    elif config.decoder == "primus":
        decoder = PrimusDecoder(config.embed_dim, num_outputs, patch)
    else:
        decoder = PlainDecoder(config.embed_dim, num_outputs, patch, config.decoder_width)
    return encoder, decoder, chosen
