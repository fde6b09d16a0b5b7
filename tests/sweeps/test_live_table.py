"""What is shown of a sweep while it runs: lines in a log, a table that is drawn over itself on a terminal."""

import json
from pathlib import Path

import pytest

from seqpar.sweeps import live_table
from seqpar.sweeps.live_table import LiveTable
from seqpar.terminal import Display


def write_rows(run: Path, count: int) -> None:
    run.mkdir(exist_ok=True)
    rows = [{"kind": "train", "step": n, "loss": 1 / (n + 1), "seconds": 2.0} for n in range(count)]
    rows.append({"kind": "val", "step": count, "loss": 1.0, "dice": {"a": 0.25}})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "status.json").write_text(json.dumps({"state": "running", "step": 0, "steps": 40}))


def test_a_log_gets_a_line_when_a_point_begins_goes_on_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = LiveTable(tmp_path, 4, over=1)
    table.begins("a")
    table.begins("b", again=True)
    write_rows(tmp_path / "a", 4)
    table.ends("a", "has finished")
    table.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "a begins",
        "b resumes: its training was killed",
        "2 of 4: a has finished: training loss 0.2500, mean Dice 0.250",
    ]


def test_a_terminal_shows_step_loss_dice_time_left_and_place_of_each_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Display, "on_terminal", True)
    monkeypatch.setattr(live_table, "REFRESH_S", 0.0)
    monkeypatch.setenv("COLUMNS", "100")
    table = LiveTable(tmp_path, 2)
    write_rows(tmp_path / "a", 10)
    table.begins("a")
    table.lies("a", "node7")
    capsys.readouterr()
    table.refresh()
    first = capsys.readouterr().out
    assert "0 of 2 points have ended, 1 training\n" in first and live_table.HEADS in first
    assert "        10/40     0.1000  0.250     1:00  node7            a" in first
    table.refresh()
    assert capsys.readouterr().out.startswith("\r\x1b[3A\x1b[J"), "three lines are written over"
