"""The folder that predicted label maps are written to.

FOLDER/CASE.nii.gz            label map, written last: a case that has it is done
FOLDER/probabilities/…        CASE_OUTPUT.nii.gz, on request
FOLDER/uncertainty/…          CASE_entropy.nii.gz and, of several runs, CASE_disagreement.nii.gz, on request
FOLDER/dicom-seg/…            CASE.dcm of a DICOM series, on request
FOLDER/npz/…                  CASE.npz, CASE.pkl, plans.json and dataset.json, on request
FOLDER/statistics.csv         on request
Images in .nrrd and .mha get files of their own format, DICOM series .nii.gz.
"""

import pickle
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.dicom_series import is_series, is_whole_segmentation, name_series, write_segmentation
from seqpar.data.errors import DataError
from seqpar.data.files import read_json, strip_suffix, suffix_of, whole_file, write_bytes, write_json
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.nnunet_plans import declaration_of
from seqpar.data.geometry import Geometry, from_canonical, to_canonical
from seqpar.data.preparation.prepared_case import Preparation, Properties
from seqpar.data.volumes import output_suffix, read_volume, write_volume
from seqpar.prediction.class_statistics import NAME as STATISTICS
from seqpar.prediction.class_statistics import ClassStatistics, drop_cases, read_lines
from seqpar.prediction.prediction_folder import RECORD, PredictionFolder, is_as_written, is_whole, map_stamp
from seqpar.prediction.run_average import ProbabilityFile
from seqpar.runs.nnunet_export import dataset_of
from seqpar.runs.run_folder import read_config
from seqpar.runs.trained_run import TrainedRun
from seqpar.scores.label_files import UNCERTAINTY
from seqpar.weights.nnunet_results import DATASET, PLANS, is_results

PROBABILITIES, NPZ, DICOM_SEG = "probabilities", "npz", "dicom-seg"


@dataclass(frozen=True)
class EnsembleFiles:
    """Probabilities as nnU-Net saves them, and what else ``nnUNetv2_ensemble -i FOLDER/npz …`` reads.

    - ``plans``, ``dataset``: plans.json, by whose reader the arrays' axes go, and dataset.json
    - ``outputs``: the names of the channels
    """

    plans: Mapping[str, Any]
    dataset: Mapping[str, Any]
    outputs: tuple[str, ...]

    @staticmethod
    def of(run: TrainedRun) -> "EnsembleFiles":
        """Returns those of a run; raises ValueError for outputs that dataset.json cannot declare."""
        if is_results(run.path):
            return EnsembleFiles(read_json(run.path / PLANS), read_json(run.path / DATASET), run.outputs)
        order = [0, 1, 2]
        plans: dict[str, Any] = {
            "dataset_name": run.path.name, "plans_name": "seqpar", "configurations": {},
            "image_reader_writer": run.recipe.plan.reader if run.recipe.plan else "SimpleITKIO",
            "transpose_forward": order, "transpose_backward": order,
        }  # fmt: skip
        return EnsembleFiles(plans, dataset_of(run, read_config(run.path)["dataset"]), run.outputs)

    def paths(self, folder: Path, cases: Sequence[Case]) -> list[Path]:
        """Returns the files of these cases and those that all share."""
        own = [folder / NPZ / f"{case.id}{suffix}" for case in cases for suffix in (".npz", ".pkl")]
        return [*own, folder / NPZ / PLANS, folder / NPZ / DATASET]

    def write(self, folder: Path, case: Case, channels: Sequence[np.ndarray], geometry: Geometry) -> None:
        """Writes a case's probabilities; ``channels``: of each output, in the file's geometry."""
        array, plain, plans, dataset = self.paths(folder, [case])
        array.parent.mkdir(exist_ok=True)
        for path, content in ((plans, self.plans), (dataset, self.dataset)):
            write_json(path, dict(content))
        reader = str(self.plans.get("image_reader_writer", "SimpleITKIO"))
        if reader.endswith("WithReorient"):
            channels = [to_canonical(channel, geometry.orientation) for channel in channels]
        affine = geometry.canonical_affine if reader.endswith("WithReorient") else geometry.affine
        steps = np.linalg.norm(affine[:3, :3], axis=0)
        to_lps = np.diag([-1.0, -1.0, 1.0])
        properties = {
            "spacing": steps[::-1].tolist(),
            "sitk_stuff": {
                "spacing": tuple(steps.tolist()),
                "origin": tuple((to_lps @ affine[:3, 3]).tolist()),
                "direction": tuple((to_lps @ affine[:3, :3] / steps).reshape(-1).tolist()),
            },
            "nibabel_stuff": {"original_affine": geometry.affine, "reoriented_affine": geometry.canonical_affine},
        }
        with whole_file(array) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, probabilities=np.stack([channel.T for channel in channels]).astype(np.float32))
        write_bytes(plain, pickle.dumps(properties))


