"""Pictures of classifiers: which curves there are, and that names are shown as they are."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nibabel
import numpy as np
import pytest

from seqpar.data.errors import DataError
from seqpar.data.preparation.cache import PreparedDataset
from seqpar.report import images, pictures
from seqpar.report.cases import viewer_section
from seqpar.report.cautions import may_be_chance
from seqpar.report.embedded_volumes import ShownCase
from seqpar.report.pictures import draw_evidence, draw_scores
from seqpar.report.planes import COUNTED, NEAREST
from seqpar.report.plots import draw_chart
from seqpar.report.record import RunRecord
from seqpar.scores.class_scores import describe_share, positive_class, score_classes
from seqpar.tasks.classify import evaluation, page
from seqpar.tasks.classify.evaluation import compare_classifiers
from seqpar.tasks.classify.page import (
    _scores,
    calibration_diagrams,
    classes_table,
    confusion_table,
    names_of_maps,
    roc_diagrams,
    uncalibrated,
)
from seqpar.tasks.classify.scores import verdict_on
from seqpar.tasks.seen_cases import Seen
from tests.support.report_page import own_slices

NAMES = ["healthy", "a$b$", "$\\frac$"]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the figures that are drawn, instead of files."""
    drawn: list[Any] = []

    def take(figure: Any, path: Path, dpi: int = 0) -> None:
        figure.draw_without_rendering()
        drawn.append(figure)

    monkeypatch.setattr(pictures, "save_figure", take)
    return drawn


def summary(names: list[str]) -> dict:
    truth = np.arange(12) % len(names)
    probabilities = np.random.default_rng(0).dirichlet(np.ones(len(names)), 12)
    cases = [{"truth": names[t], "probabilities": row.tolist()} for t, row in zip(truth, probabilities)]
    return {"names": names, "metric_per_case": cases, **score_classes(truth.tolist(), probabilities, names)}


def test_two_classes_have_one_curve_and_more_have_one_each_under_their_names(figures: list[Any]) -> None:
    for names in (NAMES[:2], NAMES):
        draw_scores(Path("scores.png"), summary(names), "after step 1,600")
    for figure, names in zip(figures, (NAMES[1:2], NAMES)):
        curves, counts = figure.axes
        lines = curves.get_lines()[1:]  # behind that of chance
        labels = [line.get_label().replace("\\$", "$") for line in lines]
        assert [label.partition(": AUC 0.")[0] for label in labels] == names
        assert all(re.search(r"\([46] cases, [68] others(, too few to tell)?\)$", label) for label in labels), labels
        assert all(("too few" in label) == ("(4 cases" in label) for label in labels)
        assert curves.get_box_aspect() == 1 and (len(names) > 1 or lines[0].get_linestyle() == "-")
        assert (curves.get_xlabel(), curves.get_ylabel()) == ("1 − specificity", "sensitivity")
        assert counts.get_title() == "Confusion matrix: number of cases"
        assert figure.get_suptitle().endswith("\n12 held-out cases, after step 1,600")
        width = figure.bbox.width
        assert all(
            plot.title.get_window_extent().x0 >= 0 and plot.title.get_window_extent().x1 <= width
            for plot in figure.axes
        )
        assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)
        shades = [text.get_color() for text in counts.texts]
        assert len(shades) == len(counts.get_xticklabels()) ** 2 and {"black", "white"} == set(shades)


def test_a_roc_curve_on_a_page_has_its_area_its_cases_and_both_axes() -> None:
    (diagram,) = roc_diagrams(summary(["healthy", "ill"]))
    assert (diagram.quantity, diagram.over, diagram.up) == ("ROC curve of ill", "1 − specificity", "sensitivity")
    assert re.fullmatch(r"ill: AUC 0\.\d{3} \(6 cases, 6 others\)", diagram.lines[1].label)
    chart = draw_chart(diagram)
    assert chart is not None and len(set(re.search(r'viewBox="0 0 (\S+) (\S+)"', chart.svg).groups())) == 1, "square"  # type: ignore[union-attr]
    assert chart is not None and "sensitivity" in chart.svg and "1 − specificity" in chart.svg
    (of_few,) = roc_diagrams(summary(["healthy", "b", "c"]), "c")
    assert of_few.lines[1].label.endswith("(4 cases, 8 others, too few to tell)")


