"""U-Nets on boxes: one configurable network, and those of nnU-Net, Hou et al., DistMIS and LAMP."""

from seqpar.decoders.unets.architecture import Architecture, Style
from seqpar.decoders.unets.nnunet import nnunet
from seqpar.decoders.unets.published import distmis, hou, lamp
from seqpar.decoders.unets.unet import UNet

__all__ = ["Architecture", "Style", "UNet", "distmis", "hou", "lamp", "nnunet"]
