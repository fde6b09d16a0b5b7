"""predictions.csv, the scores of the classes in it, and what the maps of its cases have in common."""

import csv
import hashlib
import io
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.data.errors import DataError
from seqpar.data.files import read_json, read_whole
from seqpar.data.formats import dataset
from seqpar.data.formats.class_lists import read_class_dataset, read_rows, subjects_of
from seqpar.prediction.prediction_folder import MAPS, RECORD, say_replaced
from seqpar.report.images import as_utf8, recorded_cases, say_unlisted
from seqpar.scores.class_scores import (
    TABLE,
    cases_behind,
    describe_share,
    doubt_of_area,
    fewest_cases,
    score_classes,
    words_of_interval,
)
from seqpar.scores.comparison import FEW
from seqpar.text import quantity

EXPLANATIONS = "explanations"  # in predict's folder
ROWS = "rows"  # in the summary.json of a run's own validation: what tells each row of its table


@dataclass(frozen=True)
class ClassTable:
    """Probabilities ``n k`` of cases, in the order of ``names``, the classes.

    ``others``: columns of the file that predict did not write.
    """

    names: tuple[str, ...]
    cases: tuple[str, ...]
    probabilities: NDArray[np.float64]
    others: tuple[str, ...] = ()

    def of(self, cases: Collection[str]) -> "ClassTable":
        """Returns the lines of those of its cases that are among these."""
        at = [number for number, case in enumerate(self.cases) if case in cases]
        return ClassTable(self.names, tuple(self.cases[number] for number in at), self.probabilities[at])

    def text(self) -> str:
        """Returns the content of predictions.csv: case, the class that it is given, the probability of each.

        The class is the most probable one, of equal ones the first. Probabilities have all digits: scores that fewer
        make equal have another area under the ROC curve.
        """
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["case", "class", *(f"p({name})" for name in self.names)])
        for case, row in zip(self.cases, self.probabilities):
            writer.writerow([case, self.names[int(row.argmax())], *(repr(float(p)) for p in row)])
        return text.getvalue()


def find_table(path: Path) -> Path | None:
    """Returns the table of classes that a prediction is, or has; None if it has none."""
    places = [path] if path.suffix == ".csv" else [path / TABLE, path / "validation" / TABLE]
    return next((place for place in places if place.is_file()), None)


def read_class_table(path: Path, may_be_cut: bool = False) -> ClassTable:
    """Returns the content of a predictions.csv; raises DataError for what is none.

    - ``may_be_cut``: whether its last line may lack its end, and with it digits
    """
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
    if not may_be_cut and not path.read_bytes().endswith((b"\n", b"\r")):
        raise DataError(
            path, "ends within a line, as if it had been cut off: copy or predict it again, or add a line break if its "
            "last line is whole"
        )  # fmt: skip
    names = tuple(name[2:-1] for name in columns)
    for row, given in zip(rows, values):
        if row["class"] not in names:
            raise DataError(
                path, f"case {row['case']} has the class {row['class']}, and the probabilities are of "
                f"{', '.join(names)}; correct either"
            )  # fmt: skip
        if row["class"] != (first := names[int(given.argmax())]):
            is_equal = given[names.index(row["class"])] == given.max()
            why = "as probable and comes first" if is_equal else "more probable"
            own = row["class"]
            raise DataError(path, f"case {row['case']} has the class {own}, and {first} is {why}; correct either")
    others = tuple(name for name in rows[0] if name not in ("case", "class", *columns))
    return ClassTable(names, tuple(row["case"] for row in rows), values, others)


def row_stamps(text: str) -> dict[str, list[Any]]:
    """Returns what tells the row of each case from one that replaces it, in the text of a predictions.csv."""
    rows = {row["case"]: repr(sorted(row.items())).encode() for row in csv.DictReader(io.StringIO(text))}
    return {case: [len(row), hashlib.blake2b(row, digest_size=8).hexdigest()] for case, row in rows.items()}


