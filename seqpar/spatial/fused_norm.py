"""Norm and activation of whole samples in as few passes as possible, for GPUs, where each pass is a kernel launch.

Values are ``b v c`` or ``(b c) v``, columns ``b 1 c`` or ``(b c) 1``, as ``Pieces`` cuts them. Factors of a row are
multiplied beforehand, so that a pass is one multiply-add per value, in the columns' precision. Legend: b batch, c
channels, v voxels; a row is one channel of one sample, ``(b c)``.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.parallel.device_constants import cached

before_leaky_relu = torch.ops.aten.leaky_relu_backward


@cached(16)
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)


def shift_of(mean: Tensor, scale: Tensor) -> Tensor:
    """Returns ``-mean * scale`` in one launch."""
    return torch.addcmul(_zero(mean.dtype, mean.device), mean, scale, value=-1)


def mean_and_variance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean and variance of each row ``(b c)``, in at least float32."""
    variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), 1, correction=0)
    return mean.flatten(), variance.flatten()


def merge_batch_rows(rows: Sequence[Tensor]) -> Tensor:
    """Concatenates the rows ``(b c)`` of all pieces."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def activate(
    slope: float,
    x: Tensor,
    other: Tensor | None,
    out: Tensor,
    kept: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    other_shift: Tensor | None,
    other_scale: Tensor | None,
) -> None:
    """Writes the activation of ``x * scale + shift`` (+ ``other``) to ``out``, and the sum without it to ``kept``.

    ``other`` is scaled and shifted too if it has columns of its own.
    """
    normed = out if kept is None else kept
    torch.addcmul(shift, x, scale, out=normed)
    if other is not None and other_shift is not None and other_scale is not None:
        torch.addcmul(other_shift, other, other_scale, out=out)
        out.add_(normed)
    elif other is not None:
        torch.add(normed, other, out=out)
    F.leaky_relu_(out, slope)


class BeforeActivation:
    """The gradient before the activation, the normed ``x`` and, if it is normed too, the addend, for one piece.

    ``values`` are the output, its gradient, the addend, the kept normed ``x`` and the buffer for the addend's gradient;
    only the first two are required. If the addend is not normed, its gradient is this one and is written to that
    buffer.
    """

    def __init__(self, values: tuple[Any, ...], slope: float, norm_other: bool) -> None:
        y, grad, other, kept, dother = values
        if dother is None or norm_other:
            self.grad = before_leaky_relu(grad, y, slope, True)
        else:
            self.grad = before_leaky_relu.grad_input(grad, y, slope, True, grad_input=dother)
        self.normed, self.addend = kept, None
        if kept is None:
            self.normed = F.leaky_relu(y, 1 / slope)
            if other is not None:
                self.normed.sub_(other)
        elif norm_other:
            self.addend = F.leaky_relu(y, 1 / slope).sub_(kept)

    def write_sums(self, rows: Tensor) -> None:
        """Writes the row sums of the gradient and of its products with the normed ``x`` and the normed addend."""
        products = (self.grad * factor for factor in (self.normed, self.addend) if factor is not None)
        for values, out in zip(itertools.chain([self.grad], products), rows, strict=True):
            torch.sum(values, 1, dtype=out.dtype, out=out.view(len(values), *values.shape[2:]))


def write_gradient(grad: Tensor, normed: Tensor, out: Tensor, scale: Tensor, level: Tensor, slope: Tensor) -> None:
    """Writes ``grad * scale + level + normed * slope`` to ``out``."""
    torch.addcmul(level, grad, scale, out=out)
    out.addcmul_(normed, slope)
