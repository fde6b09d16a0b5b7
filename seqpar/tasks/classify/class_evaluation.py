"""Scores tables of predicted classes: of predict's folders, and of runs, which stand for their last validation."""

import argparse
import csv
import io
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.cluster.exit_codes import DATA
from seqpar.data.errors import DataError
from seqpar.data.formats import volume_classes
from seqpar.data.formats.class_lists import read_class_dataset, read_rows
from seqpar.scores.summary_files import output_files, write_output
from seqpar.tasks.classify.class_files import TABLE, ClassTable, as_json, class_lines, class_summary, read_class_table

_OF_LABEL_MAPS = {
    "dataset": None,
    "regions": None,
    "brats": None,
    "lesion_wise": False,
    "nsd_tolerance": 1.0,
    "empty": "skip",
}
WORDS = (
    "(in brackets: 95 % of 1000 draws of the cases, as many of each class; AUC: mean of each class against the others)"
)


def find_class_tables(predictions: Sequence[Path]) -> dict[Path, Path]:
    """Returns the table of each prediction, by what was named; nothing where these are label maps.

    Raises ValueError where there are both, or one of them twice.
    """
    tables, seen = dict[Path, Path](), set[Path]()
    for path in predictions:
        if table := _table_of(path):
            if table.resolve() in seen:
                raise ValueError(f"{path} is named twice, and nothing is better than itself: name it once")
            seen.add(table.resolve())
            tables[path] = table
    if tables and len(tables) < len(predictions):
        other = next(path for path in predictions if path not in tables)
        raise ValueError(f"{other} holds label maps, {next(iter(tables))} classes of cases: evaluate each by itself")
    return tables


def _table_of(path: Path) -> Path | None:
    """Returns the table of classes that a prediction is, or has; None where it has none."""
    places = [path] if path.suffix == ".csv" else [path / TABLE, path / "validation" / TABLE]
    return next((place for place in places if place.is_file()), None)


def _refuse_options(options: argparse.Namespace) -> None:
    """Refuses options of evaluate that do nothing for classes."""
    idle = [name for name, usual in _OF_LABEL_MAPS.items() if getattr(options, name) != usual]
    if idle:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        raise ValueError(f"{flags} would do nothing: the predictions are classes, not label maps: leave it out")


def evaluate_classes(
    options: argparse.Namespace, tables: Mapping[Path, Path], only: Collection[str] | None = None
) -> int:
    """Prints the scores of each table, and of all their cases where they have none in common; returns the exit code.

    - ``options``: of evaluate; ``tables``: those of its predictions, by what was named
    - ``only``: the cases that are looked at; None for all
    """
    _refuse_options(options)
    truth = Path(options.truth)
    classes, any_faults, read = read_truth(truth), False, dict[Path, ClassTable]()
    if only is not None:
        classes = {case: name for case, name in classes.items() if case in only}
    for named, path in tables.items():
        table = read_class_table(path)
        read[named] = table = table if only is None else table.of(only)
        is_run = path.parent.name == "validation" and path.parent.parent == named
        faults = unmatched(table, classes, path, is_run)
        content = class_summary(table, classes, path)
        print(f"\n{named}: {content['cases']} cases" if len(tables) > 1 else f"{content['cases']} cases", flush=True)
        print("\n".join([*class_lines(content), WORDS]), flush=True)
        texts = {"json": as_json(content | {"faults": list(map(str, faults))}), "csv": _csv_text(content)}
        files = output_files(None if is_run else named, options.json, options.csv)
        for kind, file in files.items():
            try:
                write_output(file, texts[kind])
            except DataError as error:
                faults.append(error)
        for fault in faults:
            print(f"error: {fault}", file=sys.stderr, flush=True)
        any_faults |= bool(faults)
        best = f"accuracy {content['scores']['accuracy']:.4f}, AUC {content['scores']['AUC']:.4f}"
        print("; ".join([f"cases {content['cases']}: {best}", *map(str, files.values())]), flush=True)
    if len(read) > 1:
        print(f"\n{_together(list(read.values()), classes, truth) or _best(read, classes)}", flush=True)
    return DATA if any_faults else 0


def read_truth(path: Path) -> dict[str, str]:
    """Returns the class of each case by name: of a table, of a folder with one, or of a list of MONAI's."""
    table = path / volume_classes.TABLE if path.is_dir() else path
    if table.suffix == ".csv" and table.is_file():
        return {row["case"]: row["class"] for row in read_rows(table, ("case", "class")).values()}
    classes = read_class_dataset(path).volume_classes
    if classes is None:
        raise DataError(path, "has no classes of cases; give labels.csv, or a data set with one")
    return {case: classes.names[number] for case, number in classes.numbers.items()}


def unmatched(table: ClassTable, classes: Mapping[str, str], path: Path, is_run: bool = False) -> list[DataError]:
    """Returns what is wrong with cases that lack a prediction, or a true class; a run predicts only some.

    - ``classes``: the true class of each case by name; ``path``: of the table
    """
    lacking = [] if is_run else sorted(classes.keys() - set(table.cases))
    faults = [DataError(path, f"has no line for case {case}; predict it too") for case in lacking]
    unknown = sorted(set(table.cases) - classes.keys())
    return faults + [DataError(path, f"has case {case}, whose true class is not known; add it") for case in unknown]


def _csv_text(content: Mapping[str, Any]) -> str:
    """Returns the content of metrics.csv: a line per class."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", *next(iter(content["classes"].values()))])
    for name, row in content["classes"].items():
        writer.writerow([name, *row.values()])
    return text.getvalue()


def _together(tables: Sequence[ClassTable], classes: Mapping[str, str], truth: Path) -> str:
    """Returns the scores of all cases of tables that have none in common, as folds have; "" of others."""
    cases = tuple(case for table in tables for case in table.cases)
    if len(set(cases)) < len(cases) or len({table.names for table in tables}) > 1:
        return ""
    joined = ClassTable(tables[0].names, cases, np.concatenate([table.probabilities for table in tables]))
    content = class_summary(joined, classes, truth)
    return "\n".join([f"all {content['cases']} cases together:", *class_lines(content), WORDS])


def _best(tables: Mapping[Path, ClassTable], classes: Mapping[str, str]) -> str:
    """Returns which table scores best over the cases that all of them have."""
    common = set.intersection(*(set(table.cases) for table in tables.values())) & classes.keys()
    if not common:
        return "the tables have no case in common"
    scores = dict[Path, float]()
    for path, table in tables.items():
        content = class_summary(table, {case: classes[case] for case in common}, path)
        scores[path] = content["scores"]["balanced accuracy"]
    ranked = sorted(scores, key=lambda path: -scores[path])
    listed = ", ".join(f"{path} {scores[path]:.4f}" for path in ranked)
    return f"balanced accuracy over the {len(common)} cases that all have: {listed}"
