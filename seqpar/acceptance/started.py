"""Starts the acts of this package as programs of their own, with a time limit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from seqpar.acceptance.check import Site
from seqpar.parallel.launcher import SHARE_GPU
from seqpar.runs.journal import read_metrics

COMPILED = "inductor"  # the folder, beside the runs, into which torch compiles
# What a scheduler or launcher says of ranks: programs here start their own.
_LAUNCHERS = ("SLURM_", "PMI", "OMPI_", "PALS_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE")


@dataclass(frozen=True)
class Ended:
    """How a program ended: its code (None: it was ended after its time), its last lines, its seconds."""

    code: int | None
    said: str
    seconds: float

    def __str__(self) -> str:
        how = "did not end in time" if self.code is None else f"ended with code {self.code}"
        lines = [line for line in self.said.splitlines() if line.strip()]
        return f"{how} after {self.seconds:.0f} s: {' | '.join(lines[-3:])[-300:]}"


def run_module(
    module: str,
    arguments: Sequence[str],
    site: Site,
    limit_s: float,
    meanwhile: Callable[[int], None] | None = None,
) -> Ended:
    """Runs a module of this package and returns how it ended; ranks that it starts end with it.

    - ``limit_s``: its seconds, or those that are left of the checks if there are fewer
    - ``meanwhile``: called with the program's id once it has been started
    """
    limit_s = min(limit_s, site.left_s)
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    env |= {"SEQPAR_CACHE": str(site.folder / "cache"), "TORCHINDUCTOR_CACHE_DIR": str(site.folder / COMPILED)}
    if site.on_gpu and torch.cuda.device_count() == 1:
        env[SHARE_GPU] = "1"
    began, path = time.monotonic(), site.folder / "said.txt"
    with open(path, "w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"seqpar.{module}", *arguments, "--device", site.device.type],
            env=env, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            if meanwhile is not None:
                meanwhile(process.pid)
            code: int | None = process.wait(max(1.0, limit_s - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return Ended(code, path.read_text(errors="replace"), time.monotonic() - began)


def losses_of(run: Path) -> list[float]:
    """Returns the loss of each step of a run so far."""
    path = run / "metrics.jsonl"
    return [row["loss"] for row in read_metrics(path) if row["kind"] == "train"] if path.exists() else []


def wait_for_steps(run: Path, steps: int, limit_s: float = 120.0) -> None:
    """Waits until a run has done so many steps."""
    until = time.monotonic() + limit_s
    while len(losses_of(run)) < steps and time.monotonic() < until:
        time.sleep(0.05)


def kill_a_rank(parent: int) -> None:
    """Kills the last of the ranks that a program started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
