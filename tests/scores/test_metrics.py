"""Metrics against definitions written out in loops, against MONAI where it is installed, and by hand."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from scipy import ndimage

from seqpar.scores import metrics
from seqpar.scores.label_scores import score
from seqpar.scores.lesions import lesion_wise
from seqpar.scores.metrics import Mask, centreline_recall

SPACINGS = [(1.0, 1.0, 1.0), (0.5, 1.1, 3.0), (2.0, 0.7, 0.7)]


def draw(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Mask:
    """A mask of some kind."""
    mask = np.zeros(shape, bool)
    if kind == "voxel":
        mask[tuple(rng.integers(0, shape))] = True
    elif kind == "full":
        mask[:] = True
    elif kind == "border":
        mask[: rng.integers(1, 4)] = True
        mask[:, -1] = True
    elif kind == "noise":
        mask = rng.random(shape) < rng.uniform(0.02, 0.6)
    elif kind == "blob":
        mask = ndimage.gaussian_filter(rng.normal(size=shape), 1.5) > 0.05
    else:
        assert kind == "empty"
    return mask


def pairs() -> Iterator[tuple[Mask, Mask, tuple[float, ...]]]:
    """200 pairs of masks with spacing: every pair of kinds, then random ones."""
    kinds = ["empty", "voxel", "full", "border", "noise", "blob"]
    chosen = [(a, b) for a in kinds for b in kinds]
    rng = np.random.default_rng(0)
    chosen += [(kinds[i], kinds[j]) for i, j in rng.integers(2, len(kinds), (200 - len(chosen), 2))]
    for number, (a, b) in enumerate(chosen):
        shape = tuple(rng.integers(3, 10, 3))
        truth, prediction = draw(a, shape, rng), draw(b, shape, rng)
        yield truth, prediction, SPACINGS[number % len(SPACINGS)]


def surface_points(mask: Mask, spacing: Sequence[float]) -> np.ndarray:
    """Positions in mm of the voxels with a face to the background, voxel by voxel."""
    points = []
    for at in np.argwhere(mask):
        for dim in range(mask.ndim):
            for side in (-1, 1):
                other = at.copy()
                other[dim] += side
                if not 0 <= other[dim] < mask.shape[dim] or not mask[tuple(other)]:
                    points.append(tuple(at * np.array(spacing)))
    return np.array(sorted(set(points))).reshape(-1, mask.ndim)


def percentile(values: np.ndarray, percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def by_hand(truth: Mask, prediction: Mask, spacing: Sequence[float], tolerance: float) -> list[float]:
    """Dice, HD95 and surface Dice from all pairs of surface voxels."""
    total = int(truth.sum()) + int(prediction.sum())
    if not total:
        return [math.nan, math.nan, math.nan]
    dice = 2 * sum(1 for a, b in zip(truth.flat, prediction.flat) if a and b) / total
    a, b = surface_points(truth, spacing), surface_points(prediction, spacing)
    if not len(a) or not len(b):
        return [dice, math.inf, 0.0]
    between = np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))
    there, back = between.min(0), between.min(1)
    near = (there <= tolerance + 1e-6).sum() + (back <= tolerance + 1e-6).sum()
    return [dice, max(percentile(there, 95), percentile(back, 95)), near / (len(there) + len(back))]


def ours(truth: Mask, prediction: Mask, spacing: Sequence[float], tolerance: float) -> list[float]:
    return [
        metrics.confusion(truth, prediction).dice,
        metrics.hd95(truth, prediction, spacing),
        metrics.nsd(truth, prediction, spacing, tolerance),
    ]


def test_dice_hd95_and_nsd_are_their_definitions_on_200_masks() -> None:
    seen = []
    for truth, prediction, spacing in pairs():
        expected = by_hand(truth, prediction, spacing, 1.0)
        np.testing.assert_allclose(ours(truth, prediction, spacing, 1.0), expected, rtol=1e-12, atol=0)
        seen.append(expected)
    assert len(seen) == 200
    values = np.array(seen)
    assert np.isnan(values).any() and np.isinf(values[:, 1]).any()  # the degenerate pairs are among them
    assert ((values[:, 2] > 0) & (values[:, 2] < 1)).sum() > 50  # and the tolerance decides in many


@pytest.mark.filterwarnings("ignore:the .* of class 0 is all 0")
def test_dice_hd95_and_nsd_agree_with_monai_on_200_masks() -> None:
    reference = pytest.importorskip("monai.metrics")
    import torch

    for truth, prediction, spacing in pairs():
        y, p = (torch.from_numpy(m)[None, None] for m in (truth, prediction))
        kw = {"include_background": True, "spacing": spacing}
        dice = reference.compute_dice(p, y, ignore_empty=False).item()
        distance = reference.compute_hausdorff_distance(p, y, percentile=95, **kw).item()
        if not (truth.any() or prediction.any()):
            dice = math.nan  # MONAI says 1 here, and NaN only for an empty truth with ignore_empty
        elif not (truth.any() and prediction.any()):
            assert not math.isfinite(distance)  # interpolating between infinities makes some of them NaN
            distance = math.inf
        expected = [dice, distance, reference.compute_surface_dice(p, y, [1.0], **kw).item()]
        np.testing.assert_allclose(ours(truth, prediction, spacing, 1.0), expected, rtol=2e-6, atol=0)


def test_hd95_of_shifted_boxes_by_hand() -> None:
    truth, prediction = np.zeros((2, 20, 5, 5), bool)
    truth[2:6, :, :], prediction[9:10, :, :] = True, True
    # Prediction to truth: all 4 slices away. Back: from 4 at the near face to 7 at the far one, 2 mm a slice.
    assert metrics.hd95(truth, prediction, (2, 1, 1)) == 14.0
    distances = metrics.surface_distances(truth, prediction, (2, 1, 1))
    assert set(distances[0]) == {8.0} and metrics.hausdorff(distances, 0) == 8.0
    assert metrics.hd95(truth, truth, (2, 1, 1)) == 0.0


def test_surface_is_counted_at_the_border_and_not_inside() -> None:
    full = np.ones((5, 6, 7), bool)
    assert metrics.surface(full).sum() == 5 * 6 * 7 - 3 * 4 * 5


def test_a_distance_equal_to_the_tolerance_is_within_it() -> None:
    truth, prediction = np.zeros((2, 9, 3, 3), bool)
    truth[1], prediction[4] = True, True  # 3 · 0.3 is 0.8999999999999999 or 0.9000000000000001, by rounding
    for spacing, tolerance in [((0.3, 1, 1), 0.9), ((1.1, 1, 1), 3.3), ((0.7, 1, 1), 2.1)]:
        assert metrics.nsd(truth, prediction, spacing, tolerance) == 1.0
        assert metrics.nsd(truth, prediction, spacing, tolerance - 1e-3) == 0.0


@pytest.mark.parametrize("score", ["surfaces", "lesions"])
def test_empty_space_around_the_masks_changes_nothing(score: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        truth, prediction = (np.pad(draw("blob", (8, 9, 7), rng), 3) for _ in range(2))
        wide = [np.pad(m, ((9, 2), (0, 11), (5, 5))) for m in (truth, prediction)]
        if score == "surfaces":
            assert ours(*wide, (1, 2, 3), 2.0) == ours(truth, prediction, (1, 2, 3), 2.0)
        else:
            spacing = (1, 2, 3)
            assert lesion_wise(*wide, spacing) == lesion_wise(truth, prediction, spacing)


def test_two_dims_work() -> None:
    truth, prediction = np.zeros((2, 12, 12), bool)
    truth[2:8, 2:8], prediction[2:8, 3:9] = True, True
    expected = by_hand(truth, prediction, (1.0, 2.0), 1.0)
    np.testing.assert_allclose(ours(truth, prediction, (1.0, 2.0), 1.0), expected, rtol=1e-12)
    assert lesion_wise(truth, prediction, (1.0, 2.0)).dice == expected[0]


def test_counts_and_overlaps_by_hand() -> None:
    truth = np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0], bool)
    prediction = np.array([1, 1, 1, 0, 1, 1, 0, 0, 0, 0], bool)
    c = metrics.confusion(truth, prediction)
    assert (c.tp, c.fp, c.fn, c.tn) == (3, 2, 1, 4)
    assert (c.dice, c.iou, c.sensitivity) == (6 / 9, 3 / 6, 3 / 4)
    assert (c.specificity, c.volume_error) == (4 / 6, 1 / 4)
    both = c + metrics.Confusion(tp=10, fp=0, fn=2, tn=8)
    assert both.dice == 26 / (26 + 2 + 3)  # pooled voxels, not the mean of 6/9 and 20/22
    nothing = metrics.confusion(np.zeros(4, bool), np.zeros(4, bool))
    assert nothing.specificity == 1.0
    for value in (nothing.dice, nothing.iou, nothing.sensitivity, nothing.volume_error):
        assert math.isnan(value)
    assert math.isnan(metrics.confusion(np.ones(4, bool), np.ones(4, bool)).specificity)


def test_what_cannot_be_compared_is_refused() -> None:
    mask = np.ones((3, 3), bool)
    with pytest.raises(ValueError, match="boolean"):
        metrics.confusion(mask.astype(int), mask)
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(3, 2\)"):
        metrics.confusion(mask, mask[:, :2])
    for spacing in [(1.0,), (1.0, 0.0), (1.0, math.nan)]:
        with pytest.raises(ValueError, match="positive"):
            metrics.hd95(mask, mask, spacing)
    with pytest.raises(ValueError, match="tolerance"):
        metrics.nsd(mask, mask, (1, 1), -1.0)
    with pytest.raises(ValueError, match="negative"):
        lesion_wise(mask, mask, (1, 1), margin=-1)


def test_centreline_recall_sees_gaps_and_no_thickness() -> None:
    truth = np.zeros((30, 9, 9), bool)
    truth[3:27, 3:6, 3:6] = True
    thin, cut = np.zeros_like(truth), truth.copy()
    thin[3:27, 4, 4], cut[10:16] = True, False
    assert centreline_recall(truth, truth) == centreline_recall(truth, thin) == 1
    skeleton = 24  # voxels
    assert centreline_recall(truth, cut) == (skeleton - 6) / skeleton
    assert centreline_recall(truth, ~truth) == 0 and np.isnan(centreline_recall(truth & False, truth))
    row = score(truth, cut, {"vessel": (1,)}, (1.0, 1.0, 1.0), centreline=True)["vessel"]
    assert row["CentrelineRecall"] == (skeleton - 6) / skeleton
    row = score(truth & False, truth & False, {"vessel": (1,)}, (1, 1, 1), centreline=True, empty="brats")["vessel"]
    assert row["CentrelineRecall"] == 1
