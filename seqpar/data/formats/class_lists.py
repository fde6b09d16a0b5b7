"""Reads data sets whose volumes have one class each: labels.csv next to images, or a MONAI list with ``label``.

``labels.csv`` has the columns ``case`` and ``class``, optionally ``subject`` or ``patient`` (its cases stay together;
``patient_id`` and the like are taken too) and ``split`` (train, val or test, or a fold number); other columns are
ignored. An entry of a list may name its subject or patient, too.
"""

import csv
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError, unreadable
from seqpar.data.files import SUFFIXES, refuse_special
from seqpar.data.formats.dataset import TABLE, Case, Dataset, Split, VolumeClasses
from seqpar.data.formats.dataset_json import fold_number, read_json_object, resolve_path
from seqpar.data.formats.recognise import describe, find_dataset
from seqpar.data.formats.splits import check_classes
from seqpar.text import quantity

_NO_LETTERS = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of characters, separators of lines
PATIENTS = ("subject", "patient")  # two names of one column
ID_OF_PATIENT = re.compile(r"(subject|patient|participant)[ _-]?id", re.I)  # another name, where neither is there
COLUMNS = ("case", "class", *PATIENTS, "split")
SPLITS = {"train": "train", "training": "train", "val": "val", "validation": "val", "test": "test"}
Row = dict[str, str]


def read_class_dataset(path_or_name: str | Path | int) -> Dataset:
    """Returns a data set of images with the class of each; voxel labels are ignored.

    Raises DataError if the table or an image is faulty.
    """
    root = find_dataset(path_or_name)
    if root.suffix == ".csv":
        raise DataError(root, f"is a table; give the folder of its images, which has it as {TABLE}: {root.parent}")
    dataset = describe(root, labelled=False)
    if faults := dataset.faults:
        more = f" (and {quantity(len(faults) - 1, 'more fault')})" if len(faults) > 1 else ""
        raise DataError(faults[0].path, faults[0].problem + more)
    table = root / TABLE if root.is_dir() else root
    if root.is_dir() and not table.is_file():
        lists = [path for path in sorted(root.glob("*.json")) if read_json_object(path).get("training")]
        if len(lists) != 1:
            raise DataError(table, "is missing; add a table with the header case,class, or give a MONAI list")
        table = lists[0]
    read = read_table if table.suffix == ".csv" else _read_list
    classes = check_classes(read(table, dataset.cases), table)
    cases = tuple(replace(case, label=None) for case in dataset.cases if case.id in classes.numbers)
    return replace(
        dataset,
        cases=cases,
        labels={},
        layout=f"{dataset.layout.removesuffix(' alone')} with one class each",
        volume_classes=classes,
    )


def read_table(path: Path, cases: Sequence[Case]) -> VolumeClasses:
    """Returns the classes in a table of all cases except those of its test split."""
    rows = read_rows(path, ("case", "class"))
    _refuse_alike(((row["class"], f"line {number}") for number, row in rows.items()), path)
    listed = _by_case(rows, path, {case.id for case in cases})
    if missing := sorted({case.id for case in cases} - listed.keys()):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise DataError(path, f"has no line for case {missing[0]}{more}; add its class, or remove the image")
    splits, folds, used = _splits(listed, path)
    names = _sorted_names({row["class"] for row in listed.values()})
    numbers = {case: names.index(listed[case]["class"]) for case in used}
    subjects = subjects_of(listed.values(), path)
    return VolumeClasses(names, numbers, subjects, splits, tuple(sorted(listed.keys() - set(used))), folds)


