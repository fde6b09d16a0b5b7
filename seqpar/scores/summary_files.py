"""summary.json in nnU-Net's schema and metrics.csv; the predictions that a command line names."""

import csv
import io
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import write_text
from seqpar.data.formats.dataset import Dataset
from seqpar.scores.label_classes import Labels
from seqpar.scores.label_files import Pair, match_cases, validation_of
from seqpar.scores.label_scores import Scores


def class_key(labels: tuple[int, ...]) -> str:
    """Returns nnU-Net's key for a class in a summary: its label, or the tuple of a region's labels."""
    return str(labels[0] if len(labels) == 1 else labels)


def summary_content(cases: list[tuple[Pair, Scores]], labels: Labels, summary: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of summary.json: nnU-Net's schema (NaN as it writes it), and the scores that it lacks."""
    keys = {name: class_key(values) for name, values in labels.classes.items()}
    per_case = [
        {
            "metrics": {keys[name]: row for name, row in scores.items()},
            "prediction_file": str(pair.prediction),
            "reference_file": str(pair.truth),
        }
        for pair, scores in cases
    ]
    content = {"foreground_mean": summary["foreground_mean"], "metric_per_case": per_case, "classes": keys}
    for kind in ("mean", "median", "num_values", "global"):
        content[kind] = {keys[name]: row for name, row in summary[kind].items()}
    return content


def csv_text(cases: list[tuple[Pair, Scores]], labels: Labels) -> str:
    """Returns the content of metrics.csv: a line per case and class."""
    text = io.StringIO(newline="")
    first = next(iter(cases[0][1].values()))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["case", "class", "labels", *first])
    for pair, scores in cases:
        for name, row in scores.items():
            writer.writerow([pair.case, name, class_key(labels.classes[name]), *row.values()])
    return text.getvalue()


def output_files(prediction: Path | None, json: Path | None, csv: Path | None) -> dict[str, Path]:
    """Returns the files to write, by kind: beside a prediction, unless named.

    - ``prediction``: a folder or a file; None for a run, which has a summary of its own that stays as it is
    """
    named = {kind: path for kind, path in (("json", json), ("csv", csv)) if path}
    for kind, path in named.items():
        if path.suffix != f".{kind}":  # it would replace what else has that name
            raise ValueError(f"--{kind} {path}: name a file that ends with .{kind}")
    if prediction is None:
        return named
    folder = prediction if prediction.is_dir() else prediction.parent
    return {"json": folder / "summary.json", "csv": folder / "metrics.csv", **named}


def write_output(path: Path, text: str) -> None:
    """Writes a file whole or not at all, and makes the folders above it; raises DataError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise unwritable(path, error) from error


class ScoringJob(NamedTuple):
    """One prediction: its name, its cases, what is wrong with others, and the files to write, by kind."""

    name: str
    pairs: list[Pair]
    faults: list[DataError]
    files: dict[str, Path]


def plan_scoring(
    truth: Path,
    predictions: Sequence[Path],
    dataset: Dataset | None,
    json: Path | None,
    csv: Path | None,
    only: Collection[str] | None = None,
) -> list[ScoringJob]:
    """Returns what is to be scored; raises what cannot be, before an hour of distances.

    - ``predictions``: folders of label maps, label maps, or runs, which stand for their last validation
    - ``dataset``: whose labels are the truth, None where files of ``truth`` are
    - ``json``, ``csv``: the files to write where they are not the usual ones
    - ``only``: the cases that are looked at; None for all
    """
    tasks, seen = list[ScoringJob](), set[Path]()
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
        tasks.append(ScoringJob(str(path), pairs, faults, files))
    return tasks
