"""Bad cases: exit code 3, the file's name, no traceback; nothing is lost, and the good cases are prepared."""

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from seqpar.cli.prepare import act
from seqpar.cluster.exit_codes import run
from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.preparation import fingerprint, prepare_dataset
from seqpar.data.preparation.cache import open_cache
from tests.support.bad_data import prepared, put, rewrite
from tests.support.folders import OBLIQUE, image_array, label_array, nnunet, save, write_json

IMAGE, SECOND, LABEL = "imagesTr/c_001_0000.nii.gz", "imagesTr/c_001_0001.nii.gz", "labelsTr/c_001.nii.gz"


def patch(path: Path, offset: int, *values: float, kind: str = "f") -> None:
    """Overwrites numbers in the header of a packed file."""
    raw = bytearray(gzip.decompress(path.read_bytes()))
    struct.pack_into(f"<{len(values)}{kind}", raw, offset, *values)
    path.write_bytes(gzip.compress(bytes(raw)))


def flip_byte(path: Path) -> None:
    """Damages the packed bytes near the end, where only the checksum tells."""
    raw = bytearray(path.read_bytes())
    raw[-6] ^= 0xFF
    path.write_bytes(bytes(raw))


def extra(root: Path) -> None:
    save(root / "imagesTr/c_001_0002.nii.gz", image_array(5))


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere.nii.gz")


