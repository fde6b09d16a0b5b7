"""Makes the runs of a list: missing ones begin, interrupted ones resume, finished ones stay.

An engine decides what runs when and where. This one makes one run after the other, on all devices; each is a training
of its own, as a person would start it, and its exit code is what the engine knows of it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seqpar.cluster.exit_codes import PREEMPTED
from seqpar.cluster.start_ranks import run_local
from seqpar.parallel.processes import forward_signals, shell_code, start_process
from seqpar.sweeps.planned_run import PlannedRun, has_begun, has_finished, read_status, refuse_other_flags
from seqpar.terminal import python_module, typed_variable
from seqpar.text import quantity


@dataclass
class OneByOne:
    """Makes one run after the other; ``start`` trains with flags on a number of ranks, and returns the exit code.

    - ``until``: when to leave, by ``time.monotonic``
    - ``signals``: those that came so far; after one no run begins
    """

    start: Callable[[int, Sequence[str], list[int]], int] = field(default_factory=lambda: start_ranks)
    until: float = float("inf")
    signals: list[int] = field(default_factory=list)

    def make(self, runs: Sequence[PlannedRun], root: Path) -> int:
        """Returns 0 once every run has finished in its folder below ``root``, else the exit code of one that did not.

        75 means that they were left early: the same call resumes them.
        """
        for planned in runs:
            if has_begun(root / planned.name):
                refuse_other_flags(planned, root / planned.name)
        with forward_signals([], self.signals):
            for number, planned in enumerate(runs):
                if code := self._make(planned, root / planned.name, f"run {number + 1} of {len(runs)}"):
                    return code
        return PREEMPTED if self.signals else 0

    def _make(self, planned: PlannedRun, run: Path, which: str) -> int:
        """Returns 0 once the run has finished, else the exit code of its training."""
        ranks = quantity(planned.ranks, "rank")
        if has_finished(run):
            print(f"{which} has finished: {run}", flush=True)
            return 0
        if self.signals or time.monotonic() > self.until:
            return PREEMPTED
        resume = has_begun(run)
        print(f"{which} {'resumes' if resume else 'begins'} on {ranks}: {run}", flush=True)
        line = ["--resume", "--out", str(run)] if resume else planned.line(run)
        if self.until < float("inf"):
            line += ["--time-limit", f"{max(self.until - time.monotonic(), 1.0) / 60:.3f}"]
        elif resume:  # else it would have what was left of an earlier limit
            line += ["--time-limit", "none"]
        code = self.start(planned.ranks, line, self.signals)
        if self.signals and code and not has_finished(run):  # a signal also ends a process that cannot act on it yet
            return PREEMPTED
        if code and code != PREEMPTED:
            why = read_status(run).get("why") or "the lines above say why"
            print(f"{which} ended with exit code {code}: {run}: {why}", file=sys.stderr, flush=True)
        return code


def start_ranks(ranks: int, flags: Sequence[str], signals: list[int]) -> int:
    """Returns the exit code of a training on ranks that are started here: by srun in a Slurm job, else on this machine.

    - ``signals``: those that come meanwhile are added here
    """
    train = python_module("train")
    if "SLURM_JOB_ID" not in os.environ:
        return run_local(ranks, [*train, *flags], signals)
    python, env = [sys.executable, "-u", *train], {**os.environ, **typed_variable(train)}
    steps = list[subprocess.Popen]()
    with forward_signals(steps, signals):
        step = start_process(["srun", "-n", str(ranks), "--kill-on-bad-exit=1", *python, *flags], env)
        steps.append(step)
        if signals:  # one came while it was being started
            step.send_signal(signals[-1])
        return shell_code(step.wait())
