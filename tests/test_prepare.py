"""Preparation: steps with inverses, a cache that is the same however often its making was interrupted."""

import contextlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from folders import NEW, OBLIQUE, OLD, brats, image_array, label_array, nnunet, save, write_json

from seqpar.data import steps
from seqpar.data.case import Properties, image_to_source, labels_to_source, prepare_case, scores_to_source
from seqpar.data.datasets import recognise, split
from seqpar.data.description import Case
from seqpar.data.faults import DataError
from seqpar.data.prepare import (
    PrepareSettings,
    Recipe,
    cache_folder,
    check_cache,
    open_cache,
    prepare,
    prepared,
)
from seqpar.data.recipe import draft_recipe
from seqpar.data.store import CacheError
from seqpar.data.volumes import read_volume
from seqpar.data.workers import each


def tree(root: Path) -> dict[str, bytes]:
    """Returns every file in a folder, hidden ones too."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def child(work: Callable[[], object]) -> int:
    """Returns the id of a forked process, leader of its own group, that does the work."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            work()
        finally:
            os._exit(0)
    with contextlib.suppress(OSError):  # whichever of both comes first
        os.setpgid(pid, pid)
    return pid


# steps


def test_crop_and_its_inverse():
    image = np.zeros((2, 7, 6, 5), np.float32)
    image[0, 2, 3, 1], image[1, 4, 1, 4] = 1, -1
    box = steps.find_box(image)
    assert box == ((2, 5), (1, 4), (1, 5))
    np.testing.assert_array_equal(steps.uncrop(steps.crop(image, box), box, (7, 6, 5)), image)
    assert steps.uncrop(steps.crop(image, box), box, (7, 6, 5), fill=9)[0, 0, 0, 0] == 9


def test_normalise_is_a_z_score_inside_and_zero_outside_and_has_an_inverse():
    channel = image_array(0)
    mean, std = steps.measure(channel)
    done = steps.normalise(channel, mean, std, keep_zero=True)
    inside = done[channel != 0]
    assert abs(inside.mean()) < 1e-6 and abs(inside.std() - 1) < 1e-6 and done.dtype == np.float32
    np.testing.assert_array_equal(done == 0, channel == 0)
    np.testing.assert_allclose(steps.denormalise(done, mean, std, True), channel, rtol=1e-5)
    plain = np.array([[[1.0, 2.0, 3.0, 0.0]]])  # 2 is the mean: it stays apart from what lies outside
    np.testing.assert_array_equal(steps.normalise(plain, 2, 1, True) == 0, plain == 0)


@pytest.mark.parametrize("shape", [(5, 9, 4), (8, 6, 10), (13, 3, 7), (8, 6, 7)])
def test_resampling_is_torchs_trilinear_and_its_slabs_are_parts_of_it(shape):
    array = np.random.default_rng(0).normal(size=(2, 8, 6, 7)).astype(np.float32)
    reference = torch.nn.functional.interpolate(torch.from_numpy(array)[None], shape, mode="trilinear")[0]
    done = steps.resample(array, shape)
    np.testing.assert_allclose(done, reference.numpy(), atol=1e-5)
    for start, stop in ((0, 2), (2, 5), (shape[0] - 1, shape[0])):
        np.testing.assert_array_equal(steps.resample_slab(array, shape, start, stop), done[:, start:stop])


def test_label_resampling_never_invents_a_label():
    rng = np.random.default_rng(0)
    label = rng.choice(np.array([0, 3, 7], np.uint8), (8, 7, 6), p=[0.5, 0.25, 0.25])
    for shape in ((11, 5, 9), (3, 3, 3), (16, 14, 12)):
        assert set(np.unique(steps.resample_label(label, shape))) <= {0, 3, 7}
    assert set(np.unique(steps.resample(label.astype(float), (11, 5, 9)).round())) > {0, 3, 7}, "no control"
    np.testing.assert_array_equal(steps.resample_label(label.repeat(3, 0), label.shape), label)


def test_class_ids_and_file_values_are_inverse():
    label = np.array([[[0, 4, 2, 9]]])
    ids = steps.to_ids(label, (0, 2, 4, 9))
    assert ids.tolist() == [[[0, 2, 1, 3]]] and ids.dtype == np.uint8
    np.testing.assert_array_equal(steps.to_values(ids, (0, 2, 4, 9)), label)


