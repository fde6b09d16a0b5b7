"""The network of ``--task pretrain``, from a Config."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from seqpar.attention.partition import split_evenly
from seqpar.models.network_family import Layers, NetworkFamily
from seqpar.models.transformer_families import VisionTransformer, make_encoder, tokens_per_rank
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config
from seqpar.vit.masking import check_num_visible, num_visible
from seqpar.vit.tokens import sincos_positions

if TYPE_CHECKING:
    from seqpar.models.masked_network import MaskedNet


class MaskedPretraining(VisionTransformer):
    """An encoder of visible tokens, and a few blocks that rebuild what is hidden."""

    smaller = {
        **VisionTransformer.smaller,
        "decoder": "a smaller --rebuild-width, --rebuild-blocks or --tile",
        "transient": "a smaller --rebuild-width or --tile",
    }

    def build(
        self, config: Config, in_channels: int, num_outputs: int, group: Group, data: Group | None, has_regions: bool
    ) -> "MaskedNet":
        """Returns the network; learned positions begin as sines and cosines, alike for tokens that are near."""
        encoder = make_encoder(config, in_channels, group)
        if encoder.pos_embed is not None:
            whole = replace(encoder.layout, num_ranks=1)
            with torch.no_grad():
                encoder.pos_embed.copy_(sincos_positions(whole, 0, config.embed_dim, encoder.pos_embed))
        from seqpar.models.masked_network import MaskedNet  # of pretrainings alone
        from seqpar.vit.masked_autoencoder import MaskedDecoder

        positions = "rope" if encoder.rotates else "sincos"
        width, depth = _width(config), config.rebuild_blocks
        blocks = replace(config, depth=depth, embed_dim=width, positions=positions, dropout=0.0, drop_path=0.0)
        rebuilder = MaskedDecoder(config.embed_dim, in_channels, make_encoder(blocks, 1, group))
        return MaskedNet(encoder, rebuilder, config.mask_ratio)

    def attention_layers(self, config: Config) -> tuple[Layers, ...]:
        """Returns the encoder's blocks, to which visible tokens come alone, and those of the rebuilder."""
        counts = tokens_per_rank(config)
        visible = tuple(split_evenly(num_visible(sum(counts), config.mask_ratio), config.seqpar))
        return (
            Layers(config.depth, visible, config.heads, config.embed_dim),
            Layers(config.rebuild_blocks, counts, config.heads, _width(config)),
        )

    def refuse_tile(self, config: Config) -> None:
        """Raises ValueError if too little of the tile stays visible, or if something cannot be rebuilt."""
        count = math.prod(side // p for side, p in zip(config.tile, config.patch))
        check_num_visible(count, max(1, config.seqpar), config.mask_ratio)
        if _width(config) % config.heads:
            nearest = max(config.heads, round(_width(config) / config.heads) * config.heads)
            raise ValueError(
                f"--rebuild-width {_width(config)}: --heads {config.heads} does not divide it: use --rebuild-width "
                f"{nearest}"
            )
        if config.positions == "none":
            raise ValueError("--positions none: hidden tokens could not be told apart: use learned, sincos or rope")

    def describe(self, config: Config) -> str:
        """Returns the sizes of encoder and rebuilder."""
        return (
            f"{config.depth} blocks x {config.embed_dim}, {config.heads} heads; {config.mask_ratio:.0%} of the tokens "
            f"hidden, and rebuilt by {config.rebuild_blocks} blocks x {_width(config)}"
        )

    def describe_tile(self, config: Config) -> str:
        """Returns patch and tokens."""
        count = math.prod(side // p for side, p in zip(config.tile, config.patch))
        return f"{super().describe_tile(config)}, {num_visible(count, config.mask_ratio)} visible"


def _width(config: Config) -> int:
    """Returns the width of the rebuilder's tokens."""
    return config.rebuild_width or config.embed_dim


PRETRAINED: dict[str, NetworkFamily] = {"vit": MaskedPretraining()}
