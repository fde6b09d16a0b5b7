"""Scores of classes against scikit-learn, and against counts of pairs; their files; what is refused."""

import csv
import itertools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from seqpar.cli import evaluate
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.data.errors import DataError
from seqpar.report.record import RunRecord
from seqpar.scores import class_scores
from seqpar.scores.class_scores import (
    about_scores,
    area_under_roc,
    baseline,
    bootstrap,
    calibration,
    caution_of_absent,
    caution_of_guesses,
    describe_share,
    fewest_cases,
    interval_of_balanced,
    interval_of_share,
    positive_class,
    roc_points,
    score_classes,
    words_of_interval,
)
from seqpar.tasks.case_evaluation import ScoringJob, Seen
from seqpar.tasks.classify.evaluation import ClassEvaluation, guessed_by_each, other_classes
from seqpar.tasks.classify.scores import ClassTable, class_lines, read_class_table


def draw(cases: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns classes and probabilities that favour them, with many equal ones."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(classes, size=cases)
    scores = rng.integers(1, 6, (cases, classes)) + 3.0 * (np.arange(classes) == truth[:, None]) * rng.random(
        (cases, 1)
    )
    scores = np.round(scores)
    return truth, scores / scores.sum(1, keepdims=True)


def by_pairs(is_class: np.ndarray, scores: np.ndarray) -> float:
    pairs = list(itertools.product(scores[is_class], scores[~is_class]))
    return sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("classes", [2, 3])
def test_scores_are_those_of_scikit_learn_and_of_counts_by_hand(classes: int) -> None:
    truth, probabilities = draw(60, classes)
    metrics = pytest.importorskip("sklearn.metrics")
    names, given = [f"k{n}" for n in range(classes)], probabilities.argmax(1)
    content = score_classes(truth.tolist(), probabilities, names)
    assert content["scores"]["accuracy"] == pytest.approx(metrics.accuracy_score(truth, given), abs=1e-12)
    balanced = metrics.balanced_accuracy_score(truth, given)
    assert content["scores"]["balanced accuracy"] == pytest.approx(balanced, abs=1e-12)
    assert content["confusion"] == metrics.confusion_matrix(truth, given).tolist()
    areas = []
    for number, name in enumerate(names):
        own, row = truth == number, content["classes"][name]
        assert row["sensitivity"] == pytest.approx((given[own] == number).mean(), abs=1e-12)
        assert row["specificity"] == pytest.approx((given[~own] != number).mean(), abs=1e-12)
        assert row["AUC"] == pytest.approx(by_pairs(own, probabilities[:, number]), abs=1e-12)
        assert row["AUC"] == pytest.approx(metrics.roc_auc_score(own, probabilities[:, number]), abs=1e-12)
        areas.append(row["AUC"])
        false, hits, _ = metrics.roc_curve(own, probabilities[:, number], drop_intermediate=False)
        ours = roc_points(own, probabilities[:, number])
        assert np.allclose(ours, (false, hits)), "a point for each threshold"
        assert np.trapezoid(ours[1], ours[0]) == pytest.approx(row["AUC"], abs=1e-12)
    assert content["scores"]["AUC"] == pytest.approx(np.mean(areas), abs=1e-12)


def test_what_no_case_shows_is_not_a_number() -> None:
    content = score_classes([0, 0, 0], np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]), ["a", "b"])
    assert np.isnan(content["scores"]["AUC"]) and content["intervals"]["AUC"] == []
    assert content["scores"]["balanced accuracy"] == pytest.approx(2 / 3)
    assert np.isnan(content["classes"]["b"]["sensitivity"])
    assert content["classes"]["b"]["specificity"] == pytest.approx(2 / 3)
    assert area_under_roc(np.array([True, False]), np.array([0.5, 0.5])) == 0.5


