"""Pictures of held-out cases with outlines, of scores and of where a class is seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.data.files import whole_file
from seqpar.report.planes import COLOURS, PLANES, fullest_planes, orientation_text, plane_of, sides
from seqpar.runs.journal import held_out_scores, loss_terms, read_metrics
from seqpar.scores.class_scores import roc_points

Row = Mapping[str, Any]  # of metrics.jsonl


@dataclass(frozen=True)
class PicturedCase:
    """A case to draw: one modality ``W D H`` and the class ids of truth and prediction."""

    name: str
    image: NDArray[Any]
    truth: NDArray[Any]
    prediction: NDArray[Any]
    spacing: tuple[float, ...]


def make_figure(width: float, height: float) -> Any:
    """Returns an empty figure; sides in inches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Writes a figure as PNG."""
    with whole_file(path, durable=False) as temporary:  # drawn again from metrics.jsonl after every validation
        figure.savefig(temporary, format="png", dpi=100)


def escape_mathtext(text: str) -> str:
    """Returns a name as matplotlib is to be given it, which takes what lies between two dollars for a formula."""
    return text.replace("$", r"\$")


def draw_progress(out: Path) -> None:
    """Draws losses, held-out scores and learning rate of all steps so far into ``progress.png``."""
    rows = read_metrics(out / "metrics.jsonl")
    train = [row for row in rows if row["kind"] == "train"]
    validations = [row for row in rows if row["kind"] == "val"]
    if not train:
        return
    has_scores = not validations or held_out_scores(validations[-1])[0] in validations[-1]
    above = ["losses", "scores", "rates"] if has_scores else ["losses", "losses", "rates"]
    figure = make_figure(12, 4 if has_scores else 11)
    panels = figure.subplot_mosaic([above] if has_scores else [above, *[["pictures"] * 3] * 2])
    _draw_losses(panels["losses"], train, validations)
    if has_scores:
        _draw_scores(panels["scores"], validations)
    else:
        _show_picture(panels["pictures"], out / "validation.png")
    steps = [row["step"] + 1 for row in train]
    panels["rates"].plot(steps, [row["lr"] for row in train], color="#222222")
    panels["rates"].set(title="learning rate", ylim=(0, None))
    for panel in (panels[name] for name in dict.fromkeys(above)):
        panel.set(xlabel="step", xlim=(0, max(steps) + 1))
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    save_figure(figure, out / "progress.png")


def _draw_losses(panel: Any, train: Sequence[Row], validations: Sequence[Row]) -> None:
    """Draws the loss of each step and its terms, and the losses of held-out cases."""
    for name, colour in zip(["loss", *loss_terms(train)], ("#222222", *COLOURS[2:], *COLOURS)):
        points = [(row["step"] + 1, row[name]) for row in train if name in row]
        places, heights = zip(*points)
        panel.plot(places, heights, color=colour, alpha=0.2, linewidth=0.8)
        panel.plot(places, _smooth(heights), color=colour, label=name.replace("_", " "))
    if validations:
        at, values = [row["step"] for row in validations], [row["loss"] for row in validations]
        panel.plot(at, values, "o--", color="#888888", label="held-out loss", markersize=4)
    panel.legend(fontsize=8)
    panel.set(title="training", ylim=(0, None))


def _draw_scores(panel: Any, validations: Sequence[Row]) -> None:
    """Draws the scores of held-out cases."""
    key, title = held_out_scores(validations[-1]) if validations else ("", "Scores")
    if validations:
        at = [row["step"] for row in validations]
        for index, name in enumerate(validations[-1][key]):
            values = [_number(row[key].get(name)) for row in validations]
            colour = COLOURS[index % len(COLOURS)]
            panel.plot(
                at, values, "o-", color=colour, label=escape_mathtext(name), markersize=4, clip_on=False
            )  # 0 and 1 too
        panel.legend(fontsize=8, loc="best")
    else:
        panel.text(0.5, 0.5, "no validation yet", ha="center", va="center", transform=panel.transAxes, color="#888888")
    panel.set(title=f"{title} on held-out cases", ylim=(0, 1))


def _show_picture(panel: Any, path: Path) -> None:
    """Shows a picture of the run folder, if it could be drawn."""
    panel.axis("off")
    if path.exists():
        from matplotlib.image import imread

        panel.imshow(imread(path))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _smooth(values: Sequence[float], window: int = 25) -> NDArray[np.float64]:
    """Returns the running mean over the last ``window`` values."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    smoothed: NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return smoothed


