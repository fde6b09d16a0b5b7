"""A report's page: sections of HTML from what a run tells, put into the template; all text from files is escaped."""

import json
import math
import re
import time
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import seqpar
from seqpar.launch.reporting.cases import Shown, draw_planes, favourite
from seqpar.launch.reporting.charts import Curve, draw_curves
from seqpar.launch.reporting.palette import COLOURS, SIDES
from seqpar.launch.reporting.record import Record, Scored, ScoredCase
from seqpar.launch.reporting.tables import last_validation, metrics, number
from seqpar.launch.reporting.volumes import GREYS, Embedded

PARTS = Path(__file__).parent / "template"
STATES = {"finished": "Finished", "running": "Running", "preempted": "Preempted", "failed": "Failed"}


def page(record: Record, scored: Scored | None, cases: str, volumes: dict[str, Any], gaps: Sequence[str]) -> str:
    """Returns the whole page."""
    name = record.path.resolve().name
    pieces = {
        "title": escape(f"{name} · {record.dataset.get('name', '')}"),
        "name": escape(name),
        "verdict": verdict(record),
        "headline": headline(record, scored),
        "gaps": notes("What is not here", [*record.gaps, *gaps]),
        "configuration": configuration(record),
        "curves": curves(record),
        "metrics": metrics(scored) if scored else last_validation(record),
        "faults": notes("What could not be scored", scored.faults if scored else ()),
        "cases": cases,
        "about": f"Written by seqpar {escape(seqpar.__version__)} on {time.strftime('%Y-%m-%d %H:%M')}.",
        "volumes": as_json(volumes),
        **{kind: (PARTS / f"page.{kind}").read_text() for kind in ("css", "js")},
    }
    template = (PARTS / "page.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda found: pieces[found[1]], template)


def as_json(value: Any) -> str:
    """Returns JSON that may stand in a script element: no NaN, and nothing that ends the element."""
    return json.dumps(plain(value), allow_nan=False).replace("<", "\\u003c").replace("&", "\\u0026")


def plain(value: Any) -> Any:
    """Returns a value with null for each number that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def notes(title: str, lines: Iterable[str]) -> str:
    rows = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<aside class="note"><h2>{escape(title)}</h2><ul>{rows}</ul></aside>' if rows else ""


def verdict(record: Record) -> str:
    state = str(record.status.get("state", "unknown"))
    step = record.status.get("step", -1)
    if not isinstance(step, int) or step < 0:
        step = max((row.get("step", -1) for row in record.train), default=-1) + 1
    total = int(record.config.get("epochs", 0)) * int(record.config.get("iterations", 0))
    text = f"step {step:,} of {total:,}"
    if isinstance(when := record.status.get("time"), (int, float)):
        text += time.strftime(", %Y-%m-%d %H:%M", time.localtime(when))
    why = f'<p class="why">{escape(str(record.status["why"]))}</p>' if record.status.get("why") else ""
    badge = f'<span class="badge {escape(state)}">{escape(STATES.get(state, "Verdict unknown"))}</span>'
    return f'<p class="verdict">{badge} {escape(text)}</p>{why}'


def headline(record: Record, scored: Scored | None) -> str:
    """Returns the mean Dice of each class in large numbers."""
    if scored:
        rows = {name: row.get("Dice", math.nan) for name, row in scored.summary["mean"].items()}
    else:
        dice = record.held_out[-1].get("dice", {}) if record.held_out else {}
        rows = {name: math.nan if value is None else float(value) for name, value in dice.items()}
    tiles = [(name, "–" if math.isnan(value) else f"{value:.3f}") for name, value in rows.items()]
    made = "".join(f"<div><dt>{escape(name)}</dt><dd>{value}</dd></div>" for name, value in tiles)
    return f'<dl class="tiles" aria-label="mean Dice per class">{made}</dl>' if made else ""


def configuration(record: Record) -> str:
    config, data, layout = record.config, record.dataset, record.content.get("layout", {})
    tile = " × ".join(map(str, config.get("tile", ())))
    train, held = (len(data.get(name, ())) for name in ("train", "held_out"))
    modalities = ", ".join(map(str, data.get("modalities", ())))
    first = {
        "data": f"{data.get('name', '')} ({data.get('layout', '')}): {train} cases to train on, {held} held out",
        "modalities": modalities,
        "tile and patch": f"{tile} voxels, patch {config.get('patch', '')}",
        "network": "depth {depth}, width {embed_dim}, {heads} heads, decoder {decoder}".format_map(_Blank(config)),
        "training": "{epochs} epochs × {iterations} steps, {optimizer}, learning rate {lr}, {precision}".format_map(
            _Blank(config)
        ),
        "ranks": "{ranks} = data {data} × seq {seqpar}".format_map(_Blank(layout)) + f", mode {config.get('mode', '')}",
    }
    more = {"preset": record.content.get("preset"), "commit": record.content.get("commit")}
    more |= dict(record.content.get("versions", {}))
    more |= {"command": " ".join(map(str, record.content.get("command", ()))), **config}
    rest = f"<details><summary>All settings</summary>{_settings(more)}</details>"
    return _settings(first) + rest


class _Blank(dict[str, Any]):
    """Settings in which one that is missing reads as a dash."""

    def __missing__(self, name: str) -> str:
        return "–"


def _settings(rows: dict[str, Any]) -> str:
    made = [f"<tr><th>{escape(str(k))}</th><td>{escape(_spelled(v))}</td></tr>" for k, v in rows.items()]
    return f'<table class="settings">{"".join(made)}</table>'


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return "–" if value in (None, "") else str(value)


def curves(record: Record) -> str:
    def curve(name: str, rows: Sequence[Any], key: str, first: int, dots: bool = False) -> Curve:
        return Curve(name, [row["step"] + first for row in rows], [number(row.get(key)) for row in rows], dots)

    train, held = record.train, record.held_out
    losses = [curve("training", train, "loss", 1), curve("held out", held, "loss", 0, dots=True)]
    names = list(held[-1].get("dice", {})) if held else []
    steps = [row["step"] for row in held]
    dices = [Curve(n, steps, [number(row.get("dice", {}).get(n)) for row in held], dots=True) for n in names]
    charts = [draw_curves("Loss (soft Dice + cross-entropy)", [c for c in losses if c.steps])]
    charts.append(draw_curves("Mean Dice on held-out cases", dices, high=1.0))
    charts.append(draw_curves("Learning rate", [curve("learning rate", train, "lr", 1)]))
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else "<p>No step has been recorded.</p>"


def case_section(case: ScoredCase, shown: Shown) -> str:
    """Returns one case with its scores and three planes."""
    planes, at = draw_planes(shown)
    figures = "".join(
        f"<figure>{plane}<figcaption>{name} {place + 1} / {side}</figcaption></figure>"  # as the viewer counts
        for plane, name, place, side in zip(planes, ("sagittal", "coronal", "axial"), at, shown.truth.shape)
    )
    dice = ", ".join(
        f"{name} {'–' if math.isnan(value) else f'{value:.3f}'}"
        for name, value in ((name, row.get("Dice", math.nan)) for name, row in case.scores.items())
    )
    modality = f" · shown on {favourite(list(shown.images))}" if shown.images else ""
    note = f'<p class="small">{escape(shown.note)}</p>' if shown.note else ""
    head = f'<h3>{escape(case.name)}</h3><p class="small">Dice: {escape(dice + modality)}</p>'
    w, d, _ = (side * step for side, step in zip(shown.truth.shape, shown.spacing))
    scale = f'style="grid-template-columns: {d:.6g}fr {w:.6g}fr {w:.6g}fr"'  # as many pixels to a mm in each plane
    body = f'{head}{note}<div class="planes" {scale}>{figures}</div>'
    return f'<article class="case" data-case="{escape(case.name)}">{body}</article>'


def legend(record: Record) -> str:
    keys = "".join(
        f'<span><i style="background:{COLOURS[n % len(COLOURS)]}"></i>{escape(name)}</span>'
        for n, name in enumerate(record.label_names.values())
    )
    lines = '<span><i class="solid"></i>truth</span><span><i class="dashed"></i>prediction</span>'
    return f'<p class="keys">{keys}{lines}</p>'


def viewer_data(record: Record, cases: Sequence[tuple[Shown, Embedded]]) -> dict[str, Any]:
    """Returns what the viewer reads: labels with colours, and each case's sheets."""
    labels = [{"name": n, "colour": COLOURS[k % len(COLOURS)]} for k, n in enumerate(record.label_names.values())]
    entries = [
        {
            "name": shown.name,
            "shape": made.shape,
            "factors": made.factors,
            "spacing": [s * f for s, f in zip(shown.spacing, made.factors)],
            "columns": made.columns,
            "modalities": list(shown.images),
            "favourite": favourite(list(shown.images)),
            "images": made.images,
            "truth": made.truth,
            "prediction": made.prediction,
        }
        for shown, made in cases
    ]
    return {"labels": labels, "sides": SIDES, "cases": entries}


def viewer_note(cases: Sequence[tuple[Shown, Embedded]], budget: int) -> str:
    """Returns what was left out to keep the page small."""
    coarse = {made.factors for _, made in cases}
    used = sum(made.num_bytes for _, made in cases)
    told = f"Volumes are cropped to the body and kept in {GREYS} grey levels: {used / 1e6:.1f} MB of at most "
    told += f"{budget / 1e6:g} MB in this page."
    if coarse == {(1, 1, 1)}:
        return told + " Every voxel is there."
    blocks = "; ".join(sorted(" × ".join(map(str, factors)) for factors in coarse))
    return told + f" Blocks of {blocks} voxels became one (images by their mean, labels by their middle voxel)."
