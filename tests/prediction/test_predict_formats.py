"""Prediction of NRRD, MetaImage and DICOM: a label map lies where its image does, as with NIfTI."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import SimpleITK as sitk

from seqpar.cli.evaluate import act as evaluate
from seqpar.cli.prepare import act as prepare
from seqpar.cluster.exit_codes import run as run_act
from seqpar.data.geometry import geometry_difference
from seqpar.data.preparation.cache import open_cache
from seqpar.data.volumes import read_volume
from tests.support.folders import OBLIQUE, image_array, label_array, nnunet, save
from tests.support.itk import affine_of, save_itk, save_series
from tests.support.predictions import RECIPE, act, labelled, make_run

TURNED = np.array([[0, 0, 2.0, 5], [-1.0, 0, 0, 3], [0, 1.2, 0, 1], [0, 0, 0, 1]])


@pytest.mark.parametrize("suffix", [".nrrd", ".mha", ""])
def test_a_label_image_is_its_own_prediction_in_its_own_format(suffix, tmp_path, echo) -> None:
    """A DICOM series, which has no label maps of this kind, gets NIfTI."""
    values = (0, 1, 3, 200)
    truths = {"a": (labelled((9, 14, 10), values).astype(np.int16), OBLIQUE),
              "b": (labelled((13, 7, 11), values).astype(np.int16), TURNED)}  # fmt: skip
    for name, (truth, affine) in truths.items():
        truth[:2] = 0  # the crop leaves something out
        write = save_itk if suffix else save_series
        write(tmp_path / "images" / f"{name}{suffix}", truth, affine)
    run = make_run(tmp_path / "run", replace(RECIPE, schemes=("none",), values=values))
    assert act(tmp_path, run, "--probabilities", "--statistics") == 0
    for name, (truth, affine) in truths.items():
        image = read_volume(tmp_path / "images" / f"{name}{suffix}")
        path = tmp_path / "out" / f"{name}{suffix or '.nii.gz'}"
        label = read_volume(path)
        assert np.array_equal(label.array, image.array) and label.array.dtype == np.uint8
        assert geometry_difference(label.geometry, image.geometry) is None
        if suffix:
            written = sitk.ReadImage(str(path))
            np.testing.assert_allclose(affine_of(written), affine, atol=1e-12)
            assert np.array_equal(sitk.GetArrayFromImage(written).transpose(2, 1, 0), truth)
    names = {path.name for path in (tmp_path / "out").rglob("*label-200*")}
    assert names == {f"{name}_label-200{suffix or '.nii.gz'}" for name in truths}
    assert len((tmp_path / "out" / "statistics.csv").read_text().splitlines()) == 7


def mixed(root: Path) -> Path:
    """Writes an nnU-Net folder whose images and labels are NRRD, and one case whose image is a DICOM series."""
    nnunet(root, 0, ("T1",), file_ending=".nrrd")
    for n in range(3):
        image = root / "imagesTr" / f"c_{n:03d}_0000"
        if n == 2:
            save_series(image, image_array(n))
        else:
            save_itk(image.with_suffix(".nrrd"), image_array(n))
        save_itk(root / "labelsTr" / f"c_{n:03d}.nrrd", label_array())
    return root


def test_a_data_set_of_other_formats_is_prepared_predicted_and_scored_as_nifti_is(tmp_path, capfd) -> None:
    nifti = nnunet(tmp_path / "nifti", 0)
    for n in range(3):
        save(nifti / "imagesTr" / f"c_{n:03d}_0000.nii.gz", image_array(n))
        save(nifti / "labelsTr" / f"c_{n:03d}.nii.gz", label_array())
    other = mixed(tmp_path / "other")
    for root in (nifti, other):
        assert run_act(prepare, [str(root), "--out", f"{root}.cache", "--workers", "2"]) == 0
    caches = [open_cache(f"{root}.cache") for root in (nifti, other)]
    assert caches[0].ids == caches[1].ids == ("c_000", "c_001", "c_002")
    for name in caches[0].ids:
        first, second = (cache.cases[name] for cache in caches)
        assert np.array_equal(first.label, second.label)
        np.testing.assert_allclose(first.image, second.image, atol=1e-6)
        assert geometry_difference(first.properties.geometry, second.properties.geometry) is None
    assert run_act(prepare, [str(other), "--out", f"{other}.cache", "--workers", "0"]) == 0
    assert "0 prepared, 3 already there" in capfd.readouterr().out
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run, images="other", out="p") == act(tmp_path, run, images="nifti", out="q") == 0
    assert evaluate([str(other), str(tmp_path / "p")]) == evaluate([str(nifti), str(tmp_path / "p")]) == 0
    (tmp_path / "p" / "c_001.nrrd").unlink()
    assert evaluate([str(other), str(tmp_path / "p")]) == 0
    said = capfd.readouterr()
    assert "without a prediction" in said.out + said.err
