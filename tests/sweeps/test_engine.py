"""How a run of a list is started: by srun in a Slurm job, with signals passed on; else as ranks on this machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from seqpar.data.files import read_json, write_json
from seqpar.runs.metrics_tail import MetricsTail
from seqpar.runs.run_lock import RunLock
from seqpar.runs.sweep_folder import Point, Sweep
from seqpar.sweeps import one_by_one, ray_cluster
from seqpar.sweeps.ray_cluster import require_answer

SRUN = """#!/bin/bash
trap 'echo told >> "$0.args"; exit 75' TERM
printf '%s\\n' "$*" > "$0.args"
for _ in $(seq 100); do sleep 0.05; [ -z "$WAITS" ] && exit 5; done
"""


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program srun that writes what it is asked for, and ends with 5, or waits for a signal where WAITS is set."""
    path = tmp_path / "srun"
    path.write_text(SRUN)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("WAITS", raising=False)
    return tmp_path / "srun.args"


def test_in_a_slurm_job_a_run_is_a_step_of_its_own(srun: Path) -> None:
    assert one_by_one.start_ranks(16, ["--seqpar", "4", "--out", "a b"], []) == 5
    words = srun.read_text().split()
    assert words[:6] == ["-n", "16", "--kill-on-bad-exit=1", sys.executable, "-u", "-m"]
    assert srun.read_text().endswith("seqpar.cli.train --seqpar 4 --out a b\n")


