"""Scores, ROC, confusion, calibration and worst cases of a classifier; several classifiers side by side."""

import base64
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.preparation.cache import open_cache
from seqpar.report.charts import Curve, draw_curves
from seqpar.report.pictures import draw_evidence
from seqpar.report.record import RunRecord
from seqpar.report.run_page import fill_page
from seqpar.report.tables import cell, named_table, number
from seqpar.scores.class_scores import calibration, roc_points
from seqpar.tasks.classify.scores import TABLE, class_summary, missing_cases, read_class_table, read_truth

Summary = Mapping[str, Any]


def read_class_scores(record: RunRecord, truth: Path | None = None, prediction: Path | None = None) -> Summary:
    """Returns the scores of a folder that predict wrote, else those of the run's last validation.

    The folder's have ``faults``, of cases that lack a prediction or a true class. Raises DataError where there are no
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


def class_page(
    record: RunRecord, summary: Summary | None, cases: str, faults: Sequence[str], gaps: Sequence[str]
) -> str:
    """Returns the whole page; ``cases`` is the section of cases, ``faults`` are of cases that could not be scored."""
    headline = class_headline(summary) if summary else ""
    metrics = class_tables(summary) if summary else "<p>No case has been scored.</p>"
    return fill_page(record, headline, metrics, faults, cases, {}, gaps)


def class_headline(summary: Summary) -> str:
    """Returns the main scores in large numbers, with their intervals and the number of cases."""
    items = ""
    for name, value in summary["scores"].items():
        low_high = summary["intervals"].get(name) or ()
        range_text = f"{low_high[0]:.3f} – {low_high[1]:.3f}, " if low_high else ""
        shown = "–" if math.isnan(number(value)) else f"{value:.3f}"
        items += (
            f'<div data-class="{escape(name)}"><dt>{escape(name)}</dt><dd>{shown}</dd>'
            f'<dd class="small">{range_text}n = {summary["cases"]}</dd></div>'
        )
    note = "With 95 % of 1000 draws of the cases, as many of each class; AUC: mean of each class against the others."
    return f'<dl class="tiles scores" aria-label="scores of classes">{items}</dl><p class="small">{note}</p>'


def class_tables(summary: Summary) -> str:
    """Returns scores by class, the confusion matrix, and the charts of ROC and calibration."""
    rows = "".join(
        f'<tr data-class="{escape(name)}"><th>{escape(name)}</th>{cell(row["cases"], 0)}'
        + "".join(cell(number(row[kind]), 3) for kind in ("sensitivity", "specificity", "AUC"))
        + "</tr>"
        for name, row in summary["classes"].items()
    )
    heads = "".join(f"<th>{name}</th>" for name in ("Class", "Cases", "Sensitivity", "Specificity", "AUC"))
    table = f'<table class="metrics" id="metrics"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'
    note = f"Scores of {summary['cases']} cases: {summary['source']}. Each class against all others."
    return (
        f'<div class="wide">{table}</div><p class="small">{escape(note)}</p>{confusion_table(summary)}'
        f'<div class="charts two">{roc_chart(summary)}{calibration_chart(summary)}</div>'
    )


def confusion_table(summary: Summary) -> str:
    """Returns how many cases of each class were given each class."""
    names = [escape(name) for name in summary["names"]]
    head = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{name}</th>{''.join(cell(count, 0) for count in counts)}</tr>"
        for name, counts in zip(names, summary["confusion"])
    )
    return (
        '<h3>Confusion</h3><div class="wide"><table class="metrics" id="confusion"><thead><tr>'
        f"<th>truth, and what was given</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _arrays(summary: Summary) -> tuple[np.ndarray, np.ndarray]:
    """Returns true class numbers ``n`` and probabilities ``n k`` of the cases."""
    names, cases = list(summary["names"]), summary["metric_per_case"]
    truth = np.array([names.index(case["truth"]) for case in cases])
    return truth, np.array([case["probabilities"] for case in cases], float)


def roc_chart(summary: Summary) -> str:
    """Returns the ROC curves, one a class; of two classes the last one's, as they mirror each other."""
    truth, probabilities = _arrays(summary)
    curves = [Curve("by chance (dashed)", (0.0, 1.0), (0.0, 1.0), dashed=True)]
    for at, name in list(enumerate(summary["names"]))[1 if len(summary["names"]) == 2 else 0 :]:
        if 0 < int((truth == at).sum()) < len(truth):
            curves.append(
                Curve(
                    f"{name}, AUC {summary['classes'][name]['AUC']:.3f}", *roc_points(truth == at, probabilities[:, at])
                )
            )
    return draw_curves("ROC: sensitivity", curves, high=1.0, along="1 - specificity") if len(curves) > 1 else ""


