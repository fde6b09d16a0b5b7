"""Volumes: what is read can be written back, and canonical orientation has an inverse."""

import gzip
import itertools
import os
from pathlib import Path

import nibabel
import numpy as np
import pytest
from nibabel.testing import data_path

from seqpar.data.errors import DataError
from seqpar.data.geometry import (
    Geometry,
    from_canonical,
    geometry_difference,
    geometry_of,
    make_geometry,
    place_geometry,
    to_canonical,
)
from seqpar.data.volumes import digest_file, digest_samples, digest_voxels, read_geometry, read_volume, write_volume
from tests.support.folders import OBLIQUE, image_array, save

SAMPLES = (
    "anatomical.nii", "example4d.nii.gz", "example_nifti2.nii.gz", "functional.nii",
    "reoriented_anat_moved.nii", "standard.nii.gz",
)  # fmt: skip


def assert_same_file(first: Path, second: Path) -> None:
    """Compares two NIfTI files by nibabel alone: stored and scaled numbers, geometry, type, byte order."""
    a, b = nibabel.load(first), nibabel.load(second)
    assert type(a) is type(b) and a.shape == b.shape
    assert a.get_data_dtype() == b.get_data_dtype() and a.header.endianness == b.header.endianness
    np.testing.assert_array_equal(a.dataobj.get_unscaled(), b.dataobj.get_unscaled())
    np.testing.assert_array_equal(np.asarray(a.dataobj), np.asarray(b.dataobj))
    np.testing.assert_array_equal(a.affine, b.affine)
    for key in ("qform_code", "sform_code", "pixdim", "xyzt_units"):
        np.testing.assert_array_equal(a.header[key], b.header[key])
    for form in ("get_qform", "get_sform"):
        np.testing.assert_array_equal(getattr(a, form)(), getattr(b, form)())


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("name", SAMPLES)
def test_nibabels_own_files_are_read_and_written_back_voxel_for_voxel(name, suffix, tmp_path):
    source = Path(data_path, name)
    volume = read_volume(source)
    reference = np.asarray(nibabel.load(source).dataobj)
    np.testing.assert_array_equal(volume.array, np.moveaxis(np.atleast_3d(reference[..., None]), -1, 0)
                                  if reference.ndim == 3 else np.moveaxis(reference, 3, 0))  # fmt: skip
    write_volume(tmp_path / f"x{suffix}", volume.array, volume.geometry)
    assert_same_file(source, tmp_path / f"x{suffix}")


@pytest.mark.parametrize(
    "dtype,endian,slope,shape",
    [
        ("u1", "<", (1, 0), (5, 4, 3)), ("i2", ">", (1, 0), (5, 4, 3)), ("i2", "<", (0.013, 31.7), (5, 4, 3)),
        ("u2", ">", (-2.5, 1000), (5, 4, 3, 2)), ("i4", "<", (1, 0), (5, 4, 1)),
        ("f4", ">", (1, 0), (2, 4, 3)),
        ("f8", "<", (1, 0), (5, 4, 3, 1)), ("f4", "<", (3, 1), (5, 4, 3)), ("i8", "<", (1, 0), (1, 1, 1)),
    ],
)  # fmt: skip
def test_every_number_type_byte_order_scale_and_shape_comes_back(dtype, endian, slope, shape, tmp_path):
    rng = np.random.default_rng(1)
    stored = rng.integers(0, 200, shape).astype(dtype) if dtype[0] != "f" else rng.normal(0, 9, shape).astype(dtype)
    header = nibabel.Nifti1Header(endianness=endian)
    header.set_data_dtype(np.dtype(dtype).newbyteorder(endian))
    image = nibabel.Nifti1Image(stored, OBLIQUE, header)
    image.header.set_slope_inter(*slope)
    image.set_qform(OBLIQUE, 2)
    image.set_sform(OBLIQUE, 3)
    nibabel.save(image, tmp_path / "a.nii.gz")
    volume = read_volume(tmp_path / "a.nii.gz")
    assert volume.geometry.dtype[1:] == dtype and (volume.geometry.slope != 1) == (slope != (1, 0))
    write_volume(tmp_path / "b.nii.gz", volume.array, volume.geometry)
    assert_same_file(tmp_path / "a.nii.gz", tmp_path / "b.nii.gz")


