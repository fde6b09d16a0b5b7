"""A page about several runs: curves over each other, settings that differ, scores, and differences case by case."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import fmean

import seqpar
from seqpar.data.errors import DataError
from seqpar.report.charts import Curve, draw_curves, draw_strips
from seqpar.report.record import CaseScores, RunRecord, read_scores
from seqpar.report.run_page import TEMPLATES, fill, format_setting, notes, verdict
from seqpar.report.tables import cell, named_table, number
from seqpar.runs.metrics_tail import SCORES, score_of, task_of_row
from seqpar.scores.comparison import interval_of_mean
from seqpar.tasks.classify.page import Summary, class_scores_table, probabilities_table, read_class_scores
from seqpar.text import quantity

NOT_A_SETTING = ("out", "resume", "again", "take_over", "dry_run")  # where and how a run was started


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Returns a name for each run: its folder's, with those above it where several have the same."""
    paths = [record.path.resolve() for record in records]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{paths[0]} was named twice: name each run once")


def page_of_several(records: Sequence[RunRecord]) -> tuple[str, int]:
    """Returns the whole page, and how many of the runs have scores of cases."""
    names = names_of(records)
    scored, classes, gaps = dict[str, CaseScores](), dict[str, Summary](), list[str]()
    for name, record in zip(names, records):
        try:
            if record.network_settings.task == "classify":
                classes[name] = read_class_scores(record)
            else:
                scored[name] = read_scores(record.path)
        except DataError as error:
            gaps.append(f"{name}: There are no scores of single cases: {error}.")
    every = [f"{name}: {gap}" for name, record in zip(names, records) for gap in record.gaps]
    pieces = {
        "title": f"{len(records)} runs",
        "css": (TEMPLATES / "page.css").read_text(),
        "runs": "".join(f"<h3>{escape(name)}</h3>{verdict(record)}" for name, record in zip(names, records)),
        "gaps": notes("What is not here", [*every, *gaps]),
        "settings": settings_table(dict(zip(names, records))),
        "curves": curves_over_each_other(dict(zip(names, records))),
        "scores": class_scores_table(classes) + (scores_table(scored) if scored or not classes else ""),
        "pairs": probabilities_table(classes) + (differences_table(scored) if scored or not classes else ""),
        "about": f"Written by seqpar {escape(seqpar.__version__)} on {time.strftime('%Y-%m-%d %H:%M')}.",
    }
    return fill("comparison.html", pieces), len(scored) + len(classes)


def settings_table(records: Mapping[str, RunRecord]) -> str:
    """Returns the settings in which the runs differ, with their data and ranks."""
    every: dict[str, dict[str, str]] = {}
    for name, record in records.items():
        facts = {"data set": record.dataset["name"], "ranks": record.layout["ranks"], **record.config}
        for setting, value in facts.items():
            if setting not in NOT_A_SETTING:
                every.setdefault(setting, {})[name] = format_setting(value)
    rows = []
    for setting, values in every.items():
        cells = [values.get(name, "–") for name in records]
        if len(set(cells)) > 1:
            body = "".join(f'<td class="number">{escape(value)}</td>' for value in cells)  # as all columns lie
            rows.append(f'<tr data-class="{escape(setting)}"><th>{escape(setting)}</th>{body}</tr>')
    if not rows:
        return "<p>None: the runs have the same settings.</p>"
    return named_table("settings-that-differ", ["Setting", *records], rows)


