"""Attacks on running programs: ranks that are killed, and helpers that never answer."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from seqpar.parallel.processes import die_with_parent
from seqpar.weights.checkpoint import find, read_progress
from tests.attacks.attack import NOBODY, TINY, Attack
from tests.support.folders import nnunet
from tests.support.pages import ROOT
from tests.support.predictions import make_run

TWO_RANKS = f"train {TINY} --data D --cache cache --seqpar 2 --iterations 1000 --epochs 1 --out run"


def _wait_for(what: Callable[[], object], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "what was to be attacked did not come in time"
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    words = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return sorted(int(word) for line in words for word in line)


def _kill(rank: int, once: str = "") -> Callable[[int, Path], None]:
    """Returns what kills a rank of two: as soon as both are there, or once a file holds something."""

    def kill(pid: int, here: Path) -> None:
        _wait_for(lambda: len(_children(pid)) == 2)
        if once:
            _wait_for(lambda: (here / once).is_file() and (here / once).stat().st_size)
        os.kill(_children(pid)[rank], signal.SIGKILL)

    return kill


def _interrupt(once: str, number: int = signal.SIGINT) -> Callable[[int, Path], None]:
    """Returns what presses Ctrl-C, or sends another signal, once a folder is there."""

    def interrupt(pid: int, here: Path) -> None:
        _wait_for((here / once).exists)
        os.killpg(pid, number)

    return interrupt


ATTACKS = [
    Attack(
        f"rank {rank} is killed {when}",
        types=TWO_RANKS,
        make=lambda here: nnunet(here / "D", 5),
        meanwhile=_kill(rank, file),
        code=1,
        says=f"error: rank {rank} was killed by SIGKILL",
        started=True,
    )
    for rank in (0, 1)
    for when, file in (("at start", ""), ("in training", "run/metrics.jsonl"))
]
ATTACKS += [
    Attack(
        f"Ctrl-C in {line.split()[0]}",
        types=line,
        make=lambda here: (nnunet(here / "D", 60), make_run(here / "run")),
        meanwhile=_interrupt(file),
        code=130,
        says=words,
        keeps="D run",
    )
    for line, file, words in (
        ("phantom --out P --cases 999 --workers 2", "P", "error: interrupted"),
        ("predict run -i D -o out", "out", "error: interrupted"),
        ("prepare D --out cache --workers 0", "cache", "interrupted; what is finished is kept"),
    )
]
ATTACKS += [
    Attack(
        "a sweep on a Ray that is not there",
        types=f"tune --space lr=1e-3,1e-4 --ray 127.0.0.1:9 {TINY} --data D --cache cache --out sweep",
        make=lambda here: (pytest.importorskip("ray"), nnunet(here / "D", 5)),
        code=1,
        says=("error: --ray 127.0.0.1:9: no cluster answers there within 20 s", "Connection refused"),
        started=True,
        within_s=90,  # 30 where nobody else computes
    ),
    Attack(
        "a sweep in which a point fails",
        types=f"tune --space lr=1e-3,1e+30 {TINY} --data D --cache cache --iterations 4 --epochs 1 --out sweep",
        make=lambda here: (pytest.importorskip("ray"), nnunet(here / "D", 5)),
        code=5,
        says=("lr-1e+30 failed, code 5: ", "1 of 2 points", "error: --out sweep: not all points have finished, for"),
        started=True,
        within_s=240,
    ),
]


def _imports_torch(pid: int, here: Path) -> None:
    """Presses Ctrl-C while the program's imports last."""
    at = Path(f"/proc/{pid}")
    _wait_for(lambda: "seqpar.cli" in (at / "cmdline").read_text())  # before that it is a fork, which has torch
    _wait_for(lambda: "libtorch" in (at / "maps").read_text())
    os.kill(pid, signal.SIGINT)


def _kill_launcher(number: int) -> Callable[[int, Path], None]:
    """Returns what sends a signal to the process that started the ranks, once they train."""

    def kill(pid: int, here: Path) -> None:
        _wait_for(lambda: _trains(here))
        os.kill(pid, number)

    return kill


