"""Every rule of the lesion-wise BraTS 2023 scores on cases worked out by hand (voxels of 1 mm³)."""

import numpy as np
import pytest

from seqpar.scores.lesions import Detection, LesionScores, detect, lesion_wise, unmatched_parts
from seqpar.scores.metrics import Mask, hd95

MM = (1.0, 1.0, 1.0)


def boxes(*corners: tuple[int, int, int, int, int, int]) -> Mask:
    """A mask of boxes, each from-to per dim."""
    mask = np.zeros((60, 24, 24), bool)
    for a, b, c, d, e, f in corners:
        mask[a:b, c:d, e:f] = True
    return mask


CUBE = (4, 9, 4, 9, 4, 9)  # 125 mm³


def test_one_lesion_found_scores_like_the_whole_mask() -> None:
    truth, prediction = boxes(CUBE), boxes((5, 10, 4, 9, 4, 9))
    score = lesion_wise(truth, prediction, MM)
    assert score == LesionScores(2 * 100 / 250, hd95(truth, prediction, MM), found=1, missed=0, false=0)
    assert score.hd95 == 1.0


def test_lesions_count_alike_however_large() -> None:
    small, large = (4, 8, 4, 8, 4, 8), (30, 50, 2, 22, 2, 22)
    # The large one is predicted perfectly, the small one by half: 32 of its 64 voxels.
    score = lesion_wise(boxes(small, large), boxes((4, 6, 4, 8, 4, 8), large), MM)
    assert score.dice == pytest.approx((1 + 2 * 32 / 96) / 2)
    assert score.hd95 == pytest.approx((0 + 2) / 2)
    assert (score.found, score.missed, score.false) == (2, 0, 0)


@pytest.mark.parametrize(("gap", "num_lesions"), [(5, 1), (6, 1), (7, 2)])
def test_lesions_whose_dilations_touch_are_one(gap: int, num_lesions: int) -> None:
    # Three steps from each side: a gap of 6 leaves the dilations face to face, 7 leaves a voxel between them.
    second = (9 + gap, 14 + gap, 4, 9, 4, 9)
    score = lesion_wise(boxes(CUBE, second), boxes(CUBE), MM)
    if num_lesions == 1:  # one lesion of 250 voxels, 125 of them found
        assert score[:1] + score[2:] == (2 * 125 / 375, 1, 0, 0)
        assert score.hd95 == hd95(boxes(CUBE, second), boxes(CUBE), MM)
    else:
        assert score == LesionScores((1 + 0) / 2, (0 + 374) / 2, found=1, missed=1, false=0)


@pytest.mark.parametrize(("start", "missed"), [(13, 0), (14, 1)])
def test_dilations_that_touch_by_a_corner_are_one(start: int, missed: int) -> None:
    # From corner voxel 8 to corner voxel 13 the dilations reach (10, 10, 10) and (11, 11, 11), no nearer.
    stop = start + 5
    truth = boxes(CUBE, (start, stop, start, stop, start, stop))
    assert lesion_wise(truth, boxes(CUBE), MM).missed == missed


def test_the_dilation_can_be_the_one_of_metastases() -> None:
    two = boxes(CUBE, (13, 18, 4, 9, 4, 9))  # a gap of 4: one lesion at dilation 3, two at dilation 1
    assert lesion_wise(two, boxes(CUBE), MM, margin=3).missed == 0
    assert lesion_wise(two, boxes(CUBE), MM, margin=1).missed == 1
    near = boxes(CUBE, (10, 15, 4, 9, 4, 9))  # a gap of 1, undilated
    assert lesion_wise(near, boxes(CUBE), MM, margin=0).missed == 1


def test_dilation_steps_by_face_and_edge_not_by_corner() -> None:
    # At offsets (d, d, d) from a corner the step without corners reaches floor(3 · 2 / 3) = 2, a cube's 3.
    def touches(offset: int) -> bool:
        prediction = boxes(CUBE)
        prediction[:] = False
        prediction[8 + offset, 8 + offset, 8 + offset] = True
        return lesion_wise(boxes(CUBE), prediction, MM).found == 1

    assert touches(1) and touches(2)
    assert not touches(3)


