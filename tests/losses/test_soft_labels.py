"""Labels with doubt: codes keep what readers said, and the loss of parts is the formula with probabilities."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from seqpar.losses import (
    LOSSES,
    Loss,
    LossGroups,
    LossOptions,
    Probabilities,
    Readers,
    SoftLabels,
    make_loss,
    takes_soft_labels,
)
from seqpar.parallel.mesh import Mesh
from tests.support.ranks import relative

REGIONS = ((1, 2), (2,))
READERS, PROBABILITIES = Readers(3, 4), Probabilities(3)
OPTIONS = {
    "dice-ce": {"name": "dice-ce"},
    "dice of the batch": {"name": "dice-ce", "options": LossOptions(batch=True, background=True)},
    "squared": {"name": "dice", "options": LossOptions(squared=True)},
    "regions": {"name": "dice-ce", "regions": REGIONS},
    "tversky": {"name": "tversky"},
}
SIZES = {1: [8], 2: [5, 3], 4: [3, 1, 2, 2]}


def example(soft: SoftLabels, outputs: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Returns logits, codes, and the probability of each class, from each reader's labels or as they were drawn."""
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(2 * rng.standard_normal((2, outputs, 8, 3, 2)))
    if isinstance(soft, Readers):
        maps = [rng.integers(0, 3, (2, 8, 3, 2)) for _ in range(soft.count)]
        wanted = np.mean([np.stack([one == k for k in range(3)], 1) for one in maps], 0)
        return logits, torch.from_numpy(soft.join(maps)), torch.from_numpy(wanted)
    shares = rng.multinomial(255, [0.5, 0.3, 0.2], (2, 8, 3, 2)).transpose(4, 0, 1, 2, 3)
    return logits, torch.from_numpy(soft.encode(shares / 255)), torch.from_numpy(shares.swapaxes(0, 1) / 255)


def by_hand(case: dict, logits: Tensor, t: Tensor) -> Tensor:
    """Returns the loss of targets ``t`` as its formula says."""
    own, regions = case.get("options", LossOptions()), case.get("regions", ())
    p = logits.sigmoid() if regions else logits.softmax(1)
    if regions:
        t = torch.stack([sum(t[:, n] for n in region) for region in regions], 1)
        ce = -(t * p.log() + (1 - t) * (1 - p).log()).mean(1).mean()
    else:
        ce = -(t * p.log()).sum(1).mean()
    first = 0 if regions or own.background else 1
    dims = (0, 2, 3, 4) if own.batch else (2, 3, 4)
    power = 1 + own.squared
    hits, ps, ts = (x[:, first:].sum(dims) for x in (p * t, p**power, t**power))
    dice = 1 - ((2 * hits + 1e-5) / (ps + ts + 1e-5)).mean()
    if case["name"] == "tversky":
        false, missed = ((x[:, first:]).sum(dims) for x in (p * (1 - t), (1 - p) * t))
        return 1 - ((hits + 1e-5) / (hits + 0.3 * false + 0.7 * missed + 1e-5)).mean()
    return dice if case["name"] == "dice" else dice + ce


def loss_of(case: dict, soft: SoftLabels | None) -> Loss:
    return make_loss(**case, soft=soft)


@pytest.mark.parametrize("soft", [READERS, PROBABILITIES])
@pytest.mark.parametrize("which", OPTIONS)
def test_the_loss_is_the_formula_with_probabilities(which: str, soft: SoftLabels) -> None:
    case = OPTIONS[which]
    logits, label, target = example(soft, 2 if "regions" in case else 3)
    assert relative(loss_of(case, soft)(logits, label), by_hand(case, logits, target)) < 1e-13
    majority = torch.from_numpy(soft.consensus(label.numpy()))
    assert relative(loss_of(case, None)(logits, majority), by_hand(case, logits, target)) > 1e-2  # is another loss


def gaps_of_parts(mesh: Mesh) -> dict[str, tuple[float, float, float]]:
    """Returns how far loss and gradient of this rank's part are from those of the tile, and of the majority."""
    gaps, group = {}, mesh.seq
    sizes = SIZES[group.size]
    for soft in (READERS, PROBABILITIES):
        for which, case in OPTIONS.items():
            logits, label, _ = example(soft, 2 if "regions" in case else 3)
            whole = logits.clone().requires_grad_()
            want = loss_of(case, soft)(whole, label)
            (grad,) = torch.autograd.grad(want, whole)
            part = logits.split(sizes, 2)[group.index].clone().requires_grad_()
            own = label.split(sizes, 1)[group.index]
            got = loss_of(case, soft)(part, own, LossGroups(voxels=group))
            (mine,) = torch.autograd.grad(got, part)
            majority = torch.from_numpy(soft.consensus(own.numpy()))
            other = loss_of(case, None)(part, majority, LossGroups(voxels=group))
            grad_gap = relative(mine / group.size, grad.split(sizes, 2)[group.index])
            gaps[f"{which} of {soft.described}"] = relative(got, want), grad_gap, relative(other, want)
    return gaps


