"""Prediction from files to files: geometry, regions, resampling, errors, and going on where it stopped."""

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import seqpar
from seqpar.data.errors import DataError
from seqpar.data.formats.dataset import Case
from seqpar.data.preparation.case import labels_to_source, prepare_case
from seqpar.data.preparation.recipe import Recipe
from seqpar.data.preparation.transforms import resample
from seqpar.decoders.modes.choose import MODES
from seqpar.launch import predict
from seqpar.launch.inference import predict_cases
from seqpar.launch.inference.logits_to_labels import slabs_to_labels
from seqpar.launch.inference.sliding_window import Slab
from seqpar.launch.inference.small_components import drop_small_components, parse_min_component
from seqpar.launch.inference.whole_volume_memory import footprint
from seqpar.launch.job import exit_codes
from seqpar.launch.models.build import build
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.planning.memory_counter import MemoryCounter
from seqpar.launch.runs.trained_run import Run, load_nets, read_run
from seqpar.launch.settings.config import Config
from seqpar.launch.weights.files import write_weights
from seqpar.mesh import Group, Mesh
from tests.support.folders import NEW, OBLIQUE, OLD, brats, child, image_array, nnunet, save, tree, write_json

ROOT = Path(__file__).parents[2]
SMALL = Config(tile=(8, 8, 8), patch=4, embed_dim=12, depth=1, heads=2, decoder_width=4)
RECIPE = Recipe(("T1",), ("zscore",), (None,), None, (0, 1), False, 100)


def make_run(out: Path, recipe: Recipe = RECIPE, config: Config = SMALL, **told: Any) -> Path:
    """Writes a run folder with random weights, as train leaves one."""
    labels = {f"label {value}": n for n, value in enumerate(recipe.values)}
    dataset = {"labels": labels, "regions": {}, "regions_class_order": [], "recipe": recipe.to_json(), **told}
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"config": asdict(config), "dataset": dataset}))
    outputs = len(dataset["regions"] or labels)
    write_weights(out / "model.safetensors", build(config, len(recipe.modalities), outputs, Group("seq")))
    return out


