"""3D-ResAttNet: residual blocks of convolutions, attention over the voxels of the last feature map, class scores.

The papers about it (Zhang et al.; Akintoye et al.) have no table of its layers. ``variant`` "text" is what the text of
Akintoye et al. says of it: every convolution block has a kernel of 3x3x3, and every residual layer (two of them) is
followed by self-attention. "few attentions" is a cheaper reading: a ResNet with a 7x7x7 stem, and attention where there
are few tokens. Both take from ResNets what is open: max pooling, four stages, their widths, strides and numbers.

Legend: b batch, c channels, k classes, a heads, f features per head, n voxels of a box, W D H voxels; ``/s`` after the
letter that is split over the group.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn

from seqpar.attention.head_exchange import attend_by_head_exchange
from seqpar.decoders.unets.architecture import ONE, Style, Three, three
from seqpar.decoders.unets.unet_blocks import ConvBlock, activate, init_weights
from seqpar.parallel.layout import Bounds
from seqpar.parallel.mesh import Group
from seqpar.pipeline.cells import CellList, CellNet, Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d
from seqpar.spatial.memory_format import in_fastest_format
from seqpar.spatial.pooling import GlobalMean, MaxPool3d
from seqpar.spatial.receptive_field import sliding_reach

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}  # blocks per stage, by number of layers
FEATURES = 64  # channels of the first stage, doubled at each further one
NARROW = 8  # values have this many times the channels of queries and keys
STEMS = {"few attentions": 7, "text": 3}  # kernels of the first convolution, by variant
HALVINGS = (3, 3, 3, 3)  # kernels of the steps that halve the volume after it: pooling, all stages but the first
TWO: Three = (2, 2, 2)


class ResAttNet(CellNet):
    """The classifier with ``blocks`` residual blocks per stage; returns logits ``b k 1 1 1``, the same on all ranks.

    - ``features``: channels of the first stage
    - ``variant``: a key of ``STEMS``; see the module
    - ``data``: ranks that hold other volumes of the batch, which batch norm includes
    - ``peers``: ranks that hold other whole volumes, if volumes are not split into boxes
    """

    def __init__(
        self,
        in_channels: int,
        num_outputs: int,
        blocks: Sequence[int] = BLOCKS[18],
        features: int = FEATURES,
        data: Group | None = None,
        peers: Group | None = None,
        variant: str = "few attentions",
    ) -> None:
        if variant not in STEMS:
            raise ValueError(f"variant {variant!r}: choose {' or '.join(map(repr, STEMS))}")
        style = Style("batch", activation="relu", bias=False, data=data, peers=peers)
        cells = CellList()
        cells.add("stem", ConvBlock(style, in_channels, features, three(STEMS[variant]), TWO))
        cells.add("pool", MaxPool3d(3, 2, 1))
        width, ends = features, list[int]()
        for stage, count in enumerate(blocks):
            for number in range(count):
                halves = stage > 0 and number == 0
                block = BasicBlock(style, width, features << stage, TWO if halves else ONE)
                cells.add(f"stage{stage}_{number}", block)
                width = features << stage
                if variant == "text":
                    cells.add(f"attention{stage}_{number}", VoxelAttention(width))
            ends.append(cells.last)
        if variant == "few attentions":
            ends[-1] = cells.add("attention", VoxelAttention(width))
        cells.add("classes", ClassScores(width, num_outputs))
        super().__init__(cells.cells, [cells.last])
        self.in_channels = in_channels
        self.stage_ends = tuple(ends)  # the last cell of each stage, whose feature maps can be explained
        init_weights(self, style)

    def forward(self, image: Tensor) -> Tensor:
        """Returns the logits ``b k`` of whole images ``b c W D H``."""
        ((logits, _),) = self.on_boxes(image, None)
        return logits.flatten(1)

    def on_boxes(self, image: Tensor, grid: BoxGrid | None, outputs: Sequence[int] | None = None) -> list[Value]:
        """Returns the logits ``b k 1 1 1`` for this rank's boxes of images, or the outputs of other cells."""
        return self.run(in_fastest_format(image), grid, outputs)


def refuse_cut(edges: Sequence[Bounds], variant: str = "few attentions") -> None:
    """Raises ValueError if boxes cut at ``edges`` leave a rank without a voxel in the last stage."""
    for cut in edges:
        for kernel in (STEMS[variant], *HALVINGS):
            cut = sliding_reach(cut, kernel, 2, (kernel // 2, kernel // 2), "a network that halves five times").edges


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, which is a 1x1x1 convolution if width or resolution change."""

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
    """Self-attention over all voxels of a volume, added to the volume with a learned weight that starts at 0.

    There is one matrix of scores, computed from queries and keys with an eighth of the channels. Because kernels need
    equal head widths, values are split into eight heads that share their queries and keys. Keys have no bias, because
    softmax is invariant to it.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels % NARROW:
            raise ValueError(f"attention over {channels} channels: use a multiple of {NARROW}")
        self.query = Conv3d(channels, channels // NARROW, 1)
        self.key = Conv3d(channels, channels // NARROW, 1, bias=False)
        self.value, self.out = Conv3d(channels, channels, 1), Conv3d(channels, channels, 1)
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Value:
        """Returns the volume plus its weighted attention, and its unchanged box grid."""
        query, key, value = (conv(x, grid)[0].flatten(2) for conv in (self.query, self.key, self.value))
        same = [rearrange(t, "b f n -> b n 1 f").expand(-1, -1, NARROW, -1) for t in (query, key)]
        qkv = torch.stack([*same, rearrange(value, "b (a f) n -> b n a f", a=NARROW)], 2)  # b n/s 3 a f
        group, counts = (Group("self"), [x[0, 0].numel()]) if grid is None else (grid.group, voxels_of_boxes(grid))
        attended = rearrange(attend_by_head_exchange(qkv, group, counts), "b n a f -> b (a f) n").unflatten(
            2, x.shape[2:]
        )
        return x + self.weight * self.out(attended, grid)[0], grid


def voxels_of_boxes(grid: BoxGrid) -> list[int]:
    """Returns the number of voxels of each rank's box."""
    sides = [[high - low for low, high in itertools.pairwise(edges)] for edges in grid.edges]
    return [math.prod(box) for box in itertools.product(*sides)]


class ClassScores(nn.Module):
    """A linear layer on the means over the whole volume; returns logits ``b k 1 1 1``."""

    def __init__(self, channels: int, num_outputs: int) -> None:
        super().__init__()
        self.mean, self.linear = GlobalMean(), nn.Linear(channels, num_outputs)

    def forward(self, x: Tensor, grid: BoxGrid | None = None) -> Value:
        """Returns the logits, and None because they are not split into boxes."""
        mean, _ = self.mean(x, grid)
        return self.linear(mean.flatten(1))[:, :, None, None, None], None
