"""The folder that predicted label maps are written to.

FOLDER/CASE.nii.gz            label map, written last: a case that has it is done
FOLDER/probabilities/…        CASE_OUTPUT.nii.gz, on request
FOLDER/statistics.csv         on request
Images in .nrrd and .mha get files of their own format, DICOM series .nii.gz.
"""

import re
from collections import Counter
from collections.abc import Sequence
from glob import escape
from pathlib import Path

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.geometry import to_canonical
from seqpar.data.preparation.prepared_case import Preparation, Properties
from seqpar.data.volumes import output_suffix, write_volume
from seqpar.prediction.class_statistics import ClassStatistics
from seqpar.prediction.prediction_folder import RECORD, PredictionFolder, ProbabilityFile

PROBABILITIES = "probabilities"


class LabelMapFolder(PredictionFolder):
    """The label maps of cases.

    - ``outputs``: the network outputs whose probabilities are written too, if any
    - ``statistics``: gets every case
    """

    def __init__(self, folder: Path, outputs: Sequence[str] = (), statistics: ClassStatistics | None = None) -> None:
        super().__init__(folder)
        self.outputs, self.statistics = tuple(outputs), statistics

    def files_of(self, cases: Sequence[Case]) -> list[Path]:
        files = [path for case in cases for path in (self.label_path(case), *self.probability_paths(case))]
        return files if self.statistics is None else [*files, self.statistics.path]

    def unfinished(self, cases: Sequence[Case], resume: bool, same_settings: bool) -> list[Case]:
        left = [case for case in cases if not (resume and same_settings and self.label_path(case).is_file())]
        if self.statistics is not None:
            self.statistics.open(case.id for case in left)
        return left

    def clear(self, left: Sequence[Case], cases: Sequence[Case]) -> None:
        self._remove_temporary_files(cases)
        for case in left:
            self.label_path(case).unlink(missing_ok=True)

    def refuse_collisions(self, cases: Sequence[Case]) -> None:
        inputs = {path.absolute() for case in cases for path in case.images}
        for case in cases:
            if self.label_path(case).absolute() in inputs:
                raise DataError(self.label_path(case), "is an input and would be overwritten; choose another --output")
        files = [path for case in cases for path in (self.label_path(case), *self.probability_paths(case))]
        if twice := next((path for path, count in Counter(files).items() if count > 1), None):
            raise DataError(
                twice, f"would hold two of the outputs {', '.join(self.outputs)}: file names do not tell them apart; "
                "leave --probabilities out, or rename an output in config.json of the run"
            )  # fmt: skip

    def _remove_temporary_files(self, cases: Sequence[Case]) -> None:
        """Removes what a killed run left half written."""
        for name in (RECORD, *(case.id for case in cases)):
            for place in (self.folder, self.folder / PROBABILITIES):
                for temporary in place.glob(f".{escape(name)}[._]*.tmp*"):
                    temporary.unlink()

    def label_path(self, case: Case) -> Path:
        """Returns the path of a case's label map: named as the case, in the format of its first image."""
        return self.folder / f"{case.id}{output_suffix(case.images[0])}"

    def probability_paths(self, case: Case) -> list[Path]:
        """Returns the path of each output's probabilities."""
        names = [re.sub(r"[^\w.-]+", "-", name) for name in self.outputs]
        suffix = output_suffix(case.images[0])
        suffix = ".nii.gz" if suffix == ".nii" else suffix  # probabilities are always packed
        return [self.folder / PROBABILITIES / f"{case.id}_{name}{suffix}" for name in names]

    def probability_file(self, case: Case, shape: Sequence[int], softmax: bool) -> ProbabilityFile | None:
        """Returns the temporary file of a case's probabilities on its crop ``shape``; None if none are written.

        ``softmax`` says that the outputs are labels, the first of them background, and not regions.
        """
        if not self.outputs:
            return None
        return ProbabilityFile(self.temporary_file(case), (len(self.outputs), *shape), softmax)

    def temporary_file(self, case: Case) -> Path:
        """Returns the path of the temporary file of a case's probabilities."""
        return self.folder / f".{case.id}.rows.tmp"

    def write(
        self, case: Case, labels: np.ndarray, properties: Properties, preparation: Preparation,
        probabilities: ProbabilityFile | None, image: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Writes a case's probabilities, if it has some, and then its label map ``W D H`` in the source's geometry.

        ``image``: canonical, ``c W D H`` in the files' numbers, for the statistics.
        """
        with self.writable():
            if self.statistics is not None and image is not None:
                canonical = to_canonical(labels, properties.geometry.orientation)
                self.statistics.add(case.id, canonical, image, properties.geometry.spacing)
            if probabilities is not None and self.outputs:
                if probabilities.error is not None:
                    raise probabilities.error
                (self.folder / PROBABILITIES).mkdir(exist_ok=True)
                for number, path in enumerate(self.probability_paths(case)):
                    outside = float(probabilities.softmax and number == 0)  # beyond the crop all is background
                    own = probabilities.read_output(number)
                    channel = preparation.channel_to_source(own, properties, outside)
                    write_volume(path, channel, properties.geometry, np.float32)
                probabilities.remove()
            write_volume(self.label_path(case), labels, properties.geometry, labels.dtype)
