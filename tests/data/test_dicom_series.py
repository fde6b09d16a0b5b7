"""DICOM series: a folder of slices is a volume where its slices say that they lie, or it is refused by name."""

import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk

from seqpar.data.errors import DataError
from seqpar.data.formats.recognise import find_inputs, read_dataset
from seqpar.data.preparation.cache_index import same_source, sources_of
from seqpar.data.volumes import digest_file, digest_samples, read_geometry, read_volume
from tests.support.folders import OBLIQUE, image_array, label_array, nnunet, save
from tests.support.itk import affine_of, save_series, write_dicom

PLACED = OBLIQUE @ np.diag([1.0, -1, 1, 1])  # turned so that slices in order along their normal are those of the array
TILTED = PLACED @ np.array([[1, 0, 0, 0], [0, 1, 0.4, 0], [0, 0, 1, 0], [0, 0, 0, 1]])


def test_a_series_lies_where_its_slices_say_and_is_read_as_by_simpleitk(tmp_path) -> None:
    array = image_array(3, (9, 7, 6)) - 50
    folder = save_series(tmp_path / "a", array, PLACED)
    volume = read_volume(folder)
    np.testing.assert_array_equal(volume.array, array[None])
    np.testing.assert_allclose(volume.geometry.affine, PLACED, atol=1e-5)
    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    whole = reader.Execute()
    np.testing.assert_array_equal(sitk.GetArrayFromImage(whole).transpose(2, 1, 0), array)
    np.testing.assert_allclose(affine_of(whole), volume.geometry.affine, atol=1e-5)
    geometry, channels = read_geometry(folder)
    assert channels == 1 and np.array_equal(geometry.affine, volume.geometry.affine)
    assert (geometry.shape, geometry.dtype) == (volume.geometry.shape, volume.geometry.dtype)


def test_slices_from_the_top_downwards_and_a_tilted_gantry_keep_their_place(tmp_path) -> None:
    array = image_array(3, (9, 7, 6))
    from_the_end = np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, 5], [0, 0, 0, 1]])
    volume = read_volume(save_series(tmp_path / "tilted", array, TILTED))
    np.testing.assert_allclose(volume.geometry.affine, TILTED, atol=1e-5)
    np.testing.assert_array_equal(volume.array[0], array)
    volume = read_volume(save_series(tmp_path / "downwards", array, PLACED @ np.diag([1, 1, -1, 1])))
    np.testing.assert_allclose(volume.geometry.affine, PLACED @ np.diag([1, 1, -1, 1]) @ from_the_end, atol=1e-5)
    np.testing.assert_array_equal(volume.array[0], array[:, :, ::-1])


def test_a_scale_per_slice_and_mixed_number_types_keep_their_values(tmp_path) -> None:
    array = image_array(3, (9, 7, 6))
    folder = save_series(tmp_path / "a", array[:, :, :3], PLACED)
    stored = {"t0028_1053": "0.25", "t0028_1052": "-8", "t0028_0100": "16", "t0028_0101": "16", "t0028_0102": "15"}
    scaled = save_series(tmp_path / "b", array * 0.25, PLACED, **stored, t0028_0103="1")
    for file in sorted(scaled.iterdir()):
        if sitk.ReadImage(str(file)).GetMetaData("0020|0013").strip() in "456":
            shutil.copy(file, folder / f"b-{file.name}")
    values = read_volume(folder).array[0]
    assert values.dtype == np.float64 and (values[:, :, 3] % 1 != 0).any()
    np.testing.assert_array_equal(values, np.concatenate([array[:, :, :3], array[:, :, 3:] * 0.25], 2))


def test_one_slice_has_the_thickness_that_it_says(tmp_path) -> None:
    folder = save_series(tmp_path / "a", image_array(0, (9, 7, 5))[:, :, 2:3], t0018_0050="4.5")
    assert read_volume(folder).geometry.spacing[2] == pytest.approx(4.5)


def lose(folder: Path, array: np.ndarray) -> None:
    sorted(folder.iterdir())[0].unlink()  # the first slice: then the second, so that a gap is left
    names = {sitk.ReadImage(str(file)).GetMetaData("0020|0013").strip(): file for file in folder.iterdir()}
    names["3"].unlink()


def second_series(folder: Path, array: np.ndarray) -> None:
    save_series(folder, array[:, :, :2], series=2, t0008_103e="scout")


def same_place(folder: Path, array: np.ndarray) -> None:
    for file in save_series(folder.parent / "other", array).iterdir():
        shutil.copy(file, folder / f"again-{file.name}")


def another_size(folder: Path, array: np.ndarray) -> None:
    shutil.copy(next(save_series(folder.parent / "other", array[1:, :, :1]).iterdir()), folder / "x.dcm")
    next(iter(sorted(folder.glob("1-*")))).unlink()


def cut_off(folder: Path, array: np.ndarray) -> None:
    file = sorted(folder.iterdir())[2]
    file.write_bytes(file.read_bytes()[:-60])


def last_cut_off(length: int, folder: Path, array: np.ndarray) -> None:
    names = {sitk.ReadImage(str(file)).GetMetaData("0020|0013").strip(): file for file in folder.iterdir()}
    names[str(array.shape[2])].write_bytes(bytes(length))


def frames(folder: Path, array: np.ndarray) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    write_dicom(folder / "all.dcm", sitk.GetImageFromArray(array.astype(np.uint16).transpose(2, 1, 0)))


