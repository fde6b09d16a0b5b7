"""prepare --check reads the source, with and without a cache, and writes nothing."""

import json
import os
import shutil
from pathlib import Path

import pytest

from seqpar.cli.prepare import act
from seqpar.cluster.exit_codes import run
from tests.support.folders import image_array, label_array, nnunet, save, tree


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Returns what checks the data set D: exit code, stdout and the errors; nothing may be written."""
    monkeypatch.delenv("SEQPAR_CACHE", raising=False)

    def do(*more: str) -> tuple[int, str, list[str]]:
        before = tree(tmp_path)
        code = run(act, [str(tmp_path / "D"), "--check", "--workers", "0", *more])
        printed = capfd.readouterr()
        assert tree(tmp_path) == before and "Traceback" not in printed.err
        return code, printed.out, [line for line in printed.err.splitlines() if line.startswith("error: ")]

    return do


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(("modality", "more"), [("T1", ()), ("CT", ()), ("T1", ("--spacing", "median"))])
def test_the_source_is_checked_without_a_cache(modality, more, tmp_path, check):
    root = nnunet(tmp_path / "D", 4, (modality,))
    code, said, errors = check(*more)
    assert (code, errors) == (0, []) and "there is no cache yet" in said and "the data set is in order" in said
    cut(root / "imagesTr/c_001_0000.nii.gz")
    save(root / "labelsTr/c_002.nii.gz", label_array((7,)))
    save(root / "labelsTr/c_003.nii.gz", label_array()[1:])
    code, said, errors = check(*more)
    assert code == 3 and len(errors) == 3 and "in order" not in said
    for error, file in zip(errors, ("imagesTr/c_001_0000.nii.gz", "labelsTr/c_002.nii.gz", "labelsTr/c_003.nii.gz")):
        assert error.startswith(f"error: {root / file}: ")


def test_voxels_of_a_class_that_a_case_is_not_annotated_for_are_found(tmp_path, check):
    root = nnunet(tmp_path / "D", 3)
    assert run(act, [str(root), "--workers", "0"]) == 0
    names = [name for name, value in json.loads((root / "dataset.json").read_text())["labels"].items() if value]
    (root / "annotated.csv").write_text(f"case,{','.join(names)}\nc_001,{','.join('0' * len(names))}\n")
    for _ in ("with a cache", "without"):
        code, _, (error, *_) = check()
        assert code == 3 and error.startswith(f"error: {root / 'labelsTr/c_001.nii.gz'}: has voxels of value [1")
        shutil.rmtree(tmp_path / "seqpar-prepared", ignore_errors=True)


def test_one_scan_under_two_names_is_named_without_a_cache(tmp_path, check, capfd):
    root = nnunet(tmp_path / "D", 3)
    shutil.copy(root / "imagesTr/c_001_0000.nii.gz", root / "imagesTr/c_002_0000.nii.gz")
    assert run(act, [str(root), "--workers", "0", "--check"]) == 0
    assert "warning: c_001, c_002 are one scan under 2 names" in capfd.readouterr().err


def test_nothing_to_learn_is_seen_without_a_cache_too(tmp_path, check):
    root = nnunet(tmp_path / "D", 2)
    for n in range(2):
        save(root / f"labelsTr/c_{n:03d}.nii.gz", label_array(()))
    assert "there is nothing to learn" in check()[2][0]


def test_source_and_cache_are_checked_together(tmp_path, check):
    root = nnunet(tmp_path / "D", 3)
    assert run(act, [str(root), "--workers", "0"]) == 0
    assert check()[0] == 0
    image = root / "imagesTr/c_001_0000.nii.gz"
    before, stat = image.read_bytes(), image.stat()
    cut(image)
    os.truncate(image, stat.st_size)  # as long as before, and filled with zeros
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    code, _, (error,) = check()
    assert code == 3 and error.startswith(f"error: {image}: ")
    plain = save(tmp_path / "changed.nii.gz", image_array(99)).read_bytes()
    image.write_bytes(plain + bytes(max(0, stat.st_size - len(plain))))
    if len(plain) <= stat.st_size:
        os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert "has other bytes than when it was prepared" in check()[2][0]
    image.write_bytes(before)
    os.utime(image, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    (tmp_path / "seqpar-prepared/D/cases/c_002/label.npy").write_bytes(b"half")
    code, _, errors = check()
    assert code == 3 and [str(tmp_path / "seqpar-prepared/D/cases/c_002") in error for error in errors] == [True]
    (tmp_path / "seqpar-prepared/D/cache.json").unlink()
    assert "has no finished cache" in check()[2][0]
