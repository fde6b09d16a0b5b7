"""The loss of parts is the loss of the tile; each term is the formula written out."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqpar.losses import LOSSES, DiceCE, Loss, LossGroups, LossOptions, make_loss, terms
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Mesh
from seqpar.planner.memory_counter import saved_bytes
from tests.support.new_tensors import NewTensors
from tests.support.ranks import relative

REGIONS = ((1, 2, 3), (1, 3), (3,))


def example(samples: int = 2, width: int = 7) -> tuple[Tensor, Tensor]:
    toss = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(samples, 4, width, 3, 2, generator=toss, dtype=torch.float64)
    label = torch.randint(0, 4, (samples, width, 3, 2), generator=toss)
    label[0, 0] = 9  # to be ignored
    return logits, label


def by_hand(
    logits: Tensor, label: Tensor, regions: tuple, background: bool, batch_dice: bool, squared: bool = False
) -> Tensor:
    """Returns nnU-Net's Dice (V-Net's if squared) + cross-entropy, plus one, sample by sample and class by class."""
    seen = label != 9
    shares = logits.sigmoid() if regions else logits.softmax(1)
    classes = regions or [(k,) for k in range(logits.shape[1])]
    both, either = torch.zeros(2, len(logits), len(classes), dtype=torch.float64)
    for b in range(len(logits)):
        for k, members in enumerate(classes):
            truth = sum((label[b] == m) for m in members)[seen[b]].double()
            p = shares[b, k][seen[b]]
            below = p * p if squared else p
            both[b, k], either[b, k] = (p * truth).sum(), below.sum() + truth.sum()
    if not regions and not background:
        both, either = both[:, 1:], either[:, 1:]
    if batch_dice:
        both, either = both.sum(0), either.sum(0)
    dice = 1 - ((2 * both + 1e-5) / (either + 1e-5)).mean()
    if regions:
        truth = torch.stack([sum((label == m) for m in members) for members in classes], 1).double()
        bce = F.binary_cross_entropy_with_logits(logits, truth, reduction="none").mean(1)
        return dice + bce[seen].mean()
    return dice + F.cross_entropy(logits, label, ignore_index=9)


CASES = [
    dict(regions=regions, background=background, batch_dice=batch)
    for regions in ((), REGIONS)
    for background in (False, True)
    for batch in (False, True)
] + [dict(regions=regions, background=True, batch_dice=False, squared=True) for regions in ((), REGIONS)]


@pytest.mark.parametrize("options", CASES)
def test_the_loss_is_the_formula(options: dict) -> None:
    logits, label = example()
    logits = logits[:, :3] if options["regions"] else logits
    assert relative(DiceCE(**options, ignore_label=9)(logits, label), by_hand(logits, label, **options)) < 1e-13


def test_perfect_is_zero_also_where_a_class_is_absent() -> None:
    label = torch.zeros(1, 4, 4, 4, dtype=torch.long)
    label[0, 1:3, 1:3, 1:3] = 2  # class 1 and 3 are absent
    logits = 1000.0 * F.one_hot(label, 4).movedim(-1, 1)
    assert float(DiceCE()(logits, label)) < 1e-6


@pytest.mark.parametrize("options", [case for case in CASES if not case["batch_dice"]])
def test_the_loss_of_a_volume_comes_from_sums_over_its_pieces(options: dict) -> None:
    logits, label = (t[:1] for t in example())
    logits = logits[:, :3] if options["regions"] else logits
    loss = DiceCE(**options, ignore_label=9)
    pieces = zip(logits.split([3, 1, 3], 2), label.split([3, 1, 3], 1))
    got = loss.of_sums(torch.stack([loss.sums(*piece) for piece in pieces]).sum(0))
    want = loss.parts(logits, label)
    assert relative(got.total, want.total) < 1e-13 and got.terms.keys() == want.terms.keys() == {"dice", "ce"}
    assert all(relative(got.terms[name], want.terms[name]) < 1e-13 for name in want.terms)


def gaps_of_voxels(mesh: Mesh) -> list[tuple[float, float]]:
    return [check_voxels(mesh, [4, 1, 2], options) for options in CASES]


def check_voxels(mesh: Mesh, sizes: list[int], options: dict) -> tuple[float, float]:
    logits, label = example()
    logits = logits[:, :3] if options["regions"] else logits
    loss = DiceCE(**options, ignore_label=9)
    whole = logits.clone().requires_grad_()
    want = loss(whole, label)
    (grad,) = torch.autograd.grad(want, whole)
    group = mesh.seq
    part = logits.split(sizes, 2)[group.index].requires_grad_()
    got = loss(part, label.split(sizes, 1)[group.index], LossGroups(voxels=group))
    (mine,) = torch.autograd.grad(got, part)
    return relative(got, want), relative(mine / group.size, grad.split(sizes, 2)[group.index])


def test_the_loss_of_unequal_parts_is_the_loss_of_the_tile(ranks: Callable[..., list]) -> None:
    for of_rank in ranks(3, gaps_of_voxels):
        assert all(max(gaps) < 1e-13 for gaps in of_rank), dict(zip(map(str, CASES), of_rank))


def check_samples(mesh: Mesh, options: dict, shared: bool, other_loss: Loss | None = None) -> tuple[float, float]:
    """Samples over data, voxels over seq: the mean of all ranks' losses is the loss of the batch."""
    logits, label = example(samples=4, width=6)
    logits = logits[:, :3] if options["regions"] else logits
    loss = other_loss or DiceCE(**options, ignore_label=9)
    whole = logits.clone().requires_grad_()
    want = loss(whole, label)
    (grad,) = torch.autograd.grad(want, whole)
    pick = lambda t, dim: t.chunk(2)[mesh.data.index].chunk(2, dim)[mesh.seq.index]  # noqa: E731
    part = pick(logits, 2).requires_grad_()
    loss_groups = LossGroups(mesh.seq, (mesh.data,) if shared else ())
    got = loss(part, pick(label, 1), loss_groups)
    (mine,) = torch.autograd.grad(got, part)
    mean = all_reduce(got, mesh.world) / mesh.world.size
    return relative(mean, want), relative(mine / mesh.world.size, pick(grad, 2))


