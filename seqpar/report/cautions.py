"""Cautions about scores: what a run has seen of the cases, phantoms, chance, and several runs taken together."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import NormalDist, fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.splits import sample_cases
from seqpar.report.curves import WORDS_OF_WINDOWS
from seqpar.report.embedded_volumes import ShownCase, shown_best
from seqpar.report.images import own_grid
from seqpar.report.record import CaseScores, RunRecord, ScoredCase, read_record, read_scores, runs_behind
from seqpar.report.tables import ABSENT_RULE, CONSENSUS, DISPUTED_ML, MANY, SIZES, Absent, absent_of, is_part_labelled
from seqpar.runs.metrics_tail import best_validation, comparable, score_of, with_other_weights
from seqpar.runs.run_folder import (
    holds_run,
    its_validated,
    kind_of_validated,
    read_best_step,
    read_windows,
    validates_trained,
)
from seqpar.runs.run_status import changes_of_data, list_changes
from seqpar.runs.sweep_folder import counts_for_scores, list_some
from seqpar.scores.comparison import FEW, TOO_FEW
from seqpar.scores.label_classes import Labels, choose_labels
from seqpar.scores.label_files import MAX_NAMED, dataset_at, list_label_files
from seqpar.scores.label_scores import UNLABELLED_ML
from seqpar.settings.config import SETTINGS
from seqpar.settings.loss_settings import OF_LOSS
from seqpar.text import millilitres, quantity
from seqpar.weights.facts import ANCESTORS, IS_UNKNOWN, LEARNED, VOXELS, changed_between, same_scans, several_data

TRAINED_ON_PHANTOMS = (
    "The network was trained on generated phantoms, not on patients: do not trust what it finds in real images."
)
SURE = 0.95  # share of guessers whose best validation stays below what shows that a network has learned


def above_scores(generated: bool, trained_on_phantoms: bool, what: str = "scores") -> str:
    """Returns what stands above the first number about phantoms, or from a network that knows only these; else "".

    - ``generated``: whether the scored cases are phantoms; ``what``: the numbers
    """
    if generated:
        return f"Generated phantoms, not patients: these {what} say nothing about real images."
    return TRAINED_ON_PHANTOMS if trained_on_phantoms else ""


def begun_unknown(record: RunRecord) -> list[str]:
    """Returns a sentence if a run's first weights do not say from which cases they had learned."""
    if not record.dataset.get(IS_UNKNOWN):
        return []
    return [
        "Training began with weights that do not say from which cases they have learned: scores of those cases would "
        "say nothing about new ones."
    ]


def chosen_on_them(*records: RunRecord) -> list[str]:
    """Returns a sentence if several validations chose weights on the cases that any of the runs held out, and one if a
    run had learned from some of them before.
    """
    chosen = (
        "The weights that predict uses were chosen on these cases, so their scores on them tend to be too "
        "good: only a test set tells how good these weights are."
    )
    return cautions_of_learned(*records) + [chosen] * any(record.has_chosen for record in records)


def cautions_of_validation(record: RunRecord) -> list[str]:
    """Returns sentences on what the run's last validation predicted: which weights did, and what they had seen."""
    folder = record.path / "validation"
    if folder.is_dir() and list_label_files(folder) and not (folder / "summary.json").exists():
        told = f"{folder} has no summary.json: this validation is not finished, or its scores could not be written"
        return [f"{told}. Which weights predicted these label maps is not known.", *cautions_of_learned(record)]
    step = read_best_step(record.path, "validation/summary.json") or 0
    other = with_other_weights(step, record.weights.step)
    return [f"These cases were predicted{other}."] * bool(other) + chosen_on_them(record)


