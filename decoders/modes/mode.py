"""The contract of a mode: how it brings features, image and label to the ranks that decode them.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch per axis, W D H voxels, w d h tokens; ``/s``
after the letter that is split over the sequence group.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from einops import rearrange
from torch import Tensor

from seqpar.losses import LossGroups
from seqpar.parallel.collectives import gather
from seqpar.parallel.layout import Layout, from_patches, to_patches
from seqpar.parallel.mesh import AnyGroup, Group, as_group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.vit.tokens import to_grid


class Mode(Protocol):
    """A mode decides what each rank decodes: the whole tile, its own part, its box, or whole samples.

    ``features``, ``voxels`` and ``box_grid`` describe the same arrangement, so that features, image, label and logits
    match; ``loss_groups`` returns the ranks over which the loss sums such logits. Parts come from the encoder's
    ``layout``, the same on all ranks. ``batch`` is the number of samples of a sequence group.
    """

    name: str
    group: Group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns a sentence on how this mode decodes; raises ValueError on all ranks if it cannot."""

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns the decoder's token grids ``b e w d h``, given several blocks' tokens ``b n/s e``, in one message."""

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns the image of a part ``b n/s c p p p``, or the label of ``b n/s p p p``, arranged like the logits."""

    def whole(self, y: Tensor, layout: Layout) -> Tensor:
        """Returns the whole logits ``b k W D H`` or label ``b W D H`` of all samples, given what this rank decodes.

        *forward:* all-gather.
        *backward:* reduce-scatter (sum).
        """

    def samples(self, rows: Tensor) -> Tensor:
        """Returns the rows of ``b ...``, one per sample of the group, for the samples that this rank decodes."""

    def box_grid(self, layout: Layout, batch: int) -> BoxGrid | None:
        """Returns how the token grid is cut into boxes; None if each rank has all that it decodes."""

    def loss_groups(self, data: AnyGroup | None = None, batch: int | None = None) -> LossGroups:
        """Returns the ranks over which the loss sums; ``data`` is the group of ranks that have other tiles."""


def groups_with_peers(*groups: AnyGroup | None) -> tuple[Group, ...]:
    """Returns the groups that have more than one rank."""
    return tuple(group for group in map(as_group, groups) if group.size > 1)


def concat_blocks(tokens: Sequence[Tensor]) -> Tensor:
    """Concatenates several blocks' tokens ``b n/s e`` along the embedding, so that one message carries all."""
    return tokens[0] if len(tokens) == 1 else torch.cat(list(tokens), 2)


def split_blocks(rows: Tensor, tokens: Sequence[Tensor], grid: Sequence[int]) -> list[Tensor]:
    """Returns each block's grid ``b e w d h``, given rows that were made by ``concat_blocks(tokens)``."""
    if len(tokens) == 1:  # of one piece, the adjoint of split would be a copy
        rows = rows.view_as(rows)
        if rows.requires_grad:  # blocks before would copy a gradient that is laid out like a grid, each for itself
            rows.register_hook(Tensor.contiguous)
        return [to_grid(rows, grid)]
    return [to_grid(x, grid) for x in rows.split([x.shape[2] for x in tokens], 2)]


def gather_boxes(x: Tensor, layout: Layout, group: Group) -> Tensor:
    """Returns the whole logits ``b k W D H`` or label ``b W D H`` on every rank, given this rank's box.

    *forward:* all-gather.
    *backward:* reduce-scatter (sum).

    - ``layout``: of the parts from which the boxes were made
    """
    boxed, has_channels = layout.boxed(), x.ndim == len(layout.tile) + 2
    cells = to_patches(x, layout.patch)
    rows = rearrange(cells, "b k n ... -> b n k ...") if has_channels else cells
    return boxed.join(gather(rows, group, 1, boxed.counts, kind="voxels").split(boxed.counts, 1))


def join_patches(patches: Tensor, layout: Layout, grid: Sequence[int]) -> Tensor:
    """Joins a grid's patches ``b n c p p p`` to the image ``b c W D H``, or ``b n p p p`` to the label ``b W D H``."""
    has_channels = patches.ndim == len(layout.tile) + 3
    return from_patches(rearrange(patches, "b n c ... -> b c n ...") if has_channels else patches, grid)
