"""NRRD and MetaImage files: the contracts of NIfTI, compared with what SimpleITK says by itself."""

import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk

from seqpar.data.errors import DataError
from seqpar.data.geometry import Geometry, geometry_difference
from seqpar.data.volumes import digest_file, read_geometry, read_volume, write_volume
from tests.support.folders import OBLIQUE, image_array, label_array, save
from tests.support.itk import affine_of, save_itk

SUFFIXES = (".nrrd", ".mha")
TURNED = np.array([[0, 0, 2.0, 5.3], [-1.0, 0, 0, 3], [0, 1.2, 0, 1], [0, 0, 0, 1]])
SHEARED = OBLIQUE @ np.array([[1, 0, 0.3, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
AFFINES = {"oblique": OBLIQUE, "turned": TURNED, "LPS": np.diag([-0.7, -0.7, 3.1, 1.0])}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", AFFINES)
def test_a_file_is_read_where_nifti_says_that_it_lies_and_written_back(name, suffix, tmp_path) -> None:
    affine, array = AFFINES[name], image_array(1, (9, 7, 5))
    source = save_itk(tmp_path / f"a{suffix}", array, affine)
    volume = read_volume(source)
    np.testing.assert_array_equal(volume.array, array[None])
    np.testing.assert_allclose(volume.geometry.affine, affine, atol=1e-12)
    nifti = read_volume(save(tmp_path / "a.nii.gz", array, affine))
    assert volume.geometry.orientation == nifti.geometry.orientation
    assert geometry_difference(volume.geometry, nifti.geometry) is None
    write_volume(tmp_path / f"b{suffix}", volume.array, volume.geometry)
    first, second = sitk.ReadImage(str(source)), sitk.ReadImage(str(tmp_path / f"b{suffix}"))
    np.testing.assert_array_equal(sitk.GetArrayFromImage(first), sitk.GetArrayFromImage(second))
    np.testing.assert_allclose(affine_of(second), affine_of(first), atol=1e-13)
    assert first.GetPixelID() == second.GetPixelID()


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
def test_every_number_type_comes_back_with_one_channel_or_several(dtype, suffix, tmp_path) -> None:
    array = np.random.default_rng(0).integers(0, 100, (5, 4, 3, 2)).astype(dtype)
    for name, part in (("many", array), ("one", array[..., 0])):
        source = save_itk(tmp_path / f"{name}{suffix}", part)
        volume = read_volume(source)
        expected = np.moveaxis(part, 3, 0) if part.ndim == 4 else part[None]
        np.testing.assert_array_equal(volume.array, expected)
        assert volume.array.dtype == np.dtype(dtype)
        geometry, channels = read_geometry(source)
        assert channels == len(expected) and geometry.shape == (5, 4, 3) and geometry.dtype == volume.geometry.dtype
        write_volume(tmp_path / f"again{suffix}", volume.array, volume.geometry)
        again = sitk.ReadImage(str(tmp_path / f"again{suffix}"))
        assert again.GetPixelID() == sitk.ReadImage(str(source)).GetPixelID()
        np.testing.assert_array_equal(read_volume(tmp_path / f"again{suffix}").array, expected)


def test_a_fourth_dim_holds_the_channels(tmp_path) -> None:
    array = np.arange(2 * 5 * 4 * 3, dtype=np.int16).reshape(2, 3, 4, 5)  # c H D W, as SimpleITK has it
    sitk.WriteImage(sitk.GetImageFromArray(array, isVector=False), str(tmp_path / "a.nrrd"))
    volume = read_volume(tmp_path / "a.nrrd")
    np.testing.assert_array_equal(volume.array, array.transpose(0, 3, 2, 1))
    assert read_geometry(tmp_path / "a.nrrd")[1] == 2 and volume.geometry.ndim == 4


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_geometry_goes_to_nifti_and_back(suffix, tmp_path) -> None:
    """Also through JSON, with all digits; a label is written in the geometry of another format's image."""
    label = label_array()
    for affine in (*AFFINES.values(), SHEARED):
        source = read_volume(save_itk(tmp_path / f"a{suffix}", image_array(0), affine)).geometry
        again = Geometry.from_json(source.to_json())
        assert np.array_equal(again.affine, source.affine) and again.dtype == source.dtype and again.header == b""
        write_volume(tmp_path / "a.nii.gz", label, again, np.uint8)
        nifti = nibabel.load(tmp_path / "a.nii.gz")
        np.testing.assert_allclose(nifti.affine, affine, atol=1e-5)
        assert nifti.header["sform_code"] == 1 and nifti.get_data_dtype() == np.uint8
        write_volume(tmp_path / f"b{suffix}", label, read_volume(tmp_path / "a.nii.gz").geometry, np.uint8)
        back = read_volume(tmp_path / f"b{suffix}")
        assert geometry_difference(back.geometry, source) is None and np.array_equal(back.array[0], label)


def test_a_scaled_nifti_keeps_its_values_where_a_format_knows_no_scale(tmp_path) -> None:
    image = nibabel.Nifti1Image(np.arange(60, dtype=np.int16).reshape(5, 4, 3), OBLIQUE)
    image.header.set_slope_inter(0.5, -3)
    nibabel.save(image, tmp_path / "a.nii")
    volume = read_volume(tmp_path / "a.nii")
    write_volume(tmp_path / "a.nrrd", volume.array, volume.geometry)
    np.testing.assert_array_equal(read_volume(tmp_path / "a.nrrd").array, volume.array)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_cut_off_or_damaged_is_a_fault_of_the_file(suffix, packed, tmp_path) -> None:
    path = save_itk(tmp_path / f"a{suffix}", np.random.default_rng(0).integers(0, 999, (14, 12, 10)), packed=packed)
    whole = path.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 40, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError) as caught:
            read_volume(path)
        assert str(path) in str(caught.value)
    if packed:
        middle = len(whole) * 2 // 3
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :])
        with pytest.raises(DataError, match="truncated or damaged"):
            read_volume(path)
    path.write_text("no image at all")
    with pytest.raises(DataError, match=r"a\.(nrrd|mha): "):
        read_volume(path)
    assert digest_file(path) != digest_file(save_itk(path, image_array(0)))