def cautions_of_learned(*records: RunRecord) -> list[str]:
    """Returns a sentence if a run had learned from some cases that it holds out, and one if that is not known."""
    unknown = list(dict.fromkeys(sentence for run in records for sentence in begun_unknown(run)))
    known = (({*run.dataset.get("train", ()), *run.dataset.get(LEARNED, ())}, run.dataset) for run in records)
    both = [(cases, {*described.get("held_out", ())}) for cases, described in known]
    learned = [cases & held_out == held_out for cases, held_out in both if cases & held_out]
    which = "all" if learned and all(learned) else "some"
    sentence = (
        f"The weights have learned from {which} of these cases (--fold all, another split, a scan under "
        "two names, or weights that training began with), so the scores say nothing about new cases."
    )
    return [sentence] * bool(learned) + unknown


def changed_on_the_way(record: RunRecord) -> list[str]:
    """Returns a sentence if a run was trained with other settings before, as pages list the last ones."""
    starts, last = list[tuple[int, Mapping[str, Any]]](), max((row.get("step", 0) for row in record.train), default=0)
    for start in record.content.get("history", ())[1:]:
        with suppress(LookupError, TypeError, ValueError, AttributeError):  # of another version
            starts.append((int(start["step"]), dict(start["changed"])))
    at = dict[int, dict[str, list[Any]]]()  # changes by the step from which they hold
    for n, (_, pairs) in enumerate(starts):
        since = at.setdefault(min(step for step, _ in starts[n:]), {})
        for name, (was, now) in pairs.items():
            since[name] = [since.get(name, [was])[0], now]
    told = dict[int, dict[str, list[Any]]]()
    for step, pairs in at.items():
        own = {n: pair for n, pair in pairs.items() if pair[0] != pair[1] and _changes_weights(n, *pair)}
        told |= {step: own} if own and 0 < step <= last else {}
    each = "; ".join(f"{list_changes(own)} from step {step:,}" for step, own in told.items())
    curves = " The curve of the loss is of two kinds." * any({*OF_LOSS} & own.keys() for own in told.values())
    lines = [f"Settings changed when this run was resumed: {each}. Below are the last ones.{curves}"] * bool(told)
    return lines + changes_of_data(record.content.get("history", ()), last)


def _changes_weights(name: str, was: Any, now: Any) -> bool:
    is_seen = name in SETTINGS and name != "epochs" and SETTINGS[name].section != "validation and curves"
    return is_seen and counts_for_scores(name, was, now)


def learned_by_each(named: Mapping[str, RunRecord]) -> list[str]:
    """Returns what several runs have seen of the cases that they validate, by run if that differs."""
    if len({tuple(cautions_of_learned(record)) for record in named.values()}) == 1:
        return chosen_on_them(*named.values())
    each = ((name, sentence) for name, record in named.items() for sentence in cautions_of_learned(record))
    told = [f"{name}: {sentence[0].lower()}{sentence[1:]}" for name, sentence in each]
    told += chosen_on_them(*(record for record in named.values() if not cautions_of_learned(record)))
    return told + scored_on_training(named, "the comparison favours what was trained on them")


def scored_on_training(named: Mapping[str, RunRecord], therefore: str) -> list[str]:
    """Returns a sentence if some of several runs train on the cases that they validate.

    - ``therefore``: what follows if others do not
    """
    trained = [name for name, record in named.items() if validates_trained(record.dataset)]
    if trained and len(trained) == len(named):
        return ["All are scored on cases that they train on (--fold all): their scores say nothing about new cases."]
    told = f"Scored on cases that were trained on (--fold all), unlike the others: {list_some(trained, ', ')}"
    return [f"{told}; {therefore}."] * bool(trained)


def records_behind(prediction: Path) -> list[RunRecord]:
    """Returns what is known of the runs that predicted a folder, as far as theirs are there."""
    records = list[RunRecord]()
    for run in filter(holds_run, (run for run, why in runs_behind(prediction) if not why)):
        with suppress(DataError, ValueError, OSError):
            records.append(read_record(run))
    return records