def draw_cases(path: Path, cases: Sequence[PicturedCase], classes: Sequence[str], neurological: bool) -> None:
    """Draws three planes of each case with the outlines of truth (solid) and prediction (dashed).

    - ``neurological``: the patient's left is on the left of a picture, and not on the right
    """
    save_figure(figure_of_cases(cases, classes, neurological), path)


def figure_of_cases(cases: Sequence[PicturedCase], classes: Sequence[str], neurological: bool) -> Any:
    """Returns the figure of ``draw_cases``: a row of panels for each case."""
    figure = make_figure(11, 3.6 * len(cases) + 0.8)
    figure.suptitle(orientation_text(neurological), fontsize=9)
    panels = figure.subplots(len(cases), 3, squeeze=False)
    for row, case in zip(panels, cases):
        at = fullest_planes(case.truth if case.truth.any() else case.prediction)
        body = case.image[case.image != 0]  # prepared images are 0 only outside the body
        low, high = np.percentile(body, (0.5, 99.5)) if body.size else (0.0, 1.0)
        greys = np.where(case.image == 0, low, case.image), low, max(high, low + 1e-6)
        for (plane, dim), panel, letters in zip(PLANES, row, sides(neurological)):
            _draw_plane(panel, case, greys, dim, at[dim], len(classes), neurological)
            mark_sides(panel, letters)
            name = f"{plane} {at[dim] + 1} / {case.truth.shape[dim]}"  # as reports count
            panel.set_title(f"{escape_mathtext(case.name)}  {name}" if dim == 0 else name, fontsize=9)
    marks = [("truth", "-", "#555555"), ("prediction", "--", "#555555")]
    marks += [(escape_mathtext(name), "-", COLOURS[i % len(COLOURS)]) for i, name in enumerate(classes)]
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour, label=name, ls=style) for name, style, colour in marks]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=9)
    return figure


def _draw_plane(
    panel: Any,
    case: PicturedCase,
    greys: tuple[NDArray[Any], float, float],
    dim: int,
    at: int,
    num_classes: int,
    neurological: bool,
) -> None:
    """Draws one plane with its outlines; ``greys``: the image, and what is black and white in it."""
    volume, low, high = greys
    image, truth, prediction = (plane_of(v, dim, at, neurological) for v in (volume, case.truth, case.prediction))
    across, up = (step for n, step in enumerate(case.spacing) if n != dim)
    panel.imshow(image, cmap="gray", vmin=low, vmax=high, aspect=up / across)
    for label in range(1, num_classes + 1):
        colour = COLOURS[(label - 1) % len(COLOURS)]
        for mask, style in ((truth == label, "solid"), (prediction == label, "dashed")):
            if mask.any() and not mask.all():
                panel.contour(mask, levels=[0.5], colors=[colour], linewidths=1.2, linestyles=style)
    panel.set_xticks([])
    panel.set_yticks([])


