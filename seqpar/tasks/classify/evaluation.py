"""Scores tables of classes, and says which of several is best."""

import argparse
import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.formats.class_lists import read_class_dataset
from seqpar.report.record import RunRecord, seen_in_training
from seqpar.scores.comparison import FEW, TOO_FEW
from seqpar.scores.summary_files import output_files, refuse_foreign
from seqpar.tasks.case_evaluation import CaseEvaluation, ScoredPrediction, ScoringJob, refuse_duplicates
from seqpar.tasks.classify.scores import (
    ClassTable,
    as_json,
    class_lines,
    class_summary,
    find_table,
    read_class_table,
    read_truth,
    unknown_cases,
)
from seqpar.text import quantity, rounded


class ClassEvaluation(CaseEvaluation):
    """Scores the tables of predict's folders, and of runs, which stand for their last validation."""

    words = (
        "(95 % intervals: Wilson's of accuracy, sensitivity and specificity, the others by bootstrap, stratified by "
        "class; AUC: each class against the others, averaged over classes; predicted "
        "class: the one with the highest probability)"
    )

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.truth = {case: name for case, name in read_truth(options.truth).items() if self._is_scored(case)}

    def _is_scored(self, case: str) -> bool:
        return self.only is None or case in self.only

    def open(self) -> list[ScoringJob]:
        options, jobs = self.options, list[ScoringJob]()
        data = [options.truth] if options.truth.is_dir() else []
        tables = [(named, path) for named in options.prediction if (path := find_table(named))]
        refuse_duplicates(tables)
        for named, path in tables:
            table = read_class_table(path)
            table = table.of([case for case in table.cases if self._is_scored(case)])
            is_run = path.parent.name == "validation" and path.parent.parent == named
            files = output_files(None if is_run else named, options.json, options.csv)
            refuse_foreign(files, data)
            missing = [] if is_run else sorted(self.truth.keys() - set(table.cases))
            jobs.append(ScoringJob(str(named), table, files, unknown_cases(table, self.truth, path), missing))
        return jobs

    def score(self, job: ScoringJob) -> ScoredPrediction | None:
        content = class_summary(job.cases, self.truth, Path(job.name))
        accuracy, auc = content["scores"]["accuracy"], content["scores"]["AUC"]
        left_out = {"faults": list(map(str, job.faults)), "missing": list(job.missing)}
        return ScoredPrediction(
            job.name,
            job.cases,
            "\n".join([quantity(content["cases"], "case"), *class_lines(content)]),
            f"{quantity(content['cases'], 'case')}: accuracy {rounded(accuracy, 4)}, AUC {rounded(auc, 4)}",
            {"json": as_json(content | left_out), "csv": _csv_text(content)},
        )

    def seen_in_training(self, job: ScoringJob, record: RunRecord) -> list[str]:
        return trained_on(record, self.options.truth, [case for case in job.cases.cases if case in self.truth])

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
        return "\n".join([f"all {content['cases']} cases together:", *class_lines(content), self.words])

    def _best(self, tables: Mapping[str, ClassTable]) -> str:
        """Returns which table scores best over the cases that all of them have."""
        common = set.intersection(*(set(table.cases) for table in tables.values())) & self.truth.keys()
        if not common:
            return "the tables have no case in common"
        scores = dict[str, float]()
        for name, table in tables.items():
            content = class_summary(table, {case: self.truth[case] for case in common}, Path(name))
            scores[name] = content["scores"]["balanced accuracy"]
        ranked = sorted(scores, key=lambda name: -scores[name])
        listed = ", ".join(f"{name} {scores[name]:.4f}" for name in ranked)
        few = f" ({TOO_FEW})" if len(common) < FEW else ""
        return f"balanced accuracy over the {quantity(len(common), 'case')} that all tables have: {listed}{few}"


def image_files(data: str | Path) -> dict[str, Path]:
    """Returns the first image of each case of a data set of classes, by name; none of what is no data set."""
    try:
        return {case.id: case.images[0] for case in read_class_dataset(data).cases}
    except (DataError, ValueError):
        return {}


def trained_on(record: RunRecord, truth: Path, cases: Sequence[str]) -> list[str]:
    """Returns a line if a run was trained on scored cases; ``truth``: a data set, or a table alone."""
    known = image_files(truth)
    return seen_in_training(
        record, {case: known.get(case) for case in cases}, lambda: image_files(record.config["data"])
    )


def _csv_text(content: Mapping[str, Any]) -> str:
    """Returns the content of metrics.csv: a line per class."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    ends = [f"{kind} {end}" for kind in ("sensitivity", "specificity") for end in ("low", "high")]
    writer.writerow(["class", "cases", "sensitivity", "specificity", "AUC", *ends])
    for name, row in content["classes"].items():
        intervals = [number for interval in row["intervals"].values() for number in interval or ("", "")]
        writer.writerow([name, *(row[kind] for kind in ("cases", "sensitivity", "specificity", "AUC")), *intervals])
    return text.getvalue()