def cautions_together(runs: Iterable[Path]) -> list[str]:
    """Returns sentences on a score of several runs' held-out cases: which runs had learned some of theirs, and whether
    they were trained on one state of the data. Other folders say nothing of that.
    """
    found = dict[str, RunRecord]()
    for run in runs:
        with suppress(DataError, ValueError, OSError):
            found[str(run)] = read_record(run)
    learned = [name for name, record in found.items() if cautions_of_learned(record)]
    lines = [f"Caution: {', '.join(learned)}: see above what these weights had learned; the score may be too good."]
    described = [record.dataset for record in found.values()]
    told, several = changed_between(*described), several_data(*described)
    changed = f"Caution: {told}: a score of all of them together mixes two states of the data."
    mixed = f"Caution: {several}: cases of one name may be others, and a score of all of them together mixes these."
    return lines * bool(learned) + [changed] * bool(told) + [mixed] * bool(several)


def trained_on_some(
    record: RunRecord, cases: Sequence[str], run: str, voxels: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Returns a sentence if a run, called ``run``, was trained on some of the shown cases, and one if it was trained on
    cases with their names.

    - ``voxels``: digests of the voxels of each case, as far as they are known
    """
    own = {
        "train": [*record.dataset["train"], *record.dataset.get(LEARNED, ())],
        VOXELS: record.dataset.get(VOXELS, {}),
    }
    seen, named = set[str](), set[str]()
    for learned in (own, *record.dataset.get(ANCESTORS, ())):
        known, names = learned.get(VOXELS, {}), {*learned["train"]}
        same = same_scans({case: voxels[case] for case in cases if case in voxels}, known)
        seen |= {case for case, alike in same.items() if alike & names}
        named |= {case for case in cases if case in names and not (case in voxels and case in known)}
    lines, trained = list[str](), f"that run {run} was trained on"
    for some, one, many in (
        (sorted(seen), f"was in the training data of run {run}", f"were in the training data of run {run}"),
        (sorted(named - seen), f"has the name of a case {trained}", f"have the names of cases {trained}"),
    ):
        told = f"{len(some)} of {quantity(len(cases), 'case')} {one if len(some) == 1 else many}"
        lines += [f"{told}, such as {some[0]}: predictions for new cases may be worse."] if some else []
    return lines


def part_labelled(scored: CaseScores) -> str:
    """Returns a sentence if truths leave a part of their images unlabelled; "" if none does."""
    count = sum(any(row.get(UNLABELLED_ML, 0.0) > 0 for row in case.scores.values()) for case in scored.cases)
    if not count:
        return ""
    return (
        f"The truth of {count} of {quantity(len(scored.cases), 'case')} is unlabelled in part (ignore label): scores, "
        "volumes and regions are those of the labelled part, and the rim of what is predicted beyond it may count as "
        "false."
    )


def of_open_sides(volumes: Mapping[str, Any]) -> list[str]:
    """Returns sentences on the cases of a viewer whose files leave open how the patient lies.

    - ``volumes``: what the viewer reads
    """
    cases, sentences = dict[str, list[str]](), list[str]()
    for case in volumes["cases"]:
        if doubt := case["open_sides"]:
            cases.setdefault(doubt, []).append(case["name"])
    for doubt, names in cases.items():
        listed = ", ".join(names[:MAX_NAMED]) + ", …" * (len(names) > MAX_NAMED)
        which = f"The file of {listed}" if len(names) == 1 else f"In {len(names)} cases ({listed}) the file"
        sentences.append(
            f"{which} {doubt}. Pictures mark its sides with ?: left and right, front and back, or top and bottom may "
            "be swapped, and so may the names of the planes."
        )
    return sentences


def other_values_of(truth: Path, labels: Labels) -> list[str]:
    """Returns a caution if the truth's own dataset.json gives classes other values than a run's labels do."""
    others = list[str]()
    with suppress(DataError, ValueError, OSError):  # the truth need not declare any
        for name, values in choose_labels(truth, dataset_at(truth)).classes.items():
            if {*(scored := labels.classes.get(name, values))} != {*values}:
                declared, ours = (" and ".join(map(str, some)) for some in (values, scored))
                others.append(f"{name} as {declared}, which this page scores as {ours}")
    return [f"Caution: the truth's dataset.json has {'; '.join(others)}: other classes are compared."] * bool(others)


def steps_behind(made: Mapping[str, Any]) -> list[int]:
    """Returns after which steps the weights were saved that predicted; [] if that is not known.

    - ``made``: what a prediction records of a run
    """
    weights = made.get("weights")
    found = [re.search(r"checkpoints/step-(\d+)/", str(path)) for path in weights] if isinstance(weights, dict) else []
    return sorted({int(one[1]) for one in found if one}) if all(found) else []


def reached_in_validation(
    record: RunRecord, who: str = "this run", made: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Returns a sentence about the validation of the weights that predicted, for a reader of predictions that no truth
    can score.

    - ``who``: the run, in words; ``made``: what the prediction records of it; {}: nothing, as of an earlier version
    """
    taken = record.weights.step
    first, *others = steps_behind(made) or [taken or 0]
    by = f"{who[:1].upper()}{who[1:]} predicted these cases with its weights of"
    if others:
        steps = f"{', '.join(f'{step:,}' for step in (first, *others[:-1]))} and {others[-1]:,}"
        return [f"{by} steps {steps} together, which no validation has scored."]
    is_other = first != (taken or 0)
    row = next((row for row in reversed(record.held_out) if first and row.get("step") == first), None)
    if is_other and row is None:
        is_lost = not record.held_out or first in record.weights.validations or record.weights.describe_lost()
        unknown = "whose validation is not on record" if is_lost else "which were not validated"
        return [f"{by} step {first:,}, {unknown}."]
    if row is None or not row.get("dice"):
        return []
    cases = its_validated(record.content, row.get("cases"))
    scores = ", ".join(f"{name} {value:.3f}" for name, value in row["dice"].items() if isinstance(value, float))
    few = f" ({TOO_FEW})" * (row.get("cases", FEW) < FEW)
    grid = f", measured on its own grid ({size})" if (size := own_grid(record)) else ""
    after = f" after step {first:,}, with the weights that predicted these cases" * is_other
    reached = f"On {cases}{few} {who} reached a mean Dice of {scores}{grid}{after}."
    reached += measured_otherwise(record, made)
    if is_other:
        reached += f" Unless told otherwise, predict takes those of step {taken:,}." * bool(taken)
    elif record.weights.best is not None:
        reached += f" {record.weights.not_the_best}"
    elif (count := len(comparable(record.held_out))) > 1:
        reached += f" Its weights are the best of {count} validations on them."
    return [" ".join([reached, "Other patients may score lower.", *cautions_of_learned(record)])]


ALL_HAVE_IT = (
    "Every validated case has every class, so it is unknown what would be predicted for a patient who lacks one."
)


def reached_and_found(record: RunRecord, made: Mapping[str, Any]) -> list[str]:
    """Returns what a run reached in validation, as ``reached_in_validation`` says it, and how often the label maps of
    the validation have a class that the truth lacks, unless these are of other weights.
    """
    sentences, taken = reached_in_validation(record, made=made), record.weights.step
    scored: CaseScores | None = None
    with suppress(DataError):
        scored = read_scores(record.path)
    steps = {*(steps_behind(made) or [taken or 0]), (scored.step if scored else 0) or taken or 0}
    if not sentences or scored is None:
        return sentences
    found = {name: absent_of(scored, name) for name in scored.classes}
    if len(steps) > 1:  # the label maps are of other weights, and the truth is the same
        by: Sequence[int | None] = steps_behind(made) or [taken]
        is_scored = len(by) == 1 and any(row.get("step") == by[0] for row in record.held_out)
        have = [f"{n} {'have' if n > 1 else 'has'} no {name}" for name, own in found.items() if (n := own.cases)]
        absent_in = f"Of {quantity(len(scored.cases), 'validated case')}, {', '.join(have)}. {ABSENT_RULE}"
        return [*sentences, *[absent_in] * (is_scored and bool(have))]
    kind = kind_of_validated(record.dataset)
    told = [_found_in_none(name, absent, kind) for name, absent in found.items() if absent.cases]
    when = ["In that validation:"] * bool(measured_otherwise(record, made))
    if not told:
        return [*sentences, *[ALL_HAVE_IT] * (not any(absent.unknown for absent in found.values()))]
    return [*sentences, " ".join([*when, *told, ABSENT_RULE])]


def _found_in_none(name: str, absent: Absent, kind: str) -> str:
    """Returns in how many cases without a class some was predicted, which is what a new patient's label may be.

    - ``kind``: of cases, in words
    """
    count, predicted = absent.cases, absent.predicted
    which = f"{predicted} of the {count} {kind} cases"
    if predicted == count or not predicted:
        which = f"{'none of ' * (not predicted)}the {quantity(count, f'{kind} case')}"
        which = which.replace("none of the 1 ", "the 1 ")
    did = f", it predicted {'some' if predicted else 'none'}" if predicted or count == 1 else " did it predict any"
    return f"In {which} without {name}{did}."


def measured_otherwise(record: RunRecord, made: Mapping[str, Any]) -> str:
    """Returns a sentence if cases were predicted in another way than validation measures; else, or if unknown, ""."""
    own, ways = made.get("settings") or {}, list[str]()
    words, measured = WORDS_OF_WINDOWS, str(record.config.get("val_window"))
    way, other = str(own.get("window")), ""
    if measured == "both":  # the better of both counts
        with suppress(DataError):
            dice = read_windows(record.path).dice
            measured = next(iter(dice), "")
            other = f" (mean Dice in validation, over classes scored both ways: {dice[way]:.3f})" if way in dice else ""
    if way != measured and {way, measured} <= words.keys():
        ways.append(f"{words[way]}{other} and not {words[measured]}")
    overlap, usual = own.get("overlap"), record.config.get("val_overlap")  # which earlier versions do not tell
    if way == measured == "sliding" and overlap is not None and usual is not None and overlap != usual:
        ways.append(f"in windows that overlap by {100 * overlap:.3g} %, where validation had {100 * usual:.3g} %")
    mirrored = len(str(record.config.get("val_mirror", "none")).replace("none", ""))
    if len(own.get("mirror") or ()) != mirrored and "mirror" in own:
        ways.append("as a mean over mirrored copies" if own["mirror"] else "without mirroring")
    if str(own.get("min_component", "0")) != "0" or own.get("postprocessing"):
        ways.append("with regions removed")
    return f" That was not measured in the same way: these cases were predicted {' and '.join(ways)}." if ways else ""


def may_be_chance(record: RunRecord, step: int | None = None) -> str:
    """Returns a sentence if guessing could reach the scores of a classifier's validation; else, or without one, "".

    - ``step``: after which step; None: the best one
    """
    row = best_validation(record.held_out)
    if step is not None:
        own = next((row for row in reversed(record.held_out) if row.get("step") == step), None)
        row, step = (row, None) if own is None else (own, step)  # without a validation, the best tells
    numbers = (record.dataset.get("volume_classes") or {}).get("numbers", {})
    held_out = [case for case in record.dataset.get("held_out", ()) if case in numbers]
    validated = sample_cases(held_out, min(record.config.get("val_cases", 0), len(held_out)), numbers.__getitem__)
    counts = Counter(numbers[case] for case in validated)
    if row is None or not counts:
        return ""
    if len(counts) == 1:
        return "The validated cases are all of one class: always giving that class would be right for each of them."
    best, guess = score_of(row), 1 / len(counts)
    deviation = guess * math.sqrt(guess * (1 - guess) * sum(1 / count for count in counts.values()))
    tries = 1 if step is not None else len(comparable(record.held_out))
    limit, cases = NormalDist().inv_cdf(SURE ** (1 / tries)), counts.total()
    if best - guess > limit * deviation:
        return ""
    after = "" if step is None else f" after step {step:,}"
    case = f"{kind_of_validated(record.dataset)} case"
    reached = f"On {quantity(cases, case)} this run reached a balanced accuracy of {best:.3f}{after}"
    chance = f", and guessing ({guess:.3f} on average) could reach as much"
    area, spreads = row["scores"].get("AUC"), [math.sqrt((cases + 1) / (12 * n * (cases - n))) for n in counts.values()]
    if isinstance(area, float) and area - 0.5 > limit * fmean(spreads):  # Mann and Whitney's, of each class
        at = " at the 0.5 threshold" * (len(record.dataset["volume_classes"]["names"]) == 2)
        better = f"Its ranking of the cases is better than chance (AUC {area:.3f}, guessing 0.5)"
        return f"{reached}{at}{chance}. {better}, so it has learned, but do not trust its classes."
    return f"{reached}{chance}: nothing shows that the network has learned. Do not trust its classes or its maps."


def planes_note(case: ScoredCase, shown: ShownCase, labels: Sequence[str]) -> str:
    """Returns which planes of a case are shown, and what was predicted where the truth has none of the labels."""
    rarest = shown_best(shown)[1]
    of_label = f"{labels[rarest - 1]} in the " if rarest else ""
    if shown.truth.any():
        return f"planes with most of the {of_label}truth"
    if case.truth is None:
        return f"planes {f'with most of the {of_label}prediction' if shown.prediction.any() else 'through the middle'}"
    rows = list(case.scores.values())
    is_part = is_part_labelled(rows)
    is_drawn = is_part or bool(rows) and not case.scores.keys() >= {*labels}  # regions are scored, not labels
    volumes = {} if is_drawn else {name: case.scores.get(name, {}).get("VolumeMl", 0.0) for name in labels}
    if not any(ml > 0 for ml in volumes.values()):
        counts = np.bincount(shown.prediction.ravel(), minlength=len(labels) + 1)[1:]
        volumes = {name: count * shown.voxel_ml for name, count in zip(labels, counts.tolist())}
    predicted = [f"{name} {millilitres(ml)} ml" for name, ml in volumes.items() if ml > 0]
    what = predicted[0].removeprefix(f"{labels[0]} ") if len(labels) == 1 and predicted else ", ".join(predicted)
    planes = f"planes with most of the {of_label}prediction" if predicted else "middle planes"
    if not predicted and shown.disputed is not None and shown.disputed.any():
        planes = "planes with most of what readers dispute"
    absent = [name for number, name in enumerate(labels, 1) if number not in shown.hidden]
    where = " in the labelled part" if is_part else f" in {CONSENSUS}" * any(DISPUTED_ML in row for row in rows)
    known = f"no {' or '.join(absent)}{where}"
    if any(row.get("n_ref", 0) > 0 for row in rows):
        known = "nothing of the truth is left on this grid"
    if not absent or rows and all(math.isnan(row.get("n_ref", 0)) for row in rows):
        known = "not annotated"
    there = " in the volume shown:" * (is_part or is_drawn and bool(what))
    return f"{known}; predicted{there} {what or 'none'} · {planes}"


def too_much(scored: CaseScores) -> str:
    """Returns a sentence on the classes that are predicted far too large; "" if no class is."""
    told = list[str]()
    for name in scored.classes:
        pairs = [tuple(case.scores[name].get(key, math.nan) for key in SIZES[:2]) for case in scored.cases]
        known = [pair for pair in pairs if not any(map(math.isnan, pair))]
        true_ml, ml = (sum(pair[at] for pair in known) / max(len(known), 1) for at in range(2))
        if true_ml and (times := ml / true_ml) >= MANY:
            mean = "mean " * (len(known) > 1)
            told.append(
                f"the {mean}predicted volume of {name}, {millilitres(ml)} ml, is {times:,.{int(times < 10)}f} "
                f"times the {mean}true one, {millilitres(true_ml)} ml"
            )
    wrong = "wrong, and regions may be found by chance"
    if any(DISPUTED_ML in row for case in scored.cases for row in case.scores.values()):
        wrong = f"outside {CONSENSUS}, though a reader may agree"
    elif any(case.doubt for case in scored.cases):
        wrong = "where the truth calls it less probable than not"
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}: most of it is {wrong}." if told else ""