def calibration_chart(summary: Summary) -> str:
    """Returns the share that is right over the probability of the class that was given."""
    points = calibration(*_arrays(summary))
    own = Curve("cases", [given for given, _, _ in points], [right for _, right, _ in points], dots=True)
    even = Curve("as sure as right (dashed)", (0.0, 1.0), (0.0, 1.0), dashed=True)
    error = summary.get("calibration_error")
    title = f"Calibration: share that is right (mean distance {number(error):.3f})"
    return draw_curves(title, [even, own], high=1.0, along="probability")


def worst_cases(summary: Summary, count: int) -> list[dict[str, Any]]:
    """Returns the cases whose true class has the least probability, the worst first."""
    names = list(summary["names"])
    return sorted(summary["metric_per_case"], key=lambda case: case["probabilities"][names.index(case["truth"])])[
        :count
    ]


def class_cases(
    record: RunRecord, summary: Summary, count: int, explained: Path | None, neurological: bool, gaps: list[str]
) -> str:
    """Returns the section of the worst cases, each with three planes and, where predict explained it, what was seen.

    - ``explained``: predict's folder of explanations; a case that it lacks is drawn from the run's prepared data
    """
    parts, names = list[str](), list(summary["names"])
    for case in worst_cases(summary, count):
        try:
            picture = _picture(record, case["case"], explained, neurological)
        except DataError as error:
            gaps.append(f"Case {case['case']} cannot be shown: {error}.")
            continue
        p = case["probabilities"][names.index(case["truth"])]
        verdict = f"{case['truth']} ({p:.3f})" + (
            "" if case["class"] == case["truth"] else f", given as {case['class']}"
        )
        image = (
            f'<img alt="planes of {escape(case["case"])}" src="data:image/png;base64,{picture}" style="max-width:100%">'
        )
        parts.append(f'<article class="case"><h3>{escape(case["case"])}</h3><p>{escape(verdict)}</p>{image}</article>')
    note = '<p class="small">Cases whose true class has the least probability, in brackets, first.</p>'
    return note + "".join(parts) if parts else "<p>No case is shown.</p>"


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


def class_scores_table(summaries: Mapping[str, Summary]) -> str:
    """Returns the scores of all cases, the runs beside each other; "" without runs."""
    kinds = dict.fromkeys(kind for summary in summaries.values() for kind in summary["scores"])
    rows = []
    for kind in kinds:
        body = "".join(cell(number(summary["scores"].get(kind)), 3) for summary in summaries.values())
        rows.append(f'<tr data-class="{escape(kind)}"><th>{escape(kind)}</th>{body}</tr>')
    note = "Over the cases that each run has scored; see below for those that all have."
    return named_table("class-scores", ["Score", *summaries], rows) + f'<p class="small">{note}</p>' if rows else ""


def probabilities_table(summaries: Mapping[str, Summary]) -> str:
    """Returns the probability that each run gives the true class of each case; "" where no case is in all of them.

    Cases of which the runs think most differently come first.
    """
    every = [{case["case"]: case for case in summary["metric_per_case"]} for summary in summaries.values()]
    lines = []
    for name, case in every[0].items() if every else ():
        if all(name in own for own in every):
            lines.append((name, case["truth"], [_of_truth(own[name], s) for own, s in zip(every, summaries.values())]))
    lines.sort(key=lambda line: min(line[2]) - max(line[2]))
    rows = [
        f'<tr data-case="{escape(name)}"><th>{escape(name)}</th><td class="number">{escape(truth)}</td>'
        f"{''.join(cell(value, 3) for value in values)}</tr>"
        for name, truth, values in lines
    ]
    return named_table("probabilities", ["Case", "Truth", *summaries], rows) if rows else ""


def _of_truth(case: Summary, summary: Summary) -> float:
    """Returns the probability of a case's true class."""
    return float(case["probabilities"][list(summary["names"]).index(case["truth"])])