def test_a_label_is_written_in_the_geometry_of_its_image_with_its_own_number_type(tmp_path):
    save(tmp_path / "image.nii.gz", image_array(0))
    geometry = read_volume(tmp_path / "image.nii.gz").geometry
    label = np.zeros(geometry.shape, np.int64)
    label[3, 4, 5] = 4
    write_volume(tmp_path / "label.nii.gz", label, geometry, np.uint8)
    written = nibabel.load(tmp_path / "label.nii.gz")
    assert written.get_data_dtype() == np.uint8 and np.asarray(written.dataobj)[3, 4, 5] == 4
    np.testing.assert_array_equal(written.affine, nibabel.load(tmp_path / "image.nii.gz").affine)
    with pytest.raises(ValueError, match="do not fit uint8"):
        write_volume(tmp_path / "label.nii.gz", label * 100, geometry, np.uint8)
    assert read_volume(tmp_path / "label.nii.gz").array.max() == 4, "a failed write has replaced the file"


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    save(tmp_path / "a.nii.gz", image_array(0))
    volume, before = read_volume(tmp_path / "a.nii.gz"), (tmp_path / "a.nii.gz").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"a\.nii\.gz: cannot be written \(No space left"):
        write_volume(tmp_path / "a.nii.gz", volume.array + 1, volume.geometry)
    assert (tmp_path / "a.nii.gz").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.nii.gz"]


@pytest.mark.parametrize("letters", list(itertools.permutations(("RL", "AP", "SI"))))
def test_canonical_is_nibabels_and_has_an_inverse(letters, tmp_path):
    array = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    for picks in itertools.product((0, 1), repeat=3):
        code = "".join(pair[pick] for pair, pick in zip(letters, picks))
        turn = nibabel.orientations.axcodes2ornt(tuple(code))
        affine = np.eye(4)
        affine[:3, :3] = 0
        for dim, (world, sign) in enumerate(turn):
            affine[int(world), dim] = sign * (dim + 1.5)
        affine[:3, :3] = [[1, 0.05, 0], [-0.05, 1, 0.02], [0, -0.02, 1]] @ affine[:3, :3]  # oblique
        geometry = make_geometry((3, 4, 5), affine)
        assert geometry.orientation == code
        reference = nibabel.as_closest_canonical(nibabel.Nifti1Image(array[0].astype(np.int16), affine))
        canonical = to_canonical(array, code)
        np.testing.assert_array_equal(canonical[0], np.asarray(reference.dataobj))
        np.testing.assert_allclose(geometry.canonical_affine, reference.affine, atol=1e-5)
        assert canonical.shape[1:] == geometry.canonical_shape
        np.testing.assert_allclose(geometry.canonical_spacing, reference.header.get_zooms(), rtol=1e-5)
        np.testing.assert_array_equal(from_canonical(canonical, code), array)


def test_geometry_survives_json_and_tells_apart_what_lies_elsewhere():
    geometry = make_geometry((9, 8, 7), OBLIQUE, "<i2")
    again = Geometry.from_json(geometry.to_json())
    assert again.header == geometry.header and geometry_difference(geometry, again) is None
    moved, turned = OBLIQUE.copy(), OBLIQUE.copy()
    moved[0, 3] += 0.3
    assert "mm away" in str(geometry_difference(make_geometry((9, 8, 7), moved), geometry))
    assert "shape" in str(geometry_difference(make_geometry((9, 8, 6), OBLIQUE), geometry))
    turned[:, 0] *= -1  # the same place in space, stored from the other end
    turned[:3, 3] = (OBLIQUE @ [8, 0, 0, 1])[:3]
    assert geometry_difference(make_geometry((9, 8, 7), turned), geometry) is None


def test_the_header_alone_tells_geometry_and_channels(tmp_path):
    save(tmp_path / "a.nii.gz", image_array(0, (9, 8, 7, 4)))
    geometry, channels = read_geometry(tmp_path / "a.nii.gz")
    assert (geometry.shape, channels, geometry.orientation) == ((9, 8, 7), 4, "LAS")
    np.testing.assert_allclose(geometry.spacing, (1.1, 1, 1.3), rtol=1e-6)


def test_the_digest_is_of_the_content_however_it_is_packed(tmp_path):
    save(tmp_path / "a.nii", image_array(0))
    (tmp_path / "b.nii.gz").write_bytes(gzip.compress((tmp_path / "a.nii").read_bytes(), 9))
    digests = {digest_file(tmp_path / "a.nii"), digest_file(tmp_path / "b.nii.gz")}
    assert digests == {read_volume(tmp_path / "a.nii").digest}
    save(tmp_path / "a.nii", image_array(1))
    assert digest_file(tmp_path / "a.nii") not in digests


