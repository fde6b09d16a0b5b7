"""Networks as a pipe takes them: lists of cells that begin with this rank's part of a tile.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction; ``n/s`` is this rank's share.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.decoders.decoder import DecoderCell, cells_of
from seqpar.decoders.modes.mode import Mode
from seqpar.parallel.layout import Layout
from seqpar.pipeline.cells import IMAGE, CellNet, Value
from seqpar.pipeline.engine import Prefixes
from seqpar.pipeline.stages import Takes
from seqpar.spatial.box_grid import BoxGrid
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
    - ``own_key``: returns the key of the samples that this rank decodes
    - ``prefix``: of the U-Net's names in the whole network
    """

    def __init__(
        self,
        net: CellNet,
        image: Callable[[Tensor, Layout], Value],
        own_key: Callable[[DropoutKey | None], DropoutKey | None],
        prefix: str,
    ) -> None:
        self.net, self._image, self._own_key = net, image, own_key
        self.takes: Takes = net.takes
        self.outputs: tuple[int, ...] = net.outputs
        self.owns: Prefixes = tuple((f"{prefix}cells.{name}.",) for name in net.names)

    def image(self, micro: PartOfBatch) -> Value:
        """Returns the image's box."""
        return self._image(micro.part, micro.layout)

    def run_cell(self, number: int, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the output of a cell."""
        return self.net.run_cell(number, inputs, self._own_key(micro.key))

    def buffers_of(self, numbers: Sequence[int]) -> list[Tensor]:
        """Returns the running statistics of cells."""
        return [buffer for number in numbers for buffer in self.net.cells[self.net.names[number]].buffers()]


class EncoderCells(ABC):
    """An encoder and what follows: the embedding, a cell a block, then the cells of those that derive from this.

    Tokens are values as they are.

    - ``takes``, ``owns``: of the cells that follow
    - ``added``: the names of weights that the embedding has besides its own
    """

    def __init__(self, encoder: SeqParViT, takes: Takes, owns: Prefixes, added: tuple[str, ...] = ()) -> None:
        self.encoder, self.depth = encoder, len(encoder.blocks)
        own = [("encoder.patch_embed.", "encoder.pos_embed", *added)]
        merged = {stage.blocks.start: (f"encoder.merges.{stage.number - 1}.",) for stage in encoder.stages[1:]}
        own += [(f"encoder.blocks.{block}.", *merged.get(block, ())) for block in range(self.depth)]
        self.takes: Takes = (*((cell - 1,) for cell in range(self.depth + 1)), *takes)
        self.owns: Prefixes = (*own, *owns)
        self.outputs: tuple[int, ...] = (len(self.takes) - 1,)

    def image(self, micro: PartOfBatch) -> Value:
        """Returns this rank's part: cells that need more bring it together themselves."""
        return micro.part, None

    def embed(self, part: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns the tokens ``b n/s e`` that the first block takes."""
        return self.encoder.embed(part, layout, key)

    def run_block(self, block: int, x: Tensor, layout: Layout, key: DropoutKey | None) -> Tensor:
        """Returns the tokens ``b n/s e`` after a block."""
        return self.encoder.run_stage(range(block, block + 1), x, layout, key)[0]

    def run_cell(self, number: int, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the output of a cell: tokens ``b n/s e`` of the encoder's."""
        if number > self.depth:
            return self.run_following(number - self.depth - 1, inputs, micro)
        (x, _), layout, encoder = inputs[0], micro.layout, self.encoder
        key = encoder.dropout_key(micro.key, len(x))
        if number == 0:
            return self.embed(x, layout, key), None
        return self.run_block(number - 1, x, layout, key), None

    @abstractmethod
    def run_following(self, number: int, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the output of a cell that follows the blocks; ``number``: of it among these."""

    def buffers_of(self, numbers: Sequence[int]) -> list[Tensor]:
        """Returns nothing: no cell has running statistics."""
        return []


class TokenCells(EncoderCells):
    """An encoder and its decoder, whose cells bring the tokens that they take to where they are decoded."""

    def __init__(self, encoder: SeqParViT, decoder: torch.nn.Module, mode: Mode, taps: Sequence[int]) -> None:
        self.decoder, self.mode, self._last = decoder, mode, len(taps)
        self._pieces = cells_of(decoder)
        depth = len(encoder.blocks)
        features = [*(tap + 1 for tap in taps), depth]  # the cells whose tokens the decoder takes
        takes, owns = list[tuple[int, ...]](), list[tuple[str, ...]]()
        for number, piece in enumerate(self._pieces):
            sources = (depth + number,) * (number > 0) + tuple(features[at] for at in piece.features)
            takes.append(sources + (IMAGE,) * piece.takes_image)
            norm = ("encoder.norm.",) * (self._last in piece.features)
            owns.append((*(f"decoder.{name}" for name in piece.owns), *norm))
        super().__init__(encoder, tuple(takes), tuple(owns))

    def run_following(self, number: int, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the volume of a decoder's cell."""
        return self._decode(self._pieces[number], inputs, micro)

    def _decode(self, piece: DecoderCell, inputs: Sequence[Value], micro: PartOfBatch) -> Value:
        """Returns the output of a decoder's cell, whose tokens come in one message."""
        layout, count = micro.layout, len(piece.features)
        grid = self.mode.box_grid(layout, len(micro.part))
        before = len(inputs) - count - piece.takes_image
        values = list(inputs[:before])
        if count:
            tokens = [self.encoder.cubes(x, layout) for x, _ in inputs[before : before + count]]
            normed = [
                self.encoder.norm(x) if feature == self._last else x for x, feature in zip(tokens, piece.features)
            ]
            values += [(x, grid) for x in self.mode.features(normed, layout)]
        if piece.takes_image:
            image = self.mode.voxels(micro.part, layout)
            values.append((image, grid and grid.scaled(layout.patch)))
        output = piece.run(*values)
        if piece is self._pieces[-1]:
            refuse_other_grid(output[1], grid and grid.scaled(layout.patch), self.decoder, self.mode)
        return output


def refuse_other_grid(grid: BoxGrid | None, needed: BoxGrid | None, decoder: torch.nn.Module, mode: Mode) -> None:
    """Raises ValueError on all ranks where a decoder did not decode on boxes as needed.

    - ``grid``: the box grid of its logits; None will do where each rank decodes whole volumes
    - ``needed``: that of the voxels, None where they are whole
    """
    if grid == needed or grid is None and mode.group.size == 1:
        return
    name = type(decoder).__name__
    if needed is None:
        raise ValueError(f"{name} returned {type(grid).__name__} next to its logits, but None is needed")
    beside = "no box grid" if grid is None else "another box grid than that of the voxels"
    raise ValueError(
        f"mode={mode.name!r}: each of {mode.group.size} ranks decodes a box, and {name} returned {beside} "
        "with its logits: modules of torch itself do not look beyond a box. It works with mode='gather' or "
        "mode='swap'; for halo build it of seqpar.spatial, whose modules take and return a volume and its box grid"
    )
