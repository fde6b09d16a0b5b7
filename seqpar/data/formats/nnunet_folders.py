"""Reads nnU-Net raw folders, and plain folders of images with the same file names; each reader returns a Dataset."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqpar.data.dicom_series import is_series
from seqpar.data.errors import DataError
from seqpar.data.files import SUFFIXES, strip_suffix, suffix_of
from seqpar.data.formats.dataset import Case, Dataset
from seqpar.data.formats.dataset_json import (
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
from seqpar.data.volumes import is_volume

GT_SEGMENTATIONS = "gt_segmentations"  # next to what nnU-Net preprocessed: label maps as in labelsTr
_CHANNEL = re.compile(r"^(.+)_(\d{4})(\.nii|\.nii\.gz|\.nrrd|\.mha)?$", re.DOTALL)  # a DICOM series has no suffix


def read_nnunet(root: Path, labelled: bool = True) -> Dataset:
    """Returns the data set of an nnU-Net raw folder (``imagesTr``, ``labelsTr`` or explicit paths)."""
    path = root / "dataset.json"
    content = read_json_object(path)
    modalities = modalities_of(content, path)
    labels, regions, ignore = labels_of(content, path) if labelled else ({}, {}, None)
    readers, probabilities = readers_of(content, path) if labelled else ((), False)
    ending = content.get("file_ending", ".nii.gz")
    if ending not in SUFFIXES:
        raise DataError(path, f"file_ending is {ending!r}; {' or '.join(SUFFIXES)} can be read: convert the images")
    read = _explicit if "dataset" in content else _scanned
    cases, faults = read(root, content, modalities, ending, labelled, readers)
    notes = () if faults else notes_on_cases(content, path, [case.id for case in cases])
    return Dataset(
        root.name, root, "nnU-Net raw", tuple(cases), modalities, labels, regions,
        order_of(content, path) if regions else (), ignore, faults=tuple(faults), notes=notes, readers=readers,
        probabilities=probabilities,
    )  # fmt: skip


def read_images(root: Path) -> Dataset | None:
    """Returns a data set without labels from a folder of images, or of one DICOM series; None if it has none."""
    files = [root] if is_volume(root) else [file for file in sorted(root.iterdir()) if _is_image(file, SUFFIXES)]
    return of_images(root, files, declared_channels(root)) if files else None


def declared_channels(folder: Path) -> tuple[str, ...]:
    """Returns the channels that the dataset.json above a folder of images names; () where it names none."""
    described = folder.parent / "dataset.json"
    content = read_json_object(described) if described.is_file() else {}
    return modalities_of(content, described) if content.keys() & {"channel_names", "modality"} else ()


def of_images(root: Path, files: list[Path], names: tuple[str, ...] = ()) -> Dataset:
    """Returns a data set without labels from image files, grouped by channel number if one of them ends in _0000."""
    faults: list[DataError] = []
    if any(match[2] == "0000" for file in files if (match := _CHANNEL.match(file.name))):
        channels_of, faults = _numbered_files(files)
        modalities = names or tuple(f"channel {n}" for n in range(max(map(len, channels_of.values()), default=1)))
        cases: list[Case] = []
        for name, channels in channels_of.items():
            _collect(cases, faults, root, name, channels, modalities)
    else:
        cases = [Case(strip_suffix(file.name), (file,)) for file in files]
        modalities = names or _numbered_by_first(cases)
    return Dataset(root.name, root, "images alone", tuple(cases), modalities, {}, faults=tuple(faults))


def _numbered_by_first(cases: list[Case]) -> tuple[str, ...]:
    """Returns names for the channels of the first readable case; faulty cases report their own errors."""
    for case in cases[:-1]:
        try:
            return numbered_channels(case.images)
        except DataError:
            continue
    return numbered_channels(cases[-1].images)


def has_channel_files(root: Path) -> bool:
    """Returns whether imagesTr has files named as nnU-Net names them, one per modality."""
    images = root / "imagesTr"
    return images.is_dir() and any(_CHANNEL.match(file.name) for file in images.glob("*_0000*"))


def _scanned(
    root: Path, content: dict[str, Any], modalities: tuple[str, ...], ending: str, labelled: bool,
    readers: Sequence[str],
) -> tuple[list[Case], list[DataError]]:  # fmt: skip
    """Returns the cases whose files are in imagesTr and labelsTr, and what is wrong with the others.

    The labels of several readers are in a folder each, labelsTr_READER.
    """
    images, folders = root / "imagesTr", [root / f"labelsTr_{reader}" for reader in readers] or [root / "labelsTr"]
    folders = folders if labelled else []
    for folder in (images, *folders):
        if not folder.is_dir():
            more = f"; the readers {', '.join(readers)} have a folder labelsTr_READER each" if readers else ""
            if (truth := root / GT_SEGMENTATIONS).is_dir():
                more = f"; nnU-Net preprocessed this one: name the raw folder, or {truth} as the truth of scores"
            raise DataError(folder, f"is missing; an nnU-Net raw folder has imagesTr and labelsTr{more}")
    cases: list[Case] = []
    files = [file for file in sorted(images.iterdir()) if _is_image(file, ending)]
    channels_of, faults = _numbered_files(files)
    for name, channels in channels_of.items():
        labels = tuple(folder / f"{name}{ending}" for folder in folders)
        _collect(cases, faults, images, name, channels, modalities, labels)
    for file in (file for folder in folders for file in sorted(folder.iterdir())):
        name = file.name.removesuffix(ending)
        if file.name.endswith(ending) and file.name[0] != "." and name not in channels_of:
            faults.append(DataError(file, f"is a label without images; add {name}_0000{ending} or remove it"))
    return cases, faults


def _is_image(file: Path, ending: str | tuple[str, ...]) -> bool:
    """Returns whether a file is named like the data set's images; a DICOM series may take the place of any of them.

    What has such a name without being a file is refused when it is read.
    """
    return file.name[0] != "." and (file.name.endswith(ending) or is_series(file))


def _numbered_files(files: list[Path]) -> tuple[dict[str, dict[int, Path]], list[DataError]]:
    """Returns each case's files by channel number, from names such as CASE_0000.nii.gz; other names are faults.

    A case with two files for one channel is a fault too.
    """
    channels_of: dict[str, dict[int, Path]] = defaultdict(dict)
    faults: list[DataError] = []
    twice = set[str]()
    for file in files:
        if match := _CHANNEL.match(file.name):
            other = channels_of[match[1]].setdefault(int(match[2]), file)
            if other is not file:
                why = f"is there as {other.name} too: keep one of them"
                if other.name == file.name:
                    why = f"names the same case as {other}: predict them one at a time, each into its own folder"
                faults.append(DataError(file, "is named twice: name it once" if other == file else why))
                twice.add(match[1])
        else:
            ending = suffix_of(file.name)
            faults.append(DataError(file, f"has no channel number; rename it to CASE_0000{ending}, or remove it"))
    for name in twice:
        del channels_of[name]
    return channels_of, faults


def _collect(
    cases: list[Case], faults: list[DataError], folder: Path, name: str, channels: dict[int, Path],
    modalities: tuple[str, ...], labels: Sequence[Path] = (),
) -> None:  # fmt: skip
    """Adds a case, or its fault: a missing modality or label, or one modality too many."""
    ending = next(iter(channels.values())).name.removeprefix(f"{name}_")[4:]
    extra = [channels[n] for n in sorted(channels) if n >= len(modalities)]
    missing = [n for n in range(len(modalities)) if n not in channels]
    if extra:
        faults.append(DataError(extra[0], f"is an extra modality; {len(modalities)} are declared: {modalities}"))
    elif missing:
        path = folder / f"{name}_{missing[0]:04d}{ending}"
        faults.append(DataError(path, f"is missing; case {name} needs the modality {modalities[missing[0]]}"))
    elif absent := [label for label in labels if not label.is_file()]:
        faults.append(DataError(absent[0], f"is missing; add the label of case {name}, or remove its images"))
    else:
        images = tuple(channels[n] for n in range(len(modalities)))
        cases.append(Case(name, images, labels[0] if labels else None, more_labels=tuple(labels[1:])))


def _explicit(
    root: Path, content: dict[str, Any], modalities: tuple[str, ...], ending: str, labelled: bool,
    readers: Sequence[str],
) -> tuple[list[Case], list[DataError]]:  # fmt: skip
    """Returns the cases that dataset.json lists with their paths."""
    path = root / "dataset.json"
    cases: list[Case] = []
    faults: list[DataError] = []
    if not isinstance(content["dataset"], dict):
        raise DataError(path, '"dataset" must be an object: {"CASE": {"images": […], "label": …}}')
    for name, entry in content["dataset"].items():
        try:
            images = tuple(resolve_path(root, image) for image in entry["images"])
            label, *more = listed_labels(entry["label"], root, readers) if labelled else (None,)
            cases.append(require_files(Case(name, images, label, more_labels=tuple(more)), path))
        except (KeyError, TypeError):
            needed = f"images and, under label, a list of {len(readers)} labels" if readers else "images and label"
            faults.append(DataError(path, f"case {name} is {entry!r}; it needs {needed}"))
        except DataError as fault:
            faults.append(fault)
    return cases, faults
