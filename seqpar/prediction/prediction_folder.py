"""The folder that predictions are written to: a file is there whole or not at all, and finished cases can be skipped.

FOLDER/prediction.json        how everything in it was predicted; written before anything else
FOLDER/CASE.nii.gz            label map; the last file of its case: a case that has it is done
FOLDER/probabilities/…        CASE_OUTPUT.nii.gz, where asked for
FOLDER/statistics.csv         where asked for
Images in .nrrd and .mha get files of their own format, DICOM series .nii.gz.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

import numpy as np
from einops import rearrange
from torch import Tensor

from seqpar.data.errors import DataError
from seqpar.data.files import read_json, write_json
from seqpar.data.formats.dataset import Case
from seqpar.data.geometry import to_canonical
from seqpar.data.preparation.preparation import Preparation
from seqpar.data.preparation.prepared_case import Properties
from seqpar.data.volumes import output_suffix, write_volume
from seqpar.prediction.class_statistics import ClassStatistics

RECORD, PROBABILITIES = "prediction.json", "probabilities"


class PredictionFolder:
    """The folder of a prediction, written by the first rank alone.

    ``outputs`` names the network outputs whose probabilities are written too, if any. ``statistics`` gets every case.
    """

    def __init__(self, folder: Path, outputs: Sequence[str] = (), statistics: ClassStatistics | None = None) -> None:
        self.folder, self.outputs, self.statistics = folder, tuple(outputs), statistics

    def open(self, cases: Sequence[Case], record: dict[str, Any], resume: bool) -> list[Case]:
        """Returns the cases that are still to be predicted; removes what predictions of other settings left of them.

        ``record`` is the content of prediction.json. ``resume`` keeps finished cases, which needs an equal record.
        """
        previous = self._read_record()
        self._refuse_to_overwrite(cases, previous)
        if resume and previous is not None and previous != record:
            changed = [name for name in {**record, **previous} if previous.get(name) != record.get(name)]
            raise DataError(
                self.folder, f"was predicted with other settings ({', '.join(changed)}); choose another --output, or "
                "leave --continue out to predict everything again"
            )  # fmt: skip
        continues = resume and previous == record
        left = [case for case in cases if not (continues and self.label_path(case).is_file())]
        if self.statistics is not None:
            self.statistics.open(case.id for case in left)
        with self.writable():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_temporary_files(cases)
            for case in left:
                self.label_path(case).unlink(missing_ok=True)
            write_json(self.folder / RECORD, record)
        return left

    def _refuse_to_overwrite(self, cases: Sequence[Case], previous: dict[str, Any] | None) -> None:
        """Raises where a file would overwrite an input, another output, or a file that predict did not write."""
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
        if self.statistics is not None:
            files.append(self.statistics.path)
        if previous is None and (foreign := [path for path in files if path.exists()]):
            raise DataError(
                foreign[0], f"would be overwritten, and no {RECORD} beside it says that predict wrote it; "
                "choose another --output"
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

    def probability_file(self, case: Case, shape: Sequence[int], softmax: bool) -> "ProbabilityFile | None":
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
        probabilities: "ProbabilityFile | None", image: np.ndarray | None = None,
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

    def _read_record(self) -> dict[str, Any] | None:
        if not (self.folder / RECORD).is_file():
            return None
        record: dict[str, Any] = read_json(self.folder / RECORD)
        return record

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Raises whatever fails inside as an error of the folder: no other case would fare better."""
        try:
            yield
        except (OSError, DataError) as error:
            why = error.problem if isinstance(error, DataError) else f"cannot be written ({error.strerror or error})"
            raise DataError(self.folder, f"{why}; what is finished is kept: make room or choose another "
                              "--output, and go on with --continue") from error  # fmt: skip


class ProbabilityFile:
    """Probabilities ``k W D H`` of a case in a temporary file: rows arrive slab by slab, outputs are read whole."""

    def __init__(self, path: Path, shape: Sequence[int], softmax: bool) -> None:
        self.path, self.shape, self.softmax = path, tuple(shape), softmax
        self.error: OSError | None = None  # raised when the case is written, once all ranks have done their part
        self._file: IO[bytes] | None = None

    def write_rows(self, first_row: int, rows: Tensor) -> None:
        """Writes rows ``k w D H``, of which the first is row ``first_row`` of the volume."""
        if self.error is not None:
            return
        try:
            self._file = self._file or open(self.path, "w+b")  # noqa: SIM115
            body = rearrange(rows.float().cpu(), "k w D H -> w k D H").contiguous().numpy()
            self.put(self._file, first_row * body[0].nbytes, body)
        except OSError as error:
            self.error = error

    def put(self, file: IO[bytes], place: int, rows: np.ndarray) -> None:
        """Writes rows ``w k D H`` at a place of the file, in bytes."""
        file.seek(place)
        file.write(rows.data)

    def mapped(self) -> np.ndarray:
        """Returns all probabilities, ``W k D H``, as they lie in the file; raises what kept them from being written."""
        if self.error is not None:
            raise self.error
        if self._file is not None:
            self._file.flush()
        k, w, d, h = self.shape
        return np.memmap(self.path, np.float32, "r", shape=(w, k, d, h))

    def read_output(self, number: int) -> np.ndarray:
        """Returns the probabilities ``W D H`` of one output."""
        return np.array(self.mapped()[:, number])

    def remove(self) -> None:
        """Closes and removes the temporary file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self.path.unlink(missing_ok=True)
