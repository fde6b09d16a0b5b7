"""A page about several runs: settings that differ, curves over each other, scores, and differences case by case."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqpar.cli import report
from seqpar.cluster.exit_codes import USAGE, run
from tests.support.report_page import NAMES, Page

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


def test_settings_that_differ_stand_beside_each_other(finished: Path, worse: Path) -> None:
    page = compared(finished, worse)
    assert "Settings that differ" in page.text and "lr" in page.text and "0.5" in page.text
    assert "embed_dim" not in page.text
    assert "None: the runs have the same settings." in compared(finished, shutil.copytree(finished, worse / "b")).text


def changed(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads((run / "config.json").read_text())
    change(content)
    (run / "config.json").write_text(json.dumps(content))
    return run


def test_a_setting_without_effect_is_not_shown_and_paths_are_short(
    finished: Path, worse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(worse.parent)
    changed(worse, lambda content: content["config"].update(data="", phantoms=12, cache=str(worse.parent / "prepared")))
    text = compared(finished, worse).text
    assert "phantoms–12\n" in text and "cache–prepared\n" in text


def test_curves_of_other_data_or_tasks_are_not_to_be_compared(finished: Path, worse: Path) -> None:
    assert "Read with care" not in compared(finished, worse).text
    changed(worse, lambda content: content["dataset"]["held_out"].pop())
    assert "These runs held out different cases; their curves on" in compared(finished, worse).text
    changed(worse, lambda content: content["dataset"].update(name="other"))
    text = compared(finished, worse).text
    assert "These runs were trained on different data or tasks; their curves cannot be compared." in text


def test_cases_are_compared_pair_by_pair(finished: Path, worse: Path) -> None:
    page = compared(finished, worse)
    for name in NAMES:
        dice, gap = page.cells["pairs", name]
        assert gap == (-dice if name == PERFECT else 0.0)
    assert "worse's mean Dice is 0.333 lower than run's (3 cases: too few to tell)." in page.text


def test_curves_lie_over_each_other(finished: Path, worse: Path) -> None:
    compared(finished, worse)
    text = (finished / "comparison.html").read_text()
    for title in ("Loss in training", "Loss on held-out cases", "Mean Dice on held-out cases"):
        (chart,) = [part for part in text.split('<figure class="chart">') if f"<figcaption>{title}<" in part]
        assert chart.count('class="curve"') == 2 and ">worse</span>" in chart


def test_what_several_runs_do_not_have_is_refused_or_noted(
    finished: Path, worse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(report.act, [str(finished), str(worse), "--cases", "2"]) == USAGE
    assert "--cases shows the cases of one run, and 2 were named" in capsys.readouterr().err
    assert run(report.act, [str(finished), str(finished)]) == USAGE
    assert "was named twice" in capsys.readouterr().err
    shutil.rmtree(worse / "validation")
    page = compared(finished, worse)
    assert "worse: there are no scores of the cases" in page.text
    assert page.text.count("Fewer than two runs have scores of cases.") == 1 and "table below" not in page.text
