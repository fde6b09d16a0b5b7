"""Operations on volumes that are split into boxes, one per rank; without a box grid they are torch's own modules.

Each takes ``(x, grid)`` and returns ``(y, grid of y)``, where ``x`` is this rank's box ``b c W D H``, or the whole
volume if ``grid`` is None. Parameters have torch's names and shapes.

- ``Conv3d``, ``ConvTranspose3d``: convolutions, which fetch halos
- ``InstanceNorm3d``, ``BatchNorm3d``, ``GroupNorm``: norms with the statistics of the whole volume
- ``ChannelLayerNorm``: layer norm over the channels of each voxel
- ``NormedActivation``: instance norm, a sum with a shortcut and leaky ReLU in one step
- ``MaxPool3d``, ``AvgPool3d``, ``Upsample``: pooling and upsampling
- ``GlobalMean``: the mean over all voxels of the whole volume
- ``BoxGrid``: where a volume is cut into boxes, and which box each rank holds
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


def __dir__() -> list[str]:
    return __all__
