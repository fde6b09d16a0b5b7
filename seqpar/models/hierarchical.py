"""The network ``vit`` with ``--encoder hierarchical``: stages of tokens, and a decoder that takes those of all."""

import math
from typing import Any, NamedTuple

from seqpar.decoders.pyramid import PyramidDecoder
from seqpar.models.network_family import Layers
from seqpar.models.vit import OF_ENCODER, VisionTransformer, in_windows
from seqpar.parallel.layout import Layout
from seqpar.quantity import quantity
from seqpar.settings.config import Config, shorten
from seqpar.settings.network_settings import HIERARCHY
from seqpar.vit.encoder import SeqParViT


class HierarchicalTransformer(VisionTransformer):
    """An encoder of stages, between which 2 x 2 x 2 tokens become one, and a decoder."""

    settings = (OF_ENCODER - {"depth"}) | HIERARCHY | {"window", "decoder", "decoder_width"}
    smaller = {
        **VisionTransformer.smaller,
        "optimizer": "a smaller --embed-dim, or fewer --stage-depths",
    }

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
        how = f"--patch {shorten(config.patch)} and {quantity(merges, 'merging')} of 2 x 2 x 2"
        if any(side % step for side, step in zip(config.tile, unit)):
            nearest = [-(-side // step) * step for side, step in zip(config.tile, unit)]
            raise ValueError(
                f"--tile {shorten(config.tile)}: {how} need multiples of {shorten(unit)}: use --tile {shorten(nearest)}"
            )
        count = math.prod(side // step for side, step in zip(config.tile, unit))
        if count < config.seqpar:
            raise ValueError(
                f"--seqpar {config.seqpar}: {how} leave {quantity(count, 'token')} of tile {shorten(config.tile)}, "
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
        heads = f"from {quantity(config.heads, 'head')}{in_windows(config)}"
        return f"stages of {stages}, {heads}; {config.decoder} decoder"

    def describe_tile(self, config: Config) -> str:
        """Returns patch and tokens of each stage."""
        cubes = math.prod(side // step for side, step in zip(config.tile, self.unit(config)))
        first, *others = (cubes * stage.tokens for stage in _stages(config))
        merged = ", then ".join(map(str, others))
        return f"patch {shorten(config.patch, 'x')}: {quantity(first, 'token')}, merged to {merged}"


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
