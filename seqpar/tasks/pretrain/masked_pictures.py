"""Pictures of a masked autoencoder: tiles, what was seen of them, what they became."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.report.pictures import make_figure, mark_sides, save_figure
from seqpar.report.planes import convention, plane_of, sides

COLUMNS = ("image", "masked", "rebuilt", "difference")
AXIAL = 2


@dataclass(frozen=True)
class RebuiltTile:
    """A tile ``W D H`` of a case, the same with its hidden patches rebuilt, and which voxels were hidden."""

    name: str
    image: NDArray[Any]
    rebuilt: NDArray[Any]
    hidden: NDArray[np.bool_]
    spacing: tuple[float, ...]


def draw_tiles(path: Path, tiles: Sequence[RebuiltTile], neurological: bool) -> None:
    """Draws a row of four pictures of each tile: image, masked, rebuilt, difference.

    - ``neurological``: the patient's left is on the left of a picture, and not on the right
    """
    save_figure(figure_of_tiles(tiles, neurological), path)


def figure_of_tiles(tiles: Sequence[RebuiltTile], neurological: bool) -> Any:
    """Returns the figure of ``draw_tiles``: the axial plane through the middle of each tile."""
    figure = make_figure(11, 2.9 * len(tiles) + 0.6)
    figure.suptitle(f"Hidden patches rebuilt from the others. {convention(neurological)}", fontsize=9)
    for row, tile in zip(figure.subplots(len(tiles), len(COLUMNS), squeeze=False), tiles):
        low, high = np.percentile(tile.image, (0.5, 99.5))
        masked = np.where(tile.hidden, low, tile.image)
        at = tile.image.shape[AXIAL] // 2
        aspect = tile.spacing[1] / tile.spacing[0]
        volumes = (tile.image, masked, tile.rebuilt, tile.rebuilt - tile.image)
        for name, volume, panel in zip(COLUMNS, volumes, row):
            plane, reach = plane_of(volume, AXIAL, at, neurological), max(high - low, 1e-6)
            if name == "difference":
                panel.imshow(plane, cmap="RdBu_r", vmin=-reach / 2, vmax=reach / 2, aspect=aspect)
            else:
                panel.imshow(plane, cmap="gray", vmin=low, vmax=low + reach, aspect=aspect)
            mark_sides(panel, sides(neurological)[AXIAL])
            panel.set_xticks([])
            panel.set_yticks([])
            panel.set_title(f"{tile.name}  {name}" if name == COLUMNS[0] else name, fontsize=9)
    return figure
