"""The cases of a page: truth, prediction and image on one grid, in a viewer and three planes each."""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.data.boxes import Box, crop, smallest_box
from seqpar.data.errors import DataError
from seqpar.data.files import SUFFIXES, read_whole, strip_suffix
from seqpar.data.formats.dataset import Case
from seqpar.data.formats.recognise import find_inputs
from seqpar.data.geometry import from_canonical, geometry_difference, to_canonical
from seqpar.data.preparation import transforms
from seqpar.data.preparation.cache_index import sources_of
from seqpar.data.preparation.prepared_case import Properties
from seqpar.data.volumes import Volume, read_volume
from seqpar.report.cautions import planes_note
from seqpar.report.embedded_volumes import (
    Bytes,
    Embedded,
    HeatRow,
    ShownCase,
    ShownPlane,
    heat_rows,
    most_disagreement,
    most_entropy,
    planes_of,
    shown_best,
    viewer_data,
    viewer_note,
)
from seqpar.report.images import FoundImage, Images, grey_images, same_cases
from seqpar.report.pictures import heat_colours
from seqpar.report.planes import (
    KEPT_HU,
    LETTERS,
    LINES,
    best_modality,
    colours_of,
    count_vanished_regions,
    counted,
    ct_window,
    fullest_planes,
    grid_of,
    kept_of_ct,
    orientation_text,
    outside_planes,
    repeated,
    slices_of,
    tilt_of,
    vanished_note,
)
from seqpar.report.record import CaseScores, RunRecord, ScoredCase
from seqpar.report.tables import CONSENSUS, DISPUTED_ML, what_is_missing
from seqpar.scores.label_files import DISAGREEMENT, ENTROPY, MAX_NAMED, UNCERTAINTY, read_reference
from seqpar.scores.label_scores import UNLABELLED_ML, format_dice
from seqpar.text import millilitres

BUDGET = 5_000_000  # bytes of the volumes in a page, which can still be mailed
ELSEWHERE = "The image does not match the labels"
MISPLACED = "Caution: label maps do not lie on their images, so their volumes and sides may be wrong"
_MARGIN = 8  # voxels shown around the labels if there is no image


def with_wide_ct(images: Images, record: RunRecord, names: Collection[str]) -> Images:
    """Returns images whose CT keeps at least ``KEPT_HU``, if its files are where the run had them; others as they are.

    A network takes CT that is clipped to the values of its labels: fat and air are then equally black.

    - ``names``: of the cases
    """
    recipe, cache, own = images.recipe, images.cache, dict[str, Case]()
    if recipe.plan is not None or "ct" not in recipe.schemes:
        return images
    wide = (
        one and replace(one, low=min(one.low, KEPT_HU[0]), high=max(one.high, KEPT_HU[1])) for one in recipe.intensities
    )
    scaled = tuple(new if scheme == "ct" else one for scheme, one, new in zip(recipe.schemes, recipe.intensities, wide))
    with suppress(DataError, ValueError, OSError):
        if cache is not None and record.config["data"]:
            known = {found.id: found for found in find_inputs((record.config["data"],), recipe.modalities)[0]}
            stamps = {name: sources_of(known[name]) for name in names if name in known}
            own = {name: known[name] for name in same_cases(cache, stamps).cases}
    return replace(images, recipe=replace(recipe, intensities=scaled), files={**own, **images.files})