def flat(path: Path) -> None:
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((5, 4), np.uint8)), str(path))


def with_nan(path: Path) -> None:
    save_itk(path, np.full((5, 4, 3), np.nan, np.float32))


def complex_numbers(path: Path) -> None:
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((5, 4, 3), np.complex64)), str(path))


def detached(path: Path) -> None:
    path.write_bytes(b"NRRD0004\ntype: short\ndimension: 3\nsizes: 5 4 3\nencoding: raw\ndata file: b.raw\n\n")
    (path.parent / "b.raw").write_bytes(bytes(120))


def detached_in_one_word(path: Path) -> None:
    path.write_bytes(b"NRRD0004\r\ntype: short\r\ndimension: 3\r\nsizes: 5 4 3\r\nDataFile: b.raw\r\n\r\n")


def several_and_time(path: Path) -> None:
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((2, 3, 4, 5, 2), np.uint8), isVector=True), str(path))


@pytest.mark.parametrize(
    "harm,words",
    [
        (flat, "2-D array"), (several_and_time, "5-D array"), (with_nan, "60 of its 60 voxels are NaN"),
        (complex_numbers, "numbers of type"), (detached, "does not contain its own voxels"),
        (detached_in_one_word, "does not contain its own voxels"),
        (lambda path: path.mkdir(), "folder without DICOM"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, which leads nowhere"),
    ],
)  # fmt: skip
def test_what_is_no_volume_is_refused_by_name(harm, words, tmp_path) -> None:
    path = tmp_path / "a.nrrd"
    harm(path)
    with pytest.raises(DataError, match=words) as caught:
        read_volume(path)
    assert str(path) in str(caught.value)


def test_a_meta_image_whose_voxels_lie_in_another_file_is_refused_whatever_that_is_called(tmp_path) -> None:
    whole = save_itk(tmp_path / "a.mha", image_array(0), packed=False).read_bytes()
    for place, fits in ((b"local.raw", False), (b"b.raw", False), (b" local ", True), (b"Local", True)):
        (tmp_path / "b.mha").write_bytes(whole.replace(b"= LOCAL", b"= " + place))
        if fits:
            np.testing.assert_array_equal(read_volume(tmp_path / "b.mha").array[0], image_array(0))
        else:
            with pytest.raises(DataError, match=r"b\.mha: does not contain its own voxels"):
                read_volume(tmp_path / "b.mha")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch) -> None:
    volume = read_volume(save_itk(tmp_path / "a.nrrd", image_array(0)))
    before = (tmp_path / "a.nrrd").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"a\.nrrd: cannot be written \(No space left"):
        write_volume(tmp_path / "a.nrrd", volume.array + 1, volume.geometry)
    monkeypatch.setattr("SimpleITK.WriteImage", lambda *_, **__: exec('raise RuntimeError("disk is full")'))
    with pytest.raises(DataError, match=r"a\.nrrd: cannot be written \(disk is full"):
        write_volume(tmp_path / "a.nrrd", volume.array + 1, volume.geometry)
    assert (tmp_path / "a.nrrd").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.nrrd"]


def test_without_the_library_the_file_is_named_with_what_to_install(tmp_path, monkeypatch) -> None:
    path = save_itk(tmp_path / "a.nrrd", image_array(0))
    monkeypatch.setitem(sys.modules, "SimpleITK", None)
    with pytest.raises(DataError, match=r"a\.nrrd: is read by SimpleITK.*pip install 'seqpar\[itk\]'"):
        read_volume(path)
