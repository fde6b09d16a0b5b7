"""Instance norm and leaky ReLU in one step that keeps only its output and recovers the normed values from it.

The output is kept anyway, as the next convolution's input, so the norm's own input need not be: a residual block keeps
three volumes besides its input instead of five. Legend: b batch, c channels, W D H voxels; a row is one channel of one
sample, ``(b c)``; ``/s`` after the letter that is split over the group.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group
from seqpar.spatial.box_grid import BoxGrid
from seqpar.spatial.cache_pieces import Piece, Pieces
from seqpar.spatial.fused_norm import BeforeActivation, activate, shift_of, write_gradient
from seqpar.spatial.moments import MomentGroups
from seqpar.spatial.norms import BatchNorm3d

SLOPE = 0.01


class NormedActivation(nn.Module):
    """Applies instance norm and leaky ReLU to ``x``, adding ``other`` before the activation as a residual block does.

    It has no parameters. Each sample and channel is normed with the statistics of the whole volume.

    Args:
        ``eps``: added to the variance for numerical stability.
        ``norm_other``: norm ``other`` too.
    """

    def __init__(self, eps: float = 1e-5, norm_other: bool = False) -> None:
        super().__init__()
        self.eps, self.norm_other = eps, norm_other

    def forward(
        self, x: Tensor, grid: BoxGrid | None = None, other: Tensor | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns the activated volume ``b c W/s D/s H/s`` and its unchanged box grid."""
        if grid is not None:
            grid.refuse_other_box(x)
        assert other is not None or not self.norm_other
        groups = () if grid is None else (grid.group,)
        count = math.prod(x.shape[2:] if grid is None else grid.extents)
        norm = _Norm(self.eps, self.norm_other, groups, count)
        return _NormedActivation.apply(x, other, norm), grid  # type: ignore[no-untyped-call]


class BatchNormedActivation(nn.Module):
    """Does what ``NormedActivation`` does with batch norm, which has weights and running statistics.

    Args:
        ``channels``: of the volume.
        ``norm_other``: norm ``other`` too, by a norm of its own.
    """

    def __init__(self, channels: int, norm_other: bool = False) -> None:
        super().__init__()
        self.norm = BatchNorm3d(channels)
        self.other_norm = BatchNorm3d(channels) if norm_other else None

    def forward(
        self, x: Tensor, grid: BoxGrid | None = None, other: Tensor | None = None
    ) -> tuple[Tensor, BoxGrid | None]:
        """Returns the activated volume ``b c W/s D/s H/s`` and its unchanged box grid."""
        if other is None:
            return self.norm(x, grid, SLOPE)  # type: ignore[no-any-return]
        y, _ = self.norm(x, grid)
        if self.other_norm is not None:
            other, _ = self.other_norm(other, grid)
        return F.leaky_relu_(y + other, SLOPE), grid


@dataclass(frozen=True)
class _Norm:
    """The norm's parameters: its epsilon, whether ``other`` is normed too, the ranks, and the number of voxels."""

    eps: float
    norm_other: bool
    groups: tuple[Group, ...]  # the group over which the volume is split, if any
    num_voxels: int  # of the whole volume

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and scale of each row over all ranks, in at least float32."""
        mean, variance, _ = MomentGroups(x.shape[1], False, self.groups).mean_and_variance(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        return mean.flatten().to(wide), (variance + self.eps).rsqrt().flatten().to(wide)

    def means(self, sums: Tensor, sign: int = 1) -> Tensor:
        """Sums this rank's row sums over all ranks and divides them by the number of voxels."""
        for group in self.groups:
            sums = all_reduce(sums, group, "statistics")
        return sums / (sign * self.num_voxels)


