"""The terms that losses are made of: means over voxels, and means over classes of a score of their sums.

A new term is a class like these, here or in a file of its own; it sees ``Voxels``, one chunk of rows after the other.
Legend: b batch, k classes or regions, s sums, ``...`` or W D H voxels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from seqpar.losses.soft_labels import SoftLabels
from seqpar.parallel.device_constants import cached
from seqpar.parallel.meta_tensors import device_type, representative_pieces

# Number of logits whose probabilities and targets are in memory at a time; more on a GPU, for fewer launches.
RUN, GPU_RUN = 1 << 20, 1 << 26
NEIGHBOUR_SHARE = 16  # what a logit of terms that read neighbours needs, in those of the others
Inside = tuple[slice, ...]  # the voxels W D H of a window that count
# takes logits and labels of a window, returns tensors b k ... to be summed over voxels
ColumnsOfRun = Callable[[Tensor, Tensor, Inside], Sequence[Tensor]]


class Voxels:
    """A chunk of voxels: logits ``b k ...`` and labels ``b ...``, and values derived from them on first use.

    - ``regions``: the label values of each output, which then has its own sigmoid; without them, outputs are mutually
      exclusive classes of a softmax
    - ``marked``: the voxels ``b ...`` on the skeleton, for terms with ``needs_marks``
    - ``counted``: the voxels ``b ...`` without the ignore label; None: all
    - ``soft``: what labels are codes of; None: they are class numbers
    """

    def __init__(
        self,
        logits: Tensor,
        label: Tensor,
        regions: Sequence[Sequence[int]] = (),
        marked: Tensor | None = None,
        counted: Tensor | None = None,
        soft: SoftLabels | None = None,
    ) -> None:
        self.logits, self.label, self.regions, self.marked, self.counted = logits, label, regions, marked, counted
        self.soft = soft

    @cached_property
    def target(self) -> Tensor:
        """``b k ...``: 1 where the voxel belongs to the class or region, else 0; of soft labels, its probability."""
        label, dtype = self.label, self.logits.dtype
        if self.soft is not None:
            self._refuse_other_labels(self.soft.num_codes)
            return self.soft.target(label, dtype, self.regions)
        if self.regions:
            masks = [reduce(torch.logical_or, (label == value for value in region)) for region in self.regions]
            return torch.stack(masks, 1).to(dtype)
        self._refuse_other_labels(self.logits.shape[1])
        classes = _numbers(self.logits.shape[1], label.device).view(-1, *[1] * (label.ndim - 1))
        target = torch.empty((label.shape[0], len(classes), *label.shape[1:]), dtype=dtype, device=label.device)
        return torch.eq(label[:, None], classes, out=target)

    def _refuse_other_labels(self, count: int) -> None:
        """Raises IndexError, as torch's cross-entropy does, unless labels are below; on a GPU it would wait for it."""
        if self.label.device.type == "cpu" and self.label.numel() and not torch.compiler.is_compiling():
            for number in map(int, torch.aminmax(self.label)):
                if not 0 <= number < count:
                    raise IndexError(f"Target {number} is out of bounds.")

    @cached_property
    def probability(self) -> Tensor:
        """``b k ...``, the probability of each class or region."""
        return self.logits.sigmoid() if self.regions else self.logits.softmax(1)


@cached(64)
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


class VoxelTerm(ABC):
    """The mean of a loss per voxel; ``name`` is that of its curve.

    - ``takes_soft``: whether targets may be probabilities
    """

    name: str
    takes_soft: bool = False

    @abstractmethod
    def each(self, voxels: Voxels) -> Tensor:
        """Returns the loss of each voxel ``b ...``, or, if the outputs are regions, of each region ``b k ...``."""


class ClassTerm(ABC):
    """One minus the mean score over samples and classes, where a score is a function of sums over voxels.

    - ``background``: whether the first of several classes counts
    - ``batch``: sum over the batch instead of each sample
    - ``every_class``: divide by the number of samples and classes, instead of by the sum of their weights
    - ``reach``: how many voxels away, in each direction, are voxels that a voxel's values depend on
    - ``needs_marks``: whether labels must be those that ``mark_skeleton`` returns
    - ``takes_soft``: whether targets may be probabilities
    """

    name: str
    takes_soft: bool = False
    num_sums: int
    background: bool
    batch: bool
    every_class: bool = False
    reach: int = 0
    needs_marks: bool = False

    @abstractmethod
    def each(self, voxels: Voxels) -> Sequence[Tensor]:
        """Returns ``num_sums`` tensors ``b k ...`` that are to be summed over voxels."""

    @abstractmethod
    def score(self, sums: Tensor) -> Tensor:
        """Returns each class's score ``b k``, 1 for perfect, given its sums ``num_sums b k``."""

    def loss(self, sums: Tensor) -> Tensor:
        """Returns one minus each class's score."""
        return 1 - self.score(sums)


