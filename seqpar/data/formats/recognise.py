"""Recognises the format of a data set (folder, JSON list or nnU-Net name) and reads it; finds cases to predict."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError, unreadable
from seqpar.data.files import SUFFIXES, expand_home
from seqpar.data.formats.annotations import with_annotations
from seqpar.data.formats.brats import KINDS, MODALITIES, kind_of, meaning_with, read_brats
from seqpar.data.formats.case_lists import read_decathlon, read_fold_json
from seqpar.data.formats.dataset import TABLE, Case, Dataset, Split
from seqpar.data.formats.dataset_json import labels_of, read_json_object
from seqpar.data.formats.nnunet_folders import (
    GT_SEGMENTATIONS,
    declared_channels,
    has_channel_files,
    of_images,
    read_images,
    read_nnunet,
)
from seqpar.data.formats.splits import folds, read_splits, split
from seqpar.data.volumes import is_volume

__all__ = [
    "Case",
    "Dataset",
    "Split",
    "read_declaration",
    "describe",
    "find_dataset",
    "is_folder_of_dataset",
    "folds",
    "read_dataset",
    "refuse_twice",
    "split",
]
_RAW = "nnUNet_raw"
_PART = re.compile(rf"(images|labels)(Tr|Ts|Val)(_[\w-]+)?|{GT_SEGMENTATIONS}")  # folders of a data set
OLD_CACHE = ".prepared"  # suffix of the caches that older versions wrote next to the data
_KNOWN = (
    "an nnU-Net raw folder or its name or number, an MSD folder, a folder of BraTS cases, "
    "a MONAI list (.json) or a folder of images (.nii.gz, .nrrd, .mha, DICOM series)"
)


def read_dataset(path_or_name: str | Path | int) -> Dataset:
    """Returns the description of a data set, with its splits if it defines any."""
    dataset = describe(path_or_name)
    if dataset.labels:
        dataset = with_annotations(dataset, find_dataset(path_or_name))
    if dataset.splits or not dataset.labels:
        return dataset
    try:
        return replace(dataset, splits=read_splits(dataset.root, dataset.ids))
    except DataError as fault:  # the cases themselves can still be prepared
        return replace(dataset, faults=(*dataset.faults, fault))


def describe(path_or_name: str | Path | int, labelled: bool = True) -> Dataset:
    """Returns the description of a data set, without the splits of splits_final.json.

    labelled: whether labels are read. Prediction does not need them, so faulty labels do not stop it.
    """
    root = find_dataset(path_or_name)
    dataset = _read(root, labelled)
    refuse_twice(root, dataset.cases)
    return dataset


def refuse_twice(root: Path, cases: Sequence[Case]) -> None:
    """Raises DataError if two cases of a data set have the same id."""
    first: dict[str, Case] = {}
    for case in cases:
        if (other := first.setdefault(case.id, case)) is not case:
            files = f"{other.images[0]} and {case.images[0]}"
            raise DataError(root, f"holds case {case.id} twice, as {files}; keep one of them")


def is_folder_of_dataset(folder: Path) -> bool:
    """Returns whether a folder holds the images or labels of a data set, by its name and the dataset.json above it."""
    folder = Path(os.path.realpath(folder))
    return bool(_PART.fullmatch(folder.name)) and os.path.isfile(folder.parent / "dataset.json")


def place_in_data(folder: Path) -> str:
    """Returns "is a DICOM series", "belongs to a data set", or "" of a folder that is neither.

    A data set's are its own folder, those that hold its images or labels, and all folders in them.

    A dataset.json without such folders and without a list of cases belongs to predictions of nnU-Net. So does one with
    plans.json next to it, if no file of its list is there.
    """
    place = Path(os.path.realpath(folder))
    if _is_dataset(place) or any(map(is_folder_of_dataset, (place, *place.parents))):
        return "belongs to a data set"
    return "is a DICOM series" * bool(_names(place) and is_volume(place))


def _is_dataset(folder: Path) -> bool:
    """Returns whether a folder has folders of images or labels, a list of its cases, or images with a class each.

    A case of BraTS has a folder of its own, too.
    """
    named = (kind_of(folder / name) for name in _names(folder))
    if any(kind and KINDS.get(kind[1]) in MODALITIES for kind in named):
        return True
    if os.path.isfile(folder / TABLE) and any(is_volume(folder / name) for name in _names(folder)):
        return True
    declaration = folder / "dataset.json"
    if not os.path.isfile(declaration):
        return False
    if any(map(_PART.fullmatch, _names(folder))):
        return True
    try:
        content = read_json_object(declaration)
    except DataError:  # it may be a data set's
        return True
    lists = [content[key] for key in ("dataset", "training", "test") if key in content]
    return bool(lists) and (not (folder / "plans.json").is_file() or _holds_any(folder, lists))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # nobody may look into it
        return []


def _holds_any(folder: Path, listed: Any) -> bool:
    """Returns whether any file that the lists of a dataset.json name is in a folder."""
    if isinstance(listed, str):
        path = os.path.realpath(folder / listed)
        return os.path.isfile(path) and Path(path).is_relative_to(os.path.realpath(folder))
    inner = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
    return any(_holds_any(folder, one) for one in inner)


def read_declaration(path: Path) -> tuple[dict[str, int], dict[str, tuple[int, ...]], int | None]:
    """Returns labels, regions and ignore label declared in a JSON file, or in a folder's dataset.json.

    Other keys may be missing.
    """
    path = path / "dataset.json" if path.is_dir() else path
    content = read_json_object(path)
    labels, regions, ignore = labels_of(content, path)
    if not regions and content.get("training") and not has_channel_files(path.parent):
        meaning = meaning_with(labels)  # BraTS labels in a list bring the BraTS regions
        regions = meaning.regions if meaning else {}
    return labels, regions, ignore


def find_dataset(path_or_name: str | Path | int) -> Path:
    """Returns the path of a data set, given as a path or as a name or number under nnUNet_raw."""
    path = expand_home(str(path_or_name))
    if path.exists():
        return path.absolute()
    raw = os.environ.get(_RAW)
    if raw is None:
        raise DataError(path, f"does not exist; give {_KNOWN} (for a name or number, set nnUNet_raw)")
    name = str(path_or_name)
    pattern = f"Dataset{int(name):03d}_*" if name.isdigit() else name
    matches = sorted(Path(raw).glob(pattern)) if len(path.parts) == 1 else []
    folders = [folder for folder in matches if folder.is_dir() and folder.suffix != OLD_CACHE]
    if len(folders) != 1:
        raise DataError(path, f"{len(folders)} folders in nnUNet_raw = {raw} match {pattern}; exactly one must")
    return folders[0].absolute()


def _read(root: Path, labelled: bool) -> Dataset:
    if root.suffix == ".json":
        return _from_json(root, labelled)
    if not root.is_dir():
        raise DataError(root, f"is a single file; give {_KNOWN}")
    try:
        if (root / "dataset.json").is_file():
            return _from_json(root / "dataset.json", labelled)
        if (brats := read_brats(root, labelled)) is not None:
            return brats
        lists = [path for path in sorted(root.glob("*.json")) if _is_list(path)]
        if len(lists) > 1:
            raise DataError(root, f"has several lists of cases ({', '.join(p.name for p in lists)}); give one of them")
        dataset = read_fold_json(lists[0], labelled) if lists else read_images(root)
    except OSError as error:
        raise unreadable(root, error) from error
    if dataset is None:
        below = sorted(path for path in root.glob("*/") if (path / "dataset.json").is_file())
        near = f"the data set in it, {below[0]}, or " if len(below) == 1 else ""
        raise DataError(root, f"has no cases; give {near}{_KNOWN}")
    return dataset


def _from_json(path: Path, labelled: bool) -> Dataset:
    """Returns the data set of a JSON file: its keys say whether it is MSD's, MONAI's or nnU-Net's."""
    content = read_json_object(path)
    training = content.get("training")
    folded = any(isinstance(entry, dict) and "fold" in entry for entry in training or [])
    if folded or path.name != "dataset.json" or not content.keys() & {"labels", "channel_names", "modality"}:
        if training is None:
            raise DataError(path, 'lists no cases under "training"; give ' + _KNOWN)
        return read_fold_json(path, labelled)
    if training and not has_channel_files(path.parent):
        return read_decathlon(path.parent, labelled)
    return read_nnunet(path.parent, labelled)


