"""A 3D U-Net on boxes, as a list of cells; in one process, a plain module.

Legend: b batch, c channels, k classes, W D H voxels.
"""

from torch import Tensor, nn

from seqpar.decoders.unets.architecture import ONE, Architecture, Three
from seqpar.decoders.unets.unet_blocks import ConvBlock, MedNeXtBlock, ResidualBlock, SqueezeExcite, Up, init_weights
from seqpar.losses.tile_network import BoxNetwork
from seqpar.parallel.layout import Layout, plain_tensor
from seqpar.parallel.mesh import AnyGroup, Group, as_group
from seqpar.pipeline.cells import CellList, CellNet, Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d
from seqpar.spatial.memory_format import in_fastest_format
from seqpar.spatial.pooling import MaxPool3d
from seqpar.vit.dropout import DropoutKey


class UNet(CellNet, BoxNetwork):
    """The U-Net of an architecture.

    ``nnunet``, ``hou``, ``distmis``, ``lamp`` and ``mednext`` of ``seqpar.decoders`` make it with a published
    architecture. Train it as a ``ParallelModel``, or call ``loss``, ``on_whole``, ``shard`` and ``unshard``, which all
    networks have.

    - ``architecture``: its stages and the style of its layers, such as ``seqpar.decoders.Architecture.of(1, 3, (32, 64,
      128))`` of 1 channel, 3 outputs and 3 stages
    - ``supervised``: number of levels whose logits are trained, starting with the finest. Heads of other levels exist,
      so that the weights have all their names, but are frozen and do not run
    - ``group``: the ranks that share an image: ``mesh.seq``, torch's ``ProcessGroup``, or a one-dimensional
      ``DeviceMesh``; None: images are whole, or come with their grid
    """

    def __init__(self, architecture: Architecture, supervised: int = 1, group: AnyGroup | None = None) -> None:
        if not isinstance(architecture, Architecture):
            raise ValueError(
                f"architecture={architecture!r}: give numbers of channels, as seqpar.decoders.Architecture.of(1, 3, "
                "(32, 64, 128)) for 1 channel, 3 outputs and 3 stages"
            )
        if not 1 <= supervised <= architecture.heads:
            raise ValueError(f"supervised={supervised}: the network can supervise 1 to {architecture.heads} levels")
        cells = CellList()
        if architecture.block == "mednext":
            heads = _add_mednext(cells, architecture)
        else:
            heads = _add_decoder(cells, architecture, _add_encoder(cells, architecture))
        super().__init__(cells.cells, heads[:supervised])
        self.architecture, self.group = architecture, as_group(group)
        init_weights(self, architecture.style)
        for number in heads[supervised:]:
            self.cells[self.names[number]].requires_grad_(False)

    def forward(self, image: Tensor, grid: BoxGrid | None = None) -> Tensor | list[Tensor]:
        """Returns the logits ``b k W D H`` of an image ``b c W D H``, or of this rank's box of it.

        In training with deep supervision, returns a list: the logits of each supervised level, the finest first.

        - ``grid``: the boxes of the image, such as ``BoxGrid(layout.voxel_cuts(layout.patch), group)``; that of what
            ``shard`` returned is known
        """
        if grid is None and self.group.size > 1:
            grid = self._seen.grids.get(image)
        if grid is None and self.group.size > 1:
            raise ValueError(
                f"an image of shape {tuple(image.shape)} came without its grid, but this network was built for boxes "
                f"on the {self.group}: give net.shard(whole), or grid=, or build it without group= for whole images"
            )
        if self.group.size > 1:
            self._meet_peers(image)
        logits = [x if at is None else self._output(x, at) for x, at in self.on_boxes(plain_tensor(image), grid)]
        return logits if self.training and len(logits) > 1 else logits[0]

    def on_boxes(self, image: Tensor, grid: BoxGrid | None, key: DropoutKey | None = None) -> list[Value]:
        """Returns logits for this rank's box of an image: of all supervised levels in training, else of the finest.

        - ``key``: what dropout draws by; None: nothing is dropped
        """
        self.architecture.refuse_extents(image.shape[2:] if grid is None else grid.extents)
        if grid is not None:
            self.architecture.refuse_cut(grid.edges)
        outputs = self.outputs if self.training else self.outputs[:1]
        return self.run(in_fastest_format(image), grid, outputs, key)

    def group_and_dims(self) -> tuple[Group, int]:
        return self.group, 3

    def _cut(self, extents: tuple[int, ...]) -> BoxGrid:
        unit = self.architecture.unit
        return BoxGrid(Layout.of(extents, unit, self.group.size).voxel_cuts(unit), self.group)

    @property
    def output_scales(self) -> tuple[Three, ...]:
        """Voxels per point of each supervised level's logits."""
        return (ONE, *self.architecture.scales[1 : len(self.outputs)])


