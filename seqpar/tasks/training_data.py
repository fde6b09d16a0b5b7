"""TrainingData: prepared cases, their split into cases to train on and to hold out, their tiles, and a few lines."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seqpar.data.boxes import Unlabelled
from seqpar.data.formats.splits import HasCases, sample_cases, split
from seqpar.data.phantom.phantom_files import describe_layout, is_generated
from seqpar.data.preparation.cache import PreparedDataset
from seqpar.data.preparation.fingerprint import Fingerprint
from seqpar.data.sampling.augmentation import augment
from seqpar.data.sampling.augmentation_presets import ORDERS, RECIPES
from seqpar.data.sampling.loader import MicroBatch
from seqpar.data.sampling.tiles import TileSource
from seqpar.data.sampling.tumour_synthesis import TumourSynthesis
from seqpar.data.sampling.volume_synthesis import VolumeSynthesis
from seqpar.decoders.modes.mode import Mode
from seqpar.losses import LOSSES, SoftLabels, needs_marks, takes_soft_labels
from seqpar.parallel.device_constants import copy_to_device
from seqpar.planner.tile_choice import tile_advice
from seqpar.runs.fold_folder import started_folds
from seqpar.runs.run_folder import UNTAUGHT, holds_folds, read_config, validates_trained
from seqpar.runs.sweep_folder import list_some
from seqpar.scores.label_classes import hidden_classes, labels_of_declaration, learned_regions
from seqpar.settings.config import Config
from seqpar.settings.presets import FROM_DATA
from seqpar.text import list_modalities, name_images, quantity
from seqpar.weights.facts import FILE_DIGESTS, VOXELS

if TYPE_CHECKING:
    from seqpar.report.record import RunRecord


@dataclass(frozen=True)
class TrainingData:
    """A prepared data set, the ids of its cases to train on, to hold out and to test on, and the source of tiles.

    - ``by_patient``: whether scans of a patient were kept on one side
    """

    dataset: PreparedDataset
    train_ids: tuple[str, ...]
    held_out_ids: tuple[str, ...]
    tiles: TileSource
    targets: str = "regions"
    test_ids: tuple[str, ...] = ()
    by_patient: bool = False

    @property
    def num_channels(self) -> int:
        return len(self.dataset.modalities)

    @property
    def validates_trained(self) -> bool:
        """Whether the cases to validate on are those to train on."""
        return validates_trained({"train": self.train_ids, "held_out": self.held_out_ids})

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
        """Returns ``count`` of the held-out cases; 0: all of them."""
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
        recipe, how = self.dataset.recipe.to_json(), {BY_PATIENT: True} if self.by_patient else {}
        return {**description, "recipe": recipe, "prepared": str(self.dataset.path.absolute()), **ids, **how}

    def describe_cases(self, config: Config) -> dict[str, Any]:
        """Returns what config.json records of the single cases; reads small files of each."""
        own = {"digests": self.digests(), VOXELS: self.voxels(), FILE_DIGESTS: self.files(), "medians": self.medians()}
        return own | ({UNTAUGHT: names} if (names := self.untaught(config)) else {})

    def untaught(self, config: Config) -> list[str]:
        """Returns the scored classes that no case to train on has, of those whose labels show them; reads a small file
        of each.
        """
        return self._lacking(self.train_ids) if config.task == "segment" and not config.synthesis else []

    def _lacking(self, ids: Collection[str]) -> list[str]:
        """Returns the scored classes without a labelled voxel in these cases."""
        present, soft = set[str](), self.dataset.soft
        for name in ids:
            case, hidden = self.dataset.cases[name], self.hidden_classes(name)
            counts = case.properties.counts if soft is None else ()
            found = {n for n, count in enumerate(counts) if count} if soft is None else case.locations.keys()
            present |= {kind for kind, own in self.classes.items() if kind not in hidden and found & {*own}}
        return [kind for kind in self.classes if kind not in present]

    def about_untaught(self, config: Config) -> list[str]:
        """Returns a warning if no case to train on has some class; reads a small file of each case."""
        if not (names := self.untaught(config)):
            return []
        it = "it" if len(names) == 1 else "them"
        what = f"{'any of ' * (len(names) > 1)}{list_some(names, ', ')}"
        ways = [f"raise --train-cases (now {config.train_cases})"] * bool(config.train_cases)
        ways += ["choose another --fold"] * (config.fold != "all")
        others = not {*names} <= {*self._lacking(self.dataset.ids)}
        advice = f"; {' or '.join(ways)}" * bool(ways and others)
        return [f"warning: no case to train on has {what}: the network cannot learn {it} from these cases{advice}"]

    def digests(self) -> dict[str, str]:
        """Returns a digest of the prepared arrays of each case of the data, with its class and which classes its labels
        show, if tables say so; reads a small file of each.
        """
        data, found = self.dataset, dict[str, str]()
        numbers = data.volume_classes.numbers if data.volume_classes else {}
        for case in sorted(data.cases):
            words = [data.cases[case].digest]
            words += [data.volume_classes.names[numbers[case]]] if data.volume_classes and case in numbers else []
            words += [f"shows {' '.join(map(str, data.annotated[case]))}"] if case in data.annotated else []
            found[case] = ", ".join(words)
        return found

    def voxels(self) -> dict[str, str]:
        """Returns digests of the images' voxels of each case, however they are stored and prepared, if known."""
        return {case: own for case in sorted(self.dataset.cases) if (own := self.dataset.cases[case].voxels)}

    def files(self) -> dict[str, str]:
        """Returns digests of each case's files, images and labels, however they are prepared."""
        return {case: self.dataset.cases[case].files for case in sorted(self.dataset.cases)}

    def medians(self) -> dict[str, list[float]]:
        """Returns median sizes of the cases, W D H: prepared, and cropped at the files' spacing; reads a small file of
        each.
        """
        cases = [self.dataset.cases[case].properties for case in (*self.train_ids, *self.held_out_ids)]
        is_turned = self.dataset.recipe.plan is None or self.dataset.recipe.plan.turns
        sizes: dict[str, list[tuple[float, ...]]] = {
            "shape": [case.shape for case in cases],
            "cropped_shape": [case.box_shape for case in cases],
            "file_spacing": [case.geometry.canonical_spacing if is_turned else case.geometry.spacing for case in cases],
        }
        return {name: np.median(rows, axis=0).tolist() for name, rows in sizes.items()}


