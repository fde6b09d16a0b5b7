"""Task: the stages that every task supplies. A new task is a folder next to ``segment`` and a line in ``lookup``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from seqpar.data.formats.dataset import Dataset
    from seqpar.data.preparation.fingerprint import Fingerprint
    from seqpar.losses import Loss
    from seqpar.parallel.mesh import Mesh
    from seqpar.prediction.case_stream import Request
    from seqpar.prediction.run_average import EnsembleMember
    from seqpar.report.record import RunRecord
    from seqpar.report.run_page import FinishedPage
    from seqpar.report.several_runs import Comparison
    from seqpar.settings.config import Config
    from seqpar.tasks.case_validation import CaseValidation
    from seqpar.tasks.training_data import TrainingData


class Task(ABC):
    """What a run is trained for. The programs know a task by these stages alone.

    A stage imports what it needs when it is called, so that a training loads neither pages nor predictions.

    - ``name``: as ``--task`` takes it
    - ``score``: the measure that selects the best checkpoint, in words
    - ``does``: what a trained run does with a case, in words
    - ``predictions``: what its predictions are, in words; "" for a task that predicts nothing
    - ``train_command``: the program that trains on prepared data, with its flags
    - ``is_labelled``: whether it learns from labels
    - ``idle_flags``: for a program the flags that have no effect on this task, with their defaults
    """

    name: str
    score: str
    does: str
    predictions: str
    train_command: Sequence[str] = ("train",)
    is_labelled: bool = True
    idle_flags: Mapping[str, Mapping[str, Any]] = {}

    @abstractmethod
    def read_dataset(self, path: str) -> Dataset:
        """Returns the data set at a path, as training reads it."""

    @abstractmethod
    def open_data(self, config: Config, is_first: bool) -> TrainingData:
        """Returns the data of a run; the first process prepares what is missing, the others wait for its files.

        Needs no process group. Raises ``ValueError`` if the data do not allow the config's split or augmentation.
        """

    @abstractmethod
    def read_headers(self, config: Config) -> Fingerprint:
        """Returns what the headers of a run's data say; nothing is prepared or written."""

    @abstractmethod
    def describe(self, fingerprint: Fingerprint, config: Config) -> str:
        """Returns one line about a data set; raises ``ValueError`` if it does not allow the config's split."""

    @abstractmethod
    def summary(self, data: TrainingData, config: Config) -> str:
        """Returns the lines that say what a run trains on; reads a small file of each case."""

    @abstractmethod
    def validation(
        self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss, refuse_taken_over: Callable[[], None]
    ) -> CaseValidation:
        """Returns what validates the run's network."""

    def fold_numbers(self, data: str) -> Sequence[int]:
        """Returns the numbers of a data set's folds: its own, or nnU-Net's."""
        from seqpar.data.formats.splits import folds

        return range(len(folds(self.read_dataset(data), by_patient=False)))

    def with_tile(self, config: Config, source: Fingerprint | TrainingData) -> Config:
        """Returns the config with a tile, if the config leaves it to the data."""
        return config

    def tile_advice(
        self, config: Config, flags: Collection[str], preset: str, source: Fingerprint | TrainingData
    ) -> str:
        """Returns a line about a tile that suits the cases better than the preset's, "" if there is none.

        - ``flags``: the settings on the command line
        """
        from seqpar.tasks.training_data import tile_line

        return tile_line(config, flags, preset, source)

    def caution(self, run: Path) -> str:
        """Returns why not to trust a run or an archive, by the run's validations; "" if they give no reason."""
        return ""

    def use_of(self, archive: Path, run: Path) -> list[str]:
        """Returns the program that takes the archive of a run, and its arguments."""
        return ["predict", str(archive), "-i", "IMAGES", "-o", "PREDICTIONS"]

    def next_step(self, run: Path) -> str:
        """Returns the command that usually follows a finished run, with a note on what it needs."""
        from seqpar.runs.run_folder import predict_command

        return predict_command(run)

    def next_lines(self, out: Path) -> list[str]:
        """Returns the commands that usually follow a finished run."""
        from seqpar.runs.run_folder import next_lines

        return next_lines(out)

    def predict(self, request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> list[str]:
        """Predicts the requested cases; returns what went wrong, a line per fault, on all ranks.

        - ``members``: the runs; the probabilities of several are averaged
        """
        raise ValueError(f"a run with --task {self.name} {self.does}: predict with a run that was trained on labels")

    def has_predictions(self, path: Path) -> bool:
        """Returns whether a path that ``evaluate`` is given holds predictions that only this task writes."""
        return False

    def evaluate(self, options: argparse.Namespace) -> int:
        """Scores the predictions that the command line of ``evaluate`` names; returns the exit code."""
        raise ValueError(f"a run with --task {self.name} {self.does}: there is nothing to evaluate")

    @abstractmethod
    def page(self, options: argparse.Namespace, record: RunRecord) -> FinishedPage:
        """Returns the page about a run; ``options``: the command line of ``report``."""

    def compare(self, records: Mapping[str, RunRecord], gaps: list[str]) -> Comparison:
        """Returns the scores of several runs side by side.

        - ``records``: the runs by name
        - ``gaps``: gets a line for each run without scores
        """
        from seqpar.report.several_runs import Comparison

        gaps += [f"{name}: There are no scores of single cases: the run {self.does}." for name in records]
        sentence = f"Runs with --task {self.name} have no scores of cases."
        return Comparison(0, sentence, "")

    def refuse_idle_flags(self, program: str, options: argparse.Namespace, why: str) -> None:
        """Raises ``ValueError`` for flags of a program that have no effect on this task; ``why``: in words."""
        defaults = self.idle_flags.get(program, {})
        if idle := [name for name, default in defaults.items() if getattr(options, name) != default]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
            raise ValueError(f"{flags} would do nothing: {why}: remove it")
