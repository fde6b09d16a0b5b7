"""UNETR's decoder: skips from the image and from middle blocks of the encoder, each upsampled to its level.

Legend: b batch, c channels, e embedding, k classes, w d h tokens, W D H voxels. The longest side of a patch is 2^L
voxels; a point of level l covers 2^l of them: level L is the token grid's, level 0 the image's. An image of two
dimensions is decoded as a volume of one slice, with kernels of 3x3x1.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seqpar.decoders.decoder import DecoderCell, Sizes, Stride, run_cells, strides
from seqpar.parallel.layout import per_axis, refuse_no_count
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d, ConvTranspose3d
from seqpar.spatial.memory_format import in_fastest_format
from seqpar.spatial.norm_activation import BatchNormedActivation, NormedActivation

SKIPS = ("monai", "paper")
NORMS = ("instance", "batch")


def skip_blocks(depth: int, patch: int | Sequence[int], skips: str = "monai") -> tuple[int, ...]:
    """Returns the blocks, counted from 0, whose outputs the decoder takes as skips, the finest level first.

    ``paper``: after each L-th of the depth, rounded up (z3, z6, z9 for 12 blocks and patch 16). ``monai``: one block
    later, as in MONAI's UNETR, so that its weights can be loaded.
    """
    if skips not in SKIPS:
        raise ValueError(f"skips={skips!r}: choose {' or '.join(SKIPS)}")
    levels = len(_stages(patch))
    ends = [
        -(-depth * level // levels) for level in range(1, levels)
    ]  # number of blocks before each skip, at least one
    return tuple(end - 1 if skips == "paper" else min(end, depth - 1) for end in ends)


def _stages(patch: int | Sequence[int]) -> tuple[Stride, ...]:
    """Returns the stages of a patch of two or three dimensions; the only slice of a plane is never doubled."""
    sides = per_axis(patch, "patch")
    return strides((*sides, 1) if len(sides) == 2 else sides)


class BlockStyle(NamedTuple):
    """What blocks are made of: instance or batch norm, with a shortcut (``residual``) or without, and the kernels."""

    norm: str = "instance"
    residual: bool = True
    kernel: tuple[int, int, int] = (3, 3, 3)


USUAL = BlockStyle()


class ResBlock(nn.Module):
    """Two convolutions with a norm each, and a shortcut, which is a convolution if the widths differ.

    A convolution whose input is kept anyway, by the shortcut or the activation, keeps no copy with halos.
    """

    def __init__(self, channels: int, width: int, style: BlockStyle = USUAL) -> None:
        super().__init__()
        self.residual = style.residual
        widens = self.residual and channels != width
        kernel, padding = style.kernel, tuple(side // 2 for side in style.kernel)
        self.conv1 = Conv3d(channels, width, kernel, padding=padding, bias=False, keep_window=not widens)
        self.conv2 = Conv3d(width, width, kernel, padding=padding, bias=False, keep_window=False)
        self.conv3 = Conv3d(channels, width, 1, bias=False) if widens else None
        make = partial(BatchNormedActivation, width) if style.norm == "batch" else NormedActivation
        self.activate1, self.activate2 = make(), make(norm_other=widens)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:
        """Returns the block's output and its unchanged box grid."""
        y, _ = self.activate1(*self.conv1(x, grid))
        y, _ = self.conv2(y, grid)
        if self.conv3 is not None:
            x, _ = self.conv3(x, grid)
        return self.activate2(y, grid, x if self.residual else None)  # type: ignore[no-any-return]


class Branch(nn.Module):
    """A skip: the tokens of a middle block, upsampled by one or more levels."""

    def __init__(self, embed_dim: int, width: int, stages: Sequence[Stride], style: BlockStyle) -> None:
        super().__init__()
        first, *later = stages
        self.first = ConvTranspose3d(embed_dim, width, first, stride=first, bias=False)
        self.ups = nn.ModuleList(ConvTranspose3d(width, width, s, stride=s, bias=False) for s in later)
        self.blocks = nn.ModuleList(ResBlock(width, width, style) for _ in later)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:
        """Returns the skip of a token grid ``b e w d h``, and its box grid."""
        x, grid = self.first(x, grid)
        for up, block in zip(self.ups, self.blocks):
            x, grid = block(*up(x, grid))
        return x, grid


class Stage(nn.Module):
    """Upsamples by one level and, if ``joins`` is set, concatenates that level's skip."""

    def __init__(
        self, channels: int, width: int, stride: Stride, joins: bool = True, style: BlockStyle = USUAL
    ) -> None:
        super().__init__()
        self.up = ConvTranspose3d(channels, width, stride, stride=stride, bias=False)
        self.block = ResBlock(2 * width if joins else width, width, style)

    def forward(self, x: Tensor, skip: Tensor | None, grid: BoxGrid | None = None) -> tuple[Tensor, BoxGrid | None]:
        """Returns the finer level's volume and its box grid."""
        x, grid = self.up(x, grid)
        return self.block(x if skip is None else torch.cat([x, skip], 1), grid)


