"""Reads and writes predictions.csv, scores it, and compares the folders and runs that are named."""

import argparse
import csv
import io
import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.cluster.exit_codes import DATA
from seqpar.data.errors import DataError
from seqpar.data.formats import dataset
from seqpar.data.formats.class_lists import read_class_dataset, read_rows
from seqpar.scores.class_scores import score_classes
from seqpar.scores.summary_files import output_files, write_output

TABLE = "predictions.csv"


@dataclass(frozen=True)
class ClassTable:
    """Probabilities ``n k`` of cases, in the order of ``names``, the classes."""

    names: tuple[str, ...]
    cases: tuple[str, ...]
    probabilities: NDArray[np.float64]

    def of(self, cases: Collection[str]) -> "ClassTable":
        """Returns the lines of those of its cases that are among these."""
        at = [number for number, case in enumerate(self.cases) if case in cases]
        return ClassTable(self.names, tuple(self.cases[number] for number in at), self.probabilities[at])

    def text(self) -> str:
        """Returns the content of predictions.csv: case, the class that it is given, the probability of each.

        With all digits: scores that fewer make equal have another area under the ROC curve.
        """
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["case", "class", *(f"p({name})" for name in self.names)])
        for case, row in zip(self.cases, self.probabilities):
            writer.writerow([case, self.names[int(row.argmax())], *(repr(float(p)) for p in row)])
        return text.getvalue()


def read_class_table(path: Path) -> ClassTable:
    """Returns the content of a predictions.csv; raises DataError for what is none."""
    rows = list(read_rows(path, ("case", "class")).values())
    columns = [name for name in rows[0] if name.startswith("p(") and name.endswith(")")] if rows else []
    if len(columns) < 2:
        raise DataError(path, "has no probabilities; columns such as p(healthy) are needed, as predict writes them")
    try:
        values = np.array([[float(row[name]) for name in columns] for row in rows])
    except ValueError as error:
        raise DataError(path, f"holds a probability that is no number ({error}); write it again") from None
    for row, given in zip(rows, values):
        if not np.isfinite(given).all() or (given < 0).any() or abs(given.sum() - 1) > 1e-3:
            raise DataError(path, f"case {row['case']} has probabilities that do not sum to 1; write it again")
    return ClassTable(tuple(name[2:-1] for name in columns), tuple(row["case"] for row in rows), values)


def class_summary(table: ClassTable, truth: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Returns the content of summary.json: scores of the cases of a table whose true class is known, and each case.

    - ``truth``: the class of each case by name; ``path``: of the table, for errors
    """
    names = {name: number for number, name in enumerate(table.names)}
    known = [at for at, case in enumerate(table.cases) if case in truth]
    if not known:
        raise DataError(path, "holds no case whose true class is known; give the truth of these cases")
    if outside := sorted({truth[table.cases[at]] for at in known if truth[table.cases[at]] not in names}):
        raise DataError(path, f"knows the classes {', '.join(table.names)}, but a case is {outside[0]}: correct one")
    numbers = [names[truth[table.cases[at]]] for at in known]
    content = score_classes(numbers, table.probabilities[known], table.names)
    cases = [
        {
            "case": table.cases[at],
            "truth": table.names[number],
            "class": table.names[int(table.probabilities[at].argmax())],
            "probabilities": table.probabilities[at].tolist(),
        }
        for at, number in zip(known, numbers)
    ]
    return {"task": "classify", "names": list(table.names), **content, "metric_per_case": cases}


def as_json(content: Mapping[str, Any]) -> str:
    """Returns JSON with null for NaN, which it does not know."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {name: plain(part) for name, part in value.items()}
        return [plain(part) for part in value] if isinstance(value, list) else value

    return json.dumps(plain(dict(content)), indent=2) + "\n"


def class_lines(content: Mapping[str, Any]) -> list[str]:
    """Returns the scores of a summary as a table in lines."""

    def number(value: float | None) -> str:
        return "  –  " if value is None or math.isnan(value) else f"{value:.3f}"

    lines = list[str]()
    for name, value in content["scores"].items():
        low_high = content["intervals"][name]
        sure = f"  ({number(low_high[0])} to {number(low_high[1])})" if low_high else ""
        lines.append(f"  {name:17} {number(value)}{sure}")
    width = max(len(name) for name in (*content["names"], "class"))
    lines.append(
        f"  {'class':{width}}  cases  sensitivity  specificity  AUC    given as: {', '.join(content['names'])}"
    )
    for name, row, counts in zip(content["names"], content["classes"].values(), content["confusion"]):
        cells = f"{number(row['sensitivity']):>11}  {number(row['specificity']):>11}  {number(row['AUC'])}"
        lines.append(f"  {name:{width}}  {row['cases']:5}  {cells}  {'  '.join(map(str, counts))}")
    return lines


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
        faults = missing_cases(table, classes, path, is_run)
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
    table = path / dataset.TABLE if path.is_dir() else path
    if table.suffix == ".csv" and table.is_file():
        return {row["case"]: row["class"] for row in read_rows(table, ("case", "class")).values()}
    classes = read_class_dataset(path).volume_classes
    if classes is None:
        raise DataError(path, "has no classes of cases; give labels.csv, or a data set with one")
    return {case: classes.names[number] for case, number in classes.numbers.items()}


def missing_cases(table: ClassTable, classes: Mapping[str, str], path: Path, is_run: bool = False) -> list[DataError]:
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
