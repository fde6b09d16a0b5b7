"""From the real nnU-Net to seqpar and back: the same label maps, on networks that it planned and trained itself.

Each program is a process of its own, as for people: nnU-Net's threads would stop processes that seqpar forks.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from torch import Tensor

from seqpar import nnunet_trainer
from seqpar.data.formats.nnunet_plans import Resampling
from seqpar.data.preparation.as_nnunet import resampled, resampled_label
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Mesh
from seqpar.weights.primus_weights import export_primus, load_primus
from seqpar.weights.weight_files import State, load_torch
from tests.nnunet.real_nnunet import PLAIN, REGIONS, primus
from tests.support.ranks import run_ranks

CASES = 2
FOLLOW = """
    --preset nnunet --iterations 1 --epochs 1 --workers 0 --augment none --device cpu --precision fp32
"""
CHANGES = [  # spacings before and after, and the shape: all at once, slices apart before or after, two longest axes
    ((1, 1, 1), (1.3, 0.8, 1.1), (8, 14, 11)), ((4, 1, 1), (1.1, 1.2, 0.8), (30, 9, 14)),
    ((1, 1, 1), (1, 1, 4.0), (9, 10, 3)), ((1, 4, 4), (1, 2, 2), (9, 20, 20)),
]  # fmt: skip
NETWORKS = {PLAIN: ("nnunet-plain", "16 16 8", "1,1,2"), REGIONS: ("nnunet-resenc", "16 16 16", "source")}


@pytest.fixture(scope="module", params=[PLAIN, REGIONS])
def trained(request, tmp_path_factory) -> tuple[Path, str, Path]:
    """A folder, the name of a data set in it, and the results of nnU-Net's training on it."""
    root, name = tmp_path_factory.mktemp("nnunet"), request.param
    started("tests.nnunet.real_nnunet", "train", root, name)
    (results,) = (root / "nnUNet_results" / name).iterdir()
    return root, name, results


def started(module: str, *arguments: object) -> None:
    """Runs a module as a program; fails with its last words where it does."""
    line = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def run_of(root: Path, name: str, out: str, *flags: str) -> Path:
    """Trains with seqpar; returns the run folder."""
    data = ["--data", root / "nnUNet_raw" / name, "--cache", root / f"cache-{out}", "--out", root / out]
    started("seqpar.cli.train", *FOLLOW.split(), *data, *flags)
    return root / out


def refuse_different(ours: Path, theirs: Path) -> None:
    """Fails where label maps differ in more than 1 of 10,000 voxels, or show nothing."""
    names = sorted(path.name for path in theirs.glob("*.nii.gz"))
    assert len(names) == CASES
    for name in names:
        got, want = (np.asarray(nibabel.load(folder / name).dataobj) for folder in (ours, theirs))
        assert got.shape == want.shape and len(np.unique(want)) > 1
        assert np.count_nonzero(got != want) <= want.size / 10_000, name


def images_of(root: Path, name: str) -> Path:
    """Returns a folder with two cases."""
    images = root / "images"
    images.mkdir(exist_ok=True)
    for path in (root / "nnUNet_raw" / name / "imagesTr").glob("case_00[01]_*"):
        shutil.copy(path, images)
    return images


def refuse_other_predictions(root: Path, name: str, run: Path) -> None:
    """Fails where nnU-Net predicts otherwise from what is handed back than seqpar from the run."""
    images = images_of(root, name)
    back, ours = root / f"back-{run.name}", root / f"ours-{run.name}"
    theirs = root / f"theirs-{run.name}"
    started("seqpar.cli.export", run, back)
    started("seqpar.cli.predict", run, "-i", images, "-o", ours, "--device", "cpu")
    started("tests.nnunet.real_nnunet", "predict", root, back, images, theirs)
    refuse_different(ours, theirs)


def test_unchanged_weights_validate_as_nnunet_did_and_go_back(trained) -> None:
    root, name, results = trained
    weights = ["--weights", str(results / "fold_0" / "checkpoint_final.pth"), "--lr", "1e-30"]
    run = run_of(root, name, "follow", *weights)
    refuse_different(run / "validation", results / "fold_0" / "validation")
    want, got = (json.loads((f / "validation" / "summary.json").read_text()) for f in (results / "fold_0", run))
    theirs = [mean["Dice"] for mean in want["mean"].values()]
    assert sorted(mean["Dice"] for mean in got["mean"].values()) == pytest.approx(sorted(theirs), abs=1e-3)
    refuse_other_predictions(root, name, run)


