"""A page about a sweep: points in a table that can be sorted, curves, what each setting does, the best once more."""

import base64
import math
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

import seqpar
from seqpar.data.errors import DataError
from seqpar.report.charts import draw_strips
from seqpar.report.record import RunRecord, read_record
from seqpar.report.run_page import TEMPLATES, fill, notes
from seqpar.runs.run_folder import read_config
from seqpar.runs.sweep_folder import Point, Sweep, format_value, read_sweep, refresh_points
from seqpar.tasks.several_runs import curves_over_each_other
from seqpar.terminal import next_command
from seqpar.text import flag_name

MOST_CURVES = 8  # of the best points, which a reader can tell apart; sweep.png has all
NUMBERS = {"score": 4, "at": 0, "loss": 4, "step": 0, "seconds": 1}  # columns with their decimals
HEADS = {"at": "at step", "loss": "loss", "step": "steps done", "seconds": "seconds"}


def page_of_sweep(out: Path) -> str:
    """Returns the whole page of a sweep's folder."""
    sweep = refresh_points(out, read_sweep(out))
    best, records, gaps = sweep.best, dict[str, RunRecord](), list[str]()
    for point in _ranked(sweep)[:MOST_CURVES]:
        try:
            records[point.name] = read_record(out / point.name)
        except (DataError, ValueError) as error:
            gaps.append(f"{point.name} has no curves: {error}.")
    gaps += [f"{point.name} is {point.state}. {point.why}" for point in sweep.points if not point.is_over]
    over = sum(point.is_over for point in sweep.points)
    pieces = {
        "title": f"Sweep {out.resolve().name}",
        "headline": f"{over} of {len(sweep.points)} points are over."
        + (f" Best: {best.name}, {sweep.score_name} {best.score:.4f} after step {best.at}." if best else ""),
        "again": _again(out, best),
        "gaps": notes("What is not here", gaps),
        "points": points_table(sweep),
        "effects": effects(sweep),
        "curves": curves_over_each_other(records),
        "picture": _picture(out / "sweep.png"),
        "about": f"Written by seqpar {escape(seqpar.__version__)} on {time.strftime('%Y-%m-%d %H:%M')}.",
        "css": (TEMPLATES / "page.css").read_text(),
        "js": (TEMPLATES / "sweep.js").read_text(),
    }
    pieces |= {name: escape(pieces[name]) for name in ("title", "headline")}
    return fill("sweep.html", pieces)


def _ranked(sweep: Sweep) -> list[Point]:
    """Returns the points that have a score, the best first."""
    known = [point for point in sweep.points if not math.isnan(point.score)]
    return sorted(known, key=lambda point: (-point.score, point.loss))


def points_table(sweep: Sweep) -> str:
    """Returns the table of all points, which sweep.js sorts by any column; the best first."""
    names = sweep.varied()
    heads = ["point", *map(flag_name, names), "state", sweep.score_name, *HEADS.values()]
    head = "".join(f'<th scope="col"><button type="button">{escape(text)}</button></th>' for text in heads)
    ranked = _ranked(sweep)
    others = [point for point in sweep.points if point not in ranked]
    best = sweep.best
    rows = []
    for point in (*ranked, *others):
        cells = [_cell(point.name, point.name)]
        cells += [_cell(point.settings.get(name, ""), format_value(point.settings.get(name, "–"))) for name in names]
        cells.append(_cell(point.state, point.state))
        cells += [_number(getattr(point, name), places) for name, places in NUMBERS.items()]
        mark = ' class="best"' if point is best else ""
        rows.append(f'<tr{mark} data-point="{escape(point.name)}">{"".join(cells)}</tr>')
    table = f'<table id="points" class="metrics"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _cell(value: object, text: str) -> str:
    """Returns a cell that is sorted by ``value``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    kind = ' class="number"' if is_number else ""
    return f'<td{kind} data-key="{escape(str(value if is_number else text))}">{escape(text)}</td>'


def _number(value: float, places: int) -> str:
    text = "–" if math.isnan(value) else f"{value:,.{places}f}"
    return f'<td class="number" data-key="{"" if math.isnan(value) else value}">{text}</td>'


def effects(sweep: Sweep) -> str:
    """Returns, of each setting in which points differ, the score of all points by its values."""
    pieces = []
    for name, of_values in sweep.main_effects().items():
        strips = (
            draw_strips(f"{sweep.score_name} by {flag_name(name)}", of_values, 0.0, 1.0)
            if len(of_values) <= MOST_CURVES
            else ""
        )
        pieces.append(f"<div>{strips}{_effect_table(flag_name(name), sweep.score_name, of_values)}</div>")
    return f'<div class="charts two">{"".join(pieces)}</div>' if pieces else "<p>No point has been validated.</p>"


def _effect_table(name: str, score_name: str, of_values: Mapping[str, Sequence[tuple[float, str]]]) -> str:
    """Returns mean and spread of the score by a setting's values, the best first."""
    rows = []
    for value, pairs in sorted(of_values.items(), key=lambda item: -fmean(score for score, _ in item[1])):
        scores = [score for score, _ in pairs]
        cells = [f"{fmean(scores):.4f}", f"{min(scores):.4f}", f"{max(scores):.4f}", str(len(scores))]
        body = "".join(f'<td class="number">{cell}</td>' for cell in cells)
        rows.append(f"<tr><th>{escape(value)}</th>{body}</tr>")
    heads = "".join(f"<th>{escape(text)}</th>" for text in (name, score_name, "lowest", "highest", "points"))
    table = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<table class="metrics" data-effect="{escape(name)}">{table}</table>'


def _again(out: Path, best: Point | None) -> str:
    """Returns the command that trains the best point once more; "" where there is none."""
    if best is None:
        return ""
    try:
        content = read_config(out / best.name)
        command, layout = list(content["history"][0]["command"][1:]), content["layout"]
        ranks = int(layout["ranks"]) if layout["data"] > 1 else 1  # those of a single group are started by train
    except (ValueError, KeyError, IndexError, TypeError):
        return ""
    at = command.index("--out") if "--out" in command else len(command)
    line = next_command("train", *command[:at], "--out", f"{out / best.name}-again", ranks=ranks)
    return f"<p>The best once more:</p><pre>{escape(line)}</pre>"


def _picture(path: Path) -> str:
    """Returns sweep.png as part of the page, "" where it is missing."""
    try:
        text = base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return ""
    return f'<img alt="curves of all points, and scores by each setting" src="data:image/png;base64,{text}">'
