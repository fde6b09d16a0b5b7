"""A results folder of nnU-Net's predicts as nnU-Net does, on any ranks."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from seqpar.cli import predict
from seqpar.cluster import exit_codes
from seqpar.parallel.mesh import Mesh
from seqpar.prediction.predictor import PredictionSettings, Predictor
from seqpar.prediction.sliding_window import join_rows, sliding_window
from seqpar.prediction.window_grid import Sliding
from seqpar.runs.nnunet_run import open_run
from seqpar.scores.postprocessing import keep_largest
from seqpar.weights import nnssl
from seqpar.weights.nnunet_weights import load_nnunet
from tests.support import nnunet_prediction, references
from tests.support.folders import image_array, save
from tests.support.nnunet_networks import DATASET, Reference, configuration, plans_of, reference, write_results
from tests.support.predictions import act, make_run, on_ranks, voxels
from tests.support.ranks import run_ranks

GOLDEN = Path(__file__).parents[1] / "golden" / "nnunet"
SPACING, MIRROR = [2.4, 3.9, 1.5], (1,)


def own_of(kind: str) -> dict[str, Any]:
    return {**configuration(kind), "spacing": SPACING}


def case(folder: Path, number: int, shape: tuple[int, ...], affine: np.ndarray) -> list[Path]:
    """Writes a case of two channels with a border of zeros."""
    paths = []
    for channel in range(2):
        array = np.zeros(shape, np.float32)
        array[1:, 2:, :-1] = 60 * image_array(7 * number + channel, tuple(n - c for n, c in zip(shape, (1, 2, 1)))) + 90
        paths.append(save(folder / f"c{number}_{channel:04d}.nii.gz", array, affine))
    return paths


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A results folder with two folds, transposed, and two cases: one with far slices, one smaller than the patch."""
    kind = "ResidualEncoderUNet"
    plans = plans_of(own_of(kind), transpose_forward=[1, 0, 2])
    nets = [reference(kind).float(), reference(kind, 1).float()]
    write_results(tmp_path / "model", nets, plans, inference_allowed_mirroring_axes=MIRROR)
    case(tmp_path / "images", 0, (17, 14, 12), np.diag([-1.0, 0.8, 4.2, 1.0]))
    case(tmp_path / "images", 1, (9, 13, 11), np.diag([0.9, 1.1, 2.0, 1.0]))
    return tmp_path


def wanted(
    place: Path, number: int, folds: tuple[int, ...] = (0, 1), mirror: tuple[int, ...] = MIRROR, half: bool = False
) -> np.ndarray:
    nets = [reference("ResidualEncoderUNet", fold).float() for fold in folds]
    finest = [lambda x, net=net: net(x)[0] for net in nets]
    plans = json.loads((place / "model" / "plans.json").read_text())
    paths = sorted((place / "images").glob(f"c{number}_*"))
    return nnunet_prediction.labels(finest, paths, plans, own_of("ResidualEncoderUNet"), mirror, half=half)


@pytest.mark.started
def test_labels_of_one_rank_and_of_two_are_nnunets(place: Path) -> None:
    expected = [wanted(place, number) for number in range(2)]
    assert act(place, place / "model", "--probabilities", "--statistics") == 0
    arguments = [str(place / "model"), "-i", str(place / "images"), "-o"]
    run_ranks(2, on_ranks, *arguments, str(place / "windows"), seqpar=1)
    run_ranks(2, on_ranks, *arguments, str(place / "halo"), "--mode", "halo", seqpar=2)
    for number, want in enumerate(expected):
        source = nibabel.load(place / "images" / f"c{number}_0000.nii.gz")
        for folder in ("out", "windows", "halo"):
            image = nibabel.load(place / folder / f"c{number}.nii.gz")
            assert image.shape == source.shape and np.array_equal(image.affine, source.affine)
            assert np.count_nonzero(np.asarray(image.dataobj) != want) <= 1, (number, folder)  # where logits tie
        assert min(np.unique(want, return_counts=True)[1]) > 20
        several = [voxels(path) for path in sorted((place / "out" / "probabilities").glob(f"c{number}_*"))]
        assert len(several) == 3 and np.allclose(sum(several), 1, atol=1e-5)
    lines = (place / "out" / "statistics.csv").read_text().splitlines()
    assert len(lines) == 5 and lines[1].startswith("c0,edge")


