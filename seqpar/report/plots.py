"""The one place that draws curves: into panels and files by matplotlib, into pages as inline SVG; strips of dots."""

import io
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from seqpar.data.files import whole_file
from seqpar.report.curves import AGAIN, DISTINCT, GREY, GRID, INK, Bars, Diagram, Line, LineStyle, training_diagrams
from seqpar.runs.journal import held_out_scores, read_metrics
from seqpar.runs.run_folder import FOLDS_FILE, SWEEP_FILE, data_of_run, is_of_phantoms, read_config
from seqpar.scores.comparison import FEW as FEW_CASES

BUCKETS = 240  # points of a line: a longer one is drawn by the mean and the range of its pieces
FEW = 60  # points of a line; more have no markers
FEW_PLACES = 8  # of a logarithmic axis
WINDOW = 25  # steps of a running mean, in short runs a tenth of them
SOFTWARE = "seqpar"  # in every PNG that is drawn
HATCHES = ("", "///", "...", "xxx")


def draw_diagram(plot: Any, diagram: Diagram) -> None:
    """Draws lines and axes into a panel of matplotlib's; names, titles and keys are the caller's."""
    alone = sum(line.is_dot for line in diagram.lines)
    wider = min(4, 16 / max(alone - 1, 1))  # than the next dot, which is drawn inside
    for line, style in diagram.named():
        alone -= line.is_dot
        size = 5 + wider * alone if line.is_dot else style.width + 3
        _draw_line(plot, line, style._replace(dashes="--") if line.dashed else style, size)
    if diagram.log:
        _draw_log_axes(plot, sorted({place for line in diagram.lines for place in line.places}))
    else:
        places = [place for line in diagram.lines for place in line.places]
        plot.set_xlim(0, diagram.last or max(places, default=1) or 1)
        plot.locator_params("x", integer=diagram.over.startswith("step"))
        plot.set_ylim(diagram.low, diagram.high)


def _draw_line(plot: Any, line: Line, style: LineStyle, size: float) -> None:
    """Draws the mean over the seeds, with a band from their smallest to their largest value; ``size``: of markers."""
    points = line.points()
    if not len(points):
        return
    pieces = np.array_split(points, min(BUCKETS, len(points)))
    places, means, low, high = np.array([[*p[:, :2].mean(0), p[:, 2].min(), p[:, 3].max()] for p in pieces]).T
    colour, dashes, marker, width, hollow = style
    if (high > low).any():
        plot.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0, clip_on=False)
    if line.noisy and (window := _window(len(points))) > 1:
        plot.plot(places, means, color=colour, alpha=0.35, linewidth=width / 2, clip_on=False)
        smooth = running_mean(points[:, 1], window)
        means = np.array([piece.mean() for piece in np.array_split(smooth, len(pieces))])
    marked = line.only_points or line.is_dot or line.dots and len(points) <= FEW  # one value alone makes no line
    plot.plot(
        places,
        means,
        color=colour,
        linestyle="none" if line.only_points else dashes,
        linewidth=width,
        marker=marker if marked else "",
        markersize=size,
        markerfacecolor="none" if hollow and not line.only_points else colour,
        label=escape_mathtext(line.label),
        clip_on=False,  # 0 and 1 too are seen whole
    )


