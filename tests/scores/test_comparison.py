"""Several folders of predictions: which is best, on the cases that all have, and how sure that is."""

import json
import math
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
from scipy import stats

from seqpar.cli import evaluate
from seqpar.cluster.exit_codes import DATA, run
from seqpar.scores.comparison import Scored, _verdict, about_scans, compare, where_both
from seqpar.scores.label_scores import words_of
from seqpar.tasks.case_evaluation import CaseEvaluation, ScoringJob, Seen
from tests.support.label_folders import evaluate_folders, random_labels, save


def scored(name: str, **dices: float) -> Scored:
    nan = float("nan")
    rows = {case: {"HD95": nan, "NSD": nan, "Dice": dice} for case, dice in dices.items()}
    counts = {"TP": 1, "FP": 0, "FN": 0, "TN": 0}
    return Scored(name, {case: {"lesion": row | counts} for case, row in rows.items()})


def test_the_best_has_the_highest_mean_over_the_cases_that_all_have() -> None:
    a = {"x": 0.5, "y": 0.6, "z": 0.7, "v": 0.6, "w": 0.6}
    b, c = {name: dice + 0.1 + 0.01 * (name == "z") for name, dice in a.items()}, dict.fromkeys(a, 0.4)
    text = compare([scored("a", **a), scored("b", **b), scored("c", **c, only_here=1.0)])
    lines = text.splitlines()
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["b", "5", "0.7020"],
        ["a", "5", "0.6000"],
        ["c", "5", "0.4000"],
    ]
    gains = [b[case] - a[case] for case in a]
    reach = stats.t.ppf(0.975, 4) * stdev(gains) / 5**0.5
    low, high = fmean(gains) - reach, fmean(gains) + reach
    assert lines[-1] == (
        "highest mean Dice over 5 cases (other seeds may differ): "
        f"b, {fmean(gains):.4f} above a (95 % confidence interval: {low:+.4f} to {high:+.4f})"
    )
    assert compare([scored("a", **a), scored("c", **{**a, "x": 0.8, "y": 0.4})]).endswith("), which may be chance")
    few = {name: dict(list(dice.items())[:4]) for name, dice in (("a", a), ("b", b))}
    assert compare([scored(name, **dice) for name, dice in few.items()]).endswith("above a (4 cases: too few to tell)")


def of_classes(name: str, **cases: dict[str, float]) -> Scored:
    counts = {"TP": 1, "FP": 0, "FN": 0, "TN": 0, "HD95": 0.0, "NSD": 0.0}
    return Scored(name, {case: {c: counts | {"Dice": dice} for c, dice in row.items()} for case, row in cases.items()})


def test_the_difference_is_that_of_the_means_by_which_folders_are_ranked() -> None:
    """Means of classes and means of cases may be of two minds where cases lack classes: b is worse in most cases."""
    nan, cases = float("nan"), [f"c{n}" for n in range(8)]
    rare = {case: 0.5 if n < 2 else nan for n, case in enumerate(cases)}
    a = of_classes("a", **{case: {"liver": 0.82, "lesion": rare[case]} for case in cases})
    gains = {case: 0.3 + 0.002 * n for n, case in enumerate(cases)}
    b = of_classes("b", **{case: {"liver": 0.70, "lesion": rare[case] + gains[case]} for case in cases})
    case_means = [fmean(v for v in (d, r) if v == v) for d, r in ((0.82, rare[c]) for c in cases)]
    assert fmean(case_means) > fmean([fmean(v for v in (0.70, rare[c] + gains[c]) if v == v) for c in cases]), (
        "by cases a would be better"
    )
    verdict = compare([a, b]).splitlines()[-1]
    assert verdict == (
        "highest mean Dice over 8 cases (each class counts alike, however few cases have it; other seeds may differ): "
        "b, 0.0905 above a (lesion is scored in only 2 cases: too few to tell)"
    )


def test_one_case_and_equal_means_decide_nothing() -> None:
    one = compare([scored("a", x=0.5), scored("b", x=0.6)]).splitlines()[-1]
    assert one == "highest mean Dice over 1 case (other seeds may differ): b, 0.1000 above a (1 case: too few to tell)"
    near = compare([scored("a", x=0.5), scored("b", x=0.50001)]).splitlines()[-1]
    assert "): b, less than 0.0001 above a (" in near
    same = compare([scored("a", x=0.5, y=0.6), scored("b", x=0.6, y=0.5)]).splitlines()[-1]
    assert same == "no winner: a and b have the same mean Dice"
    nan = float("nan")
    one = compare([scored("a", x=0.5, y=nan, z=nan), scored("b", x=0.6, y=nan, z=nan)]).splitlines()[-1]
    assert one.endswith("over 1 case (other seeds may differ): b, 0.1000 above a (1 case: too few to tell)")
    assert "not known" in compare([scored("a", x=nan, y=nan), scored("b", x=0.6, y=0.5)]).splitlines()[-1]


