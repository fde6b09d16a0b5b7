"""The cases of a page: truth, prediction and image on one grid, in a viewer and three planes each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.data.boxes import crop, smallest_box
from seqpar.data.errors import DataError
from seqpar.data.geometry import geometry_difference, to_canonical
from seqpar.data.preparation import transforms
from seqpar.data.volumes import Volume, read_volume
from seqpar.report.embedded_volumes import GREYS, Bytes, Embedded, embed, encode, outline, png
from seqpar.report.images import FoundImage, Images
from seqpar.report.planes import (
    COLOURS,
    LETTERS,
    PLANES,
    best_modality,
    fullest_planes,
    orientation_text,
    plane_of,
    sides,
)
from seqpar.report.record import CaseScores, RunRecord, ScoredCase
from seqpar.report.run_page import fill

_MARGIN = 8  # voxels shown around the labels where there is no image


@dataclass(frozen=True)
class ShownCase:
    """A case on one grid: grey images by modality, and both label maps as numbers from 1 (the first label) on."""

    name: str
    images: dict[str, Bytes]  # W D H each; empty if there is no prepared image
    truth: Bytes
    prediction: Bytes
    spacing: tuple[float, float, float]
    note: str = ""


def load(case: ScoredCase, record: RunRecord, images: Images) -> ShownCase:
    """Returns a case's volumes, without its image only the labels; raises DataError if a map is missing."""
    numbers = {value: n + 1 for n, value in enumerate(record.label_names)}
    prediction = read_volume(case.prediction)
    try:
        image = images.of(case.name)
        note = images.missing(case.name)
        if image is not None:
            difference = geometry_difference(image.properties.geometry, prediction.geometry)
            if difference is None:
                return _on_prepared_grid(case, prediction, image, numbers, list(record.dataset["modalities"]))
            note = f"The image lies elsewhere ({difference}); only the labels are shown."
    except DataError as error:
        note = f"The image cannot be used ({error}); only the labels are shown."
    truth = _read_truth(case, prediction)
    both = np.stack([to_canonical(v.array[0], v.geometry.orientation) for v in (truth, prediction)])
    box = smallest_box((both != 0).any(0))
    w, d, h = ((max(0, low - _MARGIN), min(side, high + _MARGIN)) for (low, high), side in zip(box, both.shape[1:]))
    maps = [_numbered(crop(labels, (w, d, h)), numbers) for labels in both]
    return ShownCase(case.name, {}, maps[0], maps[1], prediction.geometry.canonical_spacing, note)


def _read_truth(case: ScoredCase, prediction: Volume) -> Volume:
    truth = read_volume(case.truth)
    difference = geometry_difference(truth.geometry, prediction.geometry)
    if difference is not None:
        raise DataError(case.truth, f"does not lie on its prediction {case.prediction}: {difference}")
    return truth


def _on_prepared_grid(
    case: ScoredCase, prediction: Volume, image: FoundImage, numbers: dict[int, int], modalities: list[str]
) -> ShownCase:
    """Returns a case on the grid of its prepared image, with the prepared truth if the file of the truth is gone."""
    properties = image.properties

    def to_grid(volume: Volume) -> Bytes:
        whole = to_canonical(volume.array[0], volume.geometry.orientation)
        return _numbered(transforms.resample_label(crop(whole, properties.box), properties.shape), numbers)

    if case.truth.exists() or image.label is None:
        truth = to_grid(_read_truth(case, prediction))
    else:
        truth = _numbered(transforms.to_values(np.asarray(image.label), properties.values), numbers)
    pictures = {
        name: to_grey(np.asarray(channel), scheme == "zscore")
        for name, channel, scheme in zip(modalities, image.image, properties.schemes)
    }
    return ShownCase(case.name, pictures, truth, to_grid(prediction), properties.spacing)


def _numbered(values: NDArray[Any], numbers: dict[int, int]) -> Bytes:
    numbered = np.zeros(values.shape, np.uint8)
    for value, number in numbers.items():
        numbered[values == value] = number
    return numbered


def to_grey(channel: NDArray[Any], zero_is_outside: bool) -> Bytes:
    """Returns a prepared channel as grey levels; the brightest and darkest half percent are clipped."""
    outside = channel == 0 if zero_is_outside else np.zeros(channel.shape, bool)
    body = channel[~outside]
    low, high = np.percentile(body, (0.5, 99.5)) if body.size else (0.0, 1.0)
    scaled = np.clip((channel - low) / max(float(high - low), 1e-6), 0, 1) * 255
    grey: Bytes = np.where(outside, 0, np.rint(scaled)).astype(np.uint8)
    return grey


