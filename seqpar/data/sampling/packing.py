"""Packs a tile as rows of bytes, one per token, owner after owner, so that one message carries image and label.

Legend: b tiles, c channels, n tokens, p voxels of a patch along one direction; ``n/s`` the tokens of one rank.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.data.sampling.tiles import Tile
from seqpar.parallel.layout import Layout


@dataclass(frozen=True)
class Packing:
    """How a row of ``row_bytes`` bytes stores a token's image and label: the image's float32 first."""

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
        return self.image_bytes + -(-self.label_bytes // 4) * 4  # aligned: every row begins at a multiple of 4

    @property
    def tile_bytes(self) -> int:
        return self.layout.num_tokens * self.row_bytes

    def pack(self, tile: Tile, rows: Tensor) -> None:
        """Writes a tile into ``rows`` (n, row_bytes): the first rank's tokens, then the second's, and so on."""
        assert tile.image.shape == (self.channels, *self.layout.tile), (tile.image.shape, self.layout.tile)
        image, label = rows[:, : self.image_bytes], rows[:, self.image_bytes :][:, : self.label_bytes]
        self._write(tile.image, image.view(torch.float32))
        self._write(tile.label[None], label.view(_torch_type(self.label_dtype)))

    def _write(self, whole: np.ndarray, rows: Tensor) -> None:
        """Writes the voxels of each token of c W D H into ``rows`` n (c p p p): one copy for boxes, two for chunks."""
        cells, dims = torch.from_numpy(whole), len(self.layout.patch)
        sides = [side for pair in zip(self.layout.grid, self.layout.patch) for side in pair]
        cells = cells.view(-1, *sides).permute(*range(1, 2 * dims, 2), 0, *range(2, 2 * dims + 1, 2))  # w d h c p p p
        if not self.layout.is_box:
            rows.index_copy_(0, torch.argsort(torch.cat(self.layout.all_ids)), cells.reshape(rows.shape))
            return
        for rank, own in enumerate(rows.split(self.layout.counts)):
            box = cells[tuple(slice(*side) for side in self.layout.box(rank))]
            own.view(box.shape).copy_(box)

    def empty(self, tiles: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns image ``b n c p p p`` and label ``b n p p p`` for ``unpack`` to fill."""
        patch, dtype = self.layout.patch, _torch_type(self.label_dtype)
        image = torch.empty(tiles, tokens, self.channels, *patch, device=device)
        return image, torch.empty(tiles, tokens, *patch, dtype=dtype, device=device)

    def unpack(self, rows: Tensor, image: Tensor, label: Tensor) -> None:
        """Writes rows ``n bytes`` into an image ``n c p p p`` and a label ``n p p p``, on their device."""
        values, classes = rows[:, : self.image_bytes], rows[:, self.image_bytes :][:, : self.label_bytes]
        image.flatten(1).copy_(values.view(torch.float32))
        label.flatten(1).copy_(classes.view(label.dtype))


def _torch_type(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
