"""What the validations of all tasks share: held-out cases and a result; those of whole cases take turns."""

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Dataset
from seqpar.data.preparation.cache import PreparedCase
from seqpar.data.volumes import size_and_mtime
from seqpar.losses import Loss
from seqpar.models.network import Network
from seqpar.parallel.mesh import Mesh
from seqpar.runs.journal import Journal, read_metrics
from seqpar.runs.metrics_tail import best_validation, with_other_weights
from seqpar.runs.run_folder import name_validated
from seqpar.settings.config import Config
from seqpar.settings.rules import setting_applies
from seqpar.tasks.training_data import TrainingData
from seqpar.terminal import bar
from seqpar.text import clock, quantity

# what changes scores of the same weights and cases, and may change when a run resumes
ON_SCALE = ("val_overlap", "val_window", "val_mirror", "mask_ratio", "normalised_targets")
NUM_PICTURED = 3  # cases in validation.png


@dataclass(frozen=True)
class ValidationResult:
    """The row of metrics.jsonl, the printed table, and the score that decides which checkpoint is kept.

    ``windows`` is the mean Dice by kind of window, the better first, where windows label voxels; ``whole_grid`` the
    most tokens per direction in whole passes, if there were any; ``temperatures`` the best one by kind of window.
    """

    row: dict[str, Any]
    text: str
    score: float
    windows: dict[str, float]
    whole_grid: tuple[int, ...] = ()
    temperatures: Mapping[str, float] = field(default_factory=dict)


def when_validated(journal: Journal, row: Mapping[str, Any]) -> str:
    """Returns after which step a validation is, and whether predict would use its weights; ``row``: its scores."""
    step, before = journal.steps_done, list[Mapping[str, Any]]()
    if journal.path.is_file():
        before = [one for one in read_metrics(journal.path, "val") if one["step"] < step]
    if journal.best_step is not None:  # the weights of a better one may be gone
        before = [one for one in before if one["step"] == journal.best_step]
        if journal.best_step > 0 and not before:
            return f"after step {step:,}"
    best = best_validation([*before, {**row, "step": step}])
    if best is None:
        return f"after step {step:,}"
    return with_other_weights(step, best["step"]).strip() or f"after step {step:,}, the best so far"


class LabelWatch:
    """Finds label maps that were replaced since a training prepared them; the first rank alone looks.

    - ``read``: returns the data set with its files
    """

    def __init__(self, data: TrainingData, read: Callable[[], Dataset]) -> None:
        self.data, self.read = data, read
        self._files = dict[Path, PreparedCase]()
        self._stamps = dict[Path, tuple[int, int]]()  # size and time when it was looked at

    def look(self, but: Collection[str] = ()) -> list[str]:
        """Returns a warning if label maps were replaced since the last look; only those that look changed are read.

        - ``but``: cases that something else has named
        """
        found = list[Path]()
        with suppress(DataError, ValueError, OSError):  # the data may be gone: training needs its own alone
            if not self._files:
                used, cases = {*self.data.train_ids, *self.data.held_out_ids}, self.data.dataset.cases
                self._files = {
                    path: cases[own.id] for own in self.read().cases if own.id in used for path in own.labels
                }
        for path, case in self._files.items():
            with suppress(OSError):
                if self._stamps.get(path) != (stamp := size_and_mtime(path)):
                    self._stamps[path] = stamp
                    found += [path] * (case.id not in but and not _was_made_from(case, path))
        if not found:
            return []
        one, told = len(found) == 1, str(found[0])
        what = f"{told} has" if one else f"{quantity(len(found), 'label map')}, such as {told}, have"
        return [
            f"warning: {what} been replaced since this run prepared {'it' if one else 'them'}: training and its scores "
            "go on with what was there before; to learn from what is there now, stop the run and continue with --resume"
        ]


def _was_made_from(case: PreparedCase, path: Path) -> bool:
    try:
        return case.was_made_from(path)
    except DataError:  # it is damaged, or being written
        return False


class CaseValidation(ABC):
    """Loss and scores on held-out cases; the same on all ranks.

    - ``refuse_taken_over``: raises where this run has lost its folder, before anything is written
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        data: TrainingData,
        loss: Loss,
        refuse_taken_over: Callable[[], None] = lambda: None,
    ) -> None:
        self.config, self.mesh, self.data, self.loss = config, mesh, data, loss
        self.refuse_taken_over = refuse_taken_over
        self.ids = data.ids_to_validate(config.val_cases)

    @property
    def counted(self) -> str:
        """The cases that are validated, in words."""
        return name_validated({"train": self.data.train_ids, "held_out": self.ids}, len(self.ids))

    def measured_on(self, digests: Mapping[str, str]) -> str:
        """Returns a digest of the cases, and the settings that scores depend on: scores of others are on another scale.

        - ``digests``: of the prepared data of each case
        """
        cases = "\n".join(sorted(digests[name] for name in self.ids))
        settings = [f"{name}={getattr(self.config, name)}" for name in ON_SCALE if setting_applies(self.config, name)]
        return " ".join([hashlib.blake2b(cases.encode(), digest_size=16).hexdigest(), *settings])

    @abstractmethod
    def run(self, net: Network, journal: Journal, stopper: StopRequest, keep: bool = False) -> ValidationResult | None:
        """Returns the result, None where all ranks leave before its end; ``keep``: writes RUN/validation too."""

    def refuse_whole(self, net: Network) -> None:  # noqa: B027 - most validations have nothing to refuse
        """Raises ValueError where the network cannot take a case as this validation hands it over; else nothing."""

    def turns(self, journal: Journal, stopper: StopRequest) -> Iterator[int | None]:
        """Yields, turn by turn, the number of the case that the first group takes, others the following ones.

        The last value is None where all ranks leave before the last turn.
        """
        began, total = time.monotonic(), len(self.ids)
        for first in range(0, total, self.mesh.data.size):
            if stopper.should_leave():
                yield None
                return
            left = f"{clock((time.monotonic() - began) / first * (total - first))} left" if first else "? left"
            journal.progress([f"validating case {first + 1}/{total} {bar(first / total)}", left])
            yield first