def draw_planes(case: ShownCase, neurological: bool) -> tuple[list[str], tuple[int, ...]]:
    """Returns a case's three planes as SVG, and where they lie: through most of the truth, else of the prediction."""
    at = fullest_planes(case.truth if case.truth.any() else case.prediction)
    return [_draw_plane(case, plane, dim, at[dim], neurological) for plane, dim in PLANES], at


def _draw_plane(case: ShownCase, plane: str, dim: int, at: int, neurological: bool) -> str:
    across, up = (step for n, step in enumerate(case.spacing) if n != dim)
    truth, prediction = (plane_of(labels, dim, at, neurological) for labels in (case.truth, case.prediction))
    rows, columns = truth.shape
    width, height = columns * across, rows * up
    parts = [f'<rect width="{width:.6g}" height="{height:.6g}" fill="#000"/>']
    if case.images:
        picture = plane_of(case.images[best_modality(list(case.images))], dim, at, neurological)
        size = f'width="{width:.6g}" height="{height:.6g}" preserveAspectRatio="none"'
        parts.append(f'<image {size} href="data:image/png;base64,{encode(png(np.ascontiguousarray(picture)))}"/>')
    parts.append(f'<g transform="scale({across:.6g} {up:.6g})" fill="none" stroke-width="1.5">')
    for kind, labels in (("truth", truth), ("prediction", prediction)):
        for number in np.unique(labels[labels > 0]).tolist():
            colour = COLOURS[(number - 1) % len(COLOURS)]
            parts.append(f'<path class="{kind}" stroke="{colour}" d="{outline(labels == number)}"/>')
    size = max(side * step for side, step in zip(case.truth.shape, case.spacing)) / 24  # the same in all three planes
    parts.append(f"</g>{_letters(sides(neurological)[dim], width, height, size)}{_scale_bar(width, height, size)}")
    label = escape(f"{case.name}, {plane} plane {at + 1}")
    box = f'viewBox="0 0 {width:.6g} {height:.6g}" style="aspect-ratio:{width:.6g}/{height:.6g}"'
    return f'<svg {box} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _letters(letters: str, width: float, height: float, size: float) -> str:
    """Returns what lies at the left, right, top and bottom of a plane; ``size`` is the letters' height in mm."""
    far = 0.8 * size
    places = ((far, height / 2), (width - far, height / 2), (width / 2, far), (width / 2, height - far))
    texts = (f'<text x="{x:.6g}" y="{y:.6g}" dy="0.35em">{letter}</text>' for letter, (x, y) in zip(letters, places))
    return f'<g class="sides" font-size="{size:.6g}" text-anchor="middle">{"".join(texts)}</g>'


def bar_length(width: float) -> float:
    """Returns the length of a scale bar in mm, a round number of at most a quarter of a picture's width."""
    power = 10.0 ** math.floor(math.log10(width / 4))
    return max(power * factor for factor in (1, 2, 5) if power * factor <= width / 4)


def _scale_bar(width: float, height: float, size: float) -> str:
    """Returns a scale bar in the lower left corner; ``size`` is the height of its text in mm."""
    length, left, y = bar_length(width), 0.5 * size, height - 0.5 * size
    line = f'<line x1="{left:.6g}" x2="{left + length:.6g}" y1="{y:.6g}" y2="{y:.6g}"/>'
    text = f'<text x="{left:.6g}" y="{y - 0.4 * size:.6g}">{length:g} mm</text>'
    return f'<g class="scale" font-size="{0.8 * size:.6g}">{line}{text}</g>'


BUDGET = 5_000_000  # bytes of the volumes in a page, which can still be mailed


def load_worst(
    record: RunRecord, scored: CaseScores, count: int, images: Images, gaps: list[str]
) -> list[tuple[ShownCase, Embedded]]:
    """Returns the ``count`` worst cases with their volumes.

    A case that cannot be read is named in ``gaps``, to which lines are added, and the next one takes its place.
    """
    shown = list[tuple[ShownCase, Embedded]]()
    budget = BUDGET // max(1, min(count, len(scored.cases)))
    for case in scored.cases:
        if len(shown) == count:
            break
        try:
            loaded = load(case, record, images)
        except DataError as error:
            gaps.append(f"Case {case.name} cannot be shown: {error}.")
            continue
        volumes = list(loaded.images.values()), loaded.truth, loaded.prediction
        shown.append((loaded, embed(*volumes, loaded.spacing, budget)))
    return shown


