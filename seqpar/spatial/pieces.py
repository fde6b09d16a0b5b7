"""Volumes run through a piece at a time, in the order in which they lie, so that what is made between stays in cache.

Legend: b batch, c channels, W D H voxels, v the voxels of a box; a row is one channel of one sample, ``(b c)``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from seqpar.spatial.memory_format import channels_last

_AT_ONCE = 1 << 18  # values
_LINE = 1024  # values beside each other, where channels lie innermost


@dataclass(frozen=True)
class Piece:
    """Some values of several volumes at the same places, and of the columns what belongs to their rows."""

    values: tuple[Tensor, ...]  # each n m
    columns: tuple[Tensor, ...]  # each n 1, or 1 m where channels lie innermost
    rows: slice
    num_channels: int  # that lie innermost; 0: rows lie one behind the other

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the sum over each row of what was made of this piece."""
        if not self.num_channels:
            return x.sum(1, dtype=dtype)
        return x.sum(0, dtype=dtype).view(-1, self.num_channels).sum(0)

    def broadcast(self, column: Tensor) -> Tensor:
        """Returns a column of this piece's rows beside its values."""
        if not self.num_channels:
            return column[:, None]
        return column.repeat(self.values[0].shape[1] // self.num_channels)[None]

    @property
    def voxels(self) -> int:
        """How many voxels of each of its rows it has."""
        num = self.values[0].numel()
        return num // self.num_channels if self.num_channels else self.values[0].shape[1]


class Pieces:
    """How volumes like ``x`` are run through: all in its order."""

    def __init__(self, x: Tensor) -> None:
        self.last = channels_last(x)
        self.format = torch.channels_last_3d if self.last else torch.contiguous_format
        self.shape, self.device = x.shape, x.device
        self.num_rows = x.shape[0] * x.shape[1]

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Returns a new volume."""
        return torch.empty(self.shape, dtype=dtype, device=self.device, memory_format=self.format)

    def of(self, volumes: Sequence[Tensor], columns: Sequence[Tensor] = ()) -> Iterator[Piece]:
        """Returns the pieces of volumes, and of columns ``(b c)``; values of a volume in this order can be written."""
        volumes = [volume.contiguous(memory_format=self.format) for volume in volumes]
        return self._lines(volumes, columns) if self.last else self._rows(volumes, columns)

    def _rows(self, volumes: Sequence[Tensor], columns: Sequence[Tensor]) -> Iterator[Piece]:
        rows = [volume.view(self.num_rows, -1) for volume in volumes]
        at_once = max(1, _AT_ONCE // rows[0].shape[1]) if self.device.type == "cpu" else self.num_rows
        for first in range(0, self.num_rows, at_once):
            at = slice(first, first + at_once)
            yield Piece(tuple(row[at] for row in rows), tuple(column[at, None] for column in columns), at, 0)

    def _lines(self, volumes: Sequence[Tensor], columns: Sequence[Tensor]) -> Iterator[Piece]:
        num = self.shape[1]
        flat = [volume.movedim(1, -1).flatten(1) for volume in volumes]  # b (v c)
        line = num * max(1, min(_LINE // num, flat[0].shape[1] // num))
        at_once = line * max(1, _AT_ONCE // line) if self.device.type == "cpu" else flat[0].shape[1]
        for sample in range(self.shape[0]):
            at = slice(sample * num, (sample + 1) * num)
            tiled = [column[at].repeat(line // num)[None] for column in columns]
            for first in range(0, flat[0].shape[1], at_once):
                values = [row[sample, first : first + at_once] for row in flat]
                full = len(values[0]) // line * line
                for begin, end, width in ((0, full, line), (full, len(values[0]), len(values[0]) - full)):
                    if end > begin:
                        parts = tuple(value[begin:end].view(-1, width) for value in values)
                        yield Piece(parts, tuple(column[:, :width] for column in tiled), at, num)
