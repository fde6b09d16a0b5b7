"""Validates on held-out volumes: by sliding windows, in one pass, or both; label maps go to RUN/validation."""

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqpar.cluster.stop_request import StopRequest
from seqpar.data.boxes import crop
from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.formats.dataset import Dataset
from seqpar.data.formats.joined_labels import join_labels
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.phantom.builtin import phantom
from seqpar.data.phantom.phantom_files import GENERATED, is_generated
from seqpar.data.preparation.cache import PreparedCase
from seqpar.data.preparation.prepared_case import Preparation, Properties
from seqpar.data.preparation.transforms import resample_label, to_ids
from seqpar.data.volumes import digest_file, write_volume
from seqpar.data.workers import ReportProgress
from seqpar.losses import LossParts, Readers
from seqpar.models.network import Network
from seqpar.parallel.collectives import all_reduce
from seqpar.prediction.logits_to_labels import (
    TEMPERATURES,
    best_temperature,
    negative_likelihoods,
    slabs_to_labels,
    step_between,
)
from seqpar.prediction.sliding_window import FinishedRows, padded_shape, sliding_window, whole_grid, whole_volume
from seqpar.prediction.window_grid import WINDOWS, Sliding
from seqpar.report.pictures import PicturedCase, draw_cases
from seqpar.report.planes import best_modality, count_vanished_regions, slices_of
from seqpar.runs.journal import Journal
from seqpar.runs.metrics_tail import BY_WINDOW, OF_ONE_WAY
from seqpar.runs.run_folder import origin_mark
from seqpar.scores.label_classes import labels_of_run
from seqpar.scores.label_files import Doubt, Pair, doubts_of, read_reference, score_pair
from seqpar.scores.label_scores import DEFAULT_SETTINGS, Scores, score, summarise
from seqpar.scores.summary_files import summary_content, write_output
from seqpar.settings.config import Config
from seqpar.settings.data_settings import prepare_settings
from seqpar.tasks.case_validation import NUM_PICTURED, CaseValidation, LabelWatch, ValidationResult, when_validated
from seqpar.terminal import bar
from seqpar.text import clock, name_images

REPLACED = (
    "has been replaced since this run prepared it: summary.json in validation/ scores the new label map, and the run's "
    "own scores are of the one before; train --resume with more --epochs prepares it again"
)


def dataset_of(config: Config) -> Dataset:
    """Returns the description of the run's data set."""
    dataset = read_dataset(config.data or phantom(config.phantoms, is_first=False))
    return join_labels(dataset, prepare_settings(config).joins)


def label_files(dataset: Dataset) -> dict[str, Path]:
    """Returns the label file of each case of a data set, of several readers the first one's."""
    return {case.id: case.label.absolute() for case in dataset.cases if case.label is not None}


def remove_predictions(folder: Path, ids: Collection[str]) -> None:
    """Removes the scores and label maps that an earlier validation left in a folder, and the folder if it is empty.

    - ``ids``: cases that it may be of, besides those that its scores name
    """
    with suppress(DataError, TypeError, LookupError, ValueError):
        ids = {*ids, *map(str, read_json(folder / "summary.json")["digests"])}
    for name in ("summary.json", *(f"{case}.nii.gz" for case in ids if Path(case).name == case)):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