class Echo(nn.Module):
    """Stands where a decoder does and says what label the image shows: the image is its own prediction."""

    uses_image, num_features = True, 1

    def __init__(self, values: tuple[int, ...], regions: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__()
        self.values, self.regions = values, regions

    def forward(self, features: Any, image: Tensor, grid: Any = None) -> tuple[Tensor, Any]:
        if self.regions:
            is_in = [sum((image - value).abs() < 0.5 for value in members) for members in self.regions]
            return torch.cat([2.0 * inside - 1.0 for inside in is_in], 1), grid and grid.scaled(4)
        return torch.cat([-((image - value) ** 2) for value in self.values], 1), grid and grid.scaled(4)


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets prediction answer with the image, whatever the run's weights are."""

    def nets(run: Run, files: Any, mesh: Mesh, mode: str = "") -> list[SegmentationNet]:
        (net,) = load_nets(run, files, mesh, mode)
        members = [tuple(run.recipe.values[n] for n in ids) for ids in run.regions.values()]
        net.decoder = Echo(run.recipe.values, tuple(members))
        return [net]

    monkeypatch.setattr(predict_cases, "load_nets", nets)


def labelled(shape: tuple[int, ...], values: tuple[int, ...]) -> np.ndarray:
    """Returns noise of labels: a voxel that moves shows."""
    return np.random.default_rng(0).choice(values, shape)


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
    read, found = nibabel.load(source), nibabel.load(tmp_path / "out" / "case.nii.gz")
    assert np.array_equal(np.asarray(read.dataobj), truth)
    assert np.array_equal(np.asarray(found.dataobj), truth) and found.get_data_dtype() == np.uint8
    assert np.array_equal(found.affine, read.affine) and found.shape == read.shape
    assert (int(found.header["sform_code"]), int(found.header["qform_code"])) == (2, 1)
    assert np.array_equal(found.header["pixdim"][:4], read.header["pixdim"][:4])


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


def act(place: Path, run: Path, *more: str, images: str = "images", out: str = "out") -> int:
    return predict.act([str(run), "-i", str(place / images), "-o", str(place / out), *more])


def voxels(path: Path) -> np.ndarray:
    return np.asarray(nibabel.load(path).dataobj)


def on_ranks(mesh: Mesh, *arguments: str) -> int:
    options = predict._parser().parse_args(list(arguments))
    faults = predict_cases.predict_cases(
        predict._request(options), predict._settings(options), read_run(options.run), mesh
    )
    return exit_codes.DATA if faults else 0


@pytest.fixture
def images(tmp_path) -> Path:
    """A folder of three cases, of sizes that are multiples of nothing."""
    for n, shape in enumerate([(14, 12, 10), (9, 17, 8), (21, 7, 13)]):
        save(tmp_path / "images" / f"c_{n:03d}_0000.nii.gz", image_array(n, shape))
    return tmp_path / "images"


def test_label_files_are_the_same_on_any_number_of_ranks(ranks, images, tmp_path) -> None:
    recipe = replace(RECIPE, spacing=(1.5, 0.8, 1.0))
    for how, given in (("as they are", RECIPE), ("resampled", recipe)):
        run = make_run(tmp_path / how, given)
        for window, worlds in (("sliding", ((1, 1), (2, 1), (4, 1))), ("whole", ((1, 1), (2, 2)))):
            found = []
            for world, size in worlds:
                out = tmp_path / f"{how}-{window}-{world}"
                more = ("--window", window, "--probabilities")
                codes = ranks(world, on_ranks, str(run), "-i", str(images), "-o", str(out), *more, seqpar=size)
                assert codes == [0] * world
                found.append(tree(out))
            assert len(found[0]) == 1 + 3 + 6
            if window == "sliding":
                labels = [{name: body for name, body in one.items() if "/" not in name} for one in found]
                assert all(one == labels[0] for one in labels)
            for case, n in itertools.product(range(3), range(2)):
                folders = [tmp_path / f"{how}-{window}-{world}" for world, _ in worlds]
                parts = [voxels(out / "probabilities" / f"c_{case:03d}_label-{n}.nii.gz") for out in folders]
                assert all(np.abs(part - parts[0]).max() < 1e-5 for part in parts)
                ids = [voxels(out / f"c_{case:03d}.nii.gz") for out in folders]
                assert all((one == ids[0])[np.abs(parts[0] - 0.5) > 1e-4].all() for one in ids)


def cut_into_slabs(mesh: Mesh, scores: Tensor, cuts: tuple[int, ...], to_shape: tuple[int, ...]) -> Tensor:
    def slabs():
        for low, high in zip(cuts, cuts[1:]):
            busy = min(high - low, mesh.world.size)
            inner = [low + (high - low) * at // busy for at in range(busy + 1)]
            bounds = (*inner, *[high] * (mesh.world.size - busy))
            yield Slab(bounds, scores[:, bounds[mesh.world.index] : bounds[mesh.world.index + 1]])

    kept: list[tuple[int, Tensor]] = []
    ids = slabs_to_labels(slabs(), scores.shape[1:], to_shape, mesh, (), lambda first, rows: kept.append((first, rows)))
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


def test_one_bad_case_is_named_and_the_others_are_predicted(ranks, images, tmp_path, capfd) -> None:
    run, bad = make_run(tmp_path / "run"), images / "c_001_0000.nii.gz"
    assert act(tmp_path, run, out="good") == 0
    bad.write_bytes(bad.read_bytes()[:200])
    assert act(tmp_path, run) == exit_codes.DATA
    told = capfd.readouterr()
    assert told.err.count("error:") == 1 and "c_001_0000.nii.gz" in told.err and "faults 1" in told.out
    for name in ("c_000.nii.gz", "c_002.nii.gz"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "good" / name).read_bytes()
    assert not (tmp_path / "out" / "c_001.nii.gz").exists()
    codes = ranks(2, on_ranks, str(run), "-i", str(images), "-o", str(tmp_path / "two"), seqpar=1)
    assert codes == [exit_codes.DATA] * 2 and capfd.readouterr().err.count("error:") == 1
    assert {path.name for path in (tmp_path / "two").iterdir()} == {"c_000.nii.gz", "c_002.nii.gz", "prediction.json"}


def test_an_answer_that_is_not_finite_is_a_fault_of_its_case(images, tmp_path, capfd, monkeypatch) -> None:
    def nets(*given: Any) -> list[SegmentationNet]:
        (net,) = load_nets(*given)
        with torch.no_grad():
            net.encoder.norm.weight.fill_(float("nan"))
        return [net]

    monkeypatch.setattr(predict_cases, "load_nets", nets)
    assert act(tmp_path, make_run(tmp_path / "run")) == exit_codes.DATA
    assert capfd.readouterr().err.count("NaN") == 3


def test_continue_does_what_is_left_and_the_files_are_the_same(images, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run, "--probabilities", out="whole") == 0
    for wait in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5):  # killed early and late; what is complete stays
        pid = child(lambda: act(tmp_path, run, "--probabilities", "--continue"))
        try:
            signal.sigtimedwait([signal.SIGUSR2], wait)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    leftover = tmp_path / "out" / ".c_001.rows.tmp"
    leftover.parent.mkdir(exist_ok=True)
    leftover.write_bytes(b"half")
    assert act(tmp_path, run, "--probabilities", "--continue") == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    (tmp_path / "out" / "c_001.nii.gz").unlink()
    before = (tmp_path / "out" / "c_000.nii.gz").stat().st_mtime_ns
    capsys.readouterr()
    assert act(tmp_path, run, "--probabilities", "--continue") == 0
    assert "2 are done" in capsys.readouterr().out
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    assert (tmp_path / "out" / "c_000.nii.gz").stat().st_mtime_ns == before


def test_continue_refuses_other_settings(images, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run) == 0
    with pytest.raises(DataError, match="other settings .settings."):
        act(tmp_path, run, "--continue", "--overlap", "0.25")
    assert act(tmp_path, run, "--overlap", "0.25") == 0  # all again


def test_a_place_that_cannot_be_written_is_one_clear_error(ranks, images, tmp_path, capfd) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot be written"):
        act(tmp_path, run, out="file/out")

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))  # a real write that fails half way
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        arguments = [str(run), "-i", str(images), "-o", str(tmp_path / "out")]
        os._exit(exit_codes.run(predict.act, arguments))

    for number in range(3):
        save(images / f"d_{number:03d}_0000.nii", image_array(number))  # unpacked: too long
    capfd.readouterr()
    assert os.waitstatus_to_exitcode(os.waitpid(child(limited), 0)[1]) == exit_codes.DATA
    told = capfd.readouterr().err
    assert told.count("error:") == 1 and "cannot be written" in told and "--continue" in told
    assert len(list((tmp_path / "out").iterdir())) == 4  # what was finished, and nothing half done