def outputs_shown(data: TrainingData, cases: Sequence[str], mode: Mode, device: torch.device) -> Tensor | None:
    """Returns which outputs the labels of this rank's samples show, of the group's ``cases``; None where all do."""
    annotated = data.annotated(cases)
    return None if annotated is None else mode.samples(copy_to_device(annotated, device))


def refuse_weights(config: Config, outputs: Sequence[str]) -> None:
    """Raises ValueError for class weights where the network has another number of outputs."""
    if config.class_weights and len(config.class_weights) != len(outputs):
        raise ValueError(
            f"--class-weights {' '.join(f'{weight:g}' for weight in config.class_weights)}: {len(outputs)} are needed, "
            f"for {', '.join(outputs)}"
        )


def refuse_for_soft_labels(config: Config, soft: SoftLabels | None) -> None:
    """Raises ValueError for settings that labels with doubt have no meaning for."""
    if soft is None:
        return
    if not takes_soft_labels(config.loss):
        able = ", ".join(name for name in LOSSES if takes_soft_labels(name))
        raise ValueError(f"--loss {config.loss}: labels with doubt have probabilities: choose one of {able}")
    if config.class_weights:
        raise ValueError("--class-weights: labels with doubt have no class per voxel to weight: remove it")
    if config.synthesis:
        raise ValueError(f"--synthesis {config.synthesis}: no tumours are made in labels with doubt: remove it")


BY_PATIENT = "by_patient"  # in config.json; runs of earlier versions lack it, and are split by case


def splits_by_patient(config: Config) -> bool:
    """Returns whether a run keeps all scans of a patient on one side; one that has begun stays as it was.

    The same holds for the further folds of a training of five.
    """
    if not config.resume and not (config.out and holds_folds(Path(config.out).parent)):
        return True
    begun = [config.out] if config.resume else started_folds(Path(config.out).parent)
    return all(read_config(run).get("dataset", {}).get(BY_PATIENT) is True for run in begun[:1])


