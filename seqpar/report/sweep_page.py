"""A page about a sweep: points in a table that can be sorted, curves, what each setting does, the best once more."""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from seqpar.data.errors import DataError
from seqpar.report.cautions import scored_on_training
from seqpar.report.curves import MOST_CURVES, number
from seqpar.report.images import about_grids, about_windows
from seqpar.report.plots import Strips, make_strips
from seqpar.report.record import RunRecord, read_record
from seqpar.report.rendering import render
from seqpar.report.several_runs import (
    Compare,
    cautions_about_each,
    curves_over_each_other,
    sentence_on_phantoms,
)
from seqpar.report.tables import mean_over
from seqpar.runs.run_folder import read_config
from seqpar.runs.run_status import describe_kill, weights_taken
from seqpar.runs.sweep_folder import (
    Point,
    Sweep,
    as_ended,
    describe_mixed,
    format_value,
    how_mixed,
    odd_points,
    read_sweep,
    refresh_points,
    validated_on,
)
from seqpar.settings.config import SETTINGS
from seqpar.terminal import next_command
from seqpar.text import flag_name, rounded
from seqpar.weights.facts import cases_that_differ, changed_between, several_data

NUMBERS = {"score": 3, "at": 0, "loss": 3, "step": 0, "seconds": 0}  # columns with their decimals
HEADS = {"at": "at step", "loss": "training loss", "step": "steps done", "seconds": "seconds"}


def page_of_sweep(out: Path, compare: Mapping[str, Compare]) -> str:
    """Returns the whole page of a sweep's folder.

    - ``compare``: compares the runs of a task, by the task's name
    """
    sweep, name = refresh_points(out, read_sweep(out)), out.resolve().name
    killed = (as_ended(point, "killed") if describe_kill(out / point.name) else point for point in sweep.points)
    sweep = replace(sweep, points=tuple(killed))
    ranked = sweep.ranked
    best, records, gaps = sweep.best, dict[str, RunRecord](), list[str]()
    for point in ranked[:MOST_CURVES]:
        try:
            records[point.name] = read_record(out / point.name)
        except (DataError, ValueError) as error:
            gaps.append(f"{point.name} has no curves: {error}.")
    gaps += [_why_not_over(point) for point in sweep.points if not point.is_over]
    for point in sweep.points:
        taken = weights_taken(out / point.name)
        gaps += [f"{point.name}: {told}" for told in (taken.not_the_best, taken.describe_lost()) if told]
    numbers = validated_on(out, sweep)
    over = sum(point.is_over for point in sweep.points)
    headline = f"{over} of {len(sweep.points)} points have ended."
    if best:
        described = sweep.describe_best(best)
        headline += f" {described[0].upper()}{described[1:]}."
        rows = records[best.name].held_out if best.name in records else ()
        own = (dict(row["dice"]) for row in reversed(rows) if row.get("step") == best.at and "dice" in row)
        dice: dict[str, float] = next(own, {})
        of_classes = mean_over(f"{name} {rounded(number(value), 3)}" for name, value in dice.items())
        headline += f" {of_classes} Each of these is a mean over cases." * bool(of_classes)
    return render(
        "sweep.html",
        title=name if name.lower().startswith("sweep") else f"Sweep {name}",
        generated=sentence_on_phantoms(records),
        headline=headline,
        lead=_lead(records, ranked[:2], compare, numbers),
        cautions=[
            *odd_points(out, sweep),
            *_of_changed_data(records.values()),
            *_as_sentence(describe_mixed(sweep, numbers)),
            *about_grids(records, "The scores that order the points were measured there too."),
            *about_windows(records),
            *scored_on_training(records, "such a score says nothing about new cases"),
            *cautions_about_each(records),
            *_of_their_task(records, compare),
        ],
        best=best.name if best else "",
        again=_again(out, best),
        gaps=gaps,
        heads=["point", *map(flag_name, sweep.varied()), "state", sweep.score_name, *HEADS.values()],
        points=_points(sweep),
        score_name=sweep.score_name,
        effects=_effects(sweep),
        curves=f"Curves of the {MOST_CURVES} points with the highest scores" if len(ranked) > MOST_CURVES else "Curves",
        training=curves_over_each_other(records),
        png=_picture(out / "sweep.png"),
    )


def _of_changed_data(records: Iterable[RunRecord]) -> list[str]:
    """Returns sentences if points were not trained and scored on one state of one data set."""
    described = [record.dataset for record in records]
    told, several = changed_between(*described), several_data(*described)
    changed = f"{told}: points trained before the change cannot be compared with those after it."
    mixed = f"{several}: their scores cannot be compared"
    return [changed] * bool(told) + (_as_sentence(mixed) if several else [])


def _of_their_task(records: Mapping[str, RunRecord], compare: Mapping[str, Compare]) -> list[str]:
    """Returns what a comparison of the points says first, such as of sides that training exchanged."""
    tasks = {record.network_settings.task for record in records.values()}
    return [*compare[tasks.pop()](records, []).cautions] if len(tasks) == 1 and tasks <= compare.keys() else []


def _as_sentence(told: str) -> list[str]:
    return [f"{told[0].upper()}{told[1:]}."] if told else []


