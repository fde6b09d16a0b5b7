"""Deep supervision: the loss on logits of several levels, as nnU-Net trains its networks.

Legend: b batch, k classes or regions, W D H voxels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.losses.loss import Loss, LossGroups, LossParts

Levels = Sequence[Tensor]  # logits, the finest first


class DeepSupervision(nn.Module):
    """Sums the loss over levels of logits, each weighted half as much as the next finer one; weights sum to 1.

    The label of a coarser level's point is that of the middle voxel that it covers.

    - ``loss``: the loss of one level
    - ``scales``: voxels per point of each level, the finest first
    """

    def __init__(self, loss: Loss, scales: Sequence[Sequence[int]]) -> None:
        super().__init__()
        total = sum(0.5**level for level in range(len(scales)))
        self.loss, self.levels = loss, [(0.5**level / total, tuple(scale)) for level, scale in enumerate(scales)]

    def forward(
        self, logits: Levels, label: Tensor, loss_groups: LossGroups | None = None, annotated: Tensor | None = None
    ) -> Tensor:
        """Returns the scalar loss of each level's logits ``b k W D H`` and the finest level's labels ``b W D H``."""
        return self.parts(logits, label, loss_groups, annotated).total

    def parts(
        self, logits: Levels, label: Tensor, loss_groups: LossGroups | None = None, annotated: Tensor | None = None
    ) -> LossParts:
        """Returns the loss and its terms, each the weighted sum over levels."""
        if len(logits) != len(self.levels):
            raise ValueError(f"expected logits of {len(self.levels)} levels, got {len(logits)}")
        every = []
        for x, (weight, scale) in zip(logits, self.levels):
            at: tuple[Any, ...] = (..., *(slice(step // 2, None, step) for step in scale))
            every.append((weight, self.loss.parts(x, label[at], loss_groups, annotated)))
        terms = {name: _sum([weight * parts.terms[name] for weight, parts in every]) for name in every[0][1].terms}
        return LossParts(_sum([weight * parts.total for weight, parts in every]), terms)


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()
