"""Reads the cache of prepared cases: .npy files that are memory-mapped, and JSON.

OUT/cache.json                the index; written last, so that a cache without it is unfinished
OUT/cases/ID/image.npy        c W D H float32        OUT/cases/ID/label.npy      W D H class ids
OUT/cases/ID/locations.npy    n 3, class after class OUT/cases/ID/case.json      sources, sizes, digests
OUT/cases/ID/truth.npy        class ids on the grid on which predictions are scored, if that is another

Labels with doubt have codes (``SoftLabels``) instead of class ids.
"""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.data.errors import DataError
from seqpar.data.files import read_json
from seqpar.data.formats.dataset import Split, VolumeClasses
from seqpar.data.preparation.preparation import preparation_of
from seqpar.data.preparation.prepared_case import Preparation, Properties
from seqpar.data.preparation.recipe import Recipe
from seqpar.data.volumes import digest_file, files_digest, join_digests, size_and_mtime
from seqpar.losses import SoftLabels

VERSION = 1  # of what preparation computes and stores: a new version prepares every case again


@dataclass(frozen=True)
class PreparedCase:
    """One case of a cache; its arrays are memory-mapped on access, so that reading a tile reads only the tile."""

    id: str
    folder: Path

    @property
    def image(self) -> np.ndarray:
        """Returns the mapped ``(c, W, D, H)``, float32."""
        return _mapped(self.folder / "image.npy")

    @property
    def label(self) -> np.ndarray:
        """Returns the mapped ``(W, D, H)``, class ids."""
        return _mapped(self.folder / "label.npy")

    @property
    def truth(self) -> np.ndarray:
        """Returns the mapped class ids on the grid on which predictions are scored: usually those of ``label``."""
        own = self.folder / "truth.npy"
        return _mapped(own) if own.is_file() else self.label

    @property
    def locations(self) -> dict[int, np.ndarray]:
        """Returns the stored voxels (n, 3) of each class id in the case."""
        rows, locations_of, start = _mapped(self.folder / "locations.npy"), {}, 0
        for name, count in self._record["locations"].items():
            locations_of[int(name)] = rows[start : start + count]
            start += count
        return locations_of

    @property
    def properties(self) -> Properties:
        """Returns what takes prepared arrays back to the geometry of the case's files."""
        return Properties.from_json(self._record["properties"])

    @property
    def digest(self) -> str:
        """Returns what tells the prepared arrays from those of other files."""
        files = self._record["files"]
        return hashlib.blake2b(json.dumps(files, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def voxels(self) -> str:
        """Returns digests of the images' voxels, as ``join_digests`` does; "" if an earlier version prepared it."""
        return join_digests(self._record.get("voxels", ()))

    @property
    def files(self) -> str:
        """Returns digests of the files that the case was prepared from, images and labels, as ``files_digest`` does."""
        return files_digest(self._record["digests"])

    def was_made_from(self, path: Path) -> bool:
        """Returns whether a file has the bytes of one that the case was prepared from; reads it if it looks changed."""
        known = [[name, *stamp[:2]] for name, *stamp in self._record["sources"]]
        return [path.name, *size_and_mtime(path)] in known or digest_file(path) in self._record["digests"]

    @property
    def _record(self) -> dict[str, Any]:
        record: dict[str, Any] = read_json(self.folder / "case.json")
        return record


@dataclass(frozen=True)
class PreparedDataset:
    """A cache: its cases, and the data set's description in class ids (consecutive, background 0)."""

    path: Path
    name: str
    modalities: tuple[str, ...]
    labels: dict[str, int]
    regions: dict[str, tuple[int, ...]]
    regions_class_order: tuple[int, ...]
    ignore_label: int | None
    splits: tuple[Split, ...]
    recipe: Recipe
    cases: dict[str, PreparedCase]
    described: dict[str, Any]  # the data set's description in the index
    annotated: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # which classes labels show, for cases that do not show all
    volume_classes: VolumeClasses | None = None  # if each case has one class and no label map

    @property
    def soft(self) -> SoftLabels | None:
        """How labels with doubt are stored; None: labels are class ids."""
        return self.recipe.soft

    def consensus(self, label: np.ndarray) -> np.ndarray:
        """Returns the class ids of a case's label: of labels with doubt, those that most readers agree on."""
        return np.asarray(label) if self.soft is None else self.soft.consensus(label, self.regions.values())

    @property
    def preparation(self) -> Preparation:
        """Returns how the cases were prepared."""
        return preparation_of(self.recipe)

    @property
    def ids(self) -> tuple[str, ...]:
        """Returns the ids of the cases, sorted."""
        return tuple(sorted(self.cases))


def open_cache(path: str | Path) -> PreparedDataset:
    """Opens the finished cache in a folder."""
    path = Path(path)
    index = read_index(path)
    if index is None:
        raise DataError(path, "has no finished cache of this version; run prepare with --out on it")
    description = index["dataset"]
    return PreparedDataset(
        path=path,
        name=description["name"],
        modalities=tuple(description["modalities"]),
        labels=description["labels"],
        regions={name: tuple(members) for name, members in description["regions"].items()},
        regions_class_order=tuple(description["regions_class_order"]),
        ignore_label=description["ignore_label"],
        splits=tuple((tuple(train), tuple(held_out)) for train, held_out in description["splits"]),
        recipe=Recipe.from_json(index["recipe"]),
        cases={name: PreparedCase(name, path / "cases" / name) for name in index["cases"]},
        described=description,
        annotated={name: tuple(shown) for name, shown in description.get("annotated", {}).items()},
        volume_classes=VolumeClasses.from_json(classes) if (classes := description.get("volume_classes")) else None,
    )


def read_index(path: Path) -> dict[str, Any] | None:
    """Returns the content of cache.json; None if there is no finished cache of this version."""
    try:
        index: dict[str, Any] = read_json(path / "cache.json")
        if index["recipe"].get("cut_labels"):  # earlier versions did not store this setting
            index["settings"] = {**index["settings"], "cut_labels": True}
        return index if index["version"] == VERSION else None
    except (DataError, KeyError, TypeError, AttributeError):
        return None  # missing or damaged: prepare rewrites it


def read_record(path: Path, name: str) -> dict[str, Any] | None:
    """Returns the record of a case; None if one of its files is missing or has another size."""
    folder = path / "cases" / name
    try:
        record: dict[str, Any] = read_json(folder / "case.json")
        whole = all((folder / file).stat().st_size == size for file, (size, _) in record["files"].items())
        return record if whole and record["version"] == VERSION else None
    except (DataError, OSError, KeyError, TypeError, ValueError):
        return None  # incomplete or missing: the case is prepared again


def check_cache(path: str | Path) -> list[DataError]:
    """Returns an error for each damaged file of a cache, found by comparing bytes with digests."""
    path = Path(path)
    index, faults = read_index(path), list[DataError]()
    for name in open_cache(path).ids if index else ():
        folder = path / "cases" / name
        record = read_record(path, name)
        if record is None or index is None or digest_of(folder / "case.json") != index["cases"][name]["digest"]:
            faults.append(DataError(folder, "is damaged; remove it and run prepare again"))
            continue
        for file, (_, digest) in record["files"].items():
            if digest_of(folder / file) != digest:
                faults.append(DataError(folder / file, f"is damaged; remove {folder} and run prepare again"))
    return faults if index else [DataError(path, "has no finished cache of this version; run prepare on it")]


def _mapped(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except (OSError, ValueError) as error:
        raise DataError(path, f"cannot be mapped ({error}); run prepare again") from error


def digest_of(path: Path) -> str:
    """Returns the digest of a file's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        return f"unreadable: {error}"
    return digest.hexdigest()
