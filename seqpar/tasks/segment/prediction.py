"""Predicts label maps, case after case."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from seqpar.data.formats.dataset import Case
from seqpar.data.preparation.recipe import IN_HU
from seqpar.data.workers import ReportProgress
from seqpar.parallel.consensus import run_on_rank0
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.case_stream import CasePrediction, Request, record_of_weights
from seqpar.prediction.class_statistics import ClassStatistics
from seqpar.prediction.logits_to_labels import with_entropy
from seqpar.prediction.prediction_memory import footprint
from seqpar.prediction.predictor import PredictionSettings, Predictor
from seqpar.prediction.run_average import EnsembleMember, MeanProbabilities, ProbabilityFile, share_of_progress
from seqpar.prediction.sliding_window import Image, warn_beyond_training
from seqpar.prediction.window_grid import WindowGrid
from seqpar.runs.trained_run import TrainedRun, prediction_mode
from seqpar.scores.label_classes import labels_of_declaration
from seqpar.scores.label_files import DISAGREEMENT, ENTROPY, UNCERTAINTY
from seqpar.tasks.segment.label_map_folder import (
    DICOM_SEG,
    NPZ,
    PROBABILITIES,
    DicomFiles,
    EnsembleFiles,
    LabelMapFolder,
)
from seqpar.tasks.training_data import about_mirrored_copies, mirrors_sides_of
from seqpar.text import name_images, quantity
from seqpar.weights.weight_files import digest, shorten_list

LIKE_LABELS = "its file holds only label values: it may be a label map, not an image; further such files are not named"


class LabelMapPrediction(CasePrediction):
    """Writes the label map of each case."""

    what = "label maps"
    truth = "folder of the true label maps"
    page = "label maps over their images, and volumes; no truth is needed"
    folder: LabelMapFolder

    def __init__(self, request: Request, members: Sequence[EnsembleMember], mesh: Mesh) -> None:
        super().__init__(request, members, mesh)
        statistics = _statistics(request.output, self.run) if request.statistics else None
        ensemble = EnsembleFiles.of(self.run) if request.npz else None
        outputs = self.run.outputs if request.probabilities else ()
        maps = (ENTROPY, *[DISAGREEMENT] * (len(members) > 1)) if request.uncertainty else ()
        dicom = None
        if request.dicom_seg:
            weights = "".join(digest(path) for member in members for path in member.weights)
            dicom = DicomFiles(_classes(self.run), hashlib.sha256(weights.encode()).hexdigest()[:16])
        self.folder = LabelMapFolder(request.output, outputs, statistics, ensemble, maps, dicom)
        self.doubts = set[str]()  # about files, that were said: once each, whatever the number of such files

    def record(self) -> dict[str, Any]:
        runs = [record_of_weights(member) | {"settings": _that_act(member.settings)} for member in self.members]
        record: dict[str, Any] = runs[0] if len(runs) == 1 else {"runs": runs}
        record["probabilities"] = self.request.probabilities
        if self.request.npz:
            record["npz"] = True
        if self.request.dicom_seg:
            record["dicom_seg"] = True
        if self.request.uncertainty:
            record["uncertainty"] = True
        if self.request.statistics:
            record["statistics"] = True
        if "nogather" in self._modes():  # what a rank sees then depends on the size of the group
            record["seqpar"] = self.mesh.seq.size
        return record

    def other_files(self) -> list[str]:
        request, folder = self.request, self.request.output
        heats = {member.settings.temperature for member in self.members} - {1.0}
        divided = f" (logits divided by {heats.pop():.3g}, the temperature)" if heats else ""
        lines = [f"probabilities{divided}: {folder / PROBABILITIES}"] * request.probabilities
        lines += [f"probabilities as nnU-Net saves them{divided}: {folder / NPZ}"] * request.npz
        lines += [f"maps of uncertainty{divided}: {folder / UNCERTAINTY}"] * request.uncertainty
        lines += [f"DICOM segmentations: {folder / DICOM_SEG}"] * request.dicom_seg
        return [*lines, *super().other_files()]

    def announce(self, cases: str) -> None:
        self.shown.say(f"predicting {cases} with {self.weights_line}; {self._ranks_line()}")
        for line in filter(None, (member.run.averaged for member in self.members)):
            self.shown.say(line)
        for member in self.members:
            run, window = member.run, member.settings.window
            if len(run.windows) > 1:
                dices = ", ".join(f"{window} {dice:.3f}" for window, dice in run.windows.items())
                whose = f"of {run.path}" if len(self.members) > 1 else "in the run's validation"
                self.shown.say(f"--window {window}; mean Dice {whose}, over classes scored both ways: {dices}")
                if (window, run.window) == ("whole", "sliding"):
                    self.shown.warn(f"--window whole is the worse of both by the validation of {run.path}: remove it")

    def cautions(self) -> list[str]:
        lines = list[str]()
        for member in self.members:
            own, run = member.settings, member.run
            if mirrors_sides_of(run.recipe.plan, own.mirror) and not run.preparation.axes.startswith("nnU-Net's"):
                lines += about_mirrored_copies([*run.labels, *run.regions], own.mirror, "--mirror")
        return list(dict.fromkeys(lines))

    def report_flags(self) -> list[str]:
        inputs = self.request.inputs
        return ["--images", inputs[0] if len(inputs) == 1 else "IMAGES"]

    def predict_case(self, number: int, case: Case, tell: ReportProgress) -> str:
        folder, run, count = self.folder, self.run, len(self.predictors)
        probabilities: ProbabilityFile | None = None
        windows, writes, rows_of = list[str](), bool(folder.num_probabilities or folder.maps) or count > 1, None
        if folder.maps:
            alone = count == 1 and not folder.num_probabilities
            rows_of = partial(with_entropy, are_regions=run.learns_regions, alone=alone)
        try:
            for at, (predictor, image, target) in enumerate(self.distribute(number)):
                if self.mesh.is_first and not at:
                    probabilities = _probability_file(folder, case, target.shape, run, count)
                write_rows = None
                if writes:
                    write_rows = _ignore_rows if probabilities is None else probabilities.write_rows
                windows.append(self._say_size(predictor, case, image, target.shape))
                ids = predictor.class_ids(image, target, write_rows, share_of_progress(tell, at, count), rows_of)

            def write() -> str:
                properties, labels = self.prepared_cases.taken[0].properties, ids
                if doubt := properties.geometry.orientation_doubt:
                    self._warn_once(case, f"its file {doubt}; left and right, or other sides, may be swapped")
                if self.prepared_cases.is_like_labels:
                    self._warn_once(case, LIKE_LABELS)
                if isinstance(probabilities, MeanProbabilities):
                    with folder.writable():
                        labels = probabilities.class_ids(run.output_order)
                found = labels.numpy()
                kept = self.predictors[0].without_small(found, properties)
                values = self.predictors[0].kept_to_source(kept, properties)
                folder.write(case, values, properties, run.preparation, probabilities, self.prepared_cases.image)
                return self._say_emptied(found, kept)

            emptied = run_on_rank0(write, self.mesh.world)
        finally:
            if probabilities is not None:
                probabilities.remove()
        line = ", ".join([*dict.fromkeys(windows), *[emptied] * bool(emptied)])
        statistics = folder.statistics
        return f"{line}; {statistics.volumes(case.id)}" if statistics and self.mesh.is_first else line

    def _warn_once(self, case: Case, doubt: str) -> None:
        if doubt not in self.doubts:
            self.doubts.add(doubt)
            self.shown.warn(f"{case.id}: {doubt}")

    def _say_emptied(self, ids: np.ndarray, kept: np.ndarray) -> str:
        """Returns which classes of the predicted ids --min-component leaves nothing of; "" if there are none."""
        if kept is ids:
            return ""
        classes, given, left = self.run.regions or _foreground(self.run), np.unique(ids), np.unique(kept)
        lost = [name for name, own in classes.items() if np.isin(own, given).any() and not np.isin(own, left).any()]
        return f"--min-component leaves nothing of {shorten_list(lost, 3)}" if lost else ""

    def _say_size(self, predictor: Predictor, case: Case, image: Image, to_shape: Sequence[int]) -> str:
        """Returns how many voxels and windows a case has for a run; says before what a whole pass takes."""
        settings, run = predictor.settings, predictor.run
        resampled = " after resampling" if tuple(image.shape[1:]) != tuple(to_shape) else ""
        voxels = f"{'x'.join(map(str, image.shape[1:]))} voxels{resampled}"
        if settings.window == "whole":
            views, ranks = len(predictor.nets) * 2 ** len(settings.mirror), predictor.mesh.world.size
            memory = footprint(predictor.nets[0], image.shape[1:], len(run.outputs), ranks, to_shape, views)
            self.shown.say(f"{case.id}: a whole pass over {voxels} takes {memory}")
            if warning := warn_beyond_training(predictor.nets[0], image.shape[1:], run.whole_grid):
                self.shown.warn(f"{case.id}: {warning}")
            return f"{voxels}, one pass"
        count = len(WindowGrid.of(image.shape[1:], settings.sliding(run.config.tile, run.window_rule)).corners)
        return f"{voxels}, {quantity(count, 'window')}"

    def _modes(self) -> list[str]:
        """Returns how ranks decode a window of each run."""
        return [self.request.mode or prediction_mode(member.run) for member in self.members]

    def _ranks_line(self) -> str:
        """Returns how the ranks are grouped, with a warning if nogather runs on other parts than in training."""
        seq = self.mesh.seq.size
        line = quantity(self.mesh.world.size, "rank")
        if self.mesh.world.size > 1:
            line += f" = data {self.mesh.data.size} x seq {seq} (groups with other windows x ranks that share one)"
        for mode, member in zip(self._modes(), self.members):
            config = member.run.config
            if config.mode == "nogather" and (mode, seq) != ("nogather", config.seqpar):
                line += f" (trained in mode nogather on seq {config.seqpar}: parts now see other borders)"
        return line


def _that_act(settings: PredictionSettings) -> dict[str, Any]:
    """Returns the settings that predictions depend on; ``force`` only allows them."""
    left_out = ("force", "postprocessing", *["temperature"] * (settings.temperature == 1))
    record = {name: value for name, value in asdict(settings).items() if name not in left_out}
    steps = [[*values] for values in settings.postprocessing]
    return {**record, "mirror": [*settings.mirror], **({"postprocessing": steps} if steps else {})}


def _classes(run: TrainedRun) -> dict[str, tuple[int, ...]]:
    """Returns the run's labels and regions, in the files' label values."""
    values = run.recipe.values
    labels = {name: values[n] for name, n in run.labels.items()}
    regions = {name: tuple(values[n] for n in members) for name, members in run.regions.items()}
    return labels_of_declaration(labels, regions, None).classes


def _statistics(folder: Path, run: TrainedRun) -> ClassStatistics:
    """Returns the statistics of the run's labels and regions, in the files' label values."""
    names = [
        f"{name} (HU)" if scheme in IN_HU else name
        for name, scheme in zip(name_images(run.recipe.modalities), run.recipe.schemes)
    ]
    return ClassStatistics(folder, _classes(run), names)


def _probability_file(
    folder: LabelMapFolder, case: Case, shape: Sequence[int], run: TrainedRun, count: int
) -> ProbabilityFile | None:
    """Returns the temporary file of a case's probabilities, for ``count`` runs that of their mean; None for neither."""
    softmax = not run.learns_regions
    if count == 1:
        return folder.probability_file(case, shape, softmax)
    channels, has_entropy = len(run.outputs) + bool(folder.maps), bool(folder.maps)
    return MeanProbabilities(folder.temporary_file(case), (channels, *shape), softmax, count, has_entropy)


def _ignore_rows(first_row: int, rows: Tensor) -> None:
    """Stands for the writer of probabilities on the ranks that write nothing."""


def _foreground(run: TrainedRun) -> dict[str, tuple[int, ...]]:
    return {name: (number,) for name, number in run.labels.items() if number}
