"""Pictures of held-out cases with outlines, of scores and of where a class is seen."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.late_import import late
from seqpar.report.planes import (
    COLOURS,
    DISPUTED,
    KEPT_HU,
    LINES,
    PLANES,
    TINT,
    TINTED,
    UNLABELLED,
    FileSlices,
    bar_length,
    body_of,
    count_outside,
    count_vanished_briefly,
    counted,
    ct_window,
    fullest_planes,
    grey_window,
    hatched,
    kept_of_ct,
    limits_of,
    orientation_text,
    outline_lines,
    outside_planes,
    plane_of,
    ranks_of,
    repeated,
    sides,
)
from seqpar.report.plots import escape_mathtext, make_figure, save_figure, title_of_run
from seqpar.runs.run_folder import data_of_run, name_validated
from seqpar.scores.class_scores import positive_class, roc_label, roc_points
from seqpar.text import with_minus

ndimage = late("scipy.ndimage")


@dataclass(frozen=True)
class PicturedCase:
    """A case to draw: one modality ``W D H``, the class ids of truth and prediction, and its file's slices.

    - ``modality``: its name; "" of the only one
    - ``is_ct``: whether the image has Hounsfield units; else 0 is outside the body
    - ``hidden``: ids of the classes that the truth is not annotated for
    - ``disputed``: the mask of what several readers label differently; None without several readers
    - ``vanished``: how many regions of truth and prediction are too small for the image's grid, by whose they are
    """

    name: str
    image: NDArray[Any]
    truth: NDArray[Any]
    prediction: NDArray[Any]
    spacing: tuple[float, ...]
    slices: Sequence[FileSlices]
    modality: str = ""
    disputed: NDArray[np.bool_] | None = None
    is_ct: bool = False
    hidden: Sequence[int] = ()
    vanished: Mapping[str, int] = field(default_factory=dict)


ROOM = 0.12  # inches above and below a panel with its title, which would touch the panel above


def draw_cases(
    path: Path, cases: Sequence[PicturedCase], classes: Sequence[str], held_out: int, when: str, neurological: bool
) -> None:
    """Draws three planes of each case with the outlines of truth (solid) and prediction (dashed).

    - ``held_out``: the number of cases that are validated; these are the first of them
    - ``when``: after which step
    - ``neurological``: the patient's left is on the left of a picture, and not on the right
    """
    save_figure(figure_of_cases(cases, classes, held_out, neurological, path.parent, when), path)


def figure_of_cases(
    cases: Sequence[PicturedCase],
    classes: Sequence[str],
    held_out: int,
    neurological: bool,
    run: Path,
    when: str = "",
) -> Any:
    """Returns the figure of ``draw_cases``: a row of panels for each case; ``run``: whose they are."""
    first = f"The first {len(cases)} of " * (len(cases) < held_out)
    has_truth = [((case.truth > 0) & (case.truth <= len(classes))).any() for case in cases]
    empty = "" if all(has_truth) else ", or of the prediction where the truth is empty"
    images = [case.image for case in cases]
    window = ct_window(limits_of(images), images) if cases[0].is_ct else None
    modality = cases[0].modality or ("CT" if window else "")
    shown = f", shown on {escape_mathtext(modality)}" if modality else ""
    if window:
        shown += with_minus(f" from {round(window[0])} HU (black) to {round(window[1])} HU (white)")
    about_lines = f" {LINES}." * (len(classes) > 1)
    about_lines += f" {repeated(classes).partition(':')[0]}." * (len(classes) > len(COLOURS))
    about_lines += " The truth is the readers' consensus." * any(case.disputed is not None for case in cases)
    lines = [
        *[f"{when[:1].upper()}{when[1:]}."] * bool(when),
        f"{first}{name_validated(data_of_run(run), held_out)}{shown}, in planes with most of the truth{empty}",
        *textwrap.wrap(f"{orientation_text(neurological)}.{about_lines}", 150),
        *textwrap.wrap(f"{counted(case.slices for case in cases)}.", 120),
    ]
    if window and window[0] > KEPT_HU[0]:  # the network takes it clipped
        lines += textwrap.wrap(kept_of_ct([window]), 120)
    figure = make_figure(10, 3.7 * len(cases) + 1.25 + 0.15 * len(lines[3:]))
    figure.get_layout_engine().set(h_pad=ROOM)
    figure.suptitle(title_of_run(run, *lines), fontsize=9)
    panels, numbers = figure.subplots(len(cases), 3, squeeze=False), {name: [n + 1] for n, name in enumerate(classes)}
    for row, case in zip(panels, cases):
        maps = [np.where(case.truth > len(classes), 0, one) for one in (case.truth, case.prediction)]  # where labelled
        at = fullest_planes(next(filter(np.any, maps), case.prediction))
        known = np.where(np.isin(case.prediction, case.hidden), 0, case.prediction)
        truth = np.where(case.truth > len(classes), -1, case.truth.astype(int))
        unseen = count_outside(outside_planes(truth, known, numbers, case.spacing, at))
        low, high = window or grey_window(case.image)
        greys = case.image if window else np.where(case.image == 0, low, case.image), low, max(high, low + 1e-6)
        for (plane, dim), panel, letters in zip(PLANES, row, sides(neurological, case.slices)):
            _draw_plane(panel, case, greys, dim, at[dim], len(classes), neurological)
            mark_plane(panel, letters, case.spacing[dim == 0])
            name = f"{plane} {case.slices[dim].text(at[dim])}"
            unknown = [escape_mathtext(classes[n - 1]) for n in case.hidden if 0 < n <= len(classes)]
            names = "\n".join(textwrap.wrap(f"not annotated: {', '.join(unknown)}", 45)) * bool(unknown)
            about = [unseen, names, count_vanished_briefly(case.vanished)]
            told = [escape_mathtext(case.name), *about] if dim == 0 else []
            panel.set_title("\n".join([*filter(None, told), name]), fontsize=9)
    marks = [("truth", "-", "#555555"), ("prediction", "--", "#555555")]
    marks += [(escape_mathtext(name), "-", COLOURS[i % len(COLOURS)]) for i, name in enumerate(classes)]
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    keys: list[Any] = [Line2D([], [], color=colour, label=name, ls=style) for name, style, colour in marks]
    keys.append(Patch(color="#555555", alpha=2 * TINT, label=TINTED))
    if any(case.disputed is not None for case in cases):
        keys.append(Patch(color=DISPUTED, alpha=0.55, label="readers disagree"))
    if any((case.truth > len(classes)).any() for case in cases):
        keys.append(Patch(facecolor="none", edgecolor="#555555", hatch="////", label=UNLABELLED))
    figure.legend(handles=keys, loc="outside lower center", ncols=min(len(keys), 5), fontsize=9)
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
    from matplotlib.collections import LineCollection
    from matplotlib.colors import ListedColormap

    volume, low, high = greys
    image, truth, prediction = (plane_of(v, dim, at, neurological) for v in (volume, case.truth, case.prediction))
    across, up = (step for n, step in enumerate(case.spacing) if n != dim)
    area = truth > num_classes  # unlabelled
    panel.imshow(hatched(image, area, low, high, across, up), cmap="gray", vmin=low, vmax=high, aspect=up / across)
    if min(area.shape) > 1 and (edges := outline_lines(area.astype(int), 1)):
        panel.add_collection(LineCollection(edges, colors="white", linewidths=1, linestyles="dotted"), autolim=False)
    if case.disputed is not None:  # below the lines
        area = plane_of(case.disputed, dim, at, neurological)
        panel.imshow(area, cmap=ListedColormap([DISPUTED]), alpha=0.55 * area, aspect=up / across)
    for labels in (truth, prediction):
        panel.imshow(_tint(labels, num_classes, np.clip((image - low) / (high - low), 0, 1)), aspect=up / across)
    ranks = ranks_of(case.truth, case.prediction)
    ranks[num_classes + 1 :] = 0  # what is ignored has no line, and takes none from its neighbours
    for labels, style in ((truth, "solid"), (prediction, "dashed")):
        for rank in range(1, 1 + int(ranks.max())):  # the rarest above the others
            lines = outline_lines(ranks[labels], rank) if min(labels.shape) > 1 else []  # of no slice on edge
            if lines:
                colour = COLOURS[(int(np.argmax(ranks == rank)) - 1) % len(COLOURS)]
                drawn = LineCollection(lines, colors=colour, linewidths=1.2, linestyles=style)
                panel.add_collection(drawn, autolim=False)
    panel.set_xticks([])
    panel.set_yticks([])


def _tint(labels: NDArray[Any], num_classes: int, greys: NDArray[Any]) -> NDArray[Any]:
    """Returns the colours of labels in a plane, times the image's greys and all but transparent, ``y x 4``.

    Thus they make dark tissue no brighter. What is ignored has none.
    """
    from matplotlib.colors import to_rgb

    colours = np.array([to_rgb(colour) for colour in COLOURS])[(labels.astype(int) - 1) % len(COLOURS)]
    opacity = TINT * ((labels > 0) & (labels <= num_classes))
    return np.concatenate([colours * greys[..., None], opacity[..., None]], -1)


def _outline(panel: Any, plane: NDArray[Any], colour: str, width: float) -> None:
    """Draws a line around what is above 0.5 in a plane, unless the volume has a single slice across it."""
    if min(plane.shape) > 1 and plane.min() < 0.5 < plane.max():
        panel.contour(plane, levels=[0.5], colors=[colour], linewidths=width)


def mark_plane(panel: Any, letters: str, across: float) -> None:
    """Writes what lies at the left, right, top and bottom of a picture, and draws a scale bar.

    - ``across``: width of a pixel in mm
    """
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    edge, bar_edge = ([withStroke(linewidth=width, foreground="black")] for width in (2, 4))  # or lost on bone
    shade = {"facecolor": "black", "alpha": 0.5, "linewidth": 0, "pad": 1.5}
    white: dict[str, Any] = {"color": "white", "bbox": shade, "path_effects": edge}
    left, right = panel.get_xlim()
    length, start = bar_length((right - left) * across), left + 0.03 * (right - left)
    ends, place = (start, start + length / across), panel.get_xaxis_transform()
    line: dict[str, Any] = {"color": "white", "linewidth": 2, "solid_capstyle": "butt", "path_effects": bar_edge}
    panel.add_artist(Line2D(ends, (0.025, 0.025), transform=place, **line))
    places = ((0.03, 0.5), (0.97, 0.5), (0.5, 0.965), (0.5, 0.035))
    for letter, (x, y) in zip(letters, places):
        panel.text(x, y, letter, transform=panel.transAxes, ha="center", va="center", fontsize=8, **white)
    panel.text(start, 0.045, f"{length:g} mm", transform=place, va="bottom", fontsize=7, **white)


STYLES = ("-", "--", "-.", ":")  # of curves, which are told apart in grey too
WIDEST = 30  # letters of classes that stand side by side


def draw_scores(path: Path, summary: Mapping[str, Any], when: str = "") -> None:
    """Draws the ROC curve of each class, and which classes its cases were predicted as; ``summary``: summary.json's.

    Of two classes it is the positive one's, as they mirror each other.

    - ``when``: after which step
    """
    names, cases = list(summary["names"]), summary["metric_per_case"]
    shown = [escape_mathtext(name) for name in names]
    after = f", {when}" * bool(when)
    truth = np.array([names.index(case["truth"]) for case in cases])
    probabilities = np.array([case["probabilities"] for case in cases])
    figure = make_figure(9, 4.4 + 0.17 * (len(names) if len(names) > 2 else 1))
    curves, counts = figure.subplots(1, 2)
    curves.plot([0, 1], [0, 1], "--", color="#888888", linewidth=0.8, label="chance")
    for number in range(len(names)) if len(names) > 2 else [positive_class(names)]:
        if 0 < int((truth == number).sum()) < len(truth):
            points = roc_points(truth == number, probabilities[:, number])
            style = STYLES[(number + number // len(COLOURS)) % len(STYLES) if len(names) > 2 else 0]
            colour = COLOURS[number % len(COLOURS)]
            label = roc_label(shown[number], truth == number, probabilities[:, number])
            curves.plot(*points, style, label=label, color=colour, clip_on=False)  # 0 and 1 too
    curves.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))  # over no curve
    told = f"{name_validated(data_of_run(path.parent), len(cases))}{after}"
    figure.suptitle(title_of_run(path.parent, told), fontsize=11)
    curves.set_box_aspect(1)
    curves.set(title="ROC curve", xlabel="1 − specificity", ylabel="sensitivity")
    confusion = np.array(summary["confusion"])
    counts.imshow(confusion, cmap="Blues", vmin=0)
    for row, column in np.ndindex(*confusion.shape):
        count = confusion[row, column]
        colour = "white" if 2 * count > confusion.max() else "black"
        counts.text(column, row, count, ha="center", va="center", color=colour, fontsize=12 if len(names) < 9 else 7)
    counts.set(title="Confusion matrix: number of cases", xlabel="predicted class", ylabel="true class")
    slope = {"rotation": 30, "ha": "right"} if sum(map(len, names)) > WIDEST else {}
    counts.set_xticks(range(len(names)), shown, **slope)
    counts.set_yticks(range(len(names)), shown)
    save_figure(figure, path)


HEAT = "inferno"  # colours of a map, in pictures and in the viewer
OPACITY = 0.65  # of its maximum; what is less is as much more transparent
MAPS = {"hirescam": "HiResCAM", "grad-cam": "Grad-CAM", "gradient-x-input": "gradient × input"}
ALONE = "The map shows what the network used. It does not show a lesion; never read a finding from it alone."
LINE = 84  # letters
MUCH = 0.25  # of a map; a coarse one reaches a little over the edge of the body it is about


def draw_evidence(
    path: Path,
    title: str,
    image: NDArray[Any],
    seen: NDArray[Any],
    spacing: Sequence[float],
    slices: Sequence[FileSlices],
    neurological: bool,
    about: str = "",
    step: Sequence[float] = (),
) -> None:
    """Draws three planes through the strongest point of a map in the body, over one modality ``W D H``.

    - ``seen``: the map, ``W D H``, as shares of its maximum, which may be outside the image, where the network saw
      zeros; half of it has an outline, which shows in grey too
    - ``slices``: of the image's file
    - ``about``: its method and class, as in "HiResCAM map for dementia"
    - ``step``: voxels between the points of the map
    """
    body = body_of(image)
    lines = [title]
    if about:  # else it is on a page, which says so once
        lines += [f"{orientation_text(neurological)}.", f"{counted([slices])}."]
    at = evidence_planes(seen, body)
    if seen.any():
        lines += _planes_of_map(about, seen, at, slices)
        lines.append("White line: half of the maximum; weak values are transparent.")
        lines += [*_about_points([side * count for side, count in zip(spacing, step)]), ALONE]
    elif about:
        lines.append(f"{about}: no evidence for the class")
    lines = [part for line in lines for part in textwrap.wrap(line, LINE)]
    warned = textwrap.wrap(caution_about(seen, body), LINE - 10)
    figure = make_figure(6, 2.3 + 0.15 * len(lines) + 0.2 * len(warned))  # narrow, to be read on a narrow page
    figure.suptitle(escape_mathtext("\n".join(lines)), fontsize=9)
    if warned:  # below the panels, not over them
        figure.supxlabel("\n".join(warned), fontsize=9, color="#b3261e", weight="bold")
    inside = image[body]
    low, high = np.percentile(inside, (0.5, 99.5)) if inside.size else (0.0, 1.0)
    grey = np.where(image == 0, low, image) if (image == 0).any() else image
    wide, deep, _ = (side * step for side, step in zip(image.shape, spacing))  # a mm is as long in each plane
    panels = figure.subplots(1, 3, width_ratios=(deep, wide, wide))
    for (plane, dim), panel, letters in zip(PLANES, panels, sides(neurological, slices)):
        across, up = (step for n, step in enumerate(spacing) if n != dim)
        below, above = (plane_of(volume, dim, at[dim], neurological) for volume in (grey, seen))
        panel.imshow(below, cmap="gray", vmin=low, vmax=max(high, low + 1e-6), aspect=up / across)
        panel.imshow(above, cmap=HEAT, vmin=0, vmax=1, alpha=OPACITY * np.clip(above, 0, 1), aspect=up / across)
        for colour, width in (("black", 2.6), ("white", 1.2)):
            _outline(panel, above, colour, width)
        mark_plane(panel, letters, across)
        panel.set_title(f"{plane} {slices[dim].text(at[dim])}", fontsize=9)
        panel.set_xticks([])
        panel.set_yticks([])
    if seen.any():
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import ListedColormap, Normalize

        colours = ListedColormap(heat_colours(over_grey=True))  # as they are seen over the image
        bar = figure.colorbar(ScalarMappable(Normalize(0, 1), colours), ax=list(panels), fraction=0.02, pad=0.01)
        bar.set_label("share of the map's maximum", fontsize=8)
        bar.set_ticks([0, 0.5, 1])
        bar.ax.axhline(0.5, color="white", linewidth=1.2)
        bar.ax.tick_params(labelsize=8)
    save_figure(figure, path, dpi=150)


def _planes_of_map(about: str, seen: NDArray[Any], at: Sequence[int], slices: Sequence[FileSlices]) -> list[str]:
    """Returns through which point of a map planes are shown: its maximum, or where else that is."""
    share, most = seen[tuple(at)], np.unravel_index(int(seen.argmax()), seen.shape)
    if share == 1:
        return [f"{about}, in planes through its maximum"]
    place = ", ".join(f"{plane} {slices[dim].numbers[int(most[dim])]}" for plane, dim in PLANES)
    also = [plane for plane, dim in PLANES if at[dim] == most[dim]]
    seen_in = f", seen in the {' and '.join(also)} plane{'s' * (len(also) > 1)}" if also else ""
    return [
        f"{about}. The planes, which show much of the body, cross where it has {min(share, 0.99):.0%} of its maximum.",
        f"The maximum is {'outside the image' if _leaves(seen) else f'in slices {place}{seen_in}'}.",
    ]


def _about_points(sides: Sequence[float]) -> list[str]:
    """Returns how coarse a map is, if that is known; ``sides``: mm between its points."""
    texts = [f"{side:.3g}" for side in sides]
    every = " × ".join(texts if len({*texts}) > 1 else texts[:1])
    return [f"One map point every {every} mm; values and outlines between them are interpolated."] * bool(texts)


def _leaves(seen: NDArray[Any]) -> bool:
    """Returns whether the maximum of a map is outside the image, in what it was padded with."""
    return bool(0 < seen.max() < 1)


def heat_colours(over_grey: bool = False) -> list[str]:
    """Returns colours of a map, from 0 to its maximum.

    - ``over_grey``: as they are seen over the middle grey of an image
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    shares = np.linspace(0, 1, 17)
    parts = OPACITY * shares[:, None] if over_grey else 1.0
    return list(map(to_hex, 0.5 + (colormaps[HEAT](shares)[:, :3] - 0.5) * parts))


