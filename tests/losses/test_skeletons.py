"""The terms of thin structures: skeletons of known shapes, the papers' formulas, and sums over pieces of a tile."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import Tensor

from seqpar.losses import DeepSupervision, LossGroups, LossOptions, make_loss, mark_skeleton, terms
from seqpar.losses.skeletons import MARK, classes_and_marks
from seqpar.parallel.mesh import Mesh
from seqpar.spatial.box_grid import BoxGrid
from tests.support.ranks import relative

EXTENTS = (23, 11, 9)
EDGES = ((0, 12, 23), (0, 4, 11), (0, 9))  # boxes differ in size, and some are thinner than what is read around them


def example() -> tuple[Tensor, Tensor]:
    """Returns logits and labels of two samples with tubes of three voxels and of one, and an ignored slab."""
    toss = torch.Generator().manual_seed(4)
    label = torch.zeros(2, *EXTENTS, dtype=torch.long)
    label[:, 2:21, 4:7, 3:6], label[1, 10, 1:10, 4], label[:, 5:9, 8, :] = 1, 2, 2
    label[0, 22] = 9  # to be ignored
    logits = torch.randn(2, 3, *EXTENTS, generator=toss, dtype=torch.float64)
    return logits + 2 * F.one_hot(label.masked_fill(label == 9, 0), 3).movedim(-1, 1), label


def solid(*boxes: tuple[slice, ...]) -> Tensor:
    label = torch.zeros(1, 24, 20, 16, dtype=torch.uint8)
    for box in boxes:
        label[(0, *box)] = 1
    return label


BAR = (slice(3, 21), slice(6, 11), slice(5, 10))
SHAPES = {
    "nothing": ((), 0, 0),
    "voxel": (((slice(4, 5), slice(5, 6), slice(6, 7)),), 1, 0),
    "bar": ((BAR,), 1, 0),
    "two bars": ((BAR, (slice(3, 21), slice(14, 17), slice(5, 8))), 2, 0),
    "ring": (
        tuple((rows, columns, slice(6, 9)) for rows, columns in (
            (slice(3, 21), slice(3, 6)), (slice(3, 21), slice(14, 17)),
            (slice(3, 6), slice(3, 17)), (slice(18, 21), slice(3, 17)),
        )), 1, 1,
    ),
}  # fmt: skip


def skeleton_of(label: Tensor) -> Tensor:
    return classes_and_marks(mark_skeleton(label))[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_skeleton_keeps_pieces_and_holes_and_lies_in_its_label(shape: str) -> None:
    boxes, pieces, holes = SHAPES[shape]
    label = solid(*boxes)
    marked = mark_skeleton(label)
    classes, on_skeleton = classes_and_marks(marked)
    assert torch.equal(classes, label.long()) and marked.dtype == torch.int16
    skeleton = on_skeleton[0].numpy()
    assert ndimage.label(skeleton, np.ones((3, 3, 3)))[1] == pieces
    middle = skeleton.any(2)  # a ring lies in the plane of the first two axes
    assert ndimage.label(~middle)[1] == 1 + holes
    assert skeleton.sum() <= int(label.sum())


def test_a_skeleton_is_along_the_middle_and_widened_by_two_voxels_inside_the_label() -> None:
    thin, thick = (solid((slice(3, 21), slice(9 - r, 10 + r), slice(8 - r, 9 + r))) for r in (1, 4))
    of_thin, of_thick = (skeleton_of(label) for label in (thin, thick))
    assert torch.equal(of_thin[0, 6:18], thin[0, 6:18] > 0), "a tube of three voxels is its own widened skeleton"
    across = torch.zeros(20, 16, dtype=torch.bool)
    for d in range(20):
        for h in range(16):
            across[d, h] = abs(d - 9) + abs(h - 8) <= 2
    assert torch.equal(of_thick[0, 12], across)


def test_labels_share_a_skeleton_and_ignored_voxels_have_none() -> None:
    label = solid(BAR).short()
    label[0, 12:][label[0, 12:] > 0] = 2
    assert torch.equal(skeleton_of(label), skeleton_of((label > 0).short()))
    ignored = mark_skeleton(label, ignore_label=2)
    assert torch.equal(ignored[:, 12:], label[:, 12:]) and bool((ignored[:, :12] >= 2 * MARK).any())


def test_skeleton_recall_is_the_papers_formula_beside_dice_and_cross_entropy() -> None:
    logits, label = example()
    marked = mark_skeleton(label, 9)
    parts = make_loss("skeleton-recall", ignore_label=9).parts(logits, marked)
    usual = make_loss("dice-ce", ignore_label=9).parts(logits, label)
    scores = []
    for b in range(2):
        for k in (1, 2):
            skeleton = (marked[b] == k + 2 * MARK).double()
            scores.append(((logits[b].softmax(0)[k] * skeleton).sum() + 1e-5) / (skeleton.sum() + 1e-5))
    assert list(parts.terms) == ["dice", "ce", "skeleton_recall"]
    assert relative(parts.terms["skeleton_recall"], 1 - torch.stack(scores).mean()) < 1e-13
    assert all(relative(parts.terms[name], usual.terms[name]) < 1e-13 for name in usual.terms)
    regions = make_loss("skeleton-recall", regions=((1, 2), (2,)), ignore_label=9).parts(logits[:, 1:], marked)
    assert 0 < float(regions.terms["skeleton_recall"]) < 1


def test_what_cannot_be_marked_is_refused() -> None:
    label = torch.zeros(1, 4, 4, 4, dtype=torch.long)
    label[:, 1:3, 2, 2] = 1
    assert torch.equal(mark_skeleton(label.float()), mark_skeleton(label))
    for wrong, words in (
        (mark_skeleton(label), "labels from 0 to 16385 came: give whole numbers below 8192, not marked"),
        (label * 0.5, "whole numbers"),
        (label * 8192, "whole numbers below 8192"),
        (label[:, None], "without channels"),
    ):
        with pytest.raises(ValueError, match=words):
            mark_skeleton(wrong)


def test_labels_without_marks_are_refused() -> None:
    logits, label = example()
    with pytest.raises(ValueError, match=r"no skeleton was made for: give this loss what mark_skeleton\(label\)"):
        make_loss("skeleton-recall", ignore_label=9)(logits, label)
    of_boxes = mark_skeleton(label, 9)[:, 2:3]  # some have no voxel of the skeleton, and are fine
    assert make_loss("skeleton-recall", ignore_label=9)(logits[:, :, 2:3], of_boxes).isfinite()
    nothing = torch.zeros_like(label)
    assert make_loss("skeleton-recall")(logits, nothing).isfinite()


def released_skeleton(x: Tensor, iterations: int = 3) -> Tensor:
    """The release's ``soft_skel`` (jocpae/clDice), by pooling."""

    def erode(x: Tensor) -> Tensor:
        kernels = (3, 1, 1), (1, 3, 1), (1, 1, 3)
        least = [-F.max_pool3d(-x, kernel, 1, tuple(side // 2 for side in kernel)) for kernel in kernels]
        return torch.min(torch.min(least[0], least[1]), least[2])

    def opened(x: Tensor) -> Tensor:
        return F.max_pool3d(erode(x), (3, 3, 3), 1, (1, 1, 1))

    skeleton = F.relu(x - opened(x))
    for _ in range(iterations):
        x = erode(x)
        removed = F.relu(x - opened(x))
        skeleton = skeleton + F.relu(removed - skeleton * removed)
    return skeleton


def cldice_by_hand(logits: Tensor, label: Tensor) -> Tensor:
    lost, seen = [], label != 9
    for b in range(2):
        for k in (1, 2):
            p, t = logits[b].softmax(0)[k] * seen[b], (label[b] == k).double()
            bones, true_bones = (released_skeleton(x[None, None])[0, 0] for x in (p, t))
            precision = ((bones * t)[seen[b]].sum() + 1) / (bones[seen[b]].sum() + 1)
            recall = ((true_bones * p)[seen[b]].sum() + 1) / (true_bones[seen[b]].sum() + 1)
            lost.append(1 - 2 * precision * recall / (precision + recall))
    return torch.stack(lost).mean()


def test_cldice_is_the_release_s_for_each_class_and_sample() -> None:
    logits, label = example()
    logits.requires_grad_()
    parts, want = make_loss("cldice", ignore_label=9).parts(logits, label), cldice_by_hand(logits, label)
    assert list(parts.terms) == ["dice", "ce", "cldice"]
    assert relative(parts.terms["cldice"], want) < 1e-13
    slopes = [torch.autograd.grad(value, logits)[0] for value in (parts.terms["cldice"], want)]
    assert relative(*slopes) < 1e-12
    perfect = 1000.0 * F.one_hot(label.masked_fill(label == 9, 0), 3).movedim(-1, 1)
    assert float(make_loss("cldice", ignore_label=9)(perfect, label)) < 1e-6


def test_cldice_of_images_is_that_of_volumes_one_voxel_thick() -> None:
    logits, label = (x[..., :1] for x in example())
    flat, thick = (make_loss("cldice")(x, y % 3) for x, y in ((logits[..., 0], label[..., 0]), (logits, label)))
    assert relative(flat, thick) < 1e-13


def test_cldice_in_chunks_of_rows_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, label = example()
    results = []
    for run in (1, 1 << 30):  # chunks of as few rows as there are, and one
        monkeypatch.setattr(terms, "RUN", run)
        leaf = logits.clone().requires_grad_()
        loss = make_loss("cldice", ignore_label=9)(leaf, label)
        results.append((loss, *torch.autograd.grad(loss, leaf)))
    assert max(relative(a, b) for a, b in zip(*results)) < 1e-12


def test_sums_of_pieces_leave_the_terms_of_skeletons_out() -> None:
    logits, label = example()
    usual = make_loss("dice-ce", weights=(2.0, 1.0), ignore_label=9)
    for name in ("skeleton-recall", "cldice"):
        loss = make_loss(name, weights=(2.0, 1.0, 3.0), ignore_label=9)
        pieces = loss.of_pieces()
        assert torch.equal(pieces.sums(logits[:1], label[:1]), usual.sums(logits[:1], label[:1]))
        assert pieces.weights == usual.weights and len(loss.terms) == 3


def gaps_of_boxes(mesh: Mesh) -> dict[str, tuple[float, float]]:
    """Returns the gaps to one process, of loss and gradient."""
    logits, label = example()
    group, found = mesh.seq, {}
    edges = EDGES if group.size == 4 else (EDGES[0], *((0, extent) for extent in EXTENTS[1:]))
    grid = BoxGrid(edges, group)
    inside = (..., *(slice(*side) for side in grid.box))
    for name, batch, lacking in (
        ("skeleton-recall", False, 0), ("skeleton-recall", True, 0), ("cldice", False, 0), ("cldice", True, 0),
        ("cldice", False, 3),
    ):  # fmt: skip
        loss = make_loss(name, LossOptions(batch=batch), ignore_label=9)
        truth = mark_skeleton(label, 9) if name == "skeleton-recall" else label
        whole = logits.clone().requires_grad_()
        want = loss(whole, truth)
        (grad,) = torch.autograd.grad(want, whole)
        loss.reach -= lacking
        box = logits[inside].clone().requires_grad_()
        got = loss(box, truth[inside], LossGroups(voxels=group, boxes=grid))
        (mine,) = torch.autograd.grad(got, box)
        found[f"{name}, {batch}, {lacking}"] = relative(got, want), relative(mine / group.size, grad[inside])
    levels = DeepSupervision(make_loss("cldice", ignore_label=9), [(1, 1, 1), (1, 1, 3)])
    whole, box = (x.clone().requires_grad_() for x in (logits, logits[inside]))
    want = levels([whole, whole[..., ::3]], label)
    got = levels([box, box[..., ::3]], label[inside], LossGroups(voxels=group, boxes=grid))
    (grad,), (mine,) = torch.autograd.grad(want, whole), torch.autograd.grad(got, box)
    found = {"levels": (relative(got, want), relative(mine / group.size, grad[inside])), **found}
    if group.size > 1:
        with pytest.raises(ValueError, match="loss_groups without boxes"):
            loss(box, label[inside], LossGroups(voxels=group))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_of_boxes_they_are_those_of_the_tile(world: int, ranks: Callable[..., list]) -> None:
    """The control is last: fewer voxels around a box give another loss."""
    for every in ranks(world, gaps_of_boxes):
        *exact, control = every.values()
        assert all(max(gaps) < 1e-12 for gaps in exact), every
        assert max(control) > 1e-6, every
