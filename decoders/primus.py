"""Primus's decoder, and the convolutions that embed patches in its second and third version.

The decoder upsamples each token to its voxels independently, so that ranks exchange nothing; convolutions fetch halos.

Legend: b batch, n tokens, c channels, e embedding, k classes, p voxels of a patch, w d h tokens, W D H voxels; ``n/s``
is this rank's share of the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from seqpar.decoders.decoder import DecoderCell, Sizes, run_cells, strides
from seqpar.decoders.modes.halo import Halo
from seqpar.decoders.unets.architecture import ONE, Style
from seqpar.decoders.unets.unet_blocks import ResidualBlock, init_weights
from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import AnyGroup, as_group
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d, ConvTranspose3d
from seqpar.spatial.norms import ChannelLayerNorm


@dataclass(frozen=True)
class StemKind:
    """The sizes of a stem.

    - ``widths``: channels at full resolution, and after each halving
    - ``activation``: of its blocks
    - ``skips``: whether every level but the last is added to the tokens by a convolution of its own
    """

    widths: tuple[int, ...]
    activation: str
    skips: bool


STEMS = {
    "primus-v2": StemKind((32, 32, 64, 128), "relu", False),
    "primus-v3": StemKind((32, 64, 256, 1024), "leaky_relu", True),
}


class ConvStem(nn.Module):
    """Embeds patches by residual blocks that halve the volume, as PrimusV2 and V3 do; in place of ``PatchEmbed``.

    Each rank computes its box: convolutions fetch halos, norms sum over ranks. The result is that of one process.

    Args:
        ``in_channels``: number of image channels.
        ``embed_dim``: width of a token.
        ``kind``: the sizes, such as ``STEMS["primus-v2"]``; a patch has 2 ** (number of halvings) voxels a side.
        ``group``: the ranks that share a tile; None: this process alone.
    """

    def __init__(self, in_channels: int, embed_dim: int, kind: StemKind, group: AnyGroup | None = None) -> None:
        super().__init__()
        self.kind, self.group, widths = kind, as_group(group), kind.widths
        style = Style(activation=kind.activation, bias=False)
        kernel, halving = (3, 3, 3), (2, 2, 2)
        first = Style(activation=kind.activation, bias=True)
        self.stem = ResidualBlock(first, in_channels, widths[0], kernel, ONE, ONE)
        self.stages = nn.ModuleList(ResidualBlock(style, c, w, kernel, halving, ONE) for c, w in pairwise(widths))
        self.final = Conv3d(widths[-1], embed_dim, 1)
        side = 1 << len(self.stages)
        self.patch = (side, side, side)
        sides = [side >> level for level in range(len(self.stages))] if kind.skips else []
        self.skips = nn.ModuleList(Conv3d(w, embed_dim, k, stride=k) for w, k in zip(widths, sides))
        self.scales = nn.ParameterList(torch.tensor(1e-5) for _ in sides)
        init_weights(self, first)

    def forward(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the tokens ``b n/s e`` of a part ``b n/s c p p p``."""
        if layout.boxed() is not layout or layout.patch != self.patch:
            raise ValueError(
                f"convolutions embed boxes of patches of {self.patch} voxels, not split={layout.split!r} and patches "
                f"of {layout.patch}: take split='spatial' and that `patch`"
            )
        halo = Halo(self.group)
        grid = halo.box_grid(layout, 0).scaled(self.patch) if self.group.size > 1 else None
        value: Value = halo.voxels(part, layout), grid
        added = list[Tensor]()
        for level, block in enumerate([self.stem, *self.stages]):
            value = block(*value)
            if level < len(self.skips):
                added.append(self.scales[level] * self.skips[level](*value)[0])
        x, _ = self.final(*value)
        if added:
            x = x + sum(added[1:], added[0])
        return rearrange(x, "b e w d h -> b (w d h) e")


def primus_widths(embed_dim: int, num_classes: int, stages: int) -> list[int]:
    """Returns the channels between the stages: they decrease geometrically from the embedding, in multiples of 8."""
    ratio = (embed_dim / (2 * num_classes)) ** (1 / stages)
    return [max(8, 8 * round((embed_dim / ratio**stage + 1e-6) / 8)) for stage in range(1, stages)]


class PrimusDecoder(nn.Module):
    """Decodes tokens by log2(patch) transposed convolutions of stride 2, with channel norm and GELU in between.

    If the patch is not a cube, an axis with fewer doublings has them in the last stages, as in Primus.

    Args:
        ``embed_dim``: embedding dimension of the tokens.
        ``num_classes``: number of channels of the logits.
        ``patch``: voxels of a token, one number or one per axis.
    """

    uses_image = False
    num_features = 1
    taps = ()

    def __init__(self, embed_dim: int, num_classes: int, patch: int | Sequence[int]) -> None:
        super().__init__()
        *stages, last = strides(patch, short_first=False)
        widths = [embed_dim, *primus_widths(embed_dim, num_classes, len(stages) + 1)]
        self.ups = nn.ModuleList(ConvTranspose3d(c, w, s, stride=s) for c, w, s in zip(widths, widths[1:], stages))
        self.norms = nn.ModuleList(ChannelLayerNorm(width, eps=1e-6) for width in widths[1:])
        self.classes = ConvTranspose3d(widths[-1], num_classes, last, stride=last)

    @classmethod
    def of(cls, sizes: Sizes) -> "PrimusDecoder":
        """Returns the decoder for the given sizes; its widths follow from the embedding."""
        return cls(sizes.embed_dim, sizes.num_classes, sizes.patch)

    def forward(
        self, features: Sequence[Tensor], image: Tensor | None, grid: BoxGrid | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns logits ``b k W D H`` and their box grid, given the token grid ``b e w d h``."""
        return run_cells(self.cells(), features, None, grid)

    def cells(self) -> list[DecoderCell]:
        """Returns one cell per doubling, and the classifier."""
        every = [
            DecoderCell((f"ups.{stage}.", f"norms.{stage}."), (0,) * (stage == 0), False, partial(self._double, stage))
            for stage in range(len(self.ups))
        ]
        features = () if every else (0,)
        return [*every, DecoderCell(("classes.",), features, False, lambda value: self.classes(*value))]

    def _double(self, stage: int, value: Value) -> Value:
        x, grid = self.norms[stage](*self.ups[stage](*value))
        return F.gelu(x), grid