def _add_encoder(cells: CellList, a: Architecture) -> list[int]:
    """Adds the way down; returns the number of each stage's last cell."""
    channels, ends = a.in_channels, list[int]()
    if a.stem:
        cells.add("stem", ConvBlock(a.style, channels, a.stem, a.first_kernel or a.kernels[0]))
        channels = a.stem
    stages = zip(a.features, a.kernels, a.strides, a.encoder, a.scales)
    for stage, (width, kernel, stride, count, scale) in enumerate(stages):
        pools = a.down == "max" and max(stride) > 1
        if pools:
            cells.add(f"pool{stage}", MaxPool3d(stride))
            stride = ONE
        for number in range(count):
            first = (channels, stride) if number == 0 else (width, ONE)
            name = f"encoder{stage}_{number}"
            if a.block == "plain":
                bare, takes_image = a.bare_last and number == count - 1 > 0, not (ends or number or a.stem)
                own = a.first_kernel or kernel if takes_image else kernel
                keeps = pools and number == 0 or None
                cells.add(name, _conv(a, *first, width, own, scale, bare, keeps, not takes_image))
            else:
                narrow = a.narrow[stage] if a.block == "bottleneck" else 0
                channels_in, step = first
                cells.add(name, ResidualBlock(a.style, channels_in, width, kernel, step, scale, narrow, a.squeeze))
        if a.block == "plain" and a.squeeze:
            cells.add(f"squeeze{stage}", SqueezeExcite(width, a.squeeze))
        channels = width
        ends.append(cells.last)
    return ends


def _add_decoder(cells: CellList, a: Architecture, ends: list[int]) -> list[int]:
    """Adds the way up and the heads; returns the numbers of the heads, the finest first."""
    heads, end = [], ends[-1]
    for level, count in zip(reversed(range(len(a.features) - 1)), a.decoder):
        width, below, kernel, scale = a.features[level], a.features[level + 1], a.kernels[level], a.scales[level]
        up = cells.add(f"up{level}", Up(a.style, below, width, a.strides[level + 1], a.up, a.up_kernel), end)
        takes: tuple[int, ...] = (up, ends[level])
        channels = 2 * width
        if a.merge:
            block = ConvBlock(a.style, channels, below, ONE, has_norm=False, activates=False, keep_window=True)
            takes, channels = (cells.add(f"merge{level}", block, *takes),), below
        for number in range(count):
            bare = a.bare_last and number == count - 1 > 0
            block = _conv(a, channels, ONE, width, kernel, scale, bare, number == 0 or None, True)
            takes, channels = (cells.add(f"decoder{level}_{number}", block, *takes),), width
        if a.squeeze:
            cells.add(f"squeeze_up{level}", SqueezeExcite(width, a.squeeze))
        end = cells.last
        if level < a.heads and not a.tail:
            heads.append(cells.add(f"classes{level}", _head(a, width), end))
    if a.tail:
        cells.add("tail", Up(a.style, a.features[0], a.tail, a.strides[0], a.up, a.up_kernel, activates=True), end)
        heads.append(cells.add("classes0", _head(a, a.tail)))
    return heads[::-1]


def _add_mednext(cells: CellList, a: Architecture) -> list[int]:
    """Adds MedNeXt's cells; returns the numbers of the heads, the finest first."""
    widths, kernels, last = a.features, a.kernels, len(a.features) - 1
    heads, ends = list[int](), list[int]()

    def add_blocks(name: str, level: int, count: int) -> None:
        for number in range(count):
            block = MedNeXtBlock(a.style, widths[level], widths[level], a.expansion[level], kernels[level])
            cells.add(f"{name}{level}_{number}", block)

    def add_head(level: int) -> None:
        if level < a.heads:
            end = cells.last
            heads.append(cells.add(f"classes{level}", _head(a, widths[level]), end))

    cells.add("stem", Conv3d(a.in_channels, widths[0], 1))
    for stage, count in enumerate(a.encoder):
        if stage:
            sizes = widths[stage - 1], widths[stage], a.expansion[stage], kernels[stage]
            cells.add(f"down{stage}", MedNeXtBlock(a.style, *sizes, "down"))
        add_blocks("encoder", stage, count)
        ends.append(cells.last)
    add_head(last)
    end = ends[-1]
    for level, count in zip(reversed(range(last)), a.decoder):
        sizes = widths[level + 1], widths[level], a.expansion[level], kernels[level]
        cells.add(f"up{level}", MedNeXtBlock(a.style, *sizes, "up"), end, ends[level])
        add_blocks("decoder", level, count)
        end = cells.last
        add_head(level)
    return heads[::-1]


def _conv(
    a: Architecture,
    channels: int,
    stride: Three,
    width: int,
    kernel: Three,
    scale: Three,
    bare: bool,
    keep_window: bool | None,
    drops: bool,
) -> ConvBlock:
    return ConvBlock(
        a.style, channels, width, kernel, stride, scale, not bare, not bare, keep_window=keep_window, drops=drops
    )


def _head(a: Architecture, width: int) -> nn.Module:
    return Conv3d(width, a.num_outputs, a.head_kernel, padding=a.head_kernel // 2)
