"""The pages about runs that label voxels: scores by class and case, the worst cases in planes and a viewer."""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.preparation.recipe import IN_HU
from seqpar.prediction.class_statistics import NAME as STATISTICS
from seqpar.prediction.class_statistics import read_statistics
from seqpar.prediction.prediction_folder import RECORD, SERIES, inputs_of, replaced_line, voxels_of
from seqpar.report.cases import case_section, load_worst
from seqpar.report.cautions import (
    begun_unknown,
    cautions_of_validation,
    chosen_on_them,
    of_open_sides,
    other_values_of,
    part_labelled,
    reached_and_found,
    reached_in_validation,
    records_behind,
    too_much,
    trained_on_some,
)
from seqpar.report.curves import count_of, number
from seqpar.report.images import changed_since, count_shown, find_images, other_voxels, spacings_of, unlisted_maps
from seqpar.report.plots import Chart, draw_charts, name_of_run
from seqpar.report.record import (
    CaseScores,
    RunRecord,
    measure_folder,
    read_scores,
    row_of_taken,
    score_folders,
    step_sentence,
)
from seqpar.report.run_page import (
    FinishedPage,
    averaged_runs,
    how_predicted,
    is_neurological,
    is_validation,
    made_by,
    not_yet_predicted,
    other_run,
    render_run,
    try_reading,
)
from seqpar.report.tables import (
    DISPUTED_ML,
    HeadlineTile,
    Score,
    Table,
    TableHead,
    TableRow,
    absent_of,
    dice_table,
    last_validation,
    metrics_table,
    only_one_map,
    predicted_volumes,
    reader_score,
    score_strips,
    sizes_table,
    tiles_of_steps,
    volumes_table,
    voxel_cautions,
)
from seqpar.runs.metrics_tail import with_other_weights
from seqpar.scores.comparison import FEW as FEW_CASES
from seqpar.scores.comparison import TOO_FEW, about_scans, interval_of_mean, what_is_low
from seqpar.scores.label_classes import Labels, with_declared_by
from seqpar.scores.label_files import MAX_NAMED, dataset_at, match_cases, missing_line
from seqpar.scores.label_scores import (
    describe_consensus,
    why_no_dice,
    without_nan,
)
from seqpar.tasks.case_evaluation import (
    seen_by_runs,
    seen_table,
    unknown_runs,
)
from seqpar.tasks.seen_cases import NONE_SEEN, SHOWN_LARGE, Seen
from seqpar.tasks.segment.evaluation import about_calibration, calibrate, calibration_diagram, trained_on
from seqpar.tasks.segment.label_map_folder import DICOM_SEG, SavedProbabilities
from seqpar.tasks.training_data import copies_of_run, sides_of_each, sides_of_run
from seqpar.text import name_images, quantity

FOLDER = Path(__file__).parent
RESEARCH = "For research; not a medical device."
NO_SPREAD = 5e-4  # of a Dice: an interval of less would look like certainty
UNLABELLED = (
    "Where the truth is not labelled (ignore label), nothing counts: neither scores nor the volumes of these tables "
    "include it. What is predicted there is neither right nor false; pictures hatch it, and draw it all the same."
)
FEW = 12  # cases whose table is open from the start