class UnetrDecoder(nn.Module):
    """UNETR's decoder for any patch whose sides are powers of 2; for 16 its weights are interchangeable with MONAI's.

    It takes the token grids of the blocks ``skip_blocks(depth, patch)`` and of the last tokens.

    Args:
        ``in_channels``: number of image channels.
        ``embed_dim``: embedding dimension of the tokens.
        ``num_classes``: number of channels of the logits.
        ``patch``: voxels of a token, one number or one per axis; two numbers decode images of two dimensions.
        ``width``: number of channels at full resolution, doubled at each coarser level.
        ``norm``: of the blocks, ``"instance"`` or ``"batch"``.
        ``residual``: whether blocks have a shortcut.
    """

    uses_image = True
    taps: tuple[int, ...] = ()  # the blocks that it takes; `of` sets them from the encoder's depth

    def __init__(
        self,
        in_channels: int,
        embed_dim: int,
        num_classes: int,
        patch: int | Sequence[int],
        width: int = 16,
        norm: str = "instance",
        residual: bool = True,
    ) -> None:
        super().__init__()
        refuse_no_count(in_channels=in_channels, embed_dim=embed_dim, num_classes=num_classes, width=width)
        if norm not in NORMS:
            raise ValueError(f"norm={norm!r}: choose {' or '.join(map(repr, NORMS))}")
        self.patch, stages = per_axis(patch, "patch"), _stages(patch)
        kernel = (3, 3, 1) if len(self.patch) == 2 else (3, 3, 3)
        style = self.style = BlockStyle(norm, residual, kernel)
        levels = self.num_features = len(stages)
        widths = [width << level for level in range(levels)]
        self.stem = ResBlock(in_channels, width, style)
        self.branches = nn.ModuleList(
            Branch(embed_dim, widths[level], stages[: levels - level], style) for level in range(1, levels)
        )
        inputs = [*widths[1:], embed_dim]
        self.stages = nn.ModuleList(
            Stage(inputs[level], widths[level], stride, style=style)
            for level, stride in zip(reversed(range(levels)), stages)
        )
        self.classes = Conv3d(width, num_classes, 1)

    @classmethod
    def of(cls, sizes: Sizes) -> "UnetrDecoder":
        """Returns the decoder for the given sizes."""
        decoder = cls(sizes.in_channels, sizes.embed_dim, sizes.num_classes, sizes.patch, sizes.width)
        decoder.taps = skip_blocks(sizes.depth, sizes.patch, sizes.skips)
        return decoder

    def forward(
        self, features: Sequence[Tensor], image: Tensor | None, grid: BoxGrid | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns logits ``b k W D H`` and their box grid; of a plane, ``b k W D``.

        - ``features``: token grids ``b e w d h``: the skips, the finest first, then the last tokens
        - ``image``: ``b c W D H``
        """
        return run_cells(self.cells(), features, image, grid, self.patch)

    def cells(self) -> list[DecoderCell]:
        """Returns one cell per level, which includes the level's skip, and the classifier."""
        cells = list[DecoderCell]()
        for level, name in zip(reversed(range(self.num_features)), map(str, range(self.num_features))):
            owns = (f"stages.{name}.", f"branches.{level - 1}." if level else "stem.")
            features = (self.num_features - 1,) * (not cells) + (level - 1,) * (level > 0)
            cells.append(DecoderCell(owns, features, level == 0, partial(self._join, level)))
        cells.append(DecoderCell(("classes.",), (), False, self._classify))
        return cells

    def _join(self, level: int, value: Value, skip: Value) -> Value:
        """Returns a level's volume, given the coarser one and the input of the level's skip."""
        (x, grid), (other, other_grid) = _as_volume(value), _as_volume(skip)
        branch = self.branches[level - 1] if level else self.stem
        other, _ = branch(in_fastest_format(other), other_grid)
        return self.stages[self.num_features - 1 - level](in_fastest_format(x), other, grid)  # type: ignore

    def _classify(self, value: Value) -> Value:
        logits, grid = self.classes(*value)
        if len(self.patch) == 3:
            return logits, grid
        return logits[..., 0], grid and BoxGrid(grid.edges[:-1], grid.group)


def _as_volume(value: Value) -> Value:
    """Returns a plane ``b c W D`` and its boxes as a volume of one slice; a volume unchanged."""
    x, grid = value
    return value if x.ndim == 5 else (x[..., None], grid and BoxGrid((*grid.edges, (0, 1)), grid.group))
