"""Norms with statistics of the whole volume where it is spread over a group; without a spread they are torch's own."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.decoders.spread import Spread
from seqpar.mesh import Group


class InstanceNorm3d(nn.InstanceNorm3d):
    """Instance norm; statistics over all voxels of the whole volume, for each sample and channel."""

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged spread."""
        if spread is None:
            return super().forward(x), None
        raise NotImplementedError


class BatchNorm3d(nn.BatchNorm3d):
    """Batch norm; statistics over all voxels and samples, and over ``data``'s ranks where one is given."""

    def __init__(self, num_features: int, *options: Any, data: Group | None = None, **more: Any) -> None:
        super().__init__(num_features, *options, **more)
        self.data = data

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged spread."""
        if spread is None and self.data is None:
            return super().forward(x), None
        raise NotImplementedError


class GroupNorm(nn.GroupNorm):
    """Group norm; statistics over all voxels and each group's channels."""

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged spread."""
        if spread is None:
            return super().forward(x), None
        raise NotImplementedError


class ChannelLayerNorm(nn.LayerNorm):
    """Layer norm over the channels of ``b c W D H``: local to a voxel."""

    def forward(self, x: Tensor, spread: Spread | None = None) -> tuple[Tensor, Spread | None]:  # type: ignore[override]
        """Returns the normed volume and its unchanged spread."""
        last = x.movedim(1, -1)
        return F.layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps).movedim(-1, 1), spread
