"""A bench says what it measures and how long that takes, prints rows as they come, and keeps them where it is cut."""

import os
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

import bench
from lab.benches import loader, predict, rank, start, step_profile
from lab.benches.series import Progress, Row, Runs, Series, Table, ratio, run_series, spread, stream_apart
from lab.benches.step_profile import KINDS


def counting(stop_after: int = 99, turns: int = 3) -> tuple[Series, list[str]]:
    """Returns a series of two cases whose runs are 1, 2, 3, ..., interrupted behind some, and what happened when."""
    events: list[str] = []

    def measure(turns: int) -> Generator[tuple[str, float], None, None]:
        number = 0
        try:
            for _ in range(turns):
                for case in ("a", "b"):
                    if number == stop_after:
                        raise KeyboardInterrupt
                    number += 1
                    events.append(f"measured {case}")
                    yield case, float(number)
        finally:
            events.append("ended")

    def row(case: str, runs: Runs) -> Row:
        return {"case": case, "turns": len(runs[case]), "last": runs[case][-1], "ratio": ratio(runs[case], runs["a"])}

    return Series("counting", ("a", "b"), turns, 60.0, measure, row), events


def test_each_row_comes_as_soon_as_its_last_turn_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    series, events = counting()
    rows: list[Row] = []
    assert run_series(series, 2, lambda row: (rows.append(row), events.append(f"row {row['case']}")), Progress())
    assert events[:5] == ["measured a", "measured b", "measured a", "row a", "measured b"] and events[5] == "row b"
    assert [(row["turns"], row["last"]) for row in rows] == [(2, 3.0), (2, 4.0)]
    assert rows[1]["ratio"] == (2 / 1 + 4 / 3) / 2
    assert spread([2.0, 4.0], [1.0, 3.0]) == "1.333 to 2.000" and spread([2.0], [1.0, 3.0]) == ""
    first, *turns = capsys.readouterr().err.splitlines()
    assert first == "counting: 2 cases, 2 turns, about 2:00 on 2 idle CPU cores"
    assert [line.split(":")[0] for line in turns] == ["  turn 1 of 2", "  turn 2 of 2"] and "left" in turns[0]


@pytest.mark.parametrize(("stop_after", "expected"), [(5, {"a": 3, "b": 2}), (1, {"a": 1}), (0, {})])
def test_what_is_cut_short_keeps_the_rows_of_the_turns_so_far(stop_after: int, expected: dict[str, int]) -> None:
    series, events = counting(stop_after)
    rows: list[Row] = []
    assert not run_series(series, 3, rows.append, Progress())
    assert {row["case"]: row["turns"] for row in rows} == expected and len(rows) == len(expected)
    assert events[-1] == "ended"


