"""What runs take on n devices, by simulation, beside what the paper measured."""

import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from seqpar.cli import tune
from seqpar.runs.sweep_folder import Sweep
from seqpar.settings.presets import debug
from seqpar.sweeps import scaling_plan
from seqpar.sweeps.scaling_plan import (
    TABLE_I,
    Recorded,
    makespan,
    run_seconds,
    run_seconds_on,
    scale,
    speedup_of_equal,
    table,
    verdict,
)
from tests.support.sweep_folder import asked

PAPER = {  # speed-ups of Table I: one after the other on all GPUs, side by side
    1: (1.00, 1.00), 2: (1.91, 1.98), 4: (2.92, 3.84), 8: (5.76, 6.28), 12: (7.38, 7.93), 16: (9.96, 10.56),
    32: (13.18, 15.19),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 12, 16, 31, 32, 33, 64])
def test_equal_runs_are_exactly_as_many_times_as_fast_as_the_law_says(workers: int) -> None:
    assert 32 / makespan([1.0] * 32, workers) == 32 / math.ceil(32 / workers) == speedup_of_equal(32, workers)


def test_runs_of_all_lengths_lie_between_the_bounds_of_list_schedules() -> None:
    source = random.Random(0)
    for workers in range(1, 12):
        lengths = [source.uniform(0.5, 4.0) for _ in range(20)]
        ideal = max(sum(lengths) / workers, max(lengths))
        assert ideal <= makespan(lengths, workers) <= sum(lengths) / workers + max(lengths)
    assert makespan([3, 1, 1, 1], 2) == 3 and makespan([1, 1, 1, 3], 2) == 4, "runs begin in their order"
    with pytest.raises(ValueError, match="at least 1"):
        makespan([1.0], 0)


def test_the_papers_table_has_its_speedups_which_lie_below_the_simulated_bound() -> None:
    alone = TABLE_I[1]
    assert TABLE_I.keys() == PAPER.keys()
    for gpus, row in TABLE_I.items():
        data, experiments = PAPER[gpus]
        assert alone.one_by_one / row.one_by_one == pytest.approx(data, abs=0.012)
        assert alone.side_by_side / row.side_by_side == pytest.approx(experiments, abs=0.012)
        if gpus > 1:
            assert experiments < speedup_of_equal(32, gpus)


def test_measured_and_simulated_speedups_stand_in_columns_of_their_own() -> None:
    rows = scale([3600.0] * 32, 1, [1, 2, 32], lambda size: [3600.0 / size * (1 + size / 100)] * 32)
    head, *lines = table(rows, 32, True)
    assert "most" in head and "measured in the paper" in head
    assert lines[-1].split() == ["32", "1:00:00", "32.00", "1:19:12", "24.48", "32.00", "15.19,", "13.18"]
    assert "15.19" not in "".join(table(rows, 32, False))


def test_the_picture_of_a_short_sweep_is_in_seconds_and_of_a_long_one_in_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = list[Any]()
    monkeypatch.setattr(scaling_plan, "draw_figure", lambda title, diagrams, *_: drawn.append(diagrams[0]))
    for length, unit, most in ((25.0, "seconds", 25.0), (600.0, "minutes", 10.0), (36000.0, "hours", 10.0)):
        scaling_plan.draw_scaling([scaling_plan.Scaling(1, length, math.nan)], False, Path("scaling.png"))
        assert (drawn[-1].quantity, drawn[-1].lines[0].rows[0][0]) == (unit, most)


def test_a_way_that_needs_other_devices_is_not_planned_and_the_quicker_one_is_named() -> None:
    (alone, both) = scale([10.0, 10.0], 2, [1, 2], lambda size: [10.0, 10.0] if size == 2 else ())
    assert math.isnan(alone.side_by_side) and math.isnan(alone.one_by_one)
    assert "only one way" in verdict(alone) and (both.side_by_side, both.one_by_one) == (20.0, 20.0)
    (row,) = scale([10.0, 10.0], 1, [2], lambda size: [8.0, 8.0])
    assert verdict(row) == "on 2 devices side by side is quicker, 1.60 times"


GRID = "lr=1e-4,5e-4,1e-3,5e-3 norm=own,group betas=0.9:0.99,0.9:0.999 amsgrad=no,yes"


def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[str]:
    """Returns what --plan says of the paper's grid; a step takes a second, and a tenth more on each further device."""
    monkeypatch.setattr(
        scaling_plan, "plan_of", lambda config, ranks: SimpleNamespace(step_seconds=ranks * (1 + 0.1 * (ranks - 1)))
    )
    monkeypatch.setattr(scaling_plan, "usable_cores", lambda: 1)  # which the planner shares out to all ranks
    said = list[str]()

    def heard(*words: object, file: object = None, **how: object) -> None:
        if file in (None, sys.stdout):  # progress, on stderr, speaks as often as a busy machine gives it time to
            said.extend(" ".join(map(str, words)).splitlines())

    monkeypatch.setattr("builtins.print", heard)
    line = ["--space", *GRID.split(), "--preset", "distmis", "--device", "cpu", "--epochs", "1", "--devices", "4"]
    assert tune.act([*line, "--out", str(tmp_path / "sweep"), "--plan", *more]) == 0
    return said


