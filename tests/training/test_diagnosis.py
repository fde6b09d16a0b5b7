"""What holds a run up is named: ranks that do not start, stop, differ from the others, or are slow."""

import os
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from seqpar.cli import train
from seqpar.parallel import wait_clock
from seqpar.parallel.launcher import flight_recorder
from seqpar.parallel.wait_clock import WaitClock
from seqpar.runs.journal import read_metrics
from seqpar.training import gradients, step_times, trainer
from seqpar.training.step_times import SKIPPED, WINDOW, SlowRankDetector
from tests.support.marks import long_case
from tests.support.training_runs import Launch, at, status, trained, weights


def leave_late() -> None:
    time.sleep(8)
    os._exit(7)


def codes_of(flags: list[str], out: Path, hook, world: int = 3) -> tuple[list[int], str]:
    with Launch(world, flags, out, hook) as launch:
        return launch.wait(), launch.said()


def test_a_rank_that_does_not_start_is_named(flags, tmp_path):
    codes, said = codes_of([*flags, "--start-timeout", "2"], tmp_path / "run", at(train, "start", 2, leave_late))
    assert codes == [1, 1, 7] and "of 3 ranks, rank 2 did not start within 2 s" in said


@pytest.mark.parametrize("layout", ["--seqpar 3 --split ordered", "--seqpar 1"])
def test_a_rank_that_stops_ends_the_run_by_name(flags, tmp_path, layout):
    """The start's limit is the default of minutes; with seqpar 1 the others wait inside DDP's sums."""
    hang = at(gradients.Gradients, "_backward", 2, leave_late, call=3)
    codes, said = codes_of([*flags, *layout.split(), "--timeout", "4"], tmp_path / "run", hang)
    assert codes == [1, 1, 7], said
    assert said.count("warning: rank 2 (") == 1, said
    ended = status(tmp_path / "run")
    assert ended["state"] == "failed" and ended["code"] == 1
    assert "Timed out" in ended["why"] and "; rank 2 (" in ended["why"] and "stays at gradients.py" in ended["why"]


def add_one_more(x, group, *more):
    return original(x.new_zeros(len(x) + 1), group, *more)


original = step_times.all_reduce


def test_checked_ranks_that_differ_are_named(flags, tmp_path):
    def hook(rank: int) -> None:
        if rank == 2:
            step_times.all_reduce = add_one_more

    run = [*flags, "--seqpar", "3", "--split", "ordered"]
    codes, said = codes_of([*run, "--debug-collectives"], tmp_path / "checked", hook)
    assert codes == [1, 1, 1], said
    why = status(tmp_path / "checked")["why"]
    assert "world group differs: ranks 0, 1: sum of 6 torch.float64; rank 2: sum of 7 torch.float64" in why
    assert "Traceback" not in said
    codes, said = codes_of(run, tmp_path / "unchecked", hook)  # the control: nobody is told who it was
    assert "group differs" not in said and "rank 2:" not in said


def test_checking_changes_no_bit(flags, tmp_path):
    run = [*flags, "--seqpar", "2", "--mode", "halo", "--epochs", "1"]
    trained(4, [*run, "--debug-collectives"], tmp_path / "checked")
    trained(4, run, tmp_path / "plain")
    assert weights(tmp_path / "checked") == weights(tmp_path / "plain")


def slow_down(slow: int):
    """Returns a hook under whose clock a backward takes 0.1 s, the slow rank's 0.3 s, and each wait for others 5 s."""

    def hook(rank: int) -> None:
        now = [0.0]
        clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic, sleep=time.sleep)
        trainer.time = wait_clock.time = clock
        backward, waiting, count = gradients.Gradients._backward, WaitClock.waiting, WaitClock.count_since_ready

        def slower(self, micro, step, loss_of):
            object.__setattr__(micro, "wait_s", 0.0)
            now[0] += 0.3 if rank == slow else 0.1
            return backward(self, micro, step, loss_of)

        @contextmanager
        def long_waiting(self, on_gpu):
            with waiting(self, on_gpu):
                yield
                now[0] += 5

        def long_sums(self):
            now[0] += 5
            count(self)

        gradients.Gradients._backward, WaitClock.waiting = slower, long_waiting
        WaitClock.count_since_ready = long_sums

    return hook


@pytest.mark.parametrize("layout", [long_case("--seqpar 3 --split ordered"), "--seqpar 1"])
def test_a_slow_rank_is_reported_once_and_nobody_else(flags, tmp_path, layout):
    steps = SKIPPED + WINDOW
    run = [*flags, *f"{layout} --iterations {steps} --epochs 1 --val-every 0 --val-cases 1".split()]
    for name, hook, ranks in (("slow", slow_down(1), [1]), ("even", slow_down(-1), [])):
        launch = trained(3, run, tmp_path / name, hook=hook)
        rows = [row for row in read_metrics(tmp_path / name / "metrics.jsonl") if row["kind"] == "slow"]
        assert [row["rank"] for row in rows] == ranks, rows
        assert launch.said().count("x as long as the others") == len(ranks)
        assert all(row["host"] and row["factor"] == pytest.approx(3) for row in rows)
        assert all(row["seconds"] == pytest.approx(0.3) for row in rows)


def steps_of(own: list[float], count: int = WINDOW) -> list[list[float]]:
    return [own] * count


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], []),
        ([1.0, 1.4, 1.0, 1.2], []),
        ([1.0, 1.0, 2.0, 1.0], [(2, 2.0)]),
        ([1.0, 3.0], [(1, 3.0)]),
        ([0.001, 0.001, 0.04], []),  # noise of the operating system
        ([1.0, 2.0, 1.0, 4.0, 1.0], [(1, 2.0), (3, 4.0)]),
    ],
)
def test_a_rank_is_slow_by_its_median_against_the_others(own, expected):
    judge = SlowRankDetector([f"host{rank}" for rank in range(len(own))])
    for _ in range(SKIPPED):
        assert judge.note([9.0, *own[1:]]) == []
    reported = [slow for seconds in steps_of(own) for slow in judge.note(seconds)]
    assert [(slow.rank, slow.factor) for slow in reported] == expected
    assert all(f"rank {slow.rank} on host{slow.rank} takes" in str(slow) for slow in reported)
    assert not [slow for seconds in steps_of(own) for slow in judge.note(seconds)], "each once"
    once = [own[0]] * (len(own) - 1) + [99.0]
    assert not [slow for seconds in [*steps_of([1.0] * len(own), WINDOW - 1), once] for slow in judge.note(seconds)]


def test_the_flight_recorder_writes_into_the_run_unless_told_otherwise(tmp_path):
    wanted = flight_recorder({}, str(tmp_path), "2.13.0+cpu")
    assert wanted.pop("TORCH_FR_DUMP_TEMP_FILE") == f"{tmp_path}/flight_rank_"
    assert wanted == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    older = flight_recorder({}, str(tmp_path), "2.8.0")
    assert older["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{tmp_path}/flight_rank_" and len(older) == 5
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7", "TORCH_FR_DUMP_TEMP_FILE": "/x", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert flight_recorder(own, str(tmp_path), "2.8.0") == flight_recorder(own, str(tmp_path), "2.13.0") == {}
    assert "TORCH_FR_DUMP_TEMP_FILE" not in flight_recorder({}, "", "2.13.0")
