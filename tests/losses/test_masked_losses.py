"""Labels that show only some classes: no term sees the others, whatever ranks share samples and voxels."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from monai.losses.dice import DiceLoss
from monai.losses.focal_loss import FocalLoss
from torch import Tensor

from seqpar.losses import Loss, LossGroups, LossOptions, make_loss, terms
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import relative

CLASSES = 4  # background, and organs 1, 2, 3
SHOWN = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
REGIONS = ((1, 2, 3), (1, 3), (3,))
REGIONS_SHOWN = torch.tensor([[1, 1, 1], [0, 1, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
WEIGHTS = (0.5, 2.0, 1.0, 3.0)


def example() -> tuple[Tensor, Tensor]:
    """Returns logits and labels of four samples; a class that a sample does not show is labelled as background."""
    toss = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(4, CLASSES, 6, 4, 3, generator=toss, dtype=torch.float64)
    label = torch.randint(0, CLASSES, (4, 6, 4, 3), generator=toss)
    for sample, shown in zip(label, SHOWN):
        sample[~torch.isin(sample, shown.nonzero()[:, 0])] = 0
    label[0, 0] = 9  # to be ignored
    return logits, label


def by_hand(logits: Tensor, label: Tensor, options: LossOptions, weights: tuple) -> Tensor:
    """Returns Dice and cross-entropy class by class and voxel by voxel."""
    weights = torch.tensor(weights, dtype=torch.float64) * SHOWN
    lost = total = voxel_lost = voxel_total = torch.zeros((), dtype=torch.float64)
    for b in range(len(logits)):
        seen = (label[b] != 9).flatten()
        z, truth = logits[b].flatten(1)[:, seen], label[b].flatten()[seen]
        p, log_p = z.softmax(0), z.log_softmax(0)
        for k in range(0 if options.background else 1, CLASSES):
            t = (truth == k).double()
            below = p[k] ** 2 if options.squared else p[k]
            dice = (2 * (p[k] * t).sum() + 1e-5) / (below.sum() + t.sum() + 1e-5)
            lost, total = lost + weights[b, k] * (1 - dice), total + weights[b, k]
        own = -log_p.gather(0, truth[None])[0]
        voxel_lost = voxel_lost + (weights[b][truth] * own).sum()
        voxel_total = voxel_total + weights[b][truth].sum()
    return lost / total + voxel_lost / voxel_total


CASES = {
    "dice-ce": ("dice-ce", LossOptions(), ()),
    "squared, with background": ("dice-ce", LossOptions(squared=True, background=True), ()),
    "class weights": ("dice-ce", LossOptions(), WEIGHTS),
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_the_formula(case: str) -> None:
    logits, label = example()
    name, options, weights = CASES[case]
    loss = make_loss(name, options, ignore_label=9, class_weights=weights)
    want = by_hand(logits, label, options, weights or (1.0,) * CLASSES)
    assert relative(loss(logits, label, annotated=SHOWN), want) < 1e-12
    assert relative(loss(logits, label), want) > 1e-3, "the control: without the lists it is another loss"


@pytest.mark.parametrize("shown", [SHOWN, None], ids=["missing organs", "all organs"])
@pytest.mark.parametrize("weights", [WEIGHTS, ()], ids=["class weights", "weights of one"])
def test_dice_focal_is_lamps_mean_over_samples_and_classes(shown: Tensor | None, weights: tuple) -> None:
    """The release multiplies losses ``b k`` by weights and flags and averages them; its focal loss is MONAI's."""
    logits, label = example()
    label = label.masked_fill(label == 9, 0)
    truth = F.one_hot(label, CLASSES).movedim(-1, 1).double()
    dice = DiceLoss(softmax=True, reduction="none")(logits, truth).flatten(1)
    log_p = logits.log_softmax(1)
    focal = -((1 - log_p.exp()) ** 2 * log_p * truth).flatten(2).mean(2)
    monais = FocalLoss(use_softmax=True, gamma=2.0, reduction="none")(logits, truth).flatten(2).mean(2)
    assert relative(focal, monais) < 1e-6, "MONAI computes it in float32"
    weight = torch.tensor(weights or (1.0,) * CLASSES).double() * (1 if shown is None else shown)
    want = (dice * weight).mean() + 0.5 * (focal * weight).mean()
    loss = make_loss("dice-focal", LossOptions(background=True), (1.0, 0.5), class_weights=weights)
    parts = loss.parts(logits, label, annotated=shown)
    assert relative(parts.total, want) < 1e-13 and relative(parts.terms["focal"], (focal * weight).mean()) < 1e-13
    voxelwise = make_loss("focal", LossOptions(), class_weights=weights)(logits, label, annotated=shown)
    assert relative(voxelwise, (focal * weight).mean()) > 1, "the control: a mean over voxels weighs more"


def pooled_by_hand(logits: Tensor, label: Tensor, shown: Tensor, weights: tuple) -> Tensor:
    """Returns Dice of sums over the samples that show a class; its weight counts once, however many these are."""
    lost = total = torch.zeros((), dtype=torch.float64)
    for k in range(1, CLASSES):
        both = either = torch.zeros((), dtype=torch.float64)
        for b in shown[:, k].nonzero()[:, 0].tolist():
            seen = label[b] != 9
            p, t = logits[b].softmax(0)[k][seen], (label[b] == k).double()[seen]
            both, either = both + (p * t).sum(), either + p.sum() + t.sum()
        lost, total = lost + weights[k] * (1 - (2 * both + 1e-5) / (either + 1e-5)), total + weights[k]
    return lost / total


