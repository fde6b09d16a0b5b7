"""Decoders as lists of cells, between which a pipeline may cut."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid


class DecoderCell(NamedTuple):
    """A cell of a decoder.

    - ``owns``: the beginnings of its weights' names in the decoder
    - ``features``: numbers of the token grids that it takes
    - ``takes_image``: whether it takes the image
    - ``run``: returns its output; called with the last cell's output, unless it is the first, then its token grids,
      then the image
    """

    owns: tuple[str, ...]
    features: tuple[int, ...]
    takes_image: bool
    run: Callable[..., Value]


def run_cells(
    cells: Sequence[DecoderCell],
    features: Sequence[Tensor],
    image: Tensor | None,
    grid: BoxGrid | None,
    patch: int | Sequence[int] = 1,
) -> Value:
    """Returns the last cell's output of token grids ``b e w d h``, of which ``grid`` holds boxes, and of the image.

    ``patch``: voxels of a token, where the image is taken.
    """
    values = list[Value]()
    for cell in cells:
        values += [(features[number], grid) for number in cell.features]
        if cell.takes_image:
            assert image is not None
            values.append((image, grid and grid.scaled(patch)))
        values = [cell.run(*values)]
    return values[0]


def cells_of(decoder: nn.Module) -> list[DecoderCell]:
    """Returns a decoder's cells; a decoder without ``cells`` is one cell."""
    make = getattr(decoder, "cells", None)
    if make is not None:
        return make()  # type: ignore[no-any-return]
    count, takes_image = int(decoder.num_features), bool(decoder.uses_image)  # type: ignore[arg-type]

    def run(*values: Value) -> Value:
        features, image = [x for x, _ in values[:count]], values[count:]
        logits = decoder(features, image[0][0] if image else None, values[0][1])
        return (logits, None) if isinstance(logits, Tensor) else logits  # type: ignore[no-any-return]

    return [DecoderCell(("",), tuple(range(count)), takes_image, run)]
