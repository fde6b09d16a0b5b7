"""The cache: it holds what the data set says, and follows every change of files and settings."""

import json
import os

import nibabel
import numpy as np
import pytest

from seqpar.cli.prepare import act
from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.formats.splits import split
from seqpar.data.preparation.cache import check_cache, open_cache
from seqpar.data.preparation.cache_index import cache_folder, is_current, outdated_cache
from seqpar.data.preparation.prepare_dataset import prepare, prepared
from seqpar.data.preparation.prepared_case import labels_to_source
from seqpar.data.preparation.recipe import PrepareSettings, Recipe
from seqpar.tasks.segment.data import open_data
from tests.support.configs import config_of
from tests.support.folders import NEW, OLD, brats, image_array, label_array, nnunet, save, tree, write_json


def test_the_cache_maps_what_the_description_says(tmp_path):
    root = brats(tmp_path / "B", [f"BraTS2021_{n:05d}" for n in range(3)], OLD, "_", (1, 2, 4))
    report = prepare(read_dataset(root), tmp_path / "c", PrepareSettings(locations=5), workers=2)
    assert len(report.prepared) == 3 and not report.faults
    cache = open_cache(tmp_path / "c")
    assert cache.labels == {"background": 0, "NCR": 1, "ED": 2, "ET": 3} and cache.recipe.values == (
        0,
        1,
        2,
        4,
    )
    assert cache.regions == {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)} and cache.regions_class_order == (
        2,
        1,
        3,
    )
    assert cache.modalities == ("T1", "T1c", "T2", "FLAIR")
    assert split(cache, "90:10")[1] == split(read_dataset(root), "90:10")[1]
    case = cache.cases["BraTS2021_00001"]
    assert isinstance(case.image, np.memmap) and isinstance(case.label, np.memmap)
    assert case.image.dtype == np.float32 and case.image.shape == (4, *case.label.shape) == (
        4,
        *case.properties.shape,
    )
    assert np.unique(case.label).tolist() == [0, 1, 2, 3] and list(case.locations) == [1, 2, 3]
    for n, places in case.locations.items():
        assert len(places) == 5 and (case.label[tuple(places.T)] == n).all() and len(np.unique(places, axis=0)) == 5
    source = nibabel.load(root / "BraTS2021_00001/BraTS2021_00001_seg.nii.gz")
    np.testing.assert_array_equal(labels_to_source(case.label, case.properties), np.asarray(source.dataobj))


def test_ignored_voxels_get_the_last_id_and_are_no_class_to_look_for(tmp_path):
    labels = {"background": 0, "a": 1, "ignore": 2}
    root = nnunet(tmp_path / "D", 1, labels=labels)
    save(root / "labelsTr/c_000.nii.gz", label_array((1, 2)))
    prepare(read_dataset(root), tmp_path / "c", PrepareSettings(spacing=(0.9, 1.1, 1.2)), workers=0)
    cache = open_cache(tmp_path / "c")
    case = cache.cases["c_000"]
    assert cache.ignore_label == 2 and cache.recipe.ignore_id == 2 and list(case.locations) == [1]
    assert np.unique(case.label).tolist() == [0, 1, 2] and case.properties.counts[2] == (case.label == 2).sum()


def test_a_case_without_foreground_is_prepared_and_told(tmp_path):
    root = nnunet(tmp_path / "D", 2)
    save(root / "labelsTr/c_001.nii.gz", label_array(()))
    report = prepare(read_dataset(root), tmp_path / "c", workers=0)
    assert report.empty == ("c_001",) and not report.faults
    assert open_cache(tmp_path / "c").cases["c_001"].locations == {}