def test_folds_are_summed_up_and_none_is_called_best() -> None:
    text = compare([scored("f0", x=0.5, y=0.7), scored("f1", z=0.9)])
    assert "over all 3 cases mean Dice 0.7000" in text and "best" not in text
    assert "no case is in all of them" in compare([scored("a", x=1, y=1), scored("b", y=1, z=1), scored("c", z=1, x=1)])


def test_a_mean_over_folds_with_other_classes_names_the_mean_of_each() -> None:
    nan = float("nan")
    every = of_classes("a", x={"lung": 0.9, "fluid": nan}, y={"lung": 0.7, "fluid": nan})
    alike = of_classes("b", z={"lung": 0.8, "fluid": nan})
    assert compare([every, alike]).endswith("over all 3 cases mean Dice 0.8000"), "the same classes"
    told = "over all 3 cases mean Dice 0.4000, in which each class counts alike (lung 0.8000 over 3 cases, fluid 0.0000"
    assert compare([every, of_classes("b", z={"lung": 0.8, "fluid": 0.0})]).endswith(f"{told} over 1 case)")
    many = {f"c{n}": 0.5 for n in range(9)}
    text = compare([of_classes("a", x=many | {"c0": nan}), of_classes("b", y=many)])
    assert text.endswith(
        "(c0 0.5000 over 1 case, " + ", ".join(f"c{n} 0.5000 over 2 cases" for n in range(1, 6)) + ", 3 more)"
    )


def test_several_folders_are_scored_each_and_compared(folders: tuple[Path, Path], capsys) -> None:
    truth, worse = folders
    better, run_folder = worse.parent / "better", worse.parent / "run"
    for case in range(3):
        labels = random_labels(case)
        labels[:3] = 0
        save(better / f"case_{case}.nii.gz", labels)
    shutil.copytree(truth, run_folder / "validation")
    (run_folder / "validation" / "case_2.nii.gz").unlink()  # no fault: it was not held out
    (run_folder / "config.json").write_text("{}")
    (run_folder / "validation" / "summary.json").write_text("as train wrote it")
    line = [str(truth), str(worse), str(better), str(run_folder), "--workers", "1"]
    assert run(evaluate.act, line) == 0
    *before, header, first, second, third, verdict = capsys.readouterr().out.splitlines()
    words = words_of(lesion_wise=False, centreline=False, dashes=True)
    said = "\n".join(before)
    assert said.count("\n".join(words[:-1])) == 1 and words[-1] not in said, "what is there is explained once"
    assert words[-1].split(maxsplit=1) == ["–", "no case has such a score"]
    assert header.split() == ["cases", "Dice", "HD95", "NSD"]
    assert [Path(row.split()[0]).name for row in (first, second, third)] == ["run", "better", "predicted"]
    assert first.split()[1:3] == ["2", "1.0000"] and re.match(
        rf"highest mean Dice over 2 cases \(other seeds may differ\): {run_folder},", verdict
    )
    for folder in (worse, better):
        summary = json.loads((folder / "summary.json").read_text())
        assert len(summary["metric_per_case"]) == 3 and (folder / "metrics.csv").exists()
    means = {
        folder: np.mean(
            [case["metrics"][key]["Dice"] for case in summary["metric_per_case"][:2] for key in case["metrics"]]
        )
        for folder in (worse, better)
        for summary in [json.loads((folder / "summary.json").read_text())]
    }
    assert float(second.split()[2]) == pytest.approx(means[better], abs=1e-4) and means[worse] < means[better]
    assert (run_folder / "validation" / "summary.json").read_text() == "as train wrote it"
    assert run(evaluate.act, [str(truth), str(worse), str(better), "--centreline", "--workers", "1"]) == 0
    *_, header, first, second, _ = capsys.readouterr().out.splitlines()
    assert header.split() == ["cases", "Dice", "HD95", "NSD", "CentrelineRecall"]
    assert len(first.split()) == len(second.split()) == 6 and len(header) == len(first) == len(second)


def test_what_cannot_be_compared_is_refused(folders: tuple[Path, Path], capsys) -> None:
    truth, prediction = folders
    with pytest.raises(ValueError, match="--json, --csv: 2 predictions"):
        evaluate.act([str(truth), str(prediction), str(prediction), "--json", "x.json"])
    empty = prediction.parent / "unfinished"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    assert run(evaluate.act, [str(truth), str(prediction), str(empty)]) == DATA
    said = capsys.readouterr()
    assert "validation: holds no label map" in said.err and "Dice" not in said.out, "before the others are scored"
    assert not (prediction / "summary.json").exists()
    with pytest.raises(ValueError, match="is named twice"):
        evaluate.act([str(truth), str(prediction), f"{prediction}/../{prediction.name}"])
    run_folder = prediction.parent / "run"
    shutil.copytree(prediction, run_folder / "validation")
    (run_folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="run/validation is named twice"):
        evaluate.act([str(truth), str(run_folder), str(run_folder / "validation")])


