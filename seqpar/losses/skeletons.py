"""Terms for thin structures: recall on the labels' skeletons, and centreline Dice of soft skeletons.

Legend: b batch, k classes or regions, ``...`` or W D H voxels.
"""

from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from seqpar.late_import import late
from seqpar.losses.terms import ClassTerm, Voxels

ndimage, morphology = late("scipy.ndimage"), late("skimage.morphology")  # batchgenerators needs both
MARK = 1 << 13  # what ``mark_skeleton`` adds to the labels of the foreground, and once more on its skeleton
RECALL_SMOOTH, CLDICE_SMOOTH = 1e-5, 1.0  # those of the papers' releases


def mark_skeleton(label: Tensor, ignore_label: int | None = None) -> Tensor:
    """Returns whole labels ``b W D H`` in which the voxels on a skeleton are marked, for ``"skeleton-recall"``.

    The skeleton is that of all labels together but for 0 and ``ignore_label``, widened by two voxels inside them
    (Kirchhoff et al. 2024). It is computed on a CPU. The marks, 8192 in the foreground and 16384 on its skeleton, are
    added to the labels, so that whatever cuts and moves a label moves them too.

    Example::

        loss_fn = make_loss("skeleton-recall")
        loss_fn(logits, mark_skeleton(label)).backward()
    """
    if label.ndim not in (3, 4):
        raise ValueError(f"labels of shape {tuple(label.shape)}: give a batch of labels without channels, b W D H")
    whole = label.long()
    if not bool(((label == whole) & (whole.abs() < MARK)).all()):
        raise ValueError(
            f"labels from {label.min()} to {label.max()} came: give whole numbers below {MARK}, not marked"
        )
    marks = np.stack([_marks_of(each.numpy(), ignore_label) for each in label.cpu()])
    return label.to(torch.int16) + MARK * torch.from_numpy(marks).to(label.device)


def classes_and_marks(label: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the classes ``b W D H`` of a marked label, and which of its voxels are on a skeleton."""
    label = label.long()
    return torch.where(label >= MARK, label % MARK, label), label >= 2 * MARK


def _marks_of(label: np.ndarray, ignore_label: int | None) -> np.ndarray:
    """Returns the marks of a label ``W D H``: 1 in the foreground, 2 on its widened skeleton, else 0."""
    foreground = (label != 0) & (label != ignore_label)
    marks = foreground.astype(np.int16)
    if foreground.any():
        (box,) = ndimage.find_objects(marks)
        marks[box] += foreground[box] & ndimage.binary_dilation(morphology.skeletonize(foreground[box]), iterations=2)
    return marks


class SkeletonRecall(ClassTerm):
    """Soft recall on the labels' skeletons (Kirchhoff et al. 2024): a voxel that is missed there may cut a vessel."""

    name, num_sums, needs_marks = "skeleton_recall", 2, True

    def __init__(self, background: bool, batch: bool) -> None:
        self.background, self.batch = background, batch

    def each(self, voxels: Voxels) -> Sequence[Tensor]:
        """Returns the probability on the skeleton of each class, and the skeleton."""
        assert voxels.marked is not None
        skeleton = voxels.target * voxels.marked[:, None]
        return voxels.probability * skeleton, skeleton

    def score(self, sums: Tensor) -> Tensor:
        """Returns the recall of each class, 1 without a skeleton."""
        found, skeleton = sums
        return (found + RECALL_SMOOTH) / (skeleton + RECALL_SMOOTH)


class ClDice(ClassTerm):
    """Centreline Dice (Shit et al. 2021): how much of each soft skeleton, predicted and true, is in the other's mask.

    - ``iterations``: of the soft skeleton, at least the radius in voxels of the thickest structure
    """

    name, num_sums = "cldice", 4

    def __init__(self, background: bool, batch: bool, iterations: int = 3) -> None:
        self.background, self.batch, self.iterations = background, batch, iterations
        self.reach = iterations + 2  # voxels: an erosion each, and the last opening

    def each(self, voxels: Voxels) -> Sequence[Tensor]:
        """Returns the predicted skeleton x target, the predicted skeleton, true skeleton x probability, true skeleton.

        The background has no skeletons unless it counts; ignored voxels belong to no class.
        """
        p, t = voxels.probability, voxels.target
        if voxels.counted is not None:
            p, t = p * voxels.counted[:, None], t * voxels.counted[:, None]
        omitted = 0 if voxels.regions or self.background else 1
        predicted, true = (soft_skeleton(x[:, omitted:], self.iterations) for x in (p, t))
        blank = torch.zeros_like(p[:, :omitted])
        products = predicted * t[:, omitted:], predicted, true * p[:, omitted:], true
        return [torch.cat([blank, x], 1) for x in products]

    def score(self, sums: Tensor) -> Tensor:
        """Returns the harmonic mean of each class's precision and recall on the skeletons."""
        precise, predicted, found, true = sums
        precision = (precise + CLDICE_SMOOTH) / (predicted + CLDICE_SMOOTH)
        recall = (found + CLDICE_SMOOTH) / (true + CLDICE_SMOOTH)
        return 2 * precision * recall / (precision + recall)


def soft_skeleton(x: Tensor, iterations: int) -> Tensor:
    """Returns the soft skeletons of masks ``b k W D H`` in 0 to 1: what an opening removes, erosion after erosion."""
    x_open = _dilate(_erode(x))
    skeleton = (x - x_open).relu()
    for _ in range(iterations):
        x = _erode(x)
        removed = (x - _dilate(_erode(x))).relu()
        skeleton = skeleton + (removed - skeleton * removed).relu()
    return skeleton


def _erode(x: Tensor) -> Tensor:
    """Returns the least of each voxel and its 6 neighbours; outside the volume there are none."""
    return reduce(torch.minimum, (_of_three(x, dim, torch.minimum) for dim in range(2, x.ndim)))


def _dilate(x: Tensor) -> Tensor:
    """Returns the largest of each voxel and its 26 neighbours."""
    for dim in range(2, x.ndim):
        x = _of_three(x, dim, torch.maximum)
    return x


def _of_three(x: Tensor, dim: int, choose: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Returns what ``choose`` takes of each voxel and its two neighbours along ``dim``.

    Pooling would do the same, but its backward on a GPU adds in any order.
    """
    extent = x.shape[dim]
    wide = torch.cat([x.narrow(dim, 0, 1), x, x.narrow(dim, extent - 1, 1)], dim)
    before, after = wide.narrow(dim, 0, extent), wide.narrow(dim, 2, extent)
    return choose(choose(before, x), after)
