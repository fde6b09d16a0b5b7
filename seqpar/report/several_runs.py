"""The page about several runs: curves over each other, settings that differ, scores and cases side by side."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from seqpar.data.errors import DataError
from seqpar.data.files import read_whole
from seqpar.data.formats.splits import data_faults
from seqpar.report.cautions import above_scores, changed_on_the_way, learned_by_each
from seqpar.report.curves import OF_RUNS, OF_TILES, Diagram, Line, count_of, number, step_axis
from seqpar.report.images import about_grids, about_windows, grids_of
from seqpar.report.planes import RUN_COLOURS, colours_of
from seqpar.report.plots import Chart, draw_charts, make_strips
from seqpar.report.record import (
    DAMAGE,
    CaseScores,
    RunRecord,
    ScoredCase,
    from_here,
    mean_of_numbers,
    read_scores,
)
from seqpar.report.rendering import render
from seqpar.report.run_page import format_setting, verdict, weak_start, what_is_unlearned
from seqpar.report.tables import ABSENT_RULE, Score, Table, TableHead, TableRow, absent_of, mean_over
from seqpar.runs.metrics_tail import ERRORS, SCORES, score_of, task_of_row, with_other_weights
from seqpar.runs.run_folder import acting_settings, validates_trained
from seqpar.runs.sweep_folder import OF_ERROR
from seqpar.scores.comparison import FEW, Difference, about_scans, difference_of, where_both
from seqpar.settings.config import SETTINGS, Config
from seqpar.settings.loss_settings import OF_LOSS
from seqpar.settings.rules import setting_applies
from seqpar.text import quantity, rounded
from seqpar.weights.facts import VALIDATED, cases_that_differ

T = TypeVar("T")

SAME_DATA = ("name", "modalities", "labels", "volume_classes")  # of config.json
NOT_A_SETTING = ("out", "resume", "again", "take_over", "dry_run")  # where and how a run was started
REACHES = (0.05, 0.1, 0.2, 0.4, 1.0)  # of an axis of differences
SPREAD = {"ranks", "seqpar", "split", "mode", "attention", "workers"}  # which ranks compute what, and how


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Returns a name for each run: its folder's, with those above it where several have the same."""
    paths = [record.path.resolve() for record in records]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    twice = next(path for path in paths if paths.count(path) > 1)
    raise ValueError(f"{twice} was named twice: name each run once")


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
    - ``cautions``: what a reader should know first
    """

    count: int
    scores: Table | str
    cases: Table | str
    sentences: Sequence[str] = ()
    dots: Sequence[Dots] = ()
    cautions: Sequence[str] = ()


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
        cautions=[
            *cautions_about(records),
            *about_grids(named),
            *about_windows(named),
            *learned_by_each(named),
            *_scans(records),
            *cautions_about_each(named),
            *(told for one in comparisons for told in one.cautions),
        ],
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
    if _differ_in_data(records):
        text = "These runs were trained on different data or tasks; their curves cannot be compared."
        return [f"{text} Cases with the same name may be different cases."]
    sentences = list[str]()
    if differ := _losses_that_differ(records):
        names = ", ".join(differ)
        sentences.append(f"These runs differ in their losses ({names}); their loss curves cannot be compared.")
    trained = {(own.config.get("train_cases"), frozenset(own.dataset["train"])) for own in records}
    if _differ_in_held_out(records):
        sentences.append("These runs validate different cases; their curves in validation cannot be compared.")
    elif len(trained) > len({count for count, _ in trained}):
        sentences.append("These runs were trained on different cases and validated on the same ones.")
    return sentences


def _differ_in_data(records: Sequence[RunRecord]) -> bool:
    """Returns whether runs were trained on different data or tasks."""
    tasks = {record.network_settings.task for record in records}
    data = {json.dumps([record.dataset.get(part) for part in SAME_DATA]) for record in records}
    return len(tasks) > 1 or len(data) > 1 or bool(cases_that_differ(*(record.dataset for record in records)))


def _differ_in_held_out(records: Sequence[RunRecord]) -> bool:
    return len({_validated(record) for record in records}) > 1


def _validated(record: RunRecord) -> tuple[int, frozenset[str]]:
    """Returns how many cases a run's validations score, and which; of earlier versions, all that are held out."""
    cases = frozenset(map(str, record.dataset.get(VALIDATED, record.dataset["held_out"])))
    return min(record.config.get("val_cases") or len(cases), len(cases)), cases


