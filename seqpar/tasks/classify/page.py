"""The page about a classifier: scores, ROC, confusion, calibration and worst cases."""

import argparse
import base64
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.boxes import crop
from seqpar.data.errors import DataError
from seqpar.data.files import read_whole
from seqpar.data.geometry import to_canonical
from seqpar.data.phantom.phantom_files import GENERATED
from seqpar.data.preparation.cache import open_cache
from seqpar.data.preparation.transforms import resample
from seqpar.data.volumes import read_volume
from seqpar.prediction.prediction_folder import RECORD, inputs_of
from seqpar.report.cases import BUDGET, CaseSection, failed_line, greys_of, order_note, viewer_section, with_wide_ct
from seqpar.report.cautions import chosen_on_them, of_open_sides
from seqpar.report.curves import CHANCE, INK, Diagram, Line, LineStyle, number, reliability_diagram
from seqpar.report.embedded_volumes import ShownCase
from seqpar.report.images import (
    FoundImage,
    Images,
    Stamps,
    find_images,
    other_images,
    other_voxels,
    recipe_of,
    same_cases,
    spacings_of,
)
from seqpar.report.pictures import MAPS, body_of, caution_about, draw_evidence, evidence_planes, with_maximum
from seqpar.report.planes import colours_of, slices_of
from seqpar.report.plots import Chart, draw_charts
from seqpar.report.record import DAMAGE, RunRecord, row_of_taken, step_sentence
from seqpar.report.run_page import FinishedPage, is_neurological, render_run, try_reading
from seqpar.report.tables import HeadlineTile, Score, Table, TableHead, TableRow, tiles_of_steps
from seqpar.runs.metrics_tail import with_other_weights
from seqpar.scores.class_scores import (
    about_scores,
    calibration,
    caution_of_absent,
    caution_of_guesses,
    describe_share,
    doubt_of_area,
    fewest_cases,
    interval_of_balanced,
    positive_class,
    roc_label,
    roc_points,
    words_of_interval,
)
from seqpar.scores.comparison import FEW, about_scans
from seqpar.scores.label_files import missing_line
from seqpar.tasks.case_evaluation import seen_by_runs, seen_table, unknown_runs
from seqpar.tasks.classify.evaluation import Summary, folder_of, image_files, other_classes, shares_of, trained_on
from seqpar.tasks.classify.scores import (
    EXPLANATIONS,
    TABLE,
    Place,
    class_summary,
    place_of_maximum,
    read_class_table,
    read_subjects,
    read_truth,
    replaced_rows,
    rescore,
    unknown_cases,
    unlisted_rows,
    verdict_on,
    what_maps_share,
    worst_cases,
)
from seqpar.tasks.seen_cases import NONE_SEEN, SHOWN_LARGE, Seen
from seqpar.tasks.training_data import sides_of_run
from seqpar.text import quantity

FOLDER = Path(__file__).parent


def read_class_scores(
    record: RunRecord, truth: Path | None = None, prediction: Path | None = None, common: bool = False
) -> Summary:
    """Returns the scores of a folder that predict wrote, else those of the run's last validation.

    The folder's have ``faults``, of cases that lack a true class, and ``missing``, the cases without a prediction, but
    not with ``common``. Raises DataError if there are no scores.
    """
    if truth is not None and prediction is not None:
        path = prediction / TABLE
        table, classes = read_class_table(path), read_truth(truth)
        faults = [str(fault) for fault in unknown_cases(table, classes, path)]
        missing = sorted(classes.keys() - set(table.cases))
        left_out: dict[str, Any] = {"faults": [], "missing": []} if common else {"faults": faults, "missing": missing}
        own = {"source": f"{prediction} against {truth}", **left_out}
        return class_summary(table, classes, path) | own
    path = record.path / "validation" / "summary.json"
    try:
        content = dict(json.loads(read_whole(path)))
        confusion = np.array(content["confusion"])
        content["intervals"]["balanced accuracy"] = interval_of_balanced(confusion)  # an older one may have no width
        for case in content["metric_per_case"]:
            verdict_on(case, content)
        _scores(content | {"source": ""}, None, "")  # a damaged file is found here, not while the page is made
    except FileNotFoundError:
        raise DataError(path, "is not there: only a run that came to its end leaves scores of all its cases") from None
    except (OSError, *DAMAGE) as error:
        raise DataError(path, f"cannot be used ({type(error).__name__}: {error})") from None
    return content | {"source": f"{path}, written after step {content.get('step', 0):,}"}


