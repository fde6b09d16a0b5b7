"""A page about several runs: settings that differ, curves over each other, scores, and differences case by case."""

import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError, meta

from seqpar.cli import report
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.losses import LOSSES, make_loss
from seqpar.report import curves, rendering, run_page, several_runs
from seqpar.report.curves import Diagram, Line, count_of
from seqpar.report.planes import RUN_COLOURS
from seqpar.report.plots import draw_chart, draw_diagram, make_figure
from seqpar.report.record import CaseScores, ScoredCase
from seqpar.tasks.lookup import TASKS
from seqpar.text import with_minus
from tests.support.report_page import NAMES, Page, written

PERFECT = NAMES[2]  # what is predicted so, as its name comes first


@pytest.fixture
def worse(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run with another rate, and a perfect case without any right voxel."""
    out = Path(shutil.copytree(finished, tmp_path / "worse"))
    content = json.loads((out / "config.json").read_text())
    content["config"]["lr"] = 0.5
    (out / "config.json").write_text(json.dumps(content))
    path = out / "validation" / "summary.json"
    summary = json.loads(path.read_text())
    (case,) = [one for one in summary["metric_per_case"] if PERFECT in one["prediction_file"]]
    assert {row["Dice"] for row in case["metrics"].values()} == {1.0}
    for row in case["metrics"].values():
        row["Dice"] = 0.0
    path.write_text(json.dumps(summary))
    return out


def compared(*arguments: object) -> Page:
    assert run(report.act, list(map(str, arguments))) == 0
    return Page((Path(str(arguments[0])) / "comparison.html").read_text())


def test_a_curve_that_coincides_with_that_of_the_first_run_does_not_hide_it(finished: Path, worse: Path) -> None:
    compared(finished, worse)
    lines = re.findall(r"stroke: (#\w+);[^\"]* stroke-width: ([\d.]+)", (finished / "comparison.html").read_text())
    widths = {colour: max(float(width) for other, width in lines if other == colour) for colour in RUN_COLOURS[:2]}
    assert widths[RUN_COLOURS[0]] >= 2 * widths[RUN_COLOURS[1]] > 0


def test_settings_that_differ_stand_beside_each_other(finished: Path, worse: Path) -> None:
    page = compared(finished, worse)
    assert "Settings that differ" in page.text and "lr" in page.text and "0.5" in page.text
    assert "embed_dim" not in page.text
    assert (
        "None: the runs' last settings are the same." in compared(finished, shutil.copytree(finished, worse / "b")).text
    )


def changed(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads((run / "config.json").read_text())
    change(content)
    (run / "config.json").write_text(json.dumps(content))
    return run


def test_runs_that_differ_in_how_the_work_is_spread_alone_say_so(finished: Path, tmp_path: Path) -> None:
    note = "These say only how the work is spread: the numbers are the same but for rounding, which training amplifies."

    def run_with(change: Callable[[dict[str, Any]], object]) -> Path:
        out = Path(shutil.copytree(finished, tmp_path / f"run{len(list(tmp_path.iterdir()))}"))
        changed(out, lambda content: content["layout"].update(global_batches=[2]))
        changed(out, lambda content: content.update(commit="c", history=[]))
        return changed(out, change)

    alone = run_with(lambda content: None)
    several = run_with(lambda content: content["config"].update(workers=3))
    assert note in compared(alone, several).text
    for change in (
        lambda content: content["config"].update(workers=4, lr=0.5),
        lambda content: content["layout"].update(global_batches=[4]),
        lambda content: content.update(commit="d"),
        lambda content: content["versions"].update(seqpar="0.0.1"),  # installed from a package, without a commit
        lambda content: content.update(history=[{"changed": {"lr": [1, 2]}}]),
        lambda content: content["dataset"].update(name="other"),
    ):
        assert note not in compared(several, run_with(change)).text


def test_a_setting_without_effect_is_not_shown_and_paths_are_short(
    finished: Path, worse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(worse.parent)
    changed(worse, lambda content: content["config"].update(data="", phantoms=12, cache=str(worse.parent / "prepared")))
    text = compared(finished, worse).text
    assert "phantoms–12\n" in text and "cache–prepared\n" in text


def test_settings_of_other_networks_are_not_shown_and_scores_of_tasks_have_charts_of_their_own(
    finished: Path, worse: Path
) -> None:
    own = {"task": "classify", "network": "resattnet18", "decoder": "plain", "embed_dim": 7, "depth": 5, "loss": "ce"}
    changed(worse, lambda content: content["config"].update(own))
    row = {"kind": "val", "step": 5, "loss": 0.4, "scores": {"balanced accuracy": 0.5}, "cases": 12}
    path = worse / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"val"' not in line]
    path.write_text("\n".join([*lines, json.dumps(row)]) + "\n")
    compared(finished, worse)
    text = (finished / "comparison.html").read_text()
    settings = text[text.index('id="settings-that-differ"') :].partition("</table>")[0]
    cells = {
        name: re.findall(">([^<]+)</td>", row) for name, row in re.findall(r"<th>(\w+)</th>(<td.*)</tr>", settings)
    }
    assert cells["network"] == ["vit", "resattnet18"] and not cells.keys() & {"decoder", "embed_dim", "features"}
    for title in ("Mean Dice on held-out cases (up to 2 cases)", "Balanced accuracy on held-out cases (n = 12)"):
        (chart,) = [part for part in text.split('<figure class="chart">') if f"<figcaption>{title}" in part]
        assert chart.count('class="curve"') == 1
    assert count_of([{"cases": 2, "dice": {"a": 1}}, {"cases": 12, "dice": {"a": 1}}]) == " (up to 12 cases)"
    assert count_of([{"cases": 2}, {"cases": 12}], "=") == " (n = 2 to 12)"


def test_curves_of_other_data_or_tasks_are_not_to_be_compared(finished: Path, worse: Path) -> None:
    text = compared(finished, worse).text
    assert "curves cannot be compared" not in text and ", not comparable" not in text
    assert "run: in no held-out case could ED be scored: nothing shows whether the network finds it." in text
    changed(worse, lambda content: content["config"].update(targets="labels"))
    assert "differ in their losses (targets)" in compared(finished, worse).text
    for folder in (finished, worse):
        changed(folder, lambda content: content["dataset"].update(regions={}))
    text = compared(finished, worse).text
    assert "differ in their losses" not in text and "targets" not in text, "without regions, both learn labels"
    changed(worse, lambda content: content["config"].update(loss="ce", dice_smooth=1.0))
    said = "These runs differ in their losses (loss, dice_smooth); their loss curves cannot be compared."
    assert said in (text := compared(finished, worse).text)
    assert text.count(", not comparable") == 2 and "Loss in training, not comparable" in text, "on the curves too"
    changed(worse, lambda content: content["config"].update(val_cases=1))
    assert "These runs validate different cases; their curves in" in compared(finished, worse).text
    changed(worse, lambda content: content["config"].update(val_cases=0))
    changed(worse, lambda content: content["dataset"].update(validated=content["dataset"]["held_out"][:1]))
    assert "These runs validate different cases; their curves in" in compared(finished, worse).text
    changed(worse, lambda content: content["dataset"].pop("validated"))
    assert "validate different cases" not in compared(finished, worse).text
    changed(worse, lambda content: content["dataset"]["held_out"].pop())
    assert "These runs validate different cases; their curves in" in (text := compared(finished, worse).text)
    assert said in text
    changed(worse, lambda content: content["dataset"].update(digests={NAMES[0]: "b"}))
    changed(finished, lambda content: content["dataset"].update(digests={NAMES[0]: "a"}))
    assert "Cases with the same name may be different cases." in compared(finished, worse).text
    for folder in (finished, worse):
        changed(folder, lambda content: content["dataset"].pop("digests"))
    changed(worse, lambda content: content["dataset"].update(name="other"))
    text = compared(finished, worse).text
    assert "These runs were trained on different data or tasks; their curves cannot be compared." in text


def test_scores_of_weights_that_predict_does_not_use_say_so(finished: Path, worse: Path) -> None:
    step = json.loads((worse / "validation" / "summary.json").read_text())["step"]
    unused = f"after step {step}, not with the weights that predict uses (step 1)"
    assert unused not in compared(finished, worse).text
    (worse / "checkpoints").mkdir(exist_ok=True)
    (worse / "checkpoints" / "best").write_text("step-00000001")
    assert f"worse: scores of its cases are those {unused}." in compared(finished, worse).text
    text = written(worse).text
    assert f"Scores {unused}" in text and f"Cases {unused}" in text


def test_cases_are_compared_pair_by_pair(finished: Path, worse: Path) -> None:
    page = compared(finished, worse)
    assert "Trained again with other seeds, they may rank differently" in page.text
    for name in NAMES:
        dice, gap = page.cells["pairs", name]
        assert gap == (-dice if name == PERFECT else 0.0)
    *classes, means = (page.cells["scores", kind] for kind in ("NCR", "ED", "ET", "WT", "TC", "mean of all classes"))
    assert means == pytest.approx([sum(own) / 5 for own in zip(*classes)])
    assert "A difference above 0 means that the run's Dice is higher than that of run." in page.text
    assert "Dice minus that of run" in page.text and page.text.count("Mean Dice\n") == 1
    assert "The mean Dice of worse is 0.333 lower than that of run (3 cases: too few to tell). By class" in page.text


def test_the_difference_of_two_runs_is_that_of_their_scores_also_where_a_case_lacks_a_class() -> None:
    """The mean over cases of their mean over classes is another number, and stood next to the score of a sweep."""
    scored = dict[str, CaseScores]()
    for run_name, lesions in (("a", [0.9, 0.9, math.nan, math.nan]), ("b", [0.1, 0.3, math.nan, math.nan])):
        livers = [0.8, 0.8, 0.8, 0.6]
        cases = [
            ScoredCase(f"c{n}", None, Path("p"), {"liver": {"Dice": liver}, "lesion": {"Dice": lesion}})
            for n, (liver, lesion) in enumerate(zip(livers, lesions))
        ]
        empty = ScoredCase("c4", None, Path("p"), {"liver": {"Dice": math.nan}, "lesion": {"Dice": math.nan}})
        scored[run_name] = CaseScores("here", {"liver": "1", "lesion": "2"}, (*cases, empty), {}, {})
    _, (sentence,), _ = several_runs._differences(scored)
    score = {name: (0.75 + lesion) / 2 for name, lesion in (("a", 0.9), ("b", 0.2))}
    assert score["a"] - score["b"] == pytest.approx(0.35)
    assert sentence == (
        "The mean Dice of b is 0.350 lower than that of a (4 cases: too few to tell). By class, b and a: "
        "liver 0.750 and 0.750, lesion 0.200 and 0.900."
    )


def test_a_run_with_the_name_of_a_class_is_called_a_run(finished: Path, tmp_path: Path) -> None:
    named = Path(shutil.copytree(finished, tmp_path / "ncr"))
    text = compared(finished, named, "--out", finished / "comparison.html").text
    assert "run ncr and run have exactly the same mean Dice over 3 cases." in text


def test_classes_that_a_run_did_not_find_are_named_on_its_page_and_on_comparisons(finished: Path, worse: Path) -> None:
    said = "t the best validation, the mean Dice of NCR is 0.000: where held-out cases have it, no voxel "
    said += "of it was found."
    assert said not in compared(finished, worse).text and f"A{said}" not in written(worse).text
    rows = (worse / "metrics.jsonl").read_text()
    assert '"NCR": 0.5' in rows
    (worse / "metrics.jsonl").write_text(rows.replace('"NCR": 0.5', '"NCR": 0.0'))
    assert f"worse: a{said}" in compared(finished, worse).text and f"A{said}" in written(worse).text


def test_a_class_that_was_not_found_says_whether_any_held_out_case_has_it(worse: Path) -> None:
    rows, path = (worse / "metrics.jsonl").read_text(), worse / "validation" / "summary.json"
    assert '"NCR": 0.5' in rows and '"cases": 2' in rows
    rows = rows.replace('"NCR": 0.5', '"NCR": 0.0')
    (worse / "metrics.jsonl").write_text(rows)
    assert "is 0.000: where held-out cases have it, no voxel of it" in written(worse).text, (
        "scores of another number of cases"
    )
    (worse / "metrics.jsonl").write_text(rows.replace('"cases": 2', f'"cases": {len(NAMES)}'))
    told = "NCR is 0.000: in the held-out cases that have it, no voxel"
    assert told in written(worse).text and told in TASKS["segment"].next_lines(worse)[0], "as the training says it"
    summary = json.loads(path.read_text())
    for case in summary["metric_per_case"]:
        case["metrics"][summary["classes"]["NCR"]]["n_ref"] = 0
    path.write_text(json.dumps(summary))
    told = "NCR is 0.000: no held-out case is known to have it, and what is predicted"
    assert told in written(worse).text and told in TASKS["segment"].next_lines(worse)[0]
    for case in summary["metric_per_case"]:
        case["metrics"][summary["classes"]["NCR"]]["UnlabelledMl"] = 1.0
    path.write_text(json.dumps(summary))
    assert told in TASKS["segment"].next_lines(worse)[0], "nor has any labelled part of one"


def test_runs_with_other_classes_are_compared_on_those_that_all_have(finished: Path, worse: Path) -> None:
    path = worse / "validation" / "summary.json"
    summary = json.loads(path.read_text())
    (name, key), *_ = summary["classes"].items()
    summary["classes"] = {f"other {name}": key} | {one: own for one, own in summary["classes"].items() if one != name}
    path.write_text(json.dumps(summary))
    text = compared(finished, worse).text
    assert f"Only classes that all runs have count: {', '.join(list(summary['classes'])[1:])}. The mean Dice" in text
    assert "mean of the classes that all runs have" in text and "mean of all" not in text
    assert f"other {name}0 of 3 cases–0." in text.replace("\n", "")
    summary["classes"] = {f"other {one}": own for one, own in summary["classes"].items()}
    path.write_text(json.dumps(summary))
    assert "No class is in all of these runs." in compared(finished, worse).text


def test_a_case_is_compared_by_the_classes_that_every_truth_of_it_shows(
    finished: Path, worse: Path, tmp_path: Path
) -> None:
    """Else the difference would be one between a class and a mean over several."""
    first = Path(shutil.copytree(finished, tmp_path / "first"))
    for out, dice in ((first, 0.8), (worse, 0.7)):
        path = out / "validation" / "summary.json"
        summary = json.loads(path.read_text())
        kind, *others = summary["classes"].values()
        (case,) = [one for one in summary["metric_per_case"] if PERFECT in one["prediction_file"]]
        case["metrics"][kind]["Dice"] = dice
        if out == worse:  # its truth shows the first class alone
            case["metrics"] |= {other: dict.fromkeys(case["metrics"][other]) for other in others}
        path.write_text(json.dumps(summary))
    page = compared(first, worse)
    assert page.cells["pairs", PERFECT] == pytest.approx([0.8, -0.1])
    assert "ED (not annotated for every run, and left out)" in page.text and "By class, worse and first: " in page.text


def test_it_is_said_how_cases_without_a_class_count(finished: Path, worse: Path) -> None:
    assert "0 of 3 cases" in compared(finished, worse).text
    for out, predicted in ((finished, 5), (worse, 0)):
        path = out / "validation" / "summary.json"
        summary = json.loads(path.read_text())
        for case in summary["metric_per_case"]:
            if "case-a" in case["prediction_file"]:
                dice = 0.0 if predicted else float("nan")
                case["metrics"]["3"] |= {"n_ref": 0, "n_pred": predicted, "Dice": dice}
        summary["num_values"]["3"]["Dice"] = 3 if predicted else 2
        path.rename(path.with_suffix(".kept"))
        path.write_text(json.dumps(summary))
    try:
        text = compared(finished, worse).text
    finally:
        (finished / "validation" / "summary.kept").rename(finished / "validation" / "summary.json")
    assert "1 of 3 cases" in text and "(n = 3, 1 of them 0: none in the truth)" in text and "(n = 2)" in text
    rule = "Where the truth lacks a class, its Dice counts as 0 if any of it is predicted; if none is, the case is left"
    assert text.count(rule) == 2, "below the table of means, and below that of cases"
    assert "case-a" in text and text.count("ET\n") >= 1


def test_a_comparison_says_above_its_scores_that_phantoms_are_generated(finished: Path, worse: Path) -> None:
    assert "phantoms" not in compared(finished, worse).text
    changed(worse, lambda content: content["config"].update(data=""))
    text = compared(finished, worse).text
    some = "On generated phantoms, not patients: worse. Scores on phantoms say nothing about real images."
    assert text.index(some) < text.index("Finished")
    both = Path(shutil.copytree(worse, worse.parent / "both"))
    text = compared(worse, both).text
    assert text.index("Generated phantoms, not patients: these scores say nothing about real") < text.index("Finished")


def test_weights_of_a_pretraining_that_learned_little_are_named(finished: Path, worse: Path) -> None:
    pretraining = Path(shutil.copytree(finished, worse.parent / "pre"))
    changed(pretraining, lambda content: content["config"].update(task="pretrain"))
    row = {"kind": "val", "step": 5, "loss": 0.9, "error_of_mean": 1.0, "cases": 2}
    (pretraining / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    changed(worse, lambda content: content["config"].update(weights=str(pretraining / "model.safetensors")))
    said = f"worse: the run began with the weights of a pretraining, {pretraining}. Little was learned: the best error"
    assert said in compared(finished, worse).text
    assert run(report.act, [str(pretraining)]) == 0
    page = (pretraining / "report.html").read_text()
    assert "<h2>Errors</h2>" in page and "<h2>Scores</h2>" not in page
    (pretraining / "metrics.jsonl").write_text(json.dumps(row | {"loss": 0.5}) + "\n")
    assert "Little was learned" not in compared(finished, worse).text
    changed(worse, lambda content: content["config"].update(weights=str(finished)))
    assert "Little was learned" not in compared(finished, worse).text, "it is no pretraining"


def test_curves_lie_over_each_other(finished: Path, worse: Path) -> None:
    compared(finished, worse)
    text = (finished / "comparison.html").read_text()
    for title in ("Loss in training", "Loss on held-out cases", "Mean Dice on held-out cases"):
        (chart,) = [part for part in text.split('<figure class="chart">') if f"<figcaption>{title}" in part]
        assert chart.count('class="curve"') == 2 and ">worse</span>" in chart


def test_scores_on_cases_that_chose_the_weights_are_said_to_be_too_good(finished: Path, worse: Path) -> None:
    assert "were chosen on these cases" not in compared(finished, worse).text
    path = worse / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    again = [row | {"step": 1} for row in rows if row["kind"] == "val"]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*again, *rows]))
    assert "The weights that predict uses were chosen on these cases" in compared(finished, worse).text


def test_what_several_runs_do_not_have_is_refused_or_noted(
    finished: Path, worse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(report.act, [str(finished), str(worse), "--cases", "2"]) == USAGE
    assert "--cases shows the cases of one run, and 2 were named" in capsys.readouterr().err
    assert run(report.act, [str(finished), str(worse), str(worse)]) == USAGE
    assert f"{worse.resolve()} was named twice" in capsys.readouterr().err
    shutil.rmtree(worse / "validation")
    page = compared(finished, worse)
    assert "worse: there are no scores of the cases" in page.text
    assert page.text.count("Fewer than two runs have scores of cases.") == 1 and "table below" not in page.text


def values_of_none(title: str) -> dict[str, object]:
    return {"title": title, "gaps": [], "runs": {}, "settings": None, "training": [], "comparisons": [],
            "cautions": [], "uncompared": "", "generated": ""}  # fmt: skip


def test_a_template_gets_just_the_values_that_it_names(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    given = dict[str, set[str]]()
    whole = rendering.render

    def noted(template: str, /, folder: Path | None = None, **values: object) -> str:
        environment = rendering._environment(folder)
        names, todo = set[str](), [template]
        while todo:
            assert environment.loader is not None
            tree = environment.parse(environment.loader.get_source(environment, todo.pop())[0])
            names |= meta.find_undeclared_variables(tree)
            todo += [name for name in meta.find_referenced_templates(tree) if name and "macros" not in name]
        given[template] = values.keys() - names
        return whole(template, folder, **values)

    for module in (run_page, several_runs):
        monkeypatch.setattr(module, "render", noted)
    written(finished)
    copy = shutil.copytree(finished, tmp_path / "copy")
    assert run(report.act, [str(finished), str(copy), "--out", str(tmp_path / "x.html")]) == 0
    assert given == {"page.html": set(), "comparison.html": set()}, "values that no template names"
    with pytest.raises(UndefinedError, match="undefined"):
        whole("comparison.html", title="a")
    assert "{{ title }}" in whole("comparison.html", **values_of_none(title="{{ title }}")), "filled only once"
    content = json.loads((finished / "config.json").read_text())
    del content["config"]["heads"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert run(report.act, [str(tmp_path)]) == DATA
    assert "config.json: lacks what a report needs (KeyError: 'heads')" in capsys.readouterr().err


def test_negative_numbers_have_a_minus_sign() -> None:
    texts = {
        "-0.108": "−0.108",
        "0.1 (-2 to -1)": "0.1 (−2 to −1)",
        "1e-4": "1e-4",
        "lr-1, 2026-11-27": "lr-1, 2026-11-27",
    }
    assert {text: with_minus(text) for text in texts} == texts


def test_each_loss_and_each_of_its_terms_has_a_name_in_words() -> None:
    assert curves.WORDS_OF_LOSSES.keys() == LOSSES.keys()
    terms = {f"{term}_loss" for name in LOSSES if len(weights := make_loss(name).weights) > 1 for term in weights}
    assert terms == curves.WORDS_OF_TERMS.keys()


def test_dots_of_several_runs_at_one_place_are_all_seen() -> None:
    """As of a sweep whose points have one validation each."""
    for names, least in (("abc", 4), ("abcdefgh", 2)):
        lines = [Line(name, [5], [[0.5]]) for name in names]
        plot = make_figure(4, 3).add_subplot()
        draw_diagram(plot, Diagram("Dice", "step", lines))
        sizes = [line.get_markersize() for line in plot.get_lines()]
        assert min(a - b for a, b in pairwise(sizes)) > least - 1e-9 and sizes[-1] == 5, (
            "later ones inside earlier ones"
        )
    chart = draw_chart(Diagram("Dice", "step", lines))
    assert chart is not None and chart.about_lines == "Sizes of dots only serve to tell coinciding dots apart."
    assert draw_chart(Diagram("Dice", "step", lines[:1])).about_lines == "", "one dot hides none"


def test_a_run_that_trained_on_the_cases_that_are_compared_is_named(finished: Path, tmp_path: Path) -> None:
    """Else its caution reads as if both had, and the difference as if it were fair."""
    for name in ("clean", "other", "all"):
        shutil.copytree(finished, tmp_path / name)
    content = json.loads((tmp_path / "all" / "config.json").read_text())
    dataset = content["dataset"]
    dataset["train"] = sorted({*dataset["train"], *dataset["held_out"]})
    (tmp_path / "all" / "config.json").write_text(json.dumps(content))

    def said(*names: str) -> str:
        assert run(report.act, [*(str(tmp_path / name) for name in names), "--out", str(tmp_path / "p.html")]) == 0
        return Page((tmp_path / "p.html").read_text()).text

    text = said("clean", "all")
    assert "all: the weights have learned from all of these cases" in text and "Loss in validation" in text
    assert (
        "that were trained on (--fold all), unlike the others: all; the comparison favours what was trained on them."
        in text
    )
    assert "trained on (--fold all)" not in said("clean", "other")