def test_the_digest_of_voxels_is_that_of_a_scan_however_it_is_written(tmp_path):
    def digest(path: Path) -> str:
        volume = read_volume(path)
        return digest_voxels(to_canonical(volume.array, volume.geometry.orientation)[0])

    array, other = image_array(0), image_array(0)
    other[7, 6, 5] += 1
    known = digest(save(tmp_path / "a.nii.gz", array))
    turned = OBLIQUE.copy()
    turned[:, 0] *= -1
    again = (array, OBLIQUE), (array.astype(np.float64), OBLIQUE), (array[::-1], turned)
    assert all(digest(save(tmp_path / "b.nii", *one)) == known for one in again) and len(known) == 16
    others = other, array[::-1], array[1:], array + np.int16(1)
    assert len({known, *(digest(save(tmp_path / "c.nii", one)) for one in others)}) == 5
    assert digest_voxels(np.full((4, 4, 4), 3)) == "", "it is of any patient"
    large = np.zeros((256, 256, 256), np.int8)
    large[64:128, 64:128, 64:128] = 1
    assert digest_voxels(large) != digest_voxels(large[::-1]) and digest_voxels(large[:, :, ::-1]) != ""


def test_a_header_with_any_byte_damaged_is_read_or_is_a_fault_of_the_file(tmp_path):
    path = save(tmp_path / "a.nii", np.ones((5, 6, 7), np.int16), np.diag([1, 2, 3, 1]))
    whole, faults = path.read_bytes(), 0
    for at, value in itertools.product(range(348), (0, 9, 127, 255)):
        path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
        try:
            assert read_volume(path).array.size
        except DataError as fault:
            faults += str(path) in str(fault)
    assert faults > 50


def test_metres_and_micrometres_are_read_as_millimetres_and_written_back(tmp_path):
    array, plain = image_array(0), np.diag([0.5, 0.5, 2, 1])
    for unit, millimetres in (("meter", 1000), ("micron", 0.001), ("mm", 1), ("unknown", 1)):
        image = nibabel.Nifti1Image(array, plain)
        image.header.set_xyzt_units(unit)
        nibabel.save(image, path := tmp_path / f"{unit}.nii")
        geometry = read_volume(path).geometry
        np.testing.assert_allclose(geometry.spacing, millimetres * np.diag(plain)[:3])
        assert read_geometry(path)[0].spacing == Geometry.from_json(geometry.to_json()).spacing == geometry.spacing
        write_volume(back := tmp_path / f"{unit}-again.nii", array, geometry)
        assert back.read_bytes()[:348] == path.read_bytes()[:348]


def test_samples_of_files_differ_where_only_the_inner_voxels_do(tmp_path: Path) -> None:
    image = np.zeros((64, 64, 64), np.float32)
    first = digest_samples(save(tmp_path / "a.nii", image)), digest_samples(save(tmp_path / "a.nii.gz", image))
    image[24:40, 24:40, 24:40] = 1
    assert digest_samples(save(tmp_path / "b.nii", image)) != first[0]
    image[:], image[3, 4, 5] = 0, 1  # a checksum of all voxels ends a gzip file
    assert digest_samples(save(tmp_path / "b.nii.gz", image)) != first[1]
    os.mkfifo(tmp_path / "pipe")
    assert digest_samples(tmp_path / "pipe"), "nobody waits for a pipe"


def test_what_a_file_leaves_open_about_how_the_patient_lies_is_said() -> None:
    header = nibabel.Nifti1Header()
    header.set_data_shape((4, 5, 6))
    ras, las = np.diag((1.0, 1.0, 2.0, 1.0)), np.diag((-1.0, 1.0, 2.0, 1.0))

    def turned(degrees: float) -> np.ndarray:
        affine, (c, s) = np.eye(4), (np.cos(np.radians(degrees)), np.sin(np.radians(degrees)))
        affine[:2, :2] = (c, -s), (s, c)
        return affine

    def doubt(qform: np.ndarray, sform: np.ndarray, *codes: int) -> str:
        header.set_qform(qform, 1)
        header.set_sform(sform, 1)
        header["qform_code"], header["sform_code"] = codes
        return geometry_of(header.binaryblock, "a.nii").orientation_doubt

    assert doubt(ras, ras, 0, 0) == "does not say how the patient lies: its qform_code and sform_code are both 0"
    assert doubt(ras, las, 1, 0) == doubt(ras, las, 0, 4) == doubt(las, las, 1, 1) == ""
    told = "contradicts itself on how the patient lies: its qform says LAS, its sform RAS, and the sform is used"
    assert doubt(las, ras, 1, 2) == told
    assert doubt(turned(44), turned(46), 1, 4) == "", "other letters, but nearly the same directions"
    assert doubt(turned(30), turned(60), 1, 4).startswith("contradicts itself")
    assert place_geometry(ras, (4, 5, 6), "<f4", "a.nrrd").orientation_doubt == "", "other formats have no codes"
