"""Small networks and volumes for tests of sliding windows and whole passes."""

import torch
from torch import Tensor

from seqpar.decoders.modes.named_modes import choose_mode
from seqpar.decoders.plain import PlainDecoder
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.sliding_window import join_rows
from seqpar.vit.encoder import SeqParViT

CLASSES, CHANNELS, TILE = 3, 2, (8, 12, 8)


def build(mesh: Mesh, mode: str = "gather", split: str = "spatial", seed: int = 0) -> SegmentationNet:
    torch.manual_seed(seed)
    encoder = SeqParViT(CHANNELS, TILE, 4, embed_dim=12, depth=1, num_heads=2, group=mesh.seq, split=split)
    decoder = PlainDecoder(12, CLASSES, encoder.layout.patch, width=4)
    return SegmentationNet(encoder, decoder, choose_mode(mode, mesh.seq)).double().eval()


def volume(*shape: int) -> Tensor:
    return torch.randn(CHANNELS, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def joined(slabs, mesh: Mesh) -> Tensor:
    return torch.cat([join_rows(slab.logits, slab.bounds, mesh, 1) for slab in slabs], 1)


SHAPES = [(8, 12, 8), (19, 23, 13), (9, 5, 20), (2, 30, 7), (1, 13, 11), (40, 2, 9)]