def section(
    record: RunRecord, scored: CaseScores, shown: list[tuple[ShownCase, Embedded]], neurological: bool
) -> tuple[str, dict[str, Any]]:
    """Returns the section of the cases, and the data that its viewer reads.

    - ``neurological``: the patient's left is on the left of a picture, and not on the right
    """
    by_name = {case.name: case for case in scored.cases}
    keys = legend(record)
    viewer = fill("viewer.html", {"legend": keys, "note": viewer_note([embedded for _, embedded in shown])})
    how_shown = f'<p class="small">{orientation_text(neurological)}. {LETTERS}.</p>'
    note = '<p class="small">Planes that hold most of the truth; worst cases first.</p>'
    planes = "".join(case_section(by_name[case.name], case, neurological) for case, _ in shown)
    return how_shown + viewer + keys + note + planes, viewer_data(record, shown, neurological)


def case_section(case: ScoredCase, shown: ShownCase, neurological: bool) -> str:
    """Returns one case with its scores and three planes."""
    planes, at = draw_planes(shown, neurological)
    figures = "".join(
        f"<figure>{plane}<figcaption>{name} {place + 1} / {side}</figcaption></figure>"  # as the viewer counts
        for plane, name, place, side in zip(planes, [plane for plane, _ in PLANES], at, shown.truth.shape)
    )
    dice = ", ".join(
        f"{name} {'–' if math.isnan(value) else f'{value:.3f}'}"
        for name, value in ((name, row.get("Dice", math.nan)) for name, row in case.scores.items())
    )
    modality = f" · shown on {best_modality(list(shown.images))}" if shown.images else ""
    note = f'<p class="small">{escape(shown.note)}</p>' if shown.note else ""
    caption = f"Dice: {dice}{modality} · voxels of {' × '.join(f'{step:.3g}' for step in shown.spacing)} mm"
    head = f'<h3>{escape(case.name)}</h3><p class="small">{escape(caption)}{escape(volumes_of(case))}</p>'
    w, d, _ = (side * step for side, step in zip(shown.truth.shape, shown.spacing))
    scale = f'style="grid-template-columns: {d:.6g}fr {w:.6g}fr {w:.6g}fr"'  # a mm takes as many pixels in each plane
    body = f'{head}{note}<div class="planes" {scale}>{figures}</div>'
    return f'<article class="case" data-case="{escape(case.name)}">{body}</article>'


def volumes_of(case: ScoredCase) -> str:
    """Returns the true and predicted volume of each class in words, "" where they were not recorded."""
    parts = [
        f"{name} {row['TrueVolumeMl']:.3g} → {row['VolumeMl']:.3g}"
        for name, row in case.scores.items()
        if {"TrueVolumeMl", "VolumeMl"} <= row.keys()
    ]
    return f" · ml, truth → prediction: {', '.join(parts)}" if parts else ""


def legend(record: RunRecord) -> str:
    """Returns the legend: the colour of each label, and the line styles of truth and prediction."""
    keys = "".join(
        f'<span><i style="background:{COLOURS[n % len(COLOURS)]}"></i>{escape(name)}</span>'
        for n, name in enumerate(record.label_names.values())
    )
    lines = '<span><i class="solid"></i>truth</span><span><i class="dashed"></i>prediction</span>'
    return f'<p class="keys">{keys}{lines}</p>'


def viewer_data(record: RunRecord, cases: Sequence[tuple[ShownCase, Embedded]], neurological: bool) -> dict[str, Any]:
    """Returns the data that the viewer reads: labels with colours, and each case's sheets."""
    labels = [{"name": n, "colour": COLOURS[k % len(COLOURS)]} for k, n in enumerate(record.label_names.values())]
    entries = [
        {
            "name": shown.name,
            "shape": embedded.shape,
            "whole": shown.truth.shape,
            "factors": embedded.factors,
            "spacing": [s * f for s, f in zip(shown.spacing, embedded.factors)],
            "columns": embedded.columns,
            "modalities": list(shown.images),
            "favourite": best_modality(list(shown.images)),
            "images": embedded.images,
            "truth": embedded.truth,
            "prediction": embedded.prediction,
        }
        for shown, embedded in cases
    ]
    return {"labels": labels, "sides": sides(neurological), "mirrored": not neurological, "cases": entries}


def viewer_note(volumes: Sequence[Embedded]) -> str:
    """Returns a note of what was left out to keep the page small."""
    num_bytes = sum(volume.num_bytes for volume in volumes)
    note = f"Volumes are cropped to the body and kept in {GREYS} grey levels: {num_bytes / 1e6:.1f} MB of at most "
    note += f"{BUDGET / 1e6:g} MB in this page."
    factors = {volume.factors for volume in volumes}
    if factors == {(1, 1, 1)}:
        return note + " Every voxel is there."
    blocks = "; ".join(sorted(" × ".join(map(str, block)) for block in factors))
    return note + f" Blocks of {blocks} voxels became one (images by their mean, labels by their middle voxel)."