def colours(folder: Path, array: np.ndarray) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    write_dicom(folder / "one.dcm", sitk.GetImageFromArray(np.zeros((7, 9, 3), np.uint8), isVector=True))


def gone(folder: Path, array: np.ndarray) -> None:
    (folder / "last.dcm").symlink_to("nowhere")


# what is written of directions and spacing, and what a damaged header has in its place
DAMAGED = (
    (rb"1\0\0\0\1\0", rb"2\0\0\0\2\0"), (rb"1\0\0\0\1\0", rb"1\0\0\1\0\0"), (rb"1\1.1", rb"-1\1."),
)  # fmt: skip


def retag(old: bytes, new: bytes, folder: Path, array: np.ndarray) -> None:
    for file in save_series(folder, array, t0020_0037=r"1\0\0\0\1\0").iterdir():
        assert old in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(old, new))


def all_gone(folder: Path, _: np.ndarray) -> None:
    """As if links were copied, and not what they lead to."""
    for file in folder.iterdir():
        file.unlink()
        file.symlink_to("nowhere")


@pytest.mark.parametrize(
    "harm,words",
    [
        (lose, "not evenly spaced: 2.6 mm between .*, 1.3 mm elsewhere"),
        (second_series, r"has 2 series: scout \(2 files\), thorax \(6 files\)"),
        (same_place, "slices at the same position"),
        (another_size, "differs in size"), (cut_off, "cannot be read as part of its"), (frames, "has 6 frames"),
        *((partial(last_cut_off, length), "cannot be read as part of its") for length in (0, 4096)),
        (colours, "has colours"), (gone, "is a link that leads nowhere"), (all_gone, "is a link that leads nowhere"),
        *((partial(retag, old, new), "position, orientation or pixel spacing is damaged") for old, new in DAMAGED),
        (partial(retag, b"MONOCHROME2", b"MONOCHROME1"), "is MONOCHROME1, whose values would be read inverted"),
        (lambda folder, _: shutil.rmtree(folder) or folder.mkdir(), "without DICOM files"),
    ],
)  # fmt: skip
def test_what_is_no_volume_of_evenly_spaced_slices_is_refused(harm, words, tmp_path) -> None:
    array = image_array(0, (9, 7, 6))
    folder = save_series(tmp_path / "a", array, t0008_103e="thorax")
    harm(folder, array)
    with pytest.raises(DataError, match=words) as caught:
        read_volume(folder)
    assert str(folder) in str(caught.value)


def test_inputs_of_prediction_are_one_series_a_folder_of_them_or_several(tmp_path) -> None:
    array = image_array(0, (9, 7, 5))
    for name in ("p1", "p2"):
        (save_series(tmp_path / "all" / name, array) / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
        (tmp_path / "all" / name / ".hidden").write_text("x")
    folders = [tmp_path / "all" / name for name in ("p1", "p2")]
    cases = [find_inputs(paths, ["CT"])[0] for paths in ([folders[0]], [tmp_path / "all"], folders)]
    assert [[case.id for case in group] for group in cases] == [["p1"], ["p1", "p2"], ["p1", "p2"]]
    assert cases[1][1].images == (folders[1],) and not find_inputs(folders, ["CT"])[1]
    with pytest.raises(DataError, match="nor a DICOM series"):
        find_inputs([folders[0], tmp_path / "all"], ["CT"])


def test_the_files_of_a_series_are_its_source(tmp_path) -> None:
    """A change of one of them is noticed by its stamp and by its digest."""
    folder = save_series(tmp_path / "imagesTr" / "c_000_0000", image_array(0))
    root = nnunet(tmp_path, 0, ("CT",))
    save(root / "labelsTr" / "c_000.nii.gz", label_array())
    (case,) = read_dataset(root).cases
    assert case.images == (folder,)
    before, digest = sources_of(case), digest_file(folder)
    assert digest == read_volume(folder).digest
    file = sorted(folder.iterdir())[1]
    content = file.read_bytes()
    file.write_bytes(content[:-2] + b"\x01\x02")
    assert sources_of(case) != before and digest_file(folder) != digest
    before, first = sources_of(case), sorted(folder.iterdir())[0]
    first.write_bytes(first.read_bytes()[:-2] + b"\x03\x04")  # as large, and older than the newest
    os.utime(first, ns=(0, before[0][2] - 10**9))
    assert sources_of(case)[0][1:3] == before[0][1:3] and sources_of(case) != before


def test_a_copied_series_has_the_same_digest_whenever_it_was_copied(tmp_path) -> None:
    folder = save_series(tmp_path / "a", image_array(3, (9, 7, 6)), PLACED)
    copy = shutil.copytree(folder, tmp_path / "b")
    for number, file in enumerate(sorted(copy.iterdir())):
        os.utime(file, (number, number))
    assert digest_samples(folder) == digest_samples(copy)
    first = sorted(copy.iterdir())[0]
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    assert digest_samples(folder) != digest_samples(copy), "also where the file in the middle is the same"


def test_a_series_that_an_earlier_version_recorded_is_known_by_its_time() -> None:
    earlier, now = ["a", 100, 7, "0" * 16], ["a", 100, 7, "1" * 18]
    assert same_source(earlier, now) and not same_source(earlier, ["a", 100, 8, "1" * 18])
    assert not same_source(earlier, ["a", 100, 7, "1" * 16]), "of one kind, digests tell"
