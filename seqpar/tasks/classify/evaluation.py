"""Scores tables of classes, and compares several of them, or of runs."""

import argparse
import csv
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.class_lists import read_class_dataset
from seqpar.prediction.prediction_folder import voxels_of
from seqpar.report.curves import number
from seqpar.report.record import RunRecord
from seqpar.report.several_runs import Comparison
from seqpar.report.tables import Score, Table, TableHead, TableRow
from seqpar.scores.class_scores import (
    baseline,
    cases_behind,
    caution_of_absent,
    caution_of_guesses,
    compare_shares,
    fewest_cases,
    positive_class,
)
from seqpar.scores.comparison import FEW, TOO_FEW
from seqpar.scores.summary_files import output_files, refuse_duplicates, refuse_foreign
from seqpar.tasks.case_evaluation import (
    CaseEvaluation,
    ScoredPrediction,
    ScoringJob,
    lead_with_new,
)
from seqpar.tasks.classify.scores import (
    ClassTable,
    as_json,
    class_lines,
    class_summary,
    find_table,
    of_truth,
    read_class_table,
    read_subjects,
    read_truth,
    replaced_rows,
    rescore,
    unknown_cases,
    unlisted_rows,
)
from seqpar.tasks.seen_cases import Seen, find_seen
from seqpar.text import quantity, rounded
from seqpar.weights.facts import VOXELS, same_scans

Summary = Mapping[str, Any]
KINDS = ("sensitivity", "specificity")


def folder_of(truth: Path) -> Path | None:
    """Returns where the images of a truth are; None if it is a table alone."""
    return truth if truth.is_dir() and image_files(truth) else None


class ClassEvaluation(CaseEvaluation):
    """Scores the tables of predict's folders, and of runs, which stand for their last validation."""

    images = staticmethod(folder_of)
    replaced = staticmethod(replaced_rows)
    unlisted = staticmethod(unlisted_rows)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.truth = {case: name for case, name in read_truth(options.truth).items() if self._is_scored(case)}
        self.subjects = read_subjects(options.truth)

    def _is_scored(self, case: str) -> bool:
        return self.only is None or case in self.only

    def open(self) -> list[ScoringJob]:
        options, jobs = self.options, list[ScoringJob]()
        data = [options.truth] if options.truth.is_dir() else []
        tables = [(named, path) for named in options.prediction if (path := find_table(named))]
        refuse_duplicates(tables)
        self.has_several = False  # more than two classes
        for named, path in tables:
            table = read_class_table(path)
            self.has_several |= len(table.names) > 2
            table = table.of([case for case in table.cases if self._is_scored(case)])
            is_run = path.parent.name == "validation" and path.parent.parent == named
            files = output_files(None if is_run else named, options.json, options.csv)
            refuse_foreign(files, data)
            missing = [] if is_run else sorted(self.truth.keys() - set(table.cases))
            jobs.append(ScoringJob(str(named), table, files, unknown_cases(table, self.truth, path), missing))
        return jobs

    def score(self, job: ScoringJob) -> ScoredPrediction | None:
        content = class_summary(job.cases, self.truth, Path(job.name))
        groups, told = job.seen.apart(case["case"] for case in content["metric_per_case"])
        each = {which: rescore(content, own) for which, own in groups.items()} if told else {"": content}
        texts = {which: _text_of(one) for which, one in each.items()}
        which, first = next(iter(each.items()))
        accuracy, auc = first["scores"]["accuracy"], first["scores"]["AUC"]
        few = f" ({TOO_FEW})" * (fewest_cases(first, "AUC") < FEW)
        written: dict[str, Any] = {"faults": list(map(str, job.faults)), "missing": list(job.missing)}
        if told:
            kept = ("scores", "intervals", "classes", "confusion")
            written["groups"] = {
                name: {"cases": groups[name], **{k: one[k] for k in kept}} for name, one in each.items()
            }
        return ScoredPrediction(
            job.name,
            [case["case"] for case in content["metric_per_case"]],
            job.cases,
            lead_with_new(told, texts, _text_of(content), content["cases"]),
            f"{quantity(first['cases'], 'case')}{f' {which}' * bool(which)}: "
            f"accuracy {rounded(accuracy, 4)}, AUC {rounded(auc, 4)}{few}",
            {"json": as_json(content | written), "csv": _csv_text(content, each if told else {})},
        )

    def words(self, text: str) -> list[str]:
        of_several = " AUC: each class against the others, averaged over classes;" * self.has_several
        return [
            "(95 % intervals: Wilson's, for balanced accuracy those of the classes combined, for AUC bootstrap, "
            f"stratified by class;{of_several} predicted class: the one with the highest probability, the first of "
            "equal ones)"
        ]

    def find_seen(self, job: ScoringJob, record: RunRecord) -> Seen:
        names = [case for case in job.cases.cases if case in self.truth]
        return trained_on(record, self.options.truth, names, job.place)

    def of(self, cases: ClassTable, names: Sequence[str]) -> ClassTable:
        return cases.of(names)

    def compare(self, scored: Sequence[ScoredPrediction]) -> str:
        """Returns which table is best, or the scores of all cases if the tables have none in common, as folds do."""
        tables = {one.name: one.cases for one in scored}
        return self._together(list(tables.values())) or self._best(tables)

    def _together(self, tables: Sequence[ClassTable]) -> str:
        """Returns the scores of all cases of tables without common cases; "" for other tables."""
        cases = tuple(case for table in tables for case in table.cases)
        if len(set(cases)) < len(cases) or len({table.names for table in tables}) > 1:
            return ""
        joined = ClassTable(tables[0].names, cases, np.concatenate([table.probabilities for table in tables]))
        content = class_summary(joined, self.truth, self.options.truth)
        lines = [
            f"all {content['cases']} cases together, with probabilities from {len(tables)} tables:",
            *class_lines(content),
            *_cautions(content),
        ]
        return "\n".join([*lines, *self.words("")])

    def _best(self, tables: Mapping[str, ClassTable]) -> str:
        """Returns which table scores best over the cases that all of them have, and how surely it differs."""
        common = set.intersection(*(set(table.cases) for table in tables.values())) & self.truth.keys()
        if not common:
            return "the tables have no case in common"
        truth = {case: self.truth[case] for case in common}
        summaries = {name: class_summary(table, truth, Path(name)) for name, table in tables.items()}
        scores = {name: summary["scores"]["balanced accuracy"] for name, summary in summaries.items()}
        ranked = sorted(scores, key=lambda name: -scores[name])
        listed = ", ".join(f"{name} {scores[name]:.4f}" for name in ranked)
        few = f" ({TOO_FEW})" if len(common) < FEW else ""
        best = f"balanced accuracy over the {quantity(len(common), 'case')} that all tables have: {listed}{few}"
        return "\n".join([best, *_differences({name: summaries[name] for name in ranked}, sorted(common))])


