"""The files of a figure: pictures, every point, and the verdicts with what they are of."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from lab.benches.series import machine
from lab.figures.figure import Figure, Results, scaling
from lab.figures.verdicts import with_question
from seqpar.data.files import write_text
from seqpar.report.curves import Bars, Diagram, points_of
from seqpar.report.plots import draw_figure
from seqpar.runs.run_folder import read_config
from seqpar.text import quantity
from seqpar.weights.facts import changed_between


def write_figure(figure: Figure, results: Results, scale: str, out: Path) -> list[str]:
    """Writes figure-N.png, .svg, .csv and .txt into a folder; returns the verdicts."""
    start = out / f"figure-{figure.number}"
    verdicts = [*with_question(figure.judge(results)), *changed_data(results)]
    note = "; ".join([note_of(figure, results, scale), *changed_data(results)])
    diagrams = figure.draw(results)
    title = f"Figure {figure.number}. {figure.title}"
    draw_figure(title, diagrams, note, [start.with_suffix(suffix) for suffix in (".png", ".svg")])
    write_text(start.with_suffix(".csv"), points(diagrams))
    write_text(start.with_suffix(".txt"), "\n".join([title, "", *verdicts, "", note, machine(), ""]))
    return verdicts


def note_of(figure: Figure, results: Results, scale: str) -> str:
    """Returns what the runs of a figure are of: the scale, and in which settings the first is not the paper's."""
    seeds = len(next(iter(results.runs.values())))
    return f"--scale {scale}, {quantity(seeds, 'seed')}: {scaling(results.config(), figure.published)}"


def changed_data(results: Results) -> list[str]:
    """Returns a sentence if images or labels changed between the runs, which then cannot be compared."""
    described = [read_config(run).get("dataset", {}) for runs in results.runs.values() for run in runs]
    told = changed_between(*described)
    return [f"CAUTION: {told}: they cannot be compared"] if told else []


def points(diagrams: Sequence[Diagram | Bars]) -> str:
    """Returns every point of every diagram, a line each."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["quantity", "curve", "seed_or_kind", "over", "place", "value"])
    rows.writerows(points_of(diagrams))
    return text.getvalue()