def greys_of(
    image: FoundImage, modalities: Sequence[str]
) -> tuple[dict[str, Bytes], dict[str, tuple[float, float]], bool]:
    """Returns what ``grey_images`` does, of a CT from black to white at least what it has of ``KEPT_HU``."""
    pictures, ranges, is_ct = grey_images(image, modalities)
    units = zip(image.properties.schemes, image.properties.means, image.properties.stds)
    for name, channel, (scheme, mean, std) in zip(list(pictures), image.image, units):
        if scheme != "ct":
            continue
        values = np.asarray(channel) * std + mean
        low, high = ct_window(ranges[name], [values])
        shares = np.clip((values - low) / max(high - low, 1e-6), 0, 1)
        pictures[name], ranges[name] = np.rint(255 * shares).astype(np.uint8), (low, high)
    return pictures, ranges, is_ct


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
                shown = _on_prepared_grid(case, prediction, image, numbers, record)
                return _with_uncertainty(shown, case.prediction, image.properties, record)
            note = f"{ELSEWHERE} ({difference}); only the labels are shown."
    except DataError as error:
        note = f"The image cannot be used ({error}); only the labels are shown."
    read, geometry = _read_truth(case, prediction, record), prediction.geometry
    every = np.stack([to_canonical(volume.array[0], volume.geometry.orientation) for volume in (prediction, *read)])
    box = smallest_box((every != 0).any(0))
    w, d, h = ((max(0, low - _MARGIN), min(side, high + _MARGIN)) for (low, high), side in zip(box, every.shape[1:]))
    predicted, truth, *disputed = (crop(labels, (w, d, h)) for labels in every)
    slices, spacing = slices_of(geometry, (w, d, h), truth.shape), geometry.canonical_spacing
    maps = _numbered(truth, numbers), _numbered(predicted, numbers)
    shown = ShownCase(case.name, {}, *maps, spacing, slices, note, slant=geometry.slant)
    return _with_areas(shown, truth, disputed, record)


def _with_areas(
    shown: ShownCase, truth: NDArray[Any], disputed: Sequence[NDArray[Any]], record: RunRecord
) -> ShownCase:
    value = record.labels.ignore if record.labels else None
    ignored = None if value is None else np.asarray(truth == value)
    return replace(shown, ignored=ignored, disputed=disputed[0].astype(np.uint8) if disputed else None)


def _read_truth(case: ScoredCase, prediction: Volume, record: RunRecord) -> list[Volume]:
    """Returns the true label map and, of several readers, where they gave different labels."""
    if case.truth is None:
        return [prediction._replace(array=np.zeros_like(prediction.array))]
    if case.doubt is None:
        volumes = [read_volume(case.truth)]
    else:
        regions = record.labels.classes.values() if record.labels else ()
        reference = read_reference(case.truth, case.doubt, regions=regions)
        geometry, maps = reference.geometry, [reference.values, *reference.disputed]
        volumes = [
            prediction._replace(array=from_canonical(one, geometry.orientation)[None], geometry=geometry)
            for one in maps
        ]
    if (difference := geometry_difference(volumes[0].geometry, prediction.geometry)) is not None:
        raise DataError(case.truth, f"does not lie on its prediction {case.prediction}: {difference}")
    return volumes


def _on_prepared_grid(
    case: ScoredCase, prediction: Volume, image: FoundImage, numbers: dict[int, int], record: RunRecord
) -> ShownCase:
    """Returns a case on the grid of its prepared image, with the prepared truth if the file of the truth is gone."""
    properties = image.properties

    def in_box(volume: Volume) -> NDArray[Any]:
        return crop(to_canonical(volume.array[0], volume.geometry.orientation), properties.box)

    def to_grid(volume: Volume) -> NDArray[Any]:
        return transforms.resample_label(in_box(volume), properties.shape)

    outside = {"the prediction": _ml_beyond(prediction, properties.box)}
    predicted = to_grid(prediction)
    classes = [*record.labels.classes.values()] if record.labels else [*numbers]
    vanished = {"prediction": count_vanished_regions(in_box(prediction), predicted, classes)}
    if case.truth is None or case.truth.exists() or image.label is None:
        read = _read_truth(case, prediction, record)
        truth, *disputed = map(to_grid, read)
        outside["the truth"] = _ml_beyond(read[0], properties.box, (record.labels and record.labels.ignore) or 0)
        vanished["truth"] = count_vanished_regions(in_box(read[0]), truth, classes)
    else:
        truth, disputed = transforms.to_values(np.asarray(image.label), properties.values), list(image.disputed)
    pictures, ranges, is_ct = greys_of(image, list(record.dataset["modalities"]))
    slices = slices_of(properties.geometry, properties.box, properties.shape)
    labels = _numbered(truth, numbers), _numbered(predicted, numbers)
    parts = [f"{millilitres(ml)} ml of {name}" for name, ml in outside.items() if ml]
    notes = [f"Not shown, since the image is 0 there: {' and '.join(parts)}."] * bool(parts)
    notes += filter(None, [vanished_note(vanished, properties.spacing)])
    shown = ShownCase(case.name, pictures, *labels, properties.spacing, slices, " ".join(notes), ranges, is_ct)
    return _with_areas(replace(shown, slant=properties.geometry.slant), truth, disputed, record)