@pytest.mark.started
def test_what_nnunet_predicted_of_its_own_comes_out_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for path in (GOLDEN / "imagesTs").glob("case_0_*"):
        shutil.copy(path, tmp_path / "images")
    run_ranks(2, on_ranks, str(GOLDEN / "model"), "-i", str(tmp_path / "images"), "-o", str(tmp_path / "out"), seqpar=1)
    got, want = (nibabel.load(folder / "case_0.nii.gz") for folder in (tmp_path / "out", GOLDEN / "expected"))
    assert np.count_nonzero(np.asarray(got.dataobj) != np.asarray(want.dataobj)) <= 5
    assert np.allclose(got.affine, want.affine, atol=1e-3) and got.get_data_dtype() == want.get_data_dtype()


@pytest.mark.started
def test_a_primus_that_nnunet_trained_predicts_as_it_does_on_one_rank_and_two(tmp_path: Path, monkeypatch) -> None:
    """Its plans name a U-Net, which its trainer does not build."""
    monkeypatch.setitem(nnssl.SIZES, "PrimusXS", (72, 2, 4))
    state = references.draw(references.primus_shapes(2, 3, 8, (1, 2, 2), 72, 2, [32, 16]), dtype=torch.float32)
    own = {**own_of("PlainConvUNet"), "patch_size": [8, 16, 16]}
    plans, model = plans_of(own, transpose_forward=[1, 0, 2]), tmp_path / "model"
    trained = {"trainer_name": "nnUNet_Primus_M_Trainer", "inference_allowed_mirroring_axes": MIRROR}
    write_results(model, [reference("PlainConvUNet")], plans, network_weights=state, **trained)
    paths = case(tmp_path / "images", 0, (17, 14, 12), np.diag([-1.0, 0.8, 4.2, 1.0]))
    want = nnunet_prediction.labels([lambda x: references.primus(state, x, 4)], paths, plans, own, MIRROR)
    assert act(tmp_path, model, "--trainer-unknown", "refuse") == 0
    line = [str(model), "-i", str(tmp_path / "images"), "-o", str(tmp_path / "two")]
    run_ranks(2, on_ranks, *line, seqpar=2)
    for folder in ("out", "two"):
        assert np.count_nonzero(voxels(tmp_path / folder / "c0.nii.gz") != want) <= 1, folder
    assert len(np.unique(want)) > 1
    alone, shared = (open_run(model).window_bytes(size) for size in (1, 2))
    assert sum(tensor.nbytes for tensor in state.values()) / 2 < shared < alone  # both hold the weights
    with pytest.raises(ValueError, match="holds a Primus: load its checkpoints by load_primus"):
        load_nnunet(model)
    with pytest.raises(ValueError, match="positions for windows of 8x16x16, and none beyond"):
        act(tmp_path, model, "--window", "whole", out="none")


def test_folds_flips_windows_and_weights_act(place: Path) -> None:
    one = ["--folds", "1", "--mirror", "none"]
    assert act(place, place / "model", *one, out="one") == 0
    want = wanted(place, 0, folds=(1,), mirror=())
    assert np.count_nonzero(voxels(place / "one" / "c0.nii.gz") != want) <= 1
    for name, flags in {"overlap": ["--overlap", "0.75"], "constant": ["--weights", "constant"]}.items():
        assert act(place, place / "model", *one, *flags, out=name) == 0
        assert np.count_nonzero(voxels(place / name / "c0.nii.gz") != want) > 5
    record = json.loads((place / "one" / "prediction.json").read_text())
    assert list(record["weights"]) == [str(place / "model" / "fold_1" / "checkpoint_final.pth")]


def test_a_trainer_of_another_name_is_named_or_refused(place: Path, capsys) -> None:
    nets = [reference("ResidualEncoderUNet").float()]
    plans = json.loads((place / "model" / "plans.json").read_text())
    trained = {"trainer_name": "nnUNetTrainerOfMine", "inference_allowed_mirroring_axes": MIRROR}
    own = write_results(place / "own", nets, plans, **trained)
    assert act(place, own, out="own-out") == 0
    assert capsys.readouterr().out.count("trained by nnUNetTrainerOfMine") == 1
    assert act(place, place / "model", "--folds", "0", "--trainer-unknown", "refuse") == 0
    assert np.array_equal(voxels(place / "own-out" / "c0.nii.gz"), voxels(place / "out" / "c0.nii.gz"))
    assert "trained by" not in capsys.readouterr().out
    with pytest.raises(ValueError, match="nnUNetTrainerOfMine.*--trainer-unknown is refuse; take uses it"):
        act(place, own, "--trainer-unknown", "refuse", out="none")
    assert not (place / "none").exists()