# cases and back


@pytest.mark.parametrize("spacing", [None, (1.1, 1.0, 1.3), (0.7, 1.2, 0.9)])
@pytest.mark.parametrize("shape", [(14, 12, 10), (9, 8, 1), (33, 9, 6)])
def test_a_label_comes_back_to_its_file(shape, spacing, tmp_path):
    for n, turn in enumerate(([0, 1, 2], [2, 0, 1], [1, 0, 2])):
        affine = OBLIQUE[:, [*turn, 3]] @ np.diag([1, -1, 1, 1] if n else [1, 1, 1, 1])
        label = np.zeros(shape, np.uint8)
        label[2:7, 2:7], label[4:5, 3:6] = 1, 4
        image = np.where(label + (np.indices(shape)[0] > 1), np.random.default_rng(n).normal(9, 2, shape), 0)
        case = Case(
            "a", (save(tmp_path / "i.nii.gz", image, affine),), save(tmp_path / "l.nii.gz", label, affine)
        )
        recipe = Recipe(("T1",), ("zscore",), (None,), spacing, (0, 1, 4), False, 100)
        done = prepare_case(case, recipe)
        properties = Properties.from_json(json.loads(json.dumps(done.properties.to_json())))
        assert done.label is not None and done.image.shape[1:] == done.label.shape == properties.shape
        whole = properties.geometry.canonical_shape
        assert steps.uncrop(np.ones(properties.box_shape), properties.box, whole).sum() < np.prod(whole)
        back = labels_to_source(done.label, properties)
        scores = np.stack([done.label == n for n in range(3)]).astype(np.float32)
        slabs = scores_to_source(scores, properties, lambda slab: slab.argmax(0), slab=3)
        np.testing.assert_array_equal(slabs, back)
        if spacing is None:
            np.testing.assert_array_equal(back, label)
            np.testing.assert_allclose(image_to_source(done.image, properties)[0], image, rtol=1e-4)
        else:
            assert (back == label).mean() > 0.85 and set(np.unique(back)) <= {0, 1, 4} and back.shape == shape
            if shape[2] > 1:
                extent = np.array(done.image.shape[1:]) * spacing
                old = np.array(properties.box_shape) * properties.geometry.canonical_spacing
                np.testing.assert_allclose(extent, old, atol=max(spacing))


def test_a_case_without_label_is_prepared_the_same_for_prediction(tmp_path):
    root = nnunet(tmp_path / "D", 1)
    data = recognise(root)
    recipe = draft_recipe(data, PrepareSettings())
    with_label, without = (
        prepare_case(data.cases[0], recipe),
        prepare_case(recognise(root / "imagesTr").cases[0], recipe),
    )
    np.testing.assert_array_equal(with_label.image, without.image)
    assert without.label is None and without.locations == {}
    source = read_volume(data.cases[0].label)
    np.testing.assert_array_equal(labels_to_source(with_label.label, without.properties), source.array[0])


def test_a_label_outside_the_image_is_kept(tmp_path):
    root = nnunet(tmp_path / "D", 1)
    label = label_array()
    label[0, 0, 0] = 1
    save(root / "labelsTr/c_000.nii.gz", label)
    done = prepare_case(recognise(root).cases[0], draft_recipe(recognise(root), PrepareSettings()))
    np.testing.assert_array_equal(labels_to_source(done.label, done.properties), label)


# the cache


def test_the_cache_maps_what_the_description_says(tmp_path):
    root = brats(tmp_path / "B", [f"BraTS2021_{n:05d}" for n in range(3)], OLD, "_", (1, 2, 4))
    report = prepare(recognise(root), tmp_path / "c", PrepareSettings(locations=5), workers=2)
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
    assert split(cache, "90:10")[1] == split(recognise(root), "90:10")[1]
    case = cache.cases["BraTS2021_00001"]
    assert isinstance(case.image, np.memmap) and isinstance(case.label, np.memmap)
    assert case.image.dtype == np.float32 and case.image.shape == (4, *case.label.shape) == (
        4,
        *case.properties.shape,
    )
    assert np.unique(case.label).tolist() == [0, 1, 2, 3] and list(case.locations) == [1, 2, 3]
    for n, places in case.locations.items():
        assert (
            len(places) == 5
            and (case.label[tuple(places.T)] == n).all()
            and len(np.unique(places, axis=0)) == 5
        )
    source = nibabel.load(root / "BraTS2021_00001/BraTS2021_00001_seg.nii.gz")
    np.testing.assert_array_equal(labels_to_source(case.label, case.properties), np.asarray(source.dataobj))


