"""summary.json in nnU-Net's schema and metrics.csv; the predictions that a command line names."""

import csv
import fcntl
import io
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError, unwritable
from seqpar.data.files import read_json, refuse_special, write_text
from seqpar.data.formats.recognise import place_in_data
from seqpar.scores.label_classes import Labels
from seqpar.scores.label_files import Pair
from seqpar.scores.label_scores import Scores

_TURN_S = 10.0  # for which an evaluation waits until another one has written its files
# what only our summaries have together, those of label maps and of classes, and how only our tables begin
_SUMMARY_KEYS = (
    {"metric_per_case", "classes", "num_values", "global"},
    {"metric_per_case", "classes", "names", "confusion"},
)
_TABLE_HEADS = (b"case,class,labels,Dice,IoU,FP,TP,FN,TN,n_pred,n_ref,", b"class,cases,sensitivity,specificity,AUC")


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
            **({"doubt": pair.doubt.to_json()} if pair.doubt else {}),
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
    """Returns the files to write, by kind: next to a prediction, unless named.

    - ``prediction``: a folder or a file; None for a run, whose own summary stays unchanged
    """
    named = {kind: path for kind, path in (("json", json), ("csv", csv)) if path}
    for kind, path in named.items():
        if path.suffix != f".{kind}":  # it would replace what else has that name
            raise ValueError(f"--{kind} {path}: name a file that ends with .{kind}")
    if prediction is None:
        return named
    folder = prediction if prediction.is_dir() else prediction.parent
    return {"json": folder / "summary.json", "csv": folder / "metrics.csv", **named}


def without_larger(files: dict[str, Path], prediction: Path) -> tuple[dict[str, Path], str]:
    """Returns the files to write for one label map, and a line if scores of more cases next to it stay instead."""
    own = {kind: path for kind, path in files.items() if path in output_files(prediction, None, None).values()}
    larger = [path for path in own.values() if prediction.is_file() and _num_cases(path) > 1]
    if not larger:
        return files, ""
    line = f"{larger[0]} has scores of more cases and stays: name other files by --json and --csv to write these"
    return {kind: path for kind, path in files.items() if kind not in own}, line


def _num_cases(path: Path) -> int:
    """Returns how many cases a summary.json or metrics.csv of label maps has, 0 if that is not known."""
    try:
        if path.suffix == ".json":
            return len(read_json(path)["metric_per_case"])
        refuse_special(path)
        with open(path, newline="") as file:
            return len({row["case"] for row in csv.DictReader(file)})
    except (DataError, OSError, ValueError, KeyError, TypeError, csv.Error):
        return 0


def refuse_foreign(files: Mapping[str, Path], data: Collection[Path] = ()) -> None:
    """Raises DataError if a file is there that evaluate did not write, such as nnU-Net's summary.json.

    It does too if a file would be in a data set or in one of its folders.

    - ``files``: what is to be written, by kind
    - ``data``: folders of the data set that is the truth, as far as they are known
    """
    kept = set(map(os.path.realpath, data))  # resolve() ends in a RuntimeError in a circle of links
    for kind, path in files.items():
        is_of_truth = os.path.realpath(path.parent) in kept
        if where := "belongs to a data set" if is_of_truth else place_in_data(path.parent):
            raise DataError(path.parent, f"{where}, which evaluate never writes into: name another place by --{kind}")
        if list(files.values()).count(path) > 1:
            raise ValueError(f"--{kind} {path} is to hold two results: name another file")
        if path.exists() and not _OURS[kind](path):
            raise DataError(path, f"is there, and evaluate did not write it: name another file by --{kind}")


def _is_our_json(path: Path) -> bool:
    content = _content_of(path)  # a training's summary has its step
    return "step" not in content and any(keys <= content.keys() for keys in _SUMMARY_KEYS)


def _is_our_postprocessing(path: Path) -> bool:
    return _content_of(path).get("written_by") == "seqpar"


def _content_of(path: Path) -> dict[str, Any]:
    """Returns what a JSON file holds, an empty dict unless it is an object."""
    try:
        content = read_json(path)
    except DataError:
        return {}
    return content if isinstance(content, dict) else {}


def _is_our_csv(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(100).startswith(_TABLE_HEADS)
    except OSError:
        return False


def _is_our_picture(path: Path) -> bool:
    try:
        return b"Software\0seqpar" in path.read_bytes()[:400]
    except OSError:
        return False


_OURS: dict[str, Callable[[Path], bool]] = {
    "json": _is_our_json, "csv": _is_our_csv, "calibration": _is_our_picture,
    "find-best": _is_our_postprocessing,
}  # fmt: skip


@contextmanager
def writing_alone(files: Collection[Path]) -> Iterator[None]:
    """Lets no other evaluation write into the folders of files within the block, so that files stay of one evaluation.

    A prediction may hold its folder for hours, and writes none of these files: after some seconds nobody is awaited.
    """
    until, handles = time.monotonic() + _TURN_S, list[int]()
    try:
        for folder in sorted({os.path.realpath(file.parent) for file in files}):
            with suppress(OSError):  # which writing reports, or a file system without locks
                os.makedirs(folder, exist_ok=True)
                handles.append(os.open(folder, os.O_RDONLY))
                while not _locked(handles[-1]) and time.monotonic() < until:
                    time.sleep(0.02)
        yield
    finally:
        for handle in handles:
            os.close(handle)


def _locked(handle: int) -> bool:
    """Returns whether this process has a folder's lock, and took it if nobody had; raises OSError without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_output(path: Path, content: str | Callable[[Path], object]) -> None:
    """Writes a file whole or not at all, and makes the folders above it; raises DataError if that fails.

    - ``content``: a text, or what writes the file
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content(path) if callable(content) else write_text(path, content)
    except OSError as error:
        raise unwritable(path, error) from error


def refuse_duplicates(places: Iterable[tuple[Path, Path]]) -> None:
    """Raises ``ValueError`` if two predictions have the same place; ``places``: with what the command line names."""
    seen = set[Path]()
    for named, place in places:
        if place.resolve() in seen:
            raise ValueError(f"{named} is named twice, and nothing is better than itself: name it once")
        seen.add(place.resolve())
