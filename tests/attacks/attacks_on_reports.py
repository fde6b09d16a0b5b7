"""Attacks on report: runs whose scores are damaged, half-written or of another kind than they say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seqpar.tasks.classify.scores import as_json, class_summary, read_class_table
from tests.attacks.attack import Attack
from tests.attacks.attacks_on_runs import ended_run
from tests.support.folders import image_array, save, write_json
from tests.support.predictions import make_run


def _reported(what: str, make: Callable[[Path], object], after: Callable[[Path, str], None]) -> Attack:
    """Returns the attack of a damaged run whose page is written all the same."""
    return Attack(f"report {what}", types="report run", code=0, says="run/report.html", make=make, after=after)


def _rows(text: str) -> Callable[[Path], None]:
    """Returns what makes a run whose metrics.jsonl has these lines."""

    def make(here: Path) -> None:
        ended_run(here)
        (here / "run" / "metrics.jsonl").write_text(text)

    return make


def _shows_gap(here: Path, said: str) -> None:
    assert "The run has not been validated yet." in (here / "run" / "report.html").read_text()


ATTACKS = [
    _reported(
        f"a run whose last validation is {row}",
        _rows(f'{{"kind": "train", "step": 0, "loss": 1.0}}\n{row}\n'),
        _shows_gap,
    )
    for row in (
        '{"kind": "val", "step": 1, "loss": 1.0, "dice": 3}',
        '{"kind": "val", "step": 1, "loss": 1.0, "dice": {"tumour": "a"}}',
        '{"kind": "val", "step": 1, "loss": null, "dice": {"tumour": 0.5}}',
        '{"kind": "val", "step": 1, "loss": 1.0, "di',
    )
]


def _summary(text: str) -> Callable[[Path], None]:
    """Returns what makes a run whose scores of cases are this text."""

    def make(here: Path) -> None:
        _rows('{"kind": "val", "step": 1, "loss": 1.0, "dice": {"tumour": 0.5}}\n')(here)
        write_json(here / "run" / "validation" / "summary.json", {}).write_text(text)

    return make


def _shows_score(words: str) -> Callable[[Path, str], None]:
    """Returns what asserts that the page says what is wrong with summary.json, and shows the score that is known."""

    def after(here: Path, said: str) -> None:
        page = (here / "run" / "report.html").read_text()
        assert f"run/validation/summary.json: {words}" in page and "0.500" in page

    return after


ATTACKS += [
    _reported(f"a run whose summary.json is {text or 'empty'}", _summary(text), _shows_score(words))
    for text, words in (
        ("", "cannot be used (0 bytes)"),
        ('{"metric_per_case": [], "mean": {}}', "cannot be used (no class)"),
        ('{"classes": {"tumour": "1"}, "metric_per_case": [], "step": 1}', "cannot be used (KeyError: &#39;mean&#39;)"),
    )
]


def _classified(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Returns what makes a run that gives cases a class, and changes the scores of its last validation."""

    def make(here: Path) -> None:
        _rows('{"kind": "val", "step": 1, "loss": 1.0, "cases": 2, "scores": {"balanced accuracy": 0.625}}\n')(here)
        content = json.loads((here / "run/config.json").read_text())
        content["config"] |= {"task": "classify", "network": "resattnet18"}
        content["dataset"]["volume_classes"] = {"names": ["healthy", "ill"]}
        write_json(here / "run/config.json", content)
        path = here / "run/validation/predictions.csv"
        path.parent.mkdir()
        path.write_text("case,class,p(healthy),p(ill)\na,ill,0.1,0.9\nb,ill,0.375,0.625\n")
        summary = class_summary(read_class_table(path), {"a": "ill", "b": "healthy"}, path)
        change(summary)
        path.with_name("summary.json").write_text(as_json({**summary, "step": 1}))

    return make


def _shows_classes(words: str) -> Callable[[Path, str], None]:
    """Returns what asserts that the page has these words, and scores of classes only where nothing is damaged."""

    def after(here: Path, said: str) -> None:
        page = (here / "run" / "report.html").read_text()
        assert words in page and ("run/validation/summary.json: cannot" in page) != ("True class" in page)

    return after


ATTACKS += [
    _reported(f"a classifier whose summary.json {what}", _classified(change), _shows_classes(words))
    for what, change, words in (
        ("is whole", lambda summary: None, "1 of 1 at 0.90"),
        (
            "has a null probability",
            lambda summary: summary["metric_per_case"][0].update(probabilities=[0.1, None]),
            "run/validation/summary.json: cannot be used (TypeError: ",
        ),
        ("lacks its classes", lambda summary: summary.pop("names"), "cannot be used (KeyError: &#39;names&#39;)"),
    )
]


def _series(here: Path) -> None:
    """Makes a run, and a DICOM series to predict."""
    pytest.importorskip("SimpleITK")
    from tests.support.itk import save_series

    make_run(here / "run")
    save(here / "in" / "9.nii.gz", image_array(0))
    save_series(here / "S", image_array(0))


ATTACKS += [
    Attack(
        f"{types.split()[0]} into {which}",
        types=types,
        code=3,
        says="S: is a DICOM series, ",
        make=_series,
        keeps="S",
    )
    for which, types in (
        ("the series that is predicted", "predict run -i S -o S"),
        ("another series", "predict run -i in -o S"),
        ("a series", "export run S/run.zip"),
        ("a series, a page", "report run --out S/run.html"),
        ("a series, points", "tune --space lr=1,2 --preset debug --out S --plan"),
        ("a series, a run", "train --preset debug --out S --dry-run"),
    )
]
