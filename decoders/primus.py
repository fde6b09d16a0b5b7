"""Primus's decoder: each token is upsampled to its voxels by itself, so that ranks exchange nothing.

Legend: b batch, e embedding, k classes, w d h tokens, W D H voxels.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.decoders.levels import num_doublings
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

    - ``embed_dim``: of the tokens
    - ``num_classes``: channels of the logits
    - ``patch``: voxels of a token along each direction
    """

    uses_image = False
    num_features = 1
    taps = ()

    def __init__(self, embed_dim: int, num_classes: int, patch: Sequence[int]) -> None:
        super().__init__()
        stages = num_doublings(patch)
        widths = [embed_dim, *primus_widths(embed_dim, num_classes, stages)]
        self.ups = nn.ModuleList(ConvTranspose3d(c, w, 2, stride=2) for c, w in zip(widths, widths[1:]))
        self.norms = nn.ModuleList(ChannelLayerNorm(width, eps=1e-6) for width in widths[1:])
        self.classes = ConvTranspose3d(widths[-1], num_classes, 2, stride=2)

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