def test_rows_reach_the_file_one_by_one_and_the_exit_code_says_that_it_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    series, _ = counting(5)
    monkeypatch.setattr(bench, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(bench, "plan_series", lambda *how: [bench.Planned("step", "step", series, 3)])
    sizes = []
    original = Table.add

    def add(table: Table, row: Row) -> None:
        original(table, row)
        sizes.append(len((tmp_path / "results" / "step.md").read_text().splitlines()))

    monkeypatch.setattr(Table, "add", add)
    assert bench.act(["step", "--write"]) == bench.CUT_SHORT == 130
    text, said = (tmp_path / "results" / "step.md").read_text(), capsys.readouterr()
    assert sizes == [7, 8] and said.out.strip() == text.strip()
    assert text.startswith("## step (step), counting: 2 cases, 3 turns, 20") and text.count("| ---") == 4
    assert "| b | 2 | 4 |" in text and text.rstrip().endswith("Cut short: the rows show the turns that were done.")
    assert said.err.startswith("about 3:00 on 2 idle CPU cores (step 3:00)")


def test_what_all_rows_come_to_stands_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    series = replace(counting()[0], conclude=lambda rows: f"{len(rows)} rows, the last of {rows[-1]['case']}.")
    monkeypatch.setattr(bench, "plan_series", lambda *how: [bench.Planned("step", "step", series, 2)])
    assert bench.act(["step"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("|\n\n2 rows, the last of b.")


def test_every_subject_has_an_estimate_and_a_quick_form_of_three_minutes_at_most() -> None:
    for subject in bench.SUBJECTS:
        whole, quick, once = (
            sum(one.seconds for one in bench.plan_series([subject], *how))
            for how in ((False, False, None), (True, False, None), (False, False, 1))
        )
        assert 0 < quick <= 180 and quick < whole and once <= whole, (subject, quick, whole)


COUNTED = ("operations", "attention", "sent", "held", "peak")
RUNS = {  # by function, what a case comes to in a turn
    "attention": {"auto": "ulysses", "sent": 2.0**20, "ms": 3.0, "cpu_ms": 2.0, "growth": 2.0**20},
    "encoder": {"seconds": 2.0, "saved": 1e6},
    "growth": {"s": 2.0, "limit": "", "strategy": "ulysses", **dict.fromkeys(COUNTED, 1e6)},
    "launches": (628, 4.3e10),
    "rank": {**dict.fromkeys(rank.MEASURED, 1.0)},
    "memory_by_ranks.masked": {"held": 2.0**20, "state": 1.0, "peak": 1.0, "seconds": 1.0, "tokens": 64},
    "memory_by_ranks.stages": {"held": 2.0**20, "state": 1.0, "peak": 1.0, "seconds": 1.0, "tokens": 64},
    "memory": {"held": 2.0**20, "state": 1.0, "peak": 1.0, "seconds": 1.0, "tokens": 64},
    "data": 0.5,
    "loader": loader._Rate(1.0, 0.5, 0.25),
    "plan": {"planned_s": 1.0, "planned_bytes": 1e6, "processor": 1.0, "clock": 1.0, "alive": 1e6},
    "plan.published": {"planned GB": 1.0, "published GB": 1.0},
    "plan.answers": {"first row s": 1.0, "whole answer s": 2.0},
    "predict": {"cpu_s": 1.0, "peak_mb": 1.0, "voxels": 8, "seam": 1.0},
    "predict.parts": dict.fromkeys(("all", *predict.PARTS), 1.0),
    "start": start.Seconds(4.0, 3.0),
    "step_profile": dict.fromkeys(("clock_s", "processor_s", *KINDS, *step_profile.SETTLED), 1.0),
    "step": {"seconds": 2.0, "saved": 1e6},
    "unets": {"seconds": 2.0, "saved": 1e6, "apart": 1e-6},
    "unets.converted": {"seconds": 2.0, "saved": 1e6, "loss": 1.0},
    "nnunet": {"seconds": 2.0},
    "pipe": {"seconds": 1.0, "foretold": 1.0, "bubble": 0.1, "sent": 1.0, "cells": "8", "alone": 1.0},
}


@pytest.mark.parametrize("name", [name for names in bench.SUBJECTS.values() for name in names])
def test_every_case_of_a_series_has_a_row_of_the_same_columns(name: str) -> None:
    (subject,) = [subject for subject, names in bench.SUBJECTS.items() if name in names]
    every = [one for quick in (False, True) for one in bench.plan_series([subject], quick, False, None)]
    for series in (one.series for one in every if one.function == name.rpartition(".")[2]):
        runs = {case: [RUNS[name]] * 2 for case in series.cases}
        rows = [series.row(case, runs) for case in series.cases]
        assert len(rows) > 1 and all(list(row) == list(rows[0]) for row in rows), name
        assert len({str(row) for row in rows}) == len(rows), "rows say what they are of"
        for word in ("ratio", "times_whole"):
            assert {str(row[word]) for row in rows if word in row} <= {"1.0", "1.000 (1.000 to 1.000)"}, rows


def test_turns_are_those_that_were_asked_for() -> None:
    assert {one.turns for one in bench.plan_series([], False, False, 2)} == {2}
    assert {one.subject for one in bench.plan_series([], True, False, None)} == set(bench.SUBJECTS)
    assert [one.subject for one in bench.plan_series([], False, True, None)] == ["memory", "pretrain"]
    for how, word in (
        ((["speed"], False, False, None), "no bench of speed"),
        (([], True, True, None), "--quick and --large are opposites"),
    ):
        with pytest.raises(ValueError, match=word):
            bench.plan_series(*how)


def children(pid: int) -> list[int]:
    own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [grandchild for child in own for grandchild in children(child)]


@pytest.mark.started
def test_what_is_cut_short_leaves_no_process_behind() -> None:
    before = set(children(os.getpid()))
    lines = stream_apart("attention", ["time", "100000", "64"], 2, 1, {"DS_ACCELERATOR": "cpu"})
    first = next(lines)
    started = set(children(os.getpid())) - before
    assert first["case"] == "gather-kv" and first["ms"] > 0 and len(started) >= 3
    lines.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