# what is done to the folder; the file that must be named; words that must be said
ONE_CASE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "truncated gzip": (lambda r: (r / IMAGE).write_bytes((r / IMAGE).read_bytes()[:900]), IMAGE, "truncated"),
    "truncated label": (
        lambda r: (r / LABEL).write_bytes((r / LABEL).read_bytes()[:120]),
        LABEL,
        "truncated",
    ),
    "damaged checksum": (lambda r: flip_byte(r / IMAGE), IMAGE, "damaged"),
    "text named .nii.gz": (lambda r: (r / IMAGE).write_text("not an image"), IMAGE, "not compressed with gzip"),
    "packed text": (lambda r: (r / IMAGE).write_bytes(gzip.compress(b"no image" * 99)), IMAGE, "not a NIfTI file"),
    "plain NIfTI named .gz": (
        lambda r: (r / IMAGE).write_bytes(gzip.decompress((r / IMAGE).read_bytes())),
        IMAGE,
        "name it .nii",
    ),
    "a file of 0 bytes": (lambda r: (r / LABEL).write_bytes(b""), LABEL, "is empty (0 bytes)"),
    "fewer voxels than promised": (
        lambda r: (r / IMAGE).write_bytes(gzip.compress(gzip.decompress((r / IMAGE).read_bytes())[:-50])),
        IMAGE,
        "truncated",
    ),
    "a header that promises terabytes": (
        lambda r: patch(r / IMAGE, 42, 32767, 32767, 32767, kind="h"),
        IMAGE,
        "announces",
    ),
    "missing modality": (lambda r: (r / SECOND).unlink(), SECOND, "needs the modality T2"),
    "extra modality": (extra, "imagesTr/c_001_0002.nii.gz", "extra modality"),
    "shape of a modality": (
        lambda r: rewrite(r / SECOND, lambda a: a[:-1]),
        SECOND,
        f"{IMAGE}: its shape is (13, 12, 10), the other's (14, 12, 10)",
    ),
    "shape of the label": (
        lambda r: rewrite(r / LABEL, lambda a: a[:, 1:]),
        LABEL,
        f"{IMAGE}: its shape is (14, 11, 10), the other's (14, 12, 10)",
    ),
    "affine of a modality": (
        lambda r: save(r / SECOND, image_array(3), np.diag([1.0, 1, 1, 1])),
        SECOND,
        f"{IMAGE}: its affine puts a corner",
    ),
    "affine of the label": (
        lambda r: save(r / LABEL, label_array(), OBLIQUE @ np.diag([1, 1, 1.2, 1])),
        LABEL,
        f"{IMAGE}: its affine puts a corner",
    ),
    "undeclared label": (
        lambda r: rewrite(r / LABEL, lambda a: put(a, 4)),
        LABEL,
        "value [4]; declared are [0, 1]",
    ),
    "negative label": (lambda r: rewrite(r / LABEL, lambda a: put(a.astype("i2"), -1)), LABEL, "value [-1]"),
    "fractional label": (
        lambda r: rewrite(r / LABEL, lambda a: put(a.astype("f4"), 0.5)),
        LABEL,
        "not whole numbers",
    ),
    "label of two channels": (
        lambda r: rewrite(r / LABEL, lambda a: np.stack([a, a], 3)),
        LABEL,
        "2 channels",
    ),
    "NaN": (lambda r: rewrite(r / IMAGE, lambda a: put(a.astype("f4"), np.nan)), IMAGE, "NaN or infinite"),
    "infinite": (
        lambda r: rewrite(r / SECOND, lambda a: put(a.astype("f4"), np.inf)),
        SECOND,
        "NaN or infinite",
    ),
    "too large for float32": (
        lambda r: rewrite(r / IMAGE, lambda a: a.astype("f8") * 1e300),
        IMAGE,
        "too large for float32",
    ),
    "empty image": (
        lambda r: [rewrite(r / path, lambda a: a * 0) for path in (IMAGE, SECOND)],
        IMAGE,
        "every voxel is 0",
    ),
    "empty modality": (lambda r: rewrite(r / SECOND, lambda a: a * 0), SECOND, "T2 is 0 everywhere"),
    "constant modality": (lambda r: rewrite(r / SECOND, lambda a: a * 0 + 9), SECOND, "T2 is 9 everywhere"),
    "a mask for an image": (
        lambda r: rewrite(r / IMAGE, lambda a: (a > 300).astype("u1")),
        IMAGE,
        "constant where",
    ),
    "zero spacing": (lambda r: patch(r / IMAGE, 80, 1, 0, 1), IMAGE, "spacing is [1.0, 0.0, 1.0]"),
    "negative spacing": (lambda r: patch(r / IMAGE, 80, -1, 1, 1), IMAGE, "spacing is [-1.0"),
    "NaN in the affine": (lambda r: patch(r / IMAGE, 280, float("nan")), IMAGE, "zero volume"),
    "an affine that is flat": (lambda r: patch(r / IMAGE, 280, *[0.0] * 12), IMAGE, "zero volume"),
    "2-D file": (lambda r: rewrite(r / IMAGE, lambda a: a[..., 0]), IMAGE, "2-D array"),
    "5-D file": (lambda r: rewrite(r / IMAGE, lambda a: a[..., None, None].repeat(2, 4)), IMAGE, "5-D array"),
    "4-D file for one modality": (
        lambda r: rewrite(r / IMAGE, lambda a: np.stack([a, a], 3)),
        IMAGE,
        "2 channels",
    ),
    "complex numbers": (
        lambda r: rewrite(r / IMAGE, lambda a: a.astype("c8")),
        IMAGE,
        "numbers of type complex64",
    ),
    "a scale that is no number": (
        lambda r: patch(r / IMAGE, 112, 2, float("nan")),
        IMAGE,
        "header cannot be used",
    ),
    "unreadable file": (lambda r: dangling(r / IMAGE), IMAGE, "is a link to nowhere.nii.gz, which leads nowhere"),
    "a folder for a file": (lambda r: into_folder(r / IMAGE), IMAGE, "is a folder without DICOM files"),
    "missing label": (lambda r: (r / LABEL).unlink(), LABEL, "is missing; add the label of case c_001"),
    "label without images": (
        lambda r: save(r / "labelsTr/z.nii.gz", label_array()),
        "labelsTr/z.nii.gz",
        "without",
    ),
    "a name without channel": (
        lambda r: save(r / "imagesTr/z.nii.gz", image_array(0)),
        "imagesTr/z.nii.gz",
        "no channel number",
    ),
    "a split with unknown cases": (
        lambda r: write_json(r / "splits_final.json", [{"train": ["c_000"], "val": ["c_009"]}]),
        "splits_final.json",
        "names case c_009",
    ),
    "a split that mixes": (
        lambda r: write_json(r / "splits_final.json", [{"train": ["c_000"], "val": ["c_000"]}]),
        "splits_final.json",
        "c_000 in train and in val",
    ),
    "a split that repeats": (
        lambda r: write_json(r / "splits_final.json", [{"train": ["c_000"], "val": ["c_001", "c_001"]}]),
        "splits_final.json",
        "lists case c_001 several times in val",
    ),
    "broken splits": (
        lambda r: (r / "splits_final.json").write_text("[{"),
        "splits_final.json",
        "is not valid JSON",
    ),
}