def split_of(dataset: HasCases, config: Config) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the ids of the cases to train on and to hold out."""
    fold = int(config.fold) if config.fold.isdigit() else config.fold
    train_ids, held_out_ids = split(dataset, fold, splits_by_patient(config))
    return sample_cases(train_ids, config.train_cases), tuple(held_out_ids)


def step_tiles(tiles: TileSource, config: Config, count: int) -> TileSource:
    """Returns the source of the ``count`` tiles of a step; with --foreground-by count the last are centred."""
    tiles = replace(tiles, shifted=config.foreground_shift)
    return replace(tiles, step_tiles=count) if config.foreground_by == "count" else tiles


def training_tiles(dataset: PreparedDataset, ids: tuple[str, ...], config: Config) -> TileSource:
    """Returns the source of augmented tiles of the cases ``ids``."""
    per_volume = config.synthesis_per == "volume"
    volume_synthesis = VolumeSynthesis.of(dataset, config.synthesis) if config.synthesis and per_volume else None
    synthesis = TumourSynthesis.of(dataset, config.synthesis) if config.synthesis and not per_volume else None
    augmentation = augment(
        config.augment,
        config.tile,
        synthesis,
        order=ORDERS[config.interpolation],
        outside_label=dataset.ignore_label or 0,
        keep_background=_keeps_background(dataset, config),
        soft=dataset.soft,
    )
    tiles = TileSource.of(dataset, ids, augmentation, config.foreground, volume_synthesis)
    return replace(tiles, marks_skeletons=needs_marks(config.loss))


def unlabelled_tiles(
    dataset: PreparedDataset, ids: Sequence[str], config: Config, from_middle: bool = False
) -> TileSource:
    """Returns the source of augmented tiles of images alone, of the cases ``ids``.

    - ``from_middle``: a tile is the middle of its case, or all of it
    """
    cases = tuple(Unlabelled(dataset.cases[name]) for name in sorted(set(ids)))
    order, keep_background = ORDERS[config.interpolation], _keeps_background(dataset, config)
    augmentation = augment(config.augment, config.tile, order=order, keep_background=keep_background)
    return TileSource(cases, augmentation, len(dataset.modalities), 1, 0.0, from_middle=from_middle)


def _keeps_background(dataset: PreparedDataset, config: Config) -> bool:
    """Returns whether augmentation leaves a background of 0 alone, as nnU-Net does with such modalities."""
    return config.augment.split("+")[0] == "full" and "zscore" in dataset.recipe.schemes


def describe_images(fingerprint: Fingerprint, split: Sequence[Sequence[str]], learns: str) -> str:
    """Returns a line about images by their headers.

    - ``split``: the ids of the cases to train on and to hold out
    - ``learns``: what is learned from them
    """
    voxels, millimetres = (span(rows, "{:.3g}") for rows in (fingerprint.shapes, fingerprint.spacings))
    images = ", ".join(name_images(fingerprint.modalities))
    return (
        f"{fingerprint.name} ({fingerprint.layout}): {quantity(len(fingerprint.ids), 'case')}, "
        f"{len(split[0])} to train on, {len(split[1])} held out; {images}; {learns}; "
        f"{voxels} voxels of {millimetres} mm"
    )


def mirrors_sides(augment: str) -> bool:
    """Returns whether an augmentation exchanges left and right."""
    recipe = RECIPES[augment.split("+")[0]]()
    return bool(recipe.mirror.probability) and 0 in recipe.mirror_axes


def exchanged_sides(names: Collection[str], augment: str) -> str:
    """Returns which names of left and right an augmentation mirrors onto each other, in words; "" of none."""
    return _sides(names) if mirrors_sides(augment) else ""


def _sides(names: Collection[str]) -> str:
    """Returns which names a mirror exchanges, as ``exchanged_sides`` says it."""
    right = {name: _LEFT.sub(lambda own: _RIGHT_OF[own[0].lower()], name).lower() for name in names}
    lower = {name.lower(): name for name in names}
    pair = next((f"{name} and {lower[to]}" for name, to in right.items() if to != name.lower() and to in lower), "")
    alone = next(filter(_SIDE.fullmatch, names), "")
    return pair or f"left and right, so that {alone} may name either side" * bool(alone)


_SIDE = re.compile("(left|right)([ _-]side)?", re.IGNORECASE)  # not as in "left atrium", which is told by its form
_LEFT, _RIGHT_OF = re.compile("left|(?<![a-z])l(?![a-z])", re.IGNORECASE), {"left": "right", "l": "r"}


def about_sides(names: Collection[str], augment: str, what: str = "tiles") -> list[str]:
    """Returns a sentence if training exchanged names of the left and the right side; ``what`` it mirrored."""
    with suppress(KeyError):  # a recipe of another version
        if sides := exchanged_sides(names, augment):
            told = f"Training mirrored {what} (--augment {augment}), which exchanges {sides}"
            return [f"{told}: these may be confused. --augment none does not mirror."]
    return []


def sides_of_run(record: "RunRecord") -> list[str]:
    """Returns the same of a run's classes."""
    augment = str(record.config.get("augment", "none"))
    return about_sides(_names_in(record), augment, "volumes" if record.outputs else "tiles")


def _names_in(record: "RunRecord") -> list[str]:
    return record.outputs or [*record.label_names.values(), *map(str, record.dataset.get("regions") or ())]


