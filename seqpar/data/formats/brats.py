"""Reads BraTS folders: their naming schemes, and the meaning of label values by year."""

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case, Dataset

MODALITIES = ("T1", "T1c", "T2", "FLAIR")  # one order for all years
KINDS = {  # ending of a file's name: what it holds
    "t1": "T1", "t1ce": "T1c", "t1gd": "T1c", "t2": "T2", "flair": "FLAIR",  # to 2021
    "t1n": "T1", "t1c": "T1c", "t2w": "T2", "t2f": "FLAIR",  # from 2023
    "seg": "label",
}  # fmt: skip
_OLD = {"t1", "t1ce", "t1gd", "t2", "flair"}
_NAME = re.compile(r"^(brats.*?)[-_]([a-z0-9]+)\.nii(\.gz)?$", re.IGNORECASE)
_DEPTH = 3  # HGG/CASE/file of 2018 to 2020 is the deepest


@dataclass(frozen=True)
class Meaning:
    """The meaning of label values: names, regions, and the label that each region's voxels get."""

    labels: dict[str, int]
    regions: dict[str, tuple[int, ...]]
    order: tuple[int, ...]


LABEL_SCHEMES = {
    "to 2021": Meaning(
        {"background": 0, "NCR": 1, "ED": 2, "ET": 4}, {"WT": (1, 2, 4), "TC": (1, 4), "ET": (4,)}, (2, 1, 4)
    ),
    "2023": Meaning(
        {"background": 0, "NCR": 1, "ED": 2, "ET": 3}, {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}, (2, 1, 3)
    ),
    "2024, glioma after treatment": Meaning(
        {"background": 0, "NETC": 1, "SNFH": 2, "ET": 3, "RC": 4},
        {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,), "RC": (4,)},
        (2, 1, 3, 4),
    ),
    "2024, paediatric": Meaning(
        {"background": 0, "ET": 1, "NET": 2, "CC": 3, "ED": 4},
        {"WT": (1, 2, 3, 4), "TC": (1, 2, 3), "CC": (3,), "ET": (1,)},
        (4, 2, 3, 1),
    ),
    "Medical Segmentation Decathlon": Meaning(
        {"background": 0, "edema": 1, "non-enhancing tumor": 2, "enhancing tumour": 3},
        {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)},
        (1, 2, 3),
    ),
}


def meaning_with(labels: dict[str, int]) -> Meaning | None:
    """Returns the meaning with exactly these labels, or None."""
    return next((meaning for meaning in LABEL_SCHEMES.values() if meaning.labels == labels), None)


def label_scheme_of(name: str, kind: str, place: Path) -> str:
    """Returns the key in `LABEL_SCHEMES` for a case's name, its files' endings and its folder."""
    if kind.lower() in _OLD:
        return "to 2021"
    if re.match(r"brats-ped", name, re.IGNORECASE):
        year = re.findall(r"BraTS[^/]*?(?<!\d)(20\d\d)(?!\d)", str(place), re.IGNORECASE)
        if not year:
            raise DataError(
                place, "is a BraTS-PED case, whose label values changed in 2024, and no folder name gives its year; "
                "rename a parent folder, for example to BraTS-PEDs2024"
            )  # fmt: skip
        return "2024, paediatric" if year[-1] >= "2024" else "2023"
    after_treatment = re.match(r"brats-gli-\d+-[1-9]\d\d", name, re.IGNORECASE)  # time points from 100 on
    return "2024, glioma after treatment" if after_treatment else "2023"


def kind_of(file: Path) -> tuple[str, str] | None:
    """Returns case id and ending of a BraTS file name; None for other names."""
    match = _NAME.match(file.name)
    if match:
        return match[1], match[2].lower()
    if re.search(r"_segm\.nii(\.gz)?$", file.name, re.IGNORECASE) and _is_brats(file.parent.name):
        return file.parent.name, "seg"  # one label of 2020 was published under such a name
    return None


def read_brats(root: Path, labelled: bool = True) -> Dataset | None:
    """Returns the data set in a folder of BraTS cases, flat or one folder per case; None if it has no such cases."""
    files_of: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for file in _files(root):
        named = kind_of(file)
        if named:
            files_of[named[0]][named[1]].append(file)
    if not any(set(kinds) & (set(KINDS) - {"seg"}) for kinds in files_of.values()):
        return None
    labelled = labelled and any("seg" in kinds for kinds in files_of.values())
    cases, faults, meanings = [], [], dict[str, Path]()
    for name, kinds in sorted(files_of.items()):
        if labelled:
            images = [(kind, files[0]) for kind, files in kinds.items() if KINDS.get(kind) in MODALITIES]
            meanings |= {label_scheme_of(name, kind, file): file for kind, file in images}
        try:
            cases.append(_case(name, kinds, labelled))
        except DataError as fault:
            faults.append(fault)
    if {"2023", "2024, glioma after treatment"} == meanings.keys():
        del meanings["2023"]  # its labels are among those of 2024
    if len(meanings) > 1:
        examples = "; ".join(f"{meaning}: {file}" for meaning, file in sorted(meanings.items()))
        raise DataError(root, f"mixes cases whose labels differ in meaning ({examples}); separate them")
    year = "".join(meanings)  # empty if there are no labels
    meaning = LABEL_SCHEMES[year] if year else Meaning({}, {}, ())
    return Dataset(
        root.name, root, f"BraTS ({year or 'images alone'})", tuple(cases), MODALITIES, meaning.labels, meaning.regions,
        meaning.order, faults=tuple(faults),
    )  # fmt: skip


def _case(name: str, kinds: dict[str, list[Path]], labelled: bool) -> Case:
    """Returns the case of these files: exactly one per modality, and one label if the data set is labelled."""
    file_of: dict[str, Path] = {}
    for kind, files in kinds.items():
        role = KINDS.get(kind)
        if role == "label" and not labelled:
            continue
        if role is None:
            raise DataError(files[0], f"is an extra modality {kind!r} of case {name}; move it out of the folder")
        for file in files:
            if role in file_of:
                raise DataError(file, f"is a duplicate: case {name} has {role} in {file_of[role]} too; remove one")
            file_of[role] = file
    for role in (*MODALITIES, *(["label"] if labelled else [])):
        if role not in file_of:
            folder = next(iter(file_of.values())).parent
            raise DataError(folder, f"case {name} has no {role} ({', '.join(_endings(role))}); add the file")
    return Case(name, tuple(file_of[role] for role in MODALITIES), file_of.get("label"))


def _endings(role: str) -> list[str]:
    return [f"{kind}.nii.gz" for kind, content in KINDS.items() if content == role]


def _is_brats(name: str) -> bool:
    return name.lower().startswith("brats")


def _files(root: Path) -> list[Path]:
    """Returns the visible files in a folder and the folders of cases below it, sorted."""
    files = []
    for place, folders, names in os.walk(root, followlinks=True):
        if len(Path(place).relative_to(root).parts) >= _DEPTH:
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(files)
