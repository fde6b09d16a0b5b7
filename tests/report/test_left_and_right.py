"""What pages say of left and right where training or prediction mirrored them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from seqpar.cli import report
from seqpar.report.record import read_record
from seqpar.tasks.segment.page import _mirrored_copies
from seqpar.tasks.training_data import about_sides, sides_of_each
from tests.support.folders import write_json
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


def test_a_mean_over_copies_that_exchange_left_and_right_is_told(finished: Path, tmp_path: Path) -> None:
    kidneys, record = ["left kidney", "right kidney"], read_record(finished)

    def told(flag: str) -> list[str]:
        return [
            f"A prediction is the mean over copies mirrored from left to right ({flag}), which exchanges left kidney "
            f"and right kidney: these may be confused. {flag.split()[0]} none does not mirror."
        ]

    for letters, is_told in (("WDH", True), ("DH", False), ("none", False)):
        own = replace(record, content={**record.content, "config": {**record.config, "val_mirror": letters}})
        assert _mirrored_copies(kidneys, None, own) == told(f"--val-mirror {letters}") * is_told
        assert _mirrored_copies(["liver"], None, own) == []
    for directions, is_told in (([0], True), ([1, 2], False), ([], False)):
        write_json(tmp_path / "prediction.json", {"run": "r", "settings": {"mirror": directions}})
        assert _mirrored_copies(kidneys, tmp_path, record) == told("--mirror") * is_told
    write_json(tmp_path / "prediction.json", {"run": "r"})
    assert _mirrored_copies(kidneys, tmp_path, record) == [], "of an earlier version"
    recipe = record.dataset["recipe"] | {"plan": {"any": 1}}
    content = {"config": {**record.config, "val_mirror": "W"}, "dataset": record.dataset | {"recipe": recipe}}
    assert _mirrored_copies(kidneys, None, replace(record, content={**record.content, **content})) == [], "of files"