@dataclass(frozen=True)
class WorstCase:
    """A case of the page: its true class with the probability of it, and its planes as base64."""

    name: str
    verdict: str
    png: str


def class_page(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run that gives each case a class; ``options``: of report."""
    if options.images is not None:
        raise ValueError(
            "--images: this run gives each case a class; the page shows cases as predict --explain drew them, or as "
            "prepared: remove it"
        )
    if options.prediction is not None and options.truth is None:
        where = f"{TABLE} and {EXPLANATIONS} in it show cases without a truth"
        raise ValueError(f"--prediction {options.prediction}: classes are scored against --truth: give both; {where}")
    summary, cases, gaps = None, list[WorstCase](), list[str]()
    explained = options.prediction and options.prediction / EXPLANATIONS
    if options.neurological is not None and explained and explained.is_dir():
        flag = "--neurological" if options.neurological else "--no-neurological"
        raise ValueError(f"{flag} would do nothing: {explained} has pictures as predict drew them: remove it")
    is_other, neurological = options.truth is not None, is_neurological(options.neurological, record)
    if is_other:
        summary = read_class_scores(record, options.truth, options.prediction, options.common)
    else:
        summary = try_reading(lambda: read_class_scores(record), gaps)
    if summary and options.cases:
        predicted = None if options.prediction is None else inputs_of(options.prediction)
        cases = pictured_cases(record, summary, options.cases, explained, predicted, neurological, gaps)
    faults, cautions = summary["faults"] if summary and is_other else (), list[str]()
    seen, step, unused, viewer = NONE_SEEN, "", "", None
    if summary and is_other:
        seen, told = _cautions(record, summary, options.truth, options.prediction)
        cautions += [*told, *filter(None, [replaced_rows(options.prediction)])] if options.prediction else told
    elif summary:
        cautions, step = chosen_on_them(record), step_sentence(int(summary.get("step") or 0), record)
    if summary and explained and explained.is_dir():
        cautions += filter(None, [what_maps_share(places_of_maps(summary, explained), predicted_classes(summary))])
    if summary:
        subjects = read_subjects(options.truth) if is_other else record.subjects
        groups, _ = seen.apart(case["case"] for case in summary["metric_per_case"])
        cautions += filter(None, [about_scans(next(iter(groups.values())), subjects)])
    scores = _scores(summary, options.positive, step, seen) if summary else None
    cautions += filter(None, [scores.caution]) if scores else []
    cautions += sides_of_run(record)
    if scores and summary and not is_other:
        tiles = tiles_of_steps(scores.tiles, int(summary.get("step") or 0), row_of_taken(record), "scores")
        unused = with_other_weights(int(summary.get("step") or 0), record.weights.step)
        charts = [replace(chart, title=f"{chart.title}{unused and ','}{unused}") for chart in scores.charts]
        scores = replace(scores, tiles=tiles, charts=charts)
    cases = [replace(case, verdict=f"{seen.mark(case.name)}{case.verdict}") for case in cases]
    if summary and cases:
        names, maps = [case.name for case in cases], names_of_maps(summary, options.prediction)
        viewer = class_viewer(record, names, explained, options.truth, neurological, maps)
        cautions += [*filter(None, [viewer.maps_outside]), *of_open_sides(viewer.volumes)] if viewer else []
    parts = {"truth": options.truth, "prediction": options.prediction, "cases": cases, "scores": scores}
    parts["order"] = order_note(len(cases), summary["cases"], "probability of the true class") if summary else ""
    parts |= {"viewer": viewer, "unused": unused, "unlisted": seen.untold}
    text = render_run(FOLDER, record, gaps, faults, cautions, **parts)
    return FinishedPage(text, "", faults, cautions)


def _cautions(record: RunRecord, summary: Summary, truth: Path, prediction: Path) -> tuple[Seen, list[str]]:
    """Returns which cases the run was trained on, and what a reader of the scores of other cases should know first."""
    names, images = [case["case"] for case in summary["metric_per_case"]], image_files(truth)
    voxels = spacings_of({name: images[name] for name in names if name in images})
    unlisted, told = unlisted_rows(prediction)
    seen = seen_by_runs(record, prediction, lambda run: trained_on(run, truth, names, prediction), unlisted)
    lines = [told, *other_classes(record, summary, truth), missing_line(summary["missing"]), *seen.sentences]
    lines += other_images(record, folder_of(truth), inputs_of(prediction), names)
    return seen, list(filter(None, [*lines, *unknown_runs(record, prediction), other_voxels(record, voxels)]))


@dataclass(frozen=True)
class _Scores:
    tiles: list[HeadlineTile]
    seen: str
    apart: Table | None
    classes: Table
    confusion: Table
    charts: list[Chart]
    step: str
    note: str
    about: str
    caution: str


def _scores(summary: Summary, positive: str | None, step: str, seen: Seen = NONE_SEEN) -> _Scores:
    """Returns the scores of a page: of the cases that are new to the run, if any are; others are shown alone."""
    groups, told = seen.apart(case["case"] for case in summary["metric_per_case"]) if seen != NONE_SEEN else ({}, "")
    each = {which: rescore(summary, own) for which, own in groups.items()} if told else {"": summary}
    mark, shown = next(iter(each.items()))
    apart, mark = seen_table({which: _row_of(one) for which, one in each.items()}), f"cases {mark}" if mark else ""
    shown = {**shown, "source": f"{summary['source']}{f' ({mark})' * bool(mark)}"}
    calibrated = calibration_diagrams(shown)
    diagrams = [*roc_diagrams(shown, positive), *calibrated]
    charts = draw_charts([replace(d, quantity=f"{d.quantity}{f', {mark}' * bool(mark)}") for d in diagrams], width=360)
    note = "" if calibrated else uncalibrated(shown)
    cautions = " ".join(filter(None, [caution_of_absent(shown), caution_of_guesses(shown)]))
    tiles = headline(shown) if not told or next(iter(each)) in SHOWN_LARGE else []
    tables = classes_table(shown, positive), confusion_table(shown)
    return _Scores(tiles, told, apart, *tables, charts, step, note, about_scores(shown), cautions)


def _row_of(summary: Summary) -> dict[str, Score]:
    """Returns the scores of a group of cases, each with its interval, and their number."""
    sure = {
        kind: words_of_interval(summary["intervals"].get(kind), fewest_cases(summary, kind))
        for kind in summary["scores"]
    }
    scores = {kind: Score(number(summary["scores"][kind]), 3, f" ({text})" * bool(text)) for kind, text in sure.items()}
    return scores | {"cases": Score(summary["cases"], 0)}


def headline(summary: Summary) -> list[HeadlineTile]:
    """Returns the main scores, with their intervals and the number of cases."""
    tiles = []
    for name, value in summary["scores"].items():
        sure = words_of_interval(summary["intervals"].get(name), fewest_cases(summary, name))
        tiles.append(HeadlineTile(name, Score(number(value), 3), f"{sure}{', ' * bool(sure)}n = {summary['cases']}"))
    return tiles


def classes_table(summary: Summary, positive: str | None = None) -> Table:
    """Returns the scores of each class; of two classes those of the positive one, as the other's mirror them."""
    rows, names = [], list(summary["names"])
    has_areas = len(names) > 2  # of two classes the areas are the same, which is above
    shown = names if has_areas else [names[positive_class(names, positive)]]
    for name, row in ((name, summary["classes"][name]) for name in shown):
        cells: list[Score | str] = [Score(row["cases"], 0)]
        for share, count in shares_of(summary, name):
            cells += [share, describe_share(share.value, count) or "–"]
        rows.append(TableRow(name, [*cells, *[Score(number(row["AUC"]), 3, doubt_of_area(summary, name))] * has_areas]))
    of_share = ("share", "95 % interval")
    heads = [TableHead("Class"), TableHead("Cases"), TableHead("Sensitivity", of_share)]
    heads += [TableHead("Specificity", of_share), *[TableHead("AUC")] * has_areas]
    mirrored, against = next((name for name in names if name not in shown), ""), "Each class against all others. "
    if mirrored:
        against = f"{mirrored} has no row: its sensitivity is the specificity above, and vice versa "
        against += "(--positive chooses it instead). "
    _, probabilities = _arrays(summary)
    ties = int(((probabilities == probabilities.max(1, keepdims=True)).sum(1) > 1).sum())
    tied = f"; if several are equal ({quantity(ties, 'case')}), the first of {', '.join(names)}" if ties else ""
    note = (
        f"Scores of {quantity(summary['cases'], 'case')}: {summary['source']}. {against}"
        f"The predicted class is the one with the highest probability{' (above 0.5)' * (not has_areas)}{tied}. "
        f"The intervals are Wilson's; none is given for fewer than {FEW} cases."
    )
    return Table("metrics", heads, rows, "class", note)


def confusion_table(summary: Summary) -> Table:
    """Returns how many cases of each class were predicted as each class."""
    names = summary["names"]
    rows = [TableRow(n, [Score(count, 0) for count in counts]) for n, counts in zip(names, summary["confusion"])]
    note = "Number of cases: a row for each true class, a column for each predicted one. The diagonal is correct."
    return Table("confusion", [TableHead("True class"), TableHead("Predicted class", tuple(names))], rows, note=note)


def _arrays(summary: Summary) -> tuple[np.ndarray, np.ndarray]:
    """Returns true class numbers ``n`` and probabilities ``n k`` of the cases."""
    names, cases = list(summary["names"]), summary["metric_per_case"]
    truth = np.array([names.index(case["truth"]) for case in cases])
    return truth, np.array([case["probabilities"] for case in cases], float)


def roc_diagrams(summary: Summary, positive: str | None = None) -> list[Diagram]:
    """Returns the ROC curves, one for each class; of two classes that of the positive one, as they mirror each other.

    - ``positive``: the class whose curve is drawn; None: of two classes the one that is not called healthy
    """
    (truth, probabilities), names = _arrays(summary), list(summary["names"])
    shown = [positive_class(names, positive)] if positive is not None or len(names) == 2 else range(len(names))
    lines, colours = [Line("chance", (0.0, 1.0), [(0.0, 1.0)], dashed=True)], colours_of(names)
    for at in shown:
        if 0 < int((truth == at).sum()) < len(truth):
            places, values = roc_points(truth == at, probabilities[:, at])
            label = roc_label(names[at], truth == at, probabilities[:, at])
            lines.append(Line(label, places, [values], style=1, colour=colours[names[at]]))
    title = f"ROC curve of {names[shown[0]]}" if len(shown) == 1 else "ROC curves, each class against all others"
    styles = (CHANCE, LineStyle(INK))
    diagram = Diagram(title, "1 − specificity", lines, low=0.0, high=1.0, styles=styles, up="sensitivity", square=True)
    return [diagram] if len(lines) > 1 else []


def calibration_diagrams(summary: Summary) -> list[Diagram]:
    """Returns the share of correct predictions over the probability of the predicted class; none of few cases.

    A tenth of the probabilities with fewer than ``FEW`` cases is left out, and a single tenth draws no curve.
    """
    points = [point for point in calibration(*_arrays(summary)) if point[2] >= FEW]
    if len(points) < 2:
        return []
    label = f"cases per dot: {', '.join(str(count) for _, _, count in points)} (of {summary['cases']})"
    title = f"Calibration (mean error {number(summary.get('calibration_error')):.3f})"
    axes = "probability of the predicted class", "share of correct predictions"
    return [reliability_diagram(title, *axes, {label: points})]


def uncalibrated(summary: Summary) -> str:
    """Returns why calibration is not drawn, and how often each tenth of the probability is correct."""
    tenths = sorted(calibration(*_arrays(summary)), key=lambda tenth: -tenth[2])
    listed = ", ".join(f"{round(right * count)} of {count} at {given:.2f}" for given, right, count in tenths)
    return (
        f"No calibration curve: it needs two bins of probability (such as 0.8 to 0.9) with {FEW} cases or more. "
        f"Correct predictions in each bin, and the mean probability of the bin: {listed}."
    )


def pictured_cases(
    record: RunRecord,
    summary: Summary,
    count: int,
    explained: Path | None,
    predicted: Stamps | None,
    neurological: bool,
    gaps: list[str],
) -> list[WorstCase]:
    """Returns the worst cases, each with three planes and, where predict explained it, what was seen.

    - ``explained``: predict's folder of explanations; a case that it lacks is drawn from the run's prepared data
    - ``predicted``: the files that each case was predicted from, None for the run's own validation
    """
    cases, failed = [], dict[str, DataError]()
    for case in worst_cases(summary, count):
        try:
            picture = _picture(record, case["case"], explained, predicted, neurological)
            cases.append(WorstCase(case["case"], verdict_on(case, summary), picture))
        except DataError as error:
            failed[case["case"]] = error
    gaps += failed_line(failed)
    return cases


def _picture(record: RunRecord, case: str, explained: Path | None, predicted: Stamps | None, neurological: bool) -> str:
    """Returns a case's picture as base64: predict's, else one of the prepared image alone."""
    if explained is not None and (path := explained / f"{case}.png").is_file():
        return base64.b64encode(path.read_bytes()).decode()
    if "prepared" not in record.dataset:
        raise DataError(record.path / "config.json", "names no prepared data")
    cache = open_cache(record.dataset["prepared"])
    if predicted is not None:
        cache = same_cases(cache, predicted)
    if case not in cache.cases:
        raise DataError(cache.path, f"has no image that {case} was predicted from; predict with --explain to see it")
    image = cache.cases[case].image
    with tempfile.TemporaryDirectory() as folder:
        path, nothing = Path(folder, "case.png"), np.zeros(image.shape[1:], np.float32)
        title = f"{case} {GENERATED}" if record.has_phantoms else case
        own = cache.cases[case].properties
        slices = slices_of(own.geometry, own.box, own.shape)
        draw_evidence(path, title, np.asarray(image[0]), nothing, own.spacing, slices, neurological)
        return base64.b64encode(path.read_bytes()).decode()


MOST_MAPS = 100  # that are read for what they have in common, which takes up to a second each


def places_of_maps(summary: Summary, explained: Path) -> dict[str, Place]:
    """Returns where the maximum of each case's map is, if predict wrote one that can be read."""
    places, names = dict[str, Place](), [case["case"] for case in summary["metric_per_case"]]
    files = {name: path for name in names if (path := explained / f"{name}.nii.gz").is_file()}
    for name in list(files)[:MOST_MAPS]:
        with suppress(DataError):
            volume = read_volume(files[name])
            place = place_of_maximum(to_canonical(volume.array[0], volume.geometry.orientation))
            places |= {name: place} if place else {}
    return places


def predicted_classes(summary: Summary) -> dict[str, str]:
    """Returns the class that each case was given."""
    return {case["case"]: case["class"] for case in summary["metric_per_case"]}


def names_of_maps(summary: Summary, prediction: Path | None) -> dict[str, str]:
    """Returns what the map of each case shows: its method and the class that was predicted."""
    try:
        way = json.loads(read_whole((prediction or Path()) / RECORD))["explained"]
    except (OSError, ValueError, KeyError, TypeError):
        way = ""  # written by an older version
    method = f"{MAPS[way]} map" if way in MAPS else "map of the evidence"
    return {case: f"{method} for {given}" for case, given in predicted_classes(summary).items()}


def class_viewer(
    record: RunRecord,
    names: Sequence[str],
    explained: Path | None,
    truth: Path | None,
    neurological: bool,
    maps: Mapping[str, str],
) -> CaseSection | None:
    """Returns a viewer of cases with their maps; None if no image of theirs is known.

    - ``truth``: a data set with the cases' images; None: the run's own. ``maps``: what each case's map shows, in words
    """
    try:
        images = Images(recipe_of(record), None)
        if truth is None:
            images = find_images(record, None, None, None, [])
        elif truth.is_dir():  # without the cache: the run's own cases may have the names of these
            predicted = inputs_of(explained.parent) if explained else None
            images = replace(find_images(record, truth, None, predicted, []), cache=None)
    except DataError:
        return None
    images, shown = with_wide_ct(images, record, names), list[ShownCase]()
    for name in names:
        try:
            if (image := images.of(name)) is not None:
                shown.append(_viewed(name, image, record.dataset["modalities"], explained, maps[name]))
        except DataError:
            continue  # its picture is on the page all the same
    sized = [(case, case.embedded(BUDGET // len(shown))) for case in shown]
    return viewer_section(sized, (), neurological) if shown else None


def _viewed(name: str, image: FoundImage, modalities: Sequence[str], explained: Path | None, about: str) -> ShownCase:
    """Returns a case as the viewer shows it, with the map that predict wrote of it, if there is one; ``about``: it."""
    properties, (pictures, ranges, is_ct) = image.properties, greys_of(image, list(map(str, modalities)))
    nothing, more = np.zeros(properties.shape, np.uint8), dict[str, Any]()
    if explained is not None and (path := explained / f"{name}.nii.gz").is_file():
        volume = read_volume(path)
        own = np.clip(crop(to_canonical(volume.array[0], volume.geometry.orientation), properties.box), 0, 1)
        seen, body = with_maximum(resample(own, properties.shape), own.max()), body_of(image.image[0])
        more = {"heat": np.rint(255 * seen).astype(np.uint8), "heat_name": about, "at": evidence_planes(seen, body)}
        more["heat_caution"] = caution_about(seen, body)
    slices = slices_of(properties.geometry, properties.box, properties.shape)
    return ShownCase(name, pictures, nothing, nothing, properties.spacing, slices, "", ranges, is_ct, **more)