def test_a_signal_reaches_the_step_and_is_known_afterwards(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAITS", "yes")
    usual, signals = signal.getsignal(signal.SIGTERM), list[int]()

    def ask() -> None:
        while not (srun.exists() and srun.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert one_by_one.start_ranks(2, [], signals) == 75
    asking.join()
    assert signals == [signal.SIGTERM] and "told" in srun.read_text()
    assert signal.getsignal(signal.SIGTERM) == usual


def test_a_closed_terminal_does_not_end_ray_itself() -> None:
    """Also where the sweep leads the terminal's session: then Ray's processes are in the group that it is closed to."""
    usual = signal.getsignal(signal.SIGHUP)
    with ray_cluster._other_group():
        asked = "import signal; print(signal.getsignal(signal.SIGHUP).name)"
        assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True).stdout == "SIG_IGN\n"
    assert signal.getsignal(signal.SIGHUP) == usual


def test_a_signal_that_comes_while_the_step_is_started_reaches_it(srun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAITS", "yes")
    start, signals = one_by_one.start_process, list[int]()
    usual = signal.signal(signal.SIGTERM, lambda number, frame: None)  # else the control would end this process

    def start_and_ask(command: list[str], env: dict[str, str]) -> Any:
        step = start(command, env)
        while not (srun.exists() and srun.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        return step

    monkeypatch.setattr(one_by_one, "start_process", start_and_ask)
    try:
        assert one_by_one.start_ranks(2, [], signals) == 75
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert signals == [signal.SIGTERM] and "told" in srun.read_text()


def test_elsewhere_the_ranks_are_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    asked = list[object]()
    monkeypatch.setattr(one_by_one, "run_local", lambda *of: asked.extend(of) or 3)
    signals = list[int]()
    assert one_by_one.start_ranks(2, ["--tile", "16"], signals) == 3
    assert asked == [2, ["-m", "seqpar.cli.train", "--tile", "16"], signals]


@pytest.mark.parametrize("code", [75, 138, 143])
def test_a_training_that_was_asked_to_leave_before_it_began_has_not_failed(code: int, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from seqpar.sweeps import trial

    asked = object.__new__(trial.Trial)  # Ray alone makes them whole
    asked.task = trial.TrialTask("lr-1", (), 1, str(tmp_path), {})
    asked.tail, asked.result = MetricsTail(tmp_path / "lr-1/metrics.jsonl"), {}
    with pytest.raises(RuntimeError, match=f"lr-1 ended with exit code {code}"):
        asked._ended([code])
    (tmp_path / trial.LEAVING).touch()
    assert asked._ended([code]) == {"code": 75, "done": True}


def test_ray_writes_below_a_relative_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray and pyarrow take a relative path for an address, and refuse it."""
    ray_engine = pytest.importorskip("seqpar.sweeps.ray_engine")
    places = list[str]()

    class Tuner:
        def __init__(self, *of: object, run_config: Any, **more: object) -> None:
            places.append(run_config.storage_path)

        def fit(self) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_engine.tune, "Tuner", Tuner)
    cluster = ray_engine.Cluster(devices=1, on_gpu=False, bundle={"CPU": 1.0}, own=[])
    engine = ray_engine.SideBySide(cluster, 1)
    root = Path("sweeps/first")
    engine._fit([], 0, root, ray_engine._Watch(ray_engine.LiveTable(root, 1, 0), root, []))
    assert places == [str(tmp_path / "sweeps/first/.ray")]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"\x00\x00\x06\x04\x00\x00\x00\x00\x00", ""),  # as a server of gRPC begins
        (b"HTTP/1.1 400", "what listens there is not Ray"),
        (b"", "timed out"),
        (None, "Connection refused"),
    ],
)
def test_a_cluster_that_does_not_answer_is_refused_soon(said: bytes | None, why: str, monkeypatch) -> None:
    """Ray itself would wait for minutes for one that is not there, or hangs."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place, kept = f"127.0.0.1:{server.getsockname()[1]}", list[socket.socket]()

        def answer() -> None:
            with contextlib.suppress(OSError):
                while said is not None:
                    kept.append(server.accept()[0])
                    kept[-1].sendall(said)

        if said is None:
            server.close()
        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("RAY_ADDRESS", place)
        for address, named in ((place, "there"), ("auto", f"at {place}")):
            expected = pytest.raises(ConnectionError, match=rf"--ray {address}: no cluster answers {named} .*{why}")
            with expected if why else contextlib.nullcontext():
                require_answer(address, seconds=0.4 if why == "timed out" else 20)


def test_the_first_lines_of_a_sweep_say_what_its_numbers_count() -> None:
    sweep_runs = pytest.importorskip("seqpar.sweeps.sweep_runs")
    assert sweep_runs._points_to_train(2, 0) == "2 points to train"
    assert sweep_runs._at_a_time(2, 1, 2, False) == "each on 1 core, 2 at a time on 2 cores"
    assert sweep_runs._points_to_train(8, 3) == "8 points to train, of which 3 ended before"
    assert sweep_runs._at_a_time(5, 2, 4, True) == "each on 2 GPUs, 2 at a time on 4 GPUs"


def test_a_failed_sweep_says_why_in_its_status(tmp_path: Path) -> None:
    sweep_runs = pytest.importorskip("seqpar.sweeps.sweep_runs")
    names = [f"lr-{n}" for n in range(6)]
    for name in names:
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "status.json", {"state": "failed", "why": "loss nan", "code": 5})
    for count, state, why in (
        (1, "failed", "lr-0 failed, code 5: loss nan"),
        (6, "failed", f"{'; '.join(f'{name} failed, code 5: loss nan' for name in names[:4])}; and 2 more"),
        (0, "failed", "not all points have finished"),
        (1, "preempted", ""),
    ):
        sweep = Sweep({}, tuple(Point(name, {}) for name in names[:count]))
        lock = RunLock(tmp_path)
        lock.take()
        sweep_runs._Record(tmp_path, sweep, lock).write(state, 5)
        lock.release()
        status = read_json(tmp_path / "status.json")
        assert (status["state"], status["why"], status["code"]) == (state, why, 5)


def test_a_point_with_the_run_of_another_is_to_be_moved_away(tmp_path: Path) -> None:
    ray_engine = pytest.importorskip("seqpar.sweeps.ray_engine")
    cluster = ray_engine.Cluster(devices=1, on_gpu=False, bundle={"CPU": 1.0}, own=[])
    planned = ray_engine.PlannedRun("lr-0.003", "debug", {"lr": 0.003})
    command = ["train", "--preset", "debug", "--lr", "0.001", "--out", "lr-0.001"]
    (tmp_path / "lr-0.003").mkdir()
    write_json(tmp_path / "lr-0.003" / "config.json", {"history": [{"command": command}], "layout": {"ranks": 1}})
    told = "made with --lr 0.001, and now --lr 0.003: rename this folder, and the sweep trains the point again"
    with pytest.raises(ValueError, match=told):
        ray_engine.SideBySide(cluster, 1).make([planned], tmp_path)