@pytest.mark.parametrize(
    "more, message",
    [
        (("--window", "half"), "invalid choice"),
        (("--overlap", "1"), "--overlap 1.0"),
        (("--min-component", "many"), "--min-component many"),
        (("--window-batch", "0"), "--window-batch 0"),
        (("--window", "whole", "--overlap", "0.5"), "no windows"),
        (("--mirror", "Z"), "invalid choice"),
        (("--seqpar", "2"), "--seqpar 1"),
        (("--checkpoint", "nowhere.pt"), "no such file"),
        (("--unknown",), "unrecognized"),
    ],
)
def test_what_cannot_be_done_is_refused(more: tuple[str, ...], message: str, images, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        act(tmp_path, make_run(tmp_path / "run"), *more)
    assert not (tmp_path / "out").exists()


def test_wrong_inputs_are_refused(images, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match="no run folder"):
        act(tmp_path, tmp_path / "nowhere")
    with pytest.raises(DataError, match="does not exist"):
        act(tmp_path, run, images="nowhere")
    shutil.copy(images / "c_000_0000.nii.gz", tmp_path / "plain.nii.gz")
    with pytest.raises(DataError, match="would be overwritten"):
        act(tmp_path, run, images="plain.nii.gz", out=".")
    other = make_run(tmp_path / "other", replace(RECIPE, values=(0, 1, 2)))
    with pytest.raises(DataError, match="another network"):
        act(tmp_path, run, "--checkpoint", str(other / "model.safetensors"))


@pytest.mark.parametrize("more", [(), ("--continue",)])
def test_files_that_predict_did_not_write_are_never_touched(more: tuple[str, ...], tmp_path) -> None:
    run, data = make_run(tmp_path / "run"), nnunet(tmp_path / "data")
    (data / "labelsTr" / "c_000.nii.gz").unlink()  # the second one's is there
    before = tree(tmp_path)
    with pytest.raises(DataError, match=r"c_001.nii.gz: would be overwritten, and no prediction.json"):
        act(tmp_path, run, *more, images="data/imagesTr", out="data/labelsTr")
    assert tree(tmp_path) == before
    assert act(tmp_path, run, *more, images="data/imagesTr") == 0
    assert act(tmp_path, run, images="data/imagesTr") == 0  # its own files are written again


def test_inputs_are_whatever_training_reads(images, tmp_path) -> None:
    """A data set, its images alone, and single files say the same; a label that is there plays no part."""
    run, data = make_run(tmp_path / "run"), nnunet(tmp_path / "data")
    assert act(tmp_path, run, images="data", out="a") == act(tmp_path, run, images="data/imagesTr", out="b") == 0
    files = [str(path) for path in sorted((data / "imagesTr").iterdir())]
    assert predict.act([str(run), "-i", *files, "-o", str(tmp_path / "c")]) == 0
    assert tree(tmp_path / "a") == tree(tmp_path / "b") == tree(tmp_path / "c") and len(tree(tmp_path / "a")) == 4


def unlabelled_nnunet(root: Path) -> Path:
    nnunet(root)
    (root / "labelsTr" / "c_001.nii.gz").unlink()
    write_json(root / "splits_final.json", [{"train": ["c_000"], "val": ["gone"]}])
    return root


def images_of_nnunet(root: Path) -> Path:
    shutil.rmtree(nnunet(root, labels={}) / "labelsTr")
    return root


def explicit_nnunet(root: Path) -> Path:
    nnunet(root)
    files = {f"c_{n:03d}": {"images": [f"imagesTr/c_{n:03d}_0000.nii.gz"]} for n in range(3)}
    return nnunet(root, 0, dataset=files)


def unlabelled_list(root: Path) -> Path:
    nnunet(root)
    entries = [{"image": f"imagesTr/c_{n:03d}_0000.nii.gz"} | ({"fold": 0} if n else {}) for n in range(3)]
    return write_json(root / "list.json", {"training": entries[:2], "validation": entries[1:]})


def unlabelled_decathlon(root: Path) -> Path:
    nnunet(root)
    for n in range(3):
        (root / "imagesTr" / f"c_{n:03d}_0000.nii.gz").rename(root / "imagesTr" / f"c_{n:03d}.nii.gz")
    entries = [{"image": f"./imagesTr/c_{n:03d}.nii.gz", "label": "./labelsTr/gone.nii.gz"} for n in range(3)]
    write_json(root / "dataset.json", {"modality": {"0": "T1"}, "training": entries})
    return root


@pytest.mark.parametrize(
    "write", [unlabelled_nnunet, images_of_nnunet, explicit_nnunet, unlabelled_list, unlabelled_decathlon]
)
def test_prediction_asks_for_neither_labels_nor_splits(write: Any, tmp_path, capfd) -> None:
    given = write(tmp_path / "data")
    assert act(tmp_path, make_run(tmp_path / "run"), images=str(given.relative_to(tmp_path))) == 0
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 3 and "error" not in capfd.readouterr().err


def test_brats_cases_are_predicted_with_or_without_a_label(tmp_path) -> None:
    """Whatever their labels would mean, and as often as there are some."""
    names = ["BraTS-GLI-00000-000", "BraTS-GLI-00001-000"]
    root = brats(tmp_path / "data", names, NEW, "-", (1, 2, 3))
    (root / names[1] / f"{names[1]}-seg.nii.gz").unlink()
    shutil.copy(root / names[0] / f"{names[0]}-seg.nii.gz", root / f"{names[0]}-seg.nii.gz")
    brats(root, ["BraTS2021_00000"], OLD, "_", (1, 2, 4))
    names4 = ("T1", "T1c", "T2", "FLAIR")
    recipe = replace(RECIPE, modalities=names4, schemes=("zscore",) * 4, intensities=(None,) * 4)
    assert act(tmp_path, make_run(tmp_path / "run", recipe), images="data") == 0
    assert len(list((tmp_path / "out").glob("BraTS*.nii.gz"))) == 3


def test_modalities_are_taken_by_name(tmp_path, capfd) -> None:
    recipe = replace(RECIPE, modalities=("T1", "FLAIR"), schemes=("none",) * 2, intensities=(None,) * 2)
    run = make_run(tmp_path / "run", recipe)
    for name, channels in (("a", ("T1", "FLAIR")), ("b", ("FLAIR", "T1")), ("d", ("T1", "T2"))):
        nnunet(tmp_path / name, 1, channels)
    for channel in range(2):  # b holds the same images under the other numbers
        source = tmp_path / "a" / "imagesTr" / f"c_000_{channel:04d}.nii.gz"
        shutil.copy(source, tmp_path / "b" / "imagesTr" / f"c_000_{1 - channel:04d}.nii.gz")
    assert act(tmp_path, run, images="a", out="of a") == act(tmp_path, run, images="b", out="of b") == 0
    assert tree(tmp_path / "of a") == tree(tmp_path / "of b")
    with pytest.raises(DataError, match="T1, T2; the network knows T1, FLAIR"):
        act(tmp_path, run, images="d")


def test_arrays_and_images_are_predicted_as_files_are(images, tmp_path) -> None:
    run = make_run(tmp_path / "run", replace(RECIPE, spacing=(1.5, 0.8, 1.0)))
    assert act(tmp_path, run) == 0
    predictor = seqpar.Predictor.from_run(run)
    for name in ("c_000", "c_002"):
        image = nibabel.load(images / f"{name}_0000.nii.gz")
        expected = nibabel.load(tmp_path / "out" / f"{name}.nii.gz")
        found = predictor.predict(image)
        assert np.array_equal(found.affine, expected.affine) and found.get_data_dtype() == np.uint8
        assert np.array_equal(found.dataobj, expected.dataobj)
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


@pytest.mark.parametrize(
    "names, case", [(("a/b", "a b"), "x"), (("b", "a_b"), "x_a")], ids=["one case's", "two cases'"]
)
def test_outputs_that_would_share_a_file_are_refused_before_anything(names: Any, case: str, tmp_path) -> None:
    for name in ("x", case):
        save(tmp_path / "images" / f"{name}_0000.nii.gz", image_array(0))
    regions = {names[0]: [1], names[1]: [1, 2]}
    recipe = replace(RECIPE, values=(0, 1, 2))
    run = make_run(tmp_path / "run", recipe, regions=regions, regions_class_order=[1, 2])
    with pytest.raises(DataError, match="two of the outputs"):
        act(tmp_path, run, "--probabilities")
    assert not (tmp_path / "out").exists()
    assert act(tmp_path, run) == 0


def test_small_components_become_background() -> None:
    ids = np.zeros((9, 9, 9), np.int16)
    ids[0:2, 0:2, 0:2], ids[2, 2, 2], ids[5, 5, 5], ids[7:9, 7:9, 8] = 1, 1, 1, 2
    found = drop_small_components(ids, 4)
    assert found[2, 2, 2] == 1 and found[5, 5, 5] == 0 and (found == 2).sum() == 4 and (found == 1).sum() == 9
    assert (drop_small_components(ids, 5) == 2).sum() == 0 and np.array_equal(drop_small_components(ids, 1), ids)
    assert [parse_min_component(text, 0.5) for text in ("0", "50", "50mm3", "20voxels", "0.7")] == [0, 100, 100, 20, 2]


REGIONS = {"WT": (1, 2, 3), "TC": (1, 3), "ET": (3,)}


def test_a_small_component_of_a_region_costs_no_other_region_a_voxel() -> None:
    """Class ids 1 NCR, 2 ED, 3 ET: an island gets the label of what encloses it, background only where nothing does."""
    ids = np.zeros((16, 12, 12), np.uint8)
    ids[1:13, 1:11, 1:11], ids[4:9, 4:9, 4:9] = 2, 1  # ED around NCR
    ids[6, 6, 6] = 3  # ET in the core: TC keeps the voxel
    ids[2, 2, 2:4] = 3  # ET in the oedema: a core of two voxels, WT alone keeps them
    ids[11, 2, 2] = 1  # the same without ET
    ids[15, 11, 10:12] = (3, 1)  # a tumour of two voxels
    found = drop_small_components(ids, 5, REGIONS.values(), (2, 1, 3))
    assert found.dtype == ids.dtype and found[6, 6, 6] == 1 and not found[15].any()
    assert (found[2, 2, 2:4] == 2).all() and found[11, 2, 2] == 2
    assert np.array_equal(found[:14] > 0, ids[:14] > 0) and np.isin(found, REGIONS["TC"]).sum() == 125
    assert np.array_equal(drop_small_components(ids, 2, REGIONS.values(), (2, 1, 3)) == 0, ids == 0)
    odd = np.where(ids == 3, 9, ids)  # what no region holds stays as it is
    assert (drop_small_components(odd, 5, [(1, 2)], [2])[6, 6, 6]) == 9


def test_regions_are_filtered_in_the_file(tmp_path, echo) -> None:
    truth = np.zeros((12, 11, 9), np.uint8)
    truth[1:11, 1:10, 1:8], truth[5, 5, 5] = 2, 4
    save(tmp_path / "images" / "case.nii.gz", truth, np.diag([2, 2, 2, 1]))
    recipe = replace(RECIPE, schemes=("none",), values=(0, 1, 2, 4))
    run = make_run(tmp_path / "run", recipe, regions=REGIONS, regions_class_order=[2, 1, 3])
    assert act(tmp_path, run, "--min-component", "9") == 0
    assert np.array_equal(voxels(tmp_path / "out" / "case.nii.gz"), np.where(truth == 4, 2, truth))


def test_the_smallest_component_acts_in_the_file(tmp_path, echo) -> None:
    truth = np.zeros((12, 11, 9), np.uint8)
    truth[2:5, 2:5, 2:5], truth[8, 8, 7] = 1, 1
    save(tmp_path / "images" / "case.nii.gz", truth, np.diag([2, 2, 2, 1]))
    run = make_run(tmp_path / "run", replace(RECIPE, schemes=("none",)))
    for size, left in (("8", 28), ("9", 27), ("2voxels", 27)):
        assert act(tmp_path, run, "--min-component", size) == 0
        assert int(voxels(tmp_path / "out" / "case.nii.gz").sum()) == left


def test_a_whole_pass_says_what_it_takes(images, tmp_path, capsys) -> None:
    run = make_run(tmp_path / "run")
    assert act(tmp_path, run, "--window", "whole") == 0
    assert capsys.readouterr().out.count("MiB on each rank") == 3


@pytest.mark.parametrize("mode", MODES)
def test_a_whole_pass_of_every_mode_ends_alike_on_two_ranks(mode: str, ranks, images, tmp_path, capfd) -> None:
    """What one rank cannot do, all say together; the exact modes write what one process does."""
    run = make_run(tmp_path / "run")
    more = ("-i", str(images), "--window", "whole")
    assert act(tmp_path, run, "--window", "whole", out="alone") == 0
    capfd.readouterr()
    out = tmp_path / "out"
    assert ranks(2, on_ranks, str(run), *more, "-o", str(out), "--mode", mode, timeout=40) == [0, 0]
    assert capfd.readouterr().out.count("MiB on each rank") == 3
    for name in ("c_000.nii.gz", "c_001.nii.gz", "c_002.nii.gz"):
        same = voxels(out / name) == voxels(tmp_path / "alone" / name)
        assert mode == "nogather" or same.mean() > 1 - 1e-3


def test_a_volume_that_no_whole_pass_can_take_is_a_fault_on_all_ranks(ranks, images, tmp_path, capfd) -> None:
    run = make_run(tmp_path / "run")
    save(images / "c_003_0000.nii.gz", image_array(3, (14, 29, 10)))

    def count(net: SegmentationNet, shape: Any, *more: Any) -> Any:
        if shape[1] > 20:
            raise ValueError("too large")
        return footprint(net, shape, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predict_cases, "footprint", count)
        arguments = (str(run), "-i", str(images), "-o", str(tmp_path / "out"), "--window", "whole")
        assert ranks(2, on_ranks, *arguments, timeout=40) == [exit_codes.DATA] * 2
    assert capfd.readouterr().err.count("error: c_003") == 1
    assert len(list((tmp_path / "out").glob("*.nii.gz"))) == 3


def test_memory_is_counted_not_guessed(alone) -> None:
    """What is alive at once: on real tensors and on tensors without data the same, in a network as in a sum."""
    x = torch.ones(1000)
    with MemoryCounter() as alive:
        y = x + 1
        z = (y * 2).sum()
        del y
        z = z + x
    assert alive.most == 2 * x.nbytes + 4 and alive.now == x.nbytes
    net = build(SMALL, 1, 2, Group("seq")).eval()
    found = footprint(net, (30, 32, 32), 2, alone)
    with torch.no_grad(), MemoryCounter() as alive:
        part, layout = net.encoder.place(torch.randn(1, 1, 30, 32, 32))
        alive.peaks.clear()
        net(part, layout)
    assert max(found.encoder, found.decoder) == pytest.approx(alive.most, rel=0.02)
    small = footprint(net, (16,) * 3, 2, alone)
    assert 7 < found.decoder / small.decoder < 9 and 7 < found.encoder / small.encoder < 9
    assert found.weights == small.weights == sum(p.nbytes for p in net.parameters())
    assert all(not p.is_meta for p in net.parameters())


def test_the_script_runs_alone_from_any_folder(images, tmp_path) -> None:
    run = make_run(tmp_path / "run")
    line = [sys.executable, ROOT / "launch" / "predict.py", run, "-i", images, "-o", "out", "--mirror", "W", "H"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "3 cases" in done.stdout and len(list((tmp_path / "out").glob("*.nii.gz"))) == 3
