"""Reads what a report shows of a run folder: settings, verdict, journal, scores; gaps are named, not raised."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError, reason
from seqpar.data.files import read_json, read_whole, strip_suffix, suffix_of
from seqpar.data.phantom.phantom_files import has_phantoms
from seqpar.report.planes import colours_of
from seqpar.runs.archive import is_archive
from seqpar.runs.journal import read_metrics
from seqpar.runs.metrics_tail import SCORES, best_validation, comparable, score_of, task_of_row
from seqpar.runs.run_folder import holds_run, read_config
from seqpar.runs.run_status import TakenWeights, describe_kill, weights_taken
from seqpar.scores.label_classes import Labels, labels_of_run, learned_regions
from seqpar.scores.label_files import (
    MAX_NAMED,
    Doubt,
    check_values,
    dataset_at,
    list_label_files,
    match_cases,
    read_label_map,
    score_pairs,
)
from seqpar.scores.label_scores import DEFAULT_SETTINGS, UNLABELLED_ML, class_mask, summarise
from seqpar.scores.summary_files import class_key, summary_content
from seqpar.settings.config import Config
from seqpar.settings.network_settings import NetworkSettings, PretrainingSettings
from seqpar.text import millilitres, quantity
from seqpar.weights.weight_files import ABOUT, digest

Row = Mapping[str, Any]
# what Python says of a file whose parts are of other kinds, or missing
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
SHOWN = {  # what a report shows of config.json
    "config": ("tile", "patch", "mode", "depth", "embed_dim", "heads", "decoder", "epochs", "iterations", "optimizer",
               "lr", "precision"),
    "dataset": ("name", "layout", "modalities", "train", "held_out"),
    "layout": ("ranks", "data", "seqpar"),
}  # fmt: skip


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder; ``gaps`` says what it lacks. config.json has every setting of ``SHOWN``."""

    path: Path
    content: dict[str, Any]  # of config.json
    labels: Labels | None  # of voxels; None where each case has one class
    label_names: dict[int, str]  # by value in the files, without background
    status: dict[str, Any] = field(default_factory=dict)
    train: tuple[Row, ...] = ()
    held_out: tuple[Row, ...] = ()
    gaps: tuple[str, ...] = ()
    weights: TakenWeights = TakenWeights()  # those that predict takes

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.content["config"])

    @property
    def has_chosen(self) -> bool:
        """Whether the weights were chosen on held-out cases, or may have been, as the record lacks validations."""
        return (len(self.held_out) > 1 or bool(self.weights.describe_lost())) and not self.weights.none_saved

    @property
    def outputs(self) -> list[str]:
        """The classes of a classifier; none of others."""
        return list((self.dataset.get("volume_classes") or {}).get("names", ()))

    @property
    def subjects(self) -> dict[str, str]:
        """The patient of each case of a classifier, if its table names it."""
        return dict((self.dataset.get("volume_classes") or {}).get("subjects", {}))

    def class_colours(self, classes: Iterable[str] = ()) -> dict[str, str]:
        """Returns the colour of each label and then of each further class, the same in all pictures and tables."""
        return colours_of((*self.label_names.values(), *map(str, self.content["dataset"]["regions"] or ()), *classes))

    @property
    def network_settings(self) -> Config:
        """The settings that say what network it was; runs of other versions may have further ones."""
        names = {"task", *SHOWN["config"]}
        names.update(each.name for part in (NetworkSettings, PretrainingSettings) for each in fields(part))
        try:
            return Config.from_dict({name: self.config[name] for name in sorted(names & self.config.keys())})
        except DAMAGE as error:
            raise lacking(self.path, error) from None

    @property
    def dataset(self) -> dict[str, Any]:
        return dict(self.content["dataset"])

    @property
    def learned_regions(self) -> dict[str, tuple[int, ...]]:
        """What the network learns by sigmoids, with the labels of each; {} if it learns labels by a softmax."""
        regions = self.dataset.get("regions") or {}
        return learned_regions(self.dataset["labels"], regions, str(self.config.get("targets", "regions")))

    @property
    def layout(self) -> dict[str, Any]:
        return dict(self.content["layout"])

    @property
    def has_phantoms(self) -> bool:
        """Whether it was trained on generated phantoms."""
        return has_phantoms(self.content)


KINDS = ("mean", "median", "global", "num_values")  # of a summary


