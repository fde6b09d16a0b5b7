"""Tasks: what a training is for. A task supplies the data, the labels of a step, and the validation of its networks.

The networks of a task are those of ``models.build``; a new task is one entry of ``TASKS``, and of that table.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from seqpar.data.formats.class_lists import read_class_dataset
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.formats.splits import folds, numbered_splits
from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.losses import Loss
from seqpar.parallel.mesh import Mesh
from seqpar.runs.metrics_tail import SCORES
from seqpar.runs.run_folder import next_lines
from seqpar.settings.config import Config
from seqpar.tasks.case_validation import CaseValidation
from seqpar.tasks.classify.data import describe_classes, look_at_classes, open_class_data, summary_of_classes, with_tile
from seqpar.tasks.classify.validation import ClassValidation
from seqpar.tasks.data_summary import summary_of_data, tile_line
from seqpar.tasks.pretrain.data import describe_images, look_at_images, open_image_data, read_images, summary_of_images
from seqpar.tasks.pretrain.validation import MaskedValidation
from seqpar.tasks.segment.validation import SegmentationValidation
from seqpar.tasks.training_data import TrainingData, describe_data, open_data, read_headers
from seqpar.terminal import next_command


class Task(ABC):
    """What a training is for; ``score``: what the best checkpoint is the best by, in words."""

    score: str

    @abstractmethod
    def open_data(self, config: Config, is_first: bool) -> TrainingData:
        """Returns the data of a run; the first process prepares what is missing, the others wait for its files."""

    @abstractmethod
    def look_at(self, config: Config) -> Fingerprint:
        """Returns what the headers of a run's data say; nothing is prepared or written."""

    @abstractmethod
    def fold_numbers(self, data: str) -> Sequence[int]:
        """Returns the numbers of a data set's folds, its own or those that are computed."""

    @abstractmethod
    def summary(self, data: TrainingData, config: Config, flags: Collection[str], preset: str) -> list[str]:
        """Returns the lines that say what a run trains on; ``flags``: the settings on the command line."""

    @abstractmethod
    def describe(self, fingerprint: Fingerprint, config: Config) -> str:
        """Returns a line on a data set; raises ``ValueError`` where it does not allow the config's split."""

    @abstractmethod
    def validation(
        self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss, refuse_taken_over: Callable[[], None]
    ) -> CaseValidation:
        """Returns what validates the run's network."""

    def advice(self, fingerprint: Fingerprint, config: Config, flags: Collection[str], preset: str) -> str:
        """Returns a line on a tile that suits the cases better than the preset's, "" where none does."""
        return ""

    def next_lines(self, out: Path) -> list[str]:
        """Returns the commands that usually follow a finished run."""
        return next_lines(out)

    def with_tile(self, config: Config, source: Fingerprint | TrainingData) -> Config:
        """Returns the config with a tile, where it was left to the data."""
        return config


class Segmentation(Task):
    """Each voxel has a label."""

    score = SCORES["segment"]

    def open_data(self, config: Config, is_first: bool) -> TrainingData:
        """Returns prepared images and label maps."""
        return open_data(config, is_first)

    def look_at(self, config: Config) -> Fingerprint:
        """Returns what the headers say."""
        return read_headers(config)

    def fold_numbers(self, data: str) -> Sequence[int]:
        """Returns those of the data set's own splits, or of nnU-Net's."""
        return range(len(folds(read_dataset(data))))

    def summary(self, data: TrainingData, config: Config, flags: Collection[str], preset: str) -> list[str]:
        """Returns the lines on cases and labels, and one on the tile."""
        return [summary_of_data(data, config.fold), tile_line(config, flags, preset, data)]

    def describe(self, fingerprint: Fingerprint, config: Config) -> str:
        """Returns a line on cases, labels and sizes."""
        return describe_data(fingerprint, config)

    def advice(self, fingerprint: Fingerprint, config: Config, flags: Collection[str], preset: str) -> str:
        """Returns a line on the tile."""
        return tile_line(config, flags, preset, fingerprint)

    def validation(
        self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss, refuse_taken_over: Callable[[], None]
    ) -> SegmentationValidation:
        """Returns what predicts held-out label maps, and scores them by Dice."""
        return SegmentationValidation(config, mesh, data, loss, refuse_taken_over)


class Classification(Task):
    """Each volume has a class."""

    score = SCORES["classify"]

    def open_data(self, config: Config, is_first: bool) -> TrainingData:
        """Returns prepared images and their classes."""
        return open_class_data(config, is_first)

    def look_at(self, config: Config) -> Fingerprint:
        """Returns what the headers say."""
        return look_at_classes(config)

    def fold_numbers(self, data: str) -> Sequence[int]:
        """Returns those in the table, or those of subjects."""
        classes = read_class_dataset(Path(data)).volume_classes
        assert classes is not None
        return list(numbered_splits(classes))

    def summary(self, data: TrainingData, config: Config, flags: Collection[str], preset: str) -> list[str]:
        """Returns the lines on cases and classes."""
        return [summary_of_classes(data, config.fold)]

    def describe(self, fingerprint: Fingerprint, config: Config) -> str:
        """Returns a line on cases, classes and sizes."""
        return describe_classes(fingerprint, config)

    def with_tile(self, config: Config, source: Fingerprint | TrainingData) -> Config:
        """Returns the config whose tile holds every case."""
        if isinstance(source, Fingerprint):
            return with_tile(config, source.largest(PrepareSettings.spaced(config.spacing).spacing))
        return replace(config, tile=source.tiles.tile_size)

    def validation(
        self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss, refuse_taken_over: Callable[[], None]
    ) -> ClassValidation:
        """Returns what gives held-out volumes a class, and scores it."""
        return ClassValidation(config, mesh, data, loss, refuse_taken_over)


class Pretraining(Task):
    """Nothing is labelled: parts of the images are hidden, and rebuilt."""

    score = SCORES["pretrain"]

    def open_data(self, config: Config, is_first: bool) -> TrainingData:
        """Returns prepared images."""
        return open_image_data(config, is_first)

    def look_at(self, config: Config) -> Fingerprint:
        """Returns what the headers say."""
        return look_at_images(config)

    def fold_numbers(self, data: str) -> Sequence[int]:
        """Returns those of the data set's own splits, or of nnU-Net's."""
        return range(len(folds(read_images(data))))

    def summary(self, data: TrainingData, config: Config, flags: Collection[str], preset: str) -> list[str]:
        """Returns the lines on cases, and one on the tile."""
        return [summary_of_images(data, config.fold), tile_line(config, flags, preset, data)]

    def describe(self, fingerprint: Fingerprint, config: Config) -> str:
        """Returns a line on cases and sizes."""
        return describe_images(fingerprint, config)

    def advice(self, fingerprint: Fingerprint, config: Config, flags: Collection[str], preset: str) -> str:
        """Returns a line on the tile."""
        return tile_line(config, flags, preset, fingerprint)

    def validation(
        self, config: Config, mesh: Mesh, data: TrainingData, loss: Loss, refuse_taken_over: Callable[[], None]
    ) -> MaskedValidation:
        """Returns what rebuilds a tile of each held-out case."""
        return MaskedValidation(config, mesh, data, loss, refuse_taken_over)

    def next_lines(self, out: Path) -> list[str]:
        """Returns the commands that usually follow."""
        return [f"next: {next_command('train', '--weights', out)}", f"next: {next_command('report', out)}"]


TASKS: dict[str, Task] = {"segment": Segmentation(), "classify": Classification(), "pretrain": Pretraining()}


def task_of(config: Config) -> Task:
    """Returns the task of a config."""
    return TASKS[config.task]
