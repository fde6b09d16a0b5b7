"""The page about several runs: curves over each other, settings that differ, scores and cases side by side."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, TypeVar

from seqpar.data.errors import DataError
from seqpar.report.curves import OF_RUNS, Diagram, Line, count_of, number, step_axis
from seqpar.report.planes import RUN_COLOURS, colours_of
from seqpar.report.plots import Chart, draw_charts, make_strips
from seqpar.report.record import RunRecord, above_scores, chosen_on_them
from seqpar.report.rendering import render
from seqpar.report.run_page import format_setting, verdict, weak_start, what_is_unlearned
from seqpar.report.tables import Table, TableHead, TableRow
from seqpar.runs.metrics_tail import ERRORS, SCORES, score_of, task_of_row
from seqpar.scores.comparison import FEW, describe_interval, interval_of_mean
from seqpar.settings.config import SETTINGS
from seqpar.settings.rules import setting_applies
from seqpar.text import quantity

T = TypeVar("T")

SAME_DATA = ("name", "modalities", "labels", "volume_classes")  # of config.json
NOT_A_SETTING = ("out", "resume", "again", "take_over", "dry_run")  # where and how a run was started


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Returns a name for each run: its folder's, with those above it where several have the same."""
    paths = [record.path.resolve() for record in records]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"{paths[0]} was named twice: name each run once")


class Dots(NamedTuple):
    """What ``make_strips`` draws: a row of dots for each run."""

    title: str
    rows: Mapping[str, Sequence[tuple[float, str]]]
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """What a task says of its runs on a page about several.

    - ``count``: the runs that have scores of cases
    - ``scores``: a table, or a sentence instead
    - ``cases``: the same; "" if fewer than two runs have any; ``sentences`` and ``dots`` are above it
    """

    count: int
    scores: Table | str
    cases: Table | str
    sentences: Sequence[str] = ()
    dots: Sequence[Dots] = ()


Compare = Callable[[Mapping[str, RunRecord], list[str]], Comparison]


def read_all(records: Mapping[str, RunRecord], read: Callable[[RunRecord], T], gaps: list[str]) -> dict[str, T]:
    """Returns the scores of all runs that have any; adds to the gaps why the others have none."""
    scored = dict[str, T]()
    for name, record in records.items():
        try:
            scored[name] = read(record)
        except DataError as error:
            gaps.append(f"{name}: there are no scores of the cases: {error}.")
    return scored


def page_of_several(records: Sequence[RunRecord], compare: Mapping[str, Compare]) -> tuple[str, int]:
    """Returns the whole page, and how many of the runs have scores of cases.

    - ``compare``: compares the runs of a task, by the task's name
    """
    classes = {name.lower() for record in records for name in record.class_colours(record.outputs)}
    names = (f"run {name}" if name.lower() in classes else name for name in names_of(records))
    named = dict(zip(names, records))
    gaps = [f"{name}: {gap}" for name, record in named.items() for gap in record.gaps]
    of_tasks: dict[Compare, dict[str, RunRecord]] = {}
    for name, record in named.items():
        of_tasks.setdefault(compare[record.network_settings.task], {})[name] = record
    comparisons = [compare_runs(of_task, gaps) for compare_runs, of_task in of_tasks.items()]
    colours, of_one = colours_of(named, RUN_COLOURS), " of the same task" * (len(comparisons) > 1)
    text = render(
        "comparison.html",
        title=f"Comparison of {len(records)} runs",
        runs={name: verdict(record) for name, record in named.items()},
        generated=sentence_on_phantoms(named),
        gaps=gaps,
        cautions=cautions_about(records) + chosen_on_them(*records) + cautions_about_each(named),
        uncompared=""
        if any(one.cases for one in comparisons)
        else f"Fewer than two runs{of_one} have scores of cases.",
        settings=settings_table(named),
        training=curves_over_each_other(named),
        comparisons=[(one, [make_strips(*dots, colours) for dots in one.dots]) for one in comparisons],
    )
    return text, sum(comparison.count for comparison in comparisons)


def cautions_about(records: Sequence[RunRecord]) -> list[str]:
    """Returns a sentence if curves of the runs cannot be compared, as they are of different data or tasks."""
    tasks = {record.network_settings.task for record in records}
    data = {json.dumps([record.dataset.get(part) for part in SAME_DATA]) for record in records}
    if len(tasks) > 1 or len(data) > 1 or _differ_in_files(records):
        text = "These runs were trained on different data or tasks; their curves cannot be compared."
        return [f"{text} Cases with the same name may be different cases."]
    if len({tuple(sorted(map(str, record.dataset["held_out"]))) for record in records}) > 1:
        return ["These runs held out different cases; their curves on held-out cases cannot be compared."]
    return []


