"""What a run trains on: the data set, prepared once by one process, its split, and how tiles are drawn from it."""

from dataclasses import dataclass
from typing import Any

from seqpar.data.formats.splits import split
from seqpar.data.phantom.builtin import phantom
from seqpar.data.preparation.cache import PreparedDataset
from seqpar.data.preparation.prepare import PrepareSettings, prepared
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.tiles import TileSource
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.data.workers import silent
from seqpar.launch.evaluation.classes import of_declared
from seqpar.launch.job.progress_bar import ProgressBar
from seqpar.launch.settings.config import Config


@dataclass(frozen=True)
class TrainingData:
    """A prepared data set with the ids to train on and to hold out."""

    dataset: PreparedDataset
    train_ids: tuple[str, ...]
    held_out_ids: tuple[str, ...]

    @property
    def num_channels(self) -> int:
        return len(self.dataset.modalities)

    @property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """The data set's regions, each learned by a sigmoid of its own; none: labels, by a softmax."""
        return tuple(self.dataset.regions.values())

    @property
    def num_outputs(self) -> int:
        return len(self.regions) or len(self.dataset.labels)

    @property
    def classes(self) -> dict[str, tuple[int, ...]]:
        """What is scored, by name: each label but the background, and each region."""
        return of_declared(self.dataset.labels, self.dataset.regions, None).classes

    def tiles(self, config: Config) -> TileSource:
        """Returns what draws tiles for training; what the data set does not allow is refused."""
        dataset = self.dataset
        synthesis = TumourSynthesis.of(dataset, config.synthesis) if config.synthesis else None
        keep = config.augment == "full" and "zscore" in dataset.recipe.schemes  # as nnU-Net does with such modalities
        change = augment(
            config.augment, config.tile, synthesis, outside_label=dataset.ignore_label or 0, keep_background=keep
        )
        return TileSource.of(self.dataset, self.train_ids, change, config.foreground)

    def describe(self) -> dict[str, Any]:
        """Returns the data set's description and preparation for the run folder."""
        told = {name: value for name, value in self.dataset.described.items() if name != "splits"}
        ids = {"train": self.train_ids, "held_out": self.held_out_ids}
        recipe = self.dataset.recipe.to_json()
        return {**told, "recipe": recipe, "prepared": str(self.dataset.path.absolute()), **ids}


def open_data(config: Config, is_first: bool) -> TrainingData:
    """Returns the config's material: the first process makes what is missing, the others wait for a file."""
    folder = config.data or str(
        phantom(config.phantoms, is_first, ProgressBar("making phantoms") if is_first else silent)
    )
    settings, progress = PrepareSettings.spaced(config.spacing), ProgressBar("preparing") if is_first else silent
    dataset = prepared(folder, config.cache or None, settings, is_first=is_first, progress=progress)
    fold: int | str = int(config.fold) if config.fold.isdigit() else config.fold
    train_ids, held_out_ids = split(dataset, fold)
    material = TrainingData(dataset, tuple(train_ids), tuple(held_out_ids))
    material.tiles(config)  # refused now, before ranks meet
    return material
