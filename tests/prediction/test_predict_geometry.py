"""Prediction's label maps lie where the source does: geometry, regions, resampling, arrays, probabilities."""

from dataclasses import replace

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor

import seqpar
from seqpar.cli import predict
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.preparation.preparation import prepare_case
from seqpar.data.preparation.prepared_case import TargetGrid, labels_to_source
from seqpar.data.preparation.transforms import resample
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.logits_to_labels import slabs_to_labels
from seqpar.prediction.sliding_window import FinishedRows
from seqpar.tasks.segment.prediction import LIKE_LABELS
from tests.support.folders import OBLIQUE, save
from tests.support.predictions import RECIPE, SMALL, act, labelled, make_run, voxels

LPS = np.diag([-1.0, -1.5, 2.0, 1.0])
TURNED = np.array([[0, 0, 2.0, 5], [-1.0, 0, 0, 3], [0, 1.2, 0, 1], [0, 0, 0, 1]])
GEOMETRIES = {
    "oblique": ((13, 17, 11), OBLIQUE, np.uint8, None),
    "LPS": ((9, 14, 10), LPS, np.int16, None),
    "turned": ((9, 14, 10), TURNED, np.float32, None),
    "thin": ((2, 19, 9), OBLIQUE, np.uint8, None),
    "thin in H": ((10, 9, 2), LPS, np.uint8, None),
    "slice": ((12, 15, 1), OBLIQUE, np.uint8, None),
    "scaled": ((9, 14, 10), LPS, np.int16, (0.5, 0)),
    "shifted": ((9, 14, 10), OBLIQUE, np.int16, (0.25, -3)),
    "large": ((33, 20, 18), TURNED, np.int16, None),
}


