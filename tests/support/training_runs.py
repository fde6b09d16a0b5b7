"""Tiny training runs for the tests: forked processes that do all that started ones do, and faults to put into them."""

import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import scipy.ndimage  # noqa: F401  scores import it: once here, not in every run

from seqpar.cli import train
from seqpar.cluster import exit_codes
from seqpar.planner.step_counter import StepSetup, count_step
from seqpar.runs.journal import read_metrics
from seqpar.settings.command_line import parse
from seqpar.tasks.classify import validation as class_validation
from seqpar.tasks.pretrain import validation as tile_validation
from seqpar.tasks.segment import validation
from seqpar.tasks.segment.data import open_data
from seqpar.training import after_step, gradients, setup, trainer
from seqpar.weights import checkpoint
from tests.support.folders import nnunet

Hook = Callable[[int], None]
TINY = """
    --preset debug --tile 16 --patch 8 --embed-dim 12 --heads 2 --depth 1 --decoder-width 4 --workers 0 --augment none
    --batch 2 --iterations 2 --epochs 3 --mode gather --val-overlap 0 --lr 0.01 --device cpu --decoder plain
    --no-batch-dice --val-every 1
"""


def tiny_data(root: Path) -> list[str]:
    """Writes five small cases and returns the flags of a tiny run on them."""
    nnunet(root / "Dataset001_Tiny", cases=5)
    return [*TINY.split(), "--data", str(root / "Dataset001_Tiny"), "--cache", str(root / "cache")]


def prepare(flags: Sequence[str]) -> None:
    """Prepares the cache of a run's data, once for all runs on them."""
    count_once()
    open_data(parse([*flags], "debug")[1], True)


@cache
def count_once() -> None:
    """Counts a step without data: what torch makes ready at its first operators is inherited by all ranks."""
    count_step(StepSetup(parse(TINY.split(), "debug")[1], on_gpu=False))


class Launch:
    """Ranks of ``train``, or another act, as forked processes with a launcher's environment; leaving it ends them."""

    def __init__(
        self,
        world: int,
        arguments: Sequence[str],
        out: Path,
        hook: Hook | None = None,
        pictures: bool = False,
        act: Callable[[Sequence[str]], int] = train.act,
        **env: str,
    ) -> None:
        count_once()  # 0.2 s less in every run
        self.act = act
        self.out, self.logs = out, out.with_name(out.name + "-logs")
        self.logs.mkdir(parents=True, exist_ok=True)
        line = [*arguments, "--out", str(out)]
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.pids = [self._fork(rank, world, port, line, hook, pictures, env) for rank in range(world)]
        self.codes: dict[int, int] = {}

    def _fork(
        self, rank: int, world: int, port: int, line: list[str], hook: Hook | None, pictures: bool, env: dict[str, str]
    ) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 99
        faulthandler.disable()  # some are ended on purpose; the parent says how each ended
        try:
            log = os.open(self.logs / f"{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout = open(1, "w", buffering=1, closefd=False)
            sys.stderr = open(2, "w", buffering=1, closefd=False)
            if world > 1:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
                os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= env
            os.fsync = lambda fd: None  # no power is cut here, and disks of test machines are slow
            if not pictures:
                trainer.draw_progress = lambda out: None
                validation.draw_cases = lambda *of: None
                class_validation.draw_scores = lambda *of: None
                tile_validation.draw_tiles = lambda *of: None
            setup.refuse_beyond_free = lambda *of: None  # a quarter of a tiny run's time
            if hook is not None:
                hook(rank)
            code = exit_codes.run(self.act, line)
            sys.stdout.flush()
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *of: object) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def wait(self, timeout: float = 90) -> list[int]:
        """Returns all exit codes, negative for signals; a hang is an error that shows what the ranks said."""
        deadline = time.monotonic() + timeout
        while len(self.codes) < len(self.pids):
            for rank, pid in enumerate(self.pids):
                if rank not in self.codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        self.codes[rank] = os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, f"ranks hang, only {self.codes} ended:\n{self.said()}"
            time.sleep(0.01)
        return [self.codes[rank] for rank in range(len(self.pids))]

    def said(self, rank: int | None = None) -> str:
        """Returns what a rank, or all of them, printed."""
        names = range(len(self.pids)) if rank is None else [rank]
        return "\n".join((self.logs / f"{name}.txt").read_text() for name in names)


def trained(world: int, arguments: Sequence[str], out: Path, expect: int = 0, hook: Hook | None = None, **more: Any):
    """Returns the finished launch after checking its exit codes; every run's ``out`` is its own."""
    with Launch(world, arguments, out, hook, **more) as launch:
        codes = launch.wait()
        assert codes == [expect] * world, f"{codes}\n{launch.said()}"
    return launch


def status(out: Path) -> dict[str, Any]:
    return json.loads((out / "status.json").read_text())


def losses(out: Path) -> list[float]:
    rows = [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(len(rows))), "each step is there once, in order"
    return [row["loss"] for row in rows]


def farthest(a: list[float], b: list[float]) -> float:
    """Returns the largest relative difference of two runs' losses."""
    assert len(a) == len(b) > 0
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def scores(out: Path) -> list[dict[str, Any]]:
    return [row["dice"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "val"]


def weights(out: Path) -> bytes:
    return (out / "model.safetensors").read_bytes()


def at(owner: Any, name: str, rank: int, act: Callable[[], None], call: int = 1, after: bool = False) -> Hook:
    """Returns a hook that acts on ``rank`` at the given call of a function, before or after it."""

    def hook(here: int) -> None:
        if here != rank:
            return
        original, calls = getattr(owner, name), [0]

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            due = calls[0] == call
            if due and not after:
                act()
            result = original(*args, **kwargs)
            if due and after:
                act()
            return result

        setattr(owner, name, wrapped)

    return hook


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def signalled(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


# The moments at which a rank of a run can be lost: each names a function of which the call is cut short.
def moments(last: int) -> dict[str, Hook]:
    """Returns hooks that kill a rank: rank ``last`` where every rank acts, the first where it alone does."""
    return {
        "in a step": at(gradients.Gradients, "_backward", last, die, call=2),
        "before a step is agreed": at(after_step.AfterStep, "decide", last, die, call=2),
        "in validation": at(validation.SegmentationValidation, "_predict", last, die),
        "before a write": at(checkpoint, "_write", last, die),
        "amid a write": at(checkpoint, "write_tensors", 0, die, call=2),
        "between write and rename": at(checkpoint, "_commit", 0, die),
        "between rename and latest": at(checkpoint, "write_link", 0, die),
        "between latest and purge": at(checkpoint, "_purge", 0, die),
        "amid the purge": at(checkpoint.shutil, "rmtree", 0, die, call=2),
    }
