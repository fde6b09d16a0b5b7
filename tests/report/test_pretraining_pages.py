"""What pages say of pretrainings: what errors are of, which of them compare, and what pictures are given."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seqpar.cli import report
from seqpar.cluster.exit_codes import run
from seqpar.report.record import read_record
from seqpar.report.several_runs import cautions_about, curves_over_each_other
from seqpar.runs.sweep_folder import describe_mixed, read_sweep, refresh_points, validated_on
from seqpar.sweeps.results import _figure_of_sweep
from seqpar.tasks.pretrain.validation import RebuiltTile, figure_of_tiles
from tests.support.report_page import Page, own_slices
from tests.support.sweep_folder import make_sweep_folder


def pretrained(finished: Path, folder: Path, loss: float, guess: float, **config: Any) -> Path:
    """Returns a copy of a run as a pretraining with one validation."""
    out = Path(shutil.copytree(finished, folder))
    content = json.loads((out / "config.json").read_text())
    content["config"] |= {"task": "pretrain", **config}
    (out / "config.json").write_text(json.dumps(content))
    row = {"kind": "val", "step": 5, "loss": loss, "error_of_mean": guess, "cases": 2}
    (out / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return out


def test_errors_on_other_hidden_voxels_are_not_compared(finished: Path, tmp_path: Path) -> None:
    tile = read_record(finished).config["tile"]
    one, same, other = (
        pretrained(finished, tmp_path / name, loss, 0.5, **config)
        for name, loss, config in (("one", 0.34, {}), ("same", 0.3, {"seed": 5}), ("other", 0.55, {"tile": [8, 8, 8]}))
    )
    config = pretrained(finished, tmp_path / "segments", 0.3, 0.5, task="segment", tile=[8, 8, 8]), finished
    titles = [chart.title for chart in curves_over_each_other({own.name: read_record(own) for own in config})]
    assert titles[0] == "Loss in training, on different tiles" and "not comparable" not in titles[1]
    told = "These runs differ in their losses (tile); their loss curves cannot be compared."
    assert tile != [8, 8, 8] and cautions_about([read_record(one), read_record(same)]) == []
    assert cautions_about([read_record(one), read_record(other)]) == [told]
    assert run(report.act, [str(one), str(other), "--out", str(tmp_path / "page.html")]) == 0
    text = Page((tmp_path / "page.html").read_text()).text
    assert told in text and "Loss on held-out cases (n = 2), not comparable" in text
    assert "other: nothing was learned: the best error is 0.5500, and that of" in text and "one: nothing" not in text
    assert run(report.act, [str(other)]) == 0
    assert (other / "report.html").read_text().count("Nothing was learned: the best error is") == 1


def test_pages_say_which_share_of_what_is_hidden_is_padding(finished: Path, tmp_path: Path) -> None:
    run_folder = pretrained(finished, tmp_path / "run", 0.34, 0.5)
    shutil.copy(Path(__file__).parents[2] / "docs/pictures/first-run.png", run_folder / "validation.png")
    assert run(report.act, [str(run_folder)]) == 0
    text = Page((run_folder / "report.html").read_text()).text
    assert "beyond the scan is padded." in text and "without padding" not in text, "as earlier versions counted it"
    row = json.loads((run_folder / "metrics.jsonl").read_text()) | {"padding": 0.654, "loss": 0.45}
    (run_folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    shutil.copy(Path(__file__).parents[2] / "docs/pictures/first-run.png", run_folder / "validation.png")
    assert run(report.act, [str(run_folder)]) == 0
    text = Page((run_folder / "report.html").read_text()).text
    assert (
        "Of the hidden voxels, 65 % are padding, as tiles reach beyond the scans: validation errors ignore it" in text
    )
    assert "A tile that reaches beyond the scan is padded; errors ignore the padding." in text
    assert "held out (n = 2), without padding" in text
    assert (
        "Little was learned: the best error is 0.4500, and that of the tile's mean is 0.5000. Train longer, on" in text
    )


@pytest.mark.parametrize(
    ("task", "tiles", "number"), [("pretrain", "48", 2), ("pretrain", "32", 1), ("segment", "48", 1)]
)
def test_points_that_hide_other_voxels_are_not_ranked(task: str, tiles: str, number: int, tmp_path: Path) -> None:
    out = make_sweep_folder(tmp_path)
    for point in read_sweep(out).points[:2]:
        rows = [json.loads(line) for line in (out / point.name / "metrics.jsonl").read_text().splitlines()]
        rows = [row | {"measured_on": "a mask_ratio=0.75"} if row["kind"] == "val" else row for row in rows]
        (out / point.name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sweep = refresh_points(out, read_sweep(out))
    points = [replace(p, settings={"tile": tile, "lr": tile}) for p, tile in zip(sweep.points, ("32", tiles))]
    sweep = replace(sweep, began={"settings": {"task": task}}, points=tuple(points))
    first, second, *_ = points
    masked = replace(second, measured_on="a mask_ratio=0.5", settings=first.settings)
    other = validated_on(out, replace(sweep, points=(first, masked)))
    assert [*other.values()] == [1, 1 + (task == "pretrain")]
    numbers = validated_on(out, sweep)
    assert [*numbers.values()] == [1, number]
    told = "points were validated with different --tile, so their order says little about which setting is best: "
    assert describe_mixed(sweep, numbers).startswith(told) == (number == 2)
    above = _figure_of_sweep(out, sweep).subfigs[0]
    assert (f"{told.partition(', so')[0]}" in above.get_suptitle()) == (number == 2)
    assert above.axes[0].get_ylabel() == "training loss" + ", on different tiles" * (tiles != "32")
    points = tuple(replace(p, settings={"loss": loss}) for p, loss in zip(points, ("tversky", "dice-ce")))
    above = _figure_of_sweep(out, replace(sweep, points=points)).subfigs[0]
    assert above.axes[0].get_ylabel() == "training loss, not comparable"


def test_pictures_with_normalised_targets_say_what_they_are_given(finished: Path, tmp_path: Path) -> None:
    image, slices = np.ones((8, 8, 8)), own_slices((8, 8, 8))[2]
    for guess, is_told in (("the tile's mean", False), ("each patch's own mean", True)):
        tile = RebuiltTile("a", image, image, image > 0, (1.0,) * 3, slices, 0.5, 0.6, guess)
        title = figure_of_tiles([tile], False, tmp_path).get_suptitle().replace("\n", " ")
        assert ("contrast of each hidden patch are taken from the image" in title) == is_told
        out = pretrained(finished, tmp_path / guess[:4], 0.5, 1.0, normalised_targets=is_told)
        (out / "validation.png").write_bytes(b"a picture")
        assert run(report.act, [str(out)]) == 0
        assert ("contrast of each hidden patch are taken from" in (out / "report.html").read_text()) == is_told
