"""A report's page: sections of HTML about a run, put into the template; all text from files is escaped."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import seqpar
from seqpar.models.build import family_of
from seqpar.report.charts import Curve, draw_curves
from seqpar.report.record import CaseScores, RunRecord
from seqpar.report.tables import last_validation, metrics_table, number
from seqpar.runs.journal import held_out_scores, loss_terms
from seqpar.scores.comparison import interval_of_mean
from seqpar.scores.label_scores import without_nan
from seqpar.text import clock, quantity

TEMPLATES = Path(__file__).parent / "template"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
STATES = {
    "finished": "Finished",
    "running": "Running",
    "preempted": "Preempted",
    "failed": "Failed",
    "killed": "Killed",
}


def page(record: RunRecord, scored: CaseScores | None, cases: str, volumes: dict[str, Any], gaps: Sequence[str]) -> str:
    """Returns the whole page; ``cases`` is the section of cases, ``volumes`` what its viewer reads."""
    metrics = metrics_table(scored) if scored else last_validation(record)
    return fill_page(record, headline(record, scored), metrics, scored.faults if scored else (), cases, volumes, gaps)


def fill_page(
    record: RunRecord,
    headline: str,
    metrics: str,
    faults: Sequence[str],
    cases: str,
    volumes: dict[str, Any],
    gaps: Sequence[str],
) -> str:
    """Returns the whole page: what every run has, and these sections of scores and cases."""
    name = record.path.resolve().name
    pieces = {
        "title": escape(f"{name} · {record.dataset['name']}"),
        "name": escape(name),
        "verdict": verdict(record),
        "headline": headline,
        "gaps": notes("What is not here", [*record.gaps, *gaps]),
        "configuration": configuration(record),
        "curves": curves(record),
        "metrics": metrics,
        "faults": notes("What could not be scored", faults),
        "cases": cases,
        "about": f"Written by seqpar {escape(seqpar.__version__)} on {time.strftime('%Y-%m-%d %H:%M')}.",
        "volumes": as_json(volumes),
        **{kind: (TEMPLATES / f"page.{kind}").read_text() for kind in ("css", "js")},
    }
    return fill("page.html", pieces)


def fill(template: str, pieces: Mapping[str, str]) -> str:
    """Returns a template with its placeholders ``{{name}}`` filled; a piece too few or too many is an error."""
    text = (TEMPLATES / template).read_text()
    names = set(_PLACEHOLDER.findall(text))
    if names != pieces.keys():
        raise KeyError(f"{template}: {', '.join(sorted(names ^ pieces.keys()))} is not in both template and pieces")
    return _PLACEHOLDER.sub(lambda match: pieces[match[1]], text)


def as_json(value: Any) -> str:
    """Returns JSON that can stand in a script element: without NaN, and without what would end the element."""
    return json.dumps(nan_to_none(value), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def nan_to_none(value: Any) -> Any:
    """Returns a value with None for each number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: nan_to_none(part) for key, part in value.items()}
    return [nan_to_none(part) for part in value] if isinstance(value, (list, tuple)) else value


def notes(title: str, lines: Iterable[str]) -> str:
    """Returns a box with a title and a list of lines; "" without lines."""
    rows = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<aside class="note"><h2>{escape(title)}</h2><ul>{rows}</ul></aside>' if rows else ""


def verdict(record: RunRecord) -> str:
    """Returns how far the run came, when, and why it ended, from status.json, else from the journal."""
    state = str(record.status.get("state", "unknown"))
    step = record.status.get("step", -1)
    if not isinstance(step, int) or step < 0:
        step = max((row.get("step", -1) for row in record.train), default=-1) + 1
    total = int(record.config["epochs"]) * int(record.config["iterations"])
    text = f"step {step:,} of {total:,}"
    if isinstance(when := record.status.get("time"), (int, float)):
        text += time.strftime(", %Y-%m-%d %H:%M", time.localtime(when))
    why = f'<p class="why">{escape(str(record.status["why"]))}</p>' if record.status.get("why") else ""
    badge = f'<span class="badge {escape(state)}">{escape(STATES.get(state, "Verdict unknown"))}</span>'
    return f'<p class="verdict">{badge} {escape(text)}</p>{why}'


def headline(record: RunRecord, scored: CaseScores | None) -> str:
    """Returns the mean Dice of each class in large numbers, with its interval and the number of cases."""
    tiles = list[tuple[str, float, str]]()
    note = "Mean Dice over cases"
    if scored:
        note += ", its 95 % confidence interval (Student's t), and the number n of cases that have a Dice"
        for name in scored.classes:
            values = without_nan(case.scores[name].get("Dice", math.nan) for case in scored.cases)
            interval = interval_of_mean(values, low=0.0, high=1.0)
            range_text = f"{interval[0]:.3f} – {interval[1]:.3f}, " if interval else ""
            tiles.append((name, scored.summary["mean"][name].get("Dice", math.nan), f"{range_text}n = {len(values)}"))
    elif record.held_out:
        last = record.held_out[-1]
        note += f" in the validation after step {last['step']:,}"
        tiles = [(n, number(value), f"n ≤ {last.get('cases', '–')}") for n, value in last.get("dice", {}).items()]
    items = "".join(
        f'<div data-class="{escape(name)}"><dt>{escape(name)}</dt><dd>{"–" if math.isnan(value) else f"{value:.3f}"}'
        f'</dd><dd class="small">{escape(more)}</dd></div>'
        for name, value, more in tiles
    )
    label = 'aria-label="mean Dice per class"'
    return f'<dl class="tiles" {label}>{items}</dl><p class="small">{escape(note)}.</p>' if items else ""