def test_intervals_hold_the_score_narrow_with_more_cases_and_come_again() -> None:
    few, many = draw(24, 2), draw(240, 2)

    widths = []
    for truth, probabilities in (few, many):
        right = probabilities.argmax(1) == truth
        share = right.mean()
        low, high = bootstrap(truth, lambda times: times @ right / len(truth))
        assert low <= share <= high and [low, high] == bootstrap(truth, lambda times: times @ right / len(truth))
        widths.append((high - low, 2 * 1.96 * np.sqrt(share * (1 - share) / len(truth))))
    assert widths[1][0] < 0.5 * widths[0][0]
    assert widths[1][0] == pytest.approx(widths[1][1], rel=0.15), "about the normal interval of a share"


def test_a_calibrated_classifier_lies_on_the_diagonal() -> None:
    rng = np.random.default_rng(0)
    p = rng.uniform(0.5, 1, 20000)
    truth = (rng.random(len(p)) > p).astype(np.int64)  # class 0 with probability p
    table = np.stack([p, 1 - p], 1)
    assert all(abs(given - right) < 0.03 for given, right, _ in calibration(truth, table))
    assert class_scores.calibration_error(truth, table) < 0.02
    assert class_scores.calibration_error(truth, np.stack([np.full(len(p), 0.99), np.full(len(p), 0.01)], 1)) > 0.2


def test_a_difference_of_paired_shares_is_as_sure_as_newcombe_says() -> None:
    """His examples of 1998, with the p value of the binomial distribution."""
    assert class_scores.compare_shares(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404, 0.0129), abs=5e-5)
    assert class_scores.compare_shares(20, 12, 2, 16) == pytest.approx((0.0562, 0.3292, 0.0129), abs=5e-5)
    low, high, p = class_scores.compare_shares(0, 0, 0, 10)
    assert low == -high < -0.2 and p == 1, "runs that agree on few cases are not known to be equal"


def table_at(path: Path, truth: np.ndarray, probabilities: np.ndarray, first: int = 0) -> list[str]:
    cases = tuple(f"c{n + first:03d}" for n in range(len(truth)))
    path.parent.mkdir(exist_ok=True)
    path.write_text(ClassTable(("healthy", "Ill"), cases, probabilities).text())
    return [f"{case},{('healthy', 'Ill')[number]}" for case, number in zip(cases, truth)]


def test_evaluate_scores_tables_and_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    truth, probabilities = draw(30, 2)
    lines = table_at(tmp_path / "a/predictions.csv", truth, probabilities)
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines]))
    assert run(evaluate.act, [str(tmp_path), str(tmp_path / "a")]) == 0
    content = json.loads((tmp_path / "a/summary.json").read_text())
    wanted = score_classes(truth.tolist(), probabilities, ["healthy", "Ill"])
    assert content["scores"] == pytest.approx(wanted["scores"], abs=1e-8)
    assert content["metric_per_case"][0]["truth"] == ("healthy", "Ill")[truth[0]]
    table = {row["class"]: row for row in csv.DictReader((tmp_path / "a/metrics.csv").open())}
    assert list(table["Ill"])[:5] == ["class", "cases", "sensitivity", "specificity", "AUC"]
    low, high = wanted["classes"]["Ill"]["intervals"]["specificity"]
    assert (float(table["Ill"]["specificity low"]), float(table["Ill"]["specificity high"])) == (low, high)
    text = capsys.readouterr().out
    assert f"{wanted['classes']['Ill']['specificity']:.3f} ({low:.3f} to {high:.3f})" in text
    assert f"accuracy {wanted['scores']['accuracy']:.4f}" in text and "sensitivity" in text
    several = SimpleNamespace(has_several=True)
    assert "averaged over classes" not in text and "averaged over classes" in ClassEvaluation.words(several, "")[0]  # type: ignore[arg-type]
    other = draw(30, 2, seed=1)[1]
    table_at(tmp_path / "b/predictions.csv", truth, other)
    assert run(evaluate.act, [str(tmp_path / "labels.csv"), str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "balanced accuracy over the 30 cases that all tables have" in said
    first, second = ((own.argmax(1) == truth).tolist() for own in (probabilities, other))
    gap, alone = sum(second) - sum(first), sum(b and not a for a, b in zip(first, second))
    which = f"is {abs(gap) / 30:.3f} {'higher' if gap > 0 else 'lower'} than" if gap else "equals"
    assert f"The accuracy of {tmp_path / 'b'} {which} that of {tmp_path / 'a'}, over 30 cases: {alone} right by" in said
    assert said.count("95 % confidence interval: ") == 1


def test_evaluate_says_what_a_page_says_of_guesses(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    truth = np.arange(20) % 2
    for name, right in (("guessed", np.arange(20) % 3 > 0), ("known", truth >= 0)):
        probabilities = np.full((20, 2), 0.2)
        probabilities[np.arange(20), np.where(right, truth, 1 - truth)] = 0.8
        lines = table_at(tmp_path / name / "predictions.csv", truth, probabilities)
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines]))
    said = dict[str, str]()
    for name in ("guessed", "known"):
        assert run(evaluate.act, [str(tmp_path), str(tmp_path / name)]) == 0
        said[name] = capsys.readouterr().out
        content = json.loads((tmp_path / name / "summary.json").read_text())
        assert baseline(content) in said[name]
        assert caution_of_guesses(content) in said[name]
    assert "Guessing could reach these scores: the interval of the AUC (" in said["guessed"]
    assert "Guessing" not in said["known"]


