"""Operations on volumes that are cut into boxes, one per rank: torch's own modules where there is no box grid.

Each takes ``(x, grid)`` and returns ``(y, grid of y)``: ``x`` is this rank's box ``b c W D H``, or the whole volume
where ``grid`` is None. Parameters have torch's names and shapes.
"""

from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d, ConvTranspose3d
from seqpar.spatial.norm_activation import NormedActivation
from seqpar.spatial.norms import BatchNorm3d, ChannelLayerNorm, GroupNorm, InstanceNorm3d
from seqpar.spatial.pooling import AvgPool3d, GlobalMean, MaxPool3d, Upsample

__all__ = [
    "AvgPool3d",
    "BatchNorm3d",
    "BoxGrid",
    "ChannelLayerNorm",
    "Conv3d",
    "ConvTranspose3d",
    "GlobalMean",
    "GroupNorm",
    "InstanceNorm3d",
    "MaxPool3d",
    "NormedActivation",
    "Upsample",
]