def heat_palette() -> bytes:
    """Returns red, green and blue of each of the 256 values of a map."""
    from matplotlib import colormaps

    return bytes(colormaps[HEAT](np.arange(256), bytes=True)[:, :3].tobytes())


MAXIMUM_OUTSIDE = "The map's maximum is outside the "


def caution_about(seen: NDArray[Any], body: NDArray[np.bool_]) -> str:
    """Returns why a map is no reason; else "".

    Its maximum, much of it, or most of what a white line is drawn around is outside the body or the image.
    """
    if not seen.any():
        return ""
    outside = float(seen[~body].sum() / seen.sum())
    much = f"{outside:.0%} of"
    text = f"{much} the map is outside the body" if outside >= MUCH else ""
    if _leaves(seen):
        text = f"{MAXIMUM_OUTSIDE}image, in what pads it"
        text += f", and {much} the rest outside the body" * (outside >= MUCH)
    elif not body[np.unravel_index(int(seen.argmax()), seen.shape)]:
        text = f"{MAXIMUM_OUTSIDE}body" + f", and so is {much} the map" * (outside >= MUCH)
    if not text:
        foci, count = ndimage.label(seen > 0.5)
        sizes, of_body = (np.bincount(foci[where], minlength=count + 1)[1:] for where in (foci > 0, body))
        num = int((2 * of_body < sizes).sum())
        of_several = f"{num} of {count} outlined areas {'is' if num == 1 else 'are'}"
        text = f"{of_several if count > 1 else 'The outlined area is'} mostly outside the body" if num else ""
    return f"{text}: do not read it as a reason." if text else ""


def with_maximum(seen: NDArray[Any], most: float) -> NDArray[Any]:
    """Returns a map scaled to the maximum that it had before it was resampled."""
    return seen / seen.max() * most if seen.any() else seen


def evidence_planes(seen: NDArray[Any], body: NDArray[np.bool_]) -> tuple[int, ...]:
    """Returns the planes through a map's strongest point within the body.

    Planes with less than half of the body's largest area are left out: they show air, or a fragment. Without a map
    each direction shows the plane with most of the body.
    """
    others = [tuple(d for d in range(seen.ndim) if d != dim) for dim in range(seen.ndim)]
    areas = [body.sum(axes) for axes in others]
    own = np.where(body, seen, 0.0)
    for area, axes in zip(areas, others):
        own = own * np.expand_dims(2 * area >= area.max(), axes)
    if not own.any():
        return tuple(int(area.argmax()) for area in areas)
    return tuple(int(n) for n in np.unravel_index(int(own.argmax()), own.shape))