FAR = 0.05  # rounding changes no probability by so much


@dataclass(frozen=True)
class SavedProbabilities:
    """Probabilities of a case in a file: those that ``--npz`` wrote, or nnU-Net's.

    - ``label_map``: of the same case, in whose geometry they are
    - ``folder``: with plans.json and dataset.json
    """

    path: Path
    label_map: Path
    folder: Path

    @staticmethod
    def of(label_map: Path) -> "SavedProbabilities | None":
        """Returns those of a label map, in its folder or in npz/ under it; None if there are none."""
        own = label_map.parent
        for path in (own / NPZ / f"{strip_suffix(label_map.name)}.npz", own / f"{strip_suffix(label_map.name)}.npz"):
            for folder in (path.parent, *own.parents[1:2]):  # nnU-Net's validations lie in its results folder
                if path.is_file() and all((folder / name).is_file() for name in (PLANS, DATASET)):
                    return SavedProbabilities(path, label_map, folder)
        return None

    def read(self) -> tuple[np.ndarray, Geometry]:
        """Returns the probabilities ``k W D H`` in the axes of the label map's file, and its geometry."""
        _, geometry, _ = read_volume(self.label_map)
        try:
            with np.load(self.path) as content:
                array = content["probabilities"].astype(np.float32).transpose(0, 3, 2, 1)
        except MemoryError:
            raise
        except Exception as error:  # of numpy, zipfile and zlib: a damaged archive raises many kinds
            raise DataError(self.path, f"cannot be read as probabilities ({error}): predict the case again") from error
        if str(read_json(self.folder / PLANS).get("image_reader_writer")).endswith("WithReorient"):
            array = from_canonical(array, geometry.orientation)
        return array, geometry

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """The label values that each output stands for: one of a label, those of a region."""
        declared = declaration_of(read_json(self.folder / DATASET), self.folder / DATASET)
        return list(declared.regions.values()) if declared.regions else [(n,) for n in declared.labels.values()]

    def contradicted(self, probabilities: np.ndarray) -> float:
        """Returns the share of the label map's labelled voxels in which another label is more probable by far.

        Postprocessing may have removed labels, so voxels of background tell nothing.
        """
        labels = read_volume(self.label_map)[0][0]
        inside = labels != 0
        given, values = probabilities[:, inside], labels[inside]
        order = declaration_of(read_json(self.folder / DATASET), self.folder / DATASET).regions_class_order
        most: Any = 0.5 if order else given.max(0, initial=0)
        wrong = np.ones(values.shape, bool)
        for channel, value in zip(given, order or [value for (value,) in self.outputs]):
            wrong &= (values != value) | (most - channel > FAR)
        return float(wrong.mean()) if wrong.size else 0.0

    def write_mean(self, other: "SavedProbabilities", path: Path) -> None:
        """Writes the label map of the mean of both, as ``nnUNetv2_ensemble`` does."""
        (mean, geometry), (more, _) = self.read(), other.read()
        if mean.shape != more.shape:
            raise DataError(
                other.path, f"holds {more.shape} probabilities, and {self.path} {mean.shape}: average predictions of "
                "the same outputs for the same images"
            )  # fmt: skip
        mean = (mean + more) / 2
        order = declaration_of(read_json(self.folder / DATASET), self.folder / DATASET).regions_class_order
        labels = np.zeros(mean.shape[1:], np.uint16)
        for region, value in zip(mean, order):
            labels[region > 0.5] = value
        write_volume(path, labels if order else mean.argmax(0).astype(np.uint16), geometry, np.uint16)


@dataclass(frozen=True)
class DicomFiles:
    """DICOM segmentations of DICOM series.

    - ``classes``: the label values of each segment, by name
    - ``network``: a number that tells the network's weights from others
    """

    classes: Mapping[str, Sequence[int]]
    network: str

    @staticmethod
    def name_series(cases: Sequence[Case]) -> tuple[dict[str, dict[str, str]], dict[str, DataError]]:
        """Returns the names of the cases' series, and what is wrong with others; refuses images that are not DICOM."""
        names, unusable = dict[str, dict[str, str]](), dict[str, DataError]()
        if others := [case.images[0] for case in cases if not is_series(case.images[0])]:
            more = f" (nor are {len(others) - 1} others)" if len(others) > 1 else ""
            raise DataError(
                others[0], f"is not a DICOM series{more}, and --dicom-seg writes segmentations of these: predict "
                "other images without it"
            )  # fmt: skip
        for case in cases:
            try:
                names[case.id] = name_series(case.images[0])
            except DataError as error:
                unusable[case.id] = error
        return names, unusable