def test_all_predicted_components_that_touch_the_dilation_are_the_match_undilated() -> None:
    # One inside the lesion, one outside at distance 3 (its near face lies in the dilation), one too far.
    inside, near, far = (4, 6, 4, 9, 4, 9), (11, 14, 4, 9, 4, 9), (18, 19, 4, 5, 4, 5)
    score = lesion_wise(boxes(CUBE), boxes(inside, near, far), MM)
    dice = 2 * 50 / (125 + 50 + 75)  # no dilated voxel counts
    assert score.dice == pytest.approx(dice / 2)  # one lesion, one false positive
    assert score.hd95 == pytest.approx((hd95(boxes(CUBE), boxes(inside, near), MM) + 374) / 2)
    assert (score.found, score.missed, score.false) == (1, 0, 1)


def test_a_component_that_touches_two_lesions_matches_both() -> None:
    second = (20, 25, 4, 9, 4, 9)
    bridge = (4, 25, 4, 9, 4, 9)  # 525 voxels
    score = lesion_wise(boxes(CUBE, second), boxes(bridge), MM)
    assert score.dice == pytest.approx(2 * 125 / (125 + 525))
    assert score.found == 2 and score.false == 0


def test_found_by_touching_without_overlap_scores_zero_dice_and_a_finite_distance() -> None:
    score = lesion_wise(boxes(CUBE), boxes((10, 12, 4, 9, 4, 9)), MM)
    assert score.dice == 0.0 and score.found == 1
    assert 0 < score.hd95 < 10


@pytest.mark.parametrize(("depth", "counts"), [(2, False), (3, True)])
def test_lesions_of_up_to_50_mm3_are_dropped(depth: int, counts: bool) -> None:
    small = (30, 30 + depth, 4, 9, 4, 9)  # 50 or 75 mm³: 50 itself is dropped
    missed = lesion_wise(boxes(CUBE, small), boxes(CUBE), MM)
    assert missed == (LesionScores(0.5, 187.0, 1, 1, 0) if counts else LesionScores(1.0, 0.0, 1, 0, 0))


def test_the_volume_is_in_mm3_not_in_voxels() -> None:
    tiny = (30, 31, 4, 9, 4, 9)  # 25 voxels
    assert lesion_wise(boxes(CUBE, tiny), boxes(CUBE), MM).missed == 0
    assert lesion_wise(boxes(CUBE, tiny), boxes(CUBE), (2.0, 2.0, 2.0)).missed == 1
    assert lesion_wise(boxes(CUBE, tiny), boxes(CUBE), MM, min_volume=2).missed == 1


def test_what_matches_a_dropped_lesion_is_neither_hit_nor_false_positive() -> None:
    small = (30, 32, 4, 9, 4, 9)
    assert lesion_wise(boxes(CUBE, small), boxes(CUBE, small), MM) == LesionScores(1.0, 0.0, 1, 0, 0)
    assert lesion_wise(boxes(small), boxes(small), MM) == LesionScores(1.0, 0.0, 0, 0, 0)


def test_lesions_too_small_to_count_are_counted_apart() -> None:
    small, elsewhere = (30, 32, 4, 9, 4, 9), (50, 51, 4, 5, 4, 5)
    assert detect(boxes(CUBE, small), boxes(small, elsewhere), MM) == Detection(0, 1, 1, small=1)
    ((false,), (missed,)) = unmatched_parts(boxes(CUBE, small), boxes(small, elsewhere), MM)
    assert (false.box, false.voxels, false.fullest) == ((slice(50, 51), slice(4, 5), slice(4, 5)), 1, (50, 4, 4))
    assert missed.box == (slice(4, 9),) * 3 and missed.voxels == 125