def test_ct_is_clipped_and_scaled_by_its_values_inside_the_labels(tmp_path):
    root = nnunet(tmp_path / "D", 3, ("CT",))
    for n in range(3):
        image = image_array(n).astype(np.float32) - 1000
        save(root / f"imagesTr/c_{n:03d}_0000.nii.gz", image)
    prepare(read_dataset(root), tmp_path / "c", workers=2)
    cache = open_cache(tmp_path / "c")
    images = [nibabel.load(root / f"imagesTr/c_{n:03d}_0000.nii.gz").get_fdata() for n in range(3)]
    inside = np.repeat([image[label_array() > 0] for image in images], 1000)  # drawn with replacement
    intensities = cache.recipe.intensities[0]
    assert intensities is not None
    np.testing.assert_allclose(
        (intensities.low, intensities.high, intensities.mean, intensities.std),
        (*np.percentile(inside, [0.5, 99.5]), inside.mean(), inside.std()),
        rtol=3e-3,
    )
    image = nibabel.as_closest_canonical(nibabel.load(root / "imagesTr/c_001_0000.nii.gz")).get_fdata()
    expected = (np.clip(image, intensities.low, intensities.high) - intensities.mean) / intensities.std
    np.testing.assert_allclose(cache.cases["c_001"].image[0], expected, rtol=1e-4, atol=1e-5)
    assert Recipe.from_json(json.loads(json.dumps(cache.recipe.to_json()))) == cache.recipe
    before = tree(tmp_path / "c")
    save(root / "imagesTr/c_003_0000.nii.gz", image_array(3) - 1000)  # a further case changes the statistics
    save(root / "labelsTr/c_003.nii.gz", label_array())
    assert len(prepare(read_dataset(root), tmp_path / "c", workers=2).prepared) == 4
    prepare(read_dataset(root), tmp_path / "d", workers=0)
    assert tree(tmp_path / "c") == tree(tmp_path / "d") != before, "workers or history change the cache"


def test_masks_called_nonorm_stay_as_they_are(tmp_path):
    root = nnunet(tmp_path / "D", 1, ("T1", "noNorm"))
    save(root / "imagesTr/c_000_0001.nii.gz", label_array((7,)))
    prepare(read_dataset(root), tmp_path / "c", workers=0)
    assert np.unique(open_cache(tmp_path / "c").cases["c_000"].image[1]).tolist() == [0, 7]


def test_the_median_spacing_is_that_of_the_canonical_volumes(tmp_path):
    root = nnunet(tmp_path / "D", 3)
    for n, sizes in enumerate(([1, 2, 3], [1, 2, 3], [2, 2, 5])):
        affine = np.diag([*sizes, 1.0])[:, [2, 0, 1, 3]] if n == 1 else np.diag([*sizes, 1.0])  # case 1 lies turned
        for file, array in (("imagesTr/c_{:03d}_0000", image_array(n)), ("labelsTr/c_{:03d}", label_array())):
            save(root / (file.format(n) + ".nii.gz"), array, affine)
    prepare(read_dataset(root), tmp_path / "c", PrepareSettings(spacing="median"), workers=2)
    cache = open_cache(tmp_path / "c")
    assert cache.recipe.spacing == (1, 2, 3)
    assert [case.properties.spacing for case in cache.cases.values()] == [(1, 2, 3)] * 3
    shapes = [case.image.shape[1:] for case in cache.cases.values()]
    assert shapes[0] == (10, 8, 6) and shapes[1] == (8, 6, 10) and shapes[2] == (20, 8, 10)


def test_a_second_run_does_nothing_and_a_change_prepares_what_it_touches(tmp_path):
    root = nnunet(tmp_path / "D", 3)
    assert prepare(read_dataset(root), tmp_path / "c", workers=0).prepared == ("c_000", "c_001", "c_002")
    first = tree(tmp_path / "c")
    assert prepare(read_dataset(root), tmp_path / "c", workers=0).prepared == () and tree(tmp_path / "c") == first
    save(root / "imagesTr/c_001_0000.nii.gz", image_array(77))
    assert prepare(read_dataset(root), tmp_path / "c", workers=0).prepared == ("c_001",)
    os.utime(root / "imagesTr/c_002_0000.nii.gz")  # touched, the same content
    report = prepare(read_dataset(root), tmp_path / "c", workers=0)
    assert report.prepared == () and len(report.kept) == 3
    assert prepare(read_dataset(root), tmp_path / "c", workers=0).prepared == ()
    (tmp_path / "c/cases/c_000/label.npy").write_bytes(b"half")
    assert prepare(read_dataset(root), tmp_path / "c", workers=0).prepared == ("c_000",)
    assert len(prepare(read_dataset(root), tmp_path / "c", PrepareSettings(locations=9), workers=0).prepared) == 3
    (root / "labelsTr/c_002.nii.gz").unlink()
    (root / "imagesTr/c_002_0000.nii.gz").unlink()
    assert prepare(read_dataset(root), tmp_path / "c", PrepareSettings(locations=9), workers=0).prepared == ()
    assert open_cache(tmp_path / "c").ids == ("c_000", "c_001")
    prepare(read_dataset(root), tmp_path / "d", PrepareSettings(locations=9), workers=2)
    assert tree(tmp_path / "c") == tree(tmp_path / "d")