class Dice(ClassTerm):
    """Soft Dice: twice the overlap divided by the sum of both.

    - ``squared``: square the probabilities in the denominator, as in V-Net, and so those of soft labels
    - ``smooth``: added to numerator and denominator, so that a class that is absent and not predicted scores 1
    - ``background``, ``batch``, ``every_class``: see ``ClassTerm``
    """

    name, num_sums, takes_soft = "dice", 2, True

    def __init__(
        self,
        squared: bool = False,
        background: bool = False,
        batch: bool = False,
        smooth: float = 1e-5,
        every_class: bool = False,
    ) -> None:
        self.squared, self.background, self.batch, self.smooth = squared, background, batch, smooth
        self.every_class = every_class

    def each(self, voxels: Voxels) -> tuple[Tensor, Tensor]:
        """Returns probability x target, and probability + target (both squared; 0 and 1 are their squares)."""
        probability, target = voxels.probability, voxels.target
        both = probability * target
        if self.squared and voxels.soft is not None:
            target = target.square()
        return both, (probability.square() if self.squared else probability) + target

    def score(self, sums: Tensor) -> Tensor:
        """Returns the Dice score of each class."""
        both, either = sums
        return (2 * both + self.smooth) / (either + self.smooth).clamp(min=1e-8)


class CrossEntropy(VoxelTerm):
    """Cross-entropy of a softmax over classes, or of a sigmoid for each region."""

    name, takes_soft = "ce", True

    def each(self, voxels: Voxels) -> Tensor:
        """Returns the negative log-probability of the true label, or its mean over the classes of soft labels."""
        if voxels.regions:
            return F.binary_cross_entropy_with_logits(voxels.logits, voxels.target, reduction="none")
        truth = voxels.label if voxels.soft is None else voxels.target
        return F.cross_entropy(voxels.logits, truth, reduction="none")


class Focal(VoxelTerm):
    """Cross-entropy weighted by (1 - p) ** ``gamma``, where p is the probability of the true label (Lin et al.)."""

    name = "focal"

    def __init__(self, gamma: float = 2.0) -> None:
        if gamma != 0 and not 1 <= gamma < float("inf"):
            raise ValueError(f"gamma={gamma:g} must be 0, or at least 1, for a finite slope at p = 1; 2 is usual")
        self.gamma = gamma

    def each(self, voxels: Voxels) -> Tensor:
        """Returns the weighted cross-entropy."""
        minus_log = CrossEntropy().each(voxels)
        return (-torch.expm1(-minus_log)).clamp(min=0).pow(self.gamma) * minus_log


class ClassFocal(ClassTerm):
    """The focal loss of each class, whose own voxels alone contribute, divided by all voxels of the sample (LAMP).

    Of k classes, its mean is a k-th of ``Focal``. A region's voxels contribute whether they are in it or not.
    """

    name, num_sums = "focal", 2
    background, batch, every_class = True, False, True

    def __init__(self, gamma: float = 2.0) -> None:
        self._of_voxels = Focal(gamma)

    def each(self, voxels: Voxels) -> tuple[Tensor, Tensor]:
        """Returns the focal loss of the voxels of each class, and ones to count voxels."""
        focal = self._of_voxels.each(voxels)
        own = focal if voxels.regions else focal[:, None] * voxels.target
        return own, own.new_ones(()).expand_as(own)

    def score(self, sums: Tensor) -> Tensor:
        """Returns one minus each class's mean over voxels."""
        return 1 - self.loss(sums)

    def loss(self, sums: Tensor) -> Tensor:
        """Returns each class's mean over voxels."""
        own, count = sums
        return own / count.clamp(min=1)


Terms = list[VoxelTerm | ClassTerm]


@dataclass(frozen=True)
class LossOptions:
    """Options of the terms: ``gamma`` for the focal ones, the others for ``Dice``."""

    squared: bool = False
    background: bool = False
    batch: bool = False
    gamma: float = 2.0
    smooth: float = 1e-5

    @property
    def dice(self) -> Dice:
        """Soft Dice with these options."""
        return self.dice_of()

    def dice_of(self, every_class: bool = False) -> Dice:
        """Returns soft Dice with these options; ``every_class``: see ``ClassTerm``."""
        return Dice(self.squared, self.background, self.batch, self.smooth, every_class)


def check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    """Raises ValueError unless the weights fit the terms ``names``."""
    if len(weights) != len(names):
        raise ValueError(f"loss weights {_spaced(weights)}: expected {len(names)}, for {' and '.join(names)}")
    check_signs("loss weights", weights)


