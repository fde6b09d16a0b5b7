"""Lists of cases in JSON, as MSD/Decathlon and MONAI write them: each reader returns a Dataset."""

from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import strip_suffix
from seqpar.data.formats.brats import KINDS, MEANINGS, kind_of, meaning_of, meaning_with
from seqpar.data.formats.dataset import Case, Dataset, Split
from seqpar.data.formats.dataset_json import checked, content_of, labels_of, modalities_of, numbered, order_of, place

Declared = tuple[dict[str, int], dict[str, tuple[int, ...]], tuple[int, ...], int | None]

_NOTHING: Declared = ({}, {}, (), None)  # what images to predict declare of labels


def read_decathlon(root: Path, labelled: bool = True) -> Dataset:
    """Returns the data set of an MSD folder: a ``training`` list, all modalities in one 4-D file."""
    path = root / "dataset.json"
    content = content_of(path)
    cases, _, faults = _listed(content["training"], "training", path, labelled)
    labels, regions, order, ignore = _declared(content, path) if labelled else _NOTHING
    return Dataset(
        str(content.get("name") or root.name), root, "Medical Segmentation Decathlon", tuple(cases.values()),
        modalities_of(content, path), labels, regions, order, ignore, faults=tuple(faults),
    )  # fmt: skip


def read_fold_json(path: Path, labelled: bool = True) -> Dataset:
    """Returns the data set of a MONAI list: ``training`` with folds, or with ``validation``."""
    content = content_of(path)
    cases, folds, faults = _listed(content["training"], "training", path, labelled)
    held, _, wrong = _listed(
        content.get("validation", []), "validation", path, labelled, next(iter(cases.values()), None)
    )
    if not cases:
        raise (faults or [DataError(path, "lists no cases; fill its training list")])[0]
    every = cases | held
    if labelled and (both := sorted(set(cases) & set(held))):
        wrong.append(DataError(path, f"lists case {both[0]} for training and for validation; keep one of them"))
    first = next(iter(cases.values()))
    named = [kind for kind in map(kind_of, first.images) if kind and kind[1] in KINDS]
    if not labelled:
        labels, regions, order, ignore = _NOTHING
    elif "labels" in content:
        labels, regions, order, ignore = _declared(content, path)
    elif named:
        meaning = MEANINGS[meaning_of(*named[0], first.images[0])]
        labels, regions, order, ignore = meaning.labels, meaning.regions, meaning.order, None
    else:
        raise DataError(path, 'says nothing of its labels; add "labels": {"0": "background", "1": …}')
    if "modality" in content or "channel_names" in content:
        modalities = modalities_of(content, path)
    elif len(named) == len(first.images):
        modalities = tuple(KINDS[kind] for _, kind in named)
    else:
        modalities = numbered(first.images)
    splits: tuple[Split, ...] = ((tuple(cases), tuple(held)),) if held else ()
    return Dataset(
        str(content.get("name") or path.stem), path.parent, "MONAI list", tuple(every.values()), modalities,
        labels, regions, order, ignore, _splits(folds) or splits, tuple(faults + wrong),
    )  # fmt: skip


def _declared(content: dict[str, Any], path: Path) -> Declared:
    """Returns labels, regions, their order and the ignore label; BraTS labels bring their regions."""
    labels, regions, ignore = labels_of(content, path)
    if regions:
        return labels, regions, order_of(content, path), ignore
    meaning = meaning_with(labels)
    return (labels, meaning.regions, meaning.order, ignore) if meaning else (labels, {}, (), ignore)


def _listed(
    entries: Any, key: str, path: Path, labelled: bool, first: Case | None = None
) -> tuple[dict[str, Case], dict[str, int], list[DataError]]:
    """Returns the cases of a list of image and label, their fold numbers, and what is wrong with others.

    ``first`` is the case whose order of modalities all follow; none: the first in this list.
    """
    if not isinstance(entries, list):
        raise DataError(path, f'"{key}" is no list; list the cases in it')
    cases: dict[str, Case] = {}
    folds: dict[str, int] = {}
    faults: list[DataError] = []
    for entry in entries:
        try:
            given = entry["image"] if isinstance(entry["image"], list) else [entry["image"]]
            images = tuple(place(path.parent, image) for image in given)
            named = kind_of(images[0])
            name = named[0] if named and len(images) > 1 else strip_suffix(images[0].name)
            if name in cases:
                raise DataError(path, f"lists case {name} twice ({images[0]}); keep one of them")
            images = _in_order(images, first) if first else images
            label = place(path.parent, entry["label"]) if labelled else None
            case = checked(Case(name, images, label), path)
            first = first or case
            if labelled and isinstance(entry.get("fold"), int):
                folds[name] = entry["fold"]
            elif folds:
                raise DataError(path, f"gives case {name} no fold number, but others one; give it one")
            cases[name] = case
        except (AttributeError, KeyError, TypeError, IndexError):
            needed = "image and label" if labelled else "image"
            faults.append(DataError(path, f"an entry of {key} is {entry!r}; it needs {needed}"))
        except DataError as fault:
            faults.append(fault)
    if len(folds) not in (0, len(cases)):
        faults.append(DataError(path, f"gives {len(folds)} of {len(cases)} cases a fold number; give it to all"))
    return cases, folds, faults


def _in_order(images: tuple[Path, ...], first: Case) -> tuple[Path, ...]:
    """Returns a case's images in the first case's order of modalities, as they are where names do not tell it."""
    wanted, found = _roles(first.images), _roles(images)
    if not wanted or not found:
        return images
    if sorted(wanted) != sorted(found):
        raise DataError(images[0], f"its case has {', '.join(found)}, but case {first.id} has {', '.join(wanted)}; "
                        "give all cases the same modalities")  # fmt: skip
    return tuple(sorted(images, key=lambda image: wanted.index(_roles((image,))[0])))


def _roles(images: tuple[Path, ...]) -> list[str]:
    """Returns what each file holds by its BraTS name; nothing where one has no such name."""
    named = [kind_of(image) for image in images]
    return [KINDS[kind[1]] for kind in named if kind] if all(kind and kind[1] in KINDS for kind in named) else []


def _splits(folds: dict[str, int]) -> tuple[Split, ...]:
    """Returns a split per fold number, in their order: its cases are those to validate on."""
    return tuple(
        (
            tuple(name for name, n in folds.items() if n != fold),
            tuple(name for name, n in folds.items() if n == fold),
        )
        for fold in sorted(set(folds.values()))
    )