class ValidationFolder:
    """Writes the folder, one case after the other; used by the first rank.

    ``description``: of the data set, as in config.json; ``find_dataset`` returns the data set with its label files;
    ``step``: of the run, for summary.json; ``preparation``: of its cases; ``window``: how they are predicted.
    """

    def __init__(
        self, folder: Path, description: Mapping[str, Any], find_dataset: Callable[[], Dataset], step: int,
        preparation: Preparation, window: str = "sliding",
    ) -> None:  # fmt: skip
        self.folder, self.labels, self.step = folder, labels_of_run(description), step
        self.preparation, self.window = preparation, window
        self.scored: list[tuple[Pair, Scores]] = []
        self.faults: list[DataError] = []
        self.label_files, self.doubts, self.digests = dict[str, Path](), dict[str, Doubt](), dict[str, str]()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").unlink(missing_ok=True)  # it describes other label maps from here on
            dataset = find_dataset()
            self.label_files, self.doubts = label_files(dataset), doubts_of(dataset, self.labels.classes.values())
            for case in {*description.get("train", ()), *description.get("held_out", ()), *self.label_files}:
                (folder / f"{case}.nii.gz").unlink(missing_ok=True)  # of an earlier network, whatever becomes of this
        except DataError as error:
            self.faults.append(error)
        except OSError as error:
            self.faults.append(DataError(folder, f"cannot be written ({error.strerror})"))

    def add(self, case: PreparedCase, ids: np.ndarray, shown: Sequence[int] | None = None) -> None:
        """Writes and scores one prediction; ``ids``: ``W D H``, on the scored grid; ``shown``: those of the truth."""
        if case.id not in self.label_files:
            return
        values = None if shown is None else tuple(case.properties.values[n] for n in shown)
        written = self.folder / f"{case.id}.nii.gz"
        pair = Pair(case.id, self.label_files[case.id], written, values, self.doubts.get(case.id))
        try:
            label = self.preparation.labels_to_source(ids, case.properties)
            write_volume(pair.prediction, label, case.properties.geometry, dtype=label.dtype)
            self.digests[case.id] = digest_file(written)
            self.scored.append((pair, score_pair(pair, self.labels, DEFAULT_SETTINGS)))
            if not case.was_made_from(pair.truth):
                self.faults.append(DataError(pair.truth, REPLACED))
        except DataError as error:
            self.faults.append(error)

    def move(self, folder: Path) -> None:
        """Has another folder take the label maps, before summary.json is written."""
        try:
            folder.mkdir(exist_ok=True)
            for case in self.digests:
                (self.folder / f"{case}.nii.gz").replace(folder / f"{case}.nii.gz")
            with suppress(OSError):  # another program's files may be there
                self.folder.rmdir()
        except OSError as error:
            self.faults.append(DataError(folder, f"cannot be written ({error.strerror})"))
        self.scored = [(pair._replace(prediction=folder / pair.prediction.name), own) for pair, own in self.scored]
        self.folder = folder

    def close(self) -> list[str]:
        """Writes summary.json and returns a warning for each fault."""
        if self.scored:
            content = summary_content(self.scored, self.labels, summarise([scores for _, scores in self.scored]))
            content |= {"settings": DEFAULT_SETTINGS, "faults": list(map(str, self.faults)), "step": self.step}
            content |= {"window": self.window, "digests": self.digests} | origin_mark(self.folder.parent)
            try:
                write_output(self.folder / "summary.json", json.dumps(content, indent=2) + "\n")
            except DataError as error:
                self.faults.append(error)
        return [f"warning: {fault}" for fault in self.faults]


class _Left(Exception):
    """All ranks leave before the end of a case."""


@dataclass
class _Measured:
    """What one kind of window gave, case after case; ``folder`` is where its label maps are kept, if they are."""

    window: str
    folder: ValidationFolder | None
    scores: list[Scores] = field(default_factory=list)
    losses: list[LossParts] = field(default_factory=list)
    likelihoods: Tensor = field(default_factory=lambda: torch.zeros(len(TEMPERATURES), dtype=torch.float64))
    pictured: list[PicturedCase] = field(default_factory=list)


