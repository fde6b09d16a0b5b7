"""sweep.csv, sweep.png and the last lines."""

import csv
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from seqpar.data.files import write_text
from seqpar.report.curves import DICE, MOST_CURVES, OF_TILES, TRAIN_LOSS, Curve, Diagram, Line, LineStyle, read_curve
from seqpar.report.planes import RUN_COLOURS
from seqpar.report.plots import draw_diagram, make_figure, save_figure, title_of_run
from seqpar.runs.metrics_tail import ERRORS
from seqpar.runs.sweep_folder import Point, Sweep, describe_mixed, format_value, validated_on
from seqpar.settings.loss_settings import OF_LOSS
from seqpar.tasks.lookup import TASKS
from seqpar.terminal import next_command
from seqpar.text import flag_name, quantity

BEST, OTHERS, MEANS = RUN_COLOURS[0], "#7f9fb5", "#222222"
# The best points have the colours that a page about the sweep gives them; those without a name are lighter than all.
STYLES = (
    LineStyle(BEST, width=2.4),
    *(LineStyle(colour, width=1.2) for colour in RUN_COLOURS[1:MOST_CURVES]),
    LineStyle("#ccd1d6", width=0.8),
)
WIDTH, LETTERS = 5.4, 76  # of the picture in inches, and of its lines of text
STAR = ", a star for the highest score"
MOST_VALUES = 8  # of a setting, shown next to each other; more are drawn over an axis
NEAR = 0.01  # of an axis: dots that are no farther apart look like one


def draw_sweep(out: Path, sweep: Sweep, path: Path) -> None:
    """Draws training loss and score of every point over steps, then its score by each setting that differs."""
    from matplotlib import rc_context

    with rc_context({"font.size": 8, "axes.labelsize": 8}):
        save_figure(_figure_of_sweep(out, sweep), path, durable=True, dpi=150)


def _figure_of_sweep(out: Path, sweep: Sweep) -> Any:
    """Returns the figure, two narrow panels in a row, so that it can be read on a narrow page."""
    names, best, top = sweep.varied(), sweep.best, _top(sweep)
    mixed = describe_mixed(sweep, validated_on(out, sweep)).partition(", so their order")[0]
    marked = None if mixed else sweep.marked
    rows = math.ceil(len(names) / 2)
    of_loss = ", not comparable" if {*OF_LOSS} & {*names} else ", on different tiles" * bool({*OF_TILES} & {*names})
    losses = Diagram(f"{TRAIN_LOSS}{of_loss}", "step", _lines(out, sweep, marked, TRAIN_LOSS), low=0.0, styles=STYLES)
    scores = Diagram(sweep.score_name, "step", _lines(out, sweep, marked, DICE), low=0.0, high=top, styles=STYLES)
    keys = sum(line.label.count("\n") + 1 for line in losses.lines if line.label)
    title = title_of_run(out, points=[out / point.name for point in sweep.points]).split("\n")
    title += [f"{quantity(len(sweep.points), 'point')}, {sum(point.is_over for point in sweep.points)} ended"]
    title += textwrap.wrap(sweep.describe_best(best), LETTERS) if best else []
    title += textwrap.wrap(mixed, LETTERS)
    note = textwrap.wrap(_note(sweep, marked), LETTERS) if names else []
    heights = [2.4 + 0.15 * (keys + len(title)), 2.3 * rows + 0.15 * len(note)][: 1 + bool(rows)]
    picture = make_figure(WIDTH, sum(heights))
    above, *below = picture.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    handles = dict[str, Any]()
    for plot, diagram in zip(above.subplots(1, 2), (losses, scores)):
        draw_diagram(plot, diagram)
        plot.set(xlabel="step", ylabel=diagram.quantity)
        plot.grid(alpha=0.3)
        handles |= {label: handle for handle, label in zip(*plot.get_legend_handles_labels())}
    if handles:
        labels = list(handles)[::-1]  # the best is drawn last, on top of all
        above.legend([handles[label] for label in labels], labels, loc="outside lower center", fontsize=8)
    if names:
        panels = below[0].subplots(rows, 2, squeeze=False).flat
        for name, plot in zip(names, panels):
            _draw_setting(plot, sweep, name, marked)
            plot.set_ylim(0, top)
        for plot in panels:
            plot.remove()
        below[0].supxlabel("\n".join(note), fontsize=8, color=MEANS)
    above.suptitle("\n".join(title), fontsize=9)
    return picture