@pytest.mark.parametrize("window", ["sliding", "whole"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_label_file_is_its_own_prediction(name: str, window: str, tmp_path, echo) -> None:
    """Voxel for voxel, in the source's affine, orientation and codes, whatever the file's numbers are stored as."""
    shape, affine, dtype, scaling = GEOMETRIES[name]
    values = (0, 1, 3, 200)
    truth = labelled(shape, values)
    truth[: shape[0] // 4, :, :] = 0  # the crop leaves something out
    slope, inter = scaling or (1, 0)
    image = nibabel.Nifti1Image(((truth - inter) / slope).astype(dtype), affine)
    image.header.set_slope_inter(*scaling or (None, None))  # the numbers in the file stay as they are
    image.set_sform(affine, 2)
    image.set_qform(affine, 1)
    source = tmp_path / "images" / "case.nii.gz"
    source.parent.mkdir()
    nibabel.save(image, source)
    run = make_run(tmp_path / "run", replace(RECIPE, schemes=("none",), values=values))
    assert predict.act([str(run), "-i", str(source.parent), "-o", str(tmp_path / "out"), "--window", window]) == 0
    read, predicted = nibabel.load(source), nibabel.load(tmp_path / "out" / "case.nii.gz")
    assert np.array_equal(np.asarray(read.dataobj), truth)
    assert np.array_equal(np.asarray(predicted.dataobj), truth) and predicted.get_data_dtype() == np.uint8
    assert np.array_equal(predicted.affine, read.affine) and predicted.shape == read.shape
    assert (int(predicted.header["sform_code"]), int(predicted.header["qform_code"])) == (2, 1)
    assert np.array_equal(predicted.header["pixdim"][:4], read.header["pixdim"][:4])


def test_a_scan_that_does_not_say_how_the_patient_lies_is_named(tmp_path, echo, capsys) -> None:
    run = make_run(tmp_path / "run", replace(RECIPE, schemes=("none",), values=(0, 1, 3, 200)))
    for code, name in enumerate(("open", "known")):
        image = nibabel.Nifti1Image(labelled((8, 9, 10), (0, 1, 3, 200)).astype(np.int16), np.eye(4))
        image.set_sform(np.eye(4), code)
        image.set_qform(np.eye(4), code)
        (tmp_path / "images").mkdir(exist_ok=True)
        nibabel.save(image, tmp_path / "images" / f"{name}.nii.gz")
    assert predict.act([str(run), "-i", str(tmp_path / "images"), "-o", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().err
    assert "warning: open: its file does not say how the patient lies: its qform_code and sform_code are both 0" in told
    assert "known: its file does not" not in told


def test_a_label_map_in_place_of_an_image_is_named(tmp_path, echo, capsys) -> None:
    run = make_run(tmp_path / "run", replace(RECIPE, schemes=("none",), values=(0, 1, 3)))
    for name, values in (("labels", (0, 1, 3)), ("labels too", (0, 3)), ("scan", (0, 1, 2)), ("empty", (0,))):
        (tmp_path / "in").mkdir(exist_ok=True)
        save(tmp_path / "in" / f"{name}.nii.gz", labelled((8, 9, 10), values).astype(np.int16))
    predict.act([str(run), "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")])
    told = [line for line in capsys.readouterr().err.splitlines() if "label map" in line]
    assert told == [f"warning: labels: {LIKE_LABELS}"]


def test_regions_become_labels_in_their_order(tmp_path, echo) -> None:
    """A region's voxels get its label, later regions write over earlier ones; what is in none is background."""
    truth = labelled((11, 9, 10), (0, 1, 2, 4))
    save(tmp_path / "images" / "case.nii.gz", truth.astype(np.uint8))
    regions = {"WT": [1, 2, 3], "TC": [1, 3], "ET": [3]}
    recipe = replace(RECIPE, schemes=("none",), values=(0, 1, 2, 4))
    run = make_run(tmp_path / "run", recipe, regions=regions, regions_class_order=[2, 1, 3])
    assert act(tmp_path, run, "--probabilities") == 0
    assert np.array_equal(voxels(tmp_path / "out" / "case.nii.gz"), truth)
    core = voxels(tmp_path / "out" / "probabilities" / "case_TC.nii.gz")
    assert np.array_equal(core > 0.5, np.isin(truth, (1, 4)))


@pytest.mark.parametrize("targets", ["regions", "labels"])
def test_a_run_predicts_what_it_learned_of_data_with_regions(targets, tmp_path, echo) -> None:
    """Labels that exclude each other have probabilities that add up to one; regions have their own."""
    truth = labelled((11, 9, 10), (0, 1, 2, 4))
    save(tmp_path / "images" / "case.nii.gz", truth.astype(np.uint8))
    regions = {"WT": [1, 2, 3], "TC": [1, 3], "ET": [3]}
    recipe, config = replace(RECIPE, schemes=("none",), values=(0, 1, 2, 4)), replace(SMALL, targets=targets)
    run = make_run(tmp_path / "run", recipe, config, regions=regions, regions_class_order=[2, 1, 3])
    assert act(tmp_path, run, "--probabilities") == 0
    assert np.array_equal(voxels(tmp_path / "out" / "case.nii.gz"), truth)
    files = sorted((tmp_path / "out" / "probabilities").iterdir())
    assert len(files) == {"regions": 3, "labels": 4}[targets]
    total = sum(voxels(file) for file in files)
    assert (np.abs(total - 1).max() < 1e-6) == (targets == "labels")


def cut_into_slabs(mesh: Mesh, scores: Tensor, cuts: tuple[int, ...], to_shape: tuple[int, ...]) -> Tensor:
    def slabs():
        for low, high in zip(cuts, cuts[1:]):
            busy = min(high - low, mesh.world.size)
            inner = [low + (high - low) * at // busy for at in range(busy + 1)]
            bounds = (*inner, *[high] * (mesh.world.size - busy))
            yield FinishedRows(bounds, scores[:, bounds[mesh.world.index] : bounds[mesh.world.index + 1]])

    kept: list[tuple[int, Tensor]] = []
    target = TargetGrid(tuple(to_shape))
    ids = slabs_to_labels(slabs(), scores.shape[1:], target, mesh, (), lambda first, rows: kept.append((first, rows)))
    if mesh.is_first:
        kept.sort(key=lambda pair: pair[0])
        whole = torch.cat([rows for _, rows in kept], 1)
        assert whole.shape[1:] == ids.shape and torch.equal(whole.argmax(0), ids.long())
    return ids


@pytest.mark.parametrize("to_shape", [(25, 9, 14), (7, 22, 5), (13, 9, 11), (13, 10, 11), (1, 1, 1)])
def test_slabs_are_resampled_as_the_whole_is(ranks, alone, to_shape, tmp_path) -> None:
    scores = torch.randn(4, 13, 9, 11, generator=torch.Generator().manual_seed(0))
    recipe = replace(RECIPE, schemes=("none",), values=(0, 1, 2, 3))
    filled = np.arange(1, 1 + np.prod(to_shape), dtype=np.int16).reshape(to_shape)
    image = save(tmp_path / "b.nii.gz", filled, np.eye(4))
    properties = prepare_case(Case("b", (image,)), recipe).properties
    expected = labels_to_source(resample(scores.numpy(), properties.box_shape).argmax(0), properties)
    for cuts in ((0, 13), (0, 2, 3, 9, 13), tuple(range(14))):
        assert np.array_equal(cut_into_slabs(alone, scores, cuts, to_shape).numpy(), expected)
    for rank in ranks(3, cut_into_slabs, scores, (0, 2, 3, 9, 13), to_shape, seqpar=1):
        assert np.array_equal(rank.numpy(), expected)


def test_arrays_and_images_are_predicted_as_files_are(images, tmp_path) -> None:
    run = make_run(tmp_path / "run", replace(RECIPE, spacing=(1.5, 0.8, 1.0)))
    assert act(tmp_path, run) == 0
    predictor = seqpar.Predictor.from_run(run)
    with pytest.raises(ValueError, match=r"a path came: give nibabel.load\('scan.nii.gz'\)"):
        predictor.predict("scan.nii.gz")
    with pytest.raises(ValueError, match=r"a tensor came: give tensor.cpu\(\).numpy\(\)"):
        predictor.predict(torch.zeros(2, 8, 8, 8))  # type: ignore[arg-type]
    for name in ("c_000", "c_002"):
        image = nibabel.load(images / f"{name}_0000.nii.gz")
        expected = nibabel.load(tmp_path / "out" / f"{name}.nii.gz")
        predicted = predictor.predict(image)
        assert np.array_equal(predicted.affine, expected.affine) and predicted.get_data_dtype() == np.uint8
        assert np.array_equal(predicted.dataobj, expected.dataobj)
        array = predictor.predict(np.asarray(image.dataobj), image.affine)
        assert np.array_equal(array, expected.dataobj)
    with pytest.raises(ValueError, match="2 channels came; the network needs 1"):
        predictor.predict(np.ones((2, 9, 9, 9)))
    with pytest.raises(DataError, match="every voxel is 0"):
        predictor.predict(np.zeros((9, 9, 9)))


def test_probabilities_and_ensembles(images, tmp_path) -> None:
    """Probabilities add up to one, their largest is the label; an ensemble is the mean of the networks' logits."""
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other", config=replace(SMALL, seed=1)) / "model.safetensors"
    each = []
    for name, which in (("one", ["best"]), ("two", [str(other)]), ("both", ["latest", str(other)])):
        assert act(tmp_path, run, "--probabilities", "--checkpoint", *which, out=name) == 0
        parts = [voxels(tmp_path / name / "probabilities" / f"c_000_label-{n}.nii.gz") for n in range(2)]
        assert np.abs(sum(parts) - 1).max() < 1e-6
        assert np.array_equal(np.argmax(parts, 0), voxels(tmp_path / name / "c_000.nii.gz"))
        with np.errstate(divide="ignore"):  # beyond the crop background is certain
            each.append(np.log(parts[1]) - np.log(parts[0]))
    inside = voxels(images / "c_000_0000.nii.gz") != 0
    one, two, both = (odds[inside] for odds in each)
    assert np.abs((one + two) / 2 - both).max() < 1e-4 < np.abs(one - two).max()