def image_files(data: str | Path) -> dict[str, Path]:
    """Returns the first image of each case of a data set of classes, by name; none of what is no data set."""
    try:
        return {case.id: case.images[0] for case in read_class_dataset(data).cases}
    except (DataError, ValueError):
        return {}


def other_classes(record: RunRecord, summary: Summary, truth: Path) -> list[str]:
    """Returns a sentence if predictions, or the cases of a truth, have other classes than a run; none without any.

    - ``summary``: of the predictions
    """
    own, true = record.outputs, sorted({*read_truth(truth).values()})
    found = {"the predictions have": list(summary["names"]), f"the cases in {truth} have": true}
    others = [f"{which} {', '.join(names)}" for which, names in found.items() if {*names} != {*own}]
    told = f"Caution: this run has the classes {', '.join(own)}; {'; '.join(others)}."
    return [told] if own and others else []


def trained_on(record: RunRecord, truth: Path, cases: Sequence[str], prediction: Path) -> Seen:
    """Returns the scored cases that a run was trained on; ``truth``: a data set, or a table alone."""
    known, own, scans = image_files(truth), record.dataset.get(VOXELS, {}), voxels_of(prediction)
    alike = same_scans(scans, own)
    others = {case for case in scans if case in own and case not in alike.get(case, ())}  # the truth has other images
    scored = {case: None if case in others else known.get(case) for case in cases}
    subjects = read_subjects(truth)
    if truth.resolve() != Path(str(record.config.get("data"))).resolve():  # numbers may be those of other patients
        subjects = {case: patient for case, patient in subjects.items() if re.search("[A-Za-z]", patient)}
    seen = find_seen(record, scored, lambda: image_files(record.config["data"]), prediction, subjects)
    return seen._replace(differing={})  # they have no label map


def shares_of(summary: Summary, name: str) -> list[tuple[Score, int]]:
    """Returns sensitivity and specificity of a class, and how many cases each is a share of; none of other classes."""
    shares, row = list[tuple[Score, int]](), summary["classes"].get(name)
    for kind, count in zip(KINDS, cases_behind(summary["cases"], row["cases"]) if row else ()):
        share = number(row[kind])
        right = "" if math.isnan(share) else f" ({round(share * count)} of {count})"
        shares.append((Score(share, 3, right), count))
    return shares


def compare_classifiers(summaries: Mapping[str, Summary]) -> Comparison:
    """Returns the scores of several runs side by side, and how sure each is of each case."""
    table, common = _probabilities_table(summaries) if len(summaries) > 1 else ("", [])
    sentences = _differences(summaries, common) if common else ()
    return Comparison(len(summaries), _scores_table(summaries, bool(common)), table, sentences)


def guessed_by_each(summaries: Mapping[str, Summary], told: Collection[str]) -> list[str]:
    """Returns a sentence on each run whose scores chance explains; ``told``: runs that are known to guess already."""
    each = {name: caution_of_guesses(own) for name, own in summaries.items() if name not in told}
    return [f"{name}: {sentence[0].lower()}{sentence[1:]}" for name, sentence in each.items() if sentence]