@pytest.mark.parametrize("world", SIZES)
def test_the_loss_of_unequal_parts_is_the_loss_of_the_tile(ranks: Callable[..., list], world: int) -> None:
    for of_rank in ranks(world, gaps_of_parts):
        assert all(max(loss, grad) < 1e-12 for loss, grad, _ in of_rank.values()), of_rank
        assert all(other > 1e-2 for _, _, other in of_rank.values()), of_rank  # a control that must fail


def test_the_loss_of_a_volume_comes_from_sums_over_its_pieces() -> None:
    logits, label, target = (t[:1] for t in example(READERS))
    loss = loss_of({"name": "dice-ce"}, READERS)
    pieces = zip(logits.split([3, 1, 4], 2), label.split([3, 1, 4], 1))
    got = loss.of_sums(torch.stack([loss.sums(*piece) for piece in pieces]).sum(0))
    assert relative(got.total, by_hand({"name": "dice-ce"}, logits, target)) < 1e-13


def test_what_takes_no_probabilities_is_refused_when_the_loss_is_built() -> None:
    able = {name for name in LOSSES if takes_soft_labels(name)}
    assert able == {"ce", "dice", "dice-ce", "tversky"}
    for name in set(LOSSES) - able:
        with pytest.raises(ValueError, match="takes no probabilities: choose dice or ce"):
            make_loss(name, soft=READERS)
    for more in ({"ignore_label": 3}, {"class_weights": (1, 1, 1)}):
        with pytest.raises(ValueError, match="neither ignore_label nor class_weights"):
            make_loss("ce", soft=READERS, **more)
    logits, label, _ = example(READERS)
    with pytest.raises(ValueError, match="annotated"):
        make_loss("ce", soft=READERS)(logits, label, annotated=torch.ones(2, 3))
    with pytest.raises(IndexError, match="Target 81 is out of bounds"):
        make_loss("ce", soft=READERS)(logits, torch.full_like(label, 81))


def test_codes_keep_what_each_reader_said() -> None:
    maps = [np.random.default_rng(n).integers(0, 3, (4, 3, 2)) for n in range(4)]
    code = READERS.join(maps)
    assert code.dtype == np.uint8 and all((a == b).all() for a, b in zip(maps, READERS.digits(code)))
    assert [Readers(2, 8).dtype, Readers(2, 9).dtype, Readers(4, 9).dtype] == [np.uint8, np.int16, np.int32]
    votes = Readers(3, 3).join([np.array([[0, 1, 2, 1]]), np.array([[0, 1, 1, 2]]), np.array([[1, 2, 0, 2]])])
    assert Readers(3, 3).consensus(votes).tolist() == [[0, 1, 0, 2]]  # three that differ: the smallest
    assert Readers(3, 3).disputed(np.append(votes, [[0, 0, 26, 1]], 0)).tolist() == [[True] * 4, [False] * 3 + [True]]
    assert Readers(3, 3).possible(votes, 1).tolist() == [[True, True, True, True]]
    with pytest.raises(ValueError, match="15 readers of 14 labels are more than .* give at most 13 readers"):
        Readers(14, 15)


def test_codes_of_probabilities_are_rounded_to_shares_of_255() -> None:
    drawn = np.random.default_rng(0).dirichlet([1, 1, 1], (4, 3, 2)).transpose(3, 0, 1, 2)
    code = torch.from_numpy(PROBABILITIES.encode(drawn))
    target = PROBABILITIES.target(code[None], torch.float64)[0].numpy()
    assert abs(target - drawn).max() < 1 / 255 and abs(target.sum(0) - 1).max() < 1e-12
    assert (PROBABILITIES.encode(target) == code.numpy()).all()  # once rounded, exact
    certain = PROBABILITIES.encode(np.eye(3)[:, [0, 1, 2]])
    assert certain.tolist() == [0, 255, 255 * 256] and PROBABILITIES.consensus(certain[None])[0].tolist() == [0, 1, 2]
    assert Probabilities(2).dtype == np.uint8 and Probabilities(7).dtype == np.int64
    with pytest.raises(ValueError, match="probabilities of 8 labels .* at most 7 labels"):
        Probabilities(8)


def test_readers_and_probabilities_are_resampled_each_in_their_way() -> None:
    double = lambda x: np.repeat(x, 2, 0)  # noqa: E731
    middle = lambda x: (x[:-1] + x[1:]) / 2  # noqa: E731
    maps = [np.array([0, 1, 2]), np.array([0, 0, 1])]
    soft = Readers(3, 2)
    assert (soft.resampled(soft.join(maps), double, middle) == soft.join([double(one) for one in maps])).all()
    given = np.array([[1.0, 0.2], [0.0, 0.8]])
    between = Probabilities(2).resampled(Probabilities(2).encode(given), double, middle)
    assert abs(int(between[0]) - 0.4 * 255) <= 0.5