@dataclass(frozen=True)
class ScoredCase:
    """One case: its files, and its score per class and metric (NaN where it has none); without a truth, volumes."""

    name: str
    truth: Path | None
    prediction: Path
    scores: dict[str, dict[str, float]]
    doubt: Doubt | None = None  # of the truth

    @property
    def dice(self) -> float:
        """The mean over the classes that have a Dice, NaN where none has."""
        return mean_of_numbers(row.get("Dice", math.nan) for row in self.scores.values())

    @property
    def volumes(self) -> str:
        """The true and predicted volume of each class in words, "" where they were not recorded."""
        parts = [
            f"{name} {millilitres(row['TrueVolumeMl'])} → {millilitres(row['VolumeMl'])}"
            for name, row in self.scores.items()
            if not math.isnan(row.get("TrueVolumeMl", math.nan) + row.get("VolumeMl", math.nan))
        ]
        where = " in the labelled part" * any(row.get(UNLABELLED_ML, 0.0) > 0 for row in self.scores.values())
        return f" · ml{where}, truth → prediction: {', '.join(parts)}" if parts else ""


@dataclass(frozen=True)
class CaseScores:
    """Scores of cases, the worst first, and their summary per kind (mean, median, global), class and metric."""

    source: str
    classes: dict[str, str]  # name to the labels that it is made of, as summary.json spells them
    cases: tuple[ScoredCase, ...]
    summary: dict[str, dict[str, dict[str, float]]]
    settings: dict[str, Any]
    faults: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # cases without a prediction
    step: int = 0  # of the validation that they are from, 0 if there was none
    digests: Mapping[str, str] = field(default_factory=dict)  # of the label maps that were scored, by case

    def of(self, names: Collection[str], which: str) -> "CaseScores":
        """Returns the scores of some of the cases alone; ``which``: what these are, in words."""
        cases = tuple(case for case in self.cases if case.name in names)
        summary = summarise([case.scores for case in cases])
        source = f"{self.source} ({which})"
        return replace(self, source=source, cases=cases, summary={kind: summary[kind] for kind in KINDS})


def mean_of_numbers(values: Iterable[float]) -> float:
    """Returns the mean of the values that are not NaN; NaN if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def row_of_taken(record: RunRecord) -> Row | None:
    """Returns the validation of the weights that predict takes; None if the journal does not have it."""
    step = record.weights.step
    return next((row for row in reversed(record.held_out) if step and row.get("step") == step), None)


def step_sentence(own: int, record: RunRecord) -> str:
    """Returns which step a run's scores are of, and whether predict takes its weights; "" if either is not known.

    - ``own``: the step of the scores, 0 if it is not known
    """
    taken = record.weights.step
    if not own or not taken:
        return ""
    if own == taken:
        which = "the best" if len(record.held_out) > 1 else "the only"
        if record.weights.best is not None or len(record.held_out) < 2 and record.weights.describe_lost():
            which = "a"
        return f"After step {own:,}, {which} validation{', whose weights predict uses' * (not record.weights.foreign)}."
    is_last = all(own >= row["step"] for row in record.held_out)
    which = "the last one" if is_last else "the last validation whose case scores were kept"
    last = f"of step {own:,}, {which}: predict uses the weights of step {taken:,}"
    if (row := row_of_taken(record)) is None:
        return f"All scores are {last}."
    return (
        f"All other scores, those of single cases included, are {last}, whose {SCORES[task_of_row(row)]} was "
        f"{score_of(row):.3f}. The large numbers are of that step."
    )


def lacking(run: Path, error: Exception) -> DataError:
    """Returns the error of a run whose config.json is not as training wrote it."""
    problem = f"lacks what a report needs ({type(error).__name__}: {error}); give the folder of a training run"
    return DataError(run / "config.json", problem)


def read_record(run: Path) -> RunRecord:
    """Returns the contents of a run folder; raises DataError if it holds no run, or config.json lacks what is shown."""
    content, gaps = read_config(run), list[str]()
    if is_archive(run) or (run / ABOUT).is_file():
        problem = "is an exported run, without the curves and cases that a report shows; give the run folder of train"
        raise DataError(run, problem)
    try:
        dataset = content["dataset"]
        labels = labels_of_run(dataset) if dataset["labels"] else None
        names = {int(dataset["values"][n]): str(name) for name, n in dataset["labels"].items() if n}
        for part, settings in SHOWN.items():
            for name in settings:
                content[part][name]
    except DAMAGE as error:
        raise lacking(run, error) from None
    status: dict[str, Any] = {}
    try:
        status = dict(json.loads(read_whole(run / "status.json")))
    except (OSError, ValueError, TypeError):
        gaps.append("There is no readable status.json, so the run's verdict is not known.")
    if why := describe_kill(run):
        status |= {"state": "killed", "why": why, "step": -1}  # where it is, the journal knows
    weights, rows = weights_taken(run), list[Row]()
    try:
        rows = [*read_metrics(run / "metrics.jsonl")]
    except (OSError, ValueError):
        gaps.append("There is no readable metrics.jsonl: no curves.")
    train, held_out = (tuple(row for row in rows if row.get("kind") == kind) for kind in ("train", "val"))
    lost = weights.describe_lost(train)
    if rows and not held_out and not weights.validations:
        gaps.append("The run has not been validated yet.")
    gaps += filter(None, [lost, weights.not_the_best, weights.edited, _of_other_cases(held_out)])
    return RunRecord(run, content, labels, names, status, train, held_out, tuple(gaps), weights)


def _of_other_cases(held_out: Sequence[Row]) -> str:
    """Returns a sentence if a run's validations are not all of the same cases, or not measured in the same way."""
    if not (before := held_out[: len(held_out) - len(comparable(held_out))]):
        return ""
    measured = "was measured" if len(before) == 1 else "were measured"
    return (
        f"The first {quantity(len(before), 'validation')} of this run {measured} on other cases, on cases labelled or "
        "prepared otherwise, or in another way: their scores do not compare with the later ones, among which "
        "the best is chosen."
    )


