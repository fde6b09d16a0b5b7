"""TrainingData: the prepared data set, its split into cases to train on and to hold out, and its tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqpar.data.formats.dataset import Dataset
from seqpar.data.formats.joined_labels import join_labels
from seqpar.data.formats.recognise import find_dataset, read_dataset
from seqpar.data.formats.splits import HasCases, sample_cases, split, tested_ids
from seqpar.data.phantom.builtin import phantom, phantom_fingerprint
from seqpar.data.preparation.cache import PreparedDataset
from seqpar.data.preparation.cache_index import outdated_cache
from seqpar.data.preparation.fingerprint import Fingerprint, read_fingerprint
from seqpar.data.preparation.prepare_dataset import prepared
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.augmentation_presets import ORDERS
from seqpar.data.sampling.loader import MicroBatch
from seqpar.data.sampling.tiles import TileSource
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.data.sampling.volume_synthesis import VolumeSynthesis
from seqpar.data.workers import no_progress
from seqpar.decoders.modes.mode import Mode
from seqpar.parallel.device_constants import copy_to_device
from seqpar.scores.label_classes import hidden_classes, labels_of_declaration, learned_regions
from seqpar.settings.config import Config
from seqpar.settings.data_settings import prepare_settings
from seqpar.terminal import ProgressBar
from seqpar.text import quantity


@dataclass(frozen=True)
class TrainingData:
    """A prepared data set, the ids of its cases to train on, to hold out and to test on, and the source of tiles."""

    dataset: PreparedDataset
    train_ids: tuple[str, ...]
    held_out_ids: tuple[str, ...]
    tiles: TileSource
    targets: str = "regions"
    test_ids: tuple[str, ...] = ()

    @property
    def num_channels(self) -> int:
        return len(self.dataset.modalities)

    @property
    def _regions(self) -> dict[str, tuple[int, ...]]:
        return learned_regions(self.dataset.labels, self.dataset.regions, self.targets)

    @property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """The labels of each region, learned by sigmoids; empty where single labels are learned, by a softmax."""
        return tuple(self._regions.values())

    @property
    def output_order(self) -> tuple[int, ...]:
        """The class id that each region's voxels get; empty where single labels are learned by a softmax."""
        return self.dataset.regions_class_order if self.targets == "regions" else tuple(v for (v,) in self.regions)

    @property
    def output_names(self) -> tuple[str, ...]:
        """What the network's outputs stand for: regions, or labels with the background first."""
        return tuple(self._regions or self.dataset.labels)

    @property
    def kind_of_outputs(self) -> str:
        """What they are, in words."""
        return "regions, by a sigmoid each" if self.regions else "labels, by a softmax"

    @property
    def num_outputs(self) -> int:
        return len(self.output_names)

    def labels_of(self, micro: MicroBatch) -> Tensor:
        """Returns the labels of a micro-batch, as the network's ``arrange`` takes them."""
        return micro.label

    def ids_to_validate(self, count: int) -> tuple[str, ...]:
        """Returns so many of the held-out cases, all for 0."""
        return self.held_out_ids[: count or None]

    def with_tiles(self, config: Config) -> "TrainingData":
        """Returns the data with tiles of a lesson's size and places."""
        return replace(self, tiles=training_tiles(self.dataset, self.train_ids, config))

    def annotated(self, cases: Sequence[str]) -> Tensor | None:
        """Returns which outputs the labels of these cases show, ``b k``; None where every case shows all.

        A region is shown where all its labels are; the background where every label is.
        """
        if not self.dataset.annotated:
            return None
        every = set(self.dataset.labels.values()) - {0}
        outputs = [set(members) for members in self.regions] or [{n} if n else every for n in [0, *sorted(every)]]
        shown = [set(self.dataset.annotated.get(case, every)) for case in cases]
        return torch.tensor([[members <= own for members in outputs] for own in shown])

    def hidden_classes(self, case: str) -> tuple[str, ...]:
        """Returns the scored classes that the case's label does not show."""
        return hidden_classes(self.classes, self.dataset.annotated.get(case))

    @property
    def classes(self) -> dict[str, tuple[int, ...]]:
        """The scored classes by name: each label but the background, and each region."""
        return labels_of_declaration(self.dataset.labels, self.dataset.regions, None).classes

    def describe(self) -> dict[str, Any]:
        """Returns what config.json records of the data: description, preparation, split."""
        description = {name: value for name, value in self.dataset.described.items() if name != "splits"}
        ids = {"train": self.train_ids, "held_out": self.held_out_ids}
        ids |= {"test": self.test_ids} if self.test_ids else {}
        recipe = self.dataset.recipe.to_json()
        return {**description, "recipe": recipe, "prepared": str(self.dataset.path.absolute()), **ids}