def _window(steps: int) -> int:
    """Returns how many steps a running mean is over; 1 in runs too short for one."""
    return max(1, min(WINDOW, steps // 10))


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Returns the mean over the last ``window`` values at each of them."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means: NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return means


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


def _draw_bars(plot: Any, bars: Bars) -> None:
    """Draws a bar for each kind of value at each label, with its number above."""
    kinds = list(dict.fromkeys(kind for values in bars.values.values() for kind in values))
    width = 0.8 / len(kinds)
    for n, kind in enumerate(kinds):
        places = [place + (n - (len(kinds) - 1) / 2) * width for place in range(len(bars.values))]
        heights = [values.get(kind, math.nan) for values in bars.values.values()]
        colour, hatch = DISTINCT[::-1][n % len(DISTINCT)].colour, HATCHES[n % len(HATCHES)]
        drawn = plot.bar(places, heights, width, color=colour, edgecolor="black", hatch=hatch, label=kind)
        plot.bar_label(drawn, fmt="%.3g", fontsize=7, padding=2)
    steep = len(bars.values) > 4  # or names would lie on each other
    turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if steep else {"rotation": 15}
    plot.set_xticks(range(len(bars.values)), bars.values.keys(), fontsize=8, **turned)
    plot.set_ylabel(bars.quantity)
    plot.margins(y=0.12)


def make_figure(width: float, height: float) -> Any:
    """Returns an empty figure; sides in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path, durable: bool = False, dpi: int = 110) -> None:
    """Writes a figure into a file, whose name says its format.

    - ``durable``: False for what is drawn again after every validation
    - ``dpi``: pixels per inch
    """
    with whole_file(path, durable=durable) as temporary:
        own = {"metadata": {"Software": SOFTWARE}} if path.suffix == ".png" else {}
        figure.savefig(temporary, format=path.suffix[1:], dpi=dpi, **own)


TITLE = 76  # letters of a line above a narrow picture
NOT_PATIENTS = "generated phantoms, not patients"


def title_of(name: str, generated: bool, *lines: str) -> str:
    """Returns the text above a picture, which travels without its folder: whose it is, and if it shows phantoms.

    - ``lines``: further ones
    """
    first = textwrap.wrap(f"{name}: {NOT_PATIENTS}" if generated else name, TITLE)
    return "\n".join([escape_mathtext("\n".join(first)), *lines])


def title_of_run(out: Path, *lines: str, points: Sequence[Path] = ()) -> str:
    """Returns ``title_of`` for the folder of a run, or of a sweep with its ``points``."""
    return title_of(name_of_run(out, "Sweep" if points else "Run"), any(map(is_of_phantoms, points or [out])), *lines)


def name_of_run(out: Path, kind: str) -> str:
    """Returns the name of a run, such as "Run first"; a fold, or the point of a sweep, has its folder's name too."""
    place = out.resolve()
    is_part = any(os.path.isfile(place.parent / name) for name in (FOLDS_FILE, SWEEP_FILE))  # False if it is unreadable
    name = f"{place.parent.name}/{place.name}" if is_part else place.name
    return name if name.lower().startswith(kind.lower()) else f"{kind} {name}"


def escape_mathtext(text: str) -> str:
    """Returns a name as matplotlib shows it unchanged: it takes what is between two dollars for a formula."""
    return text.replace("$", r"\$")


def draw_figure(title: str, diagrams: Sequence[Diagram | Bars], note: str, paths: Sequence[Path]) -> None:
    """Draws diagrams side by side into files, whose names say their format.

    - ``note``: a text below them
    """
    width = max(4.2 * len(diagrams), 6.3)
    text = textwrap.wrap(note, int(width * 15))
    heights = [4.3, 0.14 * len(text) + 0.1]
    figure = make_figure(width, sum(heights))
    above, below = figure.subfigures(2, 1, height_ratios=heights)
    for plot, one in zip(above.subplots(1, len(diagrams), squeeze=False)[0], diagrams):
        if isinstance(one, Bars):
            _draw_bars(plot, one)
        else:
            draw_diagram(plot, one)
            plot.set(ylabel=one.up or one.quantity, xlabel=one.over)
            plot.set_box_aspect(1 if one.square else None)
            plot.grid(alpha=0.3)
    handles = dict[str, Any]()
    for plot in above.axes:
        handles |= {label: handle for handle, label in zip(*plot.get_legend_handles_labels())}
    above.suptitle(title, fontsize=12)
    columns = max(1, min(len(handles), int(width / (1.1 + 0.085 * max(map(len, handles))))))
    above.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=columns, handlelength=4.5)
    below.text(0.5, 0.95, "\n".join(text), ha="center", va="top", fontsize=7, color="#444444")
    for path in paths:
        save_figure(figure, path, durable=True)


def draw_progress(out: Path) -> None:
    """Draws losses, held-out scores and learning rate of all steps so far into ``progress.png``.

    A run whose validations have pictures instead of scores shows these below.
    """
    rows = read_metrics(out / "metrics.jsonl")
    train, held_out = ([row for row in rows if row["kind"] == kind] for kind in ("train", "val"))
    if not train:
        return
    diagrams, picture = (
        training_diagrams(train, held_out, "Loss", _classes_of(out), data_of_run(out)),
        out / "validation.png",
    )
    has_picture = bool(held_out) and held_out_scores(held_out[-1])[0] not in held_out[-1] and picture.exists()
    heights, pixels = [4.2], None  # of the panels with the title, in inches
    if has_picture:
        from matplotlib.image import imread

        pixels = imread(picture)
        heights.append(6.0 * pixels.shape[0] / pixels.shape[1])
    figure = make_figure(12, sum(heights))
    grid = figure.add_gridspec(len(heights), len(diagrams), height_ratios=heights)
    for column, diagram in enumerate(diagrams):
        plot = figure.add_subplot(grid[0, column])
        draw_diagram(plot, diagram)
        wrap = partial(textwrap.fill, width=120 // len(diagrams))  # next to its neighbours
        plot.set_title(wrap(diagram.quantity), fontsize=10)
        plot.set_xlabel(diagram.over)
        plot.grid(alpha=0.3)
        if diagram.has_keys:
            handles, labels = plot.get_legend_handles_labels()
            plot.legend(handles, list(map(wrap, labels)), fontsize=8)
    figure.suptitle(title_of_run(out), fontsize=10)
    if note := _about_lines(diagrams):
        figure.supxlabel(note, fontsize=8)
    if pixels is not None:
        panel = figure.add_subplot(grid[1, :])
        panel.axis("off")
        panel.imshow(pixels)
    save_figure(figure, out / "progress.png")


def _classes_of(out: Path) -> tuple[str, ...]:
    """Returns the labels and regions of a run in the order of their colours; none before config.json is there."""
    try:
        dataset = read_config(out)["dataset"]
        return (*(name for name, number in dataset["labels"].items() if number), *dataset["regions"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ()


@dataclass(frozen=True)
class Chart:
    """A diagram as a page shows it.

    - ``keys``: how its lines look, as a background in CSS, and their names, where they need names
    - ``about_lines``: what its pale, solid and wide lines are
    """

    title: str
    svg: Markup
    keys: Sequence[tuple[str, str]] = ()
    about_lines: str = ""


def draw_chart(diagram: Diagram, width: int = 340) -> Chart | None:
    """Returns a diagram as inline SVG in the colours of the page; None without values."""
    if not any(len(line.points()) for line in diagram.lines):
        return None
    from matplotlib import rc_context

    if len(diagram.lines) == 1:
        diagram = replace(diagram, styles=(LineStyle(INK),))  # a class or a run keeps its colour
    with (  # the salt makes the names of markers differ between the charts of a page
        rc_context({"svg.fonttype": "none", "svg.hashsalt": diagram.quantity, "font.size": 10}),
        io.StringIO() as text,
    ):
        figure = make_figure(width / 72, width / 72 if diagram.square else 2.9)
        plot = figure.add_subplot(box_aspect=1 if diagram.square else None)
        draw_diagram(plot, diagram)
        plot.locator_params(nbins=5)
        if diagram.high is None:  # the highest value too lies between two ticks
            low, high = plot.get_ylim()
            ticks = plot.yaxis.get_major_locator().tick_values(low, high)
            top = next((tick for tick in ticks if tick >= high), high)
            plot.set_yticks([tick for tick in ticks if low <= tick <= top])
            plot.set_ylim(low, top)
        plot.xaxis.set_major_formatter("{x:,g}")
        plot.yaxis.set_major_formatter("{x:g}")
        plot.grid(axis="y", color=GRID, linewidth=0.8, clip_on=False)
        plot.set_axisbelow(True)
        plot.tick_params(length=0)
        plot.spines[:].set_visible(False)
        plot.set_xlabel(diagram.over, loc="right")
        plot.set_ylabel(diagram.up)
        for handle in plot.get_legend_handles_labels()[0]:
            handle.set_gid("curve")
        figure.savefig(text, format="svg", transparent=True)
        svg = _inline(text.getvalue(), diagram.quantity)
    keys = [_key(line, style) for line, style in diagram.named() if len(line.points())]
    return Chart(diagram.quantity, svg, keys if diagram.has_keys else (), _about_lines([diagram]))


def _about_lines(diagrams: Sequence[Diagram]) -> str:
    """Returns what pale, solid and wide lines are; "" if all lines are plain."""
    counts = [len(line.points()) for one in diagrams for line in one.lines if line.noisy]
    windows = {*map(_window, counts)} - {1}
    has_band = max(counts, default=0) > BUCKETS
    band = " (with many steps: means, and a band from the lowest to the highest value)" * has_band
    ends = " to ".join(map(str, sorted({min(windows), max(windows)}))) if windows else ""
    by_length = ", depending on a line's length" * (len(windows) > 1)
    told = [f"Pale: each step{band}; solid: mean of the last {ends} steps{by_length}."] if windows else []
    widths = ({style.width for line, style in one.named() if len(line.points()) > 1} for one in diagrams)
    told += ["Line widths only serve to tell coinciding lines apart."] * any(len(own) > 1 for own in widths)
    dots = (sum(line.is_dot for line in one.lines) for one in diagrams)
    told += ["Sizes of dots only serve to tell coinciding dots apart."] * any(count > 1 for count in dots)
    return " ".join(told)


STROKES = {"--": (7, 3), ":": (2, 3), "-.": (9, 3, 2, 3)}  # of a key, in px: drawn and left out, in turn
MARKERS = {marker: letter for _, marker, letter in AGAIN}


def _key(line: Line, style: LineStyle) -> tuple[str, str]:
    """Returns how a line looks, as a background in CSS, and its name, after its marker if its colour comes again."""
    dashes, colour = "--" if line.dashed else style.dashes, _on_page(style.colour)
    name = f"{MARKERS[style.marker]} {line.label}" if style.marker in MARKERS else line.label
    if dashes == "-":
        return colour, name
    at, stops = 0, list[str]()
    for n, length in enumerate(STROKES[dashes] if isinstance(dashes, str) else dashes[1]):
        stops.append(f"{'transparent' if n % 2 else colour} {at}px {at + length}px")
        at += length
    return f"repeating-linear-gradient(to right, {', '.join(stops)})", name


def draw_charts(diagrams: Sequence[Diagram], width: int = 340) -> list[Chart]:
    """Returns the charts of all diagrams that have values."""
    return list(filter(None, (draw_chart(diagram, width) for diagram in diagrams)))


def _inline(text: str, label: str) -> Markup:
    """Returns matplotlib's SVG as an element of a page: without size, style sheet and names, in the page's colours."""
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in [one for one in parent if one.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
    used = set(re.findall(r"#(\w+)[\")]", text))
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]
        own = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        if own.get("id") not in used and own.pop("id", "") == "curve":
            own["class"] = "curve"
        if "style" in own:
            own["style"] = _on_page(re.sub(r"font[-\w]*: [^;]*;? ?", "", own["style"]))
        element.attrib = own
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return Markup(ElementTree.tostring(root, "unicode"))


def _on_page(style: str) -> str:
    """Returns a style with the colours that a page has for text and lines, in the dark and on paper too."""
    return style.replace(INK, "currentColor").replace(GRID, "var(--line)")


MAX_NAME = 40  # letters of a class's name next to its strip
MAX_TITLES = 200  # a strip of more dots does not name their cases


class Strip(NamedTuple):
    """A row of dots, with left end and width of the box of the quartiles, and place of the median.

    Few dots have no box, which would look like a confidence interval, and a single one has no median.

    - ``dots``: place, title, and whether the dot is hollow, which marks a note
    """

    name: str
    colour: str
    y: float
    dots: Sequence[tuple[float, float, str, bool]]
    box: tuple[float, float] | None = None
    median: float | None = None


@dataclass(frozen=True)
class Strips:
    """A strip of dots for each class over one axis; ``is_measured``: hollow dots have no part in the medians."""

    title: str
    left: float
    width: int
    height: int
    ticks: Sequence[tuple[float, str]]
    rows: Sequence[Strip]
    is_measured: bool = False


def make_strips(
    title: str,
    rows: Mapping[str, Sequence[tuple[float, str] | tuple[float, str, str]]],
    low: float,
    high: float | None,
    colours: Mapping[str, str] = MappingProxyType({}),
    is_measured: bool = False,
) -> Strips | None:
    """Returns a strip per name: a dot per value, quartiles and median; None without values.

    - ``rows``: value, case name and, optionally, a note on the value
    - ``high``: where the strips end; None: at the first mark that no value exceeds
    - ``colours``: of the names; others are grey
    - ``is_measured``: whether values with a note only stand for measured ones: quartiles and median leave them out
    """
    from matplotlib.ticker import MaxNLocator

    known = {name: [pair for pair in pairs if math.isfinite(pair[0])] for name, pairs in rows.items()}
    if not any(known.values()):
        return None
    most = max(value for pairs in known.values() for value, *_ in pairs) if high is None else high
    marks = [float(mark) for mark in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, most or 1.0)]
    high = next((mark for mark in marks if mark >= most > low), marks[-1]) if high is None else high
    shown = [name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in rows]
    width, line, left = 520, 30, round(16 + 7.2 * max(map(len, shown)), 1)
    scale = (width - left - 14) / max(high - low, 1e-12)

    def place(value: float) -> float:
        return round(left + (value - low) * scale, 1)

    strips = []
    for n, (name, own, pairs) in enumerate(zip(shown, known, known.values())):
        y, dots = 4 + line * (n + 0.5), []
        for at, (value, case, *notes) in enumerate(pairs):
            shift = (at * 7 % 11 - 5) * 1.1  # the same on every page, and hides no dot behind another
            told = "; ".join([f"{case}: {value:.4g}", *filter(None, notes)]) if len(pairs) <= MAX_TITLES else ""
            dots.append((place(value), round(y + shift, 1), told, any(notes)))
        values, box = [value for value, _, *notes in pairs if not (is_measured and any(notes))], None
        if len(values) >= FEW_CASES:
            first, third = (place(float(q)) for q in np.percentile(values, (25, 75)))
            box = first, round(third - first, 1)
        middle = place(median(values)) if len(values) > 1 else None
        strips.append(Strip(name, colours.get(own, GREY), y, dots, box, middle))
    ticks = [(place(mark), f"{mark:g}") for mark in marks if low - 1e-9 <= mark <= high + 1e-9]
    has_hollow = any(hollow for strip in strips for *_, hollow in strip.dots)
    return Strips(title, left, width, line * len(strips) + 26, ticks, strips, is_measured and has_hollow)
