"""The paper's decoder: convolutions and x2 upsampling from the token grid to classes, without skips.

Legend: b batch, e embedding, k classes, w d h tokens, W D H voxels; with a box grid, those of this rank's box.
"""

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.decoders.decoder import DecoderCell, Sizes, run_cells, strides
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d
from seqpar.spatial.memory_format import in_fastest_format
from seqpar.spatial.norms import InstanceNorm3d
from seqpar.spatial.pooling import Upsample


class PlainDecoder(nn.Module):
    """Decodes tokens by log2(patch) stages of 3x3x3 convolution, norm, activation and x2 trilinear upsampling.

    If the patch is not a cube, an axis with fewer doublings has them in the first stages.

    The last upsampling and the classifier are linear and act on different axes, so they commute: the classifier comes
    first, and nothing has ``width`` channels at full resolution.

    Args:
        ``embed_dim``: embedding dimension of the tokens.
        ``num_classes``: number of channels of the logits.
        ``patch``: voxels of a token, one number or one per axis.
        ``width``: number of channels of every stage.
    """

    uses_image = False
    num_features = 1
    taps = ()

    def __init__(self, embed_dim: int, num_classes: int, patch: int | Sequence[int], width: int = 128) -> None:
        super().__init__()
        stages = strides(patch)
        inputs = [embed_dim, *[width] * (len(stages) - 1)]
        self.convs = nn.ModuleList(Conv3d(channels, width, 3, padding=1, bias=False) for channels in inputs)
        self.norms = nn.ModuleList(InstanceNorm3d(width, affine=True) for _ in inputs)
        self.upsamples = nn.ModuleList(Upsample(scale_factor=stride, mode="trilinear") for stride in stages)
        self.classes = Conv3d(width, num_classes, 1)

    @classmethod
    def of(cls, sizes: Sizes) -> "PlainDecoder":
        """Returns the decoder for the given sizes."""
        return cls(sizes.embed_dim, sizes.num_classes, sizes.patch, sizes.width)

    def forward(
        self, features: Sequence[Tensor], image: Tensor | None, grid: BoxGrid | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns logits ``b k W D H`` and their box grid, given the token grid ``b e w d h``."""
        return run_cells(self.cells(), features, None, grid)

    def cells(self) -> list[DecoderCell]:
        """Returns one cell per stage; the last one includes the classifier."""
        last = len(self.convs) - 1
        return [
            DecoderCell(
                (f"convs.{stage}.", f"norms.{stage}.", *["classes."] * (stage == last)),
                (0,) * (stage == 0),
                False,
                partial(self._double, stage),
            )
            for stage in range(last + 1)
        ]

    def _double(self, stage: int, value: Value) -> Value:
        x, grid = self.convs[stage](in_fastest_format(value[0]), value[1])
        x, grid = self.norms[stage](x, grid)
        x = F.leaky_relu(x, 0.01)
        if stage == len(self.convs) - 1:
            x, grid = self.classes(x, grid)
        return self.upsamples[stage](x, grid)  # type: ignore[no-any-return]