def test_ignored_voxels_get_the_last_id_and_are_no_class_to_look_for(tmp_path):
    labels = {"background": 0, "a": 1, "ignore": 2}
    root = nnunet(tmp_path / "D", 1, labels=labels)
    save(root / "labelsTr/c_000.nii.gz", label_array((1, 2)))
    prepare(recognise(root), tmp_path / "c", PrepareSettings(spacing=(0.9, 1.1, 1.2)), workers=0)
    cache = open_cache(tmp_path / "c")
    case = cache.cases["c_000"]
    assert cache.ignore_label == 2 and cache.recipe.ignore_id == 2 and list(case.locations) == [1]
    assert (
        np.unique(case.label).tolist() == [0, 1, 2] and case.properties.counts[2] == (case.label == 2).sum()
    )


def test_a_case_without_foreground_is_prepared_and_told(tmp_path):
    root = nnunet(tmp_path / "D", 2)
    save(root / "labelsTr/c_001.nii.gz", label_array(()))
    report = prepare(recognise(root), tmp_path / "c", workers=0)
    assert report.empty == ("c_001",) and not report.faults
    assert open_cache(tmp_path / "c").cases["c_001"].locations == {}


def test_ct_is_clipped_and_scaled_by_its_values_inside_the_labels(tmp_path):
    root = nnunet(tmp_path / "D", 3, ("CT",))
    for n in range(3):
        image = image_array(n).astype(np.float32) - 1000
        save(root / f"imagesTr/c_{n:03d}_0000.nii.gz", image)
    prepare(recognise(root), tmp_path / "c", workers=2)
    cache = open_cache(tmp_path / "c")
    images = [nibabel.load(root / f"imagesTr/c_{n:03d}_0000.nii.gz").get_fdata() for n in range(3)]
    inside = np.concatenate([image[label_array() > 0] for image in images])
    found = cache.recipe.intensities[0]
    assert found is not None
    np.testing.assert_allclose(
        (found.low, found.high, found.mean, found.std),
        (*np.percentile(inside, [0.5, 99.5]), inside.mean(), inside.std()),
    )
    image = nibabel.as_closest_canonical(nibabel.load(root / "imagesTr/c_001_0000.nii.gz")).get_fdata()
    expected = (np.clip(image, found.low, found.high) - found.mean) / found.std
    np.testing.assert_allclose(cache.cases["c_001"].image[0], expected, rtol=1e-4, atol=1e-5)
    assert Recipe.from_json(json.loads(json.dumps(cache.recipe.to_json()))) == cache.recipe
    before = tree(tmp_path / "c")
    save(root / "imagesTr/c_003_0000.nii.gz", image_array(3) - 1000)  # a further case changes the statistics
    save(root / "labelsTr/c_003.nii.gz", label_array())
    assert len(prepare(recognise(root), tmp_path / "c", workers=2).prepared) == 4
    prepare(recognise(root), tmp_path / "d", workers=0)
    assert tree(tmp_path / "c") == tree(tmp_path / "d") != before, "workers or history change the cache"


def test_masks_called_nonorm_stay_as_they_are(tmp_path):
    root = nnunet(tmp_path / "D", 1, ("T1", "noNorm"))
    save(root / "imagesTr/c_000_0001.nii.gz", label_array((7,)))
    prepare(recognise(root), tmp_path / "c", workers=0)
    assert np.unique(open_cache(tmp_path / "c").cases["c_000"].image[1]).tolist() == [0, 7]