def _note(sweep: Sweep, marked: Point | None) -> str:
    """Returns what the drawings of settings show; means and spread only if a value was tried more than once."""
    star = STAR * (marked is not None)
    together = " (×2: two in one place)" * any(_covered(sweep, name) for name in sweep.varied())
    effects = [of_values for name, of_values in sweep.main_effects().items() if not _has_range(sweep, name)]
    if all(len(pairs) == 1 for of_values in effects for pairs in of_values.values()):
        drawn = " or ".join(["bar"] * bool(effects) + ["dot"] * (len(effects) < len(sweep.main_effects())))
        return f"Scores by setting: a {drawn} for each point{together}{star}"
    means = "a bar for the mean at each value, a line from lowest to highest"
    return f"Scores by setting: a dot for each point{together}, {means}{star}"


def _has_range(sweep: Sweep, name: str) -> bool:
    """Returns whether a setting has enough different numbers to be the axis of a chart."""
    known = [point.settings[name] for point in sweep.ranked if name in point.settings]
    return len(set(map(format_value, known))) > MOST_VALUES and all(isinstance(one, (int, float)) for one in known)


def _top(sweep: Sweep) -> float:
    """Returns the end of the axes of scores: 1, or less where no point comes near it."""
    most = max((point.score for point in sweep.points if not math.isnan(point.score)), default=1.0)
    return min(1.0, math.ceil(most * 11) / 10) or 1.0


def _lines(out: Path, sweep: Sweep, marked: Point | None, quantity_drawn: str) -> list[Line]:
    """Returns a quantity of all points that have recorded any, the best one on top.

    The best points have names; the others share one.
    """
    curves = dict[str, Curve]()
    for point in (*sweep.ranked, *(point for point in sweep.points if point not in sweep.ranked)):
        with suppress(OSError):
            curves[point.name] = read_curve(point.name, [out / point.name], quantity_drawn)
    lines = list[Line]()
    for n, (name, curve) in enumerate(curves.items()):
        label = textwrap.fill(f"{name}{', highest score' * (marked is not None and name == marked.name)}", LETTERS - 10)
        if n >= MOST_CURVES:
            label = f"the other {quantity(len(curves) - MOST_CURVES, 'point')}" if n == MOST_CURVES else ""
        style = min(n, MOST_CURVES)
        lines.append(Line(label, curve.steps, curve.rows, dots=quantity_drawn == DICE, style=style))
    return lines[::-1]


def _known(sweep: Sweep, name: str) -> list[Point]:
    """Returns the points that have a score and a setting."""
    return [point for point in sweep.points if name in point.settings and not math.isnan(point.score)]


def _values(sweep: Sweep, name: str) -> list[str]:
    """Returns the different values of a setting, in the order of their bars."""
    return list(dict.fromkeys(format_value(point.settings[name]) for point in _known(sweep, name)))


def _dots(sweep: Sweep, name: str) -> list[tuple[float, float]]:
    """Returns the place of each point in the drawing of a setting: its number, or that of its bar, and its score."""
    known, values = _known(sweep, name), _values(sweep, name)
    if _has_range(sweep, name):
        return [(float(point.settings[name]), point.score) for point in known]
    return [(values.index(format_value(point.settings[name])), point.score) for point in known]


def _is_logarithmic(numbers: Sequence[float]) -> bool:
    """Returns whether a setting's axis is logarithmic."""
    return min(numbers) > 0 and max(numbers) > 20 * min(numbers)


def _covered(sweep: Sweep, name: str) -> list[tuple[float, float, int]]:
    """Returns the places at which several dots look like one, with their count."""
    dots, has_range = _dots(sweep, name), _has_range(sweep, name)
    numbers = [number for number, _ in dots]
    shown = list(map(math.log10, numbers)) if has_range and _is_logarithmic(numbers) else numbers
    reach = NEAR * (max(shown) - min(shown)) if has_range else 0.0
    counts, high = dict[int, int](), NEAR * _top(sweep)  # by the first dot of each place
    for n, (_, score) in enumerate(dots):
        near = (m for m in counts if abs(shown[m] - shown[n]) <= reach and abs(dots[m][1] - score) <= high)
        first = next(near, n)
        counts[first] = counts.get(first, 0) + 1
    return [(*dots[n], count) for n, count in counts.items() if count > 1]


def _draw_dots(plot: Any, sweep: Sweep, name: str, marked: Point | None) -> None:
    """Draws a translucent dot for each point, how many there are where they coincide, and the star."""
    dots = _dots(sweep, name)
    if not dots:
        return
    plot.scatter(*zip(*dots), s=16, facecolors=f"{OTHERS}66", edgecolors=OTHERS, linewidths=0.8, zorder=3)
    if marked is not None and name in marked.settings:
        plot.scatter(*dots[_known(sweep, name).index(marked)], s=60, marker="*", color=BEST, zorder=4)
    for number, score, count in _covered(sweep, name):
        away = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}
        plot.annotate(f"×{count}", (number, score), **away, fontsize=7, color=MEANS, zorder=5)