def mark_sides(panel: Any, letters: str) -> None:
    """Writes what lies at the left, right, top and bottom of a panel."""
    shade = {"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.5}
    places = ((0.03, 0.5), (0.97, 0.5), (0.5, 0.965), (0.5, 0.035))
    for letter, (x, y) in zip(letters, places):
        panel.text(
            x, y, letter, transform=panel.transAxes, ha="center", va="center", fontsize=8, color="white", bbox=shade
        )


STYLES = ("--", "-", "-.", ":")  # of curves, which are told apart in grey too
WIDEST = 30  # letters of classes that stand side by side


def draw_scores(path: Path, summary: Mapping[str, Any]) -> None:
    """Draws the ROC curve of each class, and how many of its cases were given each; ``summary``: summary.json's.

    Of two classes it is the last one's, as they mirror each other.
    """
    names, cases = list(summary["names"]), summary["metric_per_case"]
    shown = [escape_mathtext(name) for name in names]
    truth = np.array([names.index(case["truth"]) for case in cases])
    probabilities = np.array([case["probabilities"] for case in cases])
    figure = make_figure(9, 4.2)
    curves, counts = figure.subplots(1, 2)
    curves.plot([0, 1], [0, 1], color="#888888", linewidth=0.8)
    for number in range(int(len(names) == 2), len(names)):
        if 0 < int((truth == number).sum()) < len(truth):
            points = roc_points(truth == number, probabilities[:, number])
            style = STYLES[(number + number // len(COLOURS)) % len(STYLES)]
            colour = COLOURS[number % len(COLOURS)]
            curves.plot(*points, style, label=shown[number], color=colour, clip_on=False)  # 0 and 1 too
            curves.legend(fontsize=8, loc="lower right")
    curves.set(title="ROC on held-out cases", xlabel="1 - specificity", ylabel="sensitivity")
    confusion = np.array(summary["confusion"])
    counts.imshow(confusion, cmap="Blues", vmin=0)
    for row, column in np.ndindex(*confusion.shape):
        count = confusion[row, column]
        colour = "white" if 2 * count > confusion.max() else "black"
        counts.text(column, row, count, ha="center", va="center", color=colour, fontsize=12 if len(names) < 9 else 7)
    counts.set(title="Held-out cases", xlabel="given", ylabel="truth")
    slope = {"rotation": 30, "ha": "right"} if sum(map(len, names)) > WIDEST else {}
    counts.set_xticks(range(len(names)), shown, **slope)
    counts.set_yticks(range(len(names)), shown)
    save_figure(figure, path)


def draw_evidence(
    path: Path, title: str, image: NDArray[Any], seen: NDArray[Any], spacing: Sequence[float], neurological: bool
) -> None:
    """Draws the three planes through the middle of what is seen, over one modality ``W D H``.

    - ``seen``: from 0 to 1, ``W D H``; half of it has an outline, which shows in grey too
    """
    figure = make_figure(11, 4.4)
    key = ", ".join(f"{value:g} {name}" for value, name in ((0, "nothing"), (0.5, "outlined"), (1, "yellow")))
    legend = f"\nhow much a place speaks for the class: {key}" if seen.any() else ""
    figure.suptitle(f"{escape_mathtext(title)}\n{orientation_text(neurological)}{legend}", fontsize=9)
    at = middle(seen)
    body = image[image != 0]
    low, high = np.percentile(body, (0.5, 99.5)) if body.size else (0.0, 1.0)
    grey = np.where(image == 0, low, image)
    panels = figure.subplots(1, 3)
    for (plane, dim), panel, letters in zip(PLANES, panels, sides(neurological)):
        across, up = (step for n, step in enumerate(spacing) if n != dim)
        below, above = (plane_of(volume, dim, at[dim], neurological) for volume in (grey, seen))
        panel.imshow(below, cmap="gray", vmin=low, vmax=max(high, low + 1e-6), aspect=up / across)
        panel.imshow(above, cmap="inferno", vmin=0, vmax=1, alpha=0.65 * np.clip(above, 0, 1), aspect=up / across)
        if above.min() < 0.5 < above.max():
            for colour, width in (("black", 2.6), ("white", 1.2)):
                panel.contour(above, levels=[0.5], colors=[colour], linewidths=width)
        mark_sides(panel, letters)
        panel.set_title(f"{plane} {at[dim] + 1} / {image.shape[dim]}", fontsize=9)
        panel.set_xticks([])
        panel.set_yticks([])
    save_figure(figure, path)


def middle(seen: NDArray[Any]) -> tuple[int, ...]:
    """Returns the plane of each direction that has most of what is seen, the middle ones where nothing is."""
    if not seen.any():
        return tuple(side // 2 for side in seen.shape)
    others = [tuple(d for d in range(seen.ndim) if d != dim) for dim in range(seen.ndim)]
    return tuple(int(seen.sum(axis).argmax()) for axis in others)
