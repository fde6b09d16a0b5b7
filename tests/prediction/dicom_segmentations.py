"""DICOM segmentations of DICOM series: highdicom and SimpleITK find the same voxels at the same places.

The places are those of the slices' own headers, computed here. Pages and records name nobody. A step of .ci of its own,
since highdicom brings pydicom, with which MONAI prints more than the tutorials show.
"""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import highdicom as hd
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk

from seqpar.cli import report
from seqpar.cluster.exit_codes import run as run_act
from seqpar.data.dicom_series import write_segmentation
from seqpar.data.errors import DataError
from seqpar.data.volumes import read_geometry, read_volume
from tests.support.folders import OBLIQUE, save
from tests.support.itk import SERIES, affine_of, save_series
from tests.support.predictions import RECIPE, act, labelled, make_run

PLACED = OBLIQUE @ np.diag([1.0, -1, 1, 1])  # its slices in order along their normal are those of the array
SIDEWAYS = np.array([[0, 0, -2.0, 1], [1.3, 0, 0, 2], [0, -0.7, 0, 3], [0, 0, 0, 1]])
TILTED = PLACED @ np.array([[1, 0, 0, 0], [0, 1, 0.4, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
WHERE = {
    "axial": np.diag([-1.0, -1.5, 3.0, 1]),
    "oblique": PLACED,
    "downwards": PLACED @ np.diag([1, 1, -1, 1]),
    "mirrored": PLACED @ np.diag([-1, 1, 1, 1]),
    "sagittal": SIDEWAYS,
}
CLASSES = {"liver": (1,), "Läsion": (3,), "vessel": (200,)}
PERSON = {"t0010_0010": "DOE^JANE", "t0010_0020": "MRN4711", "t0010_0030": "19500203", "t0008_103e": "thorax of Jane"}
FRAME = {"t0020_0052": f"{SERIES}77", "t0018_0050": "9.5", "t0018_0088": "1"}  # neither is the slices' distance


def points(affine: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns where the voxels of a mask are, in mm (RAS), sorted."""
    index = np.argwhere(mask)
    places = np.round((affine @ np.c_[index, np.ones(len(index))].T)[:3].T, 3)
    return places[np.lexsort(places.T)]


def places_by_highdicom(path: Path, count: int) -> list[np.ndarray]:
    """Returns the places of each segment's voxels."""
    volume = hd.seg.segread(path).get_volume(combine_segments=False)
    assert volume.array.shape[-1] == count
    return [points(np.diag([-1.0, -1, 1, 1]) @ volume.affine, volume.array[..., n] > 0) for n in range(count)]


def places_by_simpleitk(path: Path, count: int) -> list[np.ndarray]:
    """Returns the places of each segment's voxels; ITK reads all frames as one volume, segment after segment."""
    image = sitk.ReadImage(str(path))
    parts = np.split(sitk.GetArrayFromImage(image).transpose(2, 1, 0) > 0, count, axis=2)
    return [points(affine_of(image), part) for part in parts]


@pytest.mark.parametrize("name", WHERE)
def test_other_libraries_find_the_voxels_of_each_class_at_their_places(name, tmp_path) -> None:
    """The files' names are in another order than their slices, and the first slice shows no class."""
    shape = (8, 7, 6)
    folder = save_series(tmp_path / "a", np.zeros(shape, np.int16), WHERE[name], **FRAME)
    affine = read_geometry(folder)[0].affine
    labels = labelled(shape, (0, 1, 3, 200)).astype(np.uint8)
    labels[:, :, 0] = 0
    path = tmp_path / "a.dcm"
    write_segmentation(path, folder, labels, CLASSES, "0123")
    found = places_by_highdicom(path, 3), places_by_simpleitk(path, 3)
    for (value,), *both in zip(CLASSES.values(), *found, strict=True):
        expected = points(affine, labels == value)
        for places in both:
            np.testing.assert_allclose(places, expected, atol=2e-3)
        flipped = points(affine @ np.array([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, -1, 5], [0, 0, 0, 1]]), labels == value)
        assert np.abs(flipped - expected).max() > 1, "a control: the slices in the other order are elsewhere"


def test_a_tilted_gantry_keeps_the_place_of_every_slice(tmp_path) -> None:
    """Such slices are no box: each frame has its own position, and refers to the slice that it labels."""
    folder = save_series(tmp_path / "a", np.zeros((8, 7, 6), np.int16), TILTED, **FRAME)
    labels = np.zeros((8, 7, 6), np.uint8)
    labels[2, 3, 4] = labels[5, 1, 1] = 1
    write_segmentation(tmp_path / "a.dcm", folder, labels, {"one": (1,)}, "0123")
    sources = {slice_.SOPInstanceUID: slice_ for slice_ in map(pydicom.dcmread, folder.iterdir())}
    written = pydicom.dcmread(tmp_path / "a.dcm")
    shown = dict[str, list[tuple[int, int]]]()
    for frame, group in zip(written.pixel_array, written.PerFrameFunctionalGroupsSequence, strict=True):
        uid = group.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID
        assert list(group.PlanePositionSequence[0].ImagePositionPatient) == list(sources[uid].ImagePositionPatient)
        shown |= {uid: [(w, d) for d, w in np.argwhere(frame)]} if frame.any() else {}
    assert shown == {f"{SERIES}1.5": [(2, 3)], f"{SERIES}1.2": [(5, 1)]}


def test_classes_that_overlap_are_whole_and_names_of_any_alphabet_stay(tmp_path) -> None:
    folder = save_series(tmp_path / "a", np.zeros((8, 7, 6), np.int16), PLACED, **FRAME)
    for file in folder.iterdir():
        slice_ = pydicom.dcmread(file)
        slice_.SpecificCharacterSet, slice_.PatientName, slice_.PatientID = "ISO_IR 100", "Müller^Jörg", "7"
        slice_.save_as(file)
    labels = labelled((8, 7, 6), (0, 1, 2)).astype(np.uint8)
    write_segmentation(tmp_path / "a.dcm", folder, labels, {"whole": (1, 2), f"ядро\\\n{'x' * 80}": (2,)}, "0123")
    geometry = read_geometry(folder)[0]
    whole, core = places_by_highdicom(tmp_path / "a.dcm", 2)
    np.testing.assert_allclose(whole, points(geometry.affine, labels > 0), atol=2e-3)
    np.testing.assert_allclose(core, points(geometry.affine, labels == 2), atol=2e-3)
    written = pydicom.dcmread(tmp_path / "a.dcm")
    assert str(written.PatientName) == "Müller^Jörg"
    assert [one.SegmentLabel for one in written.SegmentSequence] == ["whole", f"ядро  {'x' * 58}"]


@pytest.fixture
def series(tmp_path) -> Path:
    """Two series of one person whose image is a label map, in a folder named images."""
    for number, name in enumerate("ab", 1):
        truth = labelled((8, 7, 6), (0, 1, 3, 200)).astype(np.int16)
        save_series(tmp_path / "images" / name, truth, PLACED, number, **FRAME, **PERSON)
    return tmp_path / "images"


def test_predict_writes_a_segmentation_of_each_series_and_its_pages_name_nobody(series, tmp_path, echo, capfd) -> None:
    values = (0, 1, 3, 200)
    recipe = replace(RECIPE, schemes=("none",), values=values)
    shown = {"name": "d", "layout": "files", "modalities": ["CT"], "train": [], "held_out": [], "ignore_label": None}
    run = make_run(tmp_path / "run", recipe, values=values, **shown)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "layout": {"ranks": 1, "data": 1, "seqpar": 1}}))
    assert act(tmp_path, run, "--dicom-seg", "--statistics") == 0
    assert f"DICOM segmentations: {tmp_path / 'out' / 'dicom-seg'}" in capfd.readouterr().out
    for number, name in enumerate("ab", 1):
        written = pydicom.dcmread(tmp_path / "out" / "dicom-seg" / f"{name}.dcm")
        label, source = (
            read_volume(tmp_path / "out" / f"{name}.nii.gz"),
            pydicom.dcmread(next((series / name).iterdir())),
        )
        found = places_by_highdicom(tmp_path / "out" / "dicom-seg" / f"{name}.dcm", 3)
        for value, places in zip(values[1:], found, strict=True):
            np.testing.assert_allclose(places, points(label.geometry.affine, label.array[0] == value), atol=2e-3)
        for key in ("PatientName", "PatientID", "PatientBirthDate", "StudyInstanceUID", "FrameOfReferenceUID"):
            assert written[key].value == source[key].value and written[key].value
        (referred,) = written.ReferencedSeriesSequence
        assert referred.SeriesInstanceUID == f"{SERIES}{number}" and len(referred.ReferencedInstanceSequence) == 6
        assert [one.SegmentLabel for one in written.SegmentSequence] == ["label 1", "label 3", "label 200"]
        algorithm = written.SegmentSequence[0].SegmentationAlgorithmIdentificationSequence[0]
        assert (algorithm.AlgorithmName, algorithm.AlgorithmVersion) == ("seqpar", written.SoftwareVersions)
        assert (written.SegmentationType, written.Modality, written.Manufacturer) == ("BINARY", "SEG", "seqpar")
    record = json.loads((tmp_path / "out" / "prediction.json").read_text())
    names = {
        kind: hashlib.sha256(f"{SERIES}{end}".encode()).hexdigest()[:12] for kind, end in (("study", 9), ("series", 2))
    }
    assert record["dicom_seg"] and record["series"]["b"] == names and len(record["series"]) == 2
    assert (
        act(tmp_path, run, "--dicom-seg", "--statistics", "--continue") == 0
        and "(2 are done)" in capfd.readouterr().out
    )
    assert json.loads((tmp_path / "out" / "prediction.json").read_text()) == record
    assert (
        run_act(report.act, [str(run), "--prediction", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")])
        == 0
    )
    page = (tmp_path / "page.html").read_text()
    assert names["study"] in page and names["series"] in page and "dicom-seg/b.dcm" in page
    told = [page, capfd.readouterr().out, *(path.read_text() for path in (tmp_path / "out").glob("*.[jc]s*"))]
    identifying = [*PERSON.values(), "DOE", "Jane", SERIES.rstrip("."), SERIES]
    assert len(told) == 4 and not [word for word in identifying for text in told if word in text]
    saved = tmp_path / "out" / "dicom-seg" / "a.dcm"
    raw, voxels = saved.read_bytes(), pydicom.dcmread(saved).PixelData
    assert all(word.encode() in raw for word in (*list(PERSON.values())[:3], SERIES)), "a control: the files do"
    saved.write_bytes(raw[:-8])  # pydicom reads it without a word
    assert pydicom.dcmread(saved).PixelData != voxels
    assert act(tmp_path, run, "--dicom-seg", "--statistics", "--continue") == 0
    assert "(1 are done)" in capfd.readouterr().out
    assert pydicom.dcmread(saved).PixelData == voxels


def test_what_cannot_be_segmented_is_refused_before_anything_is_computed(series, tmp_path, echo, capfd) -> None:
    run = make_run(tmp_path / "run", replace(RECIPE, schemes=("none",), values=(0, 1, 3, 200)))
    truth = labelled((8, 7, 6), (0, 1)).astype(np.int16)
    save(series / "c.nii.gz", truth)
    with pytest.raises(DataError, match=r"c.nii.gz: is not a DICOM series, and --dicom-seg writes .* without it"):
        act(tmp_path, run, "--dicom-seg")
    assert not (tmp_path / "out").exists()
    (series / "c.nii.gz").unlink()
    save_series(series / "c", truth, PLACED, 3)  # no frame of reference
    next(file for file in (series / "b").iterdir() if pydicom.dcmread(file).InstanceNumber == 3).unlink()
    assert act(tmp_path, run, "--dicom-seg") == 3
    said = capfd.readouterr()
    assert "1 of 3" not in said.out and "does not name its frame of reference (tag 0020|0052)" in said.err
    assert "b: its slices are not evenly spaced" in said.err and "remove --dicom-seg" in said.err
    assert [path.name for path in (tmp_path / "out" / "dicom-seg").iterdir()] == ["a.dcm"]
    assert {path.name for path in (tmp_path / "out").glob("*.nii.gz")} == {"a.nii.gz"}


def test_without_highdicom_the_extra_is_named(series, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setitem(sys.modules, "highdicom", None)
    run = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"--dicom-seg needs highdicom, which is not installed: .*\[dicom\]"):
        act(tmp_path, run, "--dicom-seg")