def _draw_setting(plot: Any, sweep: Sweep, name: str, marked: Point | None) -> None:
    """Draws the score of each point by a setting's value, with their means and spread unless it is a number of many."""
    known, values = _known(sweep, name), _values(sweep, name)
    plot.set_ylabel(sweep.score_name)
    plot.set_xlabel(flag_name(name))
    plot.grid(alpha=0.3)
    if _has_range(sweep, name):
        _draw_dots(plot, sweep, name, marked)
        if _is_logarithmic([point.settings[name] for point in known]):
            plot.set_xscale("log")
        return
    for at, value in enumerate(values):
        scores = [point.score for point in known if format_value(point.settings[name]) == value]
        plot.bar(at, fmean(scores), 0.6, color="#dfe8ee", edgecolor=OTHERS)
        plot.vlines(at, min(scores), max(scores), color=MEANS, linewidth=1.2)
    _draw_dots(plot, sweep, name, marked)
    crowded = len(values) > MOST_VALUES
    plot.set_xticks(range(len(values)), values, fontsize=6 if crowded else 7, rotation=90 if crowded else 0)


COLUMNS = ("state", "step", "steps", "score", "at", "cases", "loss", "seconds", "code", "why")
NUMBER = "validated_on"  # the same for points that were validated on the same cases and labels
SHOWN = 10  # points of the table that is printed


def write_results(out: Path, sweep: Sweep) -> list[str]:
    """Writes sweep.csv and sweep.png into the sweep's folder; returns the lines that sum it up."""
    numbers = validated_on(out, sweep)
    write_text(out / "sweep.csv", csv_text(sweep, numbers))
    draw_sweep(out, sweep, out / "sweep.png")
    lines = _table(sweep)
    lines += sweep.failures
    count = sum(point.is_over for point in sweep.points)
    lines.append(f"{count} of {len(sweep.points)} points have ended: {out / 'sweep.json'}, sweep.csv, sweep.png")
    if best := sweep.best:
        lines.append(sweep.describe_best(best))
        if told := describe_mixed(sweep, numbers):
            lines.append(f"caution: {told}")
        lines.append(f"next: {next_command('report', out)}  (all points on one page)")
        if any((out / best.name).glob("**/model.safetensors")):
            lines.append(f"next: {TASKS[sweep.task].next_step(out / best.name)}{'  (or another point)' * bool(told)}")
        else:
            gone = "holds no weights" if (out / best.name).is_dir() else "is gone"
            lines.append(f"{out / best.name} {gone}: no network of the best point is left to go on with")
    return lines


def csv_text(sweep: Sweep, numbers: Mapping[str, int]) -> str:
    """Returns a line for each point: its name, its settings, how it stands, and which of them were validated alike.

    - ``numbers``: as ``validated_on`` returns them
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    names = list(dict.fromkeys(name for point in sweep.points for name in point.settings))
    rows.writerow(["point", *map(flag_name, names), *("training_loss" if c == "loss" else c for c in COLUMNS), NUMBER])
    for point in sweep.points:
        settings = [format_value(point.settings[name]) if name in point.settings else "" for name in names]
        own = [_field(getattr(point, name)) for name in COLUMNS]
        rows.writerow([point.name, *settings, *own, numbers.get(point.name, "")])
    return text.getvalue()


def _field(value: object) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return str(value)


def _table(sweep: Sweep) -> list[str]:
    """Returns the best points as lines, and of each setting the mean score by value."""
    ranked = sweep.ranked
    if not ranked:
        return []
    lines = [f"score: {sweep.score_name}"] * (sweep.task in ERRORS)
    lines += [f"{'score':>7} {'at step':>8} {'train loss':>10} {'seconds':>8}  point"]
    for point in ranked[:SHOWN]:
        lines.append(f"{point.score:7.4f} {point.at:8d} {point.loss:10.4f} {point.seconds:8.1f}  {point.name}")
    if len(ranked) > SHOWN:
        lines.append(f"… and {len(ranked) - SHOWN} more in sweep.csv")
    for name, of_values in sweep.main_effects().items():
        if len(of_values) > 1 and len(of_values) < len(ranked):
            means = ", ".join(
                f"{value} {fmean(score for score, _ in pairs):.4f} ({len(pairs)})" for value, pairs in of_values.items()
            )
            lines.append(f"{sweep.score_name} by {flag_name(name)}: {means}")
    return lines
