"""The loss of a masked autoencoder.

Legend: b batch, c channels, n tokens, p voxels of a patch per axis, r hidden tokens of all samples; ``/s`` is this
rank's share.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from seqpar.losses.loss import Loss, LossGroups, LossOf, LossParts
from seqpar.parallel.collectives import all_reduce, all_sum

SMALLEST = 1e-6  # added to the variance, for constant patches


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
            patches, hidden = rebuilt
            wide = torch.promote_types(patches.dtype, torch.float32)
            target = self.target(part.flatten(0, 1).index_select(0, hidden).to(wide))
            error = (patches.to(wide) - target).square().sum()
            count = error.new_tensor(target.numel())
            if group is not None:
                error, count = all_sum(error, group), all_reduce(count, group)
            return LossParts(error / count / len(labels), {})

        return [partial(share, part) for part in labels]

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
