"""The pages about classifiers: scores, ROC, confusion, calibration and worst cases; several runs side by side."""

import argparse
import base64
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.preparation.cache import open_cache
from seqpar.report.curves import PLAIN, Diagram, Line, number
from seqpar.report.pictures import draw_evidence
from seqpar.report.plots import Chart, draw_charts
from seqpar.report.record import RunRecord
from seqpar.report.run_page import FinishedPage, is_neurological, render_run, try_reading
from seqpar.report.several_runs import Comparison, read_all
from seqpar.report.tables import HeadlineTile, Score, Table, TableHead, TableRow
from seqpar.scores.class_scores import calibration, roc_points
from seqpar.tasks.classify.scores import EXPLANATIONS, TABLE, class_summary, missing_cases, read_class_table, read_truth

FOLDER = Path(__file__).parent

Summary = Mapping[str, Any]


def read_class_scores(record: RunRecord, truth: Path | None = None, prediction: Path | None = None) -> Summary:
    """Returns the scores of a folder that predict wrote, else those of the run's last validation.

    The folder's have ``faults``, of cases that lack a prediction or a true class. Raises DataError if there are no
    scores.
    """
    if truth is not None and prediction is not None:
        path = prediction / TABLE
        table, classes = read_class_table(path), read_truth(truth)
        faults = [str(fault) for fault in missing_cases(table, classes, path)]
        return class_summary(table, classes, path) | {"source": f"{prediction} against {truth}", "faults": faults}
    path = record.path / "validation" / "summary.json"
    try:
        content = dict(json.loads(path.read_text()))
        for part in ("names", "cases", "metric_per_case", "scores", "intervals", "classes", "confusion"):
            content[part]
    except FileNotFoundError:
        raise DataError(path, "is not there: only a run that came to its end leaves scores of all its cases") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(path, f"cannot be used ({type(error).__name__}: {error})") from None
    return content | {"source": f"{path}, written after step {content.get('step', 0):,}"}


@dataclass(frozen=True)
class WorstCase:
    """A case of the page: its true class with the probability of it, and its planes as base64."""

    name: str
    verdict: str
    png: str