def curves_over_each_other(records: Mapping[str, RunRecord]) -> str:
    """Returns the charts of training loss, held-out loss and score, a curve for each run."""
    losses, held_out, scores = list[Curve](), list[Curve](), list[Curve]()
    for name, record in records.items():
        rows, validations = record.train, record.held_out
        steps = [row["step"] for row in validations]
        losses.append(Curve(name, [row["step"] + 1 for row in rows], [number(row.get("loss")) for row in rows]))
        held_out.append(Curve(name, steps, [number(row.get("loss")) for row in validations], dots=True))
        scores.append(Curve(name, steps, [score_of(row) for row in validations], dots=True))
    names = dict.fromkeys(SCORES[task_of_row(row)] for record in records.values() for row in record.held_out)
    charts = [
        draw_curves("Loss in training", [curve for curve in losses if curve.steps]),
        draw_curves("Loss on held-out cases", [curve for curve in held_out if curve.steps]),
        draw_curves(f"{_title(names)} on held-out cases", [curve for curve in scores if curve.steps], high=1.0),
    ]
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else "<p>No step has been recorded.</p>"


def _title(names: Iterable[str]) -> str:
    """Returns what runs are scored by, as a title."""
    text = " or ".join(names)
    return text[:1].upper() + text[1:]


def scores_table(scored: Mapping[str, CaseScores]) -> str:
    """Returns the mean Dice of each class, the runs beside each other."""
    if not scored:
        return "<p>No run has scores of cases.</p>"
    classes = dict.fromkeys(name for one in scored.values() for name in one.classes)
    rows = []
    for kind in classes:
        means = (one.summary["mean"].get(kind, {}).get("Dice", math.nan) for one in scored.values())
        body = "".join(cell(value, 3) for value in means)
        rows.append(f'<tr data-class="{escape(kind)}"><th>{escape(kind)}</th>{body}</tr>')
    note = "Mean Dice over the cases that each run has scored; see below for those that several have."
    return named_table("scores", ["Class", *scored], rows) + f'<p class="small">{note}</p>'


def differences_table(scored: Mapping[str, CaseScores]) -> str:
    """Returns each case's mean Dice in the first run and how far that of the others lies above it, pair by pair."""
    if len(scored) < 2:
        return "<p>Fewer than two runs have scores of cases.</p>"
    (first, reference), *others = scored.items()
    dice = {name: {case.name: case.dice for case in one.cases} for name, one in scored.items()}
    common = [case.name for case in reference.cases if all(case.name in own for own in dice.values())]
    if not common:
        return "<p>No case was scored in all of these runs.</p>"
    gaps = {name: [(dice[name][case] - dice[first][case], case) for case in common] for name, _ in others}
    rows = []
    for number_of_case, case in enumerate(common):
        cells = [cell(dice[first][case], 3), *(cell(pairs[number_of_case][0], 3) for pairs in gaps.values())]
        rows.append(f'<tr data-case="{escape(case)}"><th>{escape(case)}</th>{"".join(cells)}</tr>')
    heads = ["Case", f"{first}: Dice", *(f"{name}: difference" for name in gaps)]
    sentences = "".join(f"<p>{escape(_sentence(name, first, pairs))}</p>" for name, pairs in gaps.items())
    reach = max((abs(gap) for pairs in gaps.values() for gap, _ in pairs if math.isfinite(gap)), default=0.0) or 1.0
    strips = draw_strips(f"Dice of each case, less that of {first}", gaps, -reach, reach)
    return f'{sentences}<div class="charts two">{strips}</div>{named_table("pairs", heads, rows)}'


def _sentence(name: str, first: str, pairs: Sequence[tuple[float, str]]) -> str:
    """Returns how far a run's Dice lies above that of the first, over cases, and how sure that is."""
    known = [gap for gap, _ in pairs if math.isfinite(gap)]
    if not known:
        return f"{name}: no case has a Dice in both"
    text = f"{name}: its Dice less that of {first} is {fmean(known):+.4f}, the mean of {quantity(len(known), 'case')}"
    interval = interval_of_mean(known, low=-1.0, high=1.0)
    if interval is None:
        return text
    chance = ", which may be chance" if interval[0] <= 0 <= interval[1] else ""
    return f"{text} (95 %: {interval[0]:+.4f} to {interval[1]:+.4f}){chance}"
