"""What a check of the acceptance program gets and returns, and how it runs the programs of this package."""

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seqpar.parallel.launcher import SHARE_GPU
from seqpar.parallel.processes import start_python
from seqpar.runs.journal import read_metrics

RIGHT, WRONG, MEASURED, LEFT_OUT = "right", "wrong", "measured", "left out"
COMPILED = "inductor"  # the folder next to the runs into which torch compiles
# Set by schedulers and launchers; the programs here start their own ranks.
_LAUNCHERS = ("SLURM_", "PMI", "OMPI_", "PALS_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE")


@dataclass(frozen=True)
class Site:
    """Where checks run: the device, a folder for their files, and the deadline on ``time.monotonic``'s clock."""

    device: torch.device
    folder: Path
    until: float = math.inf

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def full_size(self) -> bool:
        """Whether networks and volumes are as large as on a GPU; tests turn it off there."""
        return self.on_gpu

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()


@dataclass(frozen=True)
class Outcome:
    """The result of a check: a verdict, a line for people, figures for the record."""

    verdict: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A check by name, and the part of the program that it belongs to."""

    name: str
    part: int
    run: Callable[[Site], Outcome]


@dataclass(frozen=True)
class Error:
    """An error and its bound. NaN is wrong too."""

    value: float
    bound: float

    @property
    def is_wrong(self) -> bool:
        return not self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.value:.1e} (at most {self.bound:.0e})"


def judged(errors: Mapping[str, Error], more: Mapping[str, Any] | None = None) -> Outcome:
    """Returns the verdict on errors by name. Its text names those beyond their bound, or else the one closest to it."""
    wrong = [f"{name} {error}" for name, error in errors.items() if error.is_wrong]
    values = {name: error.value for name, error in errors.items()}
    figures = {name: x if math.isfinite(x) else str(x) for name, x in values.items()} | dict(more or {})  # as JSON has
    if wrong:
        others = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return Outcome(WRONG, "; ".join(wrong[:3]) + others, figures)
    name, worst = max(errors.items(), key=lambda pair: pair[1].value / pair[1].bound)
    return Outcome(RIGHT, f"{len(errors)} compared; closest to its bound: {name} {worst}", figures)


def relative(a: Tensor, b: Tensor) -> float:
    """Returns max |a - b| / max |b|, in float64 on the CPU."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code (None: killed at its time limit), its output, its seconds."""

    code: int | None
    output: str
    seconds: float

    def __str__(self) -> str:
        how = "did not end in time" if self.code is None else f"ended with code {self.code}"
        lines = [line for line in self.output.splitlines() if line.strip()]
        return f"{how} after {self.seconds:.0f} s: {' | '.join(lines[-3:])[-300:]}"


def run_module(
    module: str,
    arguments: Sequence[str],
    site: Site,
    limit_s: float,
    after_start: Callable[[int], None] | None = None,
) -> Ended:
    """Runs a module of this package and returns how it ended. The ranks that it starts end with it.

    - ``limit_s``: its time limit
    - ``after_start``: called with the program's process id once it is running
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    env |= {"SEQPAR_CACHE": str(site.folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(site.folder / COMPILED)}
    if site.on_gpu and torch.cuda.device_count() == 1:
        env[SHARE_GPU] = "1"
    began, path = time.monotonic(), site.folder / "output.txt"
    with open(path, "w+") as output:
        command = ["-m", f"seqpar.{module}", *arguments, "--device", site.device.type]
        process = start_python(command, env, stdout=output, stderr=subprocess.STDOUT)
        try:
            if after_start is not None:
                after_start(process.pid)
            code: int | None = process.wait(max(1.0, limit_s - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return Ended(code, path.read_text(errors="replace"), time.monotonic() - began)


def losses_of(run: Path) -> list[float]:
    """Returns the losses of the steps that a run has done so far."""
    return [row["loss"] for row in _steps_of(run)]


def seconds_of_steps(run: Path) -> list[float]:
    """Returns the seconds of the steps that a run has done so far, without the first, which chooses kernels."""
    return [row["seconds"] for row in _steps_of(run)[1:]]


def _steps_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [row for row in read_metrics(path) if row["kind"] == "train"] if path.exists() else []


def wait_for_steps(pid: int, run: Path, steps: int, limit_s: float = 120.0) -> bool:
    """Waits until the process has done this many steps of a run; returns whether it still works on it."""
    until = time.monotonic() + limit_s
    while is_running := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if len(losses_of(run)) >= steps or time.monotonic() > until:
            break
        time.sleep(0.05)
    return is_running


def kill_a_rank(parent: int) -> None:
    """Kills the last rank that a program started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