def replaced_rows(folder: Path) -> str:
    """Returns which rows of a predictions.csv are not as they were written, or gone; "" if none, or nothing tells.

    - ``folder``: that has it, of predict or a run's own validation, or the file itself
    """
    if (path := find_table(folder)) is None:
        return ""
    try:
        record, there = path.with_name(RECORD), row_stamps(read_whole(path).decode("utf-8-sig"))
        known = read_json(record)[MAPS] if record.exists() else read_json(path.with_name("summary.json"))[ROWS]
        others = [case for case, stamp in there.items() if known.get(case, stamp) != stamp]
        lost = [case for case in known if case not in there]
    except (DataError, OSError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    told = list[str]()
    if others:
        told.append(say_replaced(len(others), f"{quantity(len(there), 'row')} of {path}, such as that of {others[0]}"))
    if lost:
        was = "was" if len(lost) == 1 else "were"
        told.append(f"{path} lacks {quantity(len(lost), 'row')} that {was} written, such as that of {lost[0]}.")
    return " ".join(told)


def unlisted_rows(folder: Path) -> tuple[list[str], str]:
    """Returns the cases whose rows joined a predictions.csv in a folder of predictions that does not name them, and a
    sentence; ``folder``: as of `replaced_rows`.
    """
    path = find_table(folder)
    known = recorded_cases(path.parent, ("files", "inputs", MAPS)) if path else None
    if path is None or known is None:
        return [], ""
    there = [row["case"] for row in read_rows(path, ("case", "class")).values()]
    others = [case for case in there if as_utf8(case) not in known]
    named = f"{quantity(len(there), 'row')} of {path}, such as that of {next(iter(others), '')}"
    return others, say_unlisted(len(others), named)


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


def rescore(summary: Mapping[str, Any], cases: Collection[str]) -> dict[str, Any]:
    """Returns the content of a summary.json whose scores are those of some of its cases alone."""
    own, names = [case for case in summary["metric_per_case"] if case["case"] in cases], list(summary["names"])
    given = np.array([case["probabilities"] for case in own], float)
    return {
        **summary,
        **score_classes([names.index(case["truth"]) for case in own], given, names),
        "metric_per_case": own,
    }


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

    def number_of(value: float | None) -> float:
        return math.nan if value is None else value

    def number(value: float | None) -> str:
        return "  –  " if math.isnan(number_of(value)) else f"{value:.3f}"

    lines = list[str]()
    for name, value in content["scores"].items():
        sure = words_of_interval(content["intervals"][name], fewest_cases(content, name))
        lines.append(f"  {name:17} {number(value)}" + f"  ({sure})" * bool(sure))
    names = content["names"]
    width = max(len(name) for name in (*names, "true class"))
    lines.append(f"  {'class':{width}}  cases  {'sensitivity':24}  {'specificity':24}  AUC")
    for name, row in content["classes"].items():
        cells = ""
        for kind, count in zip(("sensitivity", "specificity"), cases_behind(content["cases"], row["cases"])):
            sure = describe_share(number_of(row[kind]), count)
            cells += f"  {number(row[kind]) + f' ({sure})' * bool(sure):24}"
        lines.append(f"  {name:{width}}  {row['cases']:5}{cells}  {number(row['AUC'])}{doubt_of_area(content, name)}")
    lines.append(f"  {'true class':{width}}  " + "  ".join(f"predicted {name}" for name in names))
    for name, counts in zip(names, content["confusion"]):
        numbers = (f"{count:>{len('predicted ' + other)}}" for count, other in zip(counts, names))
        lines.append(f"  {name:{width}}  {'  '.join(numbers)}")
    return lines


def read_truth(path: Path) -> dict[str, str]:
    """Returns the class of each case by name: of a table, of a folder with one, or of a list of MONAI's."""
    table = path / dataset.TABLE if path.is_dir() else path
    if table.suffix == ".csv" and table.is_file():
        return {row["case"]: row["class"] for row in read_rows(table, ("case", "class")).values()}
    classes = read_class_dataset(path).volume_classes
    if classes is None:
        raise DataError(path, "has no classes of cases; give labels.csv, or a data set with one")
    return {case: classes.names[number] for case, number in classes.numbers.items()}


def read_subjects(path: Path) -> dict[str, str]:
    """Returns the subject of each case by name, as far as what ``read_truth`` reads names it."""
    table = path / dataset.TABLE if path.is_dir() else path
    if table.suffix == ".csv" and table.is_file():
        return subjects_of(read_rows(table, ("case", "class")).values(), table)
    classes = read_class_dataset(path).volume_classes
    return dict(classes.subjects) if classes else {}


def unknown_cases(table: ClassTable, classes: Mapping[str, str], path: Path) -> list[DataError]:
    """Returns an error for each case of a table that has no true class.

    - ``classes``: the true class of each case by name; ``path``: of the table
    """
    unknown = sorted(set(table.cases) - classes.keys())
    return [DataError(path, f"has case {case}, whose true class is not known; add it") for case in unknown]


def of_truth(case: Mapping[str, Any], summary: Mapping[str, Any]) -> float:
    """Returns the probability of a case's true class."""
    return float(case["probabilities"][list(summary["names"]).index(case["truth"])])


def worst_cases(summary: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Returns the cases whose true class has the least probability, the worst first."""
    return sorted(summary["metric_per_case"], key=lambda case: of_truth(case, summary))[:count]


def verdict_on(case: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Returns a case's true and predicted class in words, and the probabilities that the reader cannot add up."""
    is_right, names = case["class"] == case["truth"], list(summary["names"])
    probability = case["probabilities"][names.index(case["class"])]
    text = f"Predicted: {case['class']} with a probability of {probability:.3f} ({'correct' if is_right else 'wrong'})."
    if len(names) > 2 and not is_right:
        text += f" Probability of the true class: {of_truth(case, summary):.3f}."
    return f"True class: {case['truth']}. {text}"


NEAR = 0.1  # of the image's extent along each direction
Place = tuple[float, ...]


def place_of_maximum(seen: NDArray[Any]) -> Place | None:
    """Returns where the maximum of a map ``W D H``, which is 1, is in shares of its extents; None if it is not in it.

    It may be outside the image, whose file has the rest of the map.
    """
    at = np.unravel_index(int(seen.argmax()), seen.shape)
    return tuple((int(n) + 0.5) / side for n, side in zip(at, seen.shape)) if seen[at] > 0.999 else None


def what_maps_share(places: Mapping[str, Place], classes: Mapping[str, str]) -> str:
    """Returns a sentence if the maxima of most maps are at the same place, whichever class was predicted; else "".

    - ``places``: where each case's maximum is; ``classes``: which class each was given
    """
    if len(places) < FEW:
        return ""
    every = np.array(list(places.values()))
    near = (np.abs(every[:, None] - every) <= NEAR).all(-1)
    own = near[int(near.sum(1).argmax())]
    given = np.array([classes[case] for case in places])
    names = [str(name) for name in np.unique(given)]
    shared = [name for name in names if 2 * int(own[given == name].sum()) >= int((given == name).sum())]
    if 2 * int(own.sum()) <= len(own) or len(shared) < min(2, len(names)):  # a place of one class is its own
        return ""
    text = f"Of {len(own)} maps whose maximum is in the image, {own.sum()} have it at the same place, to "
    text += f"within {NEAR:.0%} of the image's extent"
    if len(names) > 1:
        return f"{text}, whichever class was predicted: the maps show a habit of the network, not the single case."
    return f"{text}. All were predicted as {names[0]}: it may be a habit of the network, and not tell about the case."
