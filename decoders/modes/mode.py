"""What every mode does: features, image and label moved together to where they are decoded."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from seqpar.layout import Layout, from_patches
from seqpar.losses import LossGroups
from seqpar.mesh import Group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.vit.tokens import to_grid


def real(group: Group | None) -> tuple[Group, ...]:
    return (group,) if group is not None and group.size > 1 else ()


def together(tokens: Sequence[Tensor]) -> Tensor:
    """Returns the tokens of several blocks side by side, ``b n/s e``: one message for all."""
    return tokens[0] if len(tokens) == 1 else torch.cat(list(tokens), 2)


def grids(rows: Tensor, tokens: Sequence[Tensor], grid: Sequence[int]) -> list[Tensor]:
    """Returns each block's grid of tokens that travelled together."""
    return [to_grid(x, grid) for x in rows.split([x.shape[2] for x in tokens], 2)]


def volume(cells: Tensor, layout: Layout, grid: Sequence[int]) -> Tensor:
    """Returns the image or label of a grid's patches, ``b n c p p p`` or ``b n p p p``."""
    has_channels = cells.ndim == len(layout.tile) + 3
    return from_patches(cells.transpose(1, 2) if has_channels else cells, grid)


class Mode(Protocol):
    """What every mode does; ``batch`` is the number of samples that a sequence group has together."""

    name: str
    group: Group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns in a sentence how this mode will decode; refuses a layout or batch that it cannot."""

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns the grids that the decoder takes, of tokens ``b n/s e``, in one message."""

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the image or label part where the logits are."""

    def box_grid(self, layout: Layout, batch: int) -> BoxGrid | None:
        """Returns how the token grid is spread over the group; None where each rank holds all that it decodes."""

    def loss_groups(self, data: Group | None = None, batch: int | None = None) -> LossGroups:
        """Returns which sums of the loss are partial, given the group over which tiles are spread."""
