"""Packs a tile as rows of bytes, one per token, owner after owner, so that one message carries image and label.

Legend: b tiles, c channels, n tokens, p voxels of a patch along one direction; ``n/s`` the tokens of one rank.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from seqpar.data.sampling.tiles import Tile
from seqpar.layout import Layout


@dataclass(frozen=True)
class Packing:
    """How image and label of a token lie in a row of ``row_bytes`` bytes: the image's float32 first."""

    layout: Layout
    channels: int
    label_dtype: np.dtype[Any]

    @property
    def image_bytes(self) -> int:
        return 4 * self.channels * math.prod(self.layout.patch)

    @property
    def label_bytes(self) -> int:
        return self.label_dtype.itemsize * math.prod(self.layout.patch)

    @property
    def row_bytes(self) -> int:
        return self.image_bytes + -(-self.label_bytes // 4) * 4  # aligned: every row starts at a multiple of 4

    @property
    def tile_bytes(self) -> int:
        return self.layout.num_tokens * self.row_bytes

    def pack(self, tile: Tile, rows: Tensor) -> None:
        """Writes a tile into ``rows`` (n, row_bytes): the first rank's tokens, then the second's, and so on."""
        assert tile.image.shape == (self.channels, *self.layout.tile), (tile.image.shape, self.layout.tile)
        at = torch.argsort(torch.cat(self.layout.all_ids))  # each token's row
        image, label = rows[:, : self.image_bytes], rows[:, self.image_bytes :][:, : self.label_bytes]
        image.view(torch.float32).index_copy_(0, at, self._cells(tile.image))
        label.index_copy_(0, at, self._cells(tile.label[None]).view(torch.uint8))

    def _cells(self, whole: np.ndarray) -> Tensor:
        """Returns the voxels of each token, n (c p p p), of c W D H: one copy, where layout's would be two."""
        names = "wdh"[: len(self.layout.patch)]
        tokens, voxels = " ".join(names), " ".join(f"p{name}" for name in names)
        sides = " ".join(f"({name} p{name})" for name in names)  # c (w pw) (d pd) (h ph) -> (w d h) (c pw pd ph)
        patch = {f"p{name}": side for name, side in zip(names, self.layout.patch)}
        return rearrange(torch.from_numpy(whole), f"c {sides} -> ({tokens}) (c {voxels})", **patch)

    def unpack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns image ``b n/s c p p p`` and label ``b n/s p p p`` of rows ``b n/s bytes``, on their device."""
        lead, patch = rows.shape[:2], self.layout.patch
        image = rows[..., : self.image_bytes].contiguous().view(torch.float32)
        label = rows[..., self.image_bytes :][..., : self.label_bytes].contiguous().view(_torch_type(self.label_dtype))
        return image.view(*lead, self.channels, *patch), label.view(*lead, *patch)


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
