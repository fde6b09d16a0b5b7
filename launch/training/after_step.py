"""What all ranks do after a step: go on, save, leave, or stop because the loss is not finite."""

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

from seqpar.consensus import agree, gather_texts
from seqpar.data.sampling.loader import MicroBatch
from seqpar.launch.job.exit_codes import NonFinite
from seqpar.launch.job.stop_request import Stopper
from seqpar.launch.runs.journal import Journal
from seqpar.launch.settings.config import Config
from seqpar.launch.weights import checkpoint
from seqpar.launch.weights.checkpoint import NotSaved, Progress
from seqpar.mesh import Group, Mesh


class Decision(IntEnum):
    """What all ranks do after a step: the largest of what each of them needs."""

    GO_ON = 0
    SAVE = 1
    LEAVE = 2
    BROKEN = 3  # a loss or gradient is not finite


class AfterStep:
    """Decides together with all ranks what follows a step, and saves checkpoints.

    ``folder``: of the run's checkpoints; ``description``: content of config.json, kept in each of them.
    """

    def __init__(self, config: Config, mesh: Mesh, folder: Path, description: dict[str, Any]) -> None:
        self.config, self.mesh, self.folder = config, mesh, folder
        self._description = json.dumps(description)
        self._last_try = time.monotonic()
        self._saved: Progress | None = None

    def begin(self, saved: Progress | None) -> None:
        """Starts the clock of checkpoints; ``saved``: the progress that a resumed run has on disk."""
        self._last_try, self._saved = time.monotonic(), saved and replace(saved)

    def decide(self, is_finite: bool, stopper: Stopper) -> Decision:
        """Returns the decision of all ranks, the same on each; ``is_finite``: this rank's loss and gradient."""
        own = Decision.GO_ON
        if not is_finite:
            own = Decision.BROKEN
        elif self.mesh.is_first and time.monotonic() - self._last_try > 60 * self.config.checkpoint_minutes:
            own = Decision.SAVE
        decision, leaves = Decision(agree(own, self.mesh.world)), stopper.should_leave()
        return Decision.LEAVE if leaves and decision != Decision.BROKEN else decision

    def save(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        progress: Progress,
        journal: Journal,
        is_best: bool = False,
        must: bool = False,
    ) -> None:
        """Saves a checkpoint, unless this progress is saved already.

        A failure is a warning, and the next save is due as usual; with ``must`` it raises ``NotSaved``.
        """
        progress = replace(progress)
        if progress == self._saved:
            return
        try:
            checkpoint.save(self.folder, net, optimizer, progress, self.mesh.world, self._description, is_best)
            self._saved = progress
        except NotSaved as error:
            if must:
                raise
            journal.say(f"warning: {error}; going on, next try in {self.config.checkpoint_minutes:g} minutes")
        self._last_try = time.monotonic()


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
