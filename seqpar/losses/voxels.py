"""Voxels: what a loss term sees, and sums over all voxels, one chunk of rows after the other.

Legend: b batch, k classes or regions, W D H voxels, s sums.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.parallel.meta_tensors import device_type, representative_pieces

# Number of logits whose probabilities and targets are in memory at a time; more on a GPU, for fewer launches.
RUN, GPU_RUN = 1 << 20, 1 << 26
SumsOfRun = Callable[[Tensor, Tensor], Tensor]  # takes logits and labels of a chunk, returns b s


class Voxels:
    """A chunk of voxels: logits ``b k ...`` and labels ``b ...``, and values derived from them on first use.

    - ``regions``: the label values of each output, which then has its own sigmoid; without them, outputs are mutually
      exclusive classes of a softmax
    """

    def __init__(self, logits: Tensor, label: Tensor, regions: Sequence[Sequence[int]] = ()) -> None:
        self.logits, self.label, self.regions = logits, label, regions

    @cached_property
    def target(self) -> Tensor:
        """``b k ...``: 1 where the voxel belongs to the class or region, else 0."""
        label, dtype = self.label, self.logits.dtype
        if self.regions:
            masks = [reduce(torch.logical_or, (label == value for value in region)) for region in self.regions]
            return torch.stack(masks, 1).to(dtype)
        classes = torch.arange(self.logits.shape[1], device=label.device).view(-1, *[1] * (label.ndim - 1))
        return (label[:, None] == classes).to(dtype)

    @cached_property
    def probability(self) -> Tensor:
        """``b k ...``, the probability of each class or region."""
        return self.logits.sigmoid() if self.regions else self.logits.softmax(1)


def sum_over_voxels(logits: Tensor, label: Tensor, sums_of_chunk: SumsOfRun) -> Tensor:
    """Returns the sum of ``sums_of_chunk`` over all voxels, ``b s``, computed in chunks.

    Probabilities, targets and their products exist for one chunk at a time. Only logits and labels are saved for
    backward, which processes the chunks again.
    """
    return _OverVoxels.apply(logits, label, sums_of_chunk)  # type: ignore[no-any-return]


class _OverVoxels(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, sums_of_chunk: SumsOfRun) -> Tensor:
        ctx.sums_of_chunk = sums_of_chunk
        ctx.save_for_backward(logits, label)
        total: Tensor | None = None
        for truth, run in row_chunks(label, logits):
            sums = sums_of_chunk(run, truth)
            total = sums if total is None else total.add_(sums)
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, label = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        for truth, run, drun in row_chunks(label, logits, dlogits):
            with torch.enable_grad():
                leaf = run.detach().requires_grad_()
                (dleaf,) = torch.autograd.grad(ctx.sums_of_chunk(leaf, truth), leaf, grad)
            drun.copy_(dleaf)
        return dlogits, None, None


def row_chunks(label: Tensor, *logits: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields labels ``b W D H`` and logits ``b k W D H`` in chunks along W of at least one row.

    A chunk has at most ``RUN`` logits, on a GPU ``GPU_RUN``.
    """
    most = RUN if device_type(label) == "cpu" else GPU_RUN
    rows = max(1, most // max(logits[0][:, :, :1].numel(), 1))
    return representative_pieces(list(zip(label.split(rows, 1), *(x.split(rows, 2) for x in logits))), label)
