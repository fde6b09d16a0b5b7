"""A run by ``--preset auto``: what was planned is said, kept in the run, and not planned again where it goes on."""

import json
from pathlib import Path
from typing import Any

from tests.support.training_runs import losses, trained

SENTENCES = (
    "auto: 5 cases, median 14x12x10 voxels",
    "--spacing source",
    "3 blocks x 96",
    "--tile 14 12 10",
    "--batch 2",
)


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "config.json").read_text())


def test_a_planned_run_keeps_its_plan_where_it_goes_on(flags, tmp_path) -> None:
    at = flags.index("--data")
    line = [
        "--preset",
        "auto",
        *flags[at:],
        "--iterations",
        "2",
        "--workers",
        "0",
        "--device",
        "cpu",
        "--val-cases",
        "1",
    ]
    began = trained(2, [*line, "--seqpar", "2", "--epochs", "1"], tmp_path / "run")
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