@pytest.mark.started
def test_half_sums_are_nnunets_to_the_bit_on_one_rank_and_two(place: Path) -> None:
    """Few logits are near a change of label; for labels, logits are resampled in half too."""
    run = open_run(place / "model")
    nets = [reference("ResidualEncoderUNet", fold).float() for fold in range(2)]
    finest = [lambda x, net=net: net(x)[0] for net in nets]
    image = torch.from_numpy(np.stack([image_array(seed, (20, 9, 11)) for seed in (5, 6)])).float()
    tile = run.config.tile
    half, full = (nnunet_prediction.logits(finest, image.numpy(), tile, MIRROR, half) for half in (True, False))
    assert half.dtype == np.float16 and np.abs(half - full).max() > 1e-4
    for world in (1, 2):
        for got in run_ranks(world, half_logits, str(place / "model"), image, seqpar=1):
            same = got.numpy() == half.astype(np.float32)
            assert np.mean(same) > 0.998, "all but what networks round otherwise here and there"
            assert np.mean(full == got.numpy()) < 0.01
    assert act(place, place / "model", "--sums", "half") == 0
    for number in range(2):
        got = voxels(place / "out" / f"c{number}.nii.gz")
        assert np.count_nonzero(got != wanted(place, number, half=True)) <= 1
    with pytest.raises(ValueError, match="--sums: a whole pass has no windows"):
        act(place, place / "model", "--window", "whole", "--force", "--sums", "half", out="none")


def half_logits(mesh: Mesh, model: str, image: torch.Tensor) -> torch.Tensor:
    """Returns the logits of windows that were added up in half precision, joined."""
    run = open_run(model)
    nets = run.load_nets(run.weights_of([]), mesh)
    sliding = Sliding(run.config.tile, mirror=run.mirror, rule=run.window_rule, sums="half")
    slabs = sliding_window(nets, image, sliding, mesh)
    return torch.cat([join_rows(slab.logits.movedim(1, 0), slab.bounds, mesh).movedim(0, 1) for slab in slabs], 1)


def test_a_whole_pass_needs_force_as_it_is_another_function(place: Path) -> None:
    with pytest.raises(ValueError, match="window='whole' .* another function than nnU-Net trained.*force=True"):
        act(place, place / "model", "--window", "whole")
    assert not (place / "out").exists()
    flags = ["--folds", "0", "--mirror", "none"]
    assert act(place, place / "model", "--window", "whole", "--force", *flags) == 0
    assert np.count_nonzero(voxels(place / "out" / "c0.nii.gz") != wanted(place, 0, (0,), ())) > 20


def test_a_predictor_needs_force_for_a_whole_pass_as_the_command_line_does(place: Path) -> None:
    """And refuses it before it reads weights, and where it would do nothing."""
    image = np.ones((2, 12, 14, 17), np.float32)
    with pytest.raises(ValueError, match="another function than nnU-Net trained.*force=True"):
        Predictor.from_run(place / "model", settings=PredictionSettings("whole"))
    with pytest.raises(ValueError, match="force=True would do nothing"):
        Predictor.from_run(place / "model", settings=PredictionSettings("sliding", force=True))
    whole = Predictor.from_run(place / "model", settings=PredictionSettings("whole", force=True))
    with pytest.raises(ValueError, match="another function"):
        Predictor(whole.run, whole.nets, PredictionSettings("whole"), whole.mesh)
    assert whole.predict(image).shape == image.shape[1:]


def test_a_window_goes_to_one_rank_and_to_several_where_it_does_not_fit(place: Path) -> None:
    run = open_run(place / "model", folds=["0"])
    alone, shared = (run.window_bytes(size) for size in (1, 2))
    assert 0.5 * alone < shared < 0.9 * alone  # the weights are on both
    assert run.window_group([1, 2, 4], alone) == 1 and run.window_group([1, 2, 4], alone - 1) == 2
    assert run.window_group([1, 2, 4], 0) == 4 and open_run(place / "model").window_bytes(1) > alone
    voxels, widths = 4 * 8 * 16, 2 * 4  # the finest level alone: what is joined, and its convolution's output
    assert alone > voxels * widths * 4