def test_the_median_spacing_is_that_of_the_canonical_volumes(tmp_path):
    root = nnunet(tmp_path / "D", 3)
    for n, sizes in enumerate(([1, 2, 3], [1, 2, 3], [2, 2, 5])):
        affine = (
            np.diag([*sizes, 1.0])[:, [2, 0, 1, 3]] if n == 1 else np.diag([*sizes, 1.0])
        )  # case 1 lies turned
        for file, array in (("imagesTr/c_{:03d}_0000", image_array(n)), ("labelsTr/c_{:03d}", label_array())):
            save(root / (file.format(n) + ".nii.gz"), array, affine)
    prepare(recognise(root), tmp_path / "c", PrepareSettings(spacing="median"), workers=2)
    cache = open_cache(tmp_path / "c")
    assert cache.recipe.spacing == (1, 2, 3)
    assert [case.properties.spacing for case in cache.cases.values()] == [(1, 2, 3)] * 3
    shapes = [case.image.shape[1:] for case in cache.cases.values()]
    assert shapes[0] == (10, 8, 6) and shapes[1] == (8, 6, 10) and shapes[2] == (20, 8, 10)


def test_a_second_run_does_nothing_and_a_change_prepares_what_it_touches(tmp_path):
    root = nnunet(tmp_path / "D", 3)
    assert prepare(recognise(root), tmp_path / "c", workers=0).prepared == ("c_000", "c_001", "c_002")
    first = tree(tmp_path / "c")
    assert (
        prepare(recognise(root), tmp_path / "c", workers=0).prepared == () and tree(tmp_path / "c") == first
    )
    save(root / "imagesTr/c_001_0000.nii.gz", image_array(77))
    assert prepare(recognise(root), tmp_path / "c", workers=0).prepared == ("c_001",)
    os.utime(root / "imagesTr/c_002_0000.nii.gz")  # touched, the same content
    report = prepare(recognise(root), tmp_path / "c", workers=0)
    assert report.prepared == () and len(report.kept) == 3
    assert prepare(recognise(root), tmp_path / "c", workers=0).prepared == ()
    (tmp_path / "c/cases/c_000/label.npy").write_bytes(b"half")
    assert prepare(recognise(root), tmp_path / "c", workers=0).prepared == ("c_000",)
    assert (
        len(prepare(recognise(root), tmp_path / "c", PrepareSettings(locations=9), workers=0).prepared) == 3
    )
    (root / "labelsTr/c_002.nii.gz").unlink()
    (root / "imagesTr/c_002_0000.nii.gz").unlink()
    assert prepare(recognise(root), tmp_path / "c", PrepareSettings(locations=9), workers=0).prepared == ()
    assert open_cache(tmp_path / "c").ids == ("c_000", "c_001")
    prepare(recognise(root), tmp_path / "d", PrepareSettings(locations=9), workers=2)
    assert tree(tmp_path / "c") == tree(tmp_path / "d")


def test_a_case_that_goes_bad_leaves_the_cache(tmp_path):
    root = nnunet(tmp_path / "D", 2)
    prepare(recognise(root), tmp_path / "c", workers=0)
    (root / "imagesTr/c_001_0000.nii.gz").write_text("x")
    assert len(prepare(recognise(root), tmp_path / "c", workers=0).faults) == 1
    assert open_cache(tmp_path / "c").ids == ("c_000",) and not (tmp_path / "c/cases/c_001").exists()


@pytest.mark.parametrize("file", ["image.npy", "label.npy", "locations.npy", "case.json"])
def test_check_names_the_file_in_which_a_bit_has_flipped(file, tmp_path):
    prepare(recognise(nnunet(tmp_path / "D", 2)), tmp_path / "c", workers=0)
    assert check_cache(tmp_path / "c") == []
    path = tmp_path / "c/cases/c_001" / file
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    (fault,) = check_cache(tmp_path / "c")
    assert str(tmp_path / "c/cases/c_001") in fault.path and "damaged" in fault.problem