def test_the_plan_of_the_papers_grid_says_both_ways_and_which_is_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, heads, *rows = planned(tmp_path, monkeypatch)
    assert (
        first
        == "32 points of 2:49 each; times are planned from the number of steps, and leave out starting and validating"
    )
    table_rows = {int(row.split()[0]): row.split()[1:] for row in rows[:6]}
    assert list(table_rows) == [1, 2, 4, 8, 16, 32] and "most" in heads
    assert table_rows[4] == ["22:32", "4.00", "29:07", "3.10", "4.00", "3.84,", "2.92"], "42 steps of 169"
    assert table_rows[32][1] == "32.00" and table_rows[32][-2:] == ["15.19,", "13.18"]
    assert rows[6] == "on 4 devices side by side is quicker, 1.29 times"
    assert (tmp_path / "sweep" / "scaling.png").read_bytes()[:4] == b"\x89PNG"
    assert not (tmp_path / "sweep" / "sweep.json").exists(), "nothing has begun"


def test_the_plan_of_a_sweep_says_which_lengths_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling_plan, "step_seconds", lambda config, ranks: 2.0 / ranks)
    order, sweep, _ = asked(tmp_path)
    for count, source in ((0, "times are planned from the number of steps, and leave out starting and validating"),
                          (3, "3 of the times are recorded; the others are planned from the number of steps"),
                          (4, "times are recorded, and leave out what each run takes to start")):  # fmt: skip
        points = [replace(point, state="finished", seconds=20.0) for point in sweep.points[:count]]
        scaling_plan.print_plan(order, Sweep(order.began(), (*points, *sweep.points[count:])), tmp_path, 2)
        range_of = {0: "0:10", 3: "0:10 to 0:20", 4: "0:20"}[count]
        assert capsys.readouterr().out.startswith(f"4 points of {range_of} each; {source}")


def test_a_plan_takes_the_doctors_figures_which_a_sweep_with_a_batch_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[str]()
    measured = ["--measured", str(tmp_path / "doctor.json")]
    assert planned(tmp_path, monkeypatch, *measured)[0].startswith("32 points of 2:49")
    monkeypatch.setattr(
        scaling_plan, "plan_of", lambda config, ranks: taken.append(config.measured) or SimpleNamespace(step_seconds=1)
    )
    order, sweep, _ = asked(tmp_path / "s", *measured)
    scaling_plan.print_plan(order, sweep, tmp_path / "s", 1)
    assert set(taken) == {measured[1]}
    with pytest.raises(ValueError, match="--measured would do nothing"):
        order.configs(sweep)


def test_only_scale_lr_makes_runs_on_more_groups_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it every group sees other tiles in as many steps; ``--global-batch`` deals a step's tiles out."""
    monkeypatch.setattr(scaling_plan, "step_seconds", lambda config, ranks: config.batch * config.accumulate * 1.0)
    config = replace(debug(), epochs=3, iterations=10, batch=2, global_batch=0)
    assert [run_seconds(config, ranks) for ranks in (1, 2, 4)] == [60.0] * 3
    scaled = replace(config, scale_lr=True)
    assert [run_seconds(scaled, ranks) for ranks in (1, 2, 4)] == [60.0, 30.0, 12.0], "30, 15 and 6 steps"
    assert run_seconds(replace(scaled, seqpar=2), 4) == 30.0, "two groups"
    held = replace(config, global_batch=4, batch_dice=False)
    assert [run_seconds(held, ranks) for ranks in (1, 2, 4)] == [120.0, 60.0, 30.0]
    assert scaling_plan._on_all([(held, None)], 1, 8) == () and scaling_plan._on_all([(config, None)], 1, 8) == [60.0]


def test_recorded_seconds_are_those_of_the_ranks_that_a_run_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling_plan, "step_seconds", lambda config, ranks: 1.0)
    config = replace(debug(), epochs=1, iterations=8, scale_lr=True)
    assert run_seconds_on(1, config, Recorded(10.0, 4)) == 40.0 and run_seconds_on(4, config, Recorded(10.0, 4)) == 10.0
    order, sweep, _ = asked(tmp_path, "--devices-per-run", "all", "--scale-lr", "--iterations", "8")
    sweep = replace(sweep, points=tuple(replace(one, state="finished", seconds=10.0) for one in sweep.points))
    for point in sweep.points[:2]:
        (tmp_path / point.name).mkdir()
        (tmp_path / point.name / "config.json").write_text(json.dumps({"layout": {"ranks": 2}}))
    scaling_plan.print_plan(order, sweep, tmp_path, 4)  # of the others no folder is there
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "4 points of 0:20 to 0:40 each; times are recorded, and leave out what each run takes to start"
    assert [row.split()[3] for row in rows[:3]] == ["2:00", "1:00", "0:30"], "one by one on 1, 2 and 4"
