"""What every decoder has: the sizes that it is built for, its upsampling stages, and its cells."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from seqpar.parallel.layout import per_axis
from seqpar.pipeline.cells import Value
from seqpar.spatial.box_grid import BoxGrid
from seqpar.text import quantity


class DecoderCell(NamedTuple):
    """A cell of a decoder.

    - ``owns``: prefixes of its weights' names in the decoder
    - ``features``: numbers of the token grids that it takes
    - ``takes_image``: whether it takes the image
    - ``run``: returns its output; called with the previous cell's output (if any), its token grids, and the image
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
    """Runs the cells on token grids ``b e w d h`` and the image; returns the last cell's output.

    - ``grid``: the boxes of the token grids
    - ``patch``: voxels of a token, if the image is taken
    """
    count = 1 + max(number for cell in cells for number in cell.features)
    takes_image = any(cell.takes_image for cell in cells)
    if len(features) != count or (takes_image and image is None):
        needed = quantity(count, "token grid") + (" and the image" if takes_image else "")
        raise ValueError(f"expected {needed}, got {len(features)} and {'no' if image is None else 'an'} image")
    values = list[Value]()
    for cell in cells:
        values += [(features[number], grid) for number in cell.features]
        if cell.takes_image and image is not None:
            values.append((image, grid and grid.scaled(patch)))
        values = [cell.run(*values)]
    return values[0]


def cells_of(decoder: nn.Module) -> list[DecoderCell]:
    """Returns a decoder's cells; a decoder without a ``cells`` method is one cell."""
    make = getattr(decoder, "cells", None)
    if make is not None:
        return make()  # type: ignore[no-any-return]
    count, takes_image = int(decoder.num_features), bool(decoder.uses_image)  # type: ignore[arg-type]

    def run(*values: Value) -> Value:
        features, image = [x for x, _ in values[:count]], values[count:]
        logits = decoder(features, image[0][0] if image else None, values[0][1])
        return (logits, None) if isinstance(logits, Tensor) else logits  # type: ignore[no-any-return]

    return [DecoderCell(("",), tuple(range(count)), takes_image, run)]


Stride = tuple[int, int, int]


def strides(patch: int | Sequence[int], short_first: bool = True) -> tuple[Stride, ...]:
    """Returns the strides of each stage, the coarsest first: 2, or 1 along an axis that needs no doubling there.

    Raises ValueError if a side is not a power of 2.

    - ``short_first``: an axis with fewer doublings has them in the first stages, so that the finest stages do not
      change the axis with the longer voxels; otherwise in the last stages
    """
    patch = per_axis(patch, "patch")
    if len(patch) != 3 or any(side < 1 or side & (side - 1) for side in patch) or max(patch) < 2:
        raise ValueError(
            f"patch={patch}: the decoders double the grid at each stage; use patch=2, 4, 8 or 16, or three "
            "such numbers, and one or two may be 1"
        )
    doublings = [int(math.log2(side)) for side in patch]
    most = max(doublings)
    stages = []
    for stage in range(most):
        w, d, h = (2 if (stage < n if short_first else stage >= most - n) else 1 for n in doublings)
        stages.append((w, d, h))
    return tuple(stages)


class Sizes(NamedTuple):
    """Everything that a decoder may depend on; each takes what it needs.

    - ``in_channels``: of the image
    - ``embed_dim``: of the tokens
    - ``num_classes``: channels of the logits
    - ``patch``: voxels of a token per axis
    - ``width``: channels of the decoder
    - ``depth``: number of encoder blocks
    - ``skips``: from which blocks UNETR takes its skips
    """

    in_channels: int
    embed_dim: int
    num_classes: int
    patch: tuple[int, ...]
    width: int
    depth: int
    skips: str
