"""Started processes end with their parent and get its signals; the exit code that tells most is passed on."""

import ast
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from seqpar.data.workers import map_in_processes
from seqpar.parallel import processes
from seqpar.parallel.processes import (
    PARENT,
    call_in_fork,
    calls_in_forks,
    end_process,
    environment_of_ranks,
    forward_signals,
    shell_code,
    start_process,
    start_worker,
    wait_for_all,
)
from tests.support.folders import child, exit_code

# starts a process that would run for long, prints its id and waits to be killed itself
STARTER = """
import os, signal, sys
from seqpar.parallel.processes import PARENT, start_python
code = "import time; from seqpar.parallel.processes import die_with_parent as die; die(); print(1, flush=True); "
child = start_python(["-c", code + "time.sleep(60)"], {**os.environ, PARENT: str(os.getpid())})
print(child.pid, flush=True)
signal.pause()
"""

# gets Ctrl-C while forks work, and again while it waits for them
TWICE = """
import os, signal, threading, time
from seqpar.parallel.processes import calls_in_forks

def interrupt():
    for seconds in (0.7, 0.5):
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
for call in calls_in_forks(time.sleep, [2] * 8, 2):
    call.result()
"""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def shell(*texts: str) -> list[subprocess.Popen]:
    return [start_process(["/bin/sh", "-c", text]) for text in texts]


@pytest.mark.parametrize(
    ("texts", "code"),
    [
        (("exit 0", "exit 0"), 0),
        (("exit 1", "exit 4"), 4),
        (("exit 75", "exit 75"), 75),
        (("kill -9 $$", "exec sleep 60"), -signal.SIGKILL),
        (("exec sleep 60", "kill -9 $$"), -signal.SIGKILL),
    ],
)
def test_the_exit_code_that_tells_most_is_passed_on(texts: tuple[str, str], code: int) -> None:
    assert wait_for_all(shell(*texts), grace_s=0.3) == code


def test_a_process_dies_with_the_parent_that_the_environment_names() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    words = {starter.stdout.readline().strip() for _ in range(2)}
    (child,) = (int(word) for word in words - {"1"})
    assert runs(child)
    starter.kill()
    starter.communicate()
    wait_until(lambda: not runs(child))


def test_a_rank_is_asked_to_leave_by_the_end_of_its_torchrun(tmp_path: Path) -> None:
    """The kernel tells it, even if torchrun was killed and could tell nobody."""
    saved = tmp_path / "saved"
    code = f"import pathlib, signal, time; asked = lambda *_: pathlib.Path({str(saved)!r}).touch(); "
    code += "signal.signal(signal.SIGTERM, asked); "
    code += "from seqpar.parallel.processes import die_with_parent as die; die(); print(1, flush=True); time.sleep(60)"
    agent = f"import os, subprocess, sys; os.environ['TORCHELASTIC_RUN_ID'] = 'x'; code = {code!r}\n"
    agent += "process = subprocess.Popen([sys.executable, '-c', code]); print(process.pid, flush=True); process.wait()"
    alone = {name: value for name, value in os.environ.items() if not name.startswith("SEQPAR_PARENT")}
    starter = subprocess.Popen([sys.executable, "-c", agent], stdout=subprocess.PIPE, text=True, env=alone)
    assert starter.stdout is not None
    (rank,) = (int(word) for word in {starter.stdout.readline().strip() for _ in range(2)} - {"1"})
    starter.kill()
    try:
        wait_until(saved.exists)
    finally:
        os.kill(rank, signal.SIGKILL)
        starter.communicate()


def test_a_process_whose_parent_ended_before_does_not_begin() -> None:
    code = "from seqpar.parallel.processes import die_with_parent; die_with_parent(); print('goes on')"
    other = str(os.getppid())  # not the parent of what is started here
    ended = subprocess.run([sys.executable, "-c", code], env={**os.environ, PARENT: other}, capture_output=True)
    assert ended.returncode == 1 and not ended.stdout
    alone = {name: value for name, value in os.environ.items() if not name.startswith("SEQPAR_PARENT")}
    assert subprocess.run([sys.executable, "-c", code], env=alone, capture_output=True).stdout == b"goes on\n"


