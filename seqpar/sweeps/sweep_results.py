"""What a sweep leaves for people: sweep.csv, sweep.png, and the lines at its end."""

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from seqpar.data.files import write_text
from seqpar.next_command import next_command
from seqpar.runs.sweep_folder import Point, Sweep, show
from seqpar.settings.config import dashed
from seqpar.sweeps.sweep_picture import draw_sweep

COLUMNS = ("state", "step", "steps", "score", "at", "loss", "seconds", "code", "why")
SHOWN = 10  # points of the table that is printed


def write_results(out: Path, sweep: Sweep) -> list[str]:
    """Writes sweep.csv and sweep.png into the sweep's folder; returns the lines that sum it up."""
    write_text(out / "sweep.csv", csv_text(sweep))
    draw_sweep(out, sweep, out / "sweep.png")
    lines = _table(sweep)
    for point in sweep.points:
        if point.state in ("failed", "killed"):
            how = "failed" if point.state == "failed" else "was killed"
            lines.append(f"{point.name} {how}, code {point.code}: {point.why}")
    count = sum(point.is_over for point in sweep.points)
    lines.append(f"{count} of {len(sweep.points)} points are over: {out / 'sweep.json'}, sweep.csv, sweep.png")
    if best := sweep.best:
        lines.append(f"best: {best.name}: {sweep.score_name} {best.score:.4f} after step {best.at}")
        lines.append(f"next: {next_command('report', out)}  (all points on one page)")
        lines.append(f"next: {next_command('predict', out / best.name, '-i', 'IMAGES', '-o', 'PREDICTIONS')}")
    return lines


def csv_text(sweep: Sweep) -> str:
    """Returns a line for each point: its name, its settings, how it stands."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    names = list(dict.fromkeys(name for point in sweep.points for name in point.settings))
    rows.writerow(["point", *map(dashed, names), *COLUMNS])
    for point in sweep.points:
        settings = [show(point.settings[name]) if name in point.settings else "" for name in names]
        rows.writerow([point.name, *settings, *(_field(getattr(point, name)) for name in COLUMNS)])
    return text.getvalue()


def _field(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return str(value)


def _table(sweep: Sweep) -> list[str]:
    """Returns the best points as lines, and of each setting the mean score by value."""
    known = [point for point in sweep.points if not math.isnan(point.score)]
    ranked: Sequence[Point] = sorted(known, key=lambda point: (-point.score, point.loss))
    if not ranked:
        return []
    lines = [f"{'score':>7} {'at step':>8} {'loss':>8} {'seconds':>8}  point"]
    for point in ranked[:SHOWN]:
        lines.append(f"{point.score:7.4f} {point.at:8d} {point.loss:8.4f} {point.seconds:8.1f}  {point.name}")
    if len(ranked) > SHOWN:
        lines.append(f"… and {len(ranked) - SHOWN} more in sweep.csv")
    for name, of_values in sweep.main_effects().items():
        if len(of_values) > 1 and len(of_values) < len(known):
            means = ", ".join(
                f"{value} {fmean(score for score, _ in pairs):.4f} ({len(pairs)})" for value, pairs in of_values.items()
            )
            lines.append(f"{sweep.score_name} by {dashed(name)}: {means}")
    return lines
