"""What is to be scored: the predictions that a command line names, looked at before any of them is scored."""

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Dataset
from seqpar.scores.label_files import Pair, match_cases, validation_of
from seqpar.scores.summary_files import output_files


class Task(NamedTuple):
    """One prediction: its name, its cases, what is wrong with others, and the files to write, by kind."""

    name: str
    pairs: list[Pair]
    faults: list[DataError]
    files: dict[str, Path]


def look_at(
    truth: Path,
    predictions: Sequence[Path],
    dataset: Dataset | None,
    json: Path | None,
    csv: Path | None,
    only: Collection[str] | None = None,
) -> list[Task]:
    """Returns what is to be scored; raises what cannot be, before an hour of distances.

    - ``predictions``: folders of label maps, label maps, or runs, which stand for their last validation
    - ``dataset``: whose labels are the truth, None where files of ``truth`` are
    - ``json``, ``csv``: the files to write where they are not the usual ones
    - ``only``: the cases that are looked at; None for all
    """
    tasks, seen = list[Task](), set[Path]()
    for path in predictions:
        validation = validation_of(path)
        place = (validation or path).resolve()
        if place in seen:
            raise ValueError(f"{path} is named twice, and nothing is better than itself: name it once")
        seen.add(place)
        pairs, faults = match_cases(truth, validation or path, dataset, bool(validation), only)
        files = output_files(path if validation is None else None, json, csv)
        for folder in (file.parent for file in files.values()):
            if folder.exists() and not os.access(folder, os.W_OK):
                raise DataError(folder, "cannot be written to: choose other places by --json and --csv")
        tasks.append(Task(str(path), pairs, faults, files))
    return tasks