def read_scores(run: Path) -> CaseScores:
    """Returns the scores that the run's last validation left; raises DataError if there are none."""
    path = run / "validation" / "summary.json"
    try:
        if not (text := read_whole(path)):
            raise DataError(path, "cannot be used (0 bytes): copy it again")
        content = json.loads(text)
        if not content["mean"]:
            raise DataError(path, "cannot be used (no class): copy it again")
        after = f", written after step {content['step']:,}" if "step" in content else ""
        return parse_scores(content, f"{path}{after}", path.parent)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(path, "is not there: only a run that came to its end leaves scores of all its cases") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(path, f"cannot be used ({type(error).__name__}: {error})") from None


def count_present(run: Path, held_out: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many truths of the best validation are known to have each class; {} if the last had other cases.

    - ``held_out``: rows of the validations
    """
    best = best_validation(held_out)
    try:
        scored = read_scores(run)
    except DataError:
        return {}
    if best is None or best.get("cases") != len(scored.cases):
        return {}
    rows = {name: [case.scores[name] for case in scored.cases] for name in scored.classes}
    is_known = {name: all(row.get("n_ref") or not row.get(UNLABELLED_ML) for row in own) for name, own in rows.items()}
    counts = {name: [row.get("n_ref") for row in own] for name, own in rows.items()}
    told = {name: own for name, own in counts.items() if None not in own and (is_known[name] or not any(own))}
    return {name: sum(n > 0 for n in own if n) for name, own in told.items()}


def is_of_phantoms(prediction: Path) -> bool:
    """Returns whether a folder was predicted from images of generated phantoms, as far as it says."""
    try:
        return json.loads(read_whole(prediction / "prediction.json")).get("generated") is True
    except (OSError, ValueError, AttributeError):
        return False


def from_here(value: object) -> object:
    """Returns an absolute path below the current folder as a relative one, which is shorter."""
    path = Path(value) if isinstance(value, str) else Path()
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if inside else value


def weights_behind(prediction: Path) -> str:
    """Returns the files of weights that a folder was predicted with, in words; "" if it does not say."""
    try:
        content = json.loads(read_whole(prediction / "prediction.json"))
        files = [str(from_here(path)) for run in content.get("runs", [content]) for path in run["weights"]]
        return "the mean of " * (len(files) > 1) + ", ".join(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def why_unknown(run: Path, weights: Mapping[str, str]) -> str:
    """Returns why nothing tells from which cases the run that predicted others had learned; "" if its folder does.

    - ``weights``: the digest of each file of weights that it predicted with
    """
    made = f"{run}, which predicted these cases,"
    try:
        files = [path for path in map(Path, weights if holds_run(run) else ()) if path.is_absolute()]
        if not run.exists():
            return f"{made} is no longer there"
        if any(digest(path) != weights[str(path)] for path in files if path.is_file()):
            return f"{run} holds other weights than those that predicted these cases"
        if files and not any(map(Path.is_file, files)):
            return f"{run} no longer holds the weights that predicted these cases"
        if others := [path for path in files if run.resolve() not in path.resolve().parents]:
            return f"{others[0]}, whose weights predicted these cases, is not in {run}"
        return "" if holds_run(run) else f"{made} does not say from which cases it has learned"
    except OSError as error:  # such as of another user's folder
        return f"{made} cannot be read ({reason(error)})"


def runs_behind(prediction: Path) -> list[tuple[Path, str]]:
    """Returns the runs that predicted a folder, each with a sentence if its place is empty or another run's by now.

    If its prediction.json cannot be used, that error takes the place of a run.
    """
    runs, record = list[tuple[Path, str]](), prediction / "prediction.json"
    if not record.is_file():
        return runs
    try:
        content = read_json(record)
        for run, weights in [(Path(made["run"]), made.get("weights", {})) for made in content.get("runs", [content])]:
            unknown = why_unknown(run, weights)
            runs.append((run, f"{unknown}: whether they were in its training data is not known." * bool(unknown)))
    except (OSError, *DAMAGE):
        told = (
            f"{record} is damaged and does not say which run predicted these cases: whether they were in its training "
        )
        return [(record, f"{told}data is not known. Copy it again, or predict again.")]
    return runs


def predicted_otherwise(folder: Path) -> list[str]:
    """Returns the cases whose label maps in a folder were predicted with other settings than its record names."""
    try:
        record = read_json(folder / "prediction.json")
        maps = [name for name in record["files"] if "/" not in name and suffix_of(name) and (folder / name).exists()]
        return sorted({strip_suffix(name) for name in maps}.difference(record["inputs"]))
    except (DataError, KeyError, TypeError):  # nobody predicted it, or an older version did
        return []


def mixed_line(folder: Path, others: Sequence[str]) -> str:
    """Returns a warning of cases that were predicted with other settings than those in a folder's record."""
    shown = ", ".join(others[:MAX_NAMED]) + ", …" * (len(others) > MAX_NAMED)
    told = f"{folder} also holds {quantity(len(others), 'case')} predicted with other settings ({shown})"
    return f"warning: {told}: scores over all its cases are of no single network"


def measure_folder(prediction: Path, labels: Labels) -> CaseScores:
    """Returns the volumes of label maps without a truth, by name of the case."""
    if not prediction.is_dir():
        raise ValueError(f"--prediction {prediction}: give a folder of label maps")
    cases, faults = list[ScoredCase](), list[str]()
    for name, (path, *_) in list_label_files(prediction).items():
        try:
            values, geometry = read_label_map(path)
            check_values(path, values, labels.declared)
        except DataError as error:
            faults.append(str(error))
            continue
        ml = geometry.voxel_ml
        counts = {n: int(class_mask(values, own).sum()) for n, own in labels.classes.items()}
        rows = {n: {"VolumeMl": count * ml, "VoxelMl": ml} for n, count in counts.items()}
        cases.append(ScoredCase(name, None, path, rows))
    if not cases:
        raise DataError(prediction, faults[0] if faults else "holds no label map")
    classes = {name: class_key(own) for name, own in labels.classes.items()}
    return CaseScores(str(prediction), classes, tuple(cases), {}, {}, tuple(faults))


def score_folders(truth: Path, prediction: Path, labels: Labels, workers: int, common: bool = False) -> CaseScores:
    """Returns the scores of two folders of label maps; what is wrong with single files is in ``faults``.

    - ``common``: of the cases that both have; nothing is said of others
    """
    pairs, missing, faults = match_cases(truth, prediction, dataset_at(truth), None, common, labels.classes.values())
    missing = [] if common else missing
    cases = []
    for pair, result in score_pairs(pairs, labels, DEFAULT_SETTINGS, max(1, min(workers, len(pairs)))):
        if isinstance(result, DataError):
            faults.append(result)
        else:
            cases.append((pair, result))
    if not cases:
        raise faults[0]
    content = summary_content(cases, labels, summarise([row for _, row in cases]))
    content |= {"settings": DEFAULT_SETTINGS, "faults": list(map(str, faults)), "missing": missing}
    return parse_scores(content, f"{prediction} against {truth}", None)


def parse_scores(content: Mapping[str, Any], source: str, folder: Path | None) -> CaseScores:
    """Returns the scores in the content of a summary.json, the worst case first.

    ``folder`` is where the predictions lie, None that the content says where. ``source`` says whose scores they are.
    """
    per_case, keys = content["metric_per_case"], content.get("classes")
    keys = dict(keys) if keys else {key: key for key in content["mean"]}
    cases = []
    for entry in per_case:
        prediction = Path(entry["prediction_file"])
        rows = {name: _numbers(entry["metrics"][key]) for name, key in keys.items()}
        path = prediction if folder is None else folder / prediction.name  # a run folder may have moved
        doubt = Doubt.from_json(entry.get("doubt"))
        cases.append(ScoredCase(strip_suffix(prediction.name), Path(entry["reference_file"]), path, rows, doubt))
    cases.sort(key=lambda case: (math.inf if math.isnan(case.dice) else case.dice, case.name))
    summary = {
        kind: {name: _numbers(content[kind][key]) for name, key in keys.items()} for kind in KINDS if kind in content
    }
    settings, (faults, missing) = (
        dict(content.get("settings", {})),
        (tuple(map(str, content.get(name, ()))) for name in ("faults", "missing")),
    )
    classes = {str(n): str(k) for n, k in keys.items()}
    step = int(content.get("step") or 0)
    digests = {str(case): str(digest) for case, digest in content.get("digests", {}).items()}
    return CaseScores(source, classes, tuple(cases), summary, settings, faults, missing, step, digests)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): math.nan if value is None else float(value) for name, value in row.items()}