@pytest.mark.parametrize("separate", [None, False])
@pytest.mark.parametrize("change", CHANGES)
def test_resampling_by_torch_has_the_bits_of_nnunets(change, separate) -> None:
    from nnunetv2.preprocessing.resampling.resample_torch import resample_torch_fornnunet as theirs

    spacing, target, shape = change
    dice, step = np.random.default_rng(0), Resampling("resample_torch_fornnunet", force_separate_z=separate)
    image = dice.normal(size=(2, 10, 11, 12)).astype(np.float32)
    want = theirs(image, shape, spacing, target, force_separate_z=separate)
    assert np.array_equal(resampled(image, shape, spacing, target, step), want)
    label = dice.integers(-1, 4, (10, 11, 12)).astype(np.int16)  # -1: outside the mask
    want = theirs(label[None], shape, spacing, target, is_seg=True, force_separate_z=separate)[0]
    got = resampled_label(np.maximum(label, 0), shape, spacing, target, step, range(4), label < 0)
    assert np.array_equal(got, np.maximum(want, 0))


def test_its_trainer_on_boxes_of_two_ranks_has_nnunets_losses_and_checkpoint(trained, monkeypatch) -> None:
    root, name, _ = trained
    monkeypatch.setenv("nnUNet_extTrainer", str(Path(nnunet_trainer.__file__).parent))
    act = ["tests.nnunet.real_nnunet", "losses", root, name]
    started(*act, "nnUNetTrainer", root / "alone.json")
    started("torch.distributed.run", "--nproc-per-node", "2", "-m", *act, "nnUNetTrainerSeqPar", root / "boxes.json")
    alone, boxes = (json.loads((root / f"{file}.json").read_text()) for file in ("alone", "boxes"))
    assert len(alone["losses"]) == 10 and boxes["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert Path(boxes["folder"]).parent.name.startswith("nnUNetTrainerSeqPar__")
    want, got = (load_torch(Path(run["folder"]) / "checkpoint_final.pth") for run in (alone, boxes))
    assert got["trainer_name"] == "nnUNetTrainer" and got["current_epoch"] == 1
    assert got["network_weights"].keys() == want["network_weights"].keys()
    for key, tensor in want["network_weights"].items():
        assert (got["network_weights"][key] - tensor).abs().max() < 1e-3, key
    scores = [json.loads((Path(run["folder"]) / "validation" / "summary.json").read_text()) for run in (alone, boxes)]
    want, got = (score["foreground_mean"]["Dice"] for score in scores)
    assert got == pytest.approx(want, abs=1e-3)


def on_ranks(mesh: Mesh, state: State, image: Tensor) -> tuple[Tensor, State]:
    """Returns the logits of the whole tile, and gradients of the sum of their squares under Primus' names."""
    net = load_primus(state, image.shape[2:], num_heads=4, group=mesh.seq, mode="gather").train()
    logits = net(net.layout.cut(image, mesh.seq.index))
    logits.square().sum().backward()
    net.load_state_dict({k: all_reduce(p.grad, mesh.seq) / mesh.seq.size for k, p in net.named_parameters()}, False)
    return logits.detach(), export_primus(net)


@pytest.mark.parametrize("version", ["Primus", "PrimusV2", "PrimusV3"])
def test_primus_computes_here_what_its_package_computes(version) -> None:
    sides = (16, 8, 24)
    net = primus(version, sides)
    image = torch.randn(2, 2, *sides, dtype=torch.float64)
    want = net(image)
    want.square().sum().backward()
    state, gradients = net.state_dict(), {name: p.grad for name, p in net.named_parameters()}
    for world in (1, 2, 3, 4):
        for logits, grads in run_ranks(world, on_ranks, state, image):
            assert (logits - want).abs().max() < 1e-12
            for name, wanted in gradients.items():
                assert (grads[name] - wanted).abs().max() <= 1e-12 * max(1, wanted.abs().max()), name
    back = export_primus(load_primus(state, sides, num_heads=4))
    net.load_state_dict(back, strict=True)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name != "mask_token")


def test_half_sums_give_the_labels_of_its_own_half_sums(trained) -> None:
    root, name, results = trained
    images, ours, theirs = images_of(root, name), root / "ours-half", root / "theirs-half"
    started("seqpar.cli.predict", results, "-i", images, "-o", ours, "--sums", "half", "--device", "cpu")
    started("tests.nnunet.real_nnunet", "predict", root, results, images, theirs, "half")
    refuse_different(ours, theirs)


def test_a_run_of_its_own_is_handed_to_nnunet(trained) -> None:
    root, name, _ = trained
    network, tile, spacing = NETWORKS[name]
    flags = ["--network", network, "--tile", *tile.split(), "--spacing", spacing, "--features", "6", "--lr", "0.03"]
    refuse_other_predictions(root, name, run_of(root, name, "own", *flags, "--iterations", "12"))