def of_tenths(*counts: int) -> dict:
    """Returns the summary of cases that are all right; as many as ``counts`` have a probability of 0.55, 0.65, …"""
    given = np.repeat(0.55 + 0.1 * np.arange(len(counts)), counts)
    table = np.stack([given, 1 - given], 1)
    cases = [{"truth": "a", "probabilities": row.tolist()} for row in table]
    return {"names": ["a", "b"], "metric_per_case": cases, **score_classes([0] * len(given), table, ["a", "b"])}


def test_calibration_is_drawn_by_tenths_with_enough_cases_and_not_by_a_single_one() -> None:
    assert calibration_diagrams(of_tenths(4, 4, 4)) == [] and calibration_diagrams(of_tenths(40, 4)) == []
    (diagram,) = calibration_diagrams(of_tenths(5, 4, 6))
    line = diagram.lines[1]
    assert line.places == pytest.approx([0.55, 0.75]) and line.label == "cases per dot: 5, 6 (of 15)"
    assert (diagram.over, diagram.up) == ("probability of the predicted class", "share of correct predictions")
    scores = _scores(of_tenths(4, 4) | {"source": "here"}, None, "")
    assert scores.note == uncalibrated(of_tenths(4, 4)) and [chart.title for chart in scores.charts] == []
    assert scores.note.startswith("No calibration curve: it needs two bins of probability")
    said = "Correct predictions in each bin, and the mean probability of the bin: 4 of 4 at 0.55, 4 of 4 at 0.65."
    assert scores.note.endswith(said)
    assert ": 40 of 40 at 0.65, 4 of 4 at 0.55." in uncalibrated(of_tenths(4, 40)), "most first"
    assert _scores(of_tenths(5, 5) | {"source": "here"}, None, "").note == ""


def test_the_table_of_classes_has_intervals_and_that_of_counts_says_what_its_rows_and_columns_are() -> None:
    content = summary(["healthy", "b", "c"]) | {"source": "here"}
    table = classes_table(content)
    assert [head.text for head in table.heads] == ["Class", "Cases", "Sensitivity", "Specificity", "AUC"]
    for row in table.rows:
        _, _, of_class, specificity, of_others, area = row.cells
        assert area.text.endswith(" (too few to tell)")
        assert of_class == "too few to tell" and of_others == describe_share(specificity.value, 8)
        assert specificity.text == f"{specificity.value:.3f} ({round(8 * specificity.value)} of 8)"
    assert "The predicted class is the one with the highest probability. " in table.note
    two = classes_table(summary(["healthy", "ill"]) | {"source": "here"})
    assert [row.name for row in two.rows] == ["ill"] and "AUC" not in [head.text for head in two.heads], "no mirror"
    assert "healthy has no row: its sensitivity is the specificity above" in two.note and "no row" not in table.note
    assert "the highest probability (above 0.5). " in two.note
    tied = {"case": "t", "truth": "ill", "class": "healthy", "probabilities": [0.5, 0.5]}
    other = summary(["healthy", "ill"]) | {"source": "here"}
    other["metric_per_case"] = [*other["metric_per_case"], tied]
    equal = "(above 0.5); if several are equal (1 case), the first of healthy, ill. "
    assert equal in classes_table(other).note
    about = [_scores(summary(names) | {"source": "here"}, None, "").about for names in (NAMES[:2], NAMES)]
    assert ["averaged over classes" in text for text in about] == [False, True]
    assert "a balanced accuracy of 0.5 and an AUC of 0.5 on" in about[0] and "accuracy of 0.333 and" in about[1]
    counts = confusion_table(content)
    assert [head.text for head in counts.heads] == ["True class", "Predicted class"]
    assert counts.heads[1].below == ("healthy", "b", "c") and "a row for each true class" in counts.note


