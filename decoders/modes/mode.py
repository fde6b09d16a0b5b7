"""The contract of a mode: how it brings features, image and label together to where they are decoded.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction, W D H voxels, w d h
tokens; ``/s`` after the letter that is spread over the sequence group.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from seqpar.losses import LossGroups
from seqpar.parallel.layout import Layout, from_patches
from seqpar.parallel.mesh import AnyGroup, Group, as_group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.vit.tokens import to_grid


class Mode(Protocol):
    """A mode decides which rank decodes what: the whole tile, its own part, its box, or whole samples.

    ``features``, ``voxels`` and ``box_grid`` describe the same arrangement, so that features, image, label and logits
    lie at the same places; ``loss_groups`` says over which ranks the loss sums such logits. Parts come from the
    encoder's ``layout``, the same on all ranks. ``batch`` is the number of samples of a sequence group.
    """

    name: str
    group: Group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns a sentence on how this mode decodes; raises ValueError if it cannot, on all ranks alike."""

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns the decoder's token grids ``b e w d h`` of several blocks' tokens ``b n/s e``, in one message."""

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the image of its part ``b n/s c p p p``, or the label of ``b n/s p p p``, where the logits are."""

    def samples(self, rows: Tensor) -> Tensor:
        """Returns, of rows ``b ...`` about the group's samples, those of the samples that this rank decodes."""

    def box_grid(self, layout: Layout, batch: int) -> BoxGrid | None:
        """Returns how the token grid is cut into boxes; None if each rank holds all that it decodes."""

    def loss_groups(self, data: AnyGroup | None = None, batch: int | None = None) -> LossGroups:
        """Returns over which ranks the loss sums; ``data``: the group whose ranks have other tiles."""


def groups_with_peers(*groups: AnyGroup | None) -> tuple[Group, ...]:
    """Returns those groups that have more than one rank."""
    return tuple(group for group in map(as_group, groups) if group.size > 1)


def concat_blocks(tokens: Sequence[Tensor]) -> Tensor:
    """Returns the tokens of several blocks side by side, ``b n/s e``, so that one message carries them all."""
    return tokens[0] if len(tokens) == 1 else torch.cat(list(tokens), 2)


def split_blocks(rows: Tensor, tokens: Sequence[Tensor], grid: Sequence[int]) -> list[Tensor]:
    """Returns each block's grid ``b e w d h`` of rows that ``concat_blocks(tokens)`` has become."""
    return [to_grid(x, grid) for x in rows.split([x.shape[2] for x in tokens], 2)]


def join_patches(patches: Tensor, layout: Layout, grid: Sequence[int]) -> Tensor:
    """Returns the image ``b c W D H`` of a grid's patches ``b n c p p p``; the label ``b W D H`` of ``b n p p p``."""
    has_channels = patches.ndim == len(layout.tile) + 3
    return from_patches(rearrange(patches, "b n c ... -> b c n ...") if has_channels else patches, grid)