@pytest.mark.parametrize("name", ONE_CASE)
def test_a_bad_case_is_named_and_the_others_are_prepared(name, tmp_path, capfd):
    root = nnunet(tmp_path / "Dataset001_A", 3, ("T1", "T2"))
    harm, file, words = ONE_CASE[name]
    harm(root)
    printed = prepared(root, tmp_path / "cache", capfd)
    lines = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and str(root / file) in lines[0] and words in lines[0], printed
    ids = open_cache(tmp_path / "cache").ids
    assert {"c_000", "c_002"} <= set(ids) and ("c_001" in ids) == ("c_001" not in file)


def test_without_harm_the_same_folder_is_prepared(tmp_path, capfd):
    root = nnunet(tmp_path / "Dataset001_A", 3, ("T1", "T2"))
    assert "error" not in prepared(root, tmp_path / "cache", capfd, code=0)


def test_several_bad_cases_are_all_reported_at_the_end_by_workers_too(tmp_path, capfd):
    root = nnunet(tmp_path / "D", 4)
    (root / "imagesTr/c_001_0000.nii.gz").write_text("x")
    (root / "labelsTr/c_003.nii.gz").unlink()
    rewrite(root / "labelsTr/c_002.nii.gz", lambda a: put(a, 9))
    assert run(act, [str(root), "--out", str(tmp_path / "cache"), "--workers", "2"]) == 3
    printed = capfd.readouterr().err
    assert printed.count("error: ") == 3 and all(f"c_00{n}" in printed for n in (1, 2, 3))
    assert open_cache(tmp_path / "cache").ids == ("c_000",)


def test_a_training_prepares_nothing_where_headers_show_that_a_case_cannot_be_used(tmp_path, monkeypatch):
    root = nnunet(tmp_path / "D", 4)
    (root / "imagesTr/c_002_0000.nii.gz").write_bytes(b"")
    with monkeypatch.context() as patch:
        for name in ("decide_recipe", "_run"):
            patch.setattr(prepare_dataset, name, lambda *_: pytest.fail("began to prepare"))
        with pytest.raises(DataError, match=r"c_002_0000.nii.gz: is empty \(0 bytes\); copy it again"):
            prepare_dataset.prepared(root, tmp_path / "c", is_first=True, workers=0)
    report = prepare_dataset.prepare(read_dataset(root), tmp_path / "c", workers=0)
    assert report.prepared == ("c_000", "c_001", "c_003") and len(report.faults) == 1


def test_where_all_headers_are_broken_all_are_reported_and_none_is_opened_again(tmp_path, monkeypatch):
    root = nnunet(tmp_path / "D", 3)
    for path in (root / "imagesTr").iterdir():
        path.write_bytes(b"")
    monkeypatch.setattr(prepare_dataset, "decide_recipe", lambda *_: pytest.fail("began to prepare"))
    report = prepare_dataset.prepare(read_dataset(root), tmp_path / "c", workers=0)
    assert len(report.faults) == 3 and not report.prepared


def test_processes_share_the_headers_and_one_that_dies_loses_no_more_than_its_share(tmp_path, monkeypatch):
    dataset = read_dataset(nnunet(tmp_path / "D", 8))
    (dataset.cases[3].images[0]).write_bytes(b"")
    alone = fingerprint.read_geometries(dataset, 0)
    monkeypatch.setattr(fingerprint, "CASES_OF_A_WORKER", 3)
    shared = fingerprint.read_geometries(dataset, 4)
    assert alone.keys() == shared.keys() == set(dataset.ids)
    assert [str(alone[name]) for name in dataset.ids] == [str(shared[name]) for name in dataset.ids]
    broken = [name for name, read in shared.items() if isinstance(read, DataError)]
    assert broken == ["c_003"]
    read, parent = fingerprint.read_geometry, os.getpid()

    def die(path: Path):
        if "c_004" in str(path) and os.getpid() != parent:
            os._exit(9)
        return read(path)

    monkeypatch.setattr(fingerprint, "read_geometry", die)
    assert set(fingerprint.read_geometries(dataset, 2)) == {"c_001", "c_003", "c_005", "c_007"}


def test_the_table_is_long_enough() -> None:
    assert len(ONE_CASE) >= 43