@pytest.mark.parametrize("weights", [(), WEIGHTS])
def test_dice_over_the_batch_weighs_a_class_once_however_many_samples_show_it(weights: tuple) -> None:
    logits, label = example()
    shown = SHOWN.clone()
    shown[3, 1] = True  # in more samples than the others
    loss = make_loss("dice", LossOptions(batch=True), ignore_label=9, class_weights=weights)
    want = pooled_by_hand(logits, label, shown, weights or (1.0,) * CLASSES)
    assert relative(loss(logits, label, annotated=shown), want) < 1e-12


def losses() -> list[tuple[Loss, Tensor, bool]]:
    """Returns losses with what labels show, and whether outputs exclude each other."""
    every = []
    for batch in (False, True):
        for name in ("dice-ce", "dice-focal"):
            options = LossOptions(background=True, batch=batch)
            every.append((make_loss(name, options, ignore_label=9, class_weights=WEIGHTS), SHOWN, True))
            regions = make_loss(name, options, regions=REGIONS, ignore_label=9, class_weights=WEIGHTS[:3])
            every.append((regions, REGIONS_SHOWN, False))
    return every


def test_absent_organs_and_the_background_of_their_samples_have_exactly_no_gradient() -> None:
    logits, label = example()
    for loss, shown, exclusive in losses():
        leaf = (logits if exclusive else logits[:, :3]).clone().requires_grad_()
        (grad,) = torch.autograd.grad(loss(leaf, label, annotated=shown), leaf)
        assert (grad[~shown] == 0).all()
        assert all(float(grad[b, k].abs().max()) > 1e-6 for b, k in shown.nonzero().tolist())
        changed = leaf.detach().clone()
        hidden = changed[3] if exclusive else changed[2]
        hidden += 1.0  # of a sample that shows nothing
        assert loss(changed, label, annotated=shown) == loss(leaf.detach(), label, annotated=shown)


def test_labels_that_show_all_and_weights_of_one_change_nothing() -> None:
    logits, label = example()
    for name in ("dice-ce", "dice-focal"):
        for batch in (False, True):
            plain = make_loss(name, LossOptions(batch=batch), ignore_label=9)
            ones = make_loss(name, LossOptions(batch=batch), ignore_label=9, class_weights=(1.0,) * CLASSES)
            want = plain(logits, label)
            for value in (ones(logits, label), plain(logits, label, annotated=torch.ones_like(SHOWN))):
                assert relative(value, want) < 1e-13
    torchs = F.cross_entropy(logits, label, torch.tensor(WEIGHTS, dtype=torch.float64), ignore_index=9)
    ours = make_loss("dice-ce", LossOptions(), ignore_label=9, class_weights=WEIGHTS).parts(logits, label)
    assert relative(ours.terms["ce"], torchs) < 1e-13, "voxels weigh as torch weighs them"


def test_nothing_shown_at_all_is_no_loss() -> None:
    logits, label = example()
    leaf = logits[3:].clone().requires_grad_()
    loss = make_loss("dice-ce", LossOptions())(leaf, label[3:], annotated=SHOWN[3:])
    assert loss == 0 and not torch.autograd.grad(loss, leaf)[0].any()


def test_runs_of_rows_and_pieces_of_a_volume_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, label = example()
    for loss, shown, exclusive in losses():
        inputs = logits if exclusive else logits[:, :3]
        whole = loss(inputs, label, annotated=shown)
        with monkeypatch.context() as patched:
            patched.setattr(terms, "RUN", 1)
            assert relative(loss(inputs, label, annotated=shown), whole) < 1e-13
        one, truth, own = inputs[1:2], label[1:2], shown[1:2]
        pieces = zip(one.split([2, 3, 1], 2), truth.split([2, 3, 1], 1))
        sums = torch.stack([loss.sums(*piece, own) for piece in pieces]).sum(0)
        assert relative(loss.of_sums(sums, own).total, loss(one, truth, annotated=own)) < 1e-13


def gaps(mesh: Mesh) -> list[float]:
    """Returns the differences of all losses to one process: samples over data, voxels over seq, uneven."""
    logits, label = example()
    differences = []
    for loss, shown, exclusive in losses():
        whole = (logits if exclusive else logits[:, :3]).clone().requires_grad_()
        want = loss(whole, label, annotated=shown)
        (grad,) = torch.autograd.grad(want, whole)
        sizes = [4, 2] if mesh.seq.size == 2 else [6]
        pick = lambda t, dim: t.chunk(mesh.data.size)[mesh.data.index].split(sizes, dim)[mesh.seq.index]  # noqa: E731
        part = pick(whole.detach(), 2).requires_grad_()
        groups = LossGroups(mesh.seq if mesh.seq.size > 1 else None, (mesh.data,) if mesh.data.size > 1 else ())
        value = loss(part, pick(label, 1), groups, shown.chunk(mesh.data.size)[mesh.data.index])
        (mine,) = torch.autograd.grad(value, part)
        mean = all_reduce(value.detach(), mesh.world) / mesh.world.size
        differences += [relative(mean, want), relative(mine / mesh.world.size, pick(grad, 2))]
    return differences


@pytest.mark.parametrize(("data", "seq"), [(1, 2), (2, 1), (2, 2)])
def test_the_mean_of_all_ranks_losses_is_the_batchs(data: int, seq: int, ranks: Callable[..., list]) -> None:
    for of_rank in ranks(data * seq, gaps, seqpar=seq):
        assert len(of_rank) == 16 and max(of_rank) < 1e-12, of_rank


def test_wrong_weights_are_refused() -> None:
    logits, label = example()
    with pytest.raises(ValueError, match="class weights 0 0 must be finite, not negative, and not all zero"):
        make_loss("dice-ce", LossOptions(), class_weights=(0, 0))
    with pytest.raises(ValueError, match="do not match"):
        make_loss("dice-ce", LossOptions(), ignore_label=9)(logits, label, annotated=SHOWN[:, :3])
