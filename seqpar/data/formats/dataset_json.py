"""Modalities, labels, regions and paths declared in a data set's JSON file, each checked when read."""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import read_json, strip_suffix
from seqpar.data.formats.dataset import Case
from seqpar.data.volumes import read_geometry
from seqpar.text import quantity

MAX_NAMED = 6  # cases in a line
_NAME = re.compile(r"[\w-]+")  # of a reader


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the content of a JSON file, which must be an object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError(path, "must contain a JSON object with the data set's keys")
    if not isinstance(content.get("training", []), list):
        raise DataError(path, '"training" is not a list; make it the list of cases')
    return content


def modalities_of(content: dict[str, Any], path: Path) -> tuple[str, ...]:
    """Returns the names of the channels, in order."""
    channel_names = content.get("channel_names", content.get("modality"))
    names: dict[str, Any] = channel_names if isinstance(channel_names, dict) else {}
    numbers = [str(n) for n in range(len(names))]
    if not numbers or set(numbers) != set(names):
        raise DataError(path, f'channel_names is {channel_names!r}; number the modalities from 0: {{"0": "T1", …}}')
    return tuple(str(names[number]) for number in numbers)


def labels_of(content: dict[str, Any], path: Path) -> tuple[dict[str, int], dict[str, tuple[int, ...]], int | None]:
    """Returns labels, regions and ignore label from either spelling: name to value, or value to name."""
    declared = content.get("labels")
    if not isinstance(declared, dict) or not declared:
        raise DataError(path, f'labels is {declared!r}; it must look like {{"background": 0, "tumour": 1}}')
    if all(key.isdecimal() for key in declared):
        many: dict[str, tuple[int, ...]] = {str(name): (int(value),) for value, name in declared.items()}
    else:
        many = {name: whole_numbers(value, path) for name, value in declared.items()}
    ignore = many.pop("ignore", (None,))[0]
    values = sorted({value for members in many.values() for value in members})
    single = {members[0]: name for name, members in many.items() if len(members) == 1}
    labels = {single.get(value, f"label {value}"): value for value in values}
    if not any(isinstance(value, list) for value in declared.values()):
        if len(labels) != len(declared) - (ignore is not None):
            raise DataError(path, f"labels {declared!r} repeat a name or a value; give each label a value of its own")
        return labels, {}, ignore
    return labels, {name: members for name, members in many.items() if members != (0,)}, ignore


def whole_numbers(value: Any, path: Path) -> tuple[int, ...]:
    """Returns the whole numbers of a label (one) or a region (a list of them)."""
    members = tuple(value) if isinstance(value, list) else (value,)
    if not members or not all(type(member) is int for member in members):
        raise DataError(path, f"labels contain {value!r}; each must be a whole number, or a list of them for a region")
    return members


def order_of(content: dict[str, Any], path: Path) -> tuple[int, ...]:
    """Returns regions_class_order: for each region, the label that its voxels get."""
    order = content.get("regions_class_order")
    if not isinstance(order, list) or not all(isinstance(value, int) for value in order):
        raise DataError(path, f"regions_class_order is {order!r}; it must be a list with one label per region")
    return tuple(order)


def numbered_channels(images: tuple[Path, ...]) -> tuple[str, ...]:
    """Returns "channel 0", "channel 1", … for all channels of files whose channels have no names."""
    return tuple(f"channel {n}" for n in range(sum(read_geometry(image)[1] for image in images)))


def fold_number(value: Any, case: str, path: Path) -> int:
    """Returns a case's fold, which may be written as a text or with a decimal point, as tables of programs have it."""
    number = float(value) if isinstance(value, (int, float, str)) and re.fullmatch(r"\d+(\.0*)?", str(value)) else -1.0
    if number < 0:
        raise DataError(path, f"gives case {case} the fold {value!r}; a fold is a whole number, 0 or more")
    return int(number)


def require_files(case: Case, path: Path) -> Case:
    """Returns the case; raises DataError if one of its files is missing."""
    for file in case.files:
        if not file.exists():
            raise DataError(file, f"is missing; {path.name} lists it for case {case.id}")
    return case


def notes_on_cases(content: dict[str, Any], path: Path, ids: Collection[str]) -> tuple[str, ...]:
    """Returns what a data set's JSON file says otherwise than its files: how many cases there are, and which.

    ids: of the cases that are there, whether they can be used or not.
    """
    notes, number = list[str](), content.get("numTraining")
    if number is not None and number != len(ids):
        notes.append(f"numTraining is {number}, and there are {quantity(len(ids), 'case')}")
    entries = [entry.get("image") if isinstance(entry, dict) else entry for entry in content.get("training", ())]
    listed = {_case_of(image) for image in entries if isinstance(image, str)}
    if listed and (absent := sorted(listed.difference(ids))):
        notes.append(f"training lists cases that are not there: {_shortened(absent)}")
    if listed and (extra := sorted(set(ids) - listed)):
        notes.append(f"training does not list cases that are there: {_shortened(extra)}")
    return tuple(f"{path}: {note}; correct it, or the files" for note in notes)


def _shortened(ids: Sequence[str]) -> str:
    return ", ".join(ids[:MAX_NAMED]) + ", …" * (len(ids) > MAX_NAMED)


def _case_of(image: str) -> str:
    """Returns the case of an image's file name, with or without the number of a channel."""
    return re.sub(r"_\d{4}$", "", strip_suffix(Path(image).name))


def readers_of(content: dict[str, Any], path: Path) -> tuple[tuple[str, ...], bool]:
    """Returns the names of the readers, () if there is one label per case, and whether labels are probabilities."""
    readers, probabilities = content.get("readers", []), content.get("soft_labels", False)
    named = isinstance(readers, list) and all(isinstance(name, str) and _NAME.fullmatch(name) for name in readers)
    if not named or len({*readers}) != len(readers) or len(readers) == 1:
        raise DataError(
            path, f'readers is {readers!r}; it must list at least two names of letters, digits, "-" and "_", each once'
        )
    if type(probabilities) is not bool:
        raise DataError(path, f"soft_labels is {probabilities!r}; it must be true or false")
    if readers and probabilities:
        raise DataError(path, "declares both readers and soft_labels; keep one: readers' labels are label maps")
    return tuple(readers), probabilities


def listed_labels(entry: Any, root: Path, readers: Sequence[str]) -> tuple[Path, ...]:
    """Returns the label files of a case that a JSON file lists: one path, or a list with one per reader."""
    if not readers:
        return (resolve_path(root, entry),)
    if not isinstance(entry, list) or len(entry) != len(readers):
        raise TypeError
    return tuple(resolve_path(root, each) for each in entry)


def resolve_path(root: Path, name: str) -> Path:
    """Returns the path of a file named in a list, relative to the list's folder."""
    return root / os.path.expandvars(name)
