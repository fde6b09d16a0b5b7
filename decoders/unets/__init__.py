"""U-Nets on boxes: one configurable network, and those of nnU-Net, Hou et al., DistMIS, LAMP and MedNeXt."""

from seqpar.decoders.unets.architecture import Architecture, Style
from seqpar.decoders.unets.nnunet import nnunet
from seqpar.decoders.unets.published import distmis, hou, lamp, mednext
from seqpar.decoders.unets.unet import UNet

__all__ = ["Architecture", "Style", "UNet", "distmis", "hou", "lamp", "mednext", "nnunet"]
