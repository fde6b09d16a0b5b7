"""vit, plain or with stages, with the decoder that --decoder names."""

import math
from typing import Any, NamedTuple

import torch

from seqpar.attention.strategies import AttentionOptions
from seqpar.decoders.decoder import Sizes
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.named_decoders import DECODERS
from seqpar.decoders.primus import STEMS, ConvStem
from seqpar.decoders.pyramid import PyramidDecoder
from seqpar.models.network import Network
from seqpar.models.network_family import Layers, NetworkFamily
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Group
from seqpar.settings.config import Config
from seqpar.text import format_sides, quantity
from seqpar.vit.blocks import RECOMPUTED
from seqpar.vit.encoder import SeqParViT

# with --output-bias a fresh network gives every foreground class this probability: most is background
FOREGROUND = 0.02


class VisionTransformer(NetworkFamily):
    """An encoder of tokens, and a decoder."""

    attends, recomputed, usual_batch = True, RECOMPUTED, 0
    smaller = {
        "tokens": "a larger --patch, a smaller --tile or --embed-dim",
        "decoder": "a smaller --decoder-width or --tile",
        "transient": "a smaller --tile or --decoder-width",
        "optimizer": "a smaller --embed-dim or --depth",
    }

    def build(
        self, config: Config, in_channels: int, num_outputs: int, group: Group, data: Group | None, has_regions: bool
    ) -> Network:
        """Returns the network; with ``--output-bias`` a fresh one takes most of an image for background."""
        encoder = make_encoder(config, in_channels, group, self.patch_embed(config, in_channels, group))
        decoder = self.decoder(config, in_channels, num_outputs, encoder)
        if config.output_bias:
            assert decoder.classes.bias is not None
            with torch.no_grad():
                decoder.classes.bias[0 if has_regions else 1 :] = math.log(FOREGROUND / (1 - FOREGROUND))
        return SegmentationNet(encoder, decoder, choose_mode(config.mode, group), decoder.taps)

    def patch_embed(self, config: Config, in_channels: int, group: Group) -> ConvStem | None:
        """Returns what makes tokens in place of a linear layer, as ``--stem`` says."""
        kind = STEMS.get(config.stem)
        return None if kind is None else ConvStem(in_channels, config.embed_dim, kind, group)

    def decoder(self, config: Config, in_channels: int, num_outputs: int, encoder: SeqParViT) -> Any:
        """Returns the decoder that ``--decoder`` names, for this encoder's tokens."""
        sizes = Sizes(
            in_channels,
            encoder.stages[-1].embed_dim,
            num_outputs,
            encoder.layout.patch,
            config.decoder_width,
            config.depth,
            config.skips,
        )
        return DECODERS[config.decoder].of(sizes)

    def unit(self, config: Config) -> tuple[int, ...]:
        """Returns the patch."""
        return config.patch

    def attention_layers(self, config: Config) -> tuple[Layers, ...]:
        """Returns the encoder's blocks, to which all tokens come."""
        return (Layers(config.depth, tokens_per_rank(config), config.heads, config.embed_dim),)

    def num_alike(self, config: Config) -> int:
        """Returns the number of blocks; 0 where every second one has shifted windows."""
        return 0 if config.window else config.depth

    def describe(self, config: Config) -> str:
        """Returns the sizes of encoder and decoder."""
        blocks, heads = quantity(config.depth, "block"), quantity(config.heads, "head")
        return f"{blocks} x {config.embed_dim}, {heads}{describe_windows(config)}; {config.decoder} decoder"

    def describe_tile(self, config: Config) -> str:
        """Returns patch and tokens."""
        count = math.prod(side // p for side, p in zip(config.tile, config.patch))
        return f"patch {format_sides(config.patch, 'x')}: {quantity(count, 'token')}"


def tokens_per_rank(config: Config) -> tuple[int, ...]:
    """Returns how many tokens of a tile each rank has."""
    return Layout.of(config.tile, config.patch, config.seqpar, config.split).counts


def describe_windows(config: Config) -> str:
    """Returns how far tokens see each other, "" where all do."""
    return f" in windows of {config.window} tokens a side" if config.window else ""


def make_encoder(config: Config, in_channels: int, group: Group, patch_embed: ConvStem | None = None) -> SeqParViT:
    """Returns the encoder of a config."""
    return SeqParViT(
        in_channels,
        config.tile,
        config.patch,
        embed_dim=config.embed_dim,
        depth=config.depths,
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
        window=config.window,
        attention=AttentionOptions(config.attention, config.keep_kv, config.heads_per_chunk or None),
        patch_embed=patch_embed,
        group=group,
        split=config.split,
    )


class HierarchicalTransformer(VisionTransformer):
    """An encoder of stages, between which 2 x 2 x 2 tokens become one, and a decoder."""

    smaller = {
        **VisionTransformer.smaller,
        "optimizer": "a smaller --embed-dim, or fewer --stage-depths",
    }

    def patch_embed(self, config: Config, in_channels: int, group: Group) -> None:
        """Returns None: the patches of an encoder of stages have a linear layer."""

    def decoder(self, config: Config, in_channels: int, num_outputs: int, encoder: SeqParViT) -> Any:
        """Returns the decoder: ``unetr`` takes the tokens of all stages, others those of the last one."""
        if config.decoder != "unetr":
            return super().decoder(config, in_channels, num_outputs, encoder)
        widths = [stage.embed_dim for stage in encoder.stages]
        decoder = PyramidDecoder(in_channels, widths, num_outputs, config.patch, config.decoder_width)
        decoder.taps = tuple(stage.blocks.stop - 1 for stage in encoder.stages[:-1])
        return decoder

    def unit(self, config: Config) -> tuple[int, ...]:
        """Returns the voxels of a token of the last stage, the cube that stays on one rank."""
        merges = len(config.stage_depths) - 1
        return tuple(side << merges for side in config.patch)

    def refuse_tile(self, config: Config) -> None:
        """Raises ValueError for a tile that is not made of whole cubes, or of fewer than there are ranks."""
        unit, merges = self.unit(config), len(config.stage_depths) - 1
        how = f"--patch {format_sides(config.patch)} and {quantity(merges, 'merging')} of 2 x 2 x 2"
        if any(side % step for side, step in zip(config.tile, unit)):
            nearest = [-(-side // step) * step for side, step in zip(config.tile, unit)]
            raise ValueError(
                f"--tile {format_sides(config.tile)}: {how} need multiples of {format_sides(unit)}: "
                f"use --tile {format_sides(nearest)}"
            )
        count = math.prod(side // step for side, step in zip(config.tile, unit))
        if count < config.seqpar:
            raise ValueError(
                f"--seqpar {config.seqpar}: {how} leave {quantity(count, 'token')} of tile "
                f"{format_sides(config.tile)}, "
                "fewer than ranks: use a smaller --seqpar, a larger --tile, a smaller --patch or fewer --stage-depths"
            )

    def attention_layers(self, config: Config) -> tuple[Layers, ...]:
        """Returns each stage's blocks, to which all of its tokens come."""
        cubes = Layout.of(config.tile, self.unit(config), config.seqpar, config.split).counts
        return tuple(
            Layers(stage.depth, tuple(stage.tokens * count for count in cubes), stage.heads, stage.width)
            for stage in _stages(config)
        )

    def num_alike(self, config: Config) -> int:
        """Returns 0: blocks of different stages differ, and ``--depth`` says nothing of them."""
        return 0

    def describe(self, config: Config) -> str:
        """Returns the blocks and widths of the stages, and the decoder."""
        stages = " + ".join(f"{stage.depth} x {stage.width}" for stage in _stages(config))
        heads = f"from {quantity(config.heads, 'head')}{describe_windows(config)}"
        return f"stages of {stages}, {heads}; {config.decoder} decoder"

    def describe_tile(self, config: Config) -> str:
        """Returns patch and tokens of each stage."""
        cubes = math.prod(side // step for side, step in zip(config.tile, self.unit(config)))
        first, *others = (cubes * stage.tokens for stage in _stages(config))
        merged = ", then ".join(map(str, others))
        return f"patch {format_sides(config.patch, 'x')}: {quantity(first, 'token')}, merged to {merged}"


class _Stage(NamedTuple):
    """Blocks of a stage, and how many of its tokens are in a cube."""

    depth: int
    tokens: int
    heads: int
    width: int


def _stages(config: Config) -> list[_Stage]:
    last = len(config.stage_depths) - 1
    return [
        _Stage(count, 8 ** (last - number), config.heads << number, config.embed_dim << number)
        for number, count in enumerate(config.stage_depths)
    ]