def segment_page(options: argparse.Namespace, record: RunRecord) -> FinishedPage:
    """Returns the page about a run that labels voxels; ``options``: of report."""
    if options.positive is not None:
        raise ValueError(f"--positive: {record.path} labels voxels, and draws no ROC curve: remove it")
    scored, gaps = None, list[str]()
    assert (labels := record.labels) is not None
    alone = options.prediction is not None and options.truth is None
    validated = is_validation(options.prediction, record)
    behind = records_behind(options.prediction) if options.prediction is not None else []
    _refuse_other_classes(record, behind)
    if options.truth is not None:
        labels = with_declared_by(options.truth, dataset_at(options.truth), labels)
        record = replace(record, labels=labels)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        workers = min(8, cores)
        scored = score_folders(options.truth, options.prediction, labels, workers, options.common)
    elif options.prediction is not None:
        scored = measure_folder(options.prediction, labels)
    else:
        scored = try_reading(lambda: read_scores(record.path), gaps)
    unlisted, of_unlisted = unlisted_maps(options.prediction) if options.prediction else ([], "")
    cases, shown = None, []
    if scored and options.cases:
        predicted = None if validated else inputs_of(options.prediction)
        images = find_images(record, options.images, options.truth, predicted, gaps)
        shown = load_worst(record, scored, options.cases, images, gaps)
        gaps += [] if options.truth else changed_since(record, scored, {case.name for case, _ in shown})
    if scored and shown:
        cases = case_section(record, scored, shown, is_neurological(options.neurological, record))
    every, seen, apart, of_which, which = scored, NONE_SEEN, None, "", ""
    if scored and options.truth is not None and not validated:
        truths = {case.name: case.truth for case in scored.cases}
        of_run = partial(trained_on, truths=truths, prediction=options.prediction)
        seen = seen_by_runs(record, options.prediction, of_run, unlisted)
        scored, apart, of_which, which = _of_new(scored, seen)
    if cases:
        marked = [replace(view, caption=f"{seen.mark(view.name)}{view.caption}") for view in cases.shown]
        cases = replace(cases, shown=marked)
    tiles, note = headline(record, scored) if not alone and which in ("", *SHOWN_LARGE) else ([], "")
    step = scored.step if scored else 0
    best = row_of_taken(record)
    tiles = tiles_of_steps(tiles, step, best, "dice")
    count = len(scored.cases if scored else record.dataset["held_out"])
    are_theirs = scored is not None and (not step or best is None or best["step"] == step)  # of what the tiles show
    rows = [case.scores for case in scored.cases] if scored else []
    of_class = {tile.name: [row[tile.name] for row in rows if tile.name in row] for tile in tiles}
    low = [what_is_low(tile.score.value, of_class[tile.name], are_theirs, count) for tile in tiles]
    tiles = [tile._replace(caution=caution) for tile, caution in zip(tiles, low)]
    colours = record.class_colours(scored.classes if scored else ())
    tables: dict[str, object] = {"metrics": last_validation(record), "sizes": None, "intensities": None, "series": None}
    tables["readers"] = None
    if scored and alone:
        schemes = (record.dataset.get("recipe") or {}).get("schemes", ())
        intensities = _intensities(options.prediction, scored, schemes, gaps)
        tables |= {"metrics": predicted_volumes(scored), "intensities": intensities}
        tables["series"] = _series(options.prediction, scored)
    elif scored:
        metrics = metrics_table(scored)
        open_parts = [UNLABELLED] * (labels.ignore is not None)
        way = "" if unlisted else how_predicted(options.prediction, record)
        told = [metrics.note, *open_parts, way]
        metrics = replace(metrics, note=" ".join(filter(None, told)))
        tables |= {"metrics": metrics, "sizes": sizes_table(scored), "volumes": volumes_table(scored)}
        tables |= {
            "strips": score_strips(scored, colours),
            "has_hollow": any(only_one_map(row) for case in scored.cases for row in case.scores.values()),
            "dice": dice_table(scored),
            "is_short": len(scored.cases) <= FEW,
            "readers": _readers(scored),
        }
    faults: Sequence[str] = scored.faults if scored else ()
    is_own = alone and not averaged_runs(options.prediction) and not other_run(options.prediction, record.path)
    cautions = _reached_by(options.prediction, record if is_own else None) if alone else []
    cautions += not_yet_predicted(options.prediction) if alone else []
    if alone and scored:
        names = [case.name for case in scored.cases if case.name not in unlisted]
        for one in [record] if is_own else behind:
            cautions += trained_on_some(one, names, name_of_run(one.path, ""), voxels_of(options.prediction))
    if scored and not alone:
        missing = filter(None, [missing_line(scored.missing)])
        cautions = chosen_on_them(record)
        if options.truth is not None:
            unknown = [] if validated else [*begun_unknown(record), *unknown_runs(record, options.prediction)]
            told = cautions_of_validation(record) if validated else seen.sentences
            cautions = [*unknown, *missing, *told, *other_values_of(options.truth, labels)]
        cautions += [f"{quantity(len(faults), 'case')} could not be scored, as listed below the tables."] * bool(faults)
        scans = about_scans([case.name for case in scored.cases], {})
        cautions += filter(None, [scans, too_much(scored), part_labelled(scored)])
    cautions += filter(None, [of_unlisted, replaced_line(options.prediction)] if options.prediction else [])
    cautions += _of_sides(options.prediction, record)
    cautions += of_open_sides(cases.volumes) if cases else []
    if every:
        removed = {case.name: case.truth for case in every.cases if case.truth and not case.prediction.is_file()}
        voxels = spacings_of({case.name: case.prediction for case in every.cases} | removed)
        coarse = voxel_cautions(every, [side for own in voxels.values() for side in own])
        others = [other_voxels(one, voxels) for one in behind or [record]] if options.prediction is not None else []
        cautions += filter(None, [*dict.fromkeys(others), coarse])
    calibration = ([], "") if not scored or alone else _calibration(options, scored, labels, colours)
    parts: dict[str, Any] = {
        "calibration": calibration[0],
        "about_calibration": calibration[1],
        "tiles": tiles,
        "note": note,
        "seen": of_which,
        "apart": apart,
        "step": step_sentence(step, record),
        "unused": with_other_weights(step, record.weights.step),
        "of_which": f", after step {step:,}" * bool(step) + f" {which}" * bool(which),
        "is_scored": scored is not None and not alone,
        "is_single": scored is not None and len(scored.cases) == 1,
        "cases": cases,
        **tables,
    }
    if scored and alone and len(scored.cases) == 1:
        parts["subject"] = scored.cases[0].name
    parts |= {"truth": options.truth, "prediction": options.prediction, "images": options.images}
    parts["unlisted"] = unlisted
    text = render_run(FOLDER, record, gaps, faults, [RESEARCH] * alone + cautions, classes=list(colours), **parts)
    own = faults if options.prediction is not None else ()
    return FinishedPage(text, f"{count_shown([bool(case.images) for case, _ in shown])}, ", own, cautions)


