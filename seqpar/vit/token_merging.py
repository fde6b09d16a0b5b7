"""The stages of an encoder, between which 2 x 2 x 2 tokens become one of twice the width.

Legend: b batch, c channels, n cubes, m tokens of a stage in a cube, e embedding, p voxels of a patch per axis, w d h
cubes per axis; ``n/s`` is this rank's share of the cubes.

A *cube* contains the voxels of one token of the last stage, and ranks hold whole cubes. Merging therefore sends
nothing, however a tile is split. Tokens of a cube are in nested order: those that become one are consecutive at every
stage, so that merging is a view of the tokens and a matrix product.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from seqpar.parallel.half_precision import LayerNorm, Linear
from seqpar.parallel.layout import Bounds, Box, Layout, per_axis


@dataclass(frozen=True)
class EncoderStage:
    """Blocks on tokens of one size.

    - ``blocks``: their numbers in the encoder
    - ``merges``: how often tokens are merged after this stage, until a cube is one token
    """

    number: int
    blocks: range
    embed_dim: int
    num_heads: int
    merges: int

    def layout(self, cubes: Layout) -> Layout:
        """Returns the layout of the stage's tokens, given the layout of the cubes."""
        if self.merges == 0:
            return cubes
        patch = tuple(side >> self.merges for side in cubes.patch)
        key = "stage", self.merges
        return cubes.once(key, lambda: NestedLayout(cubes.tile, patch, cubes.num_ranks, cubes.split, self.merges))


def make_stages(depth: int | Sequence[int], embed_dim: int, num_heads: int) -> tuple[EncoderStage, ...]:
    """Returns the stages of an encoder, each with twice the width and heads of the previous one.

    - ``depth``: number of blocks, or of each stage's blocks
    - ``embed_dim``, ``num_heads``: of the first stage
    """
    depths = per_axis(depth, "depth", 1)
    if not depths or min(depths) < 1:
        raise ValueError(f"depth={depth}: each stage needs at least one block, as in depth=(2, 2, 6)")
    ends = itertools.accumulate(depths)
    return tuple(
        EncoderStage(
            number, range(end - count, end), embed_dim << number, num_heads << number, len(depths) - 1 - number
        )
        for number, (count, end) in enumerate(zip(depths, ends))
    )


def cube_of(patch: int | Sequence[int], axes: int, stages: Sequence[EncoderStage]) -> tuple[int, ...]:
    """Returns the voxels of a cube per axis, given the patch of the first stage."""
    return tuple(side << len(stages) - 1 for side in per_axis(patch, "patch", axes))


@dataclass(frozen=True)
class NestedLayout(Layout):
    """The layout of the tokens inside each rank's cubes, in nested order.

    - ``merges``: how often 2 x 2 x 2 tokens are merged until a cube is one token
    """

    merges: int = 0
    is_nested = True

    @cached_property
    def _cubes(self) -> Layout:
        cube = tuple(side << self.merges for side in self.patch)
        return Layout(self.tile, cube, self.num_ranks, self.split)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        return self._cubes.parts

    @cached_property
    def counts(self) -> tuple[int, ...]:
        return tuple(count << self.merges * len(self.grid) for count in self._cubes.counts)

    @cached_property
    def _boxes(self) -> tuple[Box | None, ...]:
        scaled = self.merges
        return tuple(box and tuple((low << scaled, high << scaled) for low, high in box) for box in self._cubes._boxes)

    @cached_property
    def cuts(self) -> tuple[Bounds, ...] | None:
        return self._cubes.cuts and self._cubes.voxel_cuts(1 << self.merges)

    def coordinates(self, rank: int) -> Tensor:
        inside = nested_places(self.merges, len(self.grid))
        return ((self._cubes.coordinates(rank)[:, None] << self.merges) + inside).flatten(0, 1)

    def token_ids(self, rank: int, device: torch.device | None = None) -> Tensor:
        """Returns the raster numbers of the rank's tokens, in nested order, on the CPU or on ``device``."""
        device = device or torch.device("cpu")
        return self.once(("ids", rank, device), lambda: self._ids_on(rank, device))

    def _ids_on(self, rank: int, device: torch.device) -> Tensor:
        if device.type == "meta":
            return torch.empty(self.counts[rank], dtype=torch.int64, device=device)
        return self._ids_of(rank).to(device)

    @cached_property
    def _ids(self) -> tuple[Tensor, ...]:
        return tuple(map(self._ids_of, range(self.num_ranks)))

    def _ids_of(self, rank: int) -> Tensor:
        strides = [math.prod(self.grid[at + 1 :]) for at in range(len(self.grid))]
        return (self.coordinates(rank) * torch.tensor(strides, device="cpu")).sum(1)


def nested_places(merges: int, directions: int) -> Tensor:
    """Returns the coordinates of a cube's tokens in nested order: one row per token, one column per axis."""
    corners = torch.tensor(list(itertools.product((0, 1), repeat=directions)), device="cpu")
    places = torch.zeros(1, directions, dtype=torch.int64, device="cpu")
    for _ in range(merges):
        places = (2 * places[:, None] + corners).flatten(0, 1)
    return places


def split_cubes(cubes: Tensor, merges: int) -> Tensor:
    """Splits cubes ``b n c P P P`` into patches ``b (n m) c p p p``, those of a cube in nested order."""
    sides = cubes.shape[3:]
    count, step = len(sides), merges + 1
    for at in reversed(range(count)):
        cubes = cubes.unflatten(3 + at, (*[2] * merges, sides[at] >> merges))
    halves = [3 + at * step + level for level in range(merges) for at in range(count)]
    inside = [3 + at * step + merges for at in range(count)]
    return cubes.permute(0, 1, *halves, 2, *inside).flatten(1, 1 + len(halves))


def join_cubes(rows: Tensor, merges: int) -> Tensor:
    """Returns the grid ``b e W D H`` of a stage's tokens, given cubes ``b (m e) w d h`` in nested order."""
    batch, width, *grid = rows.shape
    count = len(grid)
    halves = rows.unflatten(1, (*[2] * (merges * count), width >> merges * count))
    order = [0, 1 + merges * count]
    for at in range(count):
        order += [2 + merges * count + at, *(1 + level * count + at for level in range(merges))]
    return halves.permute(order).reshape(batch, -1, *(side << merges for side in grid))


class PatchMerging(nn.Module):
    """Merges consecutive tokens by a norm and a linear layer, as in Swin.

    - ``embed_dim``: of the input tokens; the output tokens have twice as much
    - ``count``: number of tokens that become one
    """

    def __init__(self, embed_dim: int, count: int, norm_eps: float) -> None:
        super().__init__()
        self.count = count
        self.norm = LayerNorm(count * embed_dim, norm_eps)
        self.reduction = Linear(count * embed_dim, 2 * embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens ``b n/s 2e``, given tokens ``b (n/s m) e``."""
        return self.reduction(self.norm(x.unflatten(1, (-1, self.count)).flatten(2)))  # type: ignore[no-any-return]
