"""A sweep without Ray: what it is asked for, its record, its results, its page."""

import csv
import errno
import importlib.util
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from seqpar.cli import report, tune
from seqpar.cluster.exit_codes import DATA, USAGE, run
from seqpar.data.errors import DataError
from seqpar.report.curves import DICE, TRAIN_LOSS, Diagram
from seqpar.report.planes import RUN_COLOURS
from seqpar.report.sweep_page import page_of_sweep
from seqpar.runs.run_lock import RunLock
from seqpar.runs.sweep_folder import Point, Sweep, odd_points, read_sweep, refresh_points, write_sweep
from seqpar.sweeps.results import STYLES, _covered, _figure_of_sweep, _lines, _note, write_results
from seqpar.sweeps.sweep_request import check_devices, order_of, tupled_points
from tests.support.class_folders import class_folder
from tests.support.report_page import Page
from tests.support.sweep_folder import SPACE, TINY, asked, begin, make_sweep_folder


def test_each_point_is_a_run_of_train_on_its_devices(tmp_path: Path) -> None:
    order, sweep, _ = asked(tmp_path / "s", "--devices-per-run", "2", "--seqpar", "2", "--decoder-width", "4")
    runs = order.runs(sweep, 4)
    assert [one.name for one in runs] == [f"lr-0.00{lr}_batch-{batch}" for lr in (1, 2) for batch in (1, 2)]
    assert {(one.ranks, one.groups) for one in runs} == {(2, 1)}
    line = "--preset debug --decoder-width 4 --device cpu --epochs 1 --iterations 5 --seqpar 2 --lr 0.002 --batch 1"
    assert runs[2].flags == line.split()
    assert all(config.iterations == 5 for config in order.configs(sweep).values())
    everything, _, _ = asked(tmp_path / "t", "--devices-per-run", "all", "--seqpar", "2")
    assert {one.groups for one in everything.runs(everything.sweep(), 8)} == {4}


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--lr", "1"], "--lr is what --space compares"),
        (["--dry-run"], "--dry-run belongs to a single run"),
        (["--fold", "all5"], "compare folds by --space fold=0,1,2,3,4"),
        (["--samples", "3"], "--space has no range to draw from"),
        (["--search", "optuna", "--samples", "5"], "--samples 5: --space has 4 points: give at most 4"),
        (["--seqpar", "auto"], "lr-0.001_batch-1: --seqpar auto: a run's ranks are shared out before it begins"),
        (["--seqpar", "2"], "shared by 2 ranks, which do not divide the 1 of a run: set --devices-per-run 2"),
        (["--samples", "0"], "--samples 0: it must be in"),
        (["--devices-per-run", "some"], "give a number of devices, 1 to 100000, or all"),
        (["--max-failures", "-1"], "--max-failures -1: it must be in"),
        (["--resume"], "it holds no sweep"),
        (["--depth", "0"], "--depth 0: it must be in [1, 1000]"),
        (["--lrr", "1"], "nearest to --lrr is --lr"),
        (["--ray", "x:1", "--devices", "1"], "leave one out"),
        (["--ray-nodes", "2"], "there is no --ray"),
        (["--embed-dim", "7"], "point lr-0.001_batch-1: --heads 4 does not divide"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_begins(
    tmp_path: Path, more: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(tune.act, [*SPACE, *TINY, "--out", str(tmp_path / "s"), "--plan", *more])
    said = capsys.readouterr().err
    assert code == USAGE and error in said and said.count("\n") == 1, said
    assert not (tmp_path / "s").exists()


def test_ranks_that_do_not_fit_a_runs_devices_are_refused(tmp_path: Path) -> None:
    order, sweep, _ = asked(tmp_path / "s", "--seqpar", "2")
    with pytest.raises(
        ValueError, match="shared by 2 ranks, which do not divide the 1 of a run: .*--devices-per-run 2"
    ):
        order.runs(sweep, 4)
    order, sweep, _ = asked(tmp_path / "s", "--devices-per-run", "8")
    with pytest.raises(ValueError, match="there are 4 devices"):
        order.runs(sweep, 4)


def test_a_sweep_goes_on_by_its_own_flags_and_by_no_others(tmp_path: Path) -> None:
    out = tmp_path / "s"
    order, sweep, _ = asked(out, "--tile", "16", "24", "32")
    write_sweep(out, sweep)
    begin(out, sweep)
    before = tupled_points(read_sweep(out))
    again = order_of(before.began, out)
    assert again == order and [one.flags for one in again.runs(before, 1)] == [
        one.flags for one in order.runs(sweep, 1)
    ]
    for line, error in (
        ([*SPACE, *TINY], "holds a sweep already: add --resume"),
        (["--resume", "--lr", "3"], "--lr without --space"),
        ([*SPACE, *TINY, "--resume"], "the sweep there began with settings"),
        (
            [*SPACE, *TINY, "--tile", "16", "24", "32", "--resume", "--devices-per-run", "2"],
            "devices-per-run 1, and now 2",
        ),
    ):
        options, rest = tune._parse([*line, "--out", str(out)])
        with pytest.raises(ValueError, match=error):
            tune._order(options, rest)
    options, rest = tune._parse(["--resume", "--out", str(out)])
    assert tune._order(options, rest)[0] == order


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return make_sweep_folder(tmp_path)


def test_the_record_says_how_each_point_stands_and_which_is_best(made: Path) -> None:
    sweep = read_sweep(made)
    assert [point.state for point in sweep.points] == ["finished", "finished", "running", "open"]
    assert [point.is_over for point in sweep.points] == [True, True, False, False]
    second = sweep.points[1]
    assert sweep.best == second and (second.score, second.at, second.loss, second.seconds) == (0.6, 2, 0.5, 10.0)
    assert math.isnan(sweep.points[3].score)
    content = json.loads((made / "sweep.json").read_text())
    assert content["best"] == second.name and content["points"][3]["score"] is None
    ended = refresh_points(made, sweep, [sweep.points[2].name])
    assert ended.points[2].state == "stopped" and refresh_points(made, ended).points[2].is_over, "it stays so"
    killed = refresh_points(made, sweep, ended="killed").points[2]
    assert (killed.state, killed.code, killed.why) == ("killed", 1, "its training was killed, after step 1")
    assert sweep.main_effects()["batch"] == {"1": [(0.5, sweep.points[0].name)], "2": [(0.6, second.name)]}


def test_a_table_and_a_picture_are_written_and_the_best_is_said(made: Path) -> None:
    sweep = read_sweep(made)
    text = "\n".join(write_results(made, sweep))
    assert f"highest mean Dice: {sweep.points[1].name}, 0.600 after step 2\n" in text
    assert "2 of 4 points have ended" in text
    rows = list(csv.DictReader((made / "sweep.csv").open()))
    assert [row["score"] for row in rows] == ["0.5", "0.6", "", ""] and rows[0]["lr"] == "0.001"
    assert rows[0]["training_loss"] == "0.7" and "train loss" in text
    assert (made / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    best = made / sweep.points[1].name
    assert f"{best} holds no weights: no network of the best point" in text
    (best / "model.safetensors").touch()
    assert f" {best} -i IMAGES" in "\n".join(write_results(made, sweep))
    best.rename(made / "away")
    text = "\n".join(write_results(made, sweep))
    assert "-i IMAGES" not in text and f"{best} is gone: no network of the best point is left" in text


def test_the_picture_explains_means_and_spread_only_if_they_are_drawn(made: Path) -> None:
    sweep = read_sweep(made)
    assert _note(sweep, sweep.marked) == (
        "Scores by setting: a dot for each point, a bar for the mean at each value, a line from lowest to highest, "
        "a star for the highest score"
    )
    one_each = replace(sweep, points=(sweep.points[0], replace(sweep.points[2], score=0.2)))
    assert _note(one_each, one_each.marked) == "Scores by setting: a bar for each point, a star for the highest score"
    rates = Sweep({}, tuple(Point(f"p{n}", {"lr": n / 8}, score=0.1) for n in range(9)))
    assert _note(rates, rates.marked) == "Scores by setting: a dot for each point, a star for the highest score"


def test_dots_that_hide_each_other_are_counted(tmp_path: Path) -> None:
    settings = ({"lr": 1e-3, "batch": 1}, {"lr": 1e-3, "batch": 2}, {"lr": 2e-3, "batch": 2})
    points = tuple(Point(f"p{n}", own, score=score) for n, (own, score) in enumerate(zip(settings, (0.5, 0.5, 0.8))))
    for point in points:
        (tmp_path / point.name).mkdir()
        (tmp_path / point.name / "metrics.jsonl").write_text(
            '{"kind": "train", "step": 0, "loss": 1.0, "seconds": 1.0}\n'
        )
    sweep = Sweep({}, points)
    assert _covered(sweep, "lr") == [(0, 0.5, 2)] and _covered(sweep, "batch") == []
    assert "a dot for each point (×2: two in one place), a bar for the mean" in _note(sweep, sweep.marked)
    texts = [text.get_text() for plot in _figure_of_sweep(tmp_path, sweep).axes for text in plot.texts]
    assert texts.count("×2") == 1
    rates = [*(1e-4 * 2**n for n in range(10)), 1.001e-4]  # the axis is logarithmic
    many = Sweep({}, tuple(Point(f"p{n}", {"lr": rate}, score=0.1) for n, rate in enumerate(rates)))
    assert _covered(many, "lr") == [(1e-4, 0.1, 2)]


@pytest.mark.parametrize("values", [3, 12], ids=["bars", "a range"])
def test_the_picture_marks_no_winner_by_the_score_of_few_cases(values: int, tmp_path: Path) -> None:
    row = '{"kind": "train", "step": 0, "loss": 1.0, "seconds": 1.0}\n'

    def drawn(cases: int) -> tuple[str, list[str], list[bool]]:
        points = tuple(Point(f"p{n}", {"lr": n / 8}, score=n / 20, cases=cases) for n in range(1, values + 1))
        for point in points:
            (tmp_path / point.name).mkdir(exist_ok=True)
            (tmp_path / point.name / "metrics.jsonl").write_text(row)
        sweep = Sweep({}, points)
        picture = _figure_of_sweep(tmp_path, sweep)
        paths = [dots.get_paths()[0] for plot in picture.axes for dots in plot.collections if len(dots.get_offsets())]
        stars = [path for path in paths if len(path.vertices) == 11]
        labels = [line.label for line in _lines(tmp_path, sweep, sweep.marked, TRAIN_LOSS)]
        return _note(sweep, sweep.marked), labels, [bool(stars)]

    note, labels, stars = drawn(5)
    assert "a star" in note and labels[-1] == f"p{values}, highest score" and stars == [True]
    note, labels, stars = drawn(4)
    assert "star" not in note and labels[-1] == f"p{values}" and stars == [False]


def test_the_picture_names_the_best_points_in_the_colours_of_the_page(tmp_path: Path) -> None:
    rows = [{"kind": "train", "step": 0, "loss": 1.0, "seconds": 1.0}, {"kind": "val", "step": 1, "loss": 1.0}]
    points = [Point(f"p{n}", {"lr": n}, score=math.nan if n == 3 else n / 12, loss=1.0) for n in range(11)]
    for point in points[:-1]:
        (tmp_path / point.name).mkdir()
        rows[1]["dice"] = {"a": point.score}
        (tmp_path / point.name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    few, many = Sweep({}, tuple(points[:4])), Sweep({}, tuple(points))
    for quantity in (TRAIN_LOSS, DICE):
        drawn = Diagram("", "step", _lines(tmp_path, few, few.marked, quantity), styles=STYLES).named()[::-1]
        assert [line.label for line, _ in drawn] == ["p2, highest score", "p1", "p0", "p3"]
        assert [style.colour for _, style in drawn] == list(RUN_COLOURS[:4])
        drawn = Diagram("", "step", _lines(tmp_path, many, many.marked, quantity), styles=STYLES).named()[::-1]
        names = ["p9", "p8", "p7", "p6", "p5", "p4", "p2", "p1", "the other 2 points", ""]
        assert [line.label for line, _ in drawn] == names, "p10, the best, has recorded nothing"
        assert [style.colour for _, style in drawn[:8]] == list(RUN_COLOURS)
        assert {style for _, style in drawn[8:]} == {STYLES[-1]} and STYLES[-1].colour not in RUN_COLOURS
    assert _lines(tmp_path, many, many.marked, DICE)[-1].rows == ((9 / 12,),)


def test_the_page_of_a_sweep_says_how_sure_the_order_of_its_first_points_is(made: Path) -> None:
    first, second, *_ = (made / point.name for point in read_sweep(made).points)
    assert run(report.act, [str(made)]) == 0
    text = Page((made / "report.html").read_text()).text
    assert "is not known: scores of single cases are kept only of the last validation, and " in text
    assert "lr-0.001_batch-2 had its best before." in text
    lines = [
        line for line in (second / "metrics.jsonl").read_text().splitlines() if '"step": 2, "loss": 1.0' not in line
    ]
    (second / "metrics.jsonl").write_text("\n".join(lines).replace("0.4", "0.6") + "\n")
    summary = json.loads((first / "validation" / "summary.json").read_text())
    (entry,) = summary["metric_per_case"]
    for count, said in ((2, "(2 cases: too few to tell)"), (6, "over 6 cases (95 % confidence interval: -")):
        for folder, dice in ((first, 0.5), (second, 0.7)):
            rows = [json.loads(json.dumps(entry).replace("case_a", f"case_{n}")) for n in range(count)]
            for n, row in enumerate(rows):
                for scores in row["metrics"].values():
                    scores["Dice"] = dice + 0.01 * n * (folder == first)
            (folder / "validation" / "summary.json").write_text(json.dumps(summary | {"metric_per_case": rows}))
        assert run(report.act, [str(made)]) == 0
        text = Page((made / "report.html").read_text()).text
        assert "The mean Dice of lr-0.001_batch-1 is 0." in text and "lower than that of lr-0.001_batch-2" in text
        assert said in text and "Other seeds may change the order, and the first of several points tends" in text
        assert "means over cases" not in text, "one average, and no second difference of the same points"
    assert "Generated phantoms" not in text
    for folder in (first, second):
        content = json.loads((folder / "config.json").read_text())
        content["config"]["data"] = ""
        (folder / "config.json").write_text(json.dumps(content))
    (first / "validation" / "summary.json").unlink()
    assert run(report.act, [str(made)]) == 0
    text = Page((made / "report.html").read_text()).text
    assert "differ by more than chance is not known: they share no scores of cases." in text
    assert text.index("Generated phantoms, not patients: these scores say nothing") < text.index("Highest mean Dice")


def test_the_page_of_a_sweep_names_classes_that_a_point_does_not_find(made: Path) -> None:
    assert "Dice of b is 0.000" not in page_of_sweep(made, {})
    metrics = made / read_sweep(made).points[0].name / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"b": null', '"b": 0.0001'))
    text = Page(page_of_sweep(made, {})).text
    assert "lr-0.001_batch-1: at the best validation, the mean Dice of b is 0.000" in text
    for number, point in enumerate(read_sweep(made).points[:2]):
        path = made / point.name / "config.json"
        content = json.loads(path.read_text())
        content["dataset"] |= {"recipe": {"mean": number}, "files": {"a": str(number)}}
        path.write_text(json.dumps(content))
    told = "1 case, such as a, changed between these trainings: points trained before the "
    told += "change cannot be compared with those after it."
    assert told in Page(page_of_sweep(made, {})).text
    metrics.unlink()
    (metrics.parent / "window.json").write_text('{"step": 4}')
    told = f"lr-0.001_batch-1: {metrics} is missing, and with it the record of the validations after steps 4 and"
    assert told in Page(page_of_sweep(made, {})).text, "it has no score"


def test_points_whose_run_is_not_that_of_their_settings_are_told(made: Path, tmp_path: Path) -> None:
    sweep = read_sweep(made)
    first, second, *_ = (made / point.name for point in sweep.points)
    assert odd_points(made, sweep) == []
    for source, target in ((first, tmp_path / "aside"), (second, first), (tmp_path / "aside", second)):
        source.rename(target)
    text = Page(page_of_sweep(made, {})).text
    for point, other in ((first, second), (second, first)):
        told = f"{point.name} holds the run that began as {other.name}: the row of {point.name} shows its scores next"
        assert f"{told} to the settings of {point.name}. Rename the folders back." in text
    (first / "config.json").write_text("{}")
    assert len(odd_points(made, sweep)) == 1, "of the first, nothing is known"
    (second / "config.json").write_text(json.dumps({"history": [{"command": 5}]}))
    assert odd_points(made, sweep) == []
    start = {"command": ["train.py", "--out", str(second)], "changed": {}}
    history = [start, {"changed": {"time_limit": ["", "2:00"], "lr": [0.001, 0.02]}}, {"changed": {"epochs": [1, 6]}}]
    (second / "config.json").write_text(json.dumps({"history": history}))
    (told,) = odd_points(made, sweep)
    assert told.startswith(f"{second.name} was trained on with other settings (--lr 0.001 -> 0.02, --epochs 1 -> 6): ")
    (second / "config.json").write_text(json.dumps({"history": [start, {"changed": {"time_limit": ["", "2:00"]}}]}))
    assert odd_points(made, sweep) == [], "as tune itself resumes"
    moved = {"batch": [2, 1], "cache": ["a", "b"], "data": ["/a/D", "/b/D"], "seqpar": [1, 2]}
    (second / "config.json").write_text(json.dumps({"history": [start, {"changed": moved}]}))
    assert odd_points(made, sweep) == [], "on other ranks, or from another place"
    there, back = {"changed": {"lr": [0.001, 0.02]}}, {"changed": {"lr": [0.02, 0.001]}}
    (second / "config.json").write_text(json.dumps({"history": [start, there, back]}))
    assert odd_points(made, sweep) == []


def test_the_page_of_a_sweep_has_all_points_effects_and_the_command_of_the_best(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(made, read_sweep(made))
    assert run(report.act, [str(made)]) == 0
    text = (made / "report.html").read_text()
    page = Page(text)
    assert "Highest mean Dice: lr-0.001_batch-2, 0.600 after step 2." in page.text
    assert text.count("<tr data-point=") == 4, "none of them is marked, as the first lines say how sure the first is"
    assert (
        'data-effect="batch"' in text
        and "Mean Dice by lr" in page.text
        and "lr: learning rate at its highest" in page.text
    )
    assert "a difference between few points may be chance" in page.text
    assert "A point is one combination of settings, trained once." in page.text
    assert "To train lr-0.001_batch-2 again:" in page.text
    assert "A dot is a point; the vertical line is the median. Points" in page.text, "no grey box is drawn of few"
    assert "train.py --lr 1e-3 --out" in page.text and "batch-2-again" in page.text
    assert "torchrun --nproc-per-node 2 launch/train.py --lr" in page.text, "as many groups as it had"
    assert "data:image/png;base64," in text and "aria-sort" in text
    assert "lr-0.002_batch-1 was killed after step 1." in page.text, "no process holds it"
    assert "<h1>sweep</h1>" in text and "<h2>Curves</h2>" in text and "training loss" in page.text
    rows = re.findall(r"<tr><th>(.*?)</th>", text.partition('data-effect="batch"')[2].partition("</table>")[0])[1:]
    assert rows == ["1", "2"], "in the order of the drawing, not the best first"
    capsys.readouterr()
    assert run(report.act, [str(made), "--cases", "2"]) == USAGE and "is a sweep" in capsys.readouterr().err
    assert run(report.act, [str(made), str(made)]) == USAGE and "name it alone" in capsys.readouterr().err


def test_classifiers_are_compared_by_their_balanced_accuracy(tmp_path: Path) -> None:
    data, out = class_folder(tmp_path / "data", 4), tmp_path / "s"
    line = "--space lr=1e-3,2e-3 --task classify --network resattnet18 --features 8 --preset debug --device cpu --data"
    options, rest = tune._parse([*line.split(), str(data), "--out", str(out)])
    order, sweep = tune._order(options, rest)
    assert {config.tile for config in order.configs(sweep).values()} == {(40, 24, 16)}, "as large as the volumes"
    for point, scores in zip(sweep.points, ([0.5, 0.75], [0.25, 0.25])):
        rows: list[dict] = [{"kind": "train", "step": 3, "loss": 0.5, "seconds": 2.0}]
        rows += [
            {"kind": "val", "step": 2 * n + 2, "loss": 1.0, "scores": {"accuracy": 0.9, "balanced accuracy": score}}
            for n, score in enumerate(scores)
        ]
        (out / point.name).mkdir(parents=True)
        (out / point.name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (out / point.name / "status.json").write_text(json.dumps({"state": "finished", "step": 4, "steps": 4}))
    sweep = refresh_points(out, sweep)
    write_sweep(out, sweep)
    text = "\n".join(write_results(out, read_sweep(out))) + page_of_sweep(out, {}).partition("</style>")[2]
    assert "highest balanced accuracy: lr-0.001, 0.750 after step 4\n" in text
    assert "Highest balanced accuracy: lr-0.001, 0.750 after step 4." in text and "Dice" not in text


@pytest.mark.parametrize(
    "content",
    [
        '{"points": [{"name": 1, "what": 2}], "began": {}}',
        '{"points": [], "began": {}}',
    ],
)
def test_a_damaged_record_is_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text(content)
    assert run(tune.act, ["--resume", "--out", str(tmp_path)]) == DATA
    assert "sweep.json: is no sweep of this version" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("point", "says"),
    [
        ({"name": "../../elsewhere", "settings": {}}, "a point has the name '../../elsewhere'"),
        ({"name": "a", "settings": {}, "score": "0.5"}, "score of a point is '0.5'"),
        ({"name": "a", "settings": []}, "settings of a point is"),
    ],
)
def test_a_point_that_tune_did_not_write_is_named(point: dict[str, object], says: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"began": {}, "points": [point]}))
    with pytest.raises(DataError, match=says):
        read_sweep(tmp_path)


def test_of_equal_points_that_with_the_lower_loss_is_best() -> None:
    points = Point("a", {}, score=0.5, loss=2.0), Point("b", {}, score=0.5, loss=1.0), Point("c", {})
    assert (sweep := Sweep({}, points)).best is points[1] and Sweep({}, points[2:]).best is None
    assert sweep.describe_best(points[1]).endswith(": b, 0.500 after step 0 (a scored the same)")


def test_a_sweep_names_no_winner_by_the_score_of_few_cases() -> None:
    point = Point("a", {}, score=0.5, at=20, cases=2)
    assert Sweep({}, ()).describe_best(point) == (
        "highest mean Dice: a, 0.500 after step 20, on 2 held-out cases: too few to tell which setting is best"
    )
    assert Sweep({}, ()).describe_best(replace(point, cases=5)).endswith("after step 20, on 5 held-out cases")
    assert Sweep({"settings": {"fold": "all"}}, ()).describe_best(point).partition(":")[2].startswith(
        " a, 0.500 after step 20, on 2 cases that it trains on: too few")  # fmt: skip
    errors = Sweep({"settings": {"task": "pretrain"}}, ())
    assert errors.describe_best(point).startswith("lowest error of hidden voxels: a, 1.000 after step 20")


def test_without_ray_a_line_says_how_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for space in (SPACE, ["--space", "lr=log:1e-4:1e-2"]):  # numbers are drawn by Ray
        assert run(tune.act, [*space, *TINY, "--out", str(tmp_path / "s")]) == USAGE
        assert "pip install 'seqpar[tune]'" in capsys.readouterr().err


def test_a_run_for_which_there_are_no_devices_is_refused_before_anything_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*SPACE, *TINY, "--devices", "2", "--devices-per-run", "3", "--out", str(tmp_path / "s")]
    assert run(tune.act, line) == USAGE and not (tmp_path / "s").exists()
    assert "--devices-per-run 3: there are 2 devices: give at most 2" in capsys.readouterr().err


def test_more_gpus_than_there_are_are_refused_and_cores_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    line = [*SPACE, *TINY[:-2], "--devices", "3", "--out", str(tmp_path / "s")]
    assert run(tune.act, line) == USAGE and not (tmp_path / "s").exists()
    assert "--devices 3: this machine has 2 GPUs: give at most 2" in capsys.readouterr().err
    check_devices(300, "auto", on_gpu=False)


def test_a_sweep_goes_on_with_the_device_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order, sweep, _ = asked(tmp_path)
    write_sweep(tmp_path, sweep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options, rest = tune._parse(["--resume", "--out", str(tmp_path)])
    assert not tune._order(options, rest)[0].on_gpu
    assert replace(order, settings={}).on_gpu, "else they are for the GPUs that are there"


def test_a_sweep_on_a_full_disk_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunLock, "take", full)
    assert run(tune.act, [*SPACE, *TINY, "--out", str(tmp_path / "s")]) == DATA
    assert f"error: --out {tmp_path / 's'}: cannot be written (No space left on device)" in capsys.readouterr().err