def test_prepare_killed_at_random_moments_ends_with_the_undisturbed_cache(tmp_path):
    data = recognise(nnunet(tmp_path / "D", 6, ("CT",)))
    prepare(data, tmp_path / "whole", workers=2)
    rng, killed = np.random.default_rng(0), 0
    for _ in range(10):
        pid = child(lambda: prepare(data, tmp_path / "c", workers=2))
        time.sleep(rng.uniform(0.02, 0.25))
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            killed += 1
        if (tmp_path / "c/cases").exists() and killed % 4 == 3:  # and some that had been finished
            for path in (tmp_path / "c/cases").glob("c_00[24]/label.npy"):
                path.unlink()
    assert killed >= 5
    assert not prepare(data, tmp_path / "c", workers=2).faults
    assert tree(tmp_path / "c") == tree(tmp_path / "whole")


def test_no_worker_outlives_its_parent(tmp_path):
    def work(item: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(60)

    pid = child(lambda: list(each(work, [1, 2], 2)))
    until = time.monotonic() + 20
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2 and all(Path(f"/proc/{worker}").exists() for worker in workers)
    os.kill(pid, signal.SIGKILL)  # the parent alone, not its group
    os.waitpid(pid, 0)
    while any(_runs(worker) for worker in workers) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(_runs(worker) for worker in workers)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_costs_its_case_alone_and_a_mistake_of_ours_is_raised(tmp_path, monkeypatch):
    data = recognise(nnunet(tmp_path / "D", 3))
    write = prepare.__globals__["write_case"]

    def fatal(path: Path, name: str, *more: object) -> None:
        if name == "c_001":
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, name, *more)

    monkeypatch.setitem(prepare.__globals__, "write_case", fatal)
    report = prepare(data, tmp_path / "c", workers=2)
    assert len(report.prepared) == 2 and "exit code -9" in report.faults[0].problem
    assert "c_001" in report.faults[0].path and "--workers" in report.faults[0].problem

    def wrong(*_: object) -> None:
        raise KeyError("ours")

    monkeypatch.setitem(prepare.__globals__, "write_case", wrong)
    with pytest.raises(RuntimeError, match=r"(?s)a worker failed.*KeyError: 'ours'"):
        prepare(data, tmp_path / "d", workers=2)


# disks


@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_disk_is_one_clear_error_and_nothing_finished_is_lost(workers, tmp_path, monkeypatch):
    root = nnunet(tmp_path / "D", 4)
    data = recognise(root)
    prepare(replace(data, cases=data.cases[:2]), tmp_path / "c", workers=0)
    before = tree(tmp_path / "c/cases")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("numpy.lib.format.write_array", full)
        with pytest.raises(
            CacheError, match=r"c: cannot be written \(No space left on device, \d+ MB are free\)"
        ):
            prepare(data, tmp_path / "c", workers=workers)
    assert tree(tmp_path / "c/cases") == before, "lost or left half written"
    assert prepare(data, tmp_path / "c", workers=0).prepared == ("c_002", "c_003")


def test_a_file_that_the_system_cuts_off_is_not_taken_for_whole(tmp_path):
    data = recognise(nnunet(tmp_path / "D", 2))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))  # a real write that fails half way
        try:
            prepare(data, tmp_path / "c", workers=2)
        except CacheError as error:
            (tmp_path / "error").write_text(str(error))

    os.waitpid(child(limited), 0)
    assert (
        "c: cannot be written (File too large); what is finished is kept" in (tmp_path / "error").read_text()
    )
    assert list((tmp_path / "c/cases").iterdir()) == [] and not (tmp_path / "c/cache.json").exists()
    with pytest.raises(DataError, match="no finished cache"):
        open_cache(tmp_path / "c")


def test_a_place_that_cannot_be_written_is_one_clear_error(tmp_path):
    data = recognise(nnunet(tmp_path / "D", 1))
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match=r"file/c: cannot be written \(Not a directory"):
        prepare(data, tmp_path / "file/c", workers=0)


def test_a_current_cache_on_a_read_only_disk_is_used_as_it_is(tmp_path, monkeypatch):
    root = nnunet(tmp_path / "D", 1)
    prepare(recognise(root), tmp_path / "c", workers=0)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("os.replace", "os.fsync", "pathlib.Path.mkdir", "pathlib.Path.unlink"):
        monkeypatch.setattr(name, read_only)
    assert prepare(recognise(root), tmp_path / "c", workers=0).kept == ("c_000",)
    assert prepared(root, tmp_path / "c", is_first=True).ids == ("c_000",)
    with pytest.raises(CacheError, match="Read-only"):
        prepare(recognise(root), tmp_path / "c", PrepareSettings(locations=3), workers=0)