def test_cases_that_were_seen_in_training_are_scored_apart_from_new_ones() -> None:
    names, right = ["healthy", "ill"], np.tile([[0.9, 0.1], [0.1, 0.9]], (8, 1))
    given = np.concatenate([right[:12], 1 - right[12:]])  # the four new ones are all wrong
    cases = [{"case": f"c{n}", "truth": names[n % 2], "probabilities": row.tolist()} for n, row in enumerate(given)]
    content = {"names": names, "metric_per_case": cases, "source": "here"}
    content |= score_classes([n % 2 for n in range(16)], given, names)
    scores = _scores(content, None, "", Seen([f"c{n}" for n in range(12)], (), 16))
    assert [tile.score.text for tile in scores.tiles] == ["0.000"] * 3 and scores.tiles[0].more.endswith("n = 4")
    assert scores.seen == "The scores are of the 4 cases new to the run. The other 12 were seen in training."
    assert scores.apart and [head.text for head in scores.apart.heads[1:]] == ["New to the run", "Seen in training"]
    rows = {row.name: [cell.text for cell in row.cells] for row in scores.apart.rows}  # type: ignore[union-attr]
    assert rows["accuracy"] == ["0.000 (too few to tell)", "1.000 (0.758 to 1.000)"] and rows["cases"] == ["4", "12"]
    assert [row.cells[0].text for row in scores.confusion.rows] == ["0", "2"]  # type: ignore[union-attr]
    assert [chart.title for chart in scores.charts] == ["ROC curve of ill, cases new to the run"]
    assert scores.classes.note.startswith("Scores of 4 cases: here (cases new to the run). ")
    every = _scores(content, None, "", Seen([f"c{n}" for n in range(16)], (), 16))
    assert every.tiles == [] and every.apart is None
    assert every.seen == "No new case: all 16 were seen in training."
    assert every.charts[0].title == "ROC curve of ill, cases seen in training"
    chose = Seen([f"c{n}" for n in range(6)], (), 16, [f"c{n}" for n in range(6, 12)])
    scores = _scores(content, None, "", chose)
    assert scores.apart and [cell.text for cell in scores.apart.rows[-1].cells] == ["4", "6", "6"]
    scores = _scores(content, None, "", chose._replace(chose=[f"c{n}" for n in range(6, 16)]))
    assert [tile.score.text for tile in scores.tiles][:1] == ["0.600"] and scores.seen.startswith("No new case: the ")
    assert scores.charts[0].title == "ROC curve of ill, cases used to choose the weights"
    unseen = _scores(content, None, "")
    assert (unseen.seen, unseen.apart, unseen.tiles[0].score.text) == ("", None, "0.750")


def test_a_case_is_told_with_its_predicted_class_and_the_probability_of_it() -> None:
    case = {"truth": "ill", "class": "healthy", "probabilities": [0.975, 0.025, 0.0]}
    assert verdict_on(case, {"names": ["healthy", "ill"]}) == (
        "True class: ill. Predicted: healthy with a probability of 0.975 (wrong)."
    )
    assert verdict_on(case, {"names": ["healthy", "ill", "c"]}).endswith(
        "(wrong). Probability of the true class: 0.025."
    )
    right = verdict_on(case | {"truth": "healthy"}, {"names": ["healthy", "ill", "c"]})
    assert right == "True class: healthy. Predicted: healthy with a probability of 0.975 (correct)."


def test_the_viewer_names_the_method_and_class_of_each_map(tmp_path: Path) -> None:
    content = {"metric_per_case": [{"case": "a", "class": "ill"}, {"case": "b", "class": "healthy"}]}
    (tmp_path / "prediction.json").write_text(json.dumps({"explained": "hirescam"}))
    maps = names_of_maps(content, tmp_path)
    assert maps == {"a": "HiResCAM map for ill", "b": "HiResCAM map for healthy"}
    assert names_of_maps(content, tmp_path / "older") == {"a": "map of the evidence for ill",
                                                          "b": "map of the evidence for healthy"}  # fmt: skip
    nothing = np.zeros((4, 4, 4), np.uint8)
    case = ShownCase(
        "a", {"T1": nothing}, nothing, nothing, (1.0,) * 3, own_slices((4, 4, 4)), heat=nothing + 9, heat_name=maps["a"]
    )
    section = viewer_section([(case, case.embedded(10**6))], (), False)
    assert section.volumes["cases"][0]["heat_name"] == "HiResCAM map for ill"