def configuration(record: RunRecord) -> str:
    """Returns the table of the main settings, and one of all."""
    config, data, layout = record.config, record.dataset, record.layout
    settings = record.network_settings
    kind = family_of(settings)
    tile = " × ".join(map(str, config["tile"]))
    cases = f"{quantity(len(data['train']), 'case')} to train on, {len(data['held_out'])} held out"
    pipe = f"pipe {layout['pipe']} × " if layout.get("pipe") else ""
    main = {
        "data": f"{data['name']} ({data['layout']}): {cases}",
        "modalities": ", ".join(map(str, data["modalities"])),
        "tile": f"{tile} voxels, {kind.describe_tile(settings)}",
        "network": kind.describe(settings),
        "parameters": parameters(layout),
        "training": f"{quantity(config['epochs'], 'epoch')} × {quantity(config['iterations'], 'step')}, "
        f"{config['optimizer']}, learning rate {config['lr']}, {config['precision']}",
        "ranks": f"{layout['ranks']} = data {layout['data']} × {pipe}seq {layout['seqpar']}, mode {config['mode']}",
        "hardware": hardware(layout),
        "training time": training_time(record),
    }
    if stages := layout.get("placement", ()):
        main["stages"] = str(stages[0])
    versions = record.content.get("versions", {})
    every = {"preset": record.content.get("preset"), "commit": record.content.get("commit")}
    every |= {f"version of {name}": version for name, version in versions.items()}  # seqpar is a setting too
    every |= {"command": " ".join(map(str, record.content.get("command", ()))), **config}
    return _settings(main) + f"<details><summary>All settings</summary>{_settings(every)}</details>"


def parameters(layout: Mapping[str, Any]) -> str:
    """Returns the numbers of parameters in words, "" where the run did not record them."""
    counts = layout.get("parameters", {})
    parts = " + ".join(f"{name} {count / 1e6:.2f} M" for name, count in counts.items())
    return f"{sum(counts.values()) / 1e6:.2f} M: {parts}" if counts else ""


def hardware(layout: Mapping[str, Any]) -> str:
    """Returns the devices of the ranks and the number of nodes in words, "" where the run did not record them."""
    devices, nodes = Counter(layout.get("devices", ())), len(set(layout.get("hosts", ())))
    names = ", ".join(f"{count} × {name}" for name, count in devices.items())
    return f"{names} on {quantity(nodes, 'node')}" if names else ""


def training_time(record: RunRecord) -> str:
    """Returns how long all steps and validations took, "" where the journal does not say."""
    steps, validations = (
        [row["seconds"] for row in rows if isinstance(row.get("seconds"), (int, float))]
        for rows in (record.train, record.held_out)
    )
    if not steps:
        return ""
    times = f"{quantity(len(steps), 'step', ',')} {clock(sum(steps))} (median {median(steps):.3g} s)"
    if validations:
        times += f", {quantity(len(validations), 'validation')} {clock(sum(validations))}"
    return f"{clock(sum(steps) + sum(validations))}: {times}"


def _settings(rows: dict[str, Any]) -> str:
    lines = [f"<tr><th>{escape(str(k))}</th><td>{escape(format_setting(v))}</td></tr>" for k, v in rows.items()]
    return f'<table class="settings">{"".join(lines)}</table>'


def format_setting(value: Any) -> str:
    """Returns the value of a setting as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return "–" if value is None or not text else text


def curves(record: RunRecord) -> str:
    """Returns the charts of loss, held-out scores and learning rate over the steps."""

    def curve(name: str, rows: Sequence[Any], key: str, first: int, dots: bool = False) -> Curve:
        return Curve(name, [row["step"] + first for row in rows], [number(row.get(key)) for row in rows], dots)

    train, validations = record.train, record.held_out
    losses = [curve("training", train, "loss", 1), curve("held out", validations, "loss", 0, dots=True)]
    key, title = held_out_scores(validations[-1]) if validations else ("dice", "Dice")
    names = list(validations[-1].get(key, {})) if validations else []
    steps = [row["step"] for row in validations]
    scores = [Curve(n, steps, [number(row.get(key, {}).get(n)) for row in validations], dots=True) for n in names]
    terms = [curve(key.replace("_", " "), [row for row in train if key in row], key, 1) for key in loss_terms(train)]
    charts = [draw_curves(f"Loss ({record.config.get('loss', 'dice-ce')})", [c for c in losses if c.steps])]
    charts.append(draw_curves("Terms of the loss in training", terms))
    title = "Mean Dice" if key == "dice" else title
    charts.append(draw_curves(f"{title} on held-out cases", scores, high=1.0))
    charts.append(draw_curves("Learning rate", [curve("learning rate", train, "lr", 1)]))
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else "<p>No step has been recorded.</p>"
