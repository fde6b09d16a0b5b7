"""Scores of label maps in memory: metrics per region, the policies for empty masks, summaries of cases."""

import math

import numpy as np
import pytest

from seqpar.scores import metrics
from seqpar.scores.comparison import hardly_learned_lines
from seqpar.scores.label_scores import format_table, score, summarise
from seqpar.scores.lesions import lesion_wise
from tests.support.label_folders import random_labels


def test_a_case_is_scored_per_region_with_the_metrics_of_its_masks() -> None:
    truth, prediction, spacing = random_labels(0), random_labels(1), (1.0, 0.5, 2.0)
    classes = {"whole": (1, 2), "core": (2,)}
    scores = score(truth, prediction, classes, spacing, nsd_tolerance=1.5, lesion_wise=True)
    for name, values in classes.items():
        masks = np.isin(truth, values), np.isin(prediction, values)
        counts, row = metrics.confusion(*masks), scores[name]
        assert (row["TP"], row["FP"], row["FN"], row["TN"]) == (counts.tp, counts.fp, counts.fn, counts.tn)
        assert (row["n_ref"], row["n_pred"]) == (masks[0].sum(), masks[1].sum())
        assert (row["Dice"], row["IoU"]) == (counts.dice, counts.iou)
        assert (row["Sensitivity"], row["Specificity"]) == (counts.sensitivity, counts.specificity)
        assert row["VolumeErrorMl"] == (int(masks[1].sum()) - int(masks[0].sum())) * 1.0 / 1000
        assert (row["TrueVolumeMl"], row["VolumeMl"]) == (masks[0].sum() / 1000, masks[1].sum() / 1000)
        assert row["VolumeError"] == counts.volume_error
        assert row["HD95"] == metrics.hd95(*masks, spacing)
        assert row["NSD"] == metrics.nsd(*masks, spacing, 1.5)
        lesions = lesion_wise(*masks, spacing)
        assert [row[f"Lesion{k}"] for k in ("Dice", "HD95", "TP", "FN", "FP")] == list(lesions)
        flat = score(truth, prediction, classes, (5.0, 1.0, 1.0), lesion_wise=True)[name]
        counts = score(truth, prediction, classes, (5.0, 1.0, 1.0))[name]
        assert {k: flat[k] for k in counts} == pytest.approx(counts, nan_ok=True), (
            "one rule, with and without the scores"
        )
    counted = {f"Lesion{kind}" for kind in ("TP", "FN", "FP", "Small")}
    assert {key for key in score(truth, prediction, classes, spacing)["core"] if "Lesion" in key} == counted
    assert not counted & score(truth, prediction, classes, spacing, surfaces=False)["core"].keys()


def test_empty_masks_count_by_the_policy() -> None:
    nothing, some, spacing = np.zeros((3, 4, 5), int), np.zeros((3, 4, 5), int), (2.0, 1.0, 1.0)
    some[1, 1, 1] = 1
    diagonal = math.sqrt(6**2 + 4**2 + 5**2)
    nan = math.nan
    names = ("Dice", "IoU", "NSD", "HD95", "Sensitivity", "VolumeError")
    expected = {
        ("skip", "both"): (nan, nan, nan, nan, nan, nan),
        ("skip", "truth"): (0, 0, 0, diagonal, nan, nan),
        ("skip", "prediction"): (0, 0, 0, diagonal, 0, -1),
        ("brats", "both"): (1, 1, 1, 0, 1, 0),
        ("brats", "truth"): (0, 0, 0, 374, 0, nan),
        ("brats", "prediction"): (0, 0, 0, 374, 0, -1),
    }
    for (policy, which), values in expected.items():
        truth = some if which == "prediction" else nothing
        prediction = some if which == "truth" else nothing
        row = score(truth, prediction, {"a": (1,)}, spacing, empty=policy)["a"]  # type: ignore[arg-type]
        np.testing.assert_equal([row[name] for name in names], values, err_msg=f"{policy}, {which} empty")
    with pytest.raises(ValueError, match="skip, brats"):
        score(nothing, some, {"a": (1,)}, spacing, empty="zero")  # type: ignore[arg-type]


