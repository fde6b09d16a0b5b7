"""Reads lists of cases in JSON, as MSD (Decathlon) and MONAI write them."""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import strip_suffix
from seqpar.data.formats.brats import KINDS, LABEL_SCHEMES, kind_of, label_scheme_of, meaning_with
from seqpar.data.formats.dataset import LISTED, Case, Dataset, Split
from seqpar.data.formats.dataset_json import (
    fold_number,
    labels_of,
    listed_labels,
    modalities_of,
    notes_on_cases,
    numbered_channels,
    order_of,
    read_json_object,
    readers_of,
    require_files,
    resolve_path,
)
from seqpar.data.formats.splits import patients_of

Declared = tuple[dict[str, int], dict[str, tuple[int, ...]], tuple[int, ...], int | None]
_NOTHING: Declared = ({}, {}, (), None)  # of images without labels


def read_decathlon(root: Path, labelled: bool = True) -> Dataset:
    """Returns the data set of an MSD folder: a ``training`` list, all modalities in one 4-D file."""
    path = root / "dataset.json"
    content = read_json_object(path)
    readers, probabilities = readers_of(content, path) if labelled else ((), False)
    cases, _, faults = _listed(content["training"], "training", path, labelled, readers)
    labels, regions, order, ignore = _declared(content, path) if labelled else _NOTHING
    notes = () if faults else notes_on_cases(content, path, cases)
    return Dataset(
        str(content.get("name") or root.name), root, "Medical Segmentation Decathlon", tuple(cases.values()),
        modalities_of(content, path), labels, regions, order, ignore, faults=tuple(faults), notes=notes,
        readers=readers, probabilities=probabilities,
    )  # fmt: skip


def read_fold_json(path: Path, labelled: bool = True) -> Dataset:
    """Returns the data set of a MONAI list: ``training`` with folds, or with ``validation``."""
    content = read_json_object(path)
    readers, probabilities = readers_of(content, path) if labelled else ((), False)
    cases, folds, faults = _listed(content["training"], "training", path, labelled, readers)
    held_out, _, more_faults = _listed(
        content.get("validation", []), "validation", path, labelled, readers, next(iter(cases.values()), None)
    )
    if not cases:
        raise (faults or [DataError(path, "lists no cases; fill its training list")])[0]
    all_cases = cases | held_out
    if labelled and (both := sorted(set(cases) & set(held_out))):
        more_faults.append(DataError(path, f"lists case {both[0]} for training and for validation; keep one of them"))
    first = next(iter(cases.values()))
    named = [kind for kind in map(kind_of, first.images) if kind and kind[1] in KINDS]
    if not labelled:
        labels, regions, order, ignore = _NOTHING
    elif "labels" in content:
        labels, regions, order, ignore = _declared(content, path)
    elif named:
        meaning = LABEL_SCHEMES[label_scheme_of(*named[0], first.images[0])]
        labels, regions, order, ignore = meaning.labels, meaning.regions, meaning.order, None
    else:
        raise DataError(path, 'does not declare its labels; add "labels": {"0": "background", "1": …}')
    if "modality" in content or "channel_names" in content:
        modalities = modalities_of(content, path)
    elif len(named) == len(first.images):
        modalities = tuple(KINDS[kind] for _, kind in named)
    else:
        modalities = numbered_channels(first.images)
    splits: tuple[Split, ...] = ((tuple(cases), tuple(held_out)),) if held_out else ()
    return Dataset(
        str(content.get("name") or path.stem), path.parent, LISTED, tuple(all_cases.values()), modalities,
        labels, regions, order, ignore, _splits(folds, path, labelled) or splits, tuple(faults + more_faults),
        notes=_unread_patients(content["training"], cases, path) if labelled and not (folds or held_out) else (),
        readers=readers, probabilities=probabilities,
    )  # fmt: skip


def _unread_patients(entries: Iterable[Any], cases: Collection[str], path: Path) -> tuple[str, ...]:
    """Returns a line if entries name patients with several cases, whose names do not tell that."""
    known = [(entry.get("subject"), entry.get("patient")) for entry in entries if isinstance(entry, dict)]
    named = [str(own[0]) for both in known if (own := [one for one in both if one not in (None, "")])]
    if len({*named}) in (1, len(named)) or len({*patients_of(cases).values()}) < len(cases):
        return ()
    return (
        f"{path}: names patients with several cases, which segmentation reads from the names of cases alone: scans of "
        "a patient may be on both sides of a split; give each entry a fold",
    )


