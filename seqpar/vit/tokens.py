"""Converts voxels to tokens and back to a grid, and computes positions from global coordinates.

Legend: b batch, c channels, n tokens, e embedding, a heads, f features per head, p voxels of a patch per axis, w d h
tokens per axis; ``n/s`` is this rank's share of the tokens.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from seqpar.parallel.half_precision import Linear, linear
from seqpar.parallel.layout import Layout

POSITIONS = ("learned", "sincos", "rope", "learned+rope", "none")
_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


class PatchEmbed(nn.Module):
    """Patch embedding as a linear layer; its weight has the shape of the equivalent strided convolution's."""

    def __init__(self, in_channels: int, patch: Sequence[int], embed_dim: int) -> None:
        super().__init__()
        self.proj = Linear(in_channels * math.prod(patch), embed_dim)
        self.proj.weight = nn.Parameter(self.proj.weight.detach().view(embed_dim, in_channels, *patch))

    def forward(self, part: Tensor, layout: Layout | None = None) -> Tensor:
        """Returns the tokens ``b n/s e`` of a part ``b n/s c p p p``; each by itself, whatever their layout."""
        if part.shape[2:] != self.proj.weight.shape[1:]:
            needed = tuple(self.proj.weight.shape[1:])
            raise ValueError(f"expected patches of shape {needed} (channels, voxels), got {tuple(part.shape[2:])}")
        return linear(rearrange(part, "b n ... -> b n (...)"), self.proj.weight, self.proj.bias)


def learned_positions(table: Tensor, grid: Sequence[int], layout: Layout, rank: int) -> Tensor:
    """Returns this rank's rows ``1 n/s e`` of a table of positions.

    - ``table``: ``1 n e``, for all tokens of ``grid`` in raster order; resized if the layout has another grid
    """
    table = resize_positions(table, grid, layout.grid)
    is_in_order = layout.num_ranks == 1 and not layout.is_nested
    return table if is_in_order else table.index_select(1, layout.token_ids(rank, table.device))


def resize_positions(table: Tensor, grid: Sequence[int], new_grid: Sequence[int]) -> Tensor:
    """Interpolates a table of positions ``1 n e`` linearly from the tokens of ``grid`` to those of ``new_grid``."""
    if tuple(grid) == tuple(new_grid):
        return table
    image = F.interpolate(to_grid(table, grid), size=tuple(new_grid), mode=_MODES[len(grid)], align_corners=False)
    return rearrange(image, "b e ... -> b (...) e")


def sincos_positions(layout: Layout, rank: int, embed_dim: int, like: Tensor) -> Tensor:
    """Returns ``1 n/s e``: sines, then cosines, of each axis in turn; remaining features are zero.

    - ``like``: a tensor that gives their precision and device
    """
    if like.is_meta:  # no data, because millions of tokens would take gigabytes
        return like.new_empty(1, layout.counts[rank], embed_dim)
    coordinates = layout.coordinates(rank).double()  # n/s axes
    bands = embed_dim // (2 * coordinates.shape[1])
    angles = coordinates[:, :, None] * _frequencies(bands)  # n/s axes bands
    waves = rearrange(torch.stack([angles.sin(), angles.cos()], 2), "n direction wave band -> n (direction wave band)")
    return F.pad(waves, (0, embed_dim - waves.shape[1]))[None].to(like)


def _frequencies(bands: int) -> Tensor:
    return 10000.0 ** (-torch.arange(bands, dtype=torch.float64, device="cpu") / max(bands, 1))


class RotaryPositions:
    """Axial rotary positions: each axis rotates an equal share of a head's features.

    If the head width is not a multiple of twice the number of axes, the largest such multiple is rotated.
    """

    def __init__(self, layout: Layout, rank: int | None, head_dim: int, like: Tensor) -> None:
        """Computes the sines and cosines of a rank's tokens.

        - ``rank``: None for all tokens, in rank order
        - ``like``: a tensor that gives their precision and device
        """
        ranks, axes = range(layout.num_ranks) if rank is None else [rank], len(layout.grid)
        bands = head_dim // (2 * axes)
        if bands == 0:
            raise ValueError(
                f"a head of width {head_dim} is too narrow to rotate along {axes} axes: it needs at least "
                f"{2 * axes}; use a smaller `num_heads` or other `positions`"
            )
        self.width = 2 * bands * axes
        if like.is_meta:  # no data, because millions of tokens would take gigabytes
            shape = sum(layout.counts[r] for r in ranks), self.width
            self._tables = {like.dtype: (like.new_empty(shape), like.new_empty(shape))}
        else:
            coordinates = torch.cat([layout.coordinates(r) for r in ranks]).double()  # n/s axes
            angles = (coordinates[:, :, None] * _frequencies(bands)).flatten(1)  # n/s pairs
            cos, sin = angles.cos().repeat_interleave(2, 1), torch.stack([-angles.sin(), angles.sin()], 2).flatten(1)
            self._tables = {like.dtype: (cos.to(like), sin.to(like))}  # of each feature
        self._like = like.new_empty(0)  # so that this object keeps neither ``like`` nor the layout alive
        self._make_whole: Callable[[Tensor], RotaryPositions] | None = None
        if rank is not None:
            self._make_whole = partial(RotaryPositions, replace(layout), None, head_dim)

    @classmethod
    def of(cls, layout: Layout, rank: int, head_dim: int, like: Tensor) -> "RotaryPositions":
        """Returns the positions of a rank's tokens, cached by the layout per precision and device."""
        key = "rotary", rank, head_dim, like.dtype, like.device
        return layout.once(key, lambda: cls(layout, rank, head_dim, like))

    @cached_property
    def whole(self) -> "RotaryPositions":
        """The positions of all tokens, in rank order."""
        assert self._make_whole is not None, "these are the positions of all tokens already"
        return self._make_whole(self._like)

    def chosen(self, rows: Tensor, whole_rows: Tensor) -> "RotaryPositions":
        """Returns the positions of tokens that differ between samples.

        - ``rows``: positions of this rank's tokens ``b n/s`` among all tokens in rank order
        - ``whole_rows``: those of all ranks' tokens, ``b n``
        """
        every = self if self._make_whole is None else self.whole
        cos, sin = every._tables[self._like.dtype]
        result = copy(every)
        result._tables = {cos.dtype: (cos[rows][:, None], sin[rows][:, None])}  # b 1 n/s f: for all heads
        result._make_whole = lambda _: every.chosen(whole_rows, whole_rows)
        return result

    def __call__(self, x: Tensor, back: bool = False) -> Tensor:
        """Returns ``... n/s f`` with neighbouring pairs of features rotated by their token's angles.

        - ``back``: rotate by the opposite angles, which is the adjoint
        """
        result = x.clone()
        self.rotate_(result, back)
        return result

    def rotate_(self, x: Tensor, back: bool = False) -> None:
        """Rotates ``... n/s f`` in place, in three passes."""
        cos, sin = self._in_type(x.dtype)
        turned = x[..., : self.width]
        swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        turned.mul_(cos).addcmul_(swapped, sin, value=-1 if back else 1)

    def _in_type(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and signed sines ``n/s f`` (or ``b 1 n/s f``) in a precision, cached."""
        if dtype not in self._tables:
            cos, sin = self._tables[self._like.dtype]
            self._tables[dtype] = cos.to(dtype), sin.to(dtype)
        return self._tables[dtype]


def to_grid(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """Returns a box's tokens ``b n e``, in raster order, as a grid ``b e w d h``."""
    return rearrange(tokens, "b n e -> b e n").unflatten(2, tuple(grid))  # grids have two or three axes