def _ml_beyond(volume: Volume, box: Box, ignore: int = 0) -> float:
    """Returns how much of a label map lies beyond the box that a prepared image has of its file."""
    labelled = ~np.isin(to_canonical(volume.array[0], volume.geometry.orientation), (0, ignore))
    beyond = np.count_nonzero(labelled) - np.count_nonzero(crop(labelled, box))
    return float(beyond * math.prod(volume.geometry.spacing) * volume.geometry.slant / 1000)


def _with_uncertainty(shown: ShownCase, prediction: Path, properties: Properties, record: RunRecord) -> ShownCase:
    """Returns a case with the maps of uncertainty that predict wrote next to its label map, if it did."""
    try:
        content = json.loads(read_whole(prediction.parent / "prediction.json"))
        is_written, networks = bool(content.get("uncertainty")), len(content.get("runs", [content]))
    except (OSError, ValueError, AttributeError):
        return shown
    folder, name = prediction.parent / UNCERTAINTY, strip_suffix(prediction.name)
    labels, regions = len(record.dataset["labels"]), len(record.learned_regions)
    most, when = most_entropy(labels, regions, str(record.config.get("targets")))
    apart = most_disagreement(networks, labels, regions)

    def entropy_greys(kind: str, most: float) -> Bytes | None:
        files = [path for suffix in SUFFIXES if (path := folder / f"{name}_{kind}{suffix}").is_file()]
        if not (is_written and files):
            return None
        volume = read_volume(files[0])
        whole = to_canonical(volume.array[0], volume.geometry.orientation)
        seen = transforms.resample(crop(whole, properties.box), properties.shape)
        greys: Bytes = np.rint(255 * np.clip(seen / most, 0, 1)).astype(np.uint8)
        return greys

    heat = entropy_greys(ENTROPY, most)
    if heat is None:
        return shown
    shown = replace(shown, heat=heat, heat_name=ENTROPY, most_nats=most, most_when=when)
    if networks == 1:
        return shown
    most_apart = f"{apart:.2f} nats (the most that {networks} networks can have)"
    return replace(shown, disagreement=entropy_greys(DISAGREEMENT, apart), most_apart=most_apart)


def _numbered(values: NDArray[Any], numbers: dict[int, int]) -> Bytes:
    numbered = np.zeros(values.shape, np.uint8)
    for value, number in numbers.items():
        numbered[values == value] = number
    return numbered


def load_worst(
    record: RunRecord, scored: CaseScores, count: int, images: Images, gaps: list[str]
) -> list[tuple[ShownCase, Embedded]]:
    """Returns the ``count`` worst cases with their volumes.

    A case that cannot be read is named in ``gaps``, to which lines are added, and the next one takes its place.
    """
    shown = list[tuple[ShownCase, Embedded]]()
    budget = BUDGET // max(1, min(count, len(scored.cases)))
    failed = dict[str, DataError]()
    is_there = [case.name for case in scored.cases if case.truth is None or case.truth.exists()]
    images = with_wide_ct(images, record, is_there)
    for case in scored.cases:
        if len(shown) == count:
            break
        try:
            loaded = load(case, record, images)
        except DataError as error:
            failed[case.name] = error
            continue
        rows = enumerate((case.scores.get(name, {}) for name in record.label_names.values()), 1)
        left = next((row.get(UNLABELLED_ML, math.nan) for row in case.scores.values()), math.nan)
        hidden = [n for n, row in rows if math.isnan(row.get("n_ref", 0))]
        loaded = replace(loaded, hidden=hidden, unlabelled_ml=left)
        shown.append((loaded, loaded.embedded(budget)))
    gaps += failed_line(failed)
    if elsewhere := ", ".join(case.name for case, _ in shown if case.note.startswith(ELSEWHERE)):
        gaps.append(f"{MISPLACED}: {elsewhere}.")
    return shown