def _losses_that_differ(records: Sequence[RunRecord], also: Sequence[str] = ()) -> list[str]:
    """Returns the settings in which runs of one task differ, and on which the size of a loss depends, or ``also``."""
    are_errors = all(record.network_settings.task in ERRORS for record in records)  # of what is hidden
    names = dict.fromkeys((*OF_LOSS, *OF_ERROR * are_errors, *also))
    acts = (name for name in names if all(setting_applies(record.network_settings, name) for record in records))
    every = [acting_settings(record.content) for record in records]
    values = {name: {json.dumps(own.get(name, getattr(Config, name))) for own in every} for name in acts}
    return [name for name, own in values.items() if len(own) > 1]


def sentence_on_phantoms(records: Mapping[str, RunRecord]) -> str:
    """Returns what stands above the scores of runs on phantoms; "" if none is."""
    names = [name for name, record in records.items() if record.has_phantoms]
    if len(names) < len(records):
        return f"On generated phantoms, not patients: {', '.join(names)}. {ABOUT_PHANTOMS}" if names else ""
    return above_scores(bool(names), bool(names))


ABOUT_PHANTOMS = "Scores on phantoms say nothing about real images."


def cautions_about_each(records: Mapping[str, RunRecord]) -> list[str]:
    """Returns a sentence for each run that may have learned nothing, or whose scores say less than they seem to."""
    of_data: list[Callable[[RunRecord], str]] = [lambda run: data_faults(run.dataset), weak_start, what_is_unlearned]
    tests = (*of_data, _other_weights, lambda run: " ".join(changed_on_the_way(run)))
    pairs = ((name, own(record)) for name, record in records.items() for own in tests)
    return [f"{name}: {sentence[0].lower()}{sentence[1:]}" for name, sentence in pairs if sentence]


def _scans(records: Sequence[RunRecord]) -> list[str]:
    """Returns a sentence if some patients have several of the cases that the runs held out."""
    cases = {str(case) for record in records for case in record.dataset["held_out"]}
    subjects = {case: patient for record in records for case, patient in record.subjects.items()}
    return [sentence] if (sentence := about_scans(cases, subjects)) else []


def _other_weights(record: RunRecord) -> str:
    """Returns a sentence if the scores of a run's cases are not those of the weights that predict uses; else ""."""
    try:
        step = int(json.loads(read_whole(record.path / "validation" / "summary.json"))["step"])
    except (OSError, *DAMAGE):
        return ""
    unused = with_other_weights(step, record.weights.step)
    return f"Scores of its cases are those{unused}." if unused else ""


def _difference_sentence(name: str, first: str, difference: Difference | None) -> str:
    """Returns how far a run's mean Dice is above that of the first, over cases, and how sure that is."""
    if difference is None:
        return f"No case has a mean Dice in both {name} and {first}."
    gap, cases = difference.value, quantity(difference.cases, "case")
    if gap == difference.deviation == 0:
        return f"{name} and {first} have exactly the same mean Dice over {cases}."
    text = f"The mean Dice of {name} is {abs(gap):.3f} {'higher' if gap > 0 else 'lower'} than that of {first}"
    if math.isclose(gap, 0, abs_tol=5e-4):
        text = f"The mean Dice of {name} equals that of {first} to three decimals"
    text += f", over {cases}" if difference.cases >= FEW else ""
    return f"{text}{difference.describe_interval('+.3f')}."