class _Terminal:
    """A terminal that a program is started in."""

    def open(self) -> None:
        self.ours, self.theirs = os.openpty()

    def enter(self) -> None:
        """Goes on in a fork, whose terminal it is."""
        os.close(self.ours)
        parent = os.getpid()
        if os.fork():  # this process leads a group, and cannot begin a session
            os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
        die_with_parent(parent)
        os.setsid()
        fcntl.ioctl(self.theirs, termios.TIOCSCTTY, 0)
        for stream in (1, 2):
            os.dup2(self.theirs, stream)

    def close_once_it_trains(self, pid: int, here: Path) -> None:
        os.close(self.theirs)
        os.set_blocking(self.ours, False)

        def trains() -> bool:
            with suppress(OSError):  # nothing is there to be read
                os.read(self.ours, 1 << 16)
            return _trains(here)

        _wait_for(trains)
        os.close(self.ours)


TERMINAL = _Terminal()


def _trains(here: Path) -> bool:
    return (here / "run/metrics.jsonl").is_file() and (here / "run/metrics.jsonl").stat().st_size > 0


def _hang_up_and_end(pid: int, here: Path) -> None:
    _wait_for(lambda: _trains(here))
    os.kill(pid, signal.SIGHUP)
    os.kill(pid, signal.SIGTERM)


def _has_saved(why: str) -> Callable[[Path, str], None]:
    """Returns what asserts that a run was left for a reason, and saved."""

    def check(here: Path, said: str) -> None:
        _nobody_works(here, said)
        status = json.loads((here / "run/status.json").read_text())
        assert (status["state"], status["code"], status["why"].split()[0]) == ("preempted", 75, why), status
        assert read_progress(find(here / "run/checkpoints")).step == status["step"] > 0

    return check


def _kill_while_saving(pid: int, here: Path) -> None:
    """Kills the process that started the ranks while they write the files of a second checkpoint or a later one."""
    saved = here / "run/checkpoints"
    _wait_for(lambda: (saved / "latest").exists() and any(saved.glob("step-*.tmp")))
    os.kill(pid, signal.SIGKILL)


def _keeps_a_checkpoint(here: Path, said: str) -> None:
    """Asserts that the run resumes from the checkpoint that is whole, and that a resumed run ends as asked."""
    _nobody_works(here, said)
    step = read_progress(find(here / "run/checkpoints")).step  # raises an error where no checkpoint is whole
    again = ["train", "--resume", "--out", "run", "--seqpar", "2", "--time-limit", "0.1"]
    command = [sys.executable, "-m", f"seqpar.cli.{again[0]}", *again[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    resumed = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=120)
    assert (resumed.returncode, f"resumed at step {step} of 1000" in resumed.stdout) == (75, True), resumed
    assert read_progress(find(here / "run/checkpoints")).step > step


def _nobody_works(here: Path, said: str) -> None:
    """Waits until no process has its working folder there."""

    def is_left() -> bool:
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with suppress(OSError):  # of another user, or gone
                if os.readlink(path) == str(here):
                    return True
        return False

    _wait_for(lambda: not is_left(), 20)


def _begins_when_typed_again(here: Path, said: str) -> None:
    assert not (here / "run").exists(), "it left too late for this row"
    words = f"train {TINY} --data D --cache cache --iterations 2 --epochs 1 --out run".split()
    command = [sys.executable, "-m", f"seqpar.cli.{words[0]}", *words[1:]]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    again = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=120)
    status = json.loads((here / "run/status.json").read_text())
    assert (again.returncode, status["state"], status["step"]) == (0, "finished", 2), again


def _predicted(here: Path, said: str) -> None:
    assert len(list((here / "out").glob("*.nii.gz"))) == 5


