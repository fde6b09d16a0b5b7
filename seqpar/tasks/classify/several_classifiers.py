"""Several runs that give volumes a class: their scores beside each other, and how sure each is of each case."""

from collections.abc import Mapping
from html import escape

from seqpar.report.tables import cell, named_table, number
from seqpar.tasks.classify.class_page import Summary


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