def settings_table(records: Mapping[str, RunRecord]) -> Table | None:
    """Returns the settings in which runs differ that have them, with their data and ranks; None if there are none."""
    every: dict[str, dict[str, str]] = {}
    for name, record in records.items():
        facts = {"data set": record.dataset["name"], "cases to train on": len(record.dataset["train"])}
        if "global_batches" in record.layout:
            facts |= {"tiles a step": " ".join(map(str, record.layout["global_batches"]))}
        facts |= {"ranks": record.layout["ranks"]} | acting_settings(record.content)
        if record.config.get("data"):
            facts["phantoms"] = None  # they are for a run without data
        network = record.network_settings
        for setting, value in facts.items():
            if setting not in NOT_A_SETTING and (setting not in SETTINGS or setting_applies(network, setting)):
                every.setdefault(setting, {})[name] = format_setting(from_here(value))
    differ = {setting: values for setting, values in every.items() if len(set(values.values())) > 1}
    rows = [TableRow(setting, [values.get(name, "–") for name in records]) for setting, values in differ.items()]
    is_spread = not differ.keys() - SPREAD and _learned_alike([*records.values()])
    note = "These say only how the work is spread: the numbers are the same but for rounding, which training amplifies."
    heads = list(map(TableHead, ("Setting", *records)))
    return Table("settings-that-differ", heads, rows, "class", note * is_spread) if rows else None


def _learned_alike(records: Sequence[RunRecord]) -> bool:
    """Returns whether runs had the same data, tiles a step and code, and no start changed what is learned."""
    starts = [start for record in records for start in record.content.get("history", ())]
    codes = [[own.content.get("commit"), own.content.get("versions", {}).get("seqpar")] for own in records]
    known = {json.dumps([record.layout.get("global_batches"), *code]) for record, code in zip(records, codes)}
    is_same = len(known) == 1 and "null" not in next(iter(known))
    is_same = is_same and all(start.get("changed", {}).keys() <= SPREAD for start in starts)
    return is_same and not (_differ_in_data(records) or _differ_in_held_out(records))


def curves_over_each_other(records: Mapping[str, RunRecord]) -> list[Chart]:
    """Returns the charts of training loss, held-out loss and score, a curve for each run."""
    losses, held_out, scores = list[Line](), list[Line](), dict[str, list[Line]]()
    for n, (name, record) in enumerate(records.items()):
        rows, at = record.train, [row["step"] for row in record.held_out]
        train = [number(row.get("loss")) for row in rows]
        losses.append(Line(name, [row["step"] + 1 for row in rows], [train], noisy=True, style=n))
        held_out.append(Line(name, at, [[number(row.get("loss")) for row in record.held_out]], dots=True, style=n))
        values = [score_of(row) for row in record.held_out]
        scores.setdefault(record.network_settings.task, []).append(Line(name, at, [values], dots=True, style=n))
    validations = [row for record in records.values() for row in record.held_out]
    runs = list(records.values())
    of_data = ", not comparable" * bool(_differ_in_data(runs))
    of_loss = of_data or ", not comparable" * bool(_losses_that_differ(runs))
    of_tiles = of_loss or ", on different tiles" * bool(_losses_that_differ(runs, OF_TILES))
    of_cases = ", on different cases" * _differ_in_held_out(runs)
    of_grids = ", on different grids" * (len(grids_of(records)) > 1)
    where = "in validation" if any(validates_trained(record.dataset) for record in runs) else "on held-out cases"
    every: list[tuple[str, list[Line], float | None]] = [
        (f"Loss in training{of_tiles}", losses, None),
        (f"Loss {where}{count_of(validations, '=')}{of_cases}{of_grids}{of_loss}", held_out, None),
    ]
    for task, lines in scores.items():  # a chart each, for what one task is scored by is nothing to another
        own = [row for row in validations if task_of_row(row) == task]
        if task not in ERRORS:  # these are compared by that loss
            title = f"{SCORES[task][:1].upper()}{SCORES[task][1:]} {where}{count_of(own)}{of_cases}"
            every.append((f"{title}{of_grids * (task == 'segment')}{of_data}", lines, 1.0))
    axis = step_axis([record.train for record in records.values()])
    return draw_charts(
        [
            Diagram(title, axis, [line for line in lines if line.places], low=0.0, high=high, styles=OF_RUNS)
            for title, lines, high in every
        ]
    )


