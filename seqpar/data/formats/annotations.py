"""Which classes each case's label shows, for data sets in which not every organ was drawn in every case.

A data set can list them in three ways; a case that is not listed shows all classes:
- ``"annotated": {"CASE": ["liver", "spleen"]}`` in its JSON file
- ``annotated.csv`` next to it: a header ``case,liver,spleen``, and 1 or 0 for each case and class
- ``annotated/CASE.txt`` next to it: one class per line
"""

import csv
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from seqpar.data.errors import DataError, unreadable
from seqpar.data.formats.dataset import Dataset
from seqpar.data.formats.dataset_json import read_json_object

Listed = dict[str, Sequence[str]]  # classes by case


def lists_annotations(root: Path) -> bool:
    """Returns whether a folder, or a JSON file, has a list of the annotated classes of some case."""
    return bool(_lists_at(root)[1])


def _lists_at(root: Path) -> tuple[Path, list[Path]]:
    """Returns the JSON file of a folder, or that file, and which lists of annotated classes are there."""
    folder, json = (root.parent, root) if root.suffix == ".json" else (root, root / "dataset.json")
    listed = json.is_file() and read_json_object(json).get("annotated") is not None
    return json, [json] * listed + tables_at(folder)


def tables_at(folder: Path) -> list[Path]:
    """Returns the table of annotated classes in a folder, and the folder of texts, as far as they are there."""
    table, texts = folder / "annotated.csv", folder / "annotated"
    return [table] * table.exists() + [texts] * any(texts.glob("*.txt"))


def with_annotations(dataset: Dataset, root: Path, with_others: bool = False) -> Dataset:
    """Returns the data set with the annotated classes of each case filled in.

    - ``root``: its folder or JSON file
    - ``with_others``: lists may name cases that the data set does not have
    """
    json, present = _lists_at(root)
    if not present:
        return dataset
    if len(present) > 1:
        raise DataError(present[1], f"lists annotated classes, and so does {present[0].name}; keep one of them")
    (path,) = present
    if path == json:
        listed = _checked_json(read_json_object(json)["annotated"], path)
    else:
        listed = _read_csv(path, dataset.labels) if path.suffix == ".csv" else _read_folder(path)
    if dataset.soft is not None:
        raise DataError(path, "lists annotated classes, and labels with doubt show all classes; remove the list")
    if with_others:
        own = {case.id for case in dataset.cases}
        if others := sorted(listed.keys() - own):
            told = f"{path}: lists cases that are not among the label maps ({len(others)}), such as {others[0]}"
            dataset = replace(dataset, notes=(*dataset.notes, f"{told}: these lines are ignored"))
        listed = {case: names for case, names in listed.items() if case in own}
    values = _values_of(listed, dataset, path)
    cases = [replace(case, annotated=values.get(case.id)) for case in dataset.cases]
    return replace(dataset, cases=tuple(cases))


def _checked_json(listed: object, path: Path) -> Listed:
    if not isinstance(listed, dict) or not all(isinstance(names, list) for names in listed.values()):
        raise DataError(path, '"annotated" must be an object of lists: {"CASE": ["liver", …], …}')
    return {str(case): [str(name) for name in names] for case, names in listed.items()}


def _read_csv(path: Path, classes: Collection[str]) -> Listed:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file) if any(row)]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(path, f"cannot be read ({error}); save it as CSV") from error
    if not rows or rows[0][:1] != ["case"]:
        raise DataError(
            path, f"begins with {','.join(rows[0]) if rows else 'nothing'}; it needs the header case,CLASS,…"
        )
    header, listed = rows[0][1:], Listed()
    if unknown := [name for name in header if name and name not in classes]:
        raise DataError(path, f"has a column {unknown[0]}; the classes are {', '.join([*classes][1:])}")
    for case, *marks in rows[1:]:
        if len(marks) != len(header) or not set(marks) <= {"0", "1"}:
            raise DataError(path, f"case {case} has {','.join(marks)}; it needs 0 or 1 for each of {','.join(header)}")
        if case in listed:
            raise DataError(path, f"lists case {case} twice; keep one of the lines")
        listed[case] = [name for name, mark in zip(header, marks) if mark == "1"]
    return listed


def _read_folder(folder: Path) -> Listed:
    try:
        files = {file.stem: file.read_text() for file in sorted(folder.glob("*.txt")) if file.name[0] != "."}
    except OSError as error:
        raise unreadable(folder, error) from error
    return {case: [line.strip() for line in text.splitlines() if line.strip()] for case, text in files.items()}


def _values_of(listed: Listed, dataset: Dataset, path: Path) -> Mapping[str, tuple[int, ...]]:
    """Returns the listed classes' values in the label files, without the background."""
    known = {name: value for name, value in dataset.labels.items() if value}
    usable = {case.id for case in dataset.cases}
    if dataset.faults:  # a case with a fault may be listed
        usable |= listed.keys()
    for case, names in listed.items():
        if case not in usable:
            raise DataError(
                path,
                f"lists case {case}, which the data set does not have; correct or remove it, and "
                "list cases of a test set next to their label maps",
            )
        if unknown := [name for name in names if name not in known and name not in dataset.labels]:
            raise DataError(path, f"says that case {case} shows {unknown[0]}; the classes are {', '.join(known)}")
    return {case: tuple(sorted(known[name] for name in set(names) & known.keys())) for case, names in listed.items()}