class LabelMapFolder(PredictionFolder):
    """The label maps of cases.

    - ``outputs``: the network outputs whose probabilities are written too, if any
    - ``statistics``: gets every case
    - ``ensemble``: writes probabilities for nnU-Net
    - ``maps``: the kinds of uncertainty whose maps are written too, if any
    - ``dicom``: how DICOM segmentations are written too, if they are
    """

    def __init__(
        self, folder: Path, outputs: Sequence[str] = (), statistics: ClassStatistics | None = None,
        ensemble: EnsembleFiles | None = None, maps: Sequence[str] = (), dicom: DicomFiles | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder)
        self.outputs, self.statistics, self.ensemble = tuple(outputs), statistics, ensemble
        self.maps, self.dicom = tuple(maps), dicom
        self._earlier = dict[str, list[str]]()  # the files of each case that earlier predictions wrote

    @property
    def num_probabilities(self) -> int:
        """The number of outputs whose probabilities are needed."""
        return len(self.outputs or (self.ensemble.outputs if self.ensemble else ()))

    def files_of(self, cases: Sequence[Case]) -> list[Path]:
        files = [path for case in cases for path in (self.label_path(case), *self.probability_paths(case))]
        files += [path for case in cases for path in self.map_paths(case).values()]
        files += [self.segmentation_path(case) for case in cases if self.dicom]
        files += self.ensemble.paths(self.folder, cases) if self.ensemble else []
        return files if self.statistics is None else [*files, self.statistics.path]

    def name_sources(self, cases: Sequence[Case]) -> dict[str, DataError]:
        self.series, unusable = DicomFiles.name_series(cases) if self.dicom else ({}, {})
        return unusable

    def unfinished(self, cases: Sequence[Case], kept: frozenset[str]) -> list[Case]:
        finished = {case.id for case in cases if case.id in kept and self._is_finished(case)}
        if self.statistics is not None:
            self.statistics.open()
            finished &= self.statistics.cases
        left = [case for case in cases if case.id not in finished]
        if self.statistics is None and left and STATISTICS in self.listed:
            read_lines(self.folder / STATISTICS)  # raises before anything is written; lines of these cases will go
        return left

    def _is_finished(self, case: Case) -> bool:
        """Returns whether all files of a case are whole."""
        own = [self.label_path(case), *self.probability_paths(case), *self.map_paths(case).values()]
        own += self.ensemble.paths(self.folder, [case]) if self.ensemble else []
        return all(map(is_whole, own)) and (not self.dicom or is_whole_segmentation(self.segmentation_path(case)))

    def clear(self, left: Sequence[Case], cases: Sequence[Case]) -> None:
        self._remove_temporary_files(cases)
        known = {case.id for case in left} | {strip_suffix(name) for name in self.listed if "/" not in name}
        for name in sorted(self.listed):
            if owner := _owner_of(name, known):
                self._earlier.setdefault(owner, []).append(name)

    def holds(self, case: Case) -> bool:
        return any((self.folder / name).exists() for name in self._earlier.get(case.id, ()))

    def refuse_collisions(self, cases: Sequence[Case]) -> None:
        inputs = {path.absolute() for case in cases for path in case.images}
        for case in cases:
            if self.label_path(case).absolute() in inputs:
                raise DataError(self.label_path(case), "is an input and would be overwritten; choose another --output")
        files = [path for case in cases for path in (self.label_path(case), *self.probability_paths(case))]
        if twice := next((path for path, count in Counter(files).items() if count > 1), None):
            raise DataError(
                twice, f"would hold two of the outputs {', '.join(self.outputs)}: file names do not tell them apart; "
                "leave --probabilities out, or use --npz"
            )  # fmt: skip

    def _remove_outdated(self, case: Case) -> None:
        """Removes what earlier predictions wrote of a case and this one does not."""
        outdated = {*self._earlier.get(case.id, ())}.difference(self._names(self.files_of([case])))
        for name in outdated:
            (self.folder / name).unlink(missing_ok=True)
        if self.statistics is None and STATISTICS in self.listed:
            drop_cases(self.folder, {case.id})
            if not (self.folder / STATISTICS).exists():
                outdated.add(STATISTICS)
        self.forget(outdated)

    def _remove_temporary_files(self, cases: Sequence[Case]) -> None:
        """Removes what a killed run left half written."""
        places = (self.folder, *(self.folder / name for name in (PROBABILITIES, UNCERTAINTY, DICOM_SEG, NPZ)))
        for name in (RECORD, *(case.id for case in cases)):
            for place in places:
                for temporary in place.glob(f".{escape(name)}[._]*.tmp*"):
                    temporary.unlink()

    def label_path(self, case: Case) -> Path:
        """Returns the path of a case's label map: named as the case, in the format of its first image."""
        return self.folder / f"{case.id}{output_suffix(case.images[0])}"

    def stamp_of(self, case: Case) -> list[Any] | None:
        path = self.label_path(case)
        return map_stamp(path) if path.is_file() else None

    def differs(self, case: Case, stamp: Any) -> bool:
        path = self.label_path(case)
        return path.is_file() and not is_as_written(path, stamp) and is_whole(path)

    def probability_paths(self, case: Case) -> list[Path]:
        """Returns the path of each output's probabilities."""
        names = [re.sub(r"[^\w.-]+", "-", name) for name in self.outputs]
        return [self.folder / PROBABILITIES / f"{case.id}_{name}{_packed_suffix(case)}" for name in names]

    def map_paths(self, case: Case) -> dict[str, Path]:
        """Returns the path of each map of uncertainty by kind."""
        return {kind: self.folder / UNCERTAINTY / f"{case.id}_{kind}{_packed_suffix(case)}" for kind in self.maps}

    def segmentation_path(self, case: Case) -> Path:
        """Returns the path of a case's DICOM segmentation."""
        return self.folder / DICOM_SEG / f"{case.id}.dcm"

    def probability_file(self, case: Case, shape: Sequence[int], softmax: bool) -> ProbabilityFile | None:
        """Returns the temporary file of a case's probabilities on its crop ``shape``; None if none are written.

        ``softmax`` says that the outputs are labels, the first of them background, and not regions.
        """
        num_channels = self.num_probabilities + bool(self.maps)
        return ProbabilityFile(self.temporary_file(case), (num_channels, *shape), softmax) if num_channels else None

    def temporary_file(self, case: Case) -> Path:
        """Returns the path of the temporary file of a case's probabilities."""
        return self.folder / f".{case.id}.rows.tmp"

    def write(
        self, case: Case, labels: np.ndarray, properties: Properties, preparation: Preparation,
        probabilities: ProbabilityFile | None, image: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Writes a case's probabilities, if it has some, and then its label map ``W D H`` in the source's geometry.

        Each file replaces that of an earlier prediction whole.

        ``image``: canonical, ``c W D H`` in the files' numbers, for the statistics.
        """
        self.refuse_edited(case)
        if self.dicom is not None:
            self._write_segmentation(case, labels, self.dicom)
        with self.writable():
            if self.statistics is not None and image is not None:
                canonical = to_canonical(labels, properties.geometry.orientation)
                self.statistics.add(case.id, canonical, image, properties.geometry.voxel_ml)
            if probabilities is not None and (self.num_probabilities or self.maps):
                if probabilities.error is not None:
                    raise probabilities.error

                def channel(number: int) -> np.ndarray:
                    outside = float(probabilities.softmax and number == 0)  # beyond the crop all is background
                    return preparation.channel_to_source(probabilities.read_output(number), properties, outside)

                if self.outputs:
                    (self.folder / PROBABILITIES).mkdir(exist_ok=True)
                for number, path in enumerate(self.probability_paths(case)):
                    write_volume(path, channel(number), properties.geometry, np.float32)
                if self.ensemble is not None:
                    channels = [channel(number) for number in range(self.num_probabilities)]
                    self.ensemble.write(self.folder, case, channels, properties.geometry)
                for path, values in zip(self.map_paths(case).values(), probabilities.uncertainty().values()):
                    path.parent.mkdir(exist_ok=True)
                    whole = preparation.channel_to_source(values, properties)  # beyond the crop all is certain
                    write_volume(path, whole, properties.geometry, np.float32)
                probabilities.remove()
            write_volume(self.label_path(case), labels, properties.geometry, labels.dtype)
            self._remove_outdated(case)
            self.record_written(case)

    def _write_segmentation(self, case: Case, labels: np.ndarray, dicom: DicomFiles) -> None:
        """Writes a case's DICOM segmentation; what is wrong with its series is no error of the folder."""
        path = self.segmentation_path(case)
        try:
            path.parent.mkdir(exist_ok=True)
            write_segmentation(path, case.images[0], labels, dicom.classes, dicom.network)
        except OSError as error:
            with self.writable():
                raise error


def _owner_of(name: str, cases: Collection[str]) -> str:
    """Returns which of these cases a file of the folder is of, by its name; "" for none."""
    place, _, file = name.rpartition("/")
    stem = strip_suffix(file) if suffix_of(file) else Path(file).stem
    if place in (PROBABILITIES, UNCERTAINTY):  # CASE_OUTPUT, and either may have more underscores
        ends = [found.start() for found in re.finditer("_", stem)]
        return next((stem[:end] for end in reversed(ends) if stem[:end] in cases), "")
    is_ours = place in (DICOM_SEG, NPZ) or not place and bool(suffix_of(file))
    return stem if is_ours and stem in cases else ""


def _packed_suffix(case: Case) -> str:
    """Returns how the names of a case's files of numbers end: as its label map's, but always packed."""
    suffix = output_suffix(case.images[0])
    return ".nii.gz" if suffix == ".nii" else suffix
