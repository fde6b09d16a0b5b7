"""Processes volumes piece by piece in memory order, so that intermediate values stay in the processor's cache.

A GPU processes all samples at once: there, the number of kernel launches is what counts. Legend: b batch, c channels, W
D H voxels, v the voxels of a box; a row is one channel of one sample, ``(b c)``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from seqpar.parallel.meta_tensors import device_type
from seqpar.spatial.memory_format import is_channels_last

_AT_ONCE = 1 << 19  # values a thread: smaller pieces wait more for threads than they gain from the cache
_GPU_AT_ONCE = 1 << 28  # values, of whole samples
_LINE = 1024  # adjacent values, if channels are innermost
Optionals = Sequence[Tensor | None]


@dataclass(frozen=True)
class Piece:
    """The values of several volumes at the same voxels, and the matching rows of several columns.

    A missing volume or column is None.
    """

    values: tuple[Any, ...]  # each n m, or b v c: whole samples with channels innermost
    columns: tuple[Any, ...]  # each n 1, or 1 m if channels are innermost, or b 1 c
    rows: slice
    num_channels: int  # number of channels, if these are innermost; 0: rows are contiguous
    voxels: int  # per row

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the sum over each row of values computed from this piece."""
        if x.ndim == 3:
            return x.sum(1, dtype=dtype).flatten()
        if not self.num_channels:
            return x.sum(1, dtype=dtype)
        return x.sum(0, dtype=dtype).view(-1, self.num_channels).sum(0)

    def broadcast(self, column: Tensor) -> Tensor:
        """Returns a column of this piece's rows, shaped to broadcast against the values."""
        if self.values[0].ndim == 3:
            return column.view(-1, 1, self.num_channels)
        if not self.num_channels:
            return column[:, None]
        return column.repeat(self.values[0].shape[1] // self.num_channels)[None]


class Pieces:
    """Cuts volumes of the shape of ``x`` into pieces, in the memory order of ``x``."""

    def __init__(self, x: Tensor) -> None:
        self.last = is_channels_last(x)
        self.format = torch.channels_last_3d if self.last else torch.contiguous_format
        self.shape, self.device = x.shape, x.device
        self.num_rows = x.shape[0] * x.shape[1]
        self.at_once = fits_whole_samples(x)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Returns a new volume in this order, whose pieces can be written to."""
        return torch.empty(self.shape, dtype=dtype, device=self.device, memory_format=self.format)

    def of(self, volumes: Optionals, columns: Optionals = ()) -> Iterator[Piece]:
        """Yields the pieces of ``volumes`` and of ``columns`` ``(b c)``.

        Pieces of a volume in another memory order are copies.
        """
        ordered = [v if v is None else v.contiguous(memory_format=self.format) for v in volumes]
        if self.at_once:
            return self._samples(ordered, columns)
        return self._lines(ordered, columns) if self.last else self._rows(ordered, columns)

    def _samples(self, volumes: Optionals, columns: Optionals) -> Iterator[Piece]:
        """Yields whole samples, as many at once as a GPU has memory to copy."""
        size, num = self.shape[0], self.shape[1]
        num_voxels = self.shape[2:].numel()
        count = max(1, _GPU_AT_ONCE // (num * num_voxels))
        pattern = "b c w d h -> b (w d h) c" if self.last else "b c ... -> (b c) (...)"
        for first in range(0, size, count):
            at = slice(first * num, min(first + count, size) * num)
            values = tuple(v if v is None else rearrange(v[first : first + count], pattern) for v in volumes)
            shape = (-1, 1, num) if self.last else (-1, 1)
            parts = tuple(c if c is None else c[at].view(shape) for c in columns)
            yield Piece(values, parts, at, num if self.last else 0, num_voxels)

    def _rows(self, volumes: Optionals, columns: Optionals) -> Iterator[Piece]:
        """Yields whole rows, as many at once as fit in the cache."""
        num_voxels = self.shape.numel() // self.num_rows
        rows = [v if v is None else v.view(self.num_rows, num_voxels) for v in volumes]
        at_once = max(1, _values_at_once() // num_voxels) if self.device.type == "cpu" else self.num_rows
        for first in range(0, self.num_rows, at_once):
            at = slice(first, first + at_once)
            values = tuple(row if row is None else row[at] for row in rows)
            yield Piece(values, tuple(c if c is None else c[at, None] for c in columns), at, 0, num_voxels)

    def _lines(self, volumes: Optionals, columns: Optionals) -> Iterator[Piece]:
        """Yields lines of all channels of as many voxels as fit in the cache; a sample's last line may be shorter."""
        num = self.shape[1]
        flat = [v if v is None else rearrange(v, "b c w d h -> b (w d h c)") for v in volumes]
        length = self.shape[1:].numel()
        line = num * max(1, min(_LINE // num, length // num))
        at_once = line * max(1, _values_at_once() // line) if self.device.type == "cpu" else length
        for sample in range(self.shape[0]):
            at = slice(sample * num, (sample + 1) * num)
            tiled = [c if c is None else c[at].repeat(line // num)[None] for c in columns]
            for first in range(0, length, at_once):
                behind = min(first + at_once, length)
                full = first + (behind - first) // line * line
                for begin, end, width in ((first, full, line), (full, behind, behind - full)):
                    if end > begin:
                        values = tuple(f if f is None else f[sample, begin:end].view(-1, width) for f in flat)
                        parts = tuple(t if t is None else t[:, :width] for t in tiled)
                        yield Piece(values, parts, at, num, (end - begin) // num)


def fits_whole_samples(x: Tensor) -> bool:
    """Returns whether volumes are processed in whole samples, as many at once as fit in memory: true on a GPU."""
    return device_type(x) != "cpu"


def _values_at_once() -> int:
    """Returns how many values a piece has on a CPU, whose threads share each piece."""
    return _AT_ONCE * torch.get_num_threads()
