"""The picture of a figure: its diagrams side by side, lines told apart by colour, line style, width and marker."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.files import whole_file
from seqpar.report.diagrams import Bars, Diagram, Line

# Okabe and Ito's, from dark to light, so that they differ in grey too; each with a line style of its own.
STYLES = (
    ("#000000", "-", "o"),
    ("#d55e00", "--", "s"),
    ("#0072b2", ":", "^"),
    ("#009e73", "-.", "D"),
    ("#e69f00", (0, (5, 1, 1, 1, 1, 1)), "v"),
    ("#cc79a7", (0, (1, 3)), "P"),
    ("#56b4e9", (0, (8, 3)), "X"),
)
HATCHES = ("", "///", "...", "xxx")
FEW = 40  # points of a line; so many have markers
FEW_PLACES = 8  # of a logarithmic axis
WIDEST, THINNEST = 4.0, 1.4  # the first line is the widest, so that those that coincide with it do not hide it


def draw_figure(title: str, diagrams: Sequence[Diagram | Bars], note: str, paths: Sequence[Path]) -> None:
    """Draws diagrams side by side into files, whose names say their format.

    - ``note``: a text below them
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    width = max(4.2 * len(diagrams), 6.3)
    text = textwrap.wrap(note, int(width * 15))
    heights = [4.3, 0.14 * len(text) + 0.1]
    picture = Figure(figsize=(width, sum(heights)), layout="constrained")
    parts: Any = picture.subfigures(2, 1, height_ratios=heights)
    above, below = parts
    for plot, one in zip(above.subplots(1, len(diagrams), squeeze=False)[0], diagrams):
        if isinstance(one, Bars):
            _draw_bars(plot, one)
        else:
            _draw_lines(plot, one)
    handles = dict[str, Any]()
    for plot in above.axes:
        handles |= {label: handle for handle, label in zip(*plot.get_legend_handles_labels())}
    above.suptitle(title, fontsize=12)
    columns = max(1, min(len(handles), int(width / (1.1 + 0.085 * max(map(len, handles))))))
    above.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, handlelength=4.5)
    below.text(0.5, 0.95, "\n".join(text), ha="center", va="top", fontsize=7, color="#444444")
    for path in paths:
        with whole_file(path) as temporary:
            picture.savefig(temporary, format=path.suffix[1:], dpi=110)


def _draw_lines(plot: Any, diagram: Diagram) -> None:
    for number, line in enumerate(diagram.lines):
        _draw_line(plot, line, number, len(diagram.lines))
    plot.set(ylabel=diagram.quantity, xlabel=diagram.over)
    if diagram.log:
        _draw_log_axes(plot, sorted({place for line in diagram.lines for place in line.places}))
    else:
        plot.set_xlim(0, None)
        plot.locator_params("x", integer=diagram.over == "step")
    if diagram.quantity == "Dice":
        plot.set_ylim(0, 1)
    plot.grid(alpha=0.3)


def _draw_log_axes(plot: Any, places: Sequence[float]) -> None:
    """Makes both axes logarithmic, with plain numbers; a few places, as 1, 2, 4, are named themselves."""
    from matplotlib.ticker import LogLocator, NullFormatter

    plot.set(xscale="log", yscale="log")
    for axis in (plot.xaxis, plot.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    if len(places) <= FEW_PLACES:
        plot.set_xticks(places)


def _draw_line(plot: Any, line: Line, number: int, count: int) -> None:
    """Draws the mean over the seeds, with a band from their smallest to their largest value."""
    colour, style, marker = STYLES[(number if line.style is None else line.style) % len(STYLES)]
    width = WIDEST - (WIDEST - THINNEST) * number / max(count - 1, 1)
    values = np.array(line.rows, dtype=np.float64)
    plot.plot(
        line.places,
        values.mean(0),
        color=colour,
        linestyle="none" if line.only_points else style,
        linewidth=width,
        marker=marker if len(line.places) <= FEW or line.only_points else "",
        markersize=width + 3,
        markerfacecolor=colour if line.only_points else "none",
        label=line.label,
    )
    if len(values) > 1:
        plot.fill_between(line.places, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)


def _draw_bars(plot: Any, bars: Bars) -> None:
    """Draws a bar for each kind of value at each label, with its number above."""
    kinds = list(dict.fromkeys(kind for values in bars.values.values() for kind in values))
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        places = [place + (number - (len(kinds) - 1) / 2) * width for place in range(len(bars.values))]
        heights = [values.get(kind, float("nan")) for values in bars.values.values()]
        colour, hatch = STYLES[::-1][number % len(STYLES)][0], HATCHES[number % len(HATCHES)]
        drawn = plot.bar(places, heights, width, color=colour, edgecolor="black", hatch=hatch, label=kind)
        plot.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    steep = len(bars.values) > 4  # or names would lie on each other
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if steep else {"rotation": 15}
    plot.set_xticks(range(len(bars.values)), bars.values.keys(), fontsize=8, **turned)
    plot.set_ylabel(bars.quantity)
    plot.margins(y=0.12)
