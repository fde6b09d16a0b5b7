"""What pages say of left and right where training or prediction mirrored them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqpar.cli import evaluate, report
from seqpar.cluster.exit_codes import run as main
from seqpar.report.record import RunRecord, read_record
from seqpar.report.sweep_page import _of_their_task
from seqpar.tasks.lookup import TASKS
from seqpar.tasks.segment.page import _of_sides
from seqpar.tasks.training_data import about_sides, sides_of_each
from tests.support.folders import write_json
from tests.support.label_folders import save
from tests.support.report_page import Page


def test_a_page_repeats_that_training_exchanged_left_and_right() -> None:
    told = (
        "Training mirrored {} (--augment light), which exchanges left kidney and right kidney: these may be confused. "
        "--augment none does not mirror."
    )
    kidneys = ["left kidney", "right kidney"]
    assert about_sides(kidneys, "light") == [told.format("tiles")]
    assert about_sides(kidneys, "light", "volumes") == [told.format("volumes")]
    assert about_sides(["liver"], "light") == about_sides(kidneys, "none") == about_sides(["L"], "of another") == []


def test_a_comparison_names_the_runs_whose_training_exchanged_left_and_right(copied: Path, tmp_path: Path) -> None:
    runs = {name: Path(shutil.copytree(copied, tmp_path / name)) for name in ("one", "two", "three")}

    def page(**augment: str) -> str:
        for name, run in runs.items():
            path = run / "config.json"
            content = json.loads(path.read_text())
            content["dataset"]["regions"] = {"left kidney": [1], "right kidney": [2]}
            content["config"]["augment"] = augment.get(name, "none")
            path.write_text(json.dumps(content))
        assert report.act([*map(str, runs.values()), "--out", str(tmp_path / "page.html")]) == 0
        return Page((tmp_path / "page.html").read_text()).text

    told = "training mirrored tiles (--augment light), which exchanges left kidney and right kidney: these may be"
    assert (text := page(two="light")).count(told) == 1 and f"two: {told}" in text
    assert (text := page(one="light", two="light")).count(told) == 1 and f"one, two: {told}" in text
    assert "mirrored" not in page()
    labelled = read_record(copied)
    outputs = {"names": ["right", "left"], "numbers": {}}
    dataset = labelled.dataset | {"volume_classes": outputs, "labels": {}}
    content = {"config": {**labelled.config, "augment": "light"}, "dataset": dataset}
    told = sides_of_each({"a": replace(labelled, content={**labelled.content, **content})})[0]
    assert told.startswith("a: training mirrored volumes (--augment light), which exchanges left and right")


def test_the_page_of_a_sweep_names_the_points_whose_training_exchanged_left_and_right(copied: Path) -> None:
    record = read_record(copied)
    dataset = record.dataset | {"regions": {"left kidney": [1], "right kidney": [2]}}
    contents = {name: {"config": record.config | {"augment": name}, "dataset": dataset} for name in ("light", "none")}
    points = {name: replace(record, content=record.content | content) for name, content in contents.items()}
    (told,) = _of_their_task(points, {name: task.compare for name, task in TASKS.items()})
    assert told.startswith("light: training mirrored tiles (--augment light), which exchanges left kidney and right")


def test_a_mean_over_copies_that_exchange_left_and_right_is_told(finished: Path, tmp_path: Path) -> None:
    kidneys, record = {1: "left kidney", 2: "right kidney"}, read_record(finished)

    def told(flag: str) -> list[str]:
        return [
            f"A prediction is the mean over copies mirrored from left to right ({flag}), which exchanges left kidney "
            f"and right kidney: these may be confused. {flag.split()[0]} none does not mirror."
        ]

    def one(letters: str, reader: str = "", names: dict[int, str] = kidneys, augment: str = "none") -> RunRecord:
        config = {**record.config, "val_mirror": letters, "augment": augment}
        plan = {"plan": {"reader": reader}} if reader else {}
        dataset = record.dataset | {"regions": {}, "recipe": record.dataset["recipe"] | plan}
        return replace(record, label_names=names, content={**record.content, "config": config, "dataset": dataset})

    for letters, is_told in (("WDH", True), ("DH", False), ("none", False)):
        assert _of_sides(None, one(letters)) == told(f"--val-mirror {letters}") * is_told
        assert _of_sides(None, one(letters, names={1: "liver"})) == []
        found = " ".join(sides_of_each({"first": one("none"), "second": one(letters)}))
        assert ("second: a prediction is the mean over copies" in found) == is_told and "first" not in found
    assert _of_sides(None, one("W", "NibabelIOWithReorient")) == told("--val-mirror W")
    assert _of_sides(None, one("W", "SimpleITKIO")) == [], "whose axes are those of files"
    assert _of_sides(None, one("WDH", "SimpleITKIO")) == told("--val-mirror WDH"), "one of them is"
    for odd in (True, 5, {"a": 1}):
        write_json(tmp_path / "prediction.json", {"run": str(finished), "settings": {"mirror": odd}})
        assert _of_sides(tmp_path, one("none")) == [], odd
        write_json(tmp_path / "prediction.json", {"run": str(finished), "settings": odd})
        assert _of_sides(tmp_path, one("none")) == [], odd
    for directions, is_told in (([0], True), ([1, 2], False), ([], False)):
        write_json(tmp_path / "prediction.json", {"run": str(finished), "settings": {"mirror": directions}})
        assert _of_sides(tmp_path, one("none")) == told("--mirror") * is_told
    write_json(tmp_path / "prediction.json", {"run": str(finished)})
    assert _of_sides(tmp_path, one("none")) == [], "of an earlier version"
    (trained,) = _of_sides(tmp_path, one("none", augment="light"))
    assert trained.startswith("Training mirrored tiles (--augment light), which exchanges left kidney and right")


def test_that_training_mirrored_is_said_of_the_runs_that_predicted(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads((copied / "config.json").read_text())
    regions = {"regions": {"left kidney": [1], "right kidney": [2]}}
    runs = {name: Path(shutil.copytree(copied, tmp_path / name)) for name in ("plain", "mirrors")}
    for (name, run), augment in zip(runs.items(), ("none", "light")):
        config = content["config"] | {"augment": augment}
        write_json(run / "config.json", content | {"config": config, "dataset": content["dataset"] | regions})
        save(tmp_path / f"by-{name}" / "a.nii.gz", np.ones((4, 4, 4), np.uint8))
        write_json(tmp_path / f"by-{name}" / "prediction.json", {"run": str(run), "weights": {}})
    save(tmp_path / "truth" / "a.nii.gz", np.ones((4, 4, 4), np.uint8))
    for run in runs.values():
        assert _of_sides(tmp_path / "by-plain", read_record(run)) == [], "whichever page it is"
        assert len(_of_sides(tmp_path / "by-mirrors", read_record(run))) == 1
    assert _of_sides(tmp_path / "by-mirrors", read_record(runs["plain"]))[0].startswith(
        f"{runs['mirrors']}: training mirrored"
    )
    for name in runs:
        assert main(evaluate.act, [str(tmp_path / "truth"), str(tmp_path / f"by-{name}")]) == 0
        is_told = f"Caution: {runs[name]}: training mirrored tiles" in capsys.readouterr().out
        assert is_told == (name == "mirrors")
