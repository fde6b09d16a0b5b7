"""Voxels to tokens and back to a grid; positions from global coordinates; dropout keyed by global numbers.

Legend: b batch, c channels, n tokens, e embedding, f features per head, p voxels of a patch along a direction,
w d h tokens per direction; ``n/s`` is this rank's share.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.layout import Layout

POSITIONS = ("learned", "sincos", "rope", "learned+rope", "none")
_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


class PatchEmbed(nn.Module):
    """Tokens of this rank's patches; the weight has the shape of the convolution that this is."""

    def __init__(self, in_channels: int, patch: Sequence[int], embed_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_channels * math.prod(patch), embed_dim)
        self.proj.weight = nn.Parameter(self.proj.weight.detach().view(embed_dim, in_channels, *patch))

    def forward(self, part: Tensor) -> Tensor:
        """Returns ``b n/s e`` of ``b n/s c p p p``."""
        if part.shape[2:] != self.proj.weight.shape[1:]:
            wanted = tuple(self.proj.weight.shape[1:])
            raise ValueError(f"a part's patches are {tuple(part.shape[2:])} (channels, voxels), not {wanted}")
        return F.linear(part.flatten(2), self.proj.weight.flatten(1), self.proj.bias)


def learned_positions(table: Tensor, grid: Sequence[int], layout: Layout, rank: int) -> Tensor:
    """Returns ``1 n/s e``: rows of a table made for ``grid``, resized (linearly) where the layout's grid differs."""
    table = resize_positions(table, grid, layout.grid)
    return table.index_select(1, layout.token_ids(rank).to(table.device))


def resize_positions(table: Tensor, grid: Sequence[int], wanted: Sequence[int]) -> Tensor:
    """Returns a table ``1 n e`` of the tokens of ``grid`` as one of the tokens of ``wanted``, linearly."""
    if tuple(grid) == tuple(wanted):
        return table
    image = table.transpose(1, 2).unflatten(2, tuple(grid))  # 1 e w d h
    image = F.interpolate(image, size=tuple(wanted), mode=_MODES[len(grid)], align_corners=False)
    return image.flatten(2).transpose(1, 2)


def sincos_positions(layout: Layout, rank: int, embed_dim: int) -> Tensor:
    """Returns ``1 n/s e`` in float64: sine, then cosine, of each direction in turn; features left over are zero."""
    at = layout.coordinates(rank).double()  # n/s directions
    bands = embed_dim // (2 * at.shape[1])
    angles = at[:, :, None] * _frequencies(bands)
    waves = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
    return F.pad(waves, (0, embed_dim - waves.shape[1]))[None]


def _frequencies(bands: int) -> Tensor:
    return 10000.0 ** (-torch.arange(bands, dtype=torch.float64, device="cpu") / max(bands, 1))


class Rotation:
    """Rotary positions, axial over all directions: each gets an equal share of the rotated features.

    Where the head width is no multiple of twice the directions, the largest multiple is rotated.
    """

    def __init__(self, layout: Layout, rank: int | None, head_dim: int, like: Tensor) -> None:
        """Of the tokens of ``rank``; of all tokens, in the order of ranks, where it is None."""
        ranks = range(layout.num_ranks) if rank is None else [rank]
        at = torch.cat([layout.coordinates(r) for r in ranks]).double()
        bands = head_dim // (2 * at.shape[1])
        if bands == 0:
            raise ValueError(
                f"a head of width {head_dim} is too narrow to rotate in {at.shape[1]} directions: it needs "
                f"{2 * at.shape[1]}; use fewer --heads or other --positions"
            )
        angles = (at[:, :, None] * _frequencies(bands)).flatten(1).repeat_interleave(2, 1)  # n/s rotated
        self.width = angles.shape[1]
        self.cos, self.sin = angles.cos().to(like), angles.sin().to(like)
        self._whole = lambda: self if rank is None else Rotation(layout, None, head_dim, like)

    @cached_property
    def whole(self) -> "Rotation":
        """The same of all tokens, in the order of ranks."""
        return self._whole()

    def __call__(self, x: Tensor, back: bool = False) -> Tensor:
        """Returns ``b a n/s f`` with neighbouring pairs of features turned by their token's angle, or back by it."""
        turned, rest = x[..., : self.width], x[..., self.width :]
        pairs = turned.unflatten(-1, (-1, 2))
        crossed = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.cat([turned * cos + crossed * (-sin if back else sin), rest], -1)


def to_grid(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """Returns ``b e w d h`` of a box's tokens ``b n e`` in raster order."""
    return tokens.transpose(1, 2).unflatten(2, tuple(grid))
