"""Primus's decoder: upsamples each token to its voxels independently, so that ranks exchange nothing.

Legend: b batch, e embedding, k classes, w d h tokens, W D H voxels.
"""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.decoders.decoder import DecoderCell, Sizes, run_cells, strides
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import ConvTranspose3d
from seqpar.spatial.norms import ChannelLayerNorm


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
