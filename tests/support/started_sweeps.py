"""Sweeps as programs of their own, and the processes that they start."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.pages import ROOT

PATIENCE = 900.0  # beside a busy neighbour five points took 300 s


class Tune:
    """A started ``tune`` with a relative ``--out``, as people type it; leaving the block kills what is left of it."""

    def __init__(self, out: Path, *arguments: str) -> None:
        self.out, self.log = out, out.with_name(f"{out.name}-{time.monotonic_ns()}.txt")
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(ROOT / "launch" / "tune.py"), *arguments, "--out", out.name]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=env, cwd=out.parent, stdout=log, stderr=log, preexec_fn=os.setpgrp
            )

    def __enter__(self) -> "Tune":
        return self

    def __exit__(self, *of: object) -> None:
        self.process.kill()
        self.process.wait()

    def ends(self) -> int:
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"tune does not end:\n{self.said()}") from None

    def until(self, true: Callable[[], object], what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not true():
            assert self.process.poll() is None, f"tune ended before {what}:\n{self.said()}"
            assert time.monotonic() < until, f"it never came true that {what}:\n{self.said()}"
            time.sleep(0.05)

    def said(self) -> str:
        logs = sorted((self.out / "logs").glob("*.txt"))
        return self.log.read_text() + "".join(f"\n{path.name}: {path.read_text()[-600:]}" for path in logs[:3])


def processes(word: str) -> dict[int, str]:
    """Returns the command lines that hold a word, by process."""
    every = dict[int, str]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and int(path.parent.name) != os.getpid():
            every[int(path.parent.name)] = line
    return every


def parents() -> dict[int, tuple[int, str]]:
    """Returns each process's parent, and when it began, which tells it from a later one of its number."""
    every = dict[int, tuple[int, str]]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            every[int(path.parent.name)] = int(fields[1]), fields[19]
    return every


def below(pid: int) -> set[tuple[int, str]]:
    """Returns all processes that a process has started, and those that they have, and so on."""
    every, kin = parents(), {pid}
    while more := {child for child, (parent, _) in every.items() if parent in kin} - kin:
        kin |= more
    return {(one, every[one][1]) for one in kin - {pid}}
