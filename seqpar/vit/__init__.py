"""The Vision Transformer on this rank's tokens.

- ``SeqParViT``: the encoder, from this rank's voxels to its tokens
- ``PatchEmbed``: voxels to tokens by one matrix
- ``Block``: a transformer block
- ``RotaryPositions``: rotary positions from global coordinates
- ``PatchMerging``: merges 2 x 2 x 2 tokens into one of twice the width
- ``compile_blocks``: compiles the parts of an encoder that send nothing
- ``DropoutKey``: identifies a random draw, so that it is the same on any number of ranks
"""

from seqpar.vit.blocks import Block, compile_blocks
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT
from seqpar.vit.token_merging import PatchMerging
from seqpar.vit.tokens import PatchEmbed, RotaryPositions

__all__ = ["Block", "DropoutKey", "PatchEmbed", "PatchMerging", "RotaryPositions", "SeqParViT", "compile_blocks"]


def __dir__() -> list[str]:
    return __all__