def _is_list(path: Path) -> bool:
    """Returns whether a JSON file lists cases; raises DataError for a broken one."""
    return "training" in read_json_object(path)


def find_inputs(paths: Sequence[str | Path], modalities: Sequence[str]) -> tuple[list[Case], list[DataError]]:
    """Returns the cases to predict, with their files in the order of ``modalities``, and the faults of other cases."""
    places = [find_dataset(path) for path in paths]
    if all(map(is_volume, places)):
        declared = {declared_channels(place.parent): place for place in places}
        if len(declared) > 1:
            raise DataError(
                list(declared.values())[1],
                "is of a data set with other channels than the first file's: predict those of one at a time",
            )
        dataset = of_images(places[0].parent, places, next(iter(declared)) or tuple(modalities))
    elif len(places) == 1:
        dataset = describe(places[0], labelled=False)
    else:
        other = next(place for place in places if not is_volume(place))
        raise DataError(
            other,
            f"is neither a {' or '.join(SUFFIXES)} file nor a DICOM series; give some of these, or a folder or list",
        )
    cases = [_ordered(case, dataset.modalities, modalities) for case in dataset.cases]
    refuse_twice(dataset.root, cases)
    return sorted(cases, key=lambda case: case.id), list(dataset.faults)


def _ordered(case: Case, modalities: Sequence[str], trained: Sequence[str]) -> Case:
    """Returns the case with its files in the network's order of modalities; unnamed channels keep their order.

    trained: the modalities that the network was trained on.
    """
    names, needed = [name.casefold() for name in modalities], [name.casefold() for name in trained]
    if names == needed or all(name.startswith("channel ") for name in names):
        return case
    if sorted(names) != sorted(needed) or len(case.images) != len(needed) or len(set(names)) < len(names):
        raise DataError(
            case.images[0], f"its modalities are {', '.join(modalities)}, but the network was trained "
            f"on {', '.join(trained)}; give these, a file for each"
        )  # fmt: skip
    return replace(case, images=tuple(case.images[names.index(name)] for name in needed))