def failed_line(failed: Mapping[str, DataError]) -> list[str]:
    """Returns a sentence on cases that cannot be shown, with the reason of the first; none without any."""
    if len(failed) < 2:
        return [f"Case {name} cannot be shown: {error}." for name, error in failed.items()]
    first, names = next(iter(failed.values())), ", ".join([*failed][:MAX_NAMED]) + ", …" * (len(failed) > MAX_NAMED)
    return [f"{len(failed)} cases cannot be shown ({names}). The first: {first}."]


@dataclass(frozen=True)
class CaseView:
    """A case of a page in words and planes; ``columns``: widths of the planes, so that a mm is as long in each.

    ``heats``: the same planes of its maps.
    """

    name: str
    caption: str
    note: str
    columns: str
    planes: Sequence[ShownPlane]
    heats: Sequence[HeatRow] = ()


@dataclass(frozen=True)
class CaseSection:
    """The cases of a page.

    - ``labels``: colour and name
    - ``volumes``: what the viewer reads; ``note``: what was left out of them
    - ``heat``: colours of a map from 0 to its maximum, over an image and alone; ``most``: what that maximum is
    - ``has_readers``, ``has_ignored``: whether cases show where readers disagree, and what a truth leaves unlabelled
    - ``consensus``: the label that a truth by several readers has
    - ``order``: which cases are shown
    """

    orientation: str
    labels: Sequence[tuple[str, str]]
    note: str
    shown: Sequence[CaseView]
    volumes: Mapping[str, Any]
    heat: Sequence[str] = ()
    most: str = "its maximum"
    has_truth: bool = True
    has_readers: bool = False
    has_ignored: bool = False
    consensus: str = ""
    order: str = ""

    @property
    def maps_outside(self) -> str:
        """A sentence on maps whose maximum or a large part is outside the body; "" if no map is like that."""
        told = [case["heat_caution"] for case in self.volumes["cases"] if case["heat"]]
        count = sum(map(bool, told))
        which = f"In {count} of {len(told)} shown maps," if len(told) > 1 else "In the shown map,"
        what = "the maximum or a large part is outside the body: do not read such a map as a reason."
        return f"{which} {what}" if count else ""


def case_section(
    record: RunRecord, scored: CaseScores, shown: list[tuple[ShownCase, Embedded]], neurological: bool
) -> CaseSection:
    """Returns the section of the cases.

    - ``neurological``: the patient's left is on the left of a picture, and not on the right
    """
    by_name, labels = {case.name: case for case in scored.cases}, list(record.label_names.values())
    classes = _numbers_of_classes(record, scored)
    views = [_case_view(by_name[case.name], case, labels, classes, neurological) for case, _ in shown]
    section = viewer_section(shown, labels, neurological, views)
    has_truth = any(case.truth is not None for case in scored.cases)
    order = order_note(len(shown), len(scored.cases), "mean Dice" if has_truth else "")
    consensus = next((case.doubt.consensus for case in scored.cases if case.doubt), "")
    return replace(section, has_truth=has_truth, order=order, consensus=consensus)


def order_note(shown: int, total: int, score: str) -> str:
    """Returns which cases are shown, those with the lowest of a score, "" of cases by name; "" of a single case."""
    if total < 2:
        return ""
    if not score:
        more = f"; the others are not on this page (--cases {total} shows all)" * (shown < total)
        return f"{shown} of {total} cases, in the order of their names{more}."
    if shown == total:
        return f"All {total} cases, the lowest {score} first."
    return f"The {shown} of {total} cases with the lowest {score}, the lowest first."