def _of_sides(prediction: Path | None, record: RunRecord) -> list[str]:
    """Returns sentences if the training of a run that made a page's label maps exchanged left and right, or if these
    are means over copies that do.
    """
    if is_validation(prediction, record):
        return [*sides_of_run(record), *copies_of_run(record)]
    assert prediction is not None
    copies = copies_of_run(record, [made.get("settings", {}) for made in made_by(prediction)])
    if not averaged_runs(prediction) and not other_run(prediction, record.path):
        return [*sides_of_run(record), *copies]
    behind = {str(one.path): one for one in records_behind(prediction)}
    return [*sides_of_each(behind, with_copies=False), *copies]


def _refuse_other_classes(record: RunRecord, behind: Sequence[RunRecord]) -> None:
    """Raises ValueError if a run behind a prediction, whose label maps a page shows, gave labels other names."""
    for one in behind:
        if one.labels and record.labels and one.labels.classes != record.labels.classes:
            told = f"{one.path} predicted these label maps, whose values stand for other classes than in {record.path}"
            raise ValueError(f"--prediction: {told}: name {one.path} as the run of the page")


def _intensities(prediction: Path, scored: CaseScores, schemes: Sequence[str], gaps: list[str]) -> Table | None:
    """Returns the means and standard deviations that predict wrote of the shown label maps; None without any.

    Lines of label maps that have changed since are left out, and named in ``gaps``.

    - ``schemes``: how the run normalises each kind of image, which tells a CT
    """
    try:
        kinds, lines = read_statistics(prediction)
    except DataError as error:
        gaps.append(f"{error}.")
        return None
    rows, changed = list[TableRow](), list[str]()
    are_hu = [scheme in IN_HU for scheme in schemes] if len(schemes) == len(kinds) else [False] * len(kinds)
    for case in scored.cases:
        for name, volumes in case.scores.items():
            if (case.name, name) not in lines:
                continue
            ml, *numbers = lines[case.name, name]
            if not math.isclose(ml, volumes["VolumeMl"], rel_tol=1e-4, abs_tol=1e-6):
                changed.append(f"{name} of {case.name}")
            else:
                own = zip(numbers[: len(kinds)], numbers[len(kinds) :], are_hu)
                rows.append(TableRow(case.name, [name, *(_mean_and_deviation(*each) for each in own)]))
    if changed:
        what = f"{prediction / STATISTICS} is of other label maps than these: {', '.join(changed[:MAX_NAMED])}"
        gaps.append(f"{what}{', …' * (len(changed) > MAX_NAMED)} cannot be shown.")
    heads = list(map(TableHead, ("Case", "Class", *name_images(kinds))))
    note = (
        "Mean ± standard deviation over the voxels of each predicted class, in the image file's own numbers (CT: HU), "
        f"from {prediction / STATISTICS}. MR has no unit: do not compare its numbers between scans. The standard "
        "deviation is that of the voxels and does not say how sure the mean is."
    )
    return Table("intensities", heads, rows, "case", note) if rows else None


