"""Charts as inline SVG: curves over steps, and one strip of dots per class. The page's style sheet colours them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

import numpy as np

from seqpar.report.planes import COLOURS

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 340, 210, 46, 30, 10, 12
BUCKETS = 240  # points of a curve: a longer one is drawn by the mean and the range of its pieces
MAX_NAME = 40  # letters of a class's name beside its strip
MAX_TITLES = 200  # a strip of more dots does not name their cases


@dataclass(frozen=True)
class Curve:
    """Values over steps; NaN is a gap.

    - ``dots``: marks each value, for what is measured only now and then
    - ``dashed``: what others are compared with
    """

    name: str
    steps: Sequence[float]
    values: Sequence[float]
    dots: bool = False
    dashed: bool = False


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round numbers from low to high, about ``count`` of them."""
    span = max(high - low, 1e-12)
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * count >= span)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def draw_curves(title: str, curves: Sequence[Curve], high: float | None = None, along: str = "step") -> str:
    """Returns a chart over steps, from 0 to ``high`` (else the largest value), with its legend; "" without values.

    - ``along``: what is below the chart, where it is not over steps
    """
    values = [v for curve in curves for v in curve.values if math.isfinite(v)]
    if not values:
        return ""
    top = high or max(values) * 1.05 or 1.0
    last = max(step for curve in curves for step in curve.steps) or 1

    def place(step: float, value: float) -> str:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
        y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(max(value, 0), top) / top
        return f"{x:.1f},{y:.1f}"

    parts = []
    for value in ticks(0, top):
        y = place(0, value).split(",")[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y}" dy="0.32em" text-anchor="end">{value:g}</text>')
    for step in ticks(0, last, 4):
        x = place(step, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{step:,g}</text>')
    for n, curve in enumerate(curves):
        colour = "currentColor" if len(curves) == 1 else COLOURS[n % len(COLOURS)]
        parts += _draw_curve(curve, colour, place)
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{escape(along)}</text>')
    keys = "".join(
        f'<span><i style="background:{COLOURS[n % len(COLOURS)]}"></i>{escape(curve.name)}</span>'
        for n, curve in enumerate(curves)
    )
    legend = f'<p class="keys">{keys}</p>' if len(curves) > 1 else ""
    chart = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f'<figure class="chart"><figcaption>{escape(title)}</figcaption>{chart}{legend}</figure>'


def _draw_curve(curve: Curve, colour: str, place: Callable[[float, float], str]) -> list[str]:
    """Returns the parts of one curve; ``place`` turns step and value into "x,y"."""
    known = [(step, value) for step, value in zip(curve.steps, curve.values) if math.isfinite(value)]
    if not known:
        return []
    pieces = np.array_split(np.array(known), min(BUCKETS, len(known)))
    line = " ".join(place(*piece.mean(0)) for piece in pieces)
    parts = []
    if len(known) > BUCKETS:
        edge = [place(piece[:, 0].mean(), piece[:, 1].max()) for piece in pieces]
        edge += [place(piece[:, 0].mean(), piece[:, 1].min()) for piece in reversed(pieces)]
        parts.append(f'<polygon points="{" ".join(edge)}" fill="{colour}" opacity="0.18"/>')
    dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
    parts.append(f'<polyline class="curve" points="{line}" stroke="{colour}"{dashes}/>')
    if len(known) == 1 or (curve.dots and len(known) <= 60):  # one value alone makes no line
        for x, y in (place(*point).split(",") for point in known):
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.6" fill="{colour}"/>')
    return parts


def draw_strips(title: str, rows: dict[str, list[tuple[float, str]]], low: float, high: float) -> str:
    """Returns a strip per class: a dot per (value, case name), quartiles and median; "" without values."""
    known = {name: [pair for pair in pairs if math.isfinite(pair[0])] for name, pairs in rows.items()}
    if not any(known.values()):
        return ""
    shown = {name: name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…" for name in rows}
    left = 12 + 6.4 * max(map(len, shown.values()))
    width, line = 520.0, 30
    height = line * len(rows) + 26
    scale = (width - left - 14) / max(high - low, 1e-12)
    parts = []
    for value in ticks(low, high):
        x = left + (value - low) * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 22}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 7}" text-anchor="middle">{value:g}</text>')
    for n, (name, pairs) in enumerate(known.items()):
        y, colour = 4 + line * (n + 0.5), COLOURS[n % len(COLOURS)]
        parts.append(f'<text x="{left - 8:.1f}" y="{y}" dy="0.32em" text-anchor="end">{escape(shown[name])}</text>')
        if pairs:
            values = [value for value, _ in pairs]
            first, third = (left + (float(q) - low) * scale for q in np.percentile(values, (25, 75)))
            middle = left + (median(values) - low) * scale
            parts.append(f'<rect class="box" x="{first:.1f}" y="{y - 9}" width="{third - first:.1f}" height="18"/>')
            parts.append(f'<line class="median" x1="{middle:.1f}" x2="{middle:.1f}" y1="{y - 11}" y2="{y + 11}"/>')
        for number, (value, case) in enumerate(pairs):
            shift = (number * 7 % 11 - 5) * 1.1  # the same on every page, and hides no dot behind another
            title_of_dot = f"<title>{escape(case)}: {value:.4g}</title>" if len(pairs) <= MAX_TITLES else ""
            x = left + (value - low) * scale
            parts.append(f'<circle cx="{x:.1f}" cy="{y + shift:.1f}" r="3" fill="{colour}">{title_of_dot}</circle>')
    body = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f'<figure class="strip"><figcaption>{escape(title)}</figcaption>{body}</figure>'