def test_a_file_is_known_by_more_than_size_and_time_unless_its_cache_is_older(tmp_path):
    root = nnunet(tmp_path / "D", 3, file_ending=".nii")
    for path in list(root.glob("*Tr/*.nii.gz")):  # uncompressed, all are equally long
        save(path.with_suffix(""), np.asarray(nibabel.load(path).dataobj))
        path.unlink()
    prepare(read_dataset(root), tmp_path / "c", workers=0)
    image = root / "imagesTr/c_001_0000.nii"
    before = image.stat()
    save(image, image_array(77))
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert image.stat().st_size == before.st_size
    assert prepare(read_dataset(root), tmp_path / "c", workers=0).prepared == ("c_001",)
    cases = list((tmp_path / "c").glob("cases/*/case.json"))
    for path in (*cases, tmp_path / "c/cache.json"):  # as older versions wrote them
        content = json.loads(path.read_text())
        for record in content["cases"].values() if "cases" in content else [content]:
            record["sources"] = [file[:3] for file in record["sources"]]
        write_json(path, content)
    assert is_current(read_dataset(root), tmp_path / "c", PrepareSettings())
    os.utime(image, (1, 1))
    assert not is_current(read_dataset(root), tmp_path / "c", PrepareSettings())


def test_a_case_that_goes_bad_leaves_the_cache(tmp_path):
    root = nnunet(tmp_path / "D", 2)
    prepare(read_dataset(root), tmp_path / "c", workers=0)
    (root / "imagesTr/c_001_0000.nii.gz").write_text("x")
    assert len(prepare(read_dataset(root), tmp_path / "c", workers=0).faults) == 1
    assert open_cache(tmp_path / "c").ids == ("c_000",) and not (tmp_path / "c/cases/c_001").exists()


def test_cases_whose_folders_were_swapped_are_prepared_again(tmp_path):
    root, cases = nnunet(tmp_path / "D", 3), tmp_path / "c/cases"
    prepare(read_dataset(root), tmp_path / "c", workers=0)
    first = tree(tmp_path / "c")
    (cases / "c_000").rename(tmp_path / "away")
    (cases / "c_001").rename(cases / "c_000")
    (tmp_path / "away").rename(cases / "c_001")
    assert prepare(read_dataset(root), tmp_path / "c", workers=0).prepared == ("c_000", "c_001")
    assert tree(tmp_path / "c") == first


@pytest.mark.parametrize("file", ["image.npy", "label.npy", "locations.npy", "case.json"])
def test_check_names_the_file_in_which_a_bit_has_flipped(file, tmp_path):
    prepare(read_dataset(nnunet(tmp_path / "D", 2)), tmp_path / "c", workers=0)
    assert check_cache(tmp_path / "c") == []
    path = tmp_path / "c/cases/c_001" / file
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    (fault,) = check_cache(tmp_path / "c")
    assert str(tmp_path / "c/cases/c_001") in fault.path and "damaged" in fault.problem


def test_brats_of_2023_needs_no_renumbering(tmp_path):
    root = brats(tmp_path / "B", ["BraTS-GLI-00000-000"], NEW, "-", (1, 2, 3))
    prepare(read_dataset(root), tmp_path / "c", workers=0)
    cache = open_cache(tmp_path / "c")
    assert cache.recipe.values == (0, 1, 2, 3) and cache.regions["TC"] == (1, 3)


def test_the_default_folder_lies_beside_the_data_or_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.delenv("SEQPAR_CACHE", raising=False)
    data = read_dataset(nnunet(tmp_path / "D", 1))
    assert cache_folder(data) == tmp_path / "seqpar-prepared" / "D"
    monkeypatch.setenv("SEQPAR_CACHE", "")
    assert cache_folder(data) == tmp_path / "seqpar-prepared" / "D"
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "caches"))
    assert cache_folder(data).parent == tmp_path / "caches" and cache_folder(data).name.startswith("D-")
    assert cache_folder(data, tmp_path / "x") == tmp_path / "x"