def compare_segmentations(records: Mapping[str, RunRecord], gaps: list[str]) -> Comparison:
    """Returns the scores of several runs side by side, and how they differ case by case."""
    scored = read_all(records, lambda record: read_scores(record.path), gaps)
    differences = _differences(scored, ", of different data" * _differ_in_data(list(records.values())))
    return Comparison(len(scored), _scores_table(scored, isinstance(differences[0], Table)), *differences)


def _scores_table(scored: Mapping[str, CaseScores], is_compared: bool) -> Table | str:
    """Returns the mean Dice of each class, the runs side by side; ``is_compared``: a table of their cases follows."""
    if not scored:
        return "No run has scores of cases."
    classes = dict.fromkeys(name for one in scored.values() for name in one.classes)
    rows = [
        TableRow(kind, [_lacking(scored, kind), *(_mean(one, kind) for one in scored.values())]) for kind in classes
    ]
    shared = [kind for kind in classes if all(kind in one.classes for one in scored.values())]
    if len(shared) > 1:
        of_all = "mean of all classes" if len(shared) == len(classes) else "mean of the classes that all runs have"
        means = ([one.summary["mean"][kind].get("Dice", math.nan) for kind in shared] for one in scored.values())
        rows.append(TableRow(of_all, ["", *(Score(mean_of_numbers(own), 3) for own in means)]))
    rows.append(TableRow("cases scored", ["", *(Score(len(one.cases), 0) for one in scored.values())]))
    note = "Mean Dice in each run's last validation, over the cases that it has scored"
    note += "; the table below compares the cases that all runs share." if is_compared else "."
    note += f" n: cases with a Dice. {ABSENT_RULE} Means over different cases cannot be compared."
    doubts = dict.fromkeys(case.doubt.consensus for one in scored.values() for case in one.cases if case.doubt)
    note += f" Dice compares with {', or with '.join(doubts)}." * bool(doubts)
    return Table(
        "scores",
        [TableHead("Class"), TableHead("Absent from the truth of"), TableHead("Mean Dice", tuple(scored))],
        rows,
        "class",
        note,
    )


def _lacking(scored: Mapping[str, CaseScores], kind: str) -> str:
    """Returns in how many cases the truth lacks a class, run by run if they differ."""
    known = {name: one for name, one in scored.items() if kind in one.classes}
    texts = {name: f"{absent_of(one, kind).cases} of {len(one.cases)}" for name, one in known.items()}
    shared = set(texts.values())
    return f"{shared.pop()} cases" if len(shared) == 1 else "; ".join(f"{name}: {text}" for name, text in texts.items())


def _mean(one: CaseScores, kind: str) -> Score:
    """Returns a class's mean Dice, with the cases that it is over."""
    count, zeros = one.summary.get("num_values", {}).get(kind, {}).get("Dice"), absent_of(one, kind).predicted
    told = [] if count is None else [f"n = {count:.0f}"]
    told += [f"{zeros} of them 0: none in the truth"] * bool(zeros)
    mean = one.summary["mean"].get(kind, {}).get("Dice", math.nan)
    return Score(mean, 3, f" ({', '.join(told)})" if told else "")


def _none_in_truth(case: ScoredCase, compared: Collection[str], shared: Sequence[str]) -> str:
    """Returns the classes that the truth of a case lacks, and those that are not compared, in words.

    - ``compared``: the classes that every run's truth of the case shows; ``shared``: those of all runs
    """
    left_out = {*shared} - {*compared}
    told = [name for name, row in case.scores.items() if row.get("n_ref", 1) == 0 and name not in left_out]
    told += [f"{name} (not annotated for every run, and left out)" for name in shared if name in left_out]
    return ", ".join(told) or "–"


