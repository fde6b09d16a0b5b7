"""What all ranks do after a step: continue, save, leave, or stop because the loss is not finite."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from seqpar.cluster.exit_codes import NonFinite
from seqpar.cluster.stop_request import StopRequest
from seqpar.data.errors import DataError, remedy
from seqpar.data.sampling.loader import MicroBatch
from seqpar.parallel.consensus import gather_texts, max_over_ranks, run_on_rank0
from seqpar.parallel.mesh import Group, Mesh
from seqpar.runs.journal import Journal
from seqpar.runs.run_lock import RunLock
from seqpar.settings.config import Config
from seqpar.text import clock
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import NotSaved, Progress
from seqpar.weights.states import whole_tensors

LOOK_S = 2.0  # between two looks at the run folder's lock


class Decision(IntEnum):
    """What all ranks do after a step: the largest of what each of them needs."""

    GO_ON = 0
    SAVE = 1
    LEAVE = 2
    BROKEN = 3  # a loss or gradient is not finite
    TAKEN_OVER = 4  # another training holds the run folder


class AfterStep:
    """Decides together with all ranks what follows a step, and saves checkpoints.

    ``folder``: of the run's checkpoints; ``description``: content of config.json, kept in each of them; ``lock``: of
    the run folder, None where nobody else can write there; ``collect``: brings tensors to the first rank;
    ``resume_command``: what continues the run.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        folder: Path,
        description: dict[str, Any],
        lock: RunLock | None = None,
        collect: checkpoint.Collect = whole_tensors,
        resume_command: str = "--resume",
    ) -> None:
        self.config, self.mesh, self.folder, self.lock = config, mesh, folder, lock
        self.resume_command = resume_command
        self._description = json.dumps(description)
        self._last_try = time.monotonic()
        self._last_look = -math.inf  # at the lock
        self._saved: Progress | None = None
        self._collect = collect

    def begin(self, saved: Progress | None) -> None:
        """Starts the clock of checkpoints; ``saved``: the progress that a resumed run has on disk."""
        self._last_try, self._saved = time.monotonic(), saved and replace(saved)

    def decide(self, is_finite: bool, stopper: StopRequest) -> Decision:
        """Returns the decision of all ranks, the same on each; ``is_finite``: this rank's loss and gradient.

        Raises ``TakenOver`` on all ranks where another training has taken the run folder over.
        """
        own = Decision.GO_ON
        if self._is_taken_over():
            own = Decision.TAKEN_OVER
        elif not is_finite:
            own = Decision.BROKEN
        elif self.mesh.is_first and time.monotonic() - self._last_try > 60 * self.config.checkpoint_minutes:
            own = Decision.SAVE
        decision, leaves = Decision(max_over_ranks(own, self.mesh.world)), stopper.should_leave()
        if decision == Decision.TAKEN_OVER:
            self.refuse_taken_over()
        return Decision.LEAVE if leaves and decision != Decision.BROKEN else decision

    def save(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        progress: Progress,
        journal: Journal,
        must: bool = False,
    ) -> bool:
        """Saves a checkpoint, unless this progress is saved already; returns whether it is.

        A failure is a warning, and the next save is due as usual; with ``must`` it raises ``NotSaved``, and where the
        run has no checkpoint yet ``DataError``, on all ranks. Raises ``TakenOver`` where another training has taken the
        run folder over.
        """
        self.refuse_taken_over()
        progress = replace(progress)
        if progress == self._saved:
            return True
        try:
            checkpoint.save(
                self.folder,
                net,
                optimizer,
                progress,
                self.mesh.world,
                self._description,
                progress.best_step == progress.step,
                self._refuse_lost,
                self._collect,
            )
            self._saved = progress
        except NotSaved as error:
            self.refuse_taken_over()  # whose saves clear away what others write
            again = f"{remedy(error)} and continue by {self.resume_command}"
            if self._saved is None:
                problem = f"holds no checkpoint, and {error}; {again}, or choose another --out"
                raise DataError(self.folder, problem) from None
            kept = f"the checkpoint of step {self._saved.step} is kept"
            if must:
                raise NotSaved(f"{error}; {kept}: {again}") from None
            minutes = self.config.checkpoint_minutes
            later = f"going on, next try in {minutes:g} minutes or at the end"
            journal.say(f"warning: {error}; {kept}, {self._age()}; {later}")
        self._last_try = time.monotonic()
        return self._saved == progress

    def _age(self) -> str:
        """Returns the age of the last checkpoint that was saved, as its file ``latest`` shows it."""
        try:
            seconds = time.time() - (self.folder / "latest").stat().st_mtime
        except OSError:
            return "of unknown age"
        return f"{clock(max(seconds, 0.0))} old"

    def _is_taken_over(self) -> bool:
        """Returns whether the first rank has lost the run folder; it looks every few seconds."""
        if self.lock is None or not self.mesh.is_first or time.monotonic() - self._last_look < LOOK_S:
            return False
        self._last_look = time.monotonic()
        return self.lock.is_lost()

    def refuse_taken_over(self) -> None:
        """Raises ``TakenOver`` on all ranks where another training has taken the run folder over."""
        run_on_rank0(self._refuse_lost, self.mesh.world)

    def _refuse_lost(self) -> None:
        if self.lock is not None:
            self.lock.refuse_lost()


def raise_non_finite(step: int, loss: float, micros: Sequence[MicroBatch], world: Group) -> NoReturn:
    """Raises ``NonFinite`` on all ranks; it names the ranks whose ``loss`` is not finite, and their cases."""
    cases = ", ".join(sorted({case for micro in micros for case in micro.cases}))
    own_cause = "" if math.isfinite(loss) else f"rank {world.index}: loss {loss} on {cases}"
    causes = [cause for cause in gather_texts(own_cause, world) if cause]
    if not causes:
        batches = gather_texts(cases, world)
        causes = [f"the gradient is not finite; the batch held {', '.join(dict.fromkeys(batches))}"]
    raise NonFinite(
        f"step {step}: {'; '.join(causes)}. No weight was changed. Lower --lr, set --clip 1, use --precision fp32, "
        "or look at these cases"
    )