def _series(prediction: Path, scored: CaseScores) -> Table | None:
    """Returns which DICOM series and study each case is, by names that identify nobody; None if none is known."""
    record = read_json(prediction / RECORD) if (prediction / RECORD).is_file() else {}
    named = record.get(SERIES, {}) if isinstance(record, dict) else {}
    known = [(case.name, named[case.name]) for case in scored.cases if case.name in named]
    rows = [TableRow(name, [own["study"], own["series"], f"{DICOM_SEG}/{name}.dcm"]) for name, own in known]
    note = (
        "Study and series are the first twelve digits of the SHA-256 of their UIDs: whoever has the series can tell "
        "that it is this one, and nobody else can tell whose it is. The DICOM segmentations themselves name the "
        "patient, as their series do."
    )
    return (
        Table("series", list(map(TableHead, ("Case", "Study", "Series", "File"))), rows, "case", note) if rows else None
    )


SHARED_CASES = " n: cases with such a score, as maps that both lack a class have no Dice. Compare scores of the same n."


def _readers(scored: CaseScores) -> tuple[Table, Table] | None:
    """Returns how well prediction and readers agree, by class and by case; None without several readers."""
    doubts = [case.doubt for case in scored.cases if case.doubt]
    if not (names := list(dict.fromkeys(name for doubt in doubts for name in doubt.readers))):
        return None
    mean, own = scored.summary["mean"], [f"Dice_{name}" for name in names]
    metrics = dict.fromkeys(["Dice", "ReaderDice", "InterReaderDice", *own], 3) | {DISPUTED_ML: 2}
    rows, differ = list[TableRow](), False
    for kind in scored.classes:
        found = {one: sum(not math.isnan(c.scores[kind].get(one, math.nan)) for c in scored.cases) for one in metrics}
        is_uneven = len({*found.values()}) > 1
        ends, differ = {one: f" (n = {n})" * is_uneven for one, n in found.items()}, differ or is_uneven
        rows.append(TableRow(kind, [reader_score(o, mean[kind], metrics[o], end) for o, end in ends.items()]))
    pairs = ("prediction and consensus", "prediction and a reader", "two readers")
    heads = [TableHead("Class"), TableHead("Mean Dice", pairs), TableHead("Mean Dice of the prediction with", names)]
    heads.append(TableHead("Mean disputed, ml"))
    note = (
        f"The consensus is {doubts[0].consensus}. How well two readers agree tells what to expect of a "
        "prediction and a reader. Disputed is the volume that some readers give to the class, and others do not."
        f"{SHARED_CASES * differ}"
    )
    shown = {"ReaderDice": 3, "InterReaderDice": 3, DISPUTED_ML: 2}
    cases = [
        TableRow(case.name, [reader_score(one, case.scores[kind], places)
                             for kind in scored.classes for one, places in shown.items()])
        for case in scored.cases
    ]  # fmt: skip
    columns = [TableHead("Case"), *(TableHead(kind, (*pairs[1:], "disputed, ml")) for kind in scored.classes)]
    return Table("readers", heads, rows, "class", note), Table("readers-per-case", columns, cases, "case")


def _mean_and_deviation(mean: float, sd: float, in_hu: bool) -> Score:
    """Returns both: whole HU, or the larger one with three digits; a class without a voxel has neither."""
    largest = max(abs(mean), sd)
    places = max(0, 2 - math.floor(math.log10(largest))) if math.isfinite(largest) and largest and not in_hu else 0
    return Score(mean, places, "" if math.isnan(sd) else f" ± {sd:.{places}f}")


def _calibration(
    options: argparse.Namespace, scored: CaseScores, labels: Labels, colours: Mapping[str, str]
) -> tuple[list[Chart], str]:
    """Returns the reliability diagram of predictions whose probabilities were written, and its text; none of others."""
    if options.truth is None:
        return [], ""
    own = {case.name for case in scored.cases}
    pairs = match_cases(options.truth, options.prediction, dataset_at(options.truth), own, options.common).pairs
    if not all(SavedProbabilities.of(pair.prediction) for pair in pairs):
        return [], ""
    faults = list[DataError]()  # of cases, which are those of their scores
    tenths, num_cases = calibrate(pairs, labels, 1, faults)
    lacking = ", ".join(name for name in labels.classes if name not in tenths)
    text = about_calibration(pairs) + f" No output of the network stands for {lacking}." * bool(lacking)
    diagram = calibration_diagram(tenths, num_cases, colours)
    return draw_charts([diagram] * bool(tenths), width=360), text


