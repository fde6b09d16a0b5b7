"""RUN/validation: label maps of the last validation and their scores in summary.json.

The maps lie in the geometry of the cases' own files and are scored from disk, as evaluate does, so both agree.
summary.json is written last: a folder without it is unfinished. What cannot be written is a warning and ends no run.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import recognise
from seqpar.data.phantom.builtin import phantom
from seqpar.data.preparation.cache import PreparedCase
from seqpar.data.preparation.prepared_case import labels_to_source
from seqpar.data.volumes import write_volume
from seqpar.scores.label_classes import labels_of_run
from seqpar.scores.label_files import Pair, score_pair
from seqpar.scores.scores import DEFAULT_SETTINGS, Scores, summarise
from seqpar.scores.summary_files import summary_content, write_output
from seqpar.settings.config import Config


def label_files(config: Config) -> dict[str, Path]:
    """Returns the label file of each case of the run's data set."""
    dataset = recognise(config.data or phantom(config.phantoms, is_first=False))
    return {case.id: case.label.absolute() for case in dataset.cases if case.label is not None}


def remove_predictions(folder: Path, ids: Sequence[str]) -> None:
    """Removes the scores and label maps that an earlier validation left in a folder, and the folder if it is empty."""
    for name in ("summary.json", *(f"{case}.nii.gz" for case in ids)):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


class ValidationFolder:
    """Writes the folder, one case after the other; used by the first rank.

    ``description``: of the data set, as in config.json; ``find_labels`` returns each case's label file; ``step``: of
    the run, for summary.json.
    """

    def __init__(
        self, folder: Path, description: Mapping[str, Any], find_labels: Callable[[], Mapping[str, Path]], step: int
    ) -> None:
        self.folder, self.labels, self.step = folder, labels_of_run(description), step
        self.scored: list[tuple[Pair, Scores]] = []
        self.faults: list[DataError] = []
        self.label_files: Mapping[str, Path] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").unlink(missing_ok=True)  # it describes other label maps from here on
            self.label_files = find_labels()
        except DataError as error:
            self.faults.append(error)
        except OSError as error:
            self.faults.append(DataError(folder, f"cannot be written ({error.strerror})"))

    def add(self, case: PreparedCase, ids: np.ndarray, shown: Sequence[int] | None = None) -> None:
        """Writes and scores one prediction; ``ids``: prepared class ids ``W D H``; ``shown``: those of the truth."""
        if case.id not in self.label_files:
            return
        values = None if shown is None else tuple(case.properties.values[n] for n in shown)
        pair = Pair(case.id, self.label_files[case.id], self.folder / f"{case.id}.nii.gz", values)
        try:
            label = labels_to_source(ids, case.properties)
            write_volume(pair.prediction, label, case.properties.geometry, dtype=label.dtype)
            self.scored.append((pair, score_pair(pair, self.labels, DEFAULT_SETTINGS)))
        except DataError as error:
            self.faults.append(error)

    def close(self) -> list[str]:
        """Writes summary.json and returns a warning for each fault."""
        if self.scored:
            content = summary_content(self.scored, self.labels, summarise([scores for _, scores in self.scored]))
            content |= {"settings": DEFAULT_SETTINGS, "faults": list(map(str, self.faults)), "step": self.step}
            try:
                write_output(self.folder / "summary.json", json.dumps(content, indent=2) + "\n")
            except DataError as error:
                self.faults.append(error)
        return [f"warning: {fault}" for fault in self.faults]