class SegmentationValidation(CaseValidation):
    """Loss and Dice per class and region on held-out cases; the same on all ranks."""

    _is_explained = False  # whether a table has said what its columns mean

    @property
    def windows(self) -> tuple[str, ...]:
        """The kinds of window that are measured."""
        return WINDOWS if self.config.val_window == "both" else (self.config.val_window,)

    def refuse_whole(self, net: Network) -> None:
        """Raises ValueError where whole passes are to be measured and the network cannot make one over some case."""
        for name in self.ids if "whole" in self.windows else ():
            try:
                net.refuse_whole(padded_shape(self.data.dataset.cases[name].image.shape[1:], net.layout))
            except ValueError as error:
                line = f"--val-window {self.config.val_window}: case {name}: {error} (--val-window sliding)"
                raise ValueError(line) from None

    def run(self, net: Network, journal: Journal, stopper: StopRequest, keep: bool = False) -> ValidationResult | None:
        """Returns the result, None where all ranks leave before its end; ``keep``: writes RUN/validation too."""
        out, dataset = journal.path.parent, self.data.dataset
        shown = dataset.modalities.index(best_modality(dataset.modalities))
        net.eval()
        for window in WINDOWS if keep else ():  # left where the other window was better
            journal.attempt(partial(remove_predictions, out / f"validation-{window}", self.data.held_out_ids))
        kinds = [_Measured(window, self._folder(journal, window) if keep else None) for window in self.windows]
        began = time.monotonic()
        for number, name in enumerate(self.ids):
            case = dataset.cases[name]
            truth, spacing = dataset.consensus(case.truth), case.properties.spacing
            known: dict[str, Any] = {"ignore": dataset.ignore_label, "hidden": self.data.hidden_classes(name)}
            for at, kind in enumerate(kinds):
                tell = self._progress(journal, number, at, began)
                prediction = self._predict(net, case, kind.window, stopper, tell)
                if prediction is None:
                    net.train()
                    return None
                ids, parts, likelihoods = prediction
                kind.losses.append(parts)
                kind.likelihoods += likelihoods
                if keep:
                    self.refuse_taken_over()
                if kind.folder:
                    kind.folder.add(case, ids, dataset.annotated.get(name))
                ml = math.prod(spacing) * case.properties.geometry.slant / 1000
                own = score(truth, ids, self.data.classes, spacing, **known, surfaces=False, voxel_ml=ml)
                kind.scores.append(own)
                if self.mesh.is_first and number < NUM_PICTURED:
                    kind.pictured.append(self._pictured(case, ids, shown))
        net.train()
        self.refuse_taken_over()
        classes = [name for name, value in dataset.labels.items() if value]
        result, picture = _better([self._summary(kind) for kind in kinds]), out / "validation.png"
        better = next(kind for kind in kinds if kind.window == next(iter(result.windows)))
        if better.folder and kinds[0].folder and better is not kinds[0]:
            kinds[0].folder.move(out / f"validation-{kinds[0].window}")
            better.folder.move(out / "validation")

        def draw() -> None:
            when = when_validated(journal, result.row)
            draw_cases(picture, better.pictured, classes, len(self.ids), when, self.config.neurological)

        journal.draw(draw)
        lines = [result.text, *(line for kind in kinds if kind.folder for line in kind.folder.close())]
        lines += self._watch.look(self.ids if keep else ()) if self.mesh.is_first else []
        if not self._is_explained:
            lines.insert(1, "  (Dice: mean over cases; global: over the voxels of all cases together)")
            self._is_explained = True
        return replace(result, text="\n".join(lines), whole_grid=self._whole_grid(net))

    def _whole_grid(self, net: Network) -> tuple[int, ...]:
        """Returns the most tokens per direction in whole passes over the held-out cases, () where none is made."""
        shapes = [self.data.dataset.cases[name].image.shape[1:] for name in self.ids if "whole" in self.windows]
        return tuple(map(max, zip(*(whole_grid(net, shape) for shape in shapes))))

    def _folder(self, journal: Journal, window: str) -> ValidationFolder | None:
        """Returns RUN/validation on the first rank, and RUN/validation-whole where both kinds are measured; once these
        are, RUN/validation gets the label maps of the better.
        """
        if not self.mesh.is_first:
            return None
        name = "validation" if window == self.windows[0] else f"validation-{window}"
        find, step, out = lambda: dataset_of(self.config), journal.steps_done, journal.path.parent
        return ValidationFolder(out / name, self.data.describe(), find, step, self.data.dataset.preparation, window)

    def _pictured(self, case: PreparedCase, ids: np.ndarray, shown: int) -> PicturedCase:
        """Returns a case as pictures show it: on the grid of its image, in canonical axes."""
        preparation, properties = self.data.dataset.preparation, case.properties
        truth = self.data.dataset.consensus(case.label)
        turned = preparation.canonical_properties(properties)
        image, is_ct = np.asarray(case.image[shown]), turned.schemes[shown] == "ct"
        if is_ct:
            image = image * turned.stds[shown] + turned.means[shown]
        coarse, unknown = resample_label(ids, truth.shape), self.data.hidden_classes(case.id)
        hidden = [value for label, value in self.data.dataset.labels.items() if label in unknown]
        values = [value for value in self.data.dataset.labels.values() if value and value not in hidden]
        volumes = [image, truth, coarse]
        volumes += [soft.disputed(case.label)] if isinstance(soft := self.data.dataset.soft, Readers) else []
        image, truth, labels, *disputed = (preparation.canonical(volume, properties) for volume in volumes)
        name = f"{case.id} {GENERATED}" if is_generated(self.config.data) else case.id
        slices = slices_of(turned.geometry, turned.box, turned.shape)
        names = name_images(self.data.dataset.modalities)
        modality = names[shown] if len(names) > 1 else ""
        vanished = {
            "truth": self._count_vanished(case.id, turned, truth, values),
            "prediction": count_vanished_regions(ids, coarse, values),
        }
        spacing, doubt = turned.spacing, next(iter(disputed), None)
        return PicturedCase(name, image, truth, labels, spacing, slices, modality, doubt, is_ct, hidden, vanished)

    @cached_property
    def _vanished(self) -> dict[str, int]:
        return {}  # by case: the truth stays the same

    @cached_property
    def _watch(self) -> LabelWatch:
        return LabelWatch(self.data, lambda: dataset_of(self.config))

    @cached_property
    def _source(self) -> tuple[dict[str, Path], dict[str, Doubt], Dataset]:
        """The files of the truths, how they are written, and the data set."""
        dataset = dataset_of(self.config)
        return label_files(dataset), doubts_of(dataset), dataset

    def _count_vanished(self, name: str, turned: Properties, truth: np.ndarray, values: Sequence[int]) -> int:
        """Returns how many regions of a case's true file its prepared grid cannot show; 0 if the file is gone.

        - ``turned``: the case's properties in canonical axes; ``truth``: on that grid; ``values``: the class ids
        """
        if name not in self._vanished and any(few < many for few, many in zip(turned.shape, turned.box_shape)):
            with suppress(OSError, ValueError, LookupError):
                files, doubts, source = self._source
                whole = read_reference(files[name], doubts.get(name), regions=source.regions.values()).values
                fine = to_ids(crop(whole, turned.box), turned.values, tuple(source.joined.items()))
                self._vanished[name] = count_vanished_regions(fine, truth, values)
        return self._vanished.get(name, 0)

    def _progress(self, journal: Journal, number: int, window: int, began: float) -> ReportProgress:
        """Returns a function that shows which share of a case is done with one of the kinds of window.

        - ``number``, ``window``: of the case, and of the kind
        - ``began``: when the first case began
        """

        def tell(share: float) -> None:
            share = (window + share) / len(self.windows)
            done, total = number + share, len(self.ids)
            left = f"{clock((time.monotonic() - began) / done * (total - done))} left" if done else "? left"
            journal.progress([f"validating case {number + 1}/{total} {bar(share)} {share:.0%} of it", left])

        tell(0.0)
        return tell

    def _predict(
        self, net: Network, case: PreparedCase, window: str, stopper: StopRequest, tell: ReportProgress
    ) -> tuple[np.ndarray, LossParts, Tensor] | None:
        """Returns the class ids of a case, its loss, and the likelihoods of its voxels at each temperature ``t``.

        None where all ranks leave before its end. A case whose label shows only some classes has no likelihoods.
        """
        dataset, config = self.data.dataset, self.config
        annotated = self.data.annotated([case.id])
        annotated = None if annotated is None else annotated.to(self.mesh.device)
        sums = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        likelihoods, is_whole = sums.new_zeros(len(TEMPERATURES)), not self.data.hidden_classes(case.id)
        area = math.prod(case.image.shape[2:])
        step = step_between(case.image.shape[1] * area, area)
        if window == "whole":
            slabs = whole_volume([net], case.image, self.mesh, config.mirror, tell, config.precision)
        else:
            sliding = Sliding(config.tile, config.val_overlap, mirror=config.mirror, rule=config.window_rule)
            slabs = sliding_window([net], case.image, sliding, self.mesh, tell, config.precision)

        def summed() -> Iterator[FinishedRows]:
            """Yields the slabs and adds up their losses."""
            nonlocal sums, likelihoods
            for slab in slabs:
                if stopper.should_leave():
                    raise _Left
                low, high = slab.bounds[self.mesh.world.index : self.mesh.world.index + 2]
                truth = torch.from_numpy(np.array(case.label[low:high])).to(self.mesh.device)
                sums = sums + self.loss.sums(slab.logits[None], truth[None], annotated)
                if is_whole:
                    chosen = slice(-low * area % step, None, step)  # each step-th voxel of the case, on whichever rank
                    own = slab.logits.flatten(1)[:, chosen], truth.flatten()[chosen]
                    regions, ignore, soft = self.loss.regions, self.loss.ignore_label, self.loss.soft
                    likelihoods = likelihoods + negative_likelihoods(*own, regions, ignore, soft)
                handed_on = [slab]
                del slab  # or its logits would be alive while the next one is made
                yield handed_on.pop()

        grid = dataset.preparation.scored_grid(case.properties)
        try:
            shape, order = case.image.shape[1:], self.data.output_order
            ids = slabs_to_labels(summed(), shape, grid, self.mesh, order, refuse_nan=False)
        except _Left:
            return None
        parts = self.loss.of_sums(all_reduce(sums, self.mesh.world), annotated)
        return ids.numpy(), parts, all_reduce(likelihoods, self.mesh.world).cpu()

    def _summary(self, measured: _Measured) -> ValidationResult:
        summary, losses = summarise(measured.scores), measured.losses
        dice = {name: _nan_to_none(mean["Dice"]) for name, mean in summary["mean"].items()}
        global_dice = {name: _nan_to_none(pooled["Dice"]) for name, pooled in summary["global"].items()}
        terms = {name: float(torch.stack([one.terms[name] for one in losses]).mean()) for name in self.loss.weights}
        row = {
            "loss": self.loss.weighted(terms),
            **{f"{name}_loss": value for name, value in terms.items()},
            "dice": dice,
            "global_dice": global_dice,
            "cases": len(measured.scores),
        }
        known = [value for value in dice.values() if value is not None]
        width = max(len(name) for name in (*dice, "class"))
        lines = [f"validation on {self.counted}: loss {row['loss']:.4f}"]
        lines.append(f"  {'class':{width}}  Dice  global")
        lines += [f"  {name:{width}}  {_cell(dice[name])}  {_cell(global_dice[name])}" for name in dice]
        mean_dice = sum(known) / len(known) if known else 0.0
        temperature = best_temperature(measured.likelihoods.tolist())
        heat = {} if temperature is None else {measured.window: temperature}
        return ValidationResult(row, "\n".join(lines), mean_dice, {measured.window: mean_dice}, temperatures=heat)