def _differ_in_files(records: Sequence[RunRecord]) -> bool:
    """Returns whether cases with the same name, prepared in the same way, have other voxels in some of the runs."""
    seen: dict[tuple[str, str], str] = {}
    for record in records:
        way = json.dumps(record.dataset.get("recipe"))
        for name, digest in (record.dataset.get("digests") or {}).items():
            if seen.setdefault((way, name), digest) != digest:
                return True
    return False


def sentence_on_phantoms(records: Mapping[str, RunRecord]) -> str:
    """Returns what stands above the scores of runs on phantoms; "" if none is."""
    names = [name for name, record in records.items() if record.has_phantoms]
    if len(names) < len(records):
        return f"On generated phantoms, not patients: {', '.join(names)}. {ABOUT_PHANTOMS}" if names else ""
    return above_scores(bool(names), bool(names))


ABOUT_PHANTOMS = "Scores on phantoms say nothing about real images."


def cautions_about_each(records: Mapping[str, RunRecord]) -> list[str]:
    """Returns a sentence for each run that may have learned nothing, or whose pretraining learned little."""
    pairs = ((name, own(record)) for name, record in records.items() for own in (weak_start, what_is_unlearned))
    return [f"{name}: {sentence[0].lower()}{sentence[1:]}" for name, sentence in pairs if sentence]


def difference_sentence(measure: str, name: str, first: str, gaps: Sequence[float]) -> str:
    """Returns how far a run's score is above that of the first, over cases, and how sure that is.

    - ``gaps``: the difference in each case
    """
    known = [gap for gap in gaps if math.isfinite(gap)]
    if not known:
        return f"No case has a {measure} in both {name} and {first}."
    mean, cases = fmean(known), quantity(len(known), "case")
    text = f"The {measure} of {name} is {abs(mean):.3f} {'higher' if mean > 0 else 'lower'} than that of {first}"
    if math.isclose(mean, 0, abs_tol=5e-4):
        text = f"The {measure} of {name} equals that of {first} to three decimals"
    text += f", over {cases}" if len(known) >= FEW else ""
    return f"{text}{describe_interval(interval_of_mean(known, low=-1.0, high=1.0), len(known), '+.3f')}."


def settings_table(records: Mapping[str, RunRecord]) -> Table | None:
    """Returns the settings in which runs differ that have them, with their data and ranks; None if there are none."""
    every: dict[str, dict[str, str]] = {}
    for name, record in records.items():
        facts = {"data set": record.dataset["name"], "ranks": record.layout["ranks"], **record.config}
        if record.config.get("data"):
            facts["phantoms"] = None  # they are for a run without data
        network = record.network_settings
        for setting, value in facts.items():
            if setting not in NOT_A_SETTING and (setting not in SETTINGS or setting_applies(network, setting)):
                every.setdefault(setting, {})[name] = format_setting(_from_here(value))
    differ = {setting: values for setting, values in every.items() if len(set(values.values())) > 1}
    rows = [TableRow(setting, [values.get(name, "–") for name in records]) for setting, values in differ.items()]
    return Table("settings-that-differ", list(map(TableHead, ("Setting", *records))), rows, "class") if rows else None


def _from_here(value: object) -> object:
    """Returns an absolute path below the current folder as a relative one, as it may be next to relative ones."""
    path = Path(value) if isinstance(value, str) else Path()
    inside = path.is_absolute() and path.is_relative_to(Path.cwd())
    return str(path.relative_to(Path.cwd())) if inside else value


def curves_over_each_other(records: Mapping[str, RunRecord]) -> list[Chart]:
    """Returns the charts of training loss, held-out loss and score, a curve for each run."""
    losses, held_out, scores = list[Line](), list[Line](), dict[str, list[Line]]()
    for n, (name, record) in enumerate(records.items()):
        rows = record.train
        at = [row["step"] for row in record.held_out]
        train = [number(row.get("loss")) for row in rows]
        losses.append(Line(name, [row["step"] + 1 for row in rows], [train], noisy=True, style=n))
        held_out.append(Line(name, at, [[number(row.get("loss")) for row in record.held_out]], dots=True, style=n))
        values = [score_of(row) for row in record.held_out]
        scores.setdefault(record.network_settings.task, []).append(Line(name, at, [values], dots=True, style=n))
    validations = [row for record in records.values() for row in record.held_out]
    every: list[tuple[str, list[Line], float | None]] = [
        ("Loss in training", losses, None),
        (f"Loss on held-out cases{count_of(validations, '=')}", held_out, None),
    ]
    for task, lines in scores.items():  # a chart each, for what one task is scored by is nothing to another
        own = [row for row in validations if task_of_row(row) == task]
        if task not in ERRORS:  # these are compared by that loss
            every.append((f"{SCORES[task][:1].upper()}{SCORES[task][1:]} on held-out cases{count_of(own)}", lines, 1.0))
    axis = step_axis([record.train for record in records.values()])
    return draw_charts(
        [
            Diagram(title, axis, [line for line in lines if line.places], low=0.0, high=high, styles=OF_RUNS)
            for title, lines, high in every
        ]
    )
