"""Losses of other outputs than one tensor of logits: levels of them, as nnU-Net has, and rebuilt patches.

Legend: b batch, k classes or regions, c channels, W D H voxels, n tokens, p voxels of a patch per axis, r hidden tokens
of all samples; ``/s`` is this rank's share.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.losses.loss import Loss, LossGroups, LossOf, LossParts
from seqpar.parallel.collectives import all_reduce, all_sum
from seqpar.spatial.box_grid import refuse_box_alone

SMALLEST = 1e-6  # added to the variance, for constant patches
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
        refuse_box_alone(logits[0], loss_groups)
        (loss_of,) = self.of_step([label], loss_groups, [annotated])
        return loss_of(logits)

    def of_step(
        self, labels: Sequence[Tensor], loss_groups: LossGroups | None = None, annotated: Sequence[Tensor | None] = ()
    ) -> list[LossOf]:
        """Returns the loss of each micro-batch as a function of its levels of logits, as ``Loss.of_step``."""
        every = list[list[LossOf]]()  # by level
        groups = loss_groups or LossGroups()
        for _, scale in self.levels:
            at: tuple[Any, ...] = (..., *(slice(step // 2, None, step) for step in scale))
            every.append(self.loss.of_step([label[at] for label in labels], groups.coarser(scale), annotated))
        return [partial(self._over_levels, of_levels) for of_levels in zip(*every)]

    def _over_levels(self, of_levels: Sequence[LossOf], logits: Levels) -> LossParts:
        if len(logits) != len(self.levels):
            raise ValueError(f"expected logits of {len(self.levels)} levels, got {len(logits)}")
        every = [(weight, loss_of(x)) for (weight, _), loss_of, x in zip(self.levels, of_levels, logits)]
        terms = {name: _sum([weight * parts.terms[name] for weight, parts in every]) for name in every[0][1].terms}
        return LossParts(_sum([weight * parts.total for weight, parts in every]), terms)


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).sum()


class MaskedError(Loss):
    """Mean squared error over the hidden voxels of a batch, on whichever ranks they are.

    - ``normalised``: standardize each patch of the image before it is compared
    """

    def __init__(self, normalised: bool = False) -> None:
        super().__init__(())
        self.normalised = normalised

    def parts(  # type: ignore[override]
        self,
        rebuilt: Sequence[Tensor],
        part: Tensor,
        loss_groups: LossGroups | None = None,
        annotated: Tensor | None = None,
    ) -> LossParts:
        """Returns the loss, which has no terms, of decoded patches ``r/s c p p p`` with their positions ``r/s``.

        - ``part``: this rank's part ``b n/s c p p p`` of the image
        """
        (loss_of,) = self.of_step([part], loss_groups)
        return loss_of(rebuilt)

    def of_step(
        self, labels: Sequence[Tensor], loss_groups: LossGroups | None = None, annotated: Sequence[Tensor | None] = ()
    ) -> list[LossOf]:
        """Returns the loss of each micro-batch; all have as many hidden voxels. ``labels``: parts of the image."""
        group = (loss_groups or LossGroups()).voxels

        def share(part: Tensor, rebuilt: Sequence[Tensor]) -> LossParts:
            squares = self._squares(rebuilt, part)
            error, count = squares.sum(), squares.new_tensor(squares.numel())
            if group is not None:
                error, count = all_sum(error, group), all_reduce(count, group)
            return LossParts(error / count / len(labels), {})

        return [partial(share, part) for part in labels]

    def sums_within(
        self, rebuilt: Sequence[Tensor], part: Tensor, within: Tensor, loss_groups: LossGroups | None = None
    ) -> Tensor:
        """Returns sums over the hidden voxels, on whichever ranks they are: of the squared errors within scans, of the
        voxels that these are over, and of all.

        - ``within``: ``b n/s 1 p p p`` is 1 for voxels of a scan, and 0 for those of its padding
        """
        squares, hidden = self._squares(rebuilt, part), rebuilt[1]
        own = within.flatten(0, 1).index_select(0, hidden).to(squares).expand_as(squares)
        error, count = (kind.sum(dtype=torch.float64) for kind in (squares * own, own))
        sums = torch.stack([error, count, count.new_tensor(squares.numel())])
        group = (loss_groups or LossGroups()).voxels
        return sums if group is None else all_reduce(sums, group)

    def means_within(self, part: Tensor, within: Tensor, loss_groups: LossGroups | None = None) -> Tensor:
        """Returns the mean ``c`` of each channel's targets over the voxels of scans, on whichever ranks they are.

        - ``part``, ``within``: as above
        """
        targets, own = self.target(part.flatten(0, 1)), within.flatten(0, 1).to(part)
        of_channels = (targets * own).sum((0, 2, 3, 4), dtype=torch.float64)
        sums = torch.cat([of_channels, own.sum(dtype=torch.float64)[None]])
        group = (loss_groups or LossGroups()).voxels
        *means, count = sums if group is None else all_reduce(sums, group)
        return torch.stack(means) / count

    def _squares(self, rebuilt: Sequence[Tensor], part: Tensor) -> Tensor:
        """Returns the squared errors ``r/s c p p p`` of decoded patches with their positions."""
        patches, hidden = rebuilt
        wide = torch.promote_types(patches.dtype, torch.float32)
        target = self.target(part.flatten(0, 1).index_select(0, hidden).to(wide))
        return (patches.to(wide) - target).square()

    def target(self, patches: Tensor) -> Tensor:
        """Returns patches ``r c p p p`` as they are compared."""
        return patches if not self.normalised else (patches - _mean(patches)) / _deviation(patches)

    def shown(self, rebuilt: Tensor, patches: Tensor) -> Tensor:
        """Returns decoded patches in the image's intensities; ``patches`` are the image's own."""
        return rebuilt if not self.normalised else rebuilt * _deviation(patches) + _mean(patches)


def _mean(patches: Tensor) -> Tensor:
    return patches.mean(tuple(range(1, patches.ndim)), keepdim=True)


def _deviation(patches: Tensor) -> Tensor:
    return (patches.var(tuple(range(1, patches.ndim)), keepdim=True) + SMALLEST).sqrt()
