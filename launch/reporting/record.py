"""What a run folder tells a report: settings, verdict, journal, and the scores of cases; gaps are named, not raised."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import strip_suffix
from seqpar.launch.evaluation.classes import Labels, labels_of_run
from seqpar.launch.evaluation.label_files import dataset_at, match_cases, score_pairs
from seqpar.launch.evaluation.scores import DEFAULT_SETTINGS, summarise
from seqpar.launch.evaluation.summary_files import summary_content
from seqpar.launch.runs.journal import read_metrics
from seqpar.launch.runs.run_folder import read_config

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """A run as its folder tells it; ``gaps`` says what the folder lacks."""

    path: Path
    content: dict[str, Any]  # of config.json
    labels: Labels
    label_names: dict[int, str]  # the file's value to name, background left out
    status: dict[str, Any] = field(default_factory=dict)
    train: tuple[Row, ...] = ()
    held_out: tuple[Row, ...] = ()
    gaps: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.content["config"])

    @property
    def dataset(self) -> dict[str, Any]:
        return dict(self.content["dataset"])


@dataclass(frozen=True)
class ScoredCase:
    """One case: its files, and per class and metric its score (NaN where it has none)."""

    name: str
    truth: Path
    prediction: Path
    scores: dict[str, dict[str, float]]

    @property
    def dice(self) -> float:
        """The mean over the classes that have a Dice, NaN where none has."""
        return mean(row.get("Dice", math.nan) for row in self.scores.values())


@dataclass(frozen=True)
class Scored:
    """Scores of cases, the worst first, and their summary per kind (mean, median, global), class and metric."""

    source: str
    classes: dict[str, str]  # name to the labels that it is made of, as summary.json spells them
    cases: tuple[ScoredCase, ...]
    summary: dict[str, dict[str, dict[str, float]]]
    settings: dict[str, Any]
    faults: tuple[str, ...] = ()


def mean(values: Iterable[float]) -> float:
    """Returns the mean of the values that are numbers, NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def read_record(run: Path) -> Record:
    """Returns what a run folder tells; a folder that holds no run is an error."""
    content, gaps = read_config(run), list[str]()
    try:
        told = content["dataset"]
        labels = labels_of_run(told)
        names = {int(told["values"][n]): str(name) for name, n in told["labels"].items() if n}
        dict(content["config"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"lacks what a report needs ({type(error).__name__}: {error}); give the folder of a training run"
        raise DataError(run / "config.json", problem) from None
    status: dict[str, Any] = {}
    try:
        status = dict(json.loads((run / "status.json").read_text()))
    except (OSError, ValueError, TypeError):
        gaps.append("There is no readable status.json, so that the run's verdict is not known.")
    rows: list[Row] = []
    try:
        rows = [row for row in read_metrics(run / "metrics.jsonl") if isinstance(row, dict)]
    except (OSError, UnicodeDecodeError):
        gaps.append("There is no readable metrics.jsonl: no curves.")
    train, held_out = (tuple(row for row in rows if row.get("kind") == kind) for kind in ("train", "val"))
    if rows and not held_out:
        gaps.append("The run has not been validated yet.")
    return Record(run, content, labels, names, status, train, held_out, tuple(gaps))


def read_scored(run: Path) -> Scored:
    """Returns the scores that the run's last validation left; where there are none, DataError says so."""
    path = run / "validation" / "summary.json"
    try:
        content = json.loads(path.read_text())
        after = f", written after step {content['step']:,}" if "step" in content else ""
        return scored(content, f"{path}{after}", path.parent)
    except FileNotFoundError:
        raise DataError(path, "is not there: only a run that came to its end leaves scores of all its cases") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(path, f"cannot be used ({type(error).__name__}: {error})") from None


def score_folders(truth: Path, prediction: Path, labels: Labels, workers: int) -> Scored:
    """Returns the scores of two folders of label maps; what is wrong with single files is among its faults."""
    pairs, faults = match_cases(truth, prediction, dataset_at(truth))
    cases = []
    for pair, found in score_pairs(pairs, labels, DEFAULT_SETTINGS, max(1, min(workers, len(pairs)))):
        if isinstance(found, DataError):
            faults.append(found)
        else:
            cases.append((pair, found))
    if not cases:
        raise faults[0]
    content = summary_content(cases, labels, summarise([row for _, row in cases]))
    content |= {"settings": DEFAULT_SETTINGS, "faults": list(map(str, faults))}
    return scored(content, f"{prediction} against {truth}", None)


def scored(content: Mapping[str, Any], source: str, folder: Path | None) -> Scored:
    """Returns a summary's content, its cases worst first; predictions lie in ``folder``, or where they are said to."""
    per_case, keys = content["metric_per_case"], content.get("classes")
    keys = dict(keys) if keys else {key: key for key in content["mean"]}
    cases = []
    for entry in per_case:
        prediction = Path(entry["prediction_file"])
        rows = {name: _numbers(entry["metrics"][key]) for name, key in keys.items()}
        where = prediction if folder is None else folder / prediction.name  # a run folder may have moved
        cases.append(ScoredCase(strip_suffix(prediction.name), Path(entry["reference_file"]), where, rows))
    cases.sort(key=lambda case: (math.inf if math.isnan(case.dice) else case.dice, case.name))
    kinds = ("mean", "median", "global", "num_values")
    summary = {
        kind: {name: _numbers(content[kind][key]) for name, key in keys.items()} for kind in kinds if kind in content
    }
    settings, faults = dict(content.get("settings", {})), tuple(map(str, content.get("faults", ())))
    return Scored(source, {str(n): str(k) for n, k in keys.items()}, tuple(cases), summary, settings, faults)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): math.nan if value is None else float(value) for name, value in row.items()}