def _differences(
    scored: Mapping[str, CaseScores], of_data: str = ""
) -> tuple[Table | str, Sequence[str], Sequence[Dots]]:
    """Returns how far each case's mean Dice is above that of the first run: a table, sentences, strips.

    - ``of_data``: what to add to the title of the strips, if cases of the same name may be others
    """
    if len(scored) < 2:
        return "", (), ()
    (first, reference), *others = scored.items()
    shared = [kind for kind in reference.classes if all(kind in one.classes for one in scored.values())]
    if not shared:
        return "No class is in all of these runs.", (), ()
    compared = _compared_classes(scored.values(), shared)
    dice = {
        name: {
            case.name: mean_of_numbers(case.scores[kind].get("Dice", math.nan) for kind in compared[case.name])
            for case in one.cases
        }
        for name, one in scored.items()
    }
    common = [case.name for case in reference.cases if all(case.name in own for own in dice.values())]
    if not common:
        return "No case was scored in all of these runs.", (), ()
    gaps = {name: [(dice[name][case] - dice[first][case], case) for case in common] for name, _ in others}
    of_case = {case.name: case for case in reference.cases}
    rows = [
        TableRow(
            case,
            [
                Score(dice[first][case], 3),
                *(Score(pairs[n][0], 3, is_signed=True) for pairs in gaps.values()),
                _none_in_truth(of_case[case], compared[case], shared),
            ],
        )
        for n, case in enumerate(common)
    ]
    heads = [TableHead("Case"), TableHead("Dice", (first,)), TableHead(f"Dice minus that of {first}", tuple(gaps))]
    heads.append(TableHead("Not in the truth"))
    widest = max((abs(gap) for pairs in gaps.values() for gap, _ in pairs if math.isfinite(gap)), default=0.0)
    reach = next(end for end in REACHES if end >= min(1.05 * widest, 1.0))  # small ones look small
    dots = Dots(f"Dice of each case, minus that of {first} (right of 0: higher){of_data}", gaps, -reach, reach)
    is_partial = any(len(one.classes) > len(shared) for one in scored.values())
    only = f"Only classes that all runs have count: {', '.join(shared)}." if is_partial else ""
    sign = f"A difference above 0 means that the run's Dice is higher than that of {first}."
    dices = (row[kind].get("Dice", math.nan) for one in scored.values() for case in one.cases
             if (row := case.scores) and case.name in common for kind in shared)  # fmt: skip
    alike = "The difference of the means counts each class alike, however few cases have it: "
    weighs = f"{alike}it need not equal the mean of these rows." * any(map(math.isnan, dices))
    note = " ".join(filter(None, [sign, only, mean_over(shared, "of a case "), weighs, ABSENT_RULE]))
    sentences = [_difference(scored, name, first, shared, {case: compared[case] for case in common}) for name in gaps]
    return (
        Table("pairs", heads, rows, "case", note),
        sentences,
        [dots] * any(any(math.isfinite(gap) for gap, _ in pairs) for pairs in gaps.values()),
    )


def _compared_classes(scored: Iterable[CaseScores], shared: Sequence[str]) -> dict[str, list[str]]:
    """Returns the shared classes of each case that every run's truth of it is annotated for."""
    unknown = defaultdict[str, set[str]](set)
    for case in (case for one in scored for case in one.cases):
        unknown[case.name] |= {kind for kind in shared if math.isnan(case.scores[kind].get("n_ref", 0))}
    return {name: [kind for kind in shared if kind not in own] for name, own in unknown.items()}


def _difference(
    scored: Mapping[str, CaseScores],
    name: str,
    first: str,
    classes: Sequence[str],
    compared: Mapping[str, Collection[str]],
) -> str:
    """Returns how far a run's mean Dice, that over classes, is above the first run's, and the Dice of each class.

    - ``compared``: the classes that count in each case
    """
    every, none = [{case.name: case.scores for case in scored[run].cases} for run in (name, first)], {"Dice": math.nan}
    rows = [
        [{kind: own[case][kind] if kind in known else none for kind in classes} for case, known in compared.items()]
        for own in every
    ]
    sentence = _difference_sentence(name, first, difference_of(*rows))
    means = [[mean_of_numbers(row[kind].get("Dice", math.nan) for row in run) for run in rows] for kind in classes]
    listed = ", ".join(f"{kind} {rounded(a, 3)} and {rounded(b, 3)}" for kind, (a, b) in zip(classes, means))
    by_class = f"By class, {name} and {first}: {listed}." if len(classes) > 1 else ""
    return " ".join(filter(None, [sentence, by_class, where_both(rows[0], rows[1], name)]))
