"""3D-ResAttNet: residual blocks of convolutions, attention over the voxels of the last feature map, class scores.

The papers about it (Zhang et al.; Akintoye et al.) have no table of its layers. What is built is a reading of them: a
ResNet whose convolutions are of 3x3x3, behind a stem of 7x7x7 and a max-pooling, and attention where tokens are few.

Legend: b batch, c channels, k classes, a heads, f features per head, n voxels of a box, W D H voxels; ``/s`` after the
letter that is spread over the group.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from seqpar.attention.head_exchange import attend_by_head_exchange
from seqpar.decoders.unets.architecture import ONE, Style, Three
from seqpar.decoders.unets.unet_blocks import ConvBlock, activate, init_weights
from seqpar.parallel.layout import Bounds
from seqpar.parallel.mesh import Group
from seqpar.pipeline.cells import CellList, CellNet, Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d
from seqpar.spatial.memory_format import in_fastest_format
from seqpar.spatial.pooling import GlobalMean, MaxPool3d
from seqpar.spatial.receptive_field import sliding_reach

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # of each stage, by the number of layers
FEATURES = 64  # channels of the first stage; each further one has twice as many
NARROW = 8  # values have so many times the channels of queries and keys
HALVINGS = (7, 3, 3, 3, 3)  # kernels of what halves a volume: the stem, its pooling, the stages behind the first
TWO: Three = (2, 2, 2)


class ResAttNet(CellNet):
    """The classifier of ``blocks`` residual blocks a stage; its output are logits ``b k 1 1 1``, the same on all ranks.

    - ``features``: channels of the first stage
    - ``data``: ranks that hold other volumes of the batch, over which batch norm runs too
    - ``peers``: ranks that hold other whole volumes where these are not cut into boxes
    """

    def __init__(
        self,
        in_channels: int,
        num_outputs: int,
        blocks: Sequence[int] = BLOCKS[18],
        features: int = FEATURES,
        data: Group | None = None,
        peers: Group | None = None,
    ) -> None:
        style = Style("batch", activation="relu", bias=False, data=data, peers=peers)
        cells = CellList()
        cells.add("stem", ConvBlock(style, in_channels, features, (7, 7, 7), TWO))
        cells.add("pool", MaxPool3d(3, 2, 1))
        width, ends = features, list[int]()
        for stage, count in enumerate(blocks):
            for number in range(count):
                halves = stage > 0 and number == 0
                block = BasicBlock(style, width, features << stage, TWO if halves else ONE)
                cells.add(f"stage{stage}_{number}", block)
                width = features << stage
            ends.append(cells.last)
        ends[-1] = cells.add("attention", VoxelAttention(width))
        cells.add("classes", ClassScores(width, num_outputs))
        super().__init__(cells.cells, [cells.last])
        self.in_channels = in_channels
        self.stage_ends = tuple(ends)  # the numbers of the cells that end a stage, whose maps can be explained
        init_weights(self, style)

    def forward(self, image: Tensor) -> Tensor:
        """Returns the logits ``b k`` of whole images ``b c W D H``."""
        ((logits, _),) = self.on_boxes(image, None)
        return logits.flatten(1)

    def on_boxes(self, image: Tensor, grid: BoxGrid | None, outputs: Sequence[int] | None = None) -> list[Value]:
        """Returns the logits ``b k 1 1 1`` of this rank's boxes of images, or the outputs of other cells."""
        return self.run(in_fastest_format(image), grid, outputs)


def refuse_cut(edges: Sequence[Bounds]) -> None:
    """Raises ValueError where boxes that are cut so leave a rank without a voxel in the last stage."""
    for cut in edges:
        for kernel in HALVINGS:
            cut = sliding_reach(cut, kernel, 2, (kernel // 2, kernel // 2), "a network that halves five times").edges


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, which is a 1x1x1 convolution where width or resolution change."""

    holds_more = True

    def __init__(self, style: Style, channels: int, width: int, stride: Three) -> None:
        super().__init__()
        self.style = style
        self.first = ConvBlock(style, channels, width, (3, 3, 3), stride)
        self.second = ConvBlock(style, width, width, (3, 3, 3), activates=False)
        changes = channels != width or stride != ONE
        self.shortcut = ConvBlock(style, channels, width, ONE, stride, activates=False) if changes else None

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Value:
        """Returns the block's output and its box grid."""
        y, after = self.second(*self.first(x, grid))
        shortcut, _ = (x, grid) if self.shortcut is None else self.shortcut(x, grid)
        return activate(y + shortcut, self.style), after


class VoxelAttention(nn.Module):
    """Self-attention of all voxels of a volume, added to it times a weight that begins at 0.

    It has one matrix of scores, of queries and keys with an eighth of the channels. As all heads of a kernel are of one
    width, values are taken for eight heads that have the same queries and keys. Keys have no bias: a softmax does not
    see it.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels % NARROW:
            raise ValueError(f"attention over {channels} channels: a multiple of {NARROW} is needed")
        self.query = Conv3d(channels, channels // NARROW, 1)
        self.key = Conv3d(channels, channels // NARROW, 1, bias=False)
        self.value, self.out = Conv3d(channels, channels, 1), Conv3d(channels, channels, 1)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Value:
        """Returns the volume with what its voxels take from all others, and its unchanged box grid."""
        query, key, value = (conv(x, grid)[0].flatten(2) for conv in (self.query, self.key, self.value))
        same = [rearrange(t, "b f n -> b n 1 f").expand(-1, -1, NARROW, -1) for t in (query, key)]
        qkv = torch.stack([*same, rearrange(value, "b (a f) n -> b n a f", a=NARROW)], 2)  # b n/s 3 a f
        group, counts = (Group("self"), [x[0, 0].numel()]) if grid is None else (grid.group, voxels_of_boxes(grid))
        attended = rearrange(attend_by_head_exchange(qkv, group, counts), "b n a f -> b (a f) n").unflatten(
            2, x.shape[2:]
        )
        return x + self.weight * self.out(attended, grid)[0], grid


def voxels_of_boxes(grid: BoxGrid) -> list[int]:
    """Returns how many voxels each rank's box has."""
    sides = [[high - low for low, high in itertools.pairwise(edges)] for edges in grid.edges]
    return [math.prod(box) for box in itertools.product(*sides)]


class ClassScores(nn.Module):
    """Logits ``b k 1 1 1`` of the means over the whole volume, by a matrix."""

    def __init__(self, channels: int, num_outputs: int) -> None:
        super().__init__()
        self.mean, self.linear = GlobalMean(), nn.Linear(channels, num_outputs)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Value:
        """Returns the logits, and None: they are not cut into boxes."""
        mean, _ = self.mean(x, grid)
        return self.linear(mean.flatten(1))[:, :, None, None, None], None
