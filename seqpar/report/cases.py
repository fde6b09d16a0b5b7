"""The cases of a page: truth, prediction and image on one grid, in a viewer and three planes each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from seqpar.report.tables import Score

BUDGET = 5_000_000  # bytes of the volumes in a page, which can still be mailed
_MARGIN = 8  # voxels shown around the labels if there is no image


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


@dataclass(frozen=True)
class ShownPlane:
    """A plane of a case as its template draws it, in mm.

    - ``number``, ``count``: which plane of how many, as the viewer counts
    - ``across``, ``up``: sides of a pixel
    - ``outlines``: kind (truth or prediction), colour and SVG path in pixels
    - ``sides``: place and letter of what is at the left, right, top and bottom
    - ``letter``, ``bar``: height of a letter, the same in all three planes, and length of the scale bar
    """

    name: str
    label: str
    number: int
    count: int
    width: float
    height: float
    across: float
    up: float
    png: str
    outlines: Sequence[tuple[str, str, str]]
    sides: Sequence[tuple[float, float, str]]
    letter: float
    bar: float


def planes_of(case: ShownCase, neurological: bool) -> list[ShownPlane]:
    """Returns a case's three planes: through most of the truth, else of the prediction."""
    at = fullest_planes(case.truth if case.truth.any() else case.prediction)
    return [_plane(case, name, dim, at[dim], neurological) for name, dim in PLANES]


def _plane(case: ShownCase, name: str, dim: int, at: int, neurological: bool) -> ShownPlane:
    across, up = (step for n, step in enumerate(case.spacing) if n != dim)
    truth, prediction = (plane_of(labels, dim, at, neurological) for labels in (case.truth, case.prediction))
    width, height = truth.shape[1] * across, truth.shape[0] * up
    picture = ""
    if case.images:
        grey = plane_of(case.images[best_modality(list(case.images))], dim, at, neurological)
        picture = encode(png(np.ascontiguousarray(grey)))
    outlines = [
        (kind, COLOURS[(number - 1) % len(COLOURS)], outline(labels == number))
        for kind, labels in (("truth", truth), ("prediction", prediction))
        for number in np.unique(labels[labels > 0]).tolist()
    ]
    letter = max(side * step for side, step in zip(case.truth.shape, case.spacing)) / 24
    far = 0.8 * letter
    places = ((far, height / 2), (width - far, height / 2), (width / 2, far), (width / 2, height - far))
    return ShownPlane(
        name,
        f"{case.name}, {name} plane {at + 1}",
        at + 1,
        case.truth.shape[dim],
        width,
        height,
        across,
        up,
        picture,
        outlines,
        [(x, y, side) for (x, y), side in zip(places, sides(neurological)[dim])],
        letter,
        bar_length(width),
    )


def bar_length(width: float) -> float:
    """Returns the length of a scale bar in mm, a round number of at most a quarter of a picture's width."""
    power = 10.0 ** math.floor(math.log10(width / 4))
    return max(power * factor for factor in (1, 2, 5) if power * factor <= width / 4)


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


@dataclass(frozen=True)
class CaseView:
    """A case of a page in words and planes; ``columns``: widths of the planes, so that a mm is as long in each."""

    name: str
    caption: str
    note: str
    columns: str
    planes: Sequence[ShownPlane]


@dataclass(frozen=True)
class CaseSection:
    """The cases of a page; ``labels``: colour and name, ``volumes``: what the viewer reads, ``note``: of these."""

    orientation: str
    labels: Sequence[tuple[str, str]]
    note: str
    shown: Sequence[CaseView]
    volumes: Mapping[str, Any]


def case_section(
    record: RunRecord, scored: CaseScores, shown: list[tuple[ShownCase, Embedded]], neurological: bool
) -> CaseSection:
    """Returns the section of the cases.

    - ``neurological``: the patient's left is on the left of a picture, and not on the right
    """
    by_name = {case.name: case for case in scored.cases}
    return CaseSection(
        f"{orientation_text(neurological)}. {LETTERS}",
        [(COLOURS[n % len(COLOURS)], name) for n, name in enumerate(record.label_names.values())],
        viewer_note([embedded for _, embedded in shown]),
        [_case_view(by_name[case.name], case, neurological) for case, _ in shown],
        viewer_data(record, shown, neurological),
    )


def _case_view(case: ScoredCase, shown: ShownCase, neurological: bool) -> CaseView:
    """Returns one case with its scores and three planes."""
    dice = ", ".join(f"{name} {Score(row.get('Dice', math.nan), 3).text}" for name, row in case.scores.items())
    modality = f" · shown on {best_modality(list(shown.images))}" if shown.images else ""
    spacing = " × ".join(f"{step:.3g}" for step in shown.spacing)
    w, d, _ = (side * step for side, step in zip(shown.truth.shape, shown.spacing))
    return CaseView(
        case.name,
        f"Dice: {dice}{modality} · voxels of {spacing} mm{volumes_of(case)}",
        shown.note,
        f"{d:.6g}fr {w:.6g}fr {w:.6g}fr",
        planes_of(shown, neurological),
    )


def volumes_of(case: ScoredCase) -> str:
    """Returns the true and predicted volume of each class in words, "" where they were not recorded."""
    parts = [
        f"{name} {row['TrueVolumeMl']:.3g} → {row['VolumeMl']:.3g}"
        for name, row in case.scores.items()
        if {"TrueVolumeMl", "VolumeMl"} <= row.keys()
    ]
    return f" · ml, truth → prediction: {', '.join(parts)}" if parts else ""


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
