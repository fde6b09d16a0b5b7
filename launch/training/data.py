"""TrainingData: the prepared data set, its split into cases to train on and to hold out, and its tiles."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from seqpar.data.formats.recognise import find, recognise
from seqpar.data.formats.splits import HasCases, split
from seqpar.data.phantom.builtin import phantom, phantom_fingerprint
from seqpar.data.preparation.cache import PreparedDataset
from seqpar.data.preparation.cache_place import outdated_cache
from seqpar.data.preparation.fingerprint import Fingerprint, read_fingerprint
from seqpar.data.preparation.prepare import PrepareSettings, prepared
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.augmentation_presets import ORDERS
from seqpar.data.sampling.tiles import TileSource
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.data.sampling.volume_synthesis import VolumeSynthesis
from seqpar.data.workers import silent
from seqpar.decoders.modes.mode import Mode
from seqpar.launch.evaluation.classes import hidden_classes, labels_of_declaration
from seqpar.launch.job.progress_bar import ProgressBar
from seqpar.launch.settings.config import Config


@dataclass(frozen=True)
class TrainingData:
    """A prepared data set, the ids of its training and held-out cases, and the source of training tiles."""

    dataset: PreparedDataset
    train_ids: tuple[str, ...]
    held_out_ids: tuple[str, ...]
    tiles: TileSource
    targets: str = "regions"

    @property
    def num_channels(self) -> int:
        return len(self.dataset.modalities)

    @property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """The labels of each region, learned by sigmoids; empty where single labels are learned, by a softmax."""
        return tuple(self.dataset.regions.values()) if self.targets == "regions" else ()

    @property
    def output_names(self) -> tuple[str, ...]:
        """What the network's outputs stand for: regions, or labels with the background first."""
        return tuple(self.dataset.regions if self.regions else self.dataset.labels)

    @property
    def num_outputs(self) -> int:
        return len(self.output_names)

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
        recipe = self.dataset.recipe.to_json()
        return {**description, "recipe": recipe, "prepared": str(self.dataset.path.absolute()), **ids}


def outputs_shown(data: TrainingData, cases: Sequence[str], mode: Mode, device: torch.device) -> Tensor | None:
    """Returns which outputs the labels of this rank's samples show, of the group's ``cases``; None where all do."""
    annotated = data.annotated(cases)
    return None if annotated is None else mode.samples(annotated.to(device))


def open_data(config: Config, is_first: bool) -> TrainingData:
    """Returns the data of a run; the first process prepares what is missing, the others wait for its files.

    Needs no process group. Raises ``ValueError`` where the data do not allow the config's split or augmentation.
    """
    folder = config.data or str(
        phantom(config.phantoms, is_first, ProgressBar("making phantoms") if is_first else silent)
    )
    settings, progress = PrepareSettings.spaced(config.spacing), ProgressBar("preparing") if is_first else silent
    dataset = prepared(folder, config.cache or None, settings, is_first=is_first, progress=progress)
    if is_first and config.data and (line := outdated_cache(find(config.data), dataset.path.absolute())):
        print(line, flush=True)
    train_ids, held_out_ids = split_of(dataset, config)
    tiles = training_tiles(dataset, train_ids, config)
    return TrainingData(dataset, train_ids, held_out_ids, tiles, config.targets)


def look_at(config: Config) -> Fingerprint:
    """Returns what the headers of a run's data say; nothing is prepared or written."""
    return read_fingerprint(recognise(config.data)) if config.data else phantom_fingerprint(config.phantoms)


def describe_data(fingerprint: Fingerprint, config: Config) -> str:
    """Returns a line on a data set; raises ``ValueError`` where it does not allow the config's split."""
    train_ids, held_out_ids = split_of(fingerprint, config)
    channels, outputs = (_listed(names) for names in (fingerprint.modalities, fingerprint.outputs(config.targets)))
    voxels = "x".join(map(str, fingerprint.shape))
    millimetres = "x".join(f"{size:.3g}" for size in fingerprint.spacing)
    return (
        f"{fingerprint.name} ({fingerprint.layout}): {len(fingerprint.ids)} cases, {len(train_ids)} to train on, "
        f"{len(held_out_ids)} held out; {channels}; learns {outputs}; median {voxels} voxels of {millimetres} mm"
    )


def _listed(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})"


def split_of(dataset: HasCases, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the ids of the cases to train on and to hold out."""
    train_ids, held_out_ids = split(dataset, int(config.fold) if config.fold.isdigit() else config.fold)
    return tuple(train_ids), tuple(held_out_ids)


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
