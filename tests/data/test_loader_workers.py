"""A loader's workers: they prepare ahead, have one thread and no signals, and never outlive their trainer."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from seqpar.parallel.layout import Layout
from seqpar.parallel.mesh import Mesh
from seqpar.settings.field import A_YEAR_S
from tests.support.cases import Telling, lines, load, noise_source

TILE = (8, 8, 8)
ROOT = Path(__file__).parents[2]


def test_workers_keep_prefetch_tiles_ready_and_no_more(alone: Mesh, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with load(alone, noise_source(count=1, log=str(log)), steps=range(50), workers=2, prefetch=3) as loader:
        wait_until(lambda: len(lines(log)) >= 6)
        time.sleep(0.3)
        assert len(lines(log)) == 6
        next(loader)
        wait_until(lambda: len(lines(log)) == 7)
        assert len(loader) == 49
    with pytest.raises(StopIteration):
        next(loader)


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def test_workers_have_one_thread_and_seeds_of_their_own_per_tile(alone: Mesh) -> None:
    torch.set_num_threads(2)
    try:
        inline, worked = (list(load(alone, noise_source(Telling()), workers=n, steps=range(4))) for n in (0, 3))
    finally:
        torch.set_num_threads(1)
    layout, marks = Layout.of(TILE, 4), []
    for parts in (inline, worked):
        marks.append(torch.stack([layout.join([part.image])[0, 1, 0, 0] for part in parts]))
    assert torch.equal(marks[0][:, :3], marks[1][:, :3]) and len(marks[0][:, :3].unique()) == 12
    assert (marks[0][:, 3] == 2).all() and (marks[1][:, 3:5] == 1).all()
    assert (marks[1][:, 5:7] == 1).all() and (marks[0][:, 5:7] == 0).all()  # signals are the parent's to judge


def test_signals_to_the_job_end_no_worker_and_run_no_handler_there(alone: Mesh, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    names = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
    before = {name: signal.signal(name, lambda *_: ran.write_text("here")) for name in names}
    try:
        with load(alone, noise_source(), steps=range(4), workers=1) as loader:
            for name in names:
                os.kill(loader.worker_ids[0], name)
            assert len(list(loader)) == 4
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    assert not ran.exists()


def test_a_stopped_worker_is_named_after_the_time_limit(alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone.world.watch, "limit_s", 0.3)
    with load(alone, noise_source(), steps=range(4), workers=1, prefetch=1) as loader:
        (worker,) = loader.worker_ids
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(TimeoutError, match=f"worker {worker} was stopped by a signal: .* step .*--timeout"):
            list(loader)
        assert not loader.worker_ids
    monkeypatch.setattr(alone.world.watch, "limit_s", A_YEAR_S)  # the most that --timeout takes
    with load(alone, noise_source(), steps=range(4), workers=1) as loader:
        assert len(list(loader)) == 4


SCRIPT = """

import os, signal, sys, time
from tests.support.cases import noise_source
import torch
import seqpar.data.sampling.loader as loader_module
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.loader import Loader
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.layout import Layout
from seqpar.parallel.rendezvous import join

if __name__ == "__main__":
    torch.set_num_threads(2)  # a threaded autograd before the fork, as training has it
    torch.nn.Conv3d(2, 8, 3)(torch.randn(2, 2, 24, 24, 24)).square().mean().backward()
    mesh = join(Launcher("test"), None, 1, torch.device("cpu"))
    loader_module.start_method = lambda device: {method!r}
    source = noise_source(augment("paper", (8, 8, 8)), count=3, wait_s=0.5)
    loader = Loader(source, Layout.of(8, 4), mesh, batch=1, steps=range(100), workers=3)
    next(loader)
    print(*loader.worker_ids, flush=True)
    end = {end!r}
    if end == "raise":
        raise KeyError("a mistake")
    if end == "exit":
        sys.exit(7)
    if end == "wait":
        time.sleep(600)
"""
Trainer = tuple[subprocess.Popen[str], list[int]]  # and its workers' process ids
ENDS = {"exit": ("exit", "fork"), "raise": ("raise", "fork"), "killed fork": ("wait", "fork"),
        "killed forkserver": ("wait", "forkserver"), "ctrl-c": ("wait", "fork")}  # fmt: skip


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Trainer]]:
    """A function that returns one of the trainers of ENDS, which start at once; all that is left of them is killed."""
    started = dict[str, subprocess.Popen[str]]()
    for name, (end, method) in ENDS.items():
        script = tmp_path_factory.mktemp("trainer") / "trainer_script.py"
        script.write_text(SCRIPT.format(end=end, method=method))
        started[name] = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip

    def trainer_of(name: str) -> Trainer:
        trainer = started[name]
        assert trainer.stdout is not None and trainer.stderr is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(pids) == 3, trainer.stderr.read()
        return trainer, pids

    yield trainer_of
    for trainer in started.values():
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.communicate()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.started
@pytest.mark.parametrize("end, code", [("exit", 7), ("raise", 1)])
def test_a_program_that_ends_without_close_does_not_hang(
    end: str, code: int, trainers: Callable[[str], Trainer]
) -> None:
    trainer, pids = trainers(end)
    assert trainer.wait(60) == code
    wait_until(lambda: not any(map(runs, pids)), 5)


@pytest.mark.started
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_killed_trainer_leaves_no_process(method: str, trainers: Callable[[str], Trainer]) -> None:
    trainer, pids = trainers(f"killed {method}")
    assert all(map(runs, pids)) and (parent_of(pids[0]) == trainer.pid) == (method == "fork")
    trainer.kill()
    assert trainer.wait(60) == -signal.SIGKILL
    wait_until(lambda: not any(map(runs, pids)), 5)
    wait_until(lambda: not session(trainer.pid), 5)


def session(leader: int) -> list[str]:
    """Returns what still runs of a session: workers, and what a start method brings along."""
    listing = subprocess.run(["ps", "-o", "pid=,stat=,args=", "-s", str(leader)], capture_output=True, text=True).stdout
    return [line for line in listing.splitlines() if " Z" not in line]


@pytest.mark.started
def test_ctrl_c_ends_all(trainers: Callable[[str], Trainer]) -> None:
    trainer, pids = trainers("ctrl-c")
    os.killpg(trainer.pid, signal.SIGINT)  # a terminal sends it to all
    assert trainer.wait(60) == -signal.SIGINT
    wait_until(lambda: not any(map(runs, pids)), 5)
