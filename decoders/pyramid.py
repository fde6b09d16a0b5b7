"""UNETR's decoder for an encoder with several stages, whose tokens are its skips.

Legend: b batch, c channels, e embedding, k classes, m tokens of a stage in a cube, w d h cubes, W D H voxels. A point
of level l covers 2^l voxels along the longest side of a patch: level 0 is the image's, the last level the cubes'.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from seqpar.decoders.decoder import DecoderCell, run_cells, strides
from seqpar.decoders.unetr import ResBlock, Stage
from seqpar.parallel.layout import per_axis
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.convolution import Conv3d
from seqpar.spatial.memory_format import in_fastest_format
from seqpar.vit.token_merging import join_cubes


class PyramidDecoder(nn.Module):
    """Upsamples the last stage's tokens level by level, joining the tokens of each stage and finally the image.

    Levels between the first stage's tokens and the image have no skip.

    - ``in_channels``: of the image
    - ``widths``: of each stage's tokens, the finest first
    - ``num_classes``: channels of the logits
    - ``patch``: voxels per axis of a token of the first stage
    - ``width``: channels at full resolution, doubled at each coarser level
    """

    uses_image = True
    taps: tuple[int, ...] = ()  # the last block of each stage except for the last

    def __init__(
        self, in_channels: int, widths: Sequence[int], num_classes: int, patch: int | Sequence[int], width: int = 16
    ) -> None:
        super().__init__()
        finest, merges = strides(patch), len(widths) - 1
        self.num_features, self._finest = len(widths), len(finest)
        self.patch = tuple(side << merges for side in per_axis(patch, "patch"))  # voxels of a cube
        every = [(2, 2, 2)] * merges + list(finest)
        self._levels = list(reversed(range(len(every))))  # the level that each doubling reaches
        inputs = [widths[-1], *(width << level for level in self._levels)]
        self.stem = ResBlock(in_channels, width)
        self.skips = nn.ModuleList(ResBlock(widths[stage], width << self._finest + stage) for stage in range(merges))
        self.ups = nn.ModuleList(
            Stage(channels, width << level, stride, joins=level == 0 or level >= self._finest)
            for channels, level, stride in zip(inputs, self._levels, every)
        )
        self.classes = Conv3d(width, num_classes, 1)

    def forward(
        self, features: Sequence[Tensor], image: Tensor | None, grid: BoxGrid | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns logits ``b k W D H`` and their box grid.

        - ``features``: each stage's tokens in rows of cubes, ``b (m e) w d h``, the finest first
        - ``image``: ``b c W D H``
        """
        return run_cells(self.cells(), features, image, grid, self.patch)

    def cells(self) -> list[DecoderCell]:
        """Returns one cell per level, which includes the level's skip, and the classifier."""
        cells = list[DecoderCell]()
        for number, level in enumerate(self._levels):
            stage = level - self._finest
            owns = (f"ups.{number}.", *["stem."] * (level == 0), *[f"skips.{stage}."] * (stage >= 0))
            features = (self.num_features - 1,) * (not cells) + (stage,) * (stage >= 0)
            cells.append(DecoderCell(owns, features, level == 0, partial(self._double, number)))
        cells.append(DecoderCell(("classes.",), (), False, lambda value: self.classes(*value)))
        return cells

    def _double(self, number: int, value: Value, joined: Value | None = None) -> Value:
        """Returns the next finer level's volume, given the coarser one and the input of the level's skip."""
        skip, stage = None, self._levels[number] - self._finest
        if joined is not None and stage >= 0:
            tokens, grid = joined
            merges = self.num_features - 1 - stage
            skip, _ = self.skips[stage](
                in_fastest_format(join_cubes(tokens, merges)), grid and grid.scaled(1 << merges)
            )
        elif joined is not None:
            skip, _ = self.stem(in_fastest_format(joined[0]), joined[1])
        return self.ups[number](in_fastest_format(value[0]), skip, value[1])  # type: ignore[no-any-return]