def test_ignored_voxels_belong_to_no_class_and_to_no_count() -> None:
    truth, prediction = np.zeros((2, 4, 4, 4), int)
    truth[0], prediction[0] = 1, 1
    prediction[1, :2] = 1
    truth[1, :3] = 9
    row = score(truth, prediction, {"a": (1,)}, (1, 1, 1), ignore=9)["a"]
    assert (row["TP"], row["FP"], row["FN"], row["TN"]) == (16, 0, 0, 64 - 16 - 12)
    assert row["HD95"] == 0.0
    assert score(truth, prediction, {"a": (1,)}, (1, 1, 1))["a"]["FP"] == 8


def test_a_summary_weighs_cases_alike_and_global_scores_weigh_voxels() -> None:
    def case(tp: int, fn: int) -> dict:
        truth, prediction = np.zeros((2, 200), int)
        truth[: tp + fn], prediction[:tp] = 1, 1
        return score(truth, prediction, {"a": (1,), "b": (2,)}, (1.0,))

    summary = summarise([case(100, 0), case(1, 9), case(5, 5), case(0, 0)])
    dices = [1.0, 2 / 11, 10 / 15]
    assert summary["num_cases"] == 4 and summary["num_values"]["a"]["Dice"] == 3  # the empty case is left out
    assert summary["mean"]["a"]["Dice"] == pytest.approx(sum(dices) / 3)
    assert summary["median"]["a"]["Dice"] == pytest.approx(10 / 15)
    assert summary["global"]["a"]["Dice"] == pytest.approx(2 * 106 / (2 * 106 + 14))
    assert summary["global"]["a"]["Sensitivity"] == pytest.approx(106 / 120)
    assert math.isnan(summary["mean"]["b"]["Dice"]) and summary["num_values"]["b"]["Dice"] == 0
    assert summary["foreground_mean"]["Dice"] == summary["mean"]["a"]["Dice"]
    text = format_table(summary, {"a": (1,), "b": (2,)})
    assert "3/4" in text and [text.count(kind) for kind in ("mean", "median", "global")] == [2, 2, 2]
    text = format_table(summarise([case(1, 9)]), {"a": (1,), "b": (2,)})
    assert [text.count(kind) for kind in ("mean", "median", "global")] == [2, 0, 0], "of one case they are alike"
    with pytest.raises(ValueError, match="no case"):
        summarise([])


def test_a_low_dice_is_told_though_cases_without_the_class_count_as_1() -> None:
    empty, full = np.zeros((6, 6, 6), np.uint8), np.ones((6, 6, 6), np.uint8)
    part = full.copy()
    part[1:] = 0

    def told(*pairs: tuple[np.ndarray, np.ndarray], empty: str = "brats") -> list[str]:
        return hardly_learned_lines(summarise([score(*pair, {"ET": (1,)}, (1, 1, 1), empty=empty) for pair in pairs]))

    nothing, neither = (full, empty), (empty, empty)
    line = "ET: mean Dice {}: nothing of this class was predicted; 0.0000 where the truth has this class"
    assert told(*[nothing] * 7, *[neither] * 3) == [line.format("0.3000")]
    assert told(nothing, *[neither] * 3) == [line.format("0.7500")]
    (some,) = told((full, part), neither)
    assert some.startswith("ET: mean Dice 0.6429: too little is predicted: 17 % as many voxels as are true, and ")
    assert some.endswith("; 0.2857 where the truth has this class")
    assert told((full, full), neither) == told(neither, neither) == told(neither, empty="skip") == []
    assert told(nothing, neither, empty="skip") == ["ET: mean Dice 0.0000: nothing of this class was predicted"]