def _lead(
    records: Mapping[str, RunRecord],
    first: Sequence[Point],
    compare: Mapping[str, Compare],
    numbers: Mapping[str, int],
) -> str:
    """Returns how far the best validations of the first two points are apart, case by case, and how sure that is.

    Scores of single cases are those of the last validations, so nothing is known where the best was another.

    - ``numbers``: as ``validated_on`` returns them
    """
    known = {point.name: records[point.name] for point in first if point.name in records}
    if len(known) < 2:
        return ""
    task = next(iter(known.values())).network_settings.task
    if _are_of_other_cases(known, numbers):
        told = f"{' and '.join(known)}, the first two points, {how_mixed(task, first)}"
        return f"{told}: their scores are not compared case by case."
    unknown = "Whether the first two points differ by more than chance is not known: "
    earlier = [point.name for point in first if point.at != known[point.name].held_out[-1]["step"]]
    if earlier:
        was = f"{' and '.join(earlier)} had {'its' if len(earlier) == 1 else 'their'} best before"
        return f"{unknown}scores of single cases are kept only of the last validation, and {was}."
    sentences = compare[task](known, []).sentences
    if not sentences:
        return f"{unknown}they share no scores of cases."
    return f"{sentences[0]} {LEAD}"


def _are_of_other_cases(records: Mapping[str, RunRecord], numbers: Mapping[str, int]) -> bool:
    """Returns whether points are known to have been scored on other cases or labels.

    - ``numbers``: as ``validated_on`` returns them; of points of earlier versions, their data tell
    """
    known = {numbers[name] for name in records if name in numbers}
    if len(records) == sum(name in numbers for name in records):
        return len(known) > 1
    described = [record.dataset for record in records.values()]
    held_out = {str(case) for own in described for case in own["held_out"]}
    return bool(several_data(*described) or held_out & {*cases_that_differ(*described)})


LEAD = "Other seeds may change the order, and the first of several points tends to look better than it is."


def _why_not_over(point: Point) -> str:
    if point.state == "killed":
        return f"{point.name} was killed after step {point.step:,}."
    return f"{point.name} {'has not begun' if point.state == 'open' else f'is {point.state}'}. {point.why}".rstrip()


class SweepCell(NamedTuple):
    """A cell of the table of points, which sweep.js sorts by ``key``."""

    text: str
    key: object
    is_number: bool


class PointRow(NamedTuple):
    name: str
    cells: Sequence[SweepCell]


def _points(sweep: Sweep) -> list[PointRow]:
    """Returns a row for each point, the best first."""
    ranked = sweep.ranked
    rows = []
    for point in (*ranked, *(point for point in sweep.points if point not in ranked)):
        cells = [_cell(point.name, point.name)]
        cells += [
            _cell(point.settings.get(name, ""), format_value(point.settings.get(name, "–"))) for name in sweep.varied()
        ]
        cells.append(_cell(point.state, point.state))
        shown = point if not math.isnan(point.score) else replace(point, at=math.nan)  # type: ignore[arg-type]
        cells += [_number(getattr(shown, name), places) for name, places in NUMBERS.items()]
        rows.append(PointRow(point.name, cells))
    return rows


def _cell(value: object, text: str) -> SweepCell:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return SweepCell(text, value if is_number else text, is_number)


def _number(value: float, places: int) -> SweepCell:
    return SweepCell("–", "", True) if math.isnan(value) else SweepCell(f"{value:,.{places}f}", value, True)


class Effect(NamedTuple):
    """The scores of all points by a setting: its value with mean, lowest, highest and number.

    The values come as in the drawing; where they are too many for one, the best first.
    """

    name: str
    about: str
    strips: Strips | None
    rows: Sequence[tuple[str, Sequence[str]]]


def _effects(sweep: Sweep) -> list[Effect]:
    """Returns the effect of each setting in which points differ."""
    effects = []
    for name, of_values in sweep.main_effects().items():
        title = f"{sweep.score_name[:1].upper()}{sweep.score_name[1:]} by {flag_name(name)}"
        strips = make_strips(title, of_values, 0.0, 1.0) if len(of_values) <= MOST_CURVES else None
        rows = []
        by_mean = sorted(of_values.items(), key=lambda item: -fmean(score for score, _ in item[1]))
        for value, pairs in of_values.items() if strips else by_mean:
            scores = [score for score, _ in pairs]
            numbers = fmean(scores), min(scores), max(scores)
            rows.append((value, [*(f"{number:.3f}" for number in numbers), str(len(scores))]))
        effects.append(Effect(flag_name(name), SETTINGS[name].help if name in SETTINGS else "", strips, rows))
    return effects


def _again(out: Path, best: Point | None) -> str:
    """Returns the command that trains the best point once more; "" if there is none."""
    if best is None:
        return ""
    try:
        content = read_config(out / best.name)
        command, layout = list(content["history"][0]["command"][1:]), content["layout"]
        ranks = int(layout["ranks"]) if layout["data"] > 1 else 1  # those of a single group are started by train
    except (ValueError, KeyError, IndexError, TypeError):
        return ""
    at = command.index("--out") if "--out" in command else len(command)
    return next_command("train", *command[:at], "--out", f"{out / best.name}-again", ranks=ranks)


def _picture(path: Path) -> str:
    """Returns sweep.png as base64, "" where it is missing."""
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return ""