@pytest.mark.parametrize("shape", [(12, 12, 12), (9, 9, 9)])  # as the file, and resampled
def test_a_viewer_says_that_the_maximum_of_a_map_is_outside_the_body(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pictured = np.zeros((1, *shape))
    pictured[0, 2:-2, 2:-2, 2:-2] = 1
    properties = SimpleNamespace(shape=shape, box=((0, 12),) * 3, spacing=(1.0,) * 3, geometry=None)
    image = SimpleNamespace(properties=properties, image=pictured)
    monkeypatch.setattr(page, "greys_of", lambda *_: ({}, {}, False))
    monkeypatch.setattr(page, "slices_of", lambda *_: own_slices(shape))

    def caution(at: int, most: float = 1.0) -> str:
        seen = np.zeros((12, 12, 12), np.float32)
        seen[at, 6, 6] = most
        nibabel.save(nibabel.Nifti1Image(seen, np.eye(4)), tmp_path / "a.nii.gz")
        shown = page._viewed("a", image, ["T1"], tmp_path, "map for ill")  # type: ignore[arg-type]
        assert shown.heat is not None and shown.heat.max() == round(255 * most), "resampling takes nothing from it"
        section = viewer_section([(shown, shown.embedded(10**6))], (), False)
        assert section.volumes["cases"][0]["heat_name"] == "map for ill"
        return str(section.volumes["cases"][0]["heat_caution"])

    assert caution(6) == "" and caution(0).startswith(
        "The map's maximum is outside the body, and so is 100% of the map"
    )
    assert caution(6, 0.3) == OUTSIDE_THE_IMAGE, "nothing in the image is the maximum"


def test_runs_are_compared_on_the_cases_that_all_have_scored() -> None:
    names, count = ["healthy", "ill"], 12
    truth = np.arange(count) % 2
    every = dict[str, dict]()
    for run, wrong in (("first", 0), ("second", 3)):
        table = np.full((count, 2), 0.1)
        table[np.arange(count), np.where(np.arange(count) < wrong, 1 - truth, truth)] = 0.9
        cases = [
            {"case": f"c{n}", "truth": names[t], "class": names[row.argmax()], "probabilities": row.tolist()}
            for n, (t, row) in enumerate(zip(truth, table))
        ]
        scores = score_classes(truth.tolist(), table, names)
        every[run] = {"names": names, "metric_per_case": cases, "source": run, **scores}
    both = compare_classifiers(every)
    (sentence,) = both.sentences
    assert sentence.startswith(
        "The accuracy of second is 0.250 lower than that of first, over 12 cases: 0 right by second alone, 3 by first "
        "alone (95 % "
    )
    assert "p = 0.25), which may be chance. The interval is Newcombe's for pairs" in sentence
    equal = evaluation._difference("b", "a", [(True, False), (False, True)] + [(True, True)] * 6)
    assert equal.startswith("The accuracy of b equals that of a, over 8 cases")
    assert "p = 1), so either may be better. The" in equal
    assert not isinstance(both.scores, str) and not isinstance(both.cases, str)
    rows = {row.name: [getattr(cell, "text", cell) for cell in row.cells] for row in both.scores.rows}
    assert rows["sensitivity (ill)"] == ["1.000 (6 of 6)", "0.833 (5 of 6)"]
    assert rows["specificity (ill)"] == ["1.000 (6 of 6)", "0.667 (4 of 6)"]
    assert len(both.cases.rows) == 12 and "the table below" in both.scores.note
    alone = compare_classifiers({"first": every["first"]})
    assert alone.cases == "" and not alone.sentences
    assert not isinstance(alone.scores, str) and "the table below" not in alone.scores.note


def test_pictures_of_phantoms_in_a_runs_own_report_say_that_they_are_generated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    titles = list[str]()

    def note(path: Path, title: str, *_: object) -> None:
        titles.append(title)
        path.write_bytes(b"png")

    properties = SimpleNamespace(spacing=(1.0, 1.0, 1.0), geometry=None, box=None, shape=None)
    case = SimpleNamespace(image=np.zeros((1, 4, 4, 4)), properties=properties)
    monkeypatch.setattr(page, "draw_evidence", note)
    monkeypatch.setattr(page, "slices_of", lambda *_: ())
    monkeypatch.setattr(page, "open_cache", lambda path: SimpleNamespace(path=path, cases={"a": case}))
    for folder, mark in (("phantoms", "{}"), ("scans", "")):
        (tmp_path / folder).mkdir()
        if mark:
            (tmp_path / folder / "phantom.json").write_text(mark)
        content = {"dataset": {"prepared": "here"}, "config": {"data": str(tmp_path / folder)}}
        record = RunRecord(tmp_path, content, None, {})
        page._picture(record, "a", None, None, False)
    assert titles == ["a (generated, not a patient)", "a"]


def test_the_image_of_a_training_case_is_not_shown_for_another_of_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sources = [["a.nii.gz", 10, 20]]
    cache = PreparedDataset(tmp_path, "D", *[()] * 6, recipe=None, cases={"a": None}, described={})
    monkeypatch.setattr(page, "open_cache", lambda path: cache)
    monkeypatch.setattr(images, "read_record", lambda path, name: {"sources": sources})
    record = RunRecord(tmp_path, {"dataset": {"prepared": "here"}, "config": {}}, None, {})
    for inputs in ({}, {"b": sources}, {"a": []}, {"a": [["a.nii.gz", 11, 20]]}, {"a": [*sources, ["b.nii.gz", 1, 1]]}):
        with pytest.raises(DataError, match="has no image that a was predicted from; predict with --explain to see it"):
            page._picture(record, "a", None, inputs, False)
    assert images.same_cases(cache, {"a": sources}).cases == cache.cases


@pytest.mark.parametrize(
    "score, cases, may_be",
    [(0.5, 40, True), (0.6, 40, True), (0.7, 40, False), (1.0, 2, True), (1.0, 8, False), (0.2, 40, True)],
)
def test_a_classifier_that_guessing_could_equal_says_so(score: float, cases: int, may_be: bool, tmp_path: Path) -> None:
    names = [str(n) for n in range(cases)]
    classes = {"names": ["healthy", "ill"], "numbers": {name: n % 2 for n, name in enumerate(names)}}

    def said(
        numbers: Mapping[str, int] = classes["numbers"], val_cases: int = 0, validations: int = 2, **auc: Any
    ) -> str:
        dataset = {"volume_classes": {**classes, "numbers": numbers}, "held_out": names}
        rows = [{"step": n, "loss": 1.0, "scores": {"balanced accuracy": score, **auc}} for n in range(validations)]
        content = {"dataset": dataset, "config": {"val_cases": val_cases}}
        return may_be_chance(RunRecord(tmp_path, content, None, {}, held_out=tuple(rows)))

    assert bool(said()) == may_be
    assert not may_be or f"On {cases} held-out cases this run reached a balanced accuracy of {score:.3f}, and" in said()
    rare = {name: int(n == 0) for n, name in enumerate(names)}
    assert bool(said(rare, validations=1)) == (score < 0.95 or cases < 4), "one case of a class tells little of it"
    assert said(val_cases=2).startswith("On 2 held-out cases "), "guessing often gets both right"
    assert said(validations=200), "the best of many"
    known = [said(AUC=area) for area in (0.891, 0.6, None)]
    assert ["has learned, but do not trust its classes." in text for text in known] == [
        may_be and cases > 2,
        False,
        False,
    ]
    assert not may_be or cases < 3 or "at the 0.5 threshold, and guessing (0.500 on average) could reach" in known[0]
    assert not may_be or "nothing shows" in known[1], "an AUC that guessing reaches"
    assert "all of one class" in said(dict.fromkeys(names, 1)) and said({}) == ""


OUTSIDE_THE_IMAGE = "The map's maximum is outside the image, in what pads it: do not read it as a reason."


def test_a_map_is_warned_of_by_its_share_outside_the_body_too() -> None:
    body, seen = np.zeros((4, 4, 4), bool), np.zeros((4, 4, 4))
    body[:2], seen[0, 0, 0] = True, 1.0
    assert pictures.caution_about(seen, body) == "" == pictures.caution_about(0 * seen, body)
    seen[3] = 0.02
    assert pictures.caution_about(seen, body) == "", "24%: a coarse map reaches over the edge"
    seen[3] = 0.03
    assert pictures.caution_about(seen, body) == "32% of the map is outside the body: do not read it as a reason."
    said = "outside the image, in what pads it, and 32% of the rest outside the body: do not"
    assert said in pictures.caution_about(0.5 * seen, body)
    assert pictures.caution_about(np.where(body, 0.9 * seen, 0) + (np.arange(64).reshape(4, 4, 4) == 63), ~body) == (
        "47% of the map is outside the body: do not read it as a reason."
    )


def test_an_outlined_area_that_is_mostly_air_is_warned_of_though_most_of_the_map_is_in_the_body() -> None:
    body, seen = np.zeros((12, 12, 12), bool), np.zeros((12, 12, 12))
    body[:6] = True
    seen[2:5, 2:5, 2:5], seen[5:8, 9, 9] = 1.0, 0.6
    assert pictures.caution_about(seen, body) == (
        "1 of 2 outlined areas is mostly outside the body: do not read it as a reason."
    )
    assert pictures.caution_about(np.where(seen == 0.6, 0.4, seen), body) == "", "it has no outline"
    seen[3:5, 9, 9] = 0.6
    assert pictures.caution_about(seen, body) == "", "most of it is in the body"


def test_the_colours_of_a_maps_key_are_those_over_the_image() -> None:
    alone, over = pictures.heat_colours(), pictures.heat_colours(over_grey=True)
    assert (alone[0], over[0]) == ("#000004", "#808080"), "what is 0 is transparent"
    mixed = [0.65 * int(alone[-1][at : at + 2], 16) + 0.35 * 127.5 for at in (1, 3, 5)]
    assert [int(over[-1][at : at + 2], 16) for at in (1, 3, 5)] == pytest.approx(mixed, abs=1)


def picture_of(
    figures: list[Any],
    image: np.ndarray,
    seen: np.ndarray,
    about: str = "HiResCAM map for ill",
    resampled: bool = False,
    step: tuple[float, ...] = (),
) -> Any:
    slices = [own._replace(resampled=resampled) for own in own_slices(image.shape)]
    draw_evidence(Path("c.png"), "a$\\case$: ill 0.9", image, seen, (1.0, 1.0, 2.0), slices, False, about, step)
    return figures[-1]


def test_a_map_says_its_method_and_class_and_half_of_it_has_an_outline(figures: list[Any]) -> None:
    image = 1 + np.random.default_rng(0).random((9, 10, 11))
    seen = np.zeros_like(image)
    nothing = picture_of(figures, image, seen)
    seen[3:6, 3:6, 3:6] = 1
    something = picture_of(figures, image, seen)
    assert f"\n{COUNTED}.\n" in nothing.get_suptitle()
    resampled = picture_of(figures, image, seen, resampled=True)
    assert f" {COUNTED}{NEAREST}. " in resampled.get_suptitle().replace("\n", " ")
    title = resampled._suptitle.get_window_extent()
    assert title.x0 >= 0 and title.x1 <= resampled.bbox.width <= 600, "all its words are seen, and are large in it"
    assert [len(panel.collections) for panel in nothing.axes] == [0] * 3, "no colour bar either"
    assert [len(panel.collections) for panel in something.axes[:3]] == [2] * 3, "black below white"
    assert "HiResCAM map for ill, in planes through its maximum\nWhite line: half" in something.get_suptitle()
    coarse = [picture_of(figures, image, seen, step=step) for step in ((8, 8, 4), (4, 4, 4))]
    for figure, between in zip(coarse, ("8 mm", "4 × 4 × 8 mm")):
        told = f"One map point every {between}; values and outlines between them are interpolated."
        assert told in figure.get_suptitle().replace("\n", " ")
    assert "HiResCAM map for ill: no evidence for the class" in nothing.get_suptitle()
    assert [pictures.ALONE in one.get_suptitle().replace("\n", " ") for one in (something, nothing)] == [True, False]
    assert something.axes[3].get_ylabel() == "share of the map's maximum"
    assert [float(tick) for tick in something.axes[3].get_yticks()] == [0, 0.5, 1]


def test_maps_are_shown_on_planes_through_the_body_with_a_warning_if_their_maximum_is_outside(figures) -> None:
    image, seen = np.zeros((20, 20, 20)), np.zeros((20, 20, 20))
    image[4:16, 4:16, 4:16] = 1
    image[10, 10, 17] = 1  # a fragment
    seen[10, 10, 17] = 1
    seen[8, 9, 10] = 0.56
    assert pictures.evidence_planes(seen, image != 0) == (8, 9, 10), (
        "the strongest point in the body, not in the fragment"
    )
    inside = picture_of(figures, image, seen)
    assert inside.get_supxlabel() == ""
    assert (
        "HiResCAM map for ill. The planes, which show much of the body, cross where it has 56% of its maximum. "
        "The maximum is in slices sagittal 11, coronal 11, axial 18. White line"
    ) in inside.get_suptitle().replace("\n", " ")
    seen[10, 10, 17], seen[8, 9, 17] = 0, 1
    above = picture_of(figures, image, seen).get_suptitle().replace("\n", " ")
    assert "is in slices sagittal 9, coronal 10, axial 18, seen in the sagittal and coronal planes. White" in above
    seen[8, 9, 17], seen[10, 10, 17] = 0, 1
    seen[1, 1, 1] = 1
    outside = picture_of(figures, image, seen)
    told = "The map's maximum is outside the body, and so is 39% of the map: do not\nread it as a reason."
    assert outside.get_supxlabel() == told
    (warning,) = [text for text in outside.texts if text.get_text() == told]
    assert warning.get_window_extent().y1 <= min(panel.get_tightbbox().y0 for panel in outside.axes)
    assert warning.get_window_extent().x0 >= 0 and warning.get_window_extent().x1 <= outside.bbox.width, "it is whole"
    padded = picture_of(figures, image, 0.3 * (seen == 0.56))
    assert padded.get_supxlabel().replace("\n", " ") == OUTSIDE_THE_IMAGE, "nothing in the image is the maximum"
    assert "30% of its maximum. The maximum is outside the image. White" in padded.get_suptitle().replace("\n", " ")
    assert pictures.evidence_planes(seen, image != 0) == (8, 9, 10), "planes of air are left out"
    assert pictures.evidence_planes(np.zeros_like(seen), image != 0) == (10, 10, 4), "without a map most of the body"
    noise = np.random.default_rng(0).normal(-1, 0.001, image.shape)  # CT: air is not 0
    image[10, 10, 17] = 0  # as small a part is noise
    assert np.array_equal(pictures.body_of(np.where(image != 0, 1.0, noise)), image != 0)


def test_the_positive_class_is_the_one_that_is_not_healthy() -> None:
    assert positive_class(["dementia", "healthy"]) == 0 and positive_class(["Normal", "ill"]) == 1
    assert positive_class(["0", "1"]) == 1 and positive_class(["1", "0"]) == 0 and positive_class(["a", "b"]) == 1
    assert positive_class(["dementia", "healthy"], "healthy") == 1
    with pytest.raises(ValueError, match="--positive sick: no class has this name: use dementia or healthy"):
        positive_class(["dementia", "healthy"], "sick")
