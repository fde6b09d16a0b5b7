"""The network ``vit``: an encoder of tokens, and the decoder that ``--decoder`` names."""

import math

import torch

from seqpar.attention.strategies import AttentionOptions
from seqpar.choices import choices_in
from seqpar.decoders import choices
from seqpar.decoders.modes.choose import choose_mode
from seqpar.decoders.sizes import Sizes
from seqpar.launch.models.kind import Kind
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.settings.config import Config, shorten
from seqpar.mesh import Group
from seqpar.vit.blocks import RECOMPUTED
from seqpar.vit.encoder import SeqParViT

DECODERS = choices_in(choices)
# with --output-bias a fresh network gives every foreground class this probability: most is background
FOREGROUND = 0.02


class VisionTransformer(Kind):
    """An encoder of tokens, and a decoder."""

    settings = frozenset(
        [
            "patch",
            "decoder",
            "depth",
            "embed_dim",
            "heads",
            "mlp_ratio",
            "mlp",
            "qkv_bias",
            "attention_norm",
            "positions",
            "skips",
            "dropout",
            "drop_path",
            "layer_scale",
            "decoder_width",
            "attention",
            "keep_kv",
            "heads_per_chunk",
            "grad_checkpoint",
            "mlp_chunks",
            "compile",
        ]
    )
    attends, recomputed, usual_batch = True, RECOMPUTED, 0
    smaller = {
        "tokens": "a larger --patch, a smaller --tile or --embed-dim",
        "decoder": "a smaller --decoder-width or --tile",
        "transient": "a smaller --tile or --decoder-width",
        "optimizer": "a smaller --embed-dim or --depth",
    }

    def build(
        self, config: Config, in_channels: int, num_outputs: int, group: Group, data: Group | None, has_regions: bool
    ) -> SegmentationNet:
        """Returns the network; with ``--output-bias`` a fresh one takes most of an image for background."""
        encoder = _encoder(config, in_channels, group)
        decoder = DECODERS[config.decoder].of(_sizes(config, in_channels, num_outputs, encoder.layout.patch))
        if config.output_bias:
            assert decoder.classes.bias is not None
            with torch.no_grad():
                decoder.classes.bias[0 if has_regions else 1 :] = math.log(FOREGROUND / (1 - FOREGROUND))
        return SegmentationNet(encoder, decoder, choose_mode(config.mode, group), decoder.taps)

    def unit(self, config: Config) -> tuple[int, ...]:
        """Returns the patch."""
        return config.patch

    def num_alike(self, config: Config) -> int:
        """Returns the number of blocks."""
        return config.depth

    def describe(self, config: Config) -> str:
        """Returns the sizes of encoder and decoder."""
        return f"{config.depth} blocks x {config.embed_dim}, {config.heads} heads; {config.decoder} decoder"

    def describe_tile(self, config: Config) -> str:
        """Returns patch and tokens."""
        count = math.prod(side // p for side, p in zip(config.tile, config.patch))
        return f"patch {shorten(config.patch, 'x')}: {count} tokens"


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
