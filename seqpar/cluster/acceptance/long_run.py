"""A training whose memory may not grow from step to step, and whose waits for the device are counted.

``check_long_run`` runs this module as a program.
"""

import argparse
import json
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seqpar.cluster import exit_codes
from seqpar.cluster.acceptance.check import WRONG, Error, Outcome, Site, judged, run_module
from seqpar.data.files import write_json
from seqpar.parallel.processes import die_with_parent
from seqpar.training.trainer import Trainer

FLAGS = """
    --preset modern --tile 16 --embed-dim 32 --heads 2 --depth 1 --decoder-width 4 --batch 1 --accumulate 2 --phantoms 6
    --augment none --epochs 1 --warmup 0 --workers 0 --val-every 0 --val-cases 1 --val-overlap 0 --spacing 4,4,4
"""
FEW, MANY = 12, 40  # steps; DDP times its first ten, and waits in them
MOST_MIB = 64.0
LIMIT_S = 200.0


def check_long_run(site: Site) -> Outcome:
    """Compares the memory that torch has reserved after few steps and after many; says how often a step waits."""
    record = site.folder / "long-run.json"
    arguments = ["--json", str(record), "--out", str(site.folder / "long-run")]
    ended = run_module("cluster.acceptance.long_run", arguments, site, LIMIT_S)
    seen = json.loads(record.read_text()) if record.exists() else {"reserved_mib": []}
    if ended.code or len(seen["reserved_mib"]) != MANY:
        return Outcome(WRONG, f"{len(seen['reserved_mib'])} of {MANY} steps; it {ended}")
    grown = seen["reserved_mib"][-1] - seen["reserved_mib"][FEW]
    outcome = judged({f"MiB more after {MANY} steps than after {FEW}": Error(grown, MOST_MIB)}, seen)
    waits = f"; a step waits for the device {max(seen['waits'])} times at most" if site.on_gpu else ""
    return Outcome(outcome.verdict, outcome.text + waits, outcome.figures)


class StepObserver:
    """What is seen at the beginning of each step of this process's training, written to a file each time.

    - ``reserved_mib``: torch's memory
    - ``waits``: for the device, in each step after the first ``FEW``
    """

    def __init__(self, record: Path) -> None:
        self.record, self.on_gpu = record, torch.cuda.is_available()
        self.reserved_mib, self.waits = list[float](), list[int]()
        self._waited = 0
        if self.on_gpu:
            warnings.showwarning = self._note
            for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
                self._count(owner)

    def begin_step(self) -> None:
        """Called at the beginning of a step."""
        self.reserved_mib.append(torch.cuda.memory_reserved() / 2**20 if self.on_gpu else 0.0)
        if len(self.reserved_mib) > FEW + 1:
            self.waits.append(self._waited)
        elif len(self.reserved_mib) > FEW and self.on_gpu:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        self._waited = 0
        write_json(self.record, {"reserved_mib": self.reserved_mib, "waits": self.waits})

    def _note(self, message: Warning | str, *of: Any, **more: Any) -> None:
        self._waited += "synchroniz" in str(message)

    def _count(self, owner: Any) -> None:
        original = owner.synchronize

        def counted(*of: Any) -> Any:
            self._waited += 1
            return original(*of)

        owner.synchronize = counted


def act(arguments: Sequence[str]) -> int:
    """Trains while its steps are observed."""
    die_with_parent()
    parser = argparse.ArgumentParser("seqpar-acceptance")
    for flag in ("--json", "--out", "--device"):
        parser.add_argument(flag, required=True)
    options = parser.parse_args(list(arguments))
    observer, step = StepObserver(Path(options.json)), Trainer._step

    def observed(*of: Any) -> Any:
        observer.begin_step()
        return step(*of)

    Trainer._step = observed  # type: ignore[assignment, method-assign]  # this process ends with the run
    more = ["--iterations", str(MANY), "--device", options.device, "--out", options.out]
    sys.argv = ["seqpar-train", *FLAGS.split(), *more]
    runpy.run_module("seqpar.cli.train", run_name="__main__")  # which ends this process
    return exit_codes.FAULT


if __name__ == "__main__":
    exit_codes.leave(exit_codes.run(act))