def gaps_of_samples(mesh: Mesh) -> list[tuple[float, float]]:
    return [*(check_samples(mesh, options, True) for options in CASES), check_samples(mesh, CASES[0], False)]


def test_the_mean_of_all_ranks_losses_is_the_loss_of_the_batch(ranks: Callable[..., list]) -> None:
    """The control is last: ignored voxels differ between samples, so that unshared means are another number."""
    for *of_rank, unshared in ranks(4, gaps_of_samples, seqpar=2):
        assert all(max(gaps) < 1e-13 for gaps in of_rank), dict(zip(map(str, CASES), of_rank))
        assert unshared[0] > 1e-4


@pytest.mark.parametrize("options", CASES)
def test_runs_of_rows_give_the_loss_and_the_gradient_of_all_voxels_at_once(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, label = example()
    logits = logits[:, :3] if options["regions"] else logits
    results = []
    for run in (1, 2 * logits[:, :, :1].numel(), 1 << 20):  # rows one by one, by two, all
        monkeypatch.setattr(terms, "RUN", run)
        leaf = logits.clone().requires_grad_()
        loss = DiceCE(**options, ignore_label=9)(leaf, label)
        results.append((loss, *torch.autograd.grad(loss, leaf)))
    assert max(relative(a, b) for other in results[:2] for a, b in zip(other, results[2])) < 1e-12


@pytest.mark.parametrize("regions", [(), REGIONS])
def test_beside_the_gradient_no_tensor_is_larger_than_a_run(regions: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, label = torch.randn(1, 3, 32, 8, 8), torch.randint(0, 4 if regions else 3, (1, 32, 8, 8))
    for rows in (2, 32):
        monkeypatch.setattr(terms, "RUN", rows * 3 * 64)
        leaf = logits.clone().requires_grad_()
        with NewTensors() as made:
            DiceCE(regions, ignore_label=9)(leaf, label).backward()
        large = [size for size in made.sizes if size > 2 * 3 * 64]
        assert (large == [logits.numel()]) == (rows == 2), (rows, large)  # 32 is the control


def test_the_loss_holds_logits_and_labels_alone() -> None:
    conv, label = nn.Conv3d(1, 3, 1), torch.randint(0, 3, (1, 16, 8, 8))
    image = torch.randn(1, 1, 16, 8, 8)
    logits_alone = saved_bytes(conv, lambda: conv(image).sum())
    saved = saved_bytes(conv, lambda: DiceCE()(conv(image), label))
    assert 0 <= saved - logits_alone - 4 * 3 * label.numel() - 8 * label.numel() < 1000  # some sums of each class


def test_the_weights_of_the_terms_act_wherever_the_loss_is_taken() -> None:
    logits, label = (t[:1] for t in example())
    loss = DiceCE(dice_weight=0.25, ce_weight=2.0, ignore_label=9)
    plain = DiceCE(ignore_label=9).parts(logits, label)
    want = 0.25 * plain.terms["dice"] + 2.0 * plain.terms["ce"]
    assert plain.total == plain.terms["dice"] + plain.terms["ce"] != want
    for parts in (loss.parts(logits, label), loss.of_sums(loss.sums(logits, label))):
        assert relative(parts.total, want) < 1e-13 and relative(parts.terms["dice"], plain.terms["dice"]) < 1e-13
    assert loss(logits, label) == want and loss.weighted({"dice": 1.0, "ce": 1.0}) == 2.25


def focal_by_hand(logits: Tensor, label: Tensor, regions: tuple, gamma: float) -> Tensor:
    """Returns the focal loss voxel by voxel; of regions, the mean over voxels and regions."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for place in (label != 9).nonzero():
        b, *at = place.tolist()
        z, truth = logits[(b, slice(None), *at)], int(label[(b, *at)])
        if regions:
            shares = [z[k].sigmoid() if truth in members else 1 - z[k].sigmoid() for k, members in enumerate(regions)]
        else:
            shares = [z.softmax(0)[truth]]
        for p in shares:
            total = total - (1 - p) ** gamma * p.log() / len(shares)
        count += 1
    return total / count


def focal_of_classes(logits: Tensor, label: Tensor, regions: tuple, gamma: float) -> Tensor:
    """Returns the mean over samples of their focal losses, for classes a k-th of it."""
    own = [focal_by_hand(logits[b : b + 1], label[b : b + 1], regions, gamma) for b in range(len(logits))]
    return torch.stack(own).mean() / (1 if regions else logits.shape[1])


@pytest.mark.parametrize("gamma", [0.0, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("regions", [(), REGIONS])
def test_the_focal_loss_is_the_formula(regions: tuple, gamma: float) -> None:
    logits, label = example()
    logits = (logits[:, :3] if regions else logits).requires_grad_()
    losses = [make_loss(name, LossOptions(gamma=gamma), (), regions, 9) for name in ("focal", "dice-focal", "dice-ce")]
    focal, both, usual = (loss.parts(logits, label) for loss in losses)
    want = focal_by_hand(logits, label, regions, gamma)
    assert relative(focal.total, want) < 1e-12 and list(focal.terms) == ["focal"]
    slopes = [torch.autograd.grad(total, logits)[0] for total in (focal.total, want)]
    assert relative(*slopes) < 1e-12
    assert list(both.terms) == ["dice", "focal"] and both.terms["dice"] == usual.terms["dice"]
    of_classes = focal_of_classes(logits, label, regions, gamma)
    assert relative(both.total, usual.terms["dice"] + of_classes) < 1e-12
    slopes = [torch.autograd.grad(total, logits)[0] for total in (both.terms["focal"], of_classes)]
    assert relative(*slopes) < 1e-12
    assert gamma or relative(focal.total, usual.terms["ce"]) < 1e-13, "without exponent it is the cross-entropy"


def gaps_of_focal(mesh: Mesh) -> list[tuple[float, float]]:
    gaps = []
    for regions in ((), REGIONS):
        loss = make_loss("dice-focal", LossOptions(squared=True), (0.9, 0.1), regions, 9)
        gaps.append(check_samples(mesh, {"regions": regions}, True, loss))
    return gaps


def test_the_focal_loss_of_parts_is_the_batchs(ranks: Callable[..., list]) -> None:
    assert all(max(gaps) < 1e-13 for of_rank in ranks(4, gaps_of_focal, seqpar=2) for gaps in of_rank)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="loss weights"):
        DiceCE(dice_weight=0, ce_weight=0)
    with pytest.raises(ValueError, match="expected 2, for dice and ce"):
        make_loss("dice-ce", LossOptions(), (0.9,))
    with pytest.raises(ValueError, match="region has no labels"):
        DiceCE(regions=((1,), ()))
    with pytest.raises(ValueError, match="do not match"):
        DiceCE()(torch.zeros(1, 2, 4, 4, 4), torch.zeros(1, 4, 4, 5, dtype=torch.long))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "skeleton-recall"])
def test_labels_of_no_class_and_logits_of_one_are_refused(name: str) -> None:
    loss, label = make_loss(name), torch.zeros(1, 4, 4, 4, dtype=torch.long)
    loss(torch.zeros(1, 2, 4, 4, 4), label)
    for wrong in (2, -1):
        label[..., -1] = wrong
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            loss(torch.zeros(1, 2, 4, 4, 4), label)
    with pytest.raises(ValueError, match="logits of one output have no class but the background"):
        loss(torch.zeros(1, 1, 4, 4, 4), 0 * label)


def test_labels_have_one_channel_or_none_and_are_classes() -> None:
    logits, label = example()
    for loss in (DiceCE(ignore_label=9), DiceCE(ignore_label=9, batch_dice=True)):
        assert torch.equal(loss(logits, label[:, None]), loss(logits, label))
    with pytest.raises(ValueError, match=r"give label.long\(\)"):
        DiceCE(ignore_label=9)(logits, label.double())
    with pytest.raises(ValueError, match="without their channels or with a single one"):
        DiceCE()(logits, torch.stack([label, label], 1))
    with pytest.raises(ValueError, match="name='dice-cee': choose one of ce, cldice, dice, dice-ce"):
        make_loss("dice-cee")


def gaps_of_tversky(mesh: Mesh) -> list[tuple[float, float]]:
    losses = [make_loss("tversky", LossOptions(batch=batch), ignore_label=9) for batch in (False, True)]
    return [
        *(check_samples(mesh, CASES[0], True, loss) for loss in losses),
        check_samples(mesh, CASES[0], False, losses[1]),
    ]


def test_tversky_of_parts_is_that_of_the_batch(ranks: Callable[..., list]) -> None:
    """The control is last: sums over the batch that are not shared give another loss."""
    for *of_rank, unshared in ranks(4, gaps_of_tversky, seqpar=2):
        assert all(max(gaps) < 1e-13 for gaps in of_rank) and unshared[0] > 1e-6


def test_tversky_is_the_formula_and_misses_weigh_more() -> None:
    logits, label = example()
    seen, shares = (label != 9), logits.softmax(1)
    scores = []
    for b in range(len(logits)):
        for k in (1, 2, 3):
            p, t = shares[b, k][seen[b]], (label[b] == k)[seen[b]].double()
            hit, alarm, miss = (p * t).sum(), (p * (1 - t)).sum(), ((1 - p) * t).sum()
            scores.append((hit + 1e-5) / (hit + 0.3 * alarm + 0.7 * miss + 1e-5))
    got = make_loss("tversky", ignore_label=9)(logits, label)
    assert relative(got, 1 - torch.stack(scores).mean()) < 1e-13
    truth = torch.zeros(1, 4, 4, 4, dtype=torch.long)
    truth[0, :2] = 1
    more, less = truth.clone(), truth.clone()
    more[0, 2], less[0, 1] = 1, 0
    alarm, miss = (make_loss("tversky")(50.0 * F.one_hot(x, 2).movedim(-1, 1).double(), truth) for x in (more, less))
    assert miss > alarm