def test_regions_are_written_in_their_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    own = own_of("PlainConvUNet")
    net = Reference(2, 2, own["architecture"]["arch_kwargs"])
    dataset = {
        **DATASET, "labels": {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3}, "regions_class_order": [1, 2],
    }  # fmt: skip
    write_results(tmp_path / "model", [net], plans_of(own), dataset=dataset, inference_allowed_mirroring_axes=None)
    paths = case(tmp_path / "images", 0, (12, 13, 11), np.diag([1.0, 1.0, 2.0, 1.0]))
    assert act(tmp_path, tmp_path / "model") == 0
    want = nnunet_prediction.labels([lambda x: net(x)[0]], paths, plans_of(own), own, (), [1, 2])
    assert np.count_nonzero(voxels(tmp_path / "out" / "c0.nii.gz") != want) <= 1
    assert len(np.unique(want)) == 3


def test_flags_and_folders_that_do_not_fit_are_refused(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = place / "model"
    for flags, message in {
        ("--folds", "3"): "has no fold_3/checkpoint_final.pth; folds with that file: 0, 1",
        ("--checkpoint", "best"): "fold_0/checkpoint_best.pth",
        ("--checkpoint", "best", "final"): "one is taken of each fold",
    }.items():
        with pytest.raises(ValueError, match=message):
            act(place, model, *flags)
    run = make_run(place / "run")
    with pytest.raises(ValueError, match="--folds 0: .* is no nnU-Net results folder"):
        act(place, run, "--folds", "0")
    with pytest.raises(ValueError, match="force=True would do nothing"):
        act(place, run, "--force")
    both = [str(model), str(run), "-i", str(place / "images"), "-o", str(place / "out"), "--folds", "0"]
    with pytest.raises(ValueError, match=r"their axes are nnU-Net's .* 1 0 2\) and canonical; .*: seqpar-export makes"):
        predict.act(both)
    (place / "images" / "c1_0001.nii.gz").unlink()
    assert act(place, model, "--folds", "0", "--mirror", "none") == exit_codes.DATA
    said = capfd.readouterr().err
    assert "c1_0001.nii.gz: is missing" in said and "differ" not in said
    plans, dataset = (json.loads((model / name).read_text()) for name in ("plans.json", "dataset.json"))
    plans["configurations"]["3d_fullres"]["spacing"] = SPACING[::-1]
    dataset["labels"] = {"background": 0, "edge": 2, "core": 1}
    for name, content in (("plans.json", plans), ("dataset.json", dataset)):
        (model / name).write_text(json.dumps(content))
    one = str(place / "images" / "c0_0000.nii.gz"), str(place / "images" / "c0_0001.nii.gz")
    assert predict.act([str(model), "-i", *one, "-o", str(place / "other"), "-f", "0", "--mirror", "none"]) == 0
    assert capfd.readouterr().err.count("their checkpoints: spacing, labels differ") == 1
    plans["foreground_intensity_properties_per_channel"]["0"]["std"] = -45.0
    (model / "plans.json").write_text(json.dumps(plans))
    with pytest.raises(ValueError, match="std must be 0 or more"):
        act(place, model)


def test_a_network_is_found_as_nnunet_finds_it(place: Path, monkeypatch, capfd) -> None:
    results = place / "nnUNet_results" / "Dataset007_X"
    results.mkdir(parents=True)
    shutil.copytree(place / "model", results / "nnUNetTrainer__nnUNetPlans__3d_fullres")
    monkeypatch.delenv("nnUNet_results", raising=False)
    line = ["-i", str(place / "images"), "-o", str(place / "found"), "--device", "cpu"]

    def refused(*flags: str) -> str:
        assert exit_codes.run(predict.act, [*flags, *line]) in (2, 3)
        return capfd.readouterr().err

    named = ("-d", "7", "-c", "3d_fullres")
    assert "nnUNet_results is not set" in refused(*named)
    monkeypatch.setenv("nnUNet_results", str(place / "nnUNet_results"))
    assert "-d 8: no folder matches Dataset008_*" in refused("-d", "8", *named[2:])
    assert "there are nnUNetTrainer__nnUNetPlans__3d_fullres" in refused(*named, "-tr", "nnUNetTrainerDA5")
    assert "give both" in refused("-d", "7") and "RUN is missing" in refused()
    assert "and not both" in refused(str(place / "model"), *named) and "-p would do nothing" in refused("-p", "x")
    assert exit_codes.run(predict.act, [*named, "-f", "0", "1", *line]) == 0
    assert "folds 0, 1 of " in capfd.readouterr().out.splitlines()[1]
    assert np.count_nonzero(voxels(place / "found" / "c0.nii.gz") != wanted(place, 0)) <= 1
    assert (
        exit_codes.run(predict.act, ["-d", "Dataset007_X", *named[2:], "-f", "1", *line[:3], str(place / "one")]) == 0
    )
    assert "are averaged" not in capfd.readouterr().out


def test_probabilities_for_an_ensemble_are_in_the_axes_of_nnunets_reader(place: Path) -> None:
    assert act(place, place / "model", "--npz", "--probabilities") == 0
    folder = place / "out" / "npz"
    assert {path.name for path in folder.iterdir()} == {
        "c0.npz", "c0.pkl", "c1.npz", "c1.pkl", "plans.json", "dataset.json"
    }  # fmt: skip
    assert (folder / "plans.json").read_text() and json.loads((folder / "dataset.json").read_text()) == json.loads(
        (place / "model" / "dataset.json").read_text()
    )
    probabilities = np.load(folder / "c0.npz")["probabilities"]
    volumes = [voxels(path) for path in sorted((place / "out" / "probabilities").glob("c0_*"))]
    assert sorted(channel.sum() for channel in probabilities) == pytest.approx(sorted(v.sum() for v in volumes))
    np.testing.assert_array_equal(probabilities.argmax(0).T, voxels(place / "out" / "c0.nii.gz"))
    assert act(place, place / "model", "--npz", "--probabilities", "--continue") == 0


def test_probabilities_of_our_own_runs_are_in_the_files_axes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", name="D")
    affine = np.diag([-1.0, 0.8, 4.2, 1.0])
    image = save(tmp_path / "images" / "c0_0000.nii.gz", image_array(0, (9, 11, 10)), affine)
    assert act(tmp_path, run, "--npz") == 0
    folder = tmp_path / "out" / "npz"
    assert json.loads((folder / "dataset.json").read_text())["labels"] == {"background": 0, "label 1": 1}
    assert np.load(folder / "c0.npz")["probabilities"].shape == (2, 10, 11, 9)
    stored = pickle.loads((folder / "c0.pkl").read_bytes())["sitk_stuff"]  # as SimpleITK reads the image, in LPS
    assert stored["spacing"] == pytest.approx((1, 0.8, 4.2)) and stored["origin"] == (0, 0, 0)
    assert stored["direction"] == pytest.approx((1, 0, 0, 0, -1, 0, 0, 0, 1)) and image.is_file()


def test_postprocessing_of_nnunets_is_applied(place: Path) -> None:
    assert act(place, place / "model") == 0
    name = "remove_all_but_largest_component_from_segmentation"
    content = {"postprocessing_fns": [name] * 2, "postprocessing_kwargs": [
        {"labels_or_regions": [1, 2]}, {"labels_or_regions": 2}]}  # fmt: skip
    (place / "pp.json").write_text(json.dumps(content))
    assert act(place, place / "model", "--postprocessing", str(place / "pp.json"), out="kept") == 0
    before, after = (voxels(place / folder / "c0.nii.gz") for folder in ("out", "kept"))
    assert (before != after).any()
    np.testing.assert_array_equal(after, keep_largest(before, ((1, 2), (2,))))
    record = json.loads((place / "kept" / "prediction.json").read_text())
    assert record["settings"]["postprocessing"] == [[1, 2], [2]]
    (place / "pp.json").write_text(json.dumps({**content, "postprocessing_fns": [name, "other"]}))
    with pytest.raises(ValueError, match="has steps other than nnU-Net's"):
        act(place, place / "model", "--postprocessing", str(place / "pp.json"), out="no")