@pytest.mark.parametrize("has_preprocessed", [True, False])
def test_a_data_set_of_nnunet_is_found_by_its_number_after_it_was_prepared(
    tmp_path, monkeypatch, capsys, has_preprocessed
):
    monkeypatch.delenv("SEQPAR_CACHE", raising=False)
    monkeypatch.delenv("nnUNet_preprocessed", raising=False)
    raw, beside = tmp_path / "in" / "nnUNet_raw", tmp_path / "fast" / "nnUNet_preprocessed"
    monkeypatch.setenv("nnUNet_raw", str(raw))
    if has_preprocessed:
        monkeypatch.setenv("nnUNet_preprocessed", str(beside))
    root = nnunet(raw / "Dataset901_Blob", 2)
    nnunet(raw / "Dataset901_Blob.prepared", 0)  # as caches were once called
    (raw / "Dataset901_Blob.prepared" / "cache.json").touch()
    for _ in range(2):
        assert act(["901", "--workers", "0"]) == 0
        said = capsys.readouterr().out
        assert said.count(f"{raw}/Dataset901_Blob.prepared is a cache of an earlier version") == 1
    place = (beside if has_preprocessed else raw).parent / "seqpar-prepared" / "Dataset901_Blob"
    assert f"it can be deleted: the cache is now {place}" in said
    assert not outdated_cache(root, root.with_name("Dataset901_Blob.prepared"))
    open_data(config_of(["--data", "901", "--fold", "all"]), True)
    assert f"the cache is now {place}" in capsys.readouterr().out
    open_data(config_of(["--data", "901", "--fold", "all"]), False)
    assert not capsys.readouterr().out
    assert open_cache(place).ids == ("c_000", "c_001") == prepared(901, is_first=True).ids
    new = sorted(path.name for path in raw.iterdir() if path.suffix != ".prepared")
    assert [name for name in new if name.startswith("Dataset901")] == ["Dataset901_Blob"], "as nnU-Net looks it up"
    assert len(new) == 1 and read_dataset("Dataset901_Blob").root == root
    monkeypatch.delenv("nnUNet_raw")  # named by its path, in another shell
    assert cache_folder(read_dataset(root)) == place
    (former := raw / "seqpar-prepared" / "Dataset901_Blob").mkdir(parents=True)
    (former / "cache.json").touch()
    assert f"Dataset901_Blob.prepared and {former} are caches of an earlier version" in outdated_cache(root, place)


def test_a_cache_may_lie_beside_a_list_and_not_in_a_folder_of_data(tmp_path):
    nnunet(tmp_path / "D", 2)
    entries = [{"image": f"D/imagesTr/c_{n:03d}_0000.nii.gz", "label": f"D/labelsTr/c_{n:03d}.nii.gz"} for n in (0, 1)]
    (tmp_path / "list.json").write_text(json.dumps({"labels": {"0": "background", "1": "organ"}, "training": entries}))
    assert len(prepare(read_dataset(tmp_path / "list.json"), tmp_path / "cache").prepared) == 2
    with pytest.raises(DataError, match=r"D/cache: is in the data set .*/D, to which nothing may be added"):
        prepare(read_dataset(tmp_path / "D"), tmp_path / "D" / "cache")


def test_each_spacing_has_a_cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("SEQPAR_CACHE", raising=False)
    root = nnunet(tmp_path / "D", 1)
    for spacing, name in (("source", "D"), ("median", "D@median"), ("2,2,1.5", "D@2x2x1.5")):
        assert act([str(root), "--spacing", spacing, "--workers", "0"]) == 0
        shape = open_cache(tmp_path / "seqpar-prepared" / name).cases["c_000"].image.shape
        settings = PrepareSettings.spaced(spacing)
        assert prepared(root, None, settings, is_first=True).path.name == name
        monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path))
        assert cache_folder(read_dataset(root), None, settings).name.endswith(name[1:])
        monkeypatch.delenv("SEQPAR_CACHE")
        assert shape == ((1, 6, 4, 5) if "2" in name else (1, 10, 8, 6)), shape
    assert len(list((tmp_path / "seqpar-prepared").iterdir())) == 3


def test_data_sets_of_one_name_in_two_places_have_a_cache_each(tmp_path, monkeypatch):
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "caches"))
    roots = [nnunet(tmp_path / place / "train", cases) for place, cases in (("a", 2), ("b", 3))]
    caches = [prepared(root, is_first=True, workers=0) for root in roots]
    assert [len(cache.ids) for cache in caches] == [2, 3]
    assert all(case.image.shape[0] == 1 for cache in caches for case in cache.cases.values())
    (tmp_path / "link").symlink_to(roots[0])
    assert cache_folder(read_dataset(tmp_path / "link" / ".." / "train")) == caches[0].path