def test_the_volume_of_merged_lesions_is_summed_before_small_ones_are_dropped() -> None:
    halves = boxes((4, 6, 4, 9, 4, 8), (9, 11, 4, 9, 4, 8))  # 40 mm³ each, merged by dilation
    assert lesion_wise(halves, boxes(), MM).missed == 1


def test_false_positives_of_any_size_cost_a_whole_lesion() -> None:
    voxel, large = (40, 41, 4, 5, 4, 5), (30, 50, 2, 22, 2, 22)
    for false in (voxel, large):
        assert lesion_wise(boxes(CUBE), boxes(CUBE, false), MM) == LesionScores(0.5, 187.0, 1, 0, 1)
    two = boxes(CUBE, voxel, (44, 45, 4, 5, 4, 5))
    assert lesion_wise(boxes(CUBE), two, MM) == LesionScores(1 / 3, 2 * 374 / 3, 1, 0, 2)


def test_components_are_connected_by_faces_edges_and_corners() -> None:
    diagonal = boxes((30, 31, 4, 5, 4, 5), (31, 32, 5, 6, 5, 6), (32, 33, 6, 7, 7, 8))
    diagonal[32, 6, 6] = diagonal[32, 6, 7] = False
    diagonal[32, 6, 6] = True  # three voxels in a row from corner to corner
    assert diagonal.sum() == 3
    assert lesion_wise(boxes(CUBE), boxes(CUBE) | diagonal, MM).false == 1
    diagonal[31, 5, 5] = False  # a gap
    assert lesion_wise(boxes(CUBE), boxes(CUBE) | diagonal, MM).false == 2


def test_nothing_there_and_nothing_predicted_is_perfect() -> None:
    assert lesion_wise(boxes(), boxes(), MM) == LesionScores(1.0, 0.0, 0, 0, 0)


def test_one_empty_mask_scores_zero_and_374_mm() -> None:
    assert lesion_wise(boxes(CUBE), boxes(), MM) == LesionScores(0.0, 374.0, 0, 1, 0)
    assert lesion_wise(boxes(), boxes(CUBE), MM) == LesionScores(0.0, 374.0, 0, 0, 1)
    assert lesion_wise(boxes(CUBE), boxes(), MM, missed_distance=500.0).hd95 == 500.0


def test_lesions_are_counted_as_they_are_scored() -> None:
    generator, nothing = np.random.default_rng(0), boxes()
    cases = [(nothing, nothing), (nothing, boxes(CUBE)), (boxes(CUBE), nothing)]
    for _ in range(20):
        truth, prediction = (
            boxes(*((a, a + 5, b, b + 4, c, c + 4) for a, b, c in generator.integers(0, (54, 20, 20), (4, 3))))
            for _ in range(2)
        )
        cases.append((truth, prediction))
    counts = [detect(truth, prediction, MM) for truth, prediction in cases]
    assert [count[:3] for count in counts] == [lesion_wise(truth, prediction, MM)[2:] for truth, prediction in cases]
    assert counts[:3] == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0)]
    kinds = list(zip(*counts))[:3]
    assert all(len(set(kind)) > 2 for kind in kinds), "found, missed and false ones all differ from case to case"


@pytest.mark.parametrize(
    ("spacing", "gap", "found"),
    [
        ((1.0, 1.0, 1.0), 6, 1),
        ((1.0, 1.0, 1.0), 7, 2),
        ((6.0, 6.0, 6.0), 1, 2),  # 6 mm of healthy tissue between them, which a rule in voxels skips
        ((2.0, 6.0, 6.0), 2, 1),
        ((2.0, 6.0, 6.0), 3, 2),
        ((6.0, 1.0, 1.0), 1, 2),  # fine in the other directions only
    ],
)
def test_counted_lesions_are_apart_in_mm(spacing: tuple[float, float, float], gap: int, found: int) -> None:
    both = boxes(CUBE, (9 + gap, 14 + gap, 4, 9, 4, 9))
    assert detect(both, both, spacing) == (found, 0, 0, 0)
    assert lesion_wise(both, both, spacing).found == found, "one rule"
