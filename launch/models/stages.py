"""Networks as a pipe takes them: lists of cells that begin with this rank's part of a tile.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction; ``n/s`` is this rank's share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpar.attention.module import Rotary
from seqpar.decoders.cells import DecoderCell, cells_of
from seqpar.decoders.modes.mode import Mode
from seqpar.layout import Layout
from seqpar.pipeline.cells import IMAGE, CellNet, Value
from seqpar.pipeline.engine import Prefixes
from seqpar.pipeline.stages import Takes
from seqpar.vit.dropout import DropoutKey
from seqpar.vit.encoder import SeqParViT


@dataclass(frozen=True)
class PartOfBatch:
    """What a rank has of a micro-batch: its part ``b n/s c p p p``, how the tile is cut, and the key of its draws."""

    part: Tensor
    layout: Layout
    key: DropoutKey | None = None


class VolumeCells:
    """The cells of a U-Net, which take the image's box.

    - ``image``: returns it
    - ``prefix``: of the U-Net's names in the whole network
    """

    def __init__(self, net: CellNet, image: Callable[[Tensor, Layout], Value], prefix: str) -> None:
        self.net, self._image = net, image
        self.takes: Takes = net.takes
        self.outputs: tuple[int, ...] = net.outputs
        self.owns: Prefixes = tuple((f"{prefix}cells.{name}.",) for name in net.names)

    def image(self, micro: PartOfBatch) -> Value:
        """Returns the image's box."""
        return self._image(micro.part, micro.layout)

    def run_cell(self, number: int, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the output of a cell."""
        return self.net.run_cell(number, inputs)

    def buffers_of(self, numbers: Sequence[int]) -> list[Tensor]:
        """Returns the running statistics of cells."""
        return [buffer for number in numbers for buffer in self.net.cells[self.net.names[number]].buffers()]


class TokenCells:
    """An encoder and its decoder: the embedding, a cell a block, then the decoder's cells.

    Tokens are values as they are; the decoder's cells bring those that they take to where they are decoded.
    """

    def __init__(self, encoder: SeqParViT, decoder: torch.nn.Module, mode: Mode, taps: Sequence[int]) -> None:
        self.encoder, self.mode = encoder, mode
        self.depth, self._last = len(encoder.blocks), len(taps)
        self._pieces = cells_of(decoder)
        features = [*(tap + 1 for tap in taps), self.depth]  # the cells of which the decoder takes tokens
        first = self.depth + 1
        takes, owns = [(cell - 1,) for cell in range(first)], [("encoder.patch_embed.", "encoder.pos_embed")]
        owns += [(f"encoder.blocks.{block}.",) for block in range(self.depth)]  # type: ignore[misc]
        for number, piece in enumerate(self._pieces):
            sources = (first + number - 1,) * (number > 0) + tuple(features[at] for at in piece.features)
            takes.append(sources + (IMAGE,) * piece.takes_image)  # type: ignore[arg-type]
            norm = ("encoder.norm.",) * (self._last in piece.features)
            owns.append((*(f"decoder.{name}" for name in piece.owns), *norm))  # type: ignore[arg-type]
        self.takes: Takes = tuple(takes)
        self.owns: Prefixes = tuple(owns)
        self.outputs: tuple[int, ...] = (len(takes) - 1,)
        self._rotary_of: Any = None
        self._made_rotary: Rotary | None = None

    def image(self, micro: PartOfBatch) -> Value:
        """Returns this rank's part: cells that decode bring it together themselves."""
        return micro.part, None

    def run_cell(self, number: int, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the output of a cell: tokens ``b n/s e`` of the encoder's, a volume of the decoder's."""
        if number > self.depth:
            return self._decode(self._pieces[number - self.depth - 1], inputs, micro)
        (x, _), layout, encoder = inputs[0], micro.layout, self.encoder
        key = encoder.dropout_key(micro.key, len(x))
        if number == 0:
            return encoder.embed(x, layout, key), None
        token_ids, block = layout.token_ids(encoder.group.index).to(x.device), number - 1
        rotary = self._rotary(layout, x)
        return encoder.blocks[block](x, layout.counts, token_ids, rotary, key and key.at(block)), None

    def _rotary(self, layout: Layout, x: Tensor) -> Rotary | None:
        """Returns the positions that act in attention, made once for all blocks."""
        wanted = layout, x.dtype, x.device
        if self._rotary_of != wanted:
            self._rotary_of, self._made_rotary = wanted, self.encoder.rotary(layout, x.new_empty(0))
        return self._made_rotary

    def _decode(self, piece: DecoderCell, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the output of a decoder's cell, whose tokens come in one message."""
        layout, count = micro.layout, len(piece.features)
        grid = self.mode.box_grid(layout, len(micro.part))
        before = len(inputs) - count - piece.takes_image
        values = list(inputs[:before])
        if count:
            tokens = [x for x, _ in inputs[before : before + count]]
            normed = [
                self.encoder.norm(x) if feature == self._last else x for x, feature in zip(tokens, piece.features)
            ]
            values += [(x, grid) for x in self.mode.features(normed, layout)]
        if piece.takes_image:
            image = self.mode.voxels(micro.part, layout)
            values.append((image, grid and grid.scaled(layout.patch)))
        return piece.run(*values)

    def buffers_of(self, numbers: Sequence[int]) -> list[Tensor]:
        """Returns nothing: no cell has running statistics."""
        return []
