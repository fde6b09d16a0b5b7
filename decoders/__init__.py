"""Convolutional networks on boxes: decoders, U-Nets, and the modes that bring tokens to decoders.

- ``PlainDecoder``: convolutions and upsampling from the tokens to classes, without skips
- ``UnetrDecoder``: UNETR's decoder, with skips from the image and from middle blocks
- ``PrimusDecoder``: the transposed convolutions of Primus
- ``PyramidDecoder``: a decoder for the stages of an encoder whose tokens merge
- ``choose_mode``: returns the mode of a name: gather, halo, swap, auto or nogather
- ``Mode``: what a mode is: how features, image and label come to the ranks that decode them
- ``UNet``: the U-Net of an ``Architecture``
- ``Architecture``: a U-Net as numbers and names
- ``nnunet``: returns nnU-Net's network as planned for a tile
- ``mednext``: returns MedNeXt of a size
"""

from seqpar.decoders.modes.mode import Mode
from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.decoders.primus import PrimusDecoder
from seqpar.decoders.pyramid import PyramidDecoder
from seqpar.decoders.unetr import UnetrDecoder
from seqpar.decoders.unets import Architecture, UNet, mednext, nnunet

__all__ = [
    "Architecture",
    "Mode",
    "PlainDecoder",
    "PrimusDecoder",
    "PyramidDecoder",
    "UNet",
    "UnetrDecoder",
    "choose_mode",
    "mednext",
    "nnunet",
]


def __dir__() -> list[str]:
    return __all__
