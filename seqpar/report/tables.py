"""Tables of scores as HTML, and each class's distribution over the cases."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from seqpar.report.charts import draw_strips
from seqpar.report.record import CaseScores, RunRecord
from seqpar.text import quantity

COLUMNS = (("Dice", 3, ("mean", "median", "global")), ("NSD", 3, ("mean", "median")), ("HD95", 1, ("mean", "median")))
SIZES = ("TrueVolumeMl", "VolumeMl", "LesionTP", "LesionFN", "LesionFP")


def number(value: Any) -> float:
    """Returns a value of the journal as a number, NaN if it is none."""
    return float(value) if isinstance(value, (int, float)) else math.nan


def cell(value: float, places: int, suffix: str = "") -> str:
    """Returns a cell with a number rounded to ``places`` decimals; its attribute ``data-value`` is the exact one."""
    if math.isnan(value):
        return '<td class="number" data-value="">–</td>'
    return f'<td class="number" data-value="{value!r}">{value:.{places}f}{suffix}</td>'


def metrics_table(scored: CaseScores) -> str:
    """Returns the summary per class, its distributions over the cases, and the table of all cases."""
    rows = []
    for name, key in scored.classes.items():
        cells = [
            cell(scored.summary.get(kind, {}).get(name, {}).get(metric, math.nan), places)
            for metric, places, kinds in COLUMNS
            for kind in kinds
        ]
        count = scored.summary.get("num_values", {}).get(name, {}).get("Dice", math.nan)
        cells.append(cell(count, 0, f" of {len(scored.cases)}"))
        label = key.strip("()").rstrip(",").replace(", ", " + ")
        heads = f"<th>{escape(name)}</th><td>{escape(label)}</td>"
        rows.append(f'<tr data-class="{escape(name)}">{heads}{"".join(cells)}</tr>')
    units = {"HD95": ", mm"}
    groups = "".join(f'<th colspan="{len(kinds)}">{name}{units.get(name, "")}</th>' for name, _, kinds in COLUMNS)
    seconds = "".join(f"<th>{kind}</th>" for _, _, kinds in COLUMNS for kind in kinds)
    head = f'<tr><th rowspan="2">Class</th><th rowspan="2">Labels</th>{groups}<th rowspan="2">Cases</th></tr>'
    table = f'<table class="metrics" id="metrics"><thead>{head}<tr>{seconds}</tr></thead>'
    table += f"<tbody>{''.join(rows)}</tbody></table>"
    note = f"Scores of {quantity(len(scored.cases), 'case')}: {scored.source}. Mean and median weigh cases alike, "
    note += "global pools their voxels; cases in which neither map has the class have no Dice and are left out."
    tolerance = scored.settings.get("nsd_tolerance")
    if isinstance(tolerance, (int, float)):
        note += f" The surface Dice (NSD) is at {tolerance:g} mm."
    if scored.settings.get("empty", "skip") == "skip":
        note += " Where one map alone has a class, HD95 is the image's diagonal."
    return (
        f'<div class="wide">{table}</div><p class="small">{escape(note)}</p>'
        f'<div class="charts two">{"".join(_strips(scored))}</div>'
        f"{_case_table(scored)}{size_tables(scored)}"
    )


def size_tables(scored: CaseScores) -> str:
    """Returns volumes and found lesions per class, and volumes of each case; "" where they were not recorded."""
    if not any(set(SIZES) <= row.keys() for case in scored.cases for row in case.scores.values()):
        return ""
    rows = []
    for name in scored.classes:
        cases = [case.scores[name] for case in scored.cases if set(SIZES) <= case.scores[name].keys()]
        if not cases:
            continue
        true_ml, ml, found, missed, false = (sum(row[key] for row in cases) for key in SIZES)
        error = sum(abs(row["VolumeErrorMl"]) for row in cases) / len(cases)
        cells = [cell(value / len(cases), 2) for value in (true_ml, ml)] + [cell(error, 2)]
        cells += [cell(found, 0, f" of {found + missed:.0f}"), cell(false, 0)]
        cells += [cell(found / whole if whole else math.nan, 3) for whole in (found + missed, found + false)]
        rows.append(f'<tr data-class="{escape(name)}"><th>{escape(name)}</th>{"".join(cells)}</tr>')
    head = '<tr><th rowspan="2">Class</th><th colspan="3">Volume of a case, ml</th><th colspan="4">Lesions</th></tr>'
    names = "truth", "prediction", "mean error", "found", "false", "sensitivity", "precision"
    head += f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    table = f'<table class="metrics" id="sizes"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    note = (
        "Volumes are means over cases, their error without its sign. A lesion is a connected region of more than "
        "50 mm³, parts at most 6 voxels apart being one; it is found where a predicted region touches it or the 3 "
        "voxels around it; a false one touches none (the rules of BraTS 2023)."
    )
    return f'<div class="wide">{table}</div><p class="small">{escape(note)}</p>{_case_volumes(scored)}'


def _case_volumes(scored: CaseScores) -> str:
    head = "".join(f'<th colspan="2">{escape(name)}</th>' for name in scored.classes)
    kinds = "<th>truth</th><th>prediction</th>" * len(scored.classes)
    rows = []
    for case in scored.cases:
        sizes = (case.scores[name].get(key, math.nan) for name in scored.classes for key in SIZES[:2])
        rows.append(f'<tr data-case="{escape(case.name)}"><th>{escape(case.name)}</th>'
                    f'{"".join(cell(value, 2) for value in sizes)}</tr>')  # fmt: skip
    table = f'<table class="metrics" id="volumes-per-case"><thead><tr><th rowspan="2">Case</th>{head}</tr>'
    table += f"<tr>{kinds}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<details><summary>Volumes of every case, ml</summary><div class="wide">{table}</div></details>'


def _strips(scored: CaseScores) -> Iterable[str]:
    for metric, title, high in (("Dice", "Dice of each case", 1.0), ("HD95", "HD95 of each case, mm", None)):
        rows = {n: [(c.scores[n].get(metric, math.nan), c.name) for c in scored.cases] for n in scored.classes}
        values = [value for row in rows.values() for value, _ in row if math.isfinite(value)]
        yield draw_strips(title, rows, 0.0, high or max(values, default=1.0) * 1.02 or 1.0)


def _case_table(scored: CaseScores) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in scored.classes)
    rows = []
    for case in scored.cases:
        cells = "".join(cell(case.scores[name].get("Dice", math.nan), 3) for name in scored.classes)
        rows.append(f'<tr data-case="{escape(case.name)}"><th>{escape(case.name)}</th>{cells}{cell(case.dice, 3)}</tr>')
    table = f'<table class="metrics" id="per-case"><thead><tr><th>Case</th>{head}<th>mean</th></tr></thead>'
    table += f"<tbody>{''.join(rows)}</tbody></table>"
    opened = " open" if len(scored.cases) <= 12 else ""
    title = "<summary>Dice of every case, worst first</summary>"
    return f'<details{opened}>{title}<div class="wide">{table}</div></details>'


def named_table(name: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """Returns a table of rows of cells under ``heads``, by whose ``name`` a page finds it."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table class="metrics" id="{name}">{body}</table></div>'


def last_validation(record: RunRecord) -> str:
    """Returns the table of the last validation in the journal."""
    if not record.held_out:
        return "<p>There are no scores yet.</p>"
    row = record.held_out[-1]
    pooled = row.get("global_dice", {})
    cells = []
    for name, value in row.get("dice", {}).items():
        scores = f"{cell(number(value), 3)}{cell(number(pooled.get(name)), 3)}"
        cells.append(f'<tr data-class="{escape(name)}"><th>{escape(name)}</th>{scores}</tr>')
    head = "<thead><tr><th>Class</th><th>Dice, mean</th><th>Dice, global</th></tr></thead>"
    cases = quantity(row["cases"], "held-out case") if "cases" in row else "held-out cases"
    note = f"From the validation after step {row['step']} on {cases}."
    return (
        f'<table class="metrics" id="metrics">{head}<tbody>{"".join(cells)}</tbody></table>'
        f'<p class="small">{escape(note)}</p>'
    )