def test_five_folds_in_a_folder_are_compared_as_their_runs(folders: tuple[Path, Path], capsys) -> None:
    truth, five = folders[0], folders[0].parent / "five"
    five.mkdir()
    (five / "folds.json").write_text("{}")
    for fold, case in enumerate([0, 1, 2, None, None]):
        validation = five / f"fold{fold}" / "validation"
        validation.mkdir(parents=True)
        (validation.parent / "config.json").write_text("{}")
        (validation.parent / "status.json").write_text('{"state": "finished"}')
        if case is not None:
            shutil.copy(truth / f"case_{case}.nii.gz", validation)
    line = [str(truth), str(five), "--workers", "1"]
    assert run(evaluate.act, line) == DATA and "fold3/validation: holds no label map" in capsys.readouterr().err
    for fold in (3, 4):
        (five / f"fold{fold}" / "status.json").write_text('{"state": "running"}')
    with pytest.raises(ValueError, match="five is to hold five folds, and fold0, fold1, fold2 have finished"):
        evaluate.act(line)


def test_several_predictions_are_compared_on_cases_that_are_new_to_all(
    folders: tuple[Path, Path], capsys, monkeypatch
) -> None:
    """By the others, seen by one of them, the worse would win."""
    truth, first = folders
    second = first.with_name("second")
    seen = {"predicted": Seen(["case_1"], [], 3), "second": Seen([], [], 3, ["case_2"])}
    right = [random_labels(case) for case in range(3)]
    for folder, wrong in ((first, (0,)), (second, (1, 2))):
        for case, labels in enumerate(right):
            save(folder / f"case_{case}.nii.gz", np.roll(labels, 2, 0) if case in wrong else labels)

    def look_up(self: CaseEvaluation, job: ScoringJob) -> str:
        job.seen = job.known = seen[Path(job.name).name]
        return ""

    line = [*map(str, (truth, first, second)), "--workers", "1", "--find-best"]
    assert run(evaluate.act, line) == 0
    assert f"over 3 cases (too few to tell): {first}" in capsys.readouterr().out
    monkeypatch.setattr(CaseEvaluation, "_look_up", look_up)
    assert run(evaluate.act, line) == 0
    said = capsys.readouterr().out
    told = (
        "The scores are of the 1 case new to all runs. Of the other 2, 1 was used to choose the weights, and 1 was seen"
    )
    best = "highest mean Dice over {} (other seeds may differ): {},"
    places = [told, best.format("1 case", second), "all cases together, new or not:", best.format("3 cases", first)]
    places.append(f"highest mean Dice among 2, over 1 case (too few to tell): {second}\n")
    assert [said.count(place) for place in places] == [1] * 5
    assert sorted(places, key=said.index) == places, "the new ones lead"
    assert (second / "postprocessing.json").is_file()
    everything = Seen(["case_0", "case_1", "case_2"], [], 3)
    seen.update(predicted=everything, second=everything)
    assert run(evaluate.act, line) == 0
    said = capsys.readouterr().out
    assert "No new case: all 3 were seen in training." in said and "together, new or not" not in said


def test_it_is_said_how_many_patients_scans_are_of(folders: tuple[Path, Path], capsys) -> None:
    assert about_scans(["sub-1_ses-1", "sub-1_ses-2", "sub-2"], {}).startswith(
        "3 scans of 2 patients: any interval takes"
    )
    assert about_scans(["a", "b", "c"], {}) == "" and about_scans(["a", "b"], {"a": "p", "b": "p", "c": "p"}) != ""
    said = "3 scans of 2 patients: any interval takes scans as independent, so it is too narrow."
    assert evaluate_folders(folders) == 0 and said not in capsys.readouterr().out
    for folder in folders:
        for case, name in enumerate(("BraTS-GLI-00005-000", "BraTS-GLI-00005-001", "BraTS-GLI-00006-000")):
            (folder / f"case_{case}.nii.gz").rename(folder / f"{name}.nii.gz")
    assert evaluate_folders(folders) == 0 and said in capsys.readouterr().out


def test_means_over_different_cases_are_told_with_the_difference_where_both_have_a_dice() -> None:
    """One that predicts a class where the truth has none gets a 0 there, and one that is right no Dice."""
    nan = math.nan
    one = [{"a": {"Dice": 0.8}, "b": {"Dice": 0.0}}, {"a": {"Dice": 0.6}, "b": {"Dice": 0.9}}]
    other = [{"a": {"Dice": 0.7}, "b": {"Dice": nan}}, {"a": {"Dice": 0.7}, "b": {"Dice": 0.8}}]
    told = where_both(one, other, "mine")
    assert told.startswith(
        "These means are over different cases: in 1 case, only one of the two has a Dice of some class"
    )
    assert told.endswith("Where both have one, the mean Dice of mine is 0.050 higher."), "0.8 against 0.75"
    assert where_both(one, one, "mine") == "" and where_both(other, other, "mine") == ""
    alone = [{"a": {"Dice": nan}}], [{"a": {"Dice": 0.5}}]
    assert where_both(*alone, "mine").endswith("(0 if it was predicted where the truth has none).")
    (_, line) = _verdict([Scored("mine", dict(zip("xy", one))), Scored("theirs", dict(zip("xy", other)))], ["x", "y"])
    assert line == told