def _differences(summaries: Mapping[str, Summary], common: Sequence[str]) -> list[str]:
    """Returns how far the accuracy of each run is above that of the first, over the cases that all of them have."""
    right = {
        name: {case["case"]: case["class"] == case["truth"] for case in summary["metric_per_case"]}
        for name, summary in summaries.items()
    }
    (first, reference), *others = right.items()
    return [_difference(name, first, [(own[case], reference[case]) for case in common]) for name, own in others]


def _difference(name: str, first: str, pairs: Sequence[tuple[bool, bool]]) -> str:
    """Returns how far a run's accuracy is above that of the first; ``pairs``: whether each was right, case by case."""
    both, own, other, neither = (
        pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))
    )
    gap, cases = (own - other) / len(pairs), quantity(len(pairs), "case")
    text = f"The accuracy of {name} equals that of {first}"
    if gap:
        text = f"The accuracy of {name} is {abs(gap):.3f} {'higher' if gap > 0 else 'lower'} than that of {first}"
    text += f", over {cases}: {own} right by {name} alone, {other} by {first} alone"
    if len(pairs) < FEW:
        return f"{text} ({TOO_FEW})."
    low, high, p = compare_shares(both, own, other, neither)
    chance = f", {'which may be chance' if gap else 'so either may be better'}" * (p >= 0.05 or low <= 0 <= high)
    return f"{text} (95 % confidence interval: {low:+.3f} to {high:+.3f}; p = {p:.2g}){chance}. {ABOUT_PAIRS}"


ABOUT_PAIRS = "The interval is Newcombe's for pairs, and p is that of McNemar's exact test."


def _scores_table(summaries: Mapping[str, Summary], is_compared: bool) -> Table | str:
    """Returns the scores of all cases, the runs side by side; ``is_compared``: a table of their cases follows."""
    kinds = dict.fromkeys(kind for summary in summaries.values() for kind in summary["scores"])
    rows = list[TableRow]()
    for kind in kinds:
        few = [f" ({TOO_FEW})" * (fewest_cases(summary, kind) < FEW) for summary in summaries.values()]
        values = [number(summary["scores"].get(kind)) for summary in summaries.values()]
        rows.append(TableRow(kind, [Score(value, 3, end) for value, end in zip(values, few)]))
    classes = dict.fromkeys(name for summary in summaries.values() for name in summary["names"])
    names = list(classes) if len(classes) != 2 else [list(classes)[positive_class(list(classes))]]
    rows += [
        TableRow(f"{kind} ({name})", [own[n][0] if own else "–" for own in shares])
        for name, shares in ((name, [shares_of(summary, name) for summary in summaries.values()]) for name in names)
        for n, kind in enumerate(KINDS)
    ]
    if rows:
        rows.append(TableRow("cases", [Score(summary["cases"], 0) for summary in summaries.values()]))
    note = "Each run's scores are over its own cases"
    note += "; the table below compares the cases that all runs share." if is_compared else "."
    table = Table("class-scores", list(map(TableHead, ("Score", *summaries))), rows, "class", note)
    return table if rows else "No run has scores of cases."


def _probabilities_table(summaries: Mapping[str, Summary]) -> tuple[Table | str, list[str]]:
    """Returns the probability that each run gives the true class of each case that all of them have, and these cases.

    The cases on which the runs differ most come first.
    """
    every = [{case["case"]: case for case in summary["metric_per_case"]} for summary in summaries.values()]
    lines = []
    for name, case in every[0].items():
        if all(name in own for own in every):
            lines.append((name, case["truth"], [of_truth(own[name], s) for own, s in zip(every, summaries.values())]))
    lines.sort(key=lambda line: min(line[2]) - max(line[2]))
    rows = [TableRow(name, [truth, *(Score(value, 3) for value in values)]) for name, truth, values in lines]
    note = f"The probability of the true class, in the {quantity(len(rows), 'case')} that all runs have scored."
    table = Table("probabilities", list(map(TableHead, ("Case", "Truth", *summaries))), rows, "case", note)
    return table if rows else "No case was scored in all of these runs.", [name for name, _, _ in lines]


def _text_of(content: Summary) -> str:
    return "\n".join([quantity(content["cases"], "case"), *class_lines(content), *_cautions(content)])


def _cautions(content: Summary) -> list[str]:
    """Returns what a page says next to these scores: what a constant answer and a guess reach."""
    return list(filter(None, [baseline(content), caution_of_absent(content), caution_of_guesses(content)]))


def _csv_text(content: Summary, groups: Mapping[str, Summary]) -> str:
    """Returns the content of metrics.csv: a line per class; those of each group of cases, with its name, come first."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    ends = [f"{kind} {end}" for kind in ("sensitivity", "specificity") for end in ("low", "high")]
    columns = ("cases", "sensitivity", "specificity", "AUC")
    writer.writerow(["class", *columns, *ends, *["group"] * bool(groups)])
    for which, own in {**groups, "all": content}.items():
        for name, row in own["classes"].items():
            intervals = [number for interval in row["intervals"].values() for number in interval or ("", "")]
            writer.writerow([name, *(row[kind] for kind in columns), *intervals, *[which] * bool(groups)])
    return text.getvalue()