def test_signals_are_forwarded_also_those_that_came_first() -> None:
    usual, signals = signal.getsignal(signal.SIGTERM), list[int]()
    (process,) = shell("trap 'exit 75' TERM; while :; do sleep 0.05; done")
    time.sleep(0.3)  # the trap is set
    with forward_signals([process], signals):
        os.kill(os.getpid(), signal.SIGTERM)
        assert process.wait(20) == 75
    assert signals == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) == usual
    (young,) = shell("exec sleep 60")
    with forward_signals([young], signals):
        assert shell_code(young.wait(20)) == 128 + signal.SIGTERM


def test_a_closed_terminal_asks_to_leave_unless_the_program_was_started_to_ignore_it() -> None:
    before, signals = signal.signal(signal.SIGHUP, signal.SIG_IGN), list[int]()
    try:
        with forward_signals([], signals):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not signals
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with forward_signals([], signals):
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL and signals == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_process_that_does_not_leave_is_killed() -> None:
    stubborn, polite = shell("trap '' TERM; while :; do sleep 0.05; done", "exec sleep 60")
    time.sleep(0.3)
    end_process(stubborn, grace_s=0.3)
    end_process(polite)
    assert (stubborn.returncode, polite.returncode) == (-signal.SIGKILL, -signal.SIGTERM)


def test_what_a_launcher_said_of_this_process_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "SLURM_PROCID", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    passed = environment_of_ranks(keep=("TORCHELASTIC_ERROR_FILE",))
    assert {"TORCHELASTIC_ERROR_FILE", "SLURM_JOB_ID", "PATH"} <= passed.keys()
    assert not {"LOCAL_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID"} & passed.keys()


def answer(pipe: Connection, number: int) -> None:
    pipe.send((number, os.getppid(), signal.getsignal(signal.SIGTERM) == signal.SIG_IGN))
    pipe.recv()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_ignores_signals_and_ends_with_the_process_that_it_works_for(method: str) -> None:
    process, pipe = start_worker(answer, (7,), method)
    number, parent, ignores = pipe.recv()
    assert number == 7 and ignores and (parent == os.getpid()) == (method == "fork")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert process.is_alive()
    if method == "fork":  # it holds both ends of the pipe
        pipe.send("done")
    pipe.close()
    process.join(20)
    assert process.exitcode == (0 if method == "fork" else 1)


def interrupted_in_a_fork(start: Callable[[], object]) -> None:
    """Has Ctrl-C come within a callback of a fork, where Python drops exceptions; raises if it is lost."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # takes what the main thread blocks
    os.register_at_fork(before=lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.2)))
    try:
        start()
    except KeyboardInterrupt:
        assert not multiprocessing.active_children()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        return
    raise AssertionError("the signal was lost")


@pytest.mark.parametrize(
    "start",
    [
        lambda: start_worker(answer, (7,)),
        lambda: call_in_fork(time.sleep, 20),
        lambda: list(calls_in_forks(abs, [1, 2], 2)),
        lambda: list(map_in_processes(lambda item, tell: time.sleep(20), [1, 2], 2)),
    ],
    ids=["start_worker", "call_in_fork", "calls_in_forks", "map_in_processes"],
)
def test_a_signal_within_a_fork_is_not_lost(start: Callable[[], object]) -> None:
    assert exit_code(child(lambda: interrupted_in_a_fork(start))) == 0


def test_a_second_signal_does_not_keep_a_process_that_waits_for_its_forks() -> None:
    process = start_process([sys.executable, "-c", TWICE], stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=40)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in said


def test_a_fork_that_computes_has_the_handlers_of_its_parent() -> None:
    before = signal.signal(signal.SIGTERM, handler := lambda number, frame: None)
    try:
        assert call_in_fork(lambda: signal.getsignal(signal.SIGTERM) is handler)
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def starts_a_process(path: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(isinstance(call, ast.Attribute) and call.attr in ("Popen", "Process", "fork") for call in calls)


def test_one_module_starts_processes() -> None:
    """Only there they are tied to their parent. Ray's own processes need another process group, and one to lead it."""
    package = Path(processes.__file__).parents[1]
    starting = {str(path.relative_to(package)) for path in package.rglob("*.py") if starts_a_process(path)}
    assert starting == {"parallel/processes.py", "sweeps/ray_cluster.py"}
