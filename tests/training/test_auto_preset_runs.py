"""A run by ``--preset auto``: what was planned is said, kept in the run, and not planned again where it goes on."""

import json
from pathlib import Path
from typing import Any

from seqpar.runs.journal import read_metrics
from seqpar.training import run_request
from tests.runs.test_boards import telling
from tests.support.training_runs import losses, trained

SENTENCES = (
    "auto: 5 cases, median 14x12x10 voxels",
    "--spacing source",
    "3 blocks x 96",
    "--tile 14 12 10",
    "--batch 2",
)
BRIEF = "--workers 0 --device cpu --val-cases 1"


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text())


def only_the_first_looks(rank: int) -> None:
    """Others read no header, and plan nothing: their memory may differ, and thousands of cases take time."""
    if rank:
        run_request.look_at = run_request.plan_from_data = None  # type: ignore[assignment]


def test_a_planned_run_keeps_its_plan_where_it_goes_on(flags, tmp_path) -> None:
    at = flags.index("--data")
    line = ["--preset", "auto", *flags[at:], "--iterations", "2", *BRIEF.split()]
    began = trained(2, [*line, "--seqpar", "2", "--epochs", "1"], tmp_path / "run", hook=only_the_first_looks)
    said = [text for text in began.said(0).splitlines() if text.startswith(("auto: ", "  --", "  3 blocks"))]
    assert len(said) == 5 and all(sentence in text for sentence, text in zip(SENTENCES, said)), said
    assert SENTENCES[0] not in began.said(1)
    content = read(tmp_path / "run")
    assert content["preset"] == "auto"
    assert [content["layout"][f"auto_{name}"] for name in ("data", "spacing", "widths", "tile", "batch")] == [
        [text] for text in said
    ]
    assert (content["config"]["tile"], content["config"]["patch"]) == ([14, 12, 10], [2, 2, 2])
    goes_on = trained(2, ["--resume", "--epochs", "2"], tmp_path / "run")
    assert SENTENCES[0] not in goes_on.said(0) and "preset auto" in goes_on.said(0)
    assert read(tmp_path / "run")["config"]["tile"] == [14, 12, 10] and len(losses(tmp_path / "run")) == 4


def test_lessons_by_the_data_run_to_their_end_and_a_tracker_gets_them_as_one_run(flags, tmp_path) -> None:
    out, file = tmp_path / "run", tmp_path / "calls.jsonl"
    lessons = ["--curriculum", "8:1:1,whole:1:1", "--tracker", "trackio", "--iterations", "2"]
    line = ["--preset", "auto", *flags[flags.index("--data") :], *BRIEF.split(), *lessons]
    said = trained(1, line, out, hook=telling("trackio", file)).said()
    assert "tiles and batches of --curriculum, as given; the largest is 14x12x10" in said and "  --batch" not in said
    assert "  3 blocks x 96" in said and "lesson 2 of 2" in said
    config = read(out)["config"]
    assert config["curriculum"] == "8x8x8:1:1,whole=10x8x6:1:1" and config["tile"] == [10, 8, 6], "of the last lesson"
    calls = [json.loads(text)[1:] for text in file.read_text().splitlines()]
    begun = [call for call in calls if call[0] == "init"]
    assert len(begun) == 2 and begun[0] == begun[1] and sum(call == ["finish"] for call in calls) == 2
    logged = {step: values["train/loss"] for what, step, values in (c for c in calls if c[0] == "log")
              if "train/loss" in values}  # fmt: skip
    rows = [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]
    assert logged == {row["step"]: row["loss"] for row in rows} and len(logged) == 4