def test_evaluate_leads_with_cases_that_are_new_to_the_run(tmp_path: Path, capsys, monkeypatch) -> None:
    truth, probabilities = draw(20, 2)
    lines = table_at(tmp_path / "a/predictions.csv", truth, probabilities)
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines]))
    options = SimpleNamespace(truth=tmp_path, prediction=[tmp_path / "a"], json=None, csv=None, test_of=None)
    (job,) = (evaluation := ClassEvaluation(options)).open()  # type: ignore[arg-type]
    every = evaluation.score(job)
    assert every and every.line.startswith("20 cases: accuracy ") and "groups" not in str(every.contents["json"])
    names = list(job.cases.cases)
    job.seen = Seen(names[:8], (), 20, names[8:14])
    lead = evaluation.score(job)
    assert lead and lead.line.startswith("6 cases new to the run: accuracy ")
    told, first, *rest = lead.text.splitlines()
    assert (
        told.startswith("The scores are of the 6 cases new to the run. Of the other 14, 6 were") and first == "6 cases"
    )
    assert lead.text.endswith(f"\nall 20 cases together, new or not:\n{every.text}") and rest

    def look_up(self: ClassEvaluation, other: ScoringJob) -> str:
        other.seen = other.known = job.seen
        return ""

    monkeypatch.setattr(ClassEvaluation, "_look_up", look_up)
    table_at(tmp_path / "b/predictions.csv", truth, draw(20, 2, seed=1)[1])
    assert run(evaluate.act, [str(tmp_path / "labels.csv"), str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    of_new, of_all = capsys.readouterr().out.split("\nall cases together, new or not:\n")
    assert "The scores are of the 6 cases new to all runs." in of_new
    assert "over the 6 cases that all tables have" in of_new
    assert "balanced accuracy over the 20 cases that all tables have" in of_all
    rows = list(csv.DictReader(str(lead.contents["csv"]).splitlines()))
    counts = {
        which: sum(int(row["cases"]) for row in rows if row["group"] == which) for which in ("new to the run", "all")
    }
    assert counts == {"new to the run": 6, "all": 20}
    groups = json.loads(str(lead.contents["json"]))["groups"]
    assert [len(own["cases"]) for own in groups.values()] == [6, 6, 8]
    right = (probabilities[14:].argmax(1) == truth[14:]).mean()
    assert groups["new to the run"]["scores"]["accuracy"] == pytest.approx(right)


def test_classes_that_a_run_does_not_have_are_named(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, {"dataset": {"volume_classes": {"names": ["healthy", "ill"]}}}, None, {})
    (tmp_path / "labels.csv").write_text("case,class\na,healthy\nb,ill\n")
    assert other_classes(record, {"names": ["healthy", "ill"]}, tmp_path) == []
    (told,) = other_classes(record, {"names": ["healthy", "ill", "mild"]}, tmp_path)
    assert told == "Caution: this run has the classes healthy, ill; the predictions have healthy, ill, mild."
    (tmp_path / "labels.csv").write_text("case,class\na,mild\nb,healthy\n")
    (told,) = other_classes(record, {"names": ["healthy", "ill"]}, tmp_path)
    assert told == f"Caution: this run has the classes healthy, ill; the cases in {tmp_path} have healthy, mild."


def test_tables_without_a_common_case_are_scored_together(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    truth, probabilities = draw(40, 2)
    lines = table_at(tmp_path / "a/predictions.csv", truth[:25], probabilities[:25])
    lines += table_at(tmp_path / "b/predictions.csv", truth[25:], probabilities[25:], 25)
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines]))
    run(evaluate.act, [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b")])
    output = capsys.readouterr()
    accuracy = float((probabilities.argmax(1) == truth).mean())
    assert "all 40 cases together" in output.out and f"{accuracy:.3f}" in output.out.split("together")[1]
    assert "15 cases without a prediction: c025, c026, c027, c028, c029, c030, …" in output.out and not output.err
    patients = ["case,class,subject", *(f"{line},p{n // 2}" for n, line in enumerate(lines))]  # one in both tables
    (tmp_path / "labels.csv").write_text("\n".join(patients))
    run(evaluate.act, [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "b")])
    together = capsys.readouterr().out.split("all 40 cases together, with probabilities from 2 tables:")[1]
    assert "\n40 scans of 20 patients: any interval takes scans as independent" in together


def test_a_table_has_the_digits_that_its_scores_depend_on(tmp_path: Path) -> None:
    truth, low = np.array([0, 1]), 0.1 + 1e-12
    probabilities = np.array([[1 - 0.1, 0.1], [1 - low, low]])
    table_at(tmp_path / "predictions.csv", truth, probabilities)
    read = read_class_table(tmp_path / "predictions.csv").probabilities
    assert np.array_equal(read, probabilities) and area_under_roc(truth == 1, read[:, 1]) == 1


def test_what_is_named_twice_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    lines = table_at(tmp_path / "a/predictions.csv", *draw(4, 2))
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines]))
    for other in (tmp_path / "a", tmp_path / "a/predictions.csv", tmp_path / "b/../a"):
        (tmp_path / "b").mkdir(exist_ok=True)
        assert run(evaluate.act, [str(tmp_path), str(tmp_path / "a"), str(other)]) == USAGE
        assert f"{other} is named twice, and nothing is better than itself" in capsys.readouterr().err