def _better(results: Sequence[ValidationResult]) -> ValidationResult:
    """Returns the result of the kind of window with the highest mean Dice, over the classes that have a Dice in all; it
    says those of all.
    """
    if len(results) == 1:
        return results[0]
    known = [{name for name, dice in result.row["dice"].items() if dice is not None} for result in results]
    shared = [name for name in results[0].row["dice"] if all(name in own for own in known)]
    means = [fmean(result.row["dice"][name] for name in shared) if shared else result.score for result in results]
    order = sorted(range(len(results)), key=lambda n: -means[n])  # stable: sliding windows where they are equal
    ranked = [results[n] for n in order]
    windows = {window: means[n] for n in order for window in results[n].windows}
    told = ", ".join(f"{window} {dice:.3f}" for window, dice in windows.items())
    best, window = ranked[0], next(iter(windows))
    over = f" over {', '.join(shared)}" if shared else ", each over other classes"
    over *= any(len(own) > len(shared) for own in known)
    is_better = "the better" if max(means) - min(means) >= 5e-4 else "as good as the other"
    text = f"{best.text}\n  these are by --window {window}, {is_better} in mean Dice{over}: {told}"
    temperatures = {window: value for result in ranked for window, value in result.temperatures.items()}
    parts = {name: one.row for one in results for name in one.windows}
    each = {name: {key: own[key] for key in OF_ONE_WAY} for name, own in parts.items()}
    row = {**best.row, "window": window, "windows": windows, BY_WINDOW: each}
    return replace(best, row=row, text=text, windows=windows, temperatures=temperatures)


def _nan_to_none(value: float) -> float | None:
    """Returns None, which JSON knows, for NaN: no case has the class."""
    return None if np.isnan(value) else float(value)


def _cell(value: float | None) -> str:
    return " –   " if value is None else f"{value:.3f}"
