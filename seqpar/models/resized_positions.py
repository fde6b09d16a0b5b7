"""Tensors whose size follows the tile's: learned positions, and what the optimizer knows of them."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from seqpar.vit.tokens import resize_positions


@dataclass(frozen=True)
class ResizePositions:
    """Resizes a table ``1 n e`` of positions from the tokens of ``old`` to those of ``new``."""

    old: tuple[int, ...]
    new: tuple[int, ...]

    def __call__(self, table: Tensor) -> Tensor:
        """Returns the table resized linearly."""
        return resize_positions(table, self.old, self.new)


Resizing = Mapping[str, ResizePositions]  # by the tensor's name
NO_RESIZING: Resizing = MappingProxyType({})


def resize_tensors(tensors: Iterable[tuple[str, Tensor]], resizing: Resizing) -> Iterator[tuple[str, Tensor]]:
    """Yields named tensors; those in ``resizing`` resized, and with them what an optimizer holds for each token.

    An optimizer's tensors are named ``parameter/entry``. Means of gradients and of their squares follow the positions,
    as neighbouring tokens have similar ones (linear resizing keeps squares positive); what holds for all tokens stays:
    the count of steps, and Adafactor's columns.
    """
    for name, tensor in tensors:
        parameter, _, entry = name.partition("/")
        grid = resizing.get(parameter)
        each_token = tensor.ndim == 3 and grid is not None and tensor.shape[1] == math.prod(grid.old)
        yield name, grid(tensor) if grid and each_token and entry != "col_var" else tensor
