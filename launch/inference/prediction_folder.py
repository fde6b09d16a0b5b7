"""The folder that predictions are written to: each file whole or not there, and what was done is not done again.

FOLDER/prediction.json        how everything in it was predicted; written before anything else
FOLDER/CASE.nii.gz            label map; the last file of its case, so that a case that has it is done
FOLDER/probabilities/…        CASE_OUTPUT.nii.gz, where asked for
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from seqpar.data.errors import DataError
from seqpar.data.files import read_json, write_json
from seqpar.data.formats.dataset import Case
from seqpar.data.preparation.case import Properties, channel_to_source
from seqpar.data.volumes import SUFFIXES, write_volume

RECORD, PROBABILITIES = "prediction.json", "probabilities"


class PredictionFolder:
    """Writes what was predicted; used by the first rank alone. ``outputs`` name the probabilities, if any."""

    def __init__(self, folder: Path, outputs: Sequence[str] = ()) -> None:
        self.folder, self.outputs = folder, tuple(outputs)

    def begin(self, cases: Sequence[Case], record: dict[str, Any], go_on: bool) -> list[Case]:
        """Returns the cases that are still to be done, after all that could be in their way is gone."""
        inputs = {path.absolute() for case in cases for path in case.images}
        for case in cases:
            if self.label(case).absolute() in inputs:
                raise DataError(self.label(case), "is an input and would be overwritten; choose another --output")
        before = self._record()
        files = [path for case in cases for path in (self.label(case), *self.probabilities(case))]
        if twice := next((path for path, times in Counter(files).items() if times > 1), None):
            raise DataError(
                twice, f"would hold two of the outputs {', '.join(self.outputs)}: file names do not tell them apart; "
                "leave --probabilities out, or rename an output in config.json of the run"
            )  # fmt: skip
        if before is None and (foreign := [path for path in files if path.exists()]):
            raise DataError(
                foreign[0], f"would be overwritten, and no {RECORD} beside it says that predict wrote it; "
                "choose another --output"
            )  # fmt: skip
        if go_on and before is not None and before != record:
            changed = [name for name in record if before.get(name) != record[name]]
            raise DataError(
                self.folder, f"was predicted with other settings ({', '.join(changed)}); choose another --output, or "
                "leave --continue out to predict everything again"
            )  # fmt: skip
        keep = go_on and before == record
        with self._writable():
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (RECORD, *(case.id for case in cases)):
                for place in (self.folder, self.folder / PROBABILITIES):
                    for left in place.glob(f".{escape(name)}[._]*.tmp"):  # of a killed run
                        left.unlink()
            for case in () if keep else cases:
                self.label(case).unlink(missing_ok=True)
            write_json(self.folder / RECORD, record)
        return [case for case in cases if not self.label(case).is_file()]

    def label(self, case: Case) -> Path:
        """Returns where a case's label map lies: named as the case, packed as its first image."""
        suffix = next(suffix for suffix in SUFFIXES if case.images[0].name.endswith(suffix))
        return self.folder / f"{case.id}{suffix}"

    def probabilities(self, case: Case) -> list[Path]:
        """Returns where the probabilities of a case's outputs lie."""
        names = [re.sub(r"[^\w.-]+", "-", name) for name in self.outputs]
        return [self.folder / PROBABILITIES / f"{case.id}_{name}.nii.gz" for name in names]

    def rows(self, case: Case, shape: Sequence[int], softmax: bool) -> "Rows | None":
        """Returns where a case's probabilities wait, on the grid of its crop; None where nobody asked for them."""
        if not self.outputs:
            return None
        return Rows(self.folder / f".{case.id}.rows.tmp", (len(self.outputs), *shape), softmax)

    def write(self, case: Case, labels: np.ndarray, properties: Properties, rows: "Rows | None") -> None:
        """Writes a case's probabilities, if it has some, and then its label map."""
        with self._writable():
            if rows is not None:
                if rows.problem is not None:
                    raise rows.problem
                (self.folder / PROBABILITIES).mkdir(exist_ok=True)
                for number, path in enumerate(self.probabilities(case)):
                    outside = float(rows.softmax and number == 0)  # beyond the crop all is background
                    channel = channel_to_source(rows.channel(number), properties, outside)
                    write_volume(path, channel, properties.geometry, np.float32)
                rows.remove()
            write_volume(self.label(case), labels, properties.geometry, labels.dtype)

    def _record(self) -> dict[str, Any] | None:
        if not (self.folder / RECORD).is_file():
            return None
        record: dict[str, Any] = read_json(self.folder / RECORD)
        return record

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Makes whatever goes wrong inside it an error of the folder: no other case would fare better."""
        try:
            yield
        except (OSError, DataError) as error:
            why = error.problem if isinstance(error, DataError) else f"cannot be written ({error.strerror or error})"
            raise DataError(self.folder, f"{why}; what is finished is kept: make room or choose another "
                              "--output, and go on with --continue") from error  # fmt: skip


class Rows:
    """Probabilities ``k W D H`` on their way to their files: rows come in any order and wait on the disk."""

    def __init__(self, path: Path, shape: Sequence[int], softmax: bool) -> None:
        self.path, self.shape, self.softmax = path, tuple(shape), softmax
        self.problem: OSError | None = None  # told once all ranks have done their part of the case
        self._file: IO[bytes] | None = None

    def keep(self, first: int, rows: Tensor) -> None:
        """Takes rows ``k w D H`` that begin at row ``first``."""
        if self.problem is not None:
            return
        try:
            self._file = self._file or open(self.path, "wb")  # noqa: SIM115
            body = rows.float().cpu().transpose(0, 1).contiguous().numpy()  # w k D H
            self._file.seek(first * body[0].nbytes)
            self._file.write(body.data)
        except OSError as error:
            self.problem = error

    def channel(self, number: int) -> np.ndarray:
        """Returns the probabilities ``W D H`` of one output."""
        if self._file is not None:
            self._file.close()
        k, w, d, h = self.shape
        whole = np.memmap(self.path, np.float32, "r", shape=(w, k, d, h))
        return np.array(whole[:, number])

    def remove(self) -> None:
        """Removes what waits on the disk."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self.path.unlink(missing_ok=True)