ATTACKS += [
    Attack(
        "Ctrl-C while a program is imported",
        types="predict run -i D -o out",
        meanwhile=_imports_torch,
        code=130,
        says="error: interrupted",
        started=True,
    ),
    *(
        Attack(
            f"the launcher ends by {signal.Signals(number).name}",
            types=TWO_RANKS,
            make=lambda here: nnunet(here / "D", 5),
            meanwhile=_kill_launcher(number),
            after=_nobody_works,
            code=code,
            says="step",
            started=True,
        )
        for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGHUP, 75), (signal.SIGTERM, 75))
    ),
    Attack(
        "the terminal of a training is closed",
        types=TWO_RANKS,
        make=lambda here: (nnunet(here / "D", 5), TERMINAL.open()),
        before=TERMINAL.enter,
        meanwhile=TERMINAL.close_once_it_trains,
        after=_has_saved("SIGHUP"),
        code=75,
        says="",
        started=True,
    ),
    Attack(
        "the terminal of a training by nohup is closed",
        types=TWO_RANKS,
        make=lambda here: nnunet(here / "D", 5),
        before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        meanwhile=_hang_up_and_end,
        after=_has_saved("SIGTERM"),
        code=75,
        says="left at step",
        started=True,
    ),
    Attack(
        "TERM before the run folder is there",
        types=f"train {TINY} --data D --cache cache --iterations 2 --epochs 1 --out run",
        make=lambda here: nnunet(here / "D", 60),
        meanwhile=_interrupt("cache", signal.SIGTERM),
        after=_begins_when_typed_again,
        code=143,
        says="stopped before training began; run the same command again",
        started=True,
    ),
    Attack(
        "the launcher is killed while a checkpoint is saved",
        types=f"{TWO_RANKS} --checkpoint-minutes 1e-9",
        make=lambda here: nnunet(here / "D", 5),
        meanwhile=_kill_while_saving,
        after=_keeps_a_checkpoint,
        code=-signal.SIGKILL,
        says="step",
        started=True,
    ),
    Attack(
        "all standard streams are closed",
        types="predict run -i D -o out",
        make=lambda here: (nnunet(here / "D", 5), make_run(here / "run")),
        after=_predicted,
        code=0,
        says="",
        closed=(0, 1, 2),
        started=True,
    ),
]


def _limit(which: int, number: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(which, (number, number))


def _start_nothing(most: int = 1) -> None:
    """Lets this process start neither process nor thread, or up to ``most`` with it; root's are not counted."""
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    if os.geteuid() == 0:
        os.setuid(NOBODY)


def _lose_folder() -> None:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")


def _stop_worker(pid: int, here: Path) -> None:
    """Stops the worker of a run, once it trains."""
    _wait_for(lambda: _trains(here))
    _wait_for(lambda: _children(pid), 20)
    os.kill(_children(pid)[0], signal.SIGSTOP)


ATTACKS += [
    Attack(
        f"{line.split()[0]} {where}",
        types=line,
        code=3,
        says=says,
        make=lambda here: (nnunet(here / "D", 5), make_run(here / "run")),
        before=before,
        keeps="D run",
    )
    for where, line, before, says in (
        (
            "with a limit of files' sizes",
            f"train {TINY} --data D --cache cache --out o",
            _limit(resource.RLIMIT_FSIZE, 3000),
            "o/config.json: File too large: 3000 bytes are allowed; raise the limit, as by ulimit -f unlimited",
        ),
        (
            "with a limit of open files",
            f"train {TINY} --data D --cache cache --out o --seqpar 2",
            _limit(resource.RLIMIT_NOFILE, 64),
            "open files: too many open files for 2 ranks, each of which needs 72: 64 are allowed; raise the limit",
        ),
        *(
            ("with a limit of processes", line, _start_nothing, "1 are allowed; raise the limit, as by ulimit -u 4096")
            for line in ("prepare D --out o", "predict run -i D -o o")
        ),
        *(
            (
                f"with a limit of {most} processes and 2 workers",
                line,
                partial(_start_nothing, most),  # refused: a worker, or one of the two threads that lead them
                f"{most} are allowed; raise the limit, as by ulimit -u 4096",
            )
            for line, limits in (
                ("evaluate D/labelsTr D/labelsTr --workers 2 --json x.json --csv x.csv", (2, 3, 4)),
                ("phantom --out p --cases 4 --size 16 16 16 --workers 2", (2, 4)),
            )
            for most in limits
        ),
        ("from a folder that is gone", "predict run -i D -o out", _lose_folder, "the current folder: was deleted"),
        (
            "to a name that is too long",
            f"predict run -i D -o {'x' * 300}",
            lambda: None,
            "File name too long: mostly 255 bytes are allowed between two slashes; shorten it",
        ),
    )
]
ATTACKS += [
    Attack(
        "train, started in a folder that is gone",  # MKL ends a process that imports torch there
        types=f"train {TINY} --seqpar 2",
        code=3,
        says="error: the current folder: was deleted; change to one that exists (cd), and start again",
        before=_lose_folder,
        started=True,
    ),
    Attack(
        "a stopped worker of a single rank",
        types=f"train {TINY} --workers 1 --data D --cache cache --iterations 9999 --epochs 1 --timeout 10 --out run",
        make=lambda here: nnunet(here / "D", 5),
        meanwhile=_stop_worker,
        after=_nobody_works,
        code=1,
        says=("error: rank 0 on ", "was stopped by a signal: it has not finished case ", "larger --timeout"),
        slow=True,
    ),
]