def _of_new(scored: CaseScores, seen: Seen) -> tuple[CaseScores, Table | None, str, str]:
    """Returns the scores of the cases that a page shows, next to the others', a sentence on which these are, and which.

    They are the new ones, if there are any.
    """
    groups, told = seen.apart(case.name for case in scored.cases)
    if not told:
        return scored, None, "", ""
    each = {which: scored.of(own, f"cases {which}") for which, own in groups.items()}
    which, shown = next(iter(each.items()))
    rows = {
        which: {f"mean Dice of {kind}": _mean_dice(one, kind) for kind in scored.classes} for which, one in each.items()
    }
    table = seen_table({which: row | {"cases": Score(len(groups[which]), 0)} for which, row in rows.items()})
    return shown, table, told, which


def _mean_dice(scored: CaseScores, name: str) -> Score:
    """Returns the mean Dice of a class with its interval."""
    values = without_nan(case.scores[name].get("Dice", math.nan) for case in scored.cases)
    mean = scored.summary["mean"][name].get("Dice", math.nan)
    return Score(mean, 3, f" ({sure})" if (sure := _how_sure(values)) else "")


def _how_sure(values: Sequence[float]) -> str:
    """Returns the interval of a mean Dice in words; "" if there is no Dice."""
    if len(values) < FEW_CASES:
        return TOO_FEW if values else ""
    low, high = interval_of_mean(values, low=0.0, high=1.0) or (0.0, 1.0)
    return f"{low:.3f} to {high:.3f}" if high - low >= NO_SPREAD else "all cases alike"


def _reached_by(prediction: Path, own: RunRecord | None) -> list[str]:
    """Returns what each run that predicted a folder reached in validation, as far as its folder is there; of ``own``,
    the only one, if it is the page's, also how cases counted whose truth lacked a class.
    """
    made = made_by(prediction)
    if own is not None:
        return reached_and_found(own, made[0] if made else {})
    by_run = {Path(one["run"]): one for one in made}  # of each its weights, and how it saw the cases
    return [
        text
        for run in records_behind(prediction)
        for text in reached_in_validation(run, f"run {name_of_run(run.path, '')}", by_run.get(run.path, {}))
    ]


def headline(record: RunRecord, scored: CaseScores | None) -> tuple[list[HeadlineTile], str]:
    """Returns the mean Dice of each class, with its interval and the number of cases, and what these are."""
    tiles, note = list[HeadlineTile](), "Mean Dice of each class over the cases"
    if scored and len(scored.cases) == 1:
        note = "Dice of a single case, which says little about others"
        rows = scored.cases[0].scores
        tiles = [
            HeadlineTile(name, Score(row.get("Dice", math.nan), 3), why_no_dice(row) or "n = 1")
            for name, row in rows.items()
        ]
    elif scored:
        note = (
            "Each large number is the mean Dice of a class over the n cases whose truth or prediction has it. The 95 % "
            f"confidence interval (Student's t; from {FEW_CASES} cases on; cut at 0 and 1) is for this mean, not for "
            "one patient"
        )
        for name in scored.classes:
            values = without_nan(case.scores[name].get("Dice", math.nan) for case in scored.cases)
            range_text = f"{_how_sure(values) or 'no case has a Dice'}, "
            mean = Score(scored.summary["mean"][name].get("Dice", math.nan), 3)
            zeros = absent_of(scored, name).predicted
            without = f" ({quantity(zeros, 'case')} counted as 0: none in the truth)" * bool(zeros)
            tiles.append(HeadlineTile(name, mean, f"{range_text}n = {len(values)}{without}"))
    elif record.held_out:
        last = record.held_out[-1]
        note += f" in the validation after step {last['step']:,}"
        scores, count = last.get("dice", {}).items(), count_of([last]).strip(" ()")
        tiles = [HeadlineTile(name, Score(number(value), 3), count) for name, value in scores]
    return tiles, f"{note}.{_compared_with(record, scored)}"


def _compared_with(record: RunRecord, scored: CaseScores | None) -> str:
    """Returns what a Dice compares with, if the truth has doubt: several readers, or probabilities; else ""."""
    if scored:
        told = next((case.doubt.consensus for case in scored.cases if case.doubt), "")
    else:
        data, readers = record.dataset, record.dataset.get("readers", ())
        told = describe_consensus(len(readers), bool(data.get("regions"))) if readers or data.get("soft_labels") else ""
    return f" It compares with {told}." if told else ""
