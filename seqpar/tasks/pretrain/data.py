"""ImageData: images to learn from without labels, whether their data set has some or not."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from seqpar.data.formats.dataset import Dataset
from seqpar.data.formats.recognise import describe, read_dataset
from seqpar.data.phantom.builtin import phantom, phantom_fingerprint
from seqpar.data.preparation.fingerprint import Fingerprint, read_fingerprint
from seqpar.data.preparation.prepare_dataset import prepared
from seqpar.data.sampling.loader import MicroBatch
from seqpar.data.workers import no_progress
from seqpar.settings.config import Config
from seqpar.settings.data_settings import prepare_settings
from seqpar.tasks.training_data import (
    TrainingData,
    case_lines,
    describe_images,
    split_of,
    splits_by_patient,
    unlabelled_tiles,
)
from seqpar.terminal import ProgressBar
from seqpar.text import name_images


@dataclass(frozen=True)
class ImageData(TrainingData):
    """A prepared data set without its labels: the images are what is to be rebuilt."""

    @property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """None."""
        return ()

    @property
    def output_names(self) -> tuple[str, ...]:
        """The channels of what is rebuilt."""
        return tuple(name_images(self.dataset.modalities))

    @property
    def kind_of_outputs(self) -> str:
        """What they are, in words."""
        return "voxels of hidden patches, of each channel"

    def labels_of(self, micro: MicroBatch) -> Tensor:
        """Returns the images themselves ``b n/s c p p p``."""
        return micro.image

    def with_tiles(self, config: Config) -> "ImageData":
        """Returns the data with tiles of a config's size and augmentation."""
        return replace(self, tiles=unlabelled_tiles(self.dataset, self.train_ids, config))


def read_images(path: str | Path | int) -> Dataset:
    """Returns a data set as training reads it, or, where labels are missing or wrong, its images alone."""
    dataset = read_dataset(path)
    return describe(path, labelled=False) if dataset.faults else dataset


def open_image_data(config: Config, is_first: bool) -> ImageData:
    """Returns the data of a run; the first process prepares what is missing, the others wait for its files.

    Raises ``ValueError`` where the data do not allow the config's split.
    """
    progress = ProgressBar if is_first else lambda text: no_progress
    if not config.data:
        split_of(phantom_fingerprint(config.phantoms), config)  # before they are made, which takes minutes
    folder = config.data or phantom(config.phantoms, is_first, progress("making phantoms"))
    settings, cache = prepare_settings(config), config.cache or None
    source = read_images(folder)
    if not source.faults:
        split_of(source, config)  # before a preparation that may take hours
    dataset = prepared(source, cache, settings, is_first=is_first, progress=progress("preparing"), labelled=False)
    train_ids, held_out_ids = split_of(dataset, config)
    tiles = unlabelled_tiles(dataset, train_ids, config)
    return ImageData(dataset, train_ids, held_out_ids, tiles, by_patient=splits_by_patient(config))


def read_image_headers(config: Config) -> Fingerprint:
    """Returns what the headers of a run's data say; nothing is prepared or written."""
    if not config.data:
        return phantom_fingerprint(config.phantoms)
    return read_fingerprint(read_images(config.data), False, prepare_settings(config).own_spacing)


def summary_of_images(data: TrainingData, config: Config) -> str:
    """Returns the lines that say what a run trains on; reads a small file of each case."""
    return "\n".join([*case_lines(data, config), "  labels are ignored"])


def describe_image_data(fingerprint: Fingerprint, config: Config) -> str:
    """Returns a line on a data set; raises ``ValueError`` where it does not allow the config's split."""
    return describe_images(fingerprint, split_of(fingerprint, config), "labels are ignored")