def outputs_shown(data: TrainingData, cases: Sequence[str], mode: Mode, device: torch.device) -> Tensor | None:
    """Returns which outputs the labels of this rank's samples show, of the group's ``cases``; None where all do."""
    annotated = data.annotated(cases)
    return None if annotated is None else mode.samples(copy_to_device(annotated, device))


def open_data(config: Config, is_first: bool) -> TrainingData:
    """Returns the data of a run; the first process prepares what is missing, the others wait for its files.

    Needs no process group. Raises ``ValueError`` where the data do not allow the config's split or augmentation.
    """
    folder = config.data or str(
        phantom(config.phantoms, is_first, ProgressBar("making phantoms") if is_first else no_progress)
    )
    settings, progress = prepare_settings(config), ProgressBar("preparing") if is_first else no_progress
    source = read_dataset(folder)
    _refuse_unprepared(join_labels(source, settings.joins), config)
    dataset = prepared(source, config.cache or None, settings, is_first=is_first, progress=progress)
    if is_first and config.data and (line := outdated_cache(find_dataset(config.data), dataset.path.absolute())):
        print(line, flush=True)
    train_ids, held_out_ids = split_of(dataset, config)
    tiles = training_tiles(dataset, train_ids, config)
    return TrainingData(dataset, train_ids, held_out_ids, tiles, config.targets, tested_ids(dataset, config.fold))


def _refuse_unprepared(source: Dataset, config: Config) -> None:
    """Refuses what the description of a data set does not allow, before its preparation, which may take hours."""
    if source.faults or not source.labels:
        return  # preparation says so
    split_of(source, config)
    refuse_weights(config, tuple(learned_regions(source.labels, source.regions, config.targets) or source.labels))


def refuse_weights(config: Config, outputs: Sequence[str]) -> None:
    """Raises ValueError for class weights where the network has another number of outputs."""
    if config.class_weights and len(config.class_weights) != len(outputs):
        raise ValueError(
            f"--class-weights {' '.join(f'{weight:g}' for weight in config.class_weights)}: {len(outputs)} are needed, "
            f"for {', '.join(outputs)}"
        )


def read_headers(config: Config) -> Fingerprint:
    """Returns what the headers of a run's data say; nothing is prepared or written."""
    joins = prepare_settings(config).joins
    if not config.data:
        return phantom_fingerprint(config.phantoms, joins)
    return read_fingerprint(join_labels(read_dataset(config.data), joins))


def describe_data(fingerprint: Fingerprint, config: Config) -> str:
    """Returns a line on a data set; raises ``ValueError`` where it does not allow the config's split."""
    train_ids, held_out_ids = split_of(fingerprint, config)
    refuse_weights(config, fingerprint.outputs(config.targets))
    channels, outputs = (_listed(names) for names in (fingerprint.modalities, fingerprint.outputs(config.targets)))
    voxels = "x".join(map(str, fingerprint.shape))
    millimetres = "x".join(f"{size:.3g}" for size in fingerprint.spacing)
    return (
        f"{fingerprint.name} ({fingerprint.layout}): {quantity(len(fingerprint.ids), 'case')}, "
        f"{len(train_ids)} to train on, {len(held_out_ids)} held out; {channels}; learns {outputs}; median "
        f"{voxels} voxels of {millimetres} mm"
    )


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})"


def split_of(dataset: HasCases, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the ids of the cases to train on and to hold out."""
    train_ids, held_out_ids = split(dataset, int(config.fold) if config.fold.isdigit() else config.fold)
    return sample_cases(train_ids, config.train_cases), tuple(held_out_ids)


def step_tiles(tiles: TileSource, config: Config, count: int) -> TileSource:
    """Returns the source of the ``count`` tiles of a step; with --foreground-by count the last are centred."""
    return replace(tiles, step_tiles=count) if config.foreground_by == "count" else tiles


def training_tiles(dataset: PreparedDataset, ids: tuple[str, ...], config: Config) -> TileSource:
    """Returns the source of augmented tiles of the cases ``ids``."""
    per_volume = config.synthesis_per == "volume"
    volume_synthesis = VolumeSynthesis.of(dataset, config.synthesis) if config.synthesis and per_volume else None
    synthesis = TumourSynthesis.of(dataset, config.synthesis) if config.synthesis and not per_volume else None
    # as nnU-Net does with modalities whose background is 0
    keep_background = config.augment.split("+")[0] == "full" and "zscore" in dataset.recipe.schemes
    augmentation = augment(
        config.augment,
        config.tile,
        synthesis,
        order=ORDERS[config.interpolation],
        outside_label=dataset.ignore_label or 0,
        keep_background=keep_background,
    )
    return TileSource.of(dataset, ids, augmentation, config.foreground, volume_synthesis)
