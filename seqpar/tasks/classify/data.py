"""ClassData: volumes with one class each, prepared, split by subject, and each as one tile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from seqpar.data.formats.class_lists import read_class_dataset
from seqpar.data.formats.dataset import VolumeClasses
from seqpar.data.formats.splits import sample_cases, split_classes
from seqpar.data.preparation.fingerprint import Fingerprint, read_fingerprint
from seqpar.data.preparation.prepare_dataset import prepared
from seqpar.data.sampling.loader import MicroBatch
from seqpar.data.workers import no_progress
from seqpar.models.build import family_of
from seqpar.parallel.device_constants import copy_to_device
from seqpar.settings.config import Config
from seqpar.settings.data_settings import prepare_settings
from seqpar.tasks.training_data import (
    TrainingData,
    case_lines,
    describe_images,
    mirrors_sides,
    refuse_weights,
    splits_by_patient,
    unlabelled_tiles,
)
from seqpar.terminal import ProgressBar


@dataclass(frozen=True)
class ClassData(TrainingData):
    """Prepared volumes with one class each; a tile is a whole volume, padded, or its middle."""

    @property
    def volume_classes(self) -> VolumeClasses:
        """The class of each case."""
        assert self.dataset.volume_classes is not None
        return self.dataset.volume_classes

    @property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """None: classes exclude each other."""
        return ()

    @property
    def output_names(self) -> tuple[str, ...]:
        """The classes."""
        return self.volume_classes.names

    @property
    def kind_of_outputs(self) -> str:
        """What they are, in words."""
        return "classes, by a softmax"

    def labels_of(self, micro: MicroBatch) -> Tensor:
        """Returns the class numbers ``b`` of a micro-batch's cases."""
        numbers = torch.tensor([self.volume_classes.numbers[case] for case in micro.cases])
        return copy_to_device(numbers, micro.image.device)

    def ids_to_validate(self, count: int) -> tuple[str, ...]:
        """Returns ``count`` of the held-out cases, drawn from each class in turn; 0: all of them."""
        ids = self.held_out_ids
        return sample_cases(ids, min(count, len(ids)), self.volume_classes.numbers.__getitem__)

    def with_tiles(self, config: Config) -> "ClassData":
        """Returns the data with tiles of a config's size and augmentation."""
        return replace(self, tiles=unlabelled_tiles(self.dataset, self.train_ids, config, from_middle=True))


def open_class_data(config: Config, is_first: bool) -> ClassData:
    """Returns the data of a run; the first process prepares what is missing, the others wait for its files.

    Where the config leaves the tile open, it holds every prepared case. Raises ``ValueError`` where the data do not
    allow the config's split.
    """
    settings, progress = prepare_settings(config), ProgressBar("preparing") if is_first else no_progress
    source = read_class_dataset(data_of(config))
    assert source.volume_classes is not None
    class_split(source.volume_classes, config)  # before a preparation that may take hours
    refuse_weights(config, source.volume_classes.names)
    dataset = prepared(source, config.cache or None, settings, is_first=is_first, progress=progress)
    assert dataset.volume_classes is not None
    train_ids, held_out_ids = class_split(dataset.volume_classes, config)
    shapes = [case.properties.shape for case in dataset.cases.values()]
    config = with_tile(config, [max(sides) for sides in zip(*shapes)])
    tiles = unlabelled_tiles(dataset, train_ids, config, from_middle=True)
    test_ids, by_patient = dataset.volume_classes.tests, splits_by_patient(config)
    return ClassData(dataset, train_ids, held_out_ids, tiles, test_ids=test_ids, by_patient=by_patient)


def read_class_headers(config: Config) -> Fingerprint:
    """Returns what the headers of a run's data say; nothing is prepared or written."""
    return read_fingerprint(read_class_dataset(data_of(config)), spacing=prepare_settings(config).own_spacing)


def data_of(config: Config) -> Path:
    """Returns the path of a run's data; raises ValueError where none is given."""
    if not config.data:
        raise ValueError(
            f"--task {config.task} needs --data, a folder of images with labels.csv (case,class): "
            "phantom.py --kind dementia makes one to try things on"
        )
    return Path(config.data)


def with_tile(config: Config, largest: Sequence[int]) -> Config:
    """Returns the config whose tile, where it was left open, holds ``largest`` voxels, in whole units."""
    if config.tile:
        return config
    unit = family_of(config).unit(config)
    return replace(config, tile=tuple(-(-side // step) * step for side, step in zip(largest, unit)))


def class_split(classes: VolumeClasses, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the ids of the cases to train on and to hold out; raises ValueError where a class has none to learn."""
    if config.fold.count(":") > 1:
        raise ValueError(
            f"--fold {config.fold} with --task {config.task}: cases for tests are those whose split is test in "
            "labels.csv: write it there, and use 90:10 or a fold's number"
        )
    train_ids, held_out_ids = split_classes(classes, config.fold, splits_by_patient(config))
    train_ids = sample_cases(train_ids, config.train_cases, classes.numbers.__getitem__)
    for name, count in zip(classes.names, classes.counts(train_ids)):
        if not count:
            few = f" with --train-cases {config.train_cases}" if config.train_cases else ""
            raise ValueError(f"--fold {config.fold}{few} leaves no case of {name} to train on: choose another, or all")
    return train_ids, held_out_ids


def summary_of_classes(data: TrainingData, config: Config) -> str:
    """Returns the lines that say what a run trains on; reads a small file of each case."""
    assert isinstance(data, ClassData)
    classes = data.volume_classes
    train, held_out = classes.counts(data.train_ids), classes.counts(data.held_out_ids)
    rows, both = zip(classes.names, train, held_out), "{} to train on, also used to validate"
    of_class = both if data.validates_trained else "{} to train on, {} held out"
    lines = [*case_lines(data, config), *(f"  class {name}: {of_class.format(*counts)}" for name, *counts in rows)]
    mirrored = f"  note: --augment {config.augment} mirrors volumes: if classes differ by side, use --augment none"
    return "\n".join([*lines, *[mirrored] * mirrors_sides(config.augment)])


def describe_classes(fingerprint: Fingerprint, config: Config) -> str:
    """Returns a line on a data set; raises ``ValueError`` where it does not allow the config's split."""
    assert fingerprint.volume_classes is not None
    split = class_split(fingerprint.volume_classes, config)
    refuse_weights(config, fingerprint.labels)
    line = describe_images(fingerprint, split, f"tells {', '.join(fingerprint.labels)} apart")
    return f"{line} before what is empty is cropped"
