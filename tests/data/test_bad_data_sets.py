"""Bad data sets, of every format: exit code 3, what is wrong by name, no traceback; the good cases are prepared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from seqpar.cli.prepare import act
from seqpar.cluster.exit_codes import run
from seqpar.data.preparation.cache import open_cache
from tests.support.bad_data import prepared, rewrite
from tests.support.folders import NEW, brats, decathlon, image_array, nnunet, save, write_json


def describe(root: Path, **changes: object) -> None:
    """Changes keys of dataset.json."""
    content = json.loads((root / "dataset.json").read_text())
    write_json(root / "dataset.json", {**content, **changes})


WHOLE_SET: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "broken JSON": (lambda r: (r / "dataset.json").write_text('{"labels": '), "dataset.json", "not valid JSON"),
    "JSON that is a list": (
        lambda r: (r / "dataset.json").write_text("[]"),
        "dataset.json",
        "must contain a JSON object",
    ),
    "JSON in another encoding": (
        lambda r: (r / "dataset.json").write_bytes(b'{"a": "\xff\xfe"}'),
        "dataset.json",
        "UTF-8",
    ),
    "a background that is not 0": (
        lambda r: nnunet(r, 2, ("T1", "T2"), labels={"tumour": 0, "background": 1}),
        "",
        "they need background 0",
    ),
    "duplicate case": (
        lambda r: (r / "dataset.json").write_text('{"dataset": {"a": {}, "a": {}}}'),
        "dataset.json",
        "'a' twice",
    ),
    "no labels": (lambda r: describe(r, labels={}), "dataset.json", "labels is {}"),
    "no background": (lambda r: describe(r, labels={"a": 1, "b": 2}), "", "they need background 0"),
    "labels that are fractions": (
        lambda r: describe(r, labels={"background": 0, "a": 1.5}),
        "dataset.json",
        "1.5",
    ),
    "two names for a label": (
        lambda r: describe(r, labels={"background": 0, "a": 1, "b": 1}),
        "dataset.json",
        "repeat a name or a value",
    ),
    "no channel names": (lambda r: describe(r, channel_names=None), "dataset.json", "channel_names is None"),
    "regions without order": (
        lambda r: describe(r, labels={"background": 0, "a": [1]}),
        "dataset.json",
        "regions_class_order is None",
    ),
    "files that are no volumes": (lambda r: describe(r, file_ending=".png"), "dataset.json", "convert"),
    "no cases": (lambda r: [file.unlink() for file in r.glob("*Tr/*")], "", "no cases"),
    "no folder of labels": (lambda r: (r / "labelsTr").rename(r / "other"), "labelsTr", "is missing"),
    "no foreground anywhere": (
        lambda r: [rewrite(file, lambda a: a * 0) for file in r.glob("labelsTr/*")],
        "",
        "nothing to learn",
    ),
    "every label ignored": (
        lambda r: (
            describe(r, labels={"background": 0, "a": 1, "ignore": 2}),
            [rewrite(file, lambda a: a * 0 + 2) for file in r.glob("labelsTr/*")],
        ),
        "labelsTr/c_000.nii.gz",
        "every voxel has the ignore label",
    ),
    "CT without labels": (
        lambda r: (
            describe(r, channel_names={"0": "CT", "1": "T2"}),
            [rewrite(file, lambda a: a * 0) for file in r.glob("labelsTr/*")],
        ),
        "",
        "no case has a labelled",
    ),
}


@pytest.mark.parametrize("name", WHOLE_SET)
def test_a_bad_data_set_is_named(name, tmp_path, capfd):
    root = nnunet(tmp_path / "Dataset001_A", 2, ("T1", "T2"))
    harm, file, words = WHOLE_SET[name]
    harm(root)
    printed = prepared(root, tmp_path / "cache", capfd)
    assert str(root / file) in printed and words in printed, printed


def test_bad_cases_of_other_formats_are_named(tmp_path, capfd):
    root = brats(tmp_path / "B", [f"BraTS-GLI-0000{n}-000" for n in range(4)], NEW, "-", (1, 2, 3))
    first, second, third, _ = (root / f"BraTS-GLI-0000{n}-000" for n in range(4))
    (first / f"{first.name}-t2f.nii.gz").unlink()
    save(second / f"{second.name}-pet.nii.gz", image_array(0))
    (third / f"{third.name}-seg.nii.gz").unlink()
    printed = prepared(root, tmp_path / "b", capfd)
    for words in (
        f"{first.name} has no FLAIR (flair.nii.gz, t2f",
        "extra modality 'pet'",
        f"{third.name} has no label",
    ):
        assert words in printed
    root = decathlon(tmp_path / "M", 3)
    entries = json.loads((root / "dataset.json").read_text())["training"]
    describe(root, training=[*entries, entries[0], {"image": "x.nii.gz", "label": "y.nii.gz"}, {"image": 3}])
    save(root / "imagesTr/BRATS_001.nii.gz", image_array(0, (14, 12, 10, 3)))
    printed = prepared(root, tmp_path / "m", capfd)
    for words in (
        "lists case BRATS_000 twice",
        "x.nii.gz: is missing",
        "{'image': 3}",
        "BRATS_001.nii.gz: has 3",
    ):
        assert words in printed
    assert open_cache(tmp_path / "m").ids == ("BRATS_000", "BRATS_002")


def test_a_case_in_two_folders_is_a_duplicate(tmp_path, capfd):
    for place in ("one", "two"):
        brats(tmp_path / "B" / place, ["BraTS-GLI-00000-000"], NEW, "-", (1, 2, 3))
    brats(tmp_path / "B/one", ["BraTS-GLI-00001-000"], NEW, "-", (1, 2, 3))
    assert "is a duplicate: case BraTS-GLI-00000-000" in prepared(tmp_path / "B", tmp_path / "b", capfd)


def test_what_is_no_data_set_says_what_is_needed(tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    (tmp_path / "one.txt").write_text("x")
    for name in ("empty", "one.txt", "missing"):
        assert run(act, [str(tmp_path / name)]) == 3
        printed = capfd.readouterr().err
        assert str(tmp_path / name) in printed and "nnU-Net raw folder" in printed and "Traceback" not in printed


def test_a_wrong_flag_is_a_usage_error(tmp_path, capfd):
    root = nnunet(tmp_path / "D", 1)
    for flags in (["--spacing", "coarse"], ["--spacing", "1,2"], ["--spacing", "1,0,1"], ["--workers", "-1"]):
        assert run(act, [str(root), "--out", str(tmp_path / "c"), *flags]) == 2
        assert flags[0].removeprefix("--") in capfd.readouterr().err


def test_the_table_is_long_enough() -> None:
    assert len(WHOLE_SET) >= 16