def copies_of_run(record: "RunRecord", ways: Iterable[Mapping[str, Any]] | None = None) -> list[str]:
    """Returns a sentence if a run's predictions are means over copies that exchange names of the left and the right.

    - ``ways``: the settings of these predictions; None: they are those of its validation
    """
    letters = str(record.config.get("val_mirror", "none"))
    directions, flag = {n for n, letter in enumerate("WDH") if letter in letters}, f"--val-mirror {letters}"
    if ways is not None:
        given = [own.get("mirror") for own in ways if isinstance(own, dict)]
        directions, flag = {number for own in given if isinstance(own, list) for number in own}, "--mirror"
    plan = (record.dataset.get("recipe") or {}).get("plan")
    return about_mirrored_copies(_names_in(record), directions if mirrors_sides_of(plan, directions) else (), flag)


def mirrors_sides_of(plan: Any, directions: Collection[int]) -> bool:
    """Returns whether copies that are mirrored in these directions exchange left and right: along W, as volumes lie in
    canonical axes; those of files may not, unless all three are mirrored.

    - ``plan``: of nnU-Net's, as a recipe or config.json has it; None for our own preparation
    """
    reader = plan.get("reader") if isinstance(plan, dict) else getattr(plan, "reader", "")
    is_canonical = not plan or str(reader).endswith("WithReorient")
    return 0 in directions if is_canonical else {0, 1, 2} <= {*directions}


def sides_of_each(records: "Mapping[str, RunRecord]", with_copies: bool = True) -> list[str]:
    """Returns a sentence on the runs whose training exchanged the same names, by the names of these runs.

    - ``with_copies``: also on those whose validation is a mean over copies that do
    """
    found = dict[str, list[str]]()
    for name, record in records.items():
        for told in [*sides_of_run(record), *(copies_of_run(record) if with_copies else ())]:
            found.setdefault(f"{told[0].lower()}{told[1:]}", []).append(name)
    return [f"{list_some(names, ', ')}: {told}" for told, names in found.items()]


def about_mirrored_copies(names: Collection[str], directions: Collection[int], flag: str) -> list[str]:
    """Returns a sentence if predictions are means over copies that exchange names of the left and the right side.

    - ``directions``: in which copies are mirrored, 0 from left to right; ``flag``: the option that asks for it
    """
    if 0 not in directions or not (sides := _sides(names)):
        return []
    told = f"A prediction is the mean over copies mirrored from left to right ({flag}), which exchanges {sides}"
    return [f"{told}: these may be confused. {flag.split()[0]} none does not mirror."]


def case_lines(data: TrainingData, config: Config) -> list[str]:
    """Returns the lines on cases, modalities and sizes; reads a small file of each case."""
    dataset = data.dataset
    properties = [case.properties for case in dataset.cases.values()]
    sizes = span([p.shape for p in properties], "{:.0f}"), span([p.spacing for p in properties], "{:.3g}")
    split = f"{len(data.train_ids)} to train on, {len(data.held_out_ids)} held out (fold {config.fold})"
    if data.validates_trained:
        count = len(data.train_ids)
        split = f"{count} to train on, also used to validate (fold {config.fold}): scores say nothing about new cases"
    layout = describe_layout(str(dataset.described.get("layout", "prepared")), is_generated(config.data))
    cases = quantity(len(properties), "case")
    return [
        f"data: {dataset.name} ({layout}), {cases}: {split}",
        f"  modalities: {list_modalities(dataset.modalities)}",
        f"  prepared in {dataset.path}: {sizes[0]} voxels of {sizes[1]} mm",
    ]


def tile_line(config: Config, flags: Collection[str], preset: str, data: TrainingData | Fingerprint) -> str:
    """Returns a line on a tile that suits the cases better than the preset's, "" where none does.

    - ``flags``: the settings on the command line
    """
    if config.resume or {"tile", "curriculum", "plans"} & set(flags) or preset in FROM_DATA:
        return ""
    if isinstance(data, Fingerprint):
        return tile_advice(config, data.shape, data.spacing)
    properties = [case.properties for case in data.dataset.cases.values()]
    w, d, h = np.median([p.shape for p in properties], 0)
    spacing = np.median([p.spacing for p in properties], 0).tolist()
    return tile_advice(config, (round(w), round(d), round(h)), spacing)


def span(rows: Any, form: str) -> str:
    """Returns the sizes along W, D, H, where they differ between cases from the smallest to the largest."""

    def spelled(sizes: Sequence[float]) -> str:
        return " x ".join(form.format(size) for size in sizes)

    rows = np.asarray(rows)
    low, high = spelled(rows.min(0)), spelled(rows.max(0))
    return low if low == high else f"{low} to {high}"
