"""A report's page: sections of HTML about a run, put into the template; all text from files is escaped."""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import seqpar
from seqpar.launch.reporting.charts import Curve, draw_curves
from seqpar.launch.reporting.record import CaseScores, Record
from seqpar.launch.reporting.tables import last_validation, metrics_table, number
from seqpar.launch.runs.journal import loss_terms

TEMPLATES = Path(__file__).parent / "template"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
STATES = {"finished": "Finished", "running": "Running", "preempted": "Preempted", "failed": "Failed"}


def page(record: Record, scored: CaseScores | None, cases: str, volumes: dict[str, Any], gaps: Sequence[str]) -> str:
    """Returns the whole page; ``cases`` is the section of cases, ``volumes`` what its viewer reads."""
    name = record.path.resolve().name
    pieces = {
        "title": escape(f"{name} · {record.dataset['name']}"),
        "name": escape(name),
        "verdict": verdict(record),
        "headline": headline(record, scored),
        "gaps": notes("What is not here", [*record.gaps, *gaps]),
        "configuration": configuration(record),
        "curves": curves(record),
        "metrics": metrics_table(scored) if scored else last_validation(record),
        "faults": notes("What could not be scored", scored.faults if scored else ()),
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
    return json.dumps(plain(value), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def plain(value: Any) -> Any:
    """Returns a value with None for each number that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def notes(title: str, lines: Iterable[str]) -> str:
    """Returns a box with a title and a list of lines; "" without lines."""
    rows = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<aside class="note"><h2>{escape(title)}</h2><ul>{rows}</ul></aside>' if rows else ""


def verdict(record: Record) -> str:
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


def headline(record: Record, scored: CaseScores | None) -> str:
    """Returns the mean Dice of each class in large numbers."""
    if scored:
        rows = {name: row.get("Dice", math.nan) for name, row in scored.summary["mean"].items()}
    else:
        dice = record.held_out[-1].get("dice", {}) if record.held_out else {}
        rows = {name: math.nan if value is None else float(value) for name, value in dice.items()}
    tiles = [(name, "–" if math.isnan(value) else f"{value:.3f}") for name, value in rows.items()]
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles" aria-label="mean Dice per class">{items}</dl>' if items else ""


def configuration(record: Record) -> str:
    """Returns the table of the main settings, and one of all."""
    config, data, layout = record.config, record.dataset, record.layout
    tile = " × ".join(map(str, config["tile"]))
    cases = f"{len(data['train'])} cases to train on, {len(data['held_out'])} held out"
    main = {
        "data": f"{data['name']} ({data['layout']}): {cases}",
        "modalities": ", ".join(map(str, data["modalities"])),
        "tile and patch": f"{tile} voxels, patch {config['patch']}",
        "network": f"depth {config['depth']}, width {config['embed_dim']}, {config['heads']} heads, "
        f"decoder {config['decoder']}",
        "training": f"{config['epochs']} epochs × {config['iterations']} steps, {config['optimizer']}, "
        f"learning rate {config['lr']}, {config['precision']}",
        "ranks": f"{layout['ranks']} = data {layout['data']} × seq {layout['seqpar']}, mode {config['mode']}",
    }
    every = {"preset": record.content.get("preset"), "commit": record.content.get("commit")}
    every |= dict(record.content.get("versions", {}))
    every |= {"command": " ".join(map(str, record.content.get("command", ()))), **config}
    return _settings(main) + f"<details><summary>All settings</summary>{_settings(every)}</details>"


def _settings(rows: dict[str, Any]) -> str:
    lines = [f"<tr><th>{escape(str(k))}</th><td>{escape(_spelled(v))}</td></tr>" for k, v in rows.items()]
    return f'<table class="settings">{"".join(lines)}</table>'


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "–" if value in (None, "") else str(value)


def curves(record: Record) -> str:
    """Returns the charts of loss, Dice and learning rate over the steps."""

    def curve(name: str, rows: Sequence[Any], key: str, first: int, dots: bool = False) -> Curve:
        return Curve(name, [row["step"] + first for row in rows], [number(row.get(key)) for row in rows], dots)

    train, validations = record.train, record.held_out
    losses = [curve("training", train, "loss", 1), curve("held out", validations, "loss", 0, dots=True)]
    names = list(validations[-1].get("dice", {})) if validations else []
    steps = [row["step"] for row in validations]
    dices = [Curve(n, steps, [number(row.get("dice", {}).get(n)) for row in validations], dots=True) for n in names]
    terms = [curve(key.replace("_", " "), [row for row in train if key in row], key, 1) for key in loss_terms(train)]
    charts = [draw_curves(f"Loss ({record.config.get('loss', 'dice-ce')})", [c for c in losses if c.steps])]
    charts.append(draw_curves("Terms of the loss in training", terms))
    charts.append(draw_curves("Mean Dice on held-out cases", dices, high=1.0))
    charts.append(draw_curves("Learning rate", [curve("learning rate", train, "lr", 1)]))
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else "<p>No step has been recorded.</p>"
