"""Primus's decoder: each token is upsampled to its voxels by itself, so that ranks exchange nothing.

Legend: b batch, e embedding, k classes, w d h tokens, W D H voxels.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.decoders.levels import strides
from seqpar.decoders.sizes import Sizes
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import ConvTranspose3d
from seqpar.spatial.norms import ChannelLayerNorm


def primus_widths(embed_dim: int, num_classes: int, stages: int) -> list[int]:
    """Returns the channels between the stages: they fall geometrically from the embedding, in multiples of 8."""
    ratio = (embed_dim / (2 * num_classes)) ** (1 / stages)
    return [max(8, 8 * round((embed_dim / ratio**stage + 1e-6) / 8)) for stage in range(1, stages)]


class PrimusDecoder(nn.Module):
    """log2(patch) transposed convolutions of kernel and stride 2, norm over channels and GELU between them.

    Where the patch is no cube, a direction of log2(p) doublings has them in the last stages, as in Primus.

    - ``embed_dim``: of the tokens
    - ``num_classes``: channels of the logits
    - ``patch``: voxels of a token along each direction
    """

    uses_image = False
    num_features = 1
    taps = ()

    def __init__(self, embed_dim: int, num_classes: int, patch: Sequence[int]) -> None:
        super().__init__()
        *stages, last = strides(patch, short_first=False)
        widths = [embed_dim, *primus_widths(embed_dim, num_classes, len(stages) + 1)]
        self.ups = nn.ModuleList(ConvTranspose3d(c, w, s, stride=s) for c, w, s in zip(widths, widths[1:], stages))
        self.norms = nn.ModuleList(ChannelLayerNorm(width, eps=1e-6) for width in widths[1:])
        self.classes = ConvTranspose3d(widths[-1], num_classes, last, stride=last)

    @classmethod
    def of(cls, sizes: Sizes) -> "PrimusDecoder":
        """Returns the decoder of a run's sizes; it finds its width itself."""
        return cls(sizes.embed_dim, sizes.num_classes, sizes.patch)

    def forward(
        self, features: Sequence[Tensor], image: Tensor | None, grid: BoxGrid | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns logits ``b k W D H`` of the token grid ``b e w d h``, and their box grid."""
        (x,) = features
        for up, norm in zip(self.ups, self.norms):
            x, grid = norm(*up(x, grid))
            x = F.gelu(x)
        return self.classes(x, grid)  # type: ignore[no-any-return]