def test_cases_that_were_kept_for_tests_are_scored_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Also where the others were predicted too, which is no fault of theirs."""
    truth, probabilities = draw(12, 2)
    lines = table_at(tmp_path / "a/predictions.csv", truth, probabilities)
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines]))
    (tmp_path / "run").mkdir()
    tests = [f"c{number:03d}" for number in range(2, 9)]
    (tmp_path / "run/config.json").write_text(json.dumps({"dataset": {"test": tests}}))
    command = [str(tmp_path), str(tmp_path / "a"), "--test-of", str(tmp_path / "run")]
    assert run(evaluate.act, command) == 0, capsys.readouterr().err
    assert "7 cases" in capsys.readouterr().out
    scored = json.loads((tmp_path / "a/summary.json").read_text())["metric_per_case"]
    assert [row["case"] for row in scored] == tests
    table_at(tmp_path / "a/predictions.csv", truth[3:], probabilities[3:], 3)
    assert run(evaluate.act, command) == 0
    assert "1 case without a prediction: c002" in capsys.readouterr().out


def test_what_is_no_table_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    truth, probabilities = draw(4, 2)
    lines, table = table_at(tmp_path / "a/predictions.csv", truth, probabilities), tmp_path / "a/predictions.csv"
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines, "c999,Ill"]))
    assert run(evaluate.act, [str(tmp_path), str(tmp_path / "a")]) == 0
    printed = capsys.readouterr().out
    assert "1 case without a prediction: c999" in printed and printed.count("(too few to tell)") == 3 + 4 + 3
    assert re.search(r"^4 cases: accuracy \S+, AUC \S+ \(too few to tell\)", printed, re.M)
    assert run(evaluate.act, [str(tmp_path), str(tmp_path / "a"), "--nsd-tolerance", "2"]) == USAGE
    assert "--nsd-tolerance would do nothing" in capsys.readouterr().err
    assert run(evaluate.act, [str(tmp_path), str(tmp_path / "a"), "--empty", "brats"]) == USAGE
    assert "--empty would do nothing" in capsys.readouterr().err
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *(line.replace("Ill", "odd") for line in lines)]))
    assert run(evaluate.act, [str(tmp_path), str(tmp_path / "a")]) == DATA
    assert "knows the classes healthy, Ill, but a case is odd" in capsys.readouterr().err
    (tmp_path / "labels.csv").write_text("\n".join(["case,class", *lines, lines[0]]))
    assert run(evaluate.act, [str(tmp_path), str(tmp_path / "a")]) == DATA
    assert "labels.csv: line 6 names case c000 a second time" in capsys.readouterr().err
    table.write_text("case,class\nc000,Ill\n")
    with pytest.raises(DataError, match="has no probabilities"):
        read_class_table(table)
    for odd, why in (
        ("c,0.9,0.1", "case c000 has the class c, and the probabilities are of a, b"),
        ("b,0.9,0.1", "case c000 has the class b, and a is more probable"),
        ("nan,0.9,0.1", "has the class 'nan'"),
    ):
        table.write_text(f"case,class,p(a),p(b)\nc000,{odd}\n")
        with pytest.raises(DataError, match=why):
            read_class_table(table)
    table.write_text("case,class,p(a),p(b)\nc000,b,0.5,0.5\n")
    with pytest.raises(DataError, match="case c000 has the class b, and a is as probable and comes first; correct"):
        read_class_table(table)  # it would be scored as a
    table.write_text(ClassTable(("a", "b"), ("c000",), np.array([[0.5, 0.5]])).text())
    assert "c000,a,0.5,0.5" in table.read_text() and read_class_table(table).cases == ("c000",)
    table.write_text("case,class,p(a),p(b)\nc000,a,0.9,0.9\n")
    with pytest.raises(DataError, match="do not sum to 1"):
        read_class_table(table)


def test_an_interval_without_width_is_not_called_one() -> None:
    """Each draw of cases that are all right is all right, however few they are."""
    perfect = np.repeat(np.eye(2), 4, 0)
    scores = score_classes(np.repeat([0, 1], 4).tolist(), perfect, ["a", "b"])
    assert scores["intervals"]["AUC"] == [1.0, 1.0]
    assert words_of_interval(scores["intervals"]["AUC"], 8) == "no interval: all bootstrap samples give the same value"
    assert words_of_interval([0.25, 0.75], 8) == "0.250 to 0.750" and words_of_interval([], 8) == ""
    assert words_of_interval([0.25, 0.75], 4) == "too few to tell"


def test_the_interval_of_balanced_accuracy_has_a_width_where_all_cases_of_a_class_are_right() -> None:
    """Newcombe's for a sum of independent shares; of a single class Wilson's own."""
    one = stats.binomtest(8, 10).proportion_ci(method="wilson")
    alone = np.array([[8, 2], [0, 0]])
    assert interval_of_balanced(alone) == pytest.approx([one.low, one.high])
    assert interval_of_balanced(np.diag([5, 5])) == pytest.approx([1 - (1 - 0.56551) / math.sqrt(2), 1.0], abs=1e-5)
    other = stats.binomtest(5, 5).proportion_ci(method="wilson")
    below, above = (math.hypot(0.8 - one.low, 1 - other.low) / 2, math.hypot(one.high - 0.8, 0) / 2)
    assert interval_of_balanced(np.array([[8, 2], [0, 5]])) == pytest.approx([0.9 - below, 0.9 + above])
    rng, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        low, high = interval_of_balanced(np.array([[n := rng.binomial(8, 0.95), 8 - n], [0, 8]]))
        covered += low <= 0.975 <= high
    assert covered > 940, "a bootstrap has no width in the two thirds of draws in which all are right"


@pytest.mark.parametrize(("right", "count"), [(0, 10), (8, 10), (10, 10), (3, 7), (95, 100)])
def test_the_interval_of_a_share_is_wilsons(right: int, count: int) -> None:
    wanted = stats.binomtest(right, count).proportion_ci(method="wilson")
    assert interval_of_share(right / count, count) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_a_share_of_few_cases_has_no_interval_and_that_of_no_case_no_words() -> None:
    assert describe_share(1.0, 5) == "0.566 to 1.000" and describe_share(1.0, 4) == "too few to tell"
    assert describe_share(math.nan, 0) == ""


def test_scores_that_rest_on_a_class_of_few_cases_have_no_interval() -> None:
    truth, probabilities = [0] * 12 + [1] * 3, np.random.default_rng(0).dirichlet([1, 1], 15)
    names = ["healthy", "ill"]
    content = {"names": names, **score_classes(truth, probabilities, names)}
    assert [fewest_cases(content, score) for score in content["scores"]] == [15, 3, 3]
    accuracy, balanced, area, _, healthy, ill, *_ = class_lines(content)
    assert " to " in accuracy and "too few" not in accuracy
    assert "too few to tell" in balanced and "too few to tell" in area
    assert re.match(r"  healthy +12  0\.\d+ \(0\.\d+ to \S+\) +0\.\d+ \(too few to tell\)", healthy)
    assert re.match(r"  ill +3  \S+ \(too few to tell\) +0\.\d+ \(0\.\d+ to \S+\)", ill)
    assert all(re.search(r"  0\.\d+ \(too few to tell\)$", row) for row in (healthy, ill)), "of the AUC too"
    many = {"names": names, **score_classes([0] * 5 + [1] * 5, probabilities[:10], names)}
    assert all(re.search(r"  [01]\.\d+$", row) for row in class_lines(many)[4:6])


def test_printed_counts_stand_under_the_class_that_was_predicted() -> None:
    probabilities = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.7]])
    content = {"names": ["healthy", "ill"], **score_classes([0, 0, 1], probabilities, ["healthy", "ill"])}
    head, healthy, ill = class_lines(content)[-3:]
    ends = [head.index(f"predicted {name}") + len(f"predicted {name}") for name in ("healthy", "ill")]
    assert [[row[:end].split()[-1] for end in ends] for row in (healthy, ill)] == [["1", "1"], ["0", "1"]]


def test_classes_of_few_cases_or_none_are_cautioned_of() -> None:
    names, truth = ["a", "b", "c", "d"], [0] * 10 + [1] * 8 + [2]
    right = score_classes(truth, np.eye(4)[truth], names)
    assert caution_of_guesses(right) == (
        "There are too few cases of c to tell how often they are recognised, and balanced accuracy and AUC count each "
        "class alike. The accuracy is above that of a constant answer."
    )
    constant = score_classes(truth, np.tile([0.4, 0.3, 0.2, 0.1], (19, 1)), names)
    assert caution_of_guesses(constant).startswith("Guessing could reach these scores: the smallest class has 1 case")
    flat = {
        **right,
        "intervals": {"AUC": None, "balanced accuracy": (0.2, 0.5)},
        "scores": {"AUC": 0.6, "accuracy": 0.4},
    }
    flat["classes"] = {name: {"cases": 5} for name in "abc"}
    told = (
        "Guessing could reach these scores: the interval of the balanced accuracy (0.200 to 0.500) is not above 0.333."
    )
    assert caution_of_guesses({**flat, "cases": 15}) == told, "the area has no interval"
    sure = {"AUC": None, "balanced accuracy": (0.4, 0.5)}
    assert caution_of_guesses({**flat, "cases": 15, "intervals": sure}) == ""
    assert caution_of_absent(right).startswith(
        "No case is of the class d: whether such cases are recognised is unknown"
    )
    told = "Guessing among the classes that occur gives a balanced accuracy of 0.333 and"
    assert told in about_scores({"names": names, **right})
    assert caution_of_absent(score_classes([0, 1], np.eye(2), names[:2])) == ""
    assert caution_of_absent(score_classes([0, 0], np.eye(2), names[:2])) == "", "told as the only class"


def test_scores_that_a_guess_could_have_are_cautioned() -> None:
    def caution(truth: list[int], ill: list[float]) -> str:
        probabilities = np.stack([1 - np.array(ill), np.array(ill)], 1)
        return caution_of_guesses(score_classes(truth, probabilities, ["healthy", "ill"]))

    one, other = [0] * 10 + [1] * 10, [0.1] * 10 + [0.9] * 10
    assert caution(one, other) == ""
    assert caution(one, [0.5] * 10 + [0.4, 0.6] * 5).startswith("Guessing could reach these scores")
    assert "the wrong way round" in caution(one, other[::-1])
    few = [0] * 4 + [1] * 4
    said = "Guessing could reach these scores: the smallest class has 4 cases, too few to tell."
    assert caution(few, [0.5] * 4 + [0.4, 0.6] * 2) == said
    assert caution(few, [0.1] * 4 + [0.9] * 4) == "", "chance ranks 4 and 4 rightly in 1 of 70 cases"
    assert "the smallest class has 2 cases, too few to tell" in caution([0, 0, 1, 1], [0.1, 0.1, 0.9, 0.9])
    assert caution([0] * 6 + [1] * 6, [0.9] * 6 + [0.1] * 6).startswith("The AUC is below 0.5: the network ranks")
    assert "All cases are of the class ill" in caution([1] * 10, [0.9] * 10)
    summary = score_classes([0] * 9 + [1], np.full((10, 2), 0.5), ["healthy", "ill"])
    assert baseline(summary) == "Always answering healthy would give an accuracy of 0.900."


@pytest.mark.parametrize(
    "names",
    ["edema|no finding", "disease|no_disease", "demented|nondemented", "COVID|non-COVID", "AD|NC", "tumor|unaffected",
     "mutant|wildtype", "IDH-mutant|IDH-wildtype", "methylated|unmethylated", "high|low", "cancer|cancer-free",
     "died|survived",
     "PD|control_group", "nodule|healthy", "nonenhancing|normal", "ill|0", "AD|normal control", "case|healthy_controls",
     "MS|healthy subjects", "nodule|nodule_absent", "1p19q-codel|1p19q-non-codel", "N+|N0", "lesion|normal-appearing",
     "converter|stable MCI", "relapse|remission", "HGG|LGG", "codeleted|intact", "normal pressure palsy|normal"],
)  # fmt: skip
def test_the_class_that_is_looked_for_is_not_the_one_that_says_no(names: str) -> None:
    found, other = names.split("|")
    assert positive_class([found, other]) == 0 and positive_class([other, found]) == 1


def test_a_comparison_says_which_scores_guessing_could_reach() -> None:
    truth = [0, 1] * 6
    sure, few = (score_classes(truth[:n], np.eye(2)[truth[:n]], ["healthy", "ill"]) for n in (12, 4))
    assert guessed_by_each({"sure": sure, "few": few, "said": few}, ["said"]) == [
        "few: guessing could reach these scores: the smallest class has 2 cases, too few to tell."
    ]