def _declared(content: dict[str, Any], path: Path) -> Declared:
    """Returns labels, regions, their order and the ignore label; BraTS labels get the BraTS regions."""
    labels, regions, ignore = labels_of(content, path)
    if regions:
        return labels, regions, order_of(content, path), ignore
    meaning = meaning_with(labels)
    return (labels, meaning.regions, meaning.order, ignore) if meaning else (labels, {}, (), ignore)


def _listed(
    entries: Any, key: str, path: Path, labelled: bool, readers: Sequence[str], first: Case | None = None
) -> tuple[dict[str, Case], dict[str, int], list[DataError]]:
    """Returns the usable cases of a list, their fold numbers, and the faults of the others.

    first: the case whose order of modalities all others follow (default: the first of this list).
    """
    if not isinstance(entries, list):
        raise DataError(path, f'"{key}" is not a list; make it the list of cases')
    cases: dict[str, Case] = {}
    folds: dict[str, int] = {}
    faults: list[DataError] = []
    for entry in entries:
        try:
            paths = entry["image"] if isinstance(entry["image"], list) else [entry["image"]]
            images = tuple(resolve_path(path.parent, image) for image in paths)
            named = kind_of(images[0])
            name = named[0] if named and len(images) > 1 else strip_suffix(images[0].name)
            if name in cases:
                raise DataError(path, f"lists case {name} twice ({images[0]}); keep one of them")
            images = _in_order(images, first) if first else images
            label, *more = listed_labels(entry["label"], path.parent, readers) if labelled else (None,)
            case = require_files(Case(name, images, label, more_labels=tuple(more)), path)
            if both := set(map(os.path.realpath, case.images)).intersection(map(os.path.realpath, case.labels)):
                raise DataError(
                    path, f"gives case {name} {both.pop()} as an image and as its label; correct one of them"
                )
            if labelled and not isinstance(entry.get("annotated"), (bool, int, float, NoneType)):
                raise DataError(path, f'says in the entry of case {name} what is annotated; list that next to "{key}": '
                                '"annotated": {"CASE": ["liver", …], …}')  # fmt: skip
            first = first or case
            if labelled and entry.get("fold") is not None:
                folds[name] = fold_number(entry["fold"], name, path)
            elif folds:
                raise DataError(path, f"gives case {name} no fold number, although others have one; add it")
            cases[name] = case
        except (AttributeError, KeyError, TypeError, IndexError):
            needed = "image and label" if labelled else "image"
            needed += f", a list of {len(readers)} files" * bool(readers)
            faults.append(DataError(path, f"an entry of {key} is {entry!r}; it needs {needed}"))
        except DataError as fault:
            faults.append(fault)
    if len(folds) not in (0, len(cases)):
        faults.append(DataError(path, f"gives {len(folds)} of {len(cases)} cases a fold number; give all of them one"))
    return cases, folds, faults


def _in_order(images: tuple[Path, ...], first: Case) -> tuple[Path, ...]:
    """Returns a case's images in the first case's order of modalities; unchanged if their names do not show it."""
    first_roles, roles = _roles(first.images), _roles(images)
    if not first_roles or not roles:
        return images
    if sorted(first_roles) != sorted(roles):
        raise DataError(
            images[0], f"its case has {', '.join(roles)}, but {first.images[0]} has {', '.join(first_roles)}; "
            "give all cases the same modalities"
        )  # fmt: skip
    return tuple(sorted(images, key=lambda image: first_roles.index(_roles((image,))[0])))


def _roles(images: tuple[Path, ...]) -> list[str]:
    """Returns the modality of each file from its BraTS name; empty if one has no such name."""
    named = [kind_of(image) for image in images]
    return [KINDS[kind[1]] for kind in named if kind] if all(kind and kind[1] in KINDS for kind in named) else []


def _splits(folds: dict[str, int], path: Path, labelled: bool) -> tuple[Split, ...]:
    """Returns one split per fold number, in order: the cases of the fold are its validation cases."""
    numbers = sorted(set(folds.values()))
    if labelled and len(numbers) > 1 and numbers != list(range(len(numbers))):  # --fold 1 would be the second of 1 to 5
        listed = ", ".join(map(str, numbers))
        raise DataError(path, f"its folds are {listed}; number them 0, 1, 2, …, as --fold counts them")
    return tuple(
        (
            tuple(name for name, n in folds.items() if n != fold),
            tuple(name for name, n in folds.items() if n == fold),
        )
        for fold in numbers
    )