def test_somebody_elses_folder_is_left_alone(tmp_path):
    data = recognise(nnunet(tmp_path / "D", 1))
    save(tmp_path / "mine/cases/c_000/notes.nii.gz", image_array(0))
    before = tree(tmp_path / "mine")
    with pytest.raises(DataError, match="not empty and no cache"):
        prepare(data, tmp_path / "mine", workers=0)
    assert tree(tmp_path / "mine") == before
    prepare(data, tmp_path / "c", workers=0)
    other = recognise(nnunet(tmp_path / "E", 1))
    with pytest.raises(DataError, match="holds the cache of D, not of E"):
        prepare(other, tmp_path / "c", workers=0)
    assert open_cache(tmp_path / "c").name == "D"


def test_the_default_folder_lies_beside_the_data_or_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.delenv("SEQPAR_CACHE", raising=False)
    data = recognise(nnunet(tmp_path / "D", 1))
    assert cache_folder(data) == tmp_path / "D.prepared"
    monkeypatch.setenv("SEQPAR_CACHE", str(tmp_path / "caches"))
    assert (
        cache_folder(data) == tmp_path / "caches/D" and cache_folder(data, tmp_path / "x") == tmp_path / "x"
    )


# several processes


def test_the_others_wait_until_the_first_has_prepared(tmp_path):
    root = nnunet(tmp_path / "D", 3)
    pid = child(lambda: (time.sleep(0.5), prepared(root, tmp_path / "c", is_first=True, workers=0)))
    start = time.monotonic()
    cache = prepared(root, tmp_path / "c", is_first=False, deadline=30)
    assert cache.ids == ("c_000", "c_001", "c_002") and time.monotonic() - start > 0.4
    os.waitpid(pid, 0)
    assert not (tmp_path / "c/state.json").exists()


def test_the_others_see_the_firsts_error(tmp_path):
    root = nnunet(tmp_path / "D", 3)
    (root / "imagesTr/c_001_0000.nii.gz").write_text("x")
    errors: dict[bool, str] = {}

    def go(is_first: bool) -> None:
        try:
            prepared(root, tmp_path / "c", is_first=is_first, workers=0, token="run", deadline=30)
        except DataError as error:
            errors[is_first] = str(error)

    threads = [threading.Thread(target=go, args=(is_first,)) for is_first in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors[True] == errors[False] and "c_001_0000.nii.gz" in errors[True]


def test_an_earlier_runs_failure_is_not_taken_for_this_ones(tmp_path):
    root = nnunet(tmp_path / "D", 2)
    write_json(tmp_path / "c/state.json", {"token": "old", "state": "failed", "path": "x", "problem": "old"})
    pid = child(
        lambda: (time.sleep(1), prepared(root, tmp_path / "c", is_first=True, workers=0, token="new"))
    )
    assert len(prepared(root, tmp_path / "c", is_first=False, token="new", deadline=30).ids) == 2
    os.waitpid(pid, 0)


def test_waiting_for_nobody_ends_at_the_deadline(tmp_path):
    root = nnunet(tmp_path / "D", 1)
    with pytest.raises(DataError, match="silent for 1 s"):
        prepared(root, tmp_path / "c", is_first=False, deadline=1)


def test_two_runs_into_one_folder_do_not_meet(tmp_path):
    data = recognise(nnunet(tmp_path / "D", 4))
    pids = [child(lambda: prepare(data, tmp_path / "c", workers=2)) for _ in range(2)]
    for pid in pids:
        os.waitpid(pid, 0)
    prepare(data, tmp_path / "d", workers=0)
    assert tree(tmp_path / "c") == tree(tmp_path / "d") and check_cache(tmp_path / "c") == []


def test_brats_of_2023_needs_no_renumbering(tmp_path):
    root = brats(tmp_path / "B", ["BraTS-GLI-00000-000"], NEW, "-", (1, 2, 3))
    prepare(recognise(root), tmp_path / "c", workers=0)
    cache = open_cache(tmp_path / "c")
    assert cache.recipe.values == (0, 1, 2, 3) and cache.regions["TC"] == (1, 3)