def viewer_section(
    shown: Sequence[tuple[ShownCase, Embedded]],
    labels: Sequence[str],
    neurological: bool,
    views: Sequence[CaseView] = (),
) -> CaseSection:
    """Returns the section of a viewer.

    - ``labels``: names of the labels, in the order of their numbers
    - ``views``: cases that are also shown in planes
    """
    has_heat = any(case.heat is not None for case, _ in shown)
    heat = (", ".join(heat_colours(over_grey=True)), ", ".join(heat_colours())) if has_heat else ()
    kept = kept_of_ct([limits for case, _ in shown if case.is_ct for limits in case.ranges.values()])
    told = [counted(case.slices for case, _ in shown), LINES * (len(labels) > 1), repeated(labels)]
    return CaseSection(
        f"{orientation_text(neurological)}. {LETTERS}. {'. '.join(filter(None, told))}",
        [(colour, name) for name, colour in colours_of(labels).items()],
        viewer_note([embedded for _, embedded in shown], any(case.is_ct for case, _ in shown))
        + f" {kept}" * bool(kept),
        views,
        viewer_data(labels, shown, neurological),
        heat,
        next((f"{case.most_nats:.2f} nats" for case, _ in shown if case.most_nats), "its maximum"),
        has_readers=any("disputed" in case.areas for case, _ in shown),
        has_ignored=any("ignored" in case.areas for case, _ in shown),
    )


def _numbers_of_classes(record: RunRecord, scored: CaseScores) -> dict[str, list[int]]:
    """Returns the numbers, in drawn label maps, of the labels that each scored class consists of."""
    numbers = {value: number for number, value in enumerate(record.label_names, 1)}
    values = {name: map(int, re.findall(r"\d+", key)) for name, key in scored.classes.items()}
    return {name: [numbers[value] for value in own if value in numbers] for name, own in values.items()}


def elsewhere_note(case: ScoredCase, shown: ShownCase, classes: Mapping[str, Sequence[int]]) -> str:
    """Returns which false and missed regions none of a case's planes cuts; "" of none, or where nothing is known.

    - ``classes``: the numbers of the labels that each consists of
    """
    truth = shown.truth.astype(int)
    prediction = np.where(np.isin(shown.prediction, shown.hidden), 0, shown.prediction)
    if shown.ignored is not None:
        truth[shown.ignored] = -1
    at, has_truth = fullest_planes(shown_best(shown)[0]), case.truth is not None
    found = outside_planes(truth, prediction, classes, shown.spacing, at, has_truth)
    told = ", ".join(own.text(shown.voxel_ml, shown.slices) for own in found)
    against = f", against {CONSENSUS}" * any(DISPUTED_ML in row for row in case.scores.values())
    drawn = ", counted in the drawn voxels, which are not the file's" * any(own.resampled for own in shown.slices)
    return f"In none of these planes{against}{drawn}: {told}." if told else ""


def _case_view(
    case: ScoredCase,
    shown: ShownCase,
    labels: Sequence[str],
    classes: Mapping[str, Sequence[int]],
    neurological: bool,
) -> CaseView:
    """Returns one case with its scores and three planes; ``classes``: as in `elsewhere_note`."""
    dice = ", ".join(f"{name} {format_dice(row, 3)}" for name, row in case.scores.items())
    missing = "".join(f" · {text}" for name, row in case.scores.items() if (text := what_is_missing(name, row)))
    tilted = f" · {text}" if (text := tilt_of(shown.slices)) else ""
    modality = f" · shown on {(best := best_modality(list(shown.images)))}" if shown.images else ""
    if shown.images and shown.is_ct:
        modality += " from {} HU (black) to {} HU (white)".format(*map(round, shown.ranges[best]))
    w, d, _ = (side * step for side, step in zip(shown.truth.shape, shown.spacing))
    scores = f"Dice: {dice}{missing}{case.volumes}"
    if case.truth is None:
        volumes = (f"{name} {millilitres(row['VolumeMl'])} ml" for name, row in case.scores.items())
        scores = f"Predicted: {', '.join(volumes)}"
    return CaseView(
        case.name,
        f"{scores} · {planes_note(case, shown, labels)}{modality} · {grid_of(shown.spacing, shown.slices)}{tilted}",
        " ".join(filter(None, [elsewhere_note(case, shown, classes), shown.unlabelled, shown.note])),
        f"{d:.6g}fr {w:.6g}fr {w:.6g}fr",
        planes_of(shown, neurological),
        heat_rows(shown, neurological),
    )
