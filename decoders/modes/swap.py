"""The modes that move tokens, image and label to other owners first: to boxes, or to whole samples.

Legend: b batch, c channels, n tokens, e embedding, p voxels of a patch along a direction, W D H voxels, w d h
tokens; ``/s`` after the letter that is spread over the sequence group.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from seqpar.decoders.modes.mode import grids, real, together, volume
from seqpar.layout import Layout
from seqpar.losses import LossGroups
from seqpar.mesh import Group
from seqpar.remaps import Remap, plan_remap, remap


class Swap:
    """Each rank decodes whole samples of its own: from all samples' n/s tokens to b/s samples' tokens, and back.

    Exact, nothing is computed twice, no halos; the batch must divide by the group.
    """

    name = "swap"

    def __init__(self, group: Group) -> None:
        self.group = group

    def check(self, layout: Layout, batch: int | None = None) -> str:
        """Returns how it decodes; refuses a batch that does not divide."""
        size = self.group.size
        if batch is not None and (batch < 1 or batch % size):
            below = batch // size * size
            fits = f"--batch {below} or {below + size}" if below > 0 else f"--batch {size}"
            raise ValueError(
                f"--mode swap gives each of {size} ranks as many samples, but --batch {batch} does not divide: "
                f"use {fits}, or --mode halo"
            )
        each = "its share" if batch is None else batch // size
        return f"{self.name}: each of {size} ranks decodes {each} of the batch's samples, whole"

    def features(self, tokens: Sequence[Tensor], layout: Layout) -> list[Tensor]:
        """Returns whole grids ``b/s e w d h`` of tokens ``b n/s e``, in one message."""
        return grids(self._moved(together(tokens), layout, "remap"), tokens, layout.grid)

    def voxels(self, part: Tensor, layout: Layout) -> Tensor:
        """Returns this rank's samples of the image ``b/s c W D H`` or label ``b/s W D H``."""
        return volume(self._moved(part, layout, "voxels"), layout, layout.grid)

    def box_grid(self, layout: Layout, batch: int) -> None:
        """Returns None: every rank holds its samples whole."""

    def loss_groups(self, data: Group | None = None, batch: int | None = None) -> LossGroups:
        """Returns which sums of the loss are partial: those over samples."""
        return LossGroups(samples=(*real(self.group), *real(data)))

    def _moved(self, rows: Tensor, layout: Layout, kind: str) -> Tensor:
        """Returns ``b/s n ...``, raster order, of ``b n/s ...``."""
        self.check(layout, len(rows))
        plan = _to_samples(layout, len(rows), self.group.index)
        return remap(rows.flatten(0, 1), self.group, 0, plan, kind).unflatten(0, (-1, layout.num_tokens))


@lru_cache(maxsize=16)
def _to_samples(layout: Layout, batch: int, me: int) -> Remap:
    """Returns the move from all samples' tokens of this rank to all tokens of its samples, rows ``(b n)``."""
    first = torch.arange(batch)[:, None] * layout.num_tokens  # the number of each sample's first token
    sources = [(first + ids).flatten() for ids in layout.all_ids]
    targets = torch.arange(batch * layout.num_tokens).chunk(layout.num_ranks)
    return plan_remap(sources, targets, me)
