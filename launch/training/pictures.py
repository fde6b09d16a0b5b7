"""Pictures of a run: its curves in progress.png, held-out cases with both outlines in validation.png."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.data.files import whole_file
from seqpar.launch.runs.journal import read_metrics

COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#42d4f4", "#bfef45", "#fabed4")


@dataclass(frozen=True)
class PicturedCase:
    """A case to draw: one modality ``W D H`` and the class ids of truth and prediction."""

    name: str
    image: NDArray[Any]
    truth: NDArray[Any]
    prediction: NDArray[Any]
    spacing: tuple[float, ...]


def _figure(width: float, height: float) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    with whole_file(path, durable=False) as temporary:  # drawn again from metrics.jsonl after every validation
        figure.savefig(temporary, format="png", dpi=100)


def draw_progress(out: Path) -> None:
    """Draws losses, Dice and learning rate of all steps so far into ``progress.png``."""
    rows = read_metrics(out / "metrics.jsonl")
    train = [row for row in rows if row["kind"] == "train"]
    validations = [row for row in rows if row["kind"] == "val"]
    if not train:
        return
    figure = _figure(12, 4)
    losses, dices, rates = figure.subplots(1, 3)
    steps = [row["step"] + 1 for row in train]
    for name, text, colour in (
        ("loss", "loss", "#222222"),
        ("dice_loss", "1 − soft Dice", COLOURS[2]),
        ("ce_loss", "cross-entropy", COLOURS[3]),
    ):
        values = [row[name] for row in train]
        losses.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
        losses.plot(steps, _smooth(values), color=colour, label=text)
    if validations:
        at = [row["step"] for row in validations]
        losses.plot(
            at, [row["loss"] for row in validations], "o--", color="#888888", label="held-out loss", markersize=4
        )
        for index, name in enumerate(validations[-1]["dice"]):
            values = [_number(row["dice"].get(name)) for row in validations]
            dices.plot(at, values, "o-", color=COLOURS[index % len(COLOURS)], label=name, markersize=4)
        dices.legend(fontsize=8, loc="upper left")
    else:
        dices.text(0.5, 0.5, "no validation yet", ha="center", va="center", transform=dices.transAxes, color="#888888")
    losses.legend(fontsize=8)
    losses.set(title="training", xlabel="step", ylim=(0, None))
    dices.set(title="Dice on held-out cases", xlabel="step", xlim=(0, max(steps) + 1), ylim=(0, 1))
    rates.plot(steps, [row["lr"] for row in train], color="#222222")
    rates.set(title="learning rate", xlabel="step", ylim=(0, None))
    for panel in (losses, dices, rates):
        panel.grid(alpha=0.3)
    _save(figure, out / "progress.png")


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _smooth(values: Sequence[float], window: int = 25) -> NDArray[np.float64]:
    """Returns the running mean over the last ``window`` values."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    smoothed: NDArray[np.float64] = (sums[ends] - sums[starts]) / (ends - starts)
    return smoothed


def draw_cases(path: Path, cases: Sequence[PicturedCase], classes: Sequence[str]) -> None:
    """Draws three planes of each case with the outlines of truth (solid) and prediction (dashed)."""
    figure = _figure(11, 3.6 * len(cases) + 0.5)
    panels = figure.subplots(len(cases), 3, squeeze=False)
    for row, case in zip(panels, cases):
        centre = fullest_planes(case.truth if case.truth.any() else case.prediction)
        body = case.image[case.image != 0]  # prepared images are 0 only outside the body
        low, high = np.percentile(body, (0.5, 99.5)) if body.size else (0.0, 1.0)
        shade = np.where(case.image == 0, low, case.image)
        for dim, (panel, plane) in enumerate(zip(row, ("sagittal", "coronal", "axial"))):
            image, truth, prediction = (np.take(t, centre[dim], dim).T for t in (shade, case.truth, case.prediction))
            across, up = [case.spacing[d] for d in range(3) if d != dim]
            panel.imshow(image, cmap="gray", origin="lower", vmin=low, vmax=max(high, low + 1e-6), aspect=up / across)
            for label in range(1, len(classes) + 1):
                colour = COLOURS[(label - 1) % len(COLOURS)]
                for mask, style in ((truth == label, "solid"), (prediction == label, "dashed")):
                    if mask.any() and not mask.all():
                        panel.contour(mask, levels=[0.5], colors=[colour], linewidths=1.2, linestyles=style)
            panel.set_title(f"{case.name}  {plane} {centre[dim]}" if dim == 0 else f"{plane} {centre[dim]}", fontsize=9)
            panel.set_xticks([])
            panel.set_yticks([])
    marks = [("truth", "solid", "#555555"), ("prediction", "dashed", "#555555")]
    marks += [(name, "solid", COLOURS[i % len(COLOURS)]) for i, name in enumerate(classes)]
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=c, label=name, ls="--" if style == "dashed" else "-") for name, style, c in marks]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=9)
    _save(figure, path)


def fullest_planes(mask: NDArray[Any]) -> tuple[int, ...]:
    """Returns the index of the plane with most of the mask in each direction; the middle ones of an empty mask."""
    if not mask.any():
        return tuple(side // 2 for side in mask.shape)
    others = [tuple(d for d in range(mask.ndim) if d != dim) for dim in range(mask.ndim)]
    return tuple(int(np.argmax((mask > 0).sum(axis))) for axis in others)