class _NormedActivation(Function):
    """*forward:* norms with the moments of all ranks' boxes, adds ``other``, activates.

    *backward:* the gradient that flows through mean and variance is summed over all ranks and added to each voxel's
    own.

    It keeps its output and ``other``; the normed ``x`` is then their difference before the activation. It keeps the
    normed ``x`` instead if ``other`` is normed too, and in half precision, where a large ``other`` would leave too few
    digits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, norm: _Norm) -> Tensor:
        mean, scale = norm.statistics(x)
        other_mean, other_scale = norm.statistics(other) if other is not None and norm.norm_other else (None, None)
        keeps_normed = other is not None and (norm.norm_other or x.dtype.itemsize < 4)
        pieces = Pieces(x)
        y, normed = pieces.empty(x.dtype), pieces.empty(x.dtype) if keeps_normed else None
        volumes = [x, other, y, normed]
        if pieces.at_once:
            shifts = [
                None if m is None or s is None else shift_of(m, s)
                for m, s in ((mean, scale), (other_mean, other_scale))
            ]
            for piece in pieces.of(volumes, [shifts[0], scale, shifts[1], other_scale]):
                activate(SLOPE, *piece.values, *piece.columns)
        else:
            for piece in pieces.of(volumes, [mean, scale, other_mean, other_scale]):
                _activate(*piece.values, *piece.columns)
        ctx.norm = norm
        ctx.save_for_backward(y, None if keeps_normed else other, normed, scale, other_scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, other, normed, scale, other_scale = ctx.saved_tensors
        norm: _Norm = ctx.norm
        pieces = Pieces(y)
        volumes = [y, grad.contiguous(memory_format=pieces.format), other, normed]
        if pieces.at_once:
            return *_whole_gradients(pieces, volumes, scale, other_scale, norm), None
        row_sums = scale.new_zeros(3 if norm.norm_other else 2, pieces.num_rows)
        for piece in pieces.of(volumes):
            _add_sums(row_sums, piece)
        level, slope, *other_slope = norm.means(row_sums)
        dx = pieces.empty(y.dtype)
        dother = pieces.empty(y.dtype) if other is not None or normed is not None else None
        columns = [scale, level, slope, other_scale, *(other_slope or [None])]
        for piece in pieces.of([*volumes, dx, dother], columns):
            _write_gradients(*piece.values, *piece.columns)
        return dx, dother, None


def _whole_gradients(
    pieces: Pieces, volumes: list[Tensor | None], scale: Tensor, other_scale: Tensor | None, norm: _Norm
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of ``x`` and ``other``, computed in whole samples."""
    y, _, other, kept = volumes
    assert y is not None
    dx = pieces.empty(y.dtype)
    dother = pieces.empty(y.dtype) if other is not None or kept is not None else None
    before, row_sums = list[BeforeActivation](), scale.new_empty(3 if norm.norm_other else 2, pieces.num_rows)
    for whole in pieces.of([*volumes, dother]):
        before.append(BeforeActivation(whole.values, SLOPE, norm.norm_other))
        before[-1].write_sums(row_sums[:, whole.rows])
    means = norm.means(row_sums, -1)  # the first one is the level, the others are slopes
    for number, (target, factor) in enumerate(((dx, scale), (dother, other_scale))[: len(means) - 1], 1):
        assert factor is not None
        places = pieces.of([target], [factor, *(means[::number][:2] * factor)])
        for piece, place in zip(before, places):
            normed = piece.normed if target is dx else piece.addend
            assert normed is not None
            write_gradient(piece.grad, normed, *place.values, *place.columns)
    return dx, dother


# Each of these runs on one piece, so that its temporaries are freed before the next piece allocates as much.


def _activate(
    x: Tensor,
    other: Tensor | None,
    out: Tensor,
    kept: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    other_mean: Tensor | None,
    other_scale: Tensor | None,
) -> None:
    """Writes the output of a piece to ``out``, and the normed ``x`` to ``kept``."""
    total = (x - mean).mul_(scale)
    if kept is not None:
        kept.copy_(total)
    if other is not None:
        total.add_(other if other_mean is None or other_scale is None else (other - other_mean).mul_(other_scale))
    out.copy_(F.leaky_relu_(total, SLOPE))


def _add_sums(row_sums: Tensor, piece: Piece) -> None:
    """Adds a piece's row sums of the gradient and of its products with the normed ``x`` and the normed addend."""
    grad, total, normed = _before_activation(row_sums.dtype, *piece.values)
    grad_sum, product_sum, *addend_sum = row_sums[:, piece.rows]
    grad_sum += piece.sum(grad)
    for product in addend_sum:
        product += piece.sum(total.sub_(normed).mul_(grad))
    product_sum += piece.sum(torch.mul(normed, grad, out=total))


def _write_gradients(
    y: Tensor,
    grad: Tensor,
    other: Tensor | None,
    kept: Tensor | None,
    dx: Tensor,
    dother: Tensor | None,
    scale: Tensor,
    level: Tensor,
    slope: Tensor,
    other_scale: Tensor | None,
    other_slope: Tensor | None,
) -> None:
    """Writes a piece's gradients; ``level`` and the slopes are means of what ``_add_sums`` has added."""
    grad, total, normed = _before_activation(scale.dtype, y, grad, other, kept)
    if dother is not None and other_scale is None:
        dother.copy_(grad)
    grad.sub_(level)
    if dother is not None and other_scale is not None and other_slope is not None:
        dother.copy_((grad - total.sub_(normed).mul_(other_slope)).mul_(other_scale))
    dx.copy_(grad.sub_(torch.mul(normed, slope, out=total)).mul_(scale))


def _before_activation(
    dtype: torch.dtype, y: Tensor, grad: Tensor, other: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient before the activation, the activation's input, and the normed ``x``; the first two are new.

    If the normed ``x`` was not kept, it is computed in place of the activation's input.
    """
    grad, y = grad.to(dtype), y.to(dtype)
    grad = torch.ops.aten.leaky_relu_backward(grad, y, SLOPE, True)
    total = F.leaky_relu(y, 1 / SLOPE)
    if kept is not None:
        return grad, total, kept
    normed = total if other is None else total.sub_(other)
    return grad, total, normed