def check_signs(what: str, weights: Sequence[float]) -> None:
    """Raises ValueError if a weight is negative or not finite, or if all are zero; an empty sequence is fine."""
    if not all(0 <= weight < float("inf") for weight in weights) or (weights and not any(weights)):
        raise ValueError(f"{what} {_spaced(weights)} must be finite, not negative, and not all zero")


def _spaced(weights: Sequence[float]) -> str:
    return " ".join(f"{weight:g}" for weight in weights)


def sum_over_voxels(
    logits: Tensor, label: Tensor, columns_of_chunk: ColumnsOfRun, inside: Inside | None = None, reach: int = 0
) -> Tensor:
    """Returns the sums of ``columns_of_chunk`` over all voxels, ``b s``, computed in chunks.

    Probabilities, targets and their products exist for one chunk at a time. Only logits and labels are saved for
    backward, which processes the chunks again.

    - ``inside``: the voxels that count, if logits and labels are a window with their neighbours
    - ``reach``: how many neighbours a chunk needs on each side
    """
    inside = inside or (slice(None),) * (label.ndim - 1)
    return _OverVoxels.apply(logits, label, columns_of_chunk, inside, reach)  # type: ignore[no-any-return]


class _OverVoxels(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, label: Tensor, columns_of_chunk: ColumnsOfRun, inside: Inside, reach: int
    ) -> Tensor:
        ctx.columns_of_chunk, ctx.inside, ctx.reach = columns_of_chunk, inside, reach
        ctx.save_for_backward(logits, label)
        total: Tensor | None = None
        for (truth, run), own in _windows(label, (logits,), inside, reach):
            columns = columns_of_chunk(run, truth, own)
            sums = torch.cat([rearrange(column, "b k ... -> b k (...)").sum(2) for column in columns], 1)
            total = sums if total is None else total.add_(sums)
        assert total is not None
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, label = ctx.saved_tensors
        dlogits = torch.zeros_like(logits) if ctx.reach else torch.empty_like(logits)
        for (truth, run, drun), own in _windows(label, (logits, dlogits), ctx.inside, ctx.reach):
            with torch.enable_grad():
                leaf = run.detach().requires_grad_()
                columns = ctx.columns_of_chunk(leaf, truth, own)
            dsums = grad.split([column.shape[1] for column in columns], 1)
            dcolumns = [dsum[(..., *[None] * len(own))].expand_as(x) for dsum, x in zip(dsums, columns)]
            # not those of labels alone; an edge does not keep its column in memory
            edges, dedges = zip(*((get_gradient_edge(x), dx) for x, dx in zip(columns, dcolumns) if x.requires_grad))
            del columns
            (dleaf,) = torch.autograd.grad(edges, leaf, dedges)
            if ctx.reach:  # windows overlap
                drun.add_(dleaf)
            elif dleaf.shape == logits.shape:  # the only chunk
                return dleaf, None, None, None, None
            else:
                drun.copy_(dleaf)
        return dlogits, None, None, None, None


def _windows(
    label: Tensor, logits: tuple[Tensor, ...], inside: Inside, reach: int
) -> Iterator[tuple[tuple[Tensor, ...], Inside]]:
    """Yields chunks of labels and logits along W with ``reach`` rows more on each side, and their voxels that count."""
    if not reach:
        for chunk in row_chunks(label, *logits):
            yield chunk, inside
        return
    first, last, _ = inside[0].indices(label.shape[1])
    rows = max(2 * reach, _rows_of_run(label, logits[0]) // NEIGHBOUR_SHARE)
    chunks = [(low, min(low + rows, last)) for low in range(first, last, rows)]
    for low, high in representative_pieces(chunks, label):
        start, stop = max(0, low - reach), min(label.shape[1], high + reach)
        window = (label[:, start:stop], *(x[:, :, start:stop] for x in logits))
        yield window, (slice(low - start, high - start), *inside[1:])


def row_chunks(label: Tensor, *logits: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields labels ``b W D H`` and logits ``b k W D H`` in chunks along W of at least one row.

    A chunk has at most ``RUN`` logits, on a GPU ``GPU_RUN``.
    """
    rows = max(1, _rows_of_run(label, logits[0]))
    return representative_pieces(list(zip(label.split(rows, 1), *(x.split(rows, 2) for x in logits))), label)


def _rows_of_run(label: Tensor, logits: Tensor) -> int:
    """Returns how many rows have as many logits as are in memory at a time."""
    most = RUN if device_type(label) == "cpu" else GPU_RUN
    return most // max(logits[:, :, :1].numel(), 1)