def class_page(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run that gives each case a class; ``options``: of report."""
    if options.images is not None:
        raise ValueError("--images: cases are shown as predict --explain drew them, or as prepared: remove it")
    summary, cases, gaps = None, list[WorstCase](), list[str]()
    explained = options.prediction and options.prediction / EXPLANATIONS
    if options.neurological is not None and explained and explained.is_dir():
        flag = "--neurological" if options.neurological else "--no-neurological"
        raise ValueError(f"{flag} would do nothing: {explained} has pictures as predict drew them: remove it")
    if options.truth is not None:
        summary = read_class_scores(record, options.truth, options.prediction)
    else:
        summary = try_reading(lambda: read_class_scores(record), gaps)
    if summary and options.cases:
        neurological = is_neurological(options.neurological, record)
        cases = pictured_cases(record, summary, options.cases, explained, neurological, gaps)
    faults = summary["faults"] if summary and options.truth is not None else ()
    text = render_run(FOLDER, record, gaps, faults, cases=cases, scores=_scores(summary) if summary else None)
    return FinishedPage(text, "", faults)


@dataclass(frozen=True)
class _Scores:
    tiles: list[HeadlineTile]
    classes: Table
    confusion: Table
    charts: list[Chart]


def _scores(summary: Summary) -> _Scores:
    charts = draw_charts([*roc_diagrams(summary), calibration_diagram(summary)], width=500)
    return _Scores(headline(summary), classes_table(summary), confusion_table(summary), charts)


def headline(summary: Summary) -> list[HeadlineTile]:
    """Returns the main scores, with their intervals and the number of cases."""
    tiles = []
    for name, value in summary["scores"].items():
        low_high = summary["intervals"].get(name) or ()
        range_text = f"{low_high[0]:.3f} – {low_high[1]:.3f}, " if low_high else ""
        tiles.append(HeadlineTile(name, Score(number(value), 3), f"{range_text}n = {summary['cases']}"))
    return tiles


def classes_table(summary: Summary) -> Table:
    """Returns the scores of each class."""
    kinds = ("sensitivity", "specificity", "AUC")
    rows = [
        TableRow(name, [Score(row["cases"], 0), *(Score(number(row[kind]), 3) for kind in kinds)])
        for name, row in summary["classes"].items()
    ]
    heads = list(map(TableHead, ("Class", "Cases", "Sensitivity", "Specificity", "AUC")))
    note = f"Scores of {summary['cases']} cases: {summary['source']}. Each class against all others."
    return Table("metrics", heads, rows, "class", note)


def confusion_table(summary: Summary) -> Table:
    """Returns how many cases of each class were given each class."""
    names = summary["names"]
    rows = [TableRow(n, [Score(count, 0) for count in counts]) for n, counts in zip(names, summary["confusion"])]
    return Table("confusion", list(map(TableHead, ("truth, and what was given", *names))), rows)


def _arrays(summary: Summary) -> tuple[np.ndarray, np.ndarray]:
    """Returns true class numbers ``n`` and probabilities ``n k`` of the cases."""
    names, cases = list(summary["names"]), summary["metric_per_case"]
    truth = np.array([names.index(case["truth"]) for case in cases])
    return truth, np.array([case["probabilities"] for case in cases], float)


def roc_diagrams(summary: Summary) -> list[Diagram]:
    """Returns the ROC curves, one a class; of two classes the last one's, as they mirror each other."""
    truth, probabilities = _arrays(summary)
    lines = [Line("by chance (dashed)", (0.0, 1.0), [(0.0, 1.0)], dashed=True)]
    for at, name in list(enumerate(summary["names"]))[1 if len(summary["names"]) == 2 else 0 :]:
        if 0 < int((truth == at).sum()) < len(truth):
            places, values = roc_points(truth == at, probabilities[:, at])
            lines.append(Line(f"{name}, AUC {summary['classes'][name]['AUC']:.3f}", places, [values]))
    diagram = Diagram("ROC: sensitivity", "1 - specificity", lines, low=0.0, high=1.0, styles=PLAIN)
    return [diagram] if len(lines) > 1 else []


def calibration_diagram(summary: Summary) -> Diagram:
    """Returns the share that is right over the probability of the class that was given."""
    points = calibration(*_arrays(summary))
    even = Line("as sure as right (dashed)", (0.0, 1.0), [(0.0, 1.0)], dashed=True)
    own = Line("cases", [given for given, _, _ in points], [[right for _, right, _ in points]], dots=True)
    title = f"Calibration: share that is right (mean distance {number(summary.get('calibration_error')):.3f})"
    return Diagram(title, "probability", [even, own], low=0.0, high=1.0, styles=PLAIN)


def worst_cases(summary: Summary, count: int) -> list[dict[str, Any]]:
    """Returns the cases whose true class has the least probability, the worst first."""
    names = list(summary["names"])
    return sorted(summary["metric_per_case"], key=lambda case: case["probabilities"][names.index(case["truth"])])[
        :count
    ]


def pictured_cases(
    record: RunRecord, summary: Summary, count: int, explained: Path | None, neurological: bool, gaps: list[str]
) -> list[WorstCase]:
    """Returns the worst cases, each with three planes and, where predict explained it, what was seen.

    - ``explained``: predict's folder of explanations; a case that it lacks is drawn from the run's prepared data
    """
    cases = []
    for case in worst_cases(summary, count):
        try:
            picture = _picture(record, case["case"], explained, neurological)
        except DataError as error:
            gaps.append(f"Case {case['case']} cannot be shown: {error}.")
            continue
        given = "" if case["class"] == case["truth"] else f", given as {case['class']}"
        cases.append(WorstCase(case["case"], f"{case['truth']} ({_of_truth(case, summary):.3f}){given}", picture))
    return cases


def _picture(record: RunRecord, case: str, explained: Path | None, neurological: bool) -> str:
    """Returns a case's picture as base64: predict's, else one of the prepared image alone."""
    if explained is not None and (path := explained / f"{case}.png").is_file():
        return base64.b64encode(path.read_bytes()).decode()
    cache = open_cache(record.dataset["prepared"])
    if case not in cache.cases:
        raise DataError(cache.path, f"has no case {case}; predict with --explain, or name the data that the run has")
    image = cache.cases[case].image
    with tempfile.TemporaryDirectory() as folder:
        path, nothing = Path(folder, "case.png"), np.zeros(image.shape[1:], np.float32)
        draw_evidence(path, case, np.asarray(image[0]), nothing, cache.cases[case].properties.spacing, neurological)
        return base64.b64encode(path.read_bytes()).decode()


def compare_classifiers(records: Mapping[str, RunRecord], gaps: list[str]) -> Comparison:
    """Returns the scores of several runs side by side, and how sure each is of each case."""
    summaries = read_all(records, read_class_scores, gaps)
    return Comparison(len(summaries), _scores_table(summaries), _probabilities_table(summaries))


def _scores_table(summaries: Mapping[str, Summary]) -> Table | str:
    """Returns the scores of all cases, the runs side by side."""
    kinds = dict.fromkeys(kind for summary in summaries.values() for kind in summary["scores"])
    rows = [
        TableRow(kind, [Score(number(summary["scores"].get(kind)), 3) for summary in summaries.values()])
        for kind in kinds
    ]
    note = "Over the cases that each run has scored; see below for those that all have."
    table = Table("class-scores", list(map(TableHead, ("Score", *summaries))), rows, "class", note)
    return table if rows else "No run has scores of cases."


def _probabilities_table(summaries: Mapping[str, Summary]) -> Table | str:
    """Returns the probability that each run gives the true class of each case that all of them have.

    The cases on which the runs differ most come first.
    """
    every = [{case["case"]: case for case in summary["metric_per_case"]} for summary in summaries.values()]
    lines = []
    for name, case in every[0].items() if every else ():
        if all(name in own for own in every):
            lines.append((name, case["truth"], [_of_truth(own[name], s) for own, s in zip(every, summaries.values())]))
    lines.sort(key=lambda line: min(line[2]) - max(line[2]))
    rows = [TableRow(name, [truth, *(Score(value, 3) for value in values)]) for name, truth, values in lines]
    table = Table("probabilities", list(map(TableHead, ("Case", "Truth", *summaries))), rows, "case")
    return table if rows else "No case was scored in all of these runs."


def _of_truth(case: Summary, summary: Summary) -> float:
    """Returns the probability of a case's true class."""
    return float(case["probabilities"][list(summary["names"]).index(case["truth"])])