def read_rows(path: Path, needed: Sequence[str]) -> dict[int, Row]:
    """Returns the rows of a table by line number, each a dict by column; raises DataError if it is no such table.

    - ``needed``: columns that no row may leave empty; each cell of the first one is unique
    """
    refuse_special(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            numbered = [(reader.line_num, [cell.strip() for cell in row]) for row in reader]
    except OSError as error:
        raise unreadable(path, error) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(path, f"cannot be read ({error}); save it as CSV in UTF-8") from error
    lines = [(number, row) for number, row in numbered if any(row)]
    header = [name.casefold() if name.casefold() in COLUMNS else name for name in lines[0][1]] if lines else []
    if missing := [name for name in needed if name not in header]:
        told = f"begins with {','.join(header) or 'nothing'}; it needs a header with {' and '.join(missing)}"
        others = [
            name for mark, name in ((";", "semicolons"), ("\t", "tabs")) if len(header) == 1 and mark in header[0]
        ]
        told += f", separated by commas, not by {others[0]}: save it as CSV with commas" if others else ""
        raise DataError(path, told)
    if twice := next((name for name in header if name and header.count(name) > 1), ""):
        raise DataError(path, f"has two columns {twice}; keep one of them")
    rows, first, seen = dict[int, Row](), needed[0], set[str]()
    for number, cells in lines[1:]:
        row = dict(zip(header, cells))
        if len(cells) != len(header):
            raise DataError(path, f"line {number} has {len(cells)} cells; {len(header)} are needed: {','.join(header)}")
        if empty := next((name for name in needed if not row[name]), ""):
            raise DataError(path, f"line {number}, {first} {row[first] or 'without a name'}, has no {empty}; fill it")
        if "class" in needed:
            refuse_class_name(row["class"], f"line {number}, {first} {row[first]},", path)
        if row[first] in seen:
            raise DataError(path, f"line {number} names {first} {row[first]} a second time; keep one line")
        seen.add(row[first])
        rows[number] = row
    return rows


def subjects_of(rows: Iterable[Row], path: Path) -> dict[str, str]:
    """Returns the patient of each case that a table names; raises DataError if two columns do."""
    subjects = dict[str, str]()
    for row in rows:
        names = columns_of_patients(row)
        if len(names) > 1:
            raise DataError(path, f"has the columns {' and '.join(names)}, which both name the patient; keep one")
        if patient := next((row[name] for name in names if row[name]), ""):
            subjects[row["case"]] = patient
    return subjects


def columns_of_patients(names: Collection[str]) -> list[str]:
    """Returns the columns that name the patient of a case: subject or patient, or else the first like patient_id."""
    own = [name for name in names if name in PATIENTS]
    return sorted(own, key=PATIENTS.index) or [name for name in names if ID_OF_PATIENT.fullmatch(str(name))][:1]


def refuse_class_name(name: str, whose: str, path: Path) -> None:
    """Raises DataError for what stands where a class is missing or was not read as text."""
    if name.casefold() in ("", "nan") or any(unicodedata.category(letter) in _NO_LETTERS for letter in name):
        raise DataError(path, f"{whose} has the class {name!r}; a class needs a name that can be read, other than nan")


def _refuse_alike(named: Iterable[tuple[str, str]], path: Path) -> None:
    """Raises DataError if the names of two classes differ in upper and lower case alone.

    - ``named``: a name, and where it is
    """
    first = dict[str, tuple[str, str]]()
    for name, place in named:
        other, before = first.setdefault(name.casefold(), (name, place))
        if other != name:
            raise DataError(
                path, f"{before} has the class {other!r} and {place} {name!r}, which would be two classes; write both "
                "the same way, or give them names that differ in more than upper and lower case"
            )  # fmt: skip


def _by_case(rows: Mapping[int, Row], path: Path, known: set[str]) -> dict[str, Row]:
    """Returns each case's row; raises DataError for a case without an image."""
    for number, row in rows.items():
        if row["case"] not in known:
            near, case = f" (the first one with an image is {min(known)})" if known else "", row["case"]
            told, channel = f"line {number} names case {case}, which has no image{near}", re.search(r"_\d{4}$", case)
            if channel and case[: channel.start()] in known:
                why = f"{channel[0]} at the end of an image's name counts as its channel"
                raise DataError(path, f"{told}: {why}; rename the images, such as to {case}_0000")
            raise DataError(path, f"{told}; correct or remove it")
    return {row["case"]: row for row in rows.values()}


def _splits(listed: Mapping[str, Row], path: Path) -> tuple[tuple[Split, ...], tuple[int, ...], list[str]]:
    """Returns a table's splits, their fold numbers if it has any, and the cases outside its test split."""
    texts = {case: row.get("split", "").casefold() for case, row in listed.items()}
    if not any(texts.values()):
        return (), (), list(listed)
    if all(text.isdecimal() for text in texts.values()):
        return *_folds({case: int(text) for case, text in texts.items()}), list(listed)
    for case, text in texts.items():
        if text not in SPLITS:
            what = f"the split {text!r}" if text else "no split"
            raise DataError(path, f"case {case} has {what}; it needs train, val or test, or "
                            "every line needs a fold number")  # fmt: skip
    parts = {part: tuple(c for c in sorted(texts) if SPLITS[texts[c]] == part) for part in ("train", "val")}
    return ((parts["train"], parts["val"]),), (), [*parts["train"], *parts["val"]]


def _folds(number_of: Mapping[str, int]) -> tuple[tuple[Split, ...], tuple[int, ...]]:
    """Returns one split per number, which holds out that number's cases, and the numbers."""
    every, numbers = sorted(number_of), tuple(sorted(set(number_of.values())))
    splits = (
        (tuple(c for c in every if number_of[c] != fold), tuple(c for c in every if number_of[c] == fold))
        for fold in numbers
    )
    return tuple(splits), numbers


def _sorted_names(names: set[str]) -> tuple[str, ...]:
    """Returns the names in order: by value if all are numbers, else alphabetically."""
    if all(name.isdecimal() for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def _read_list(path: Path, cases: Sequence[Case]) -> VolumeClasses:
    """Returns the classes in a MONAI list, whose entries give ``label`` as a number or a name."""
    content, by_file = read_json_object(path), {file: case.id for case in cases for file in case.images}
    labels, subjects, folds, held_out = dict[str, Any](), dict[str, str](), dict[str, int](), list[str]()
    for key in ("training", "validation"):
        for entry in content.get(key, ()):
            case = _case_of(entry, by_file, path)
            if case in labels:
                raise DataError(path, f"lists case {case} for training and for validation; keep one of them")
            labels[case] = _label_of(entry, case, path)
            named = [str(entry[name]) for name in columns_of_patients(entry) if entry[name] is not None]
            if len({*named}) > 1:
                raise DataError(path, f"gives case {case} two patients ({' and '.join(named)}); keep one of them")
            if named:
                subjects[case] = named[0]
            if entry.get("fold") is not None:
                folds[case] = fold_number(entry["fold"], case, path)
            held_out += [case] * (key == "validation")
    if folds and len(folds) < len(labels):
        raise DataError(path, f"gives {len(folds)} of {len(labels)} cases a fold number; give all of them one")
    names = _named(content.get("labels"), labels, path)
    _refuse_alike(((names[label], f"case {case}") for case, label in labels.items()), path)
    own = tuple(sorted(labels.keys() - set(held_out))), tuple(sorted(held_out))
    splits, numbers = _folds(folds) if folds else ((own,) if held_out else (), ())
    order = tuple(dict.fromkeys(names.values()))
    number_of = {case: order.index(names[label]) for case, label in labels.items()}
    return VolumeClasses(order, number_of, subjects, splits, folds=numbers)


def _case_of(entry: Any, by_file: Mapping[Path, str], path: Path) -> str:
    """Returns the case of a list entry; raises DataError if the data set has no such case.

    The lists of older nnU-Net versions name files that do not exist, and their labels are maps.
    """
    images = entry.get("image") if isinstance(entry, dict) else None
    first = images[0] if isinstance(images, list) and images else images
    if not isinstance(first, str) or (case := by_file.get(resolve_path(path.parent, first))) is None:
        raise DataError(path, f"lists {entry!r:.200}, which is not an image with a class; add {TABLE} next to it, a "
                        "table with the header case,class")  # fmt: skip
    return case


def _label_of(entry: Mapping[str, Any], case: str, path: Path) -> int | str:
    """Returns the label of a list entry, a number or a name; raises DataError for anything else."""
    label = entry.get("label")
    label = label.strip() if isinstance(label, str) else label
    if isinstance(label, bool) or not isinstance(label, int | str) or label == "":
        raise DataError(path, f"case {case} has the label {label!r}; it must be a whole number or the name of a class")
    refuse_class_name(str(label), f"case {case}", path)
    if str(label).endswith(SUFFIXES):
        raise DataError(path, f"case {case} has the label {label}, a volume; give the class of the whole case "
                        "(label maps are for --task segment)")  # fmt: skip
    return label


def _named(declared: Any, labels: Mapping[str, Any], path: Path) -> dict[Any, str]:
    """Returns the class name of each label, in the order of classes: the declared names, else the labels themselves."""
    if declared is None:
        order = _sorted_names({str(label) for label in labels.values()})
        return {label: str(label) for label in sorted(set(labels.values()), key=lambda own: order.index(str(own)))}
    try:
        pairs = [(name, value) if isinstance(value, int) else (value, name) for name, value in declared.items()]
        numbered = {int(number): str(name).strip() for name, number in pairs}
    except (AttributeError, TypeError, ValueError):
        numbered = {}
    if not numbered:
        raise DataError(path, f'"labels" is {declared!r}; it must look like {{"0": "healthy", "1": …}}')
    for number, name in numbered.items():
        refuse_class_name(name, f'label {number} of "labels"', path)
    known = {number: numbered[number] for number in sorted(numbered)}
    meaning: dict[Any, str] = {**known, **{name: name for name in known.values()}}
    for case, label in labels.items():
        if label not in meaning:
            listed = ", ".join(f"{number} {name}" for number, name in known.items())
            raise DataError(path, f"case {case} has the label {label!r}, but {listed} are declared; correct either")
    return meaning
