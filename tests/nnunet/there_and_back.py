"""From the real nnU-Net to seqpar and back: the same label maps, on networks that it planned and trained itself.

Each program is a process of its own, forked from this one: nnU-Net's threads would stop processes that seqpar forks.
"""

import json
import shutil
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
from tests.nnunet.real_nnunet import PLAIN, REGIONS, import_libraries, primus
from tests.support.ranks import run_ranks
from tests.support.scripts import run_script

CASES = 2
TRAIN = """
    ours train --preset nnunet --epochs 1 --workers 0 --augment none --device cpu --precision fp32
"""
PRIMUS = """
    --network vit --decoder primus --stem primus-v2 --patch 8 --embed-dim 396 --depth 12 --heads 6 --mlp swiglu
    --mlp-ratio 2.6666666666666665 --attention-norm --positions learned+rope --layer-scale 0.1 --tile 24 24 16
    --spacing 1,1,2 --iterations 1 --lr 0.001 --val-overlap 0 --seqpar 2
"""
CHANGES = [  # spacings before and after, and the shape: all at once, slices apart before or after, two longest axes
    ((1, 1, 1), (1.3, 0.8, 1.1), (8, 14, 11)), ((4, 1, 1), (1.1, 1.2, 0.8), (30, 9, 14)),
    ((1, 1, 1), (1, 1, 4.0), (9, 10, 3)), ((1, 4, 4), (1, 2, 2), (9, 20, 20)),
]  # fmt: skip
TRAINERS = {"stem": "nnUNet_PrimusV2S_Trainer"}
PARTS = {PLAIN: ("begin", "continue"), REGIONS: ("whole",)}
NETWORKS = {PLAIN: ("nnunet-plain", "24 24 16", "1,1,2"), REGIONS: ("nnunet-resenc", "24 24 24", "source")}


@pytest.fixture(scope="module", params=[PLAIN, REGIONS])
def trained(request, tmp_path_factory) -> tuple[Path, str, Path]:
    """A folder, the name of a data set in it, and the results of nnU-Net's training on it.

    Then it trains ten iterations on fold 1.
    """
    root, name = tmp_path_factory.mktemp("nnunet"), request.param
    losses = [["losses", name, "nnUNetTrainer", root / "alone.json", part] for part in PARTS[name]]
    acts(root, ["train", name], *losses)
    (results,) = (root / "nnUNet_results" / name).iterdir()
    return root, name, results


def acts(root: Path, *lines: list[object], ranks: int = 1) -> None:
    """Does several things in a forked process, or on ranks as of torchrun: what nnU-Net does, or seqpar, not both."""
    import_libraries()
    root.mkdir(exist_ok=True)
    words = [str(word) for line in lines for word in ("+", *line)]
    code = f"from tests.nnunet.real_nnunet import act_all, Path\nact_all(Path({str(root)!r}), {words[1:]!r})"
    run_script(ranks, code, root, timeout=1800)


def refuse_different(ours: Path, theirs: Path) -> None:
    """Fails where label maps differ in more than 1 of 10,000 voxels, or none of them shows anything."""
    names, shown = sorted(path.name for path in theirs.glob("*.nii.gz")), 0
    assert len(names) == CASES
    for name in names:
        got, want = (np.asarray(nibabel.load(folder / name).dataobj) for folder in (ours, theirs))
        assert got.shape == want.shape and np.count_nonzero(got != want) <= want.size / 10_000, name
        shown += len(np.unique(want)) > 1
    assert shown, "a training of a few steps, whose batches nnU-Net draws otherwise each time, has learned nothing"


def back(root: Path, run: str) -> Path:
    """Returns the folder in which a run is handed back, whose name says trainer and plans."""
    return root / f"{TRAINERS.get(run, 'nnUNetTrainer')}__{run}Plans__3d_fullres"


@pytest.fixture(scope="module")
def answers(trained) -> dict[str, tuple[Path, Path]]:
    """The label maps of runs by seqpar and, from what it hands back, by nnU-Net.

    "follow" has the weights of nnU-Net's training, "own" was trained here, "stem" too, on two ranks. "back" is what was
    handed back of that, "again" has its weights, and "half" is nnU-Net's training with half-precision sums.
    """
    root, name, results = trained
    images = root / "images"
    images.mkdir()
    for path in (root / "nnUNet_raw" / name / "imagesTr").glob("case_00[01]_*"):
        shutil.copy(path, images)
    network, tile, spacing = NETWORKS[name]
    learns = f"--network {network} --tile {tile} --spacing {spacing} --features 6 --lr 0.03 --iterations 12"
    follows = f"--weights {results}/fold_0/checkpoint_final.pth --lr 1e-30 --iterations 1"
    runs = {"follow": follows, "own": learns} | ({"stem": PRIMUS} if name == PLAIN else {})
    lines, theirs, same = list[list[object]](), list[list[object]](), {run: run for run in (*runs, "half")}

    def train(run: str, flags: str) -> list[object]:
        data = ["--data", root / "nnUNet_raw" / name, "--cache", root / "cache", "--out", root / run]
        return [*TRAIN.split(), *data, *flags.split()]

    lines = [train(run, flags) for run, flags in runs.items()]
    if name == PLAIN:
        acts(root, lines.pop(), ranks=2)
    lines += [["ours", "export", root / run, back(root, run)] for run in runs]
    if name == PLAIN:
        same |= {"again": "stem", "back": "stem"}
        weights = back(root, "stem") / "fold_0" / "checkpoint_final.pth"
        lines.append(train("again", f"--weights {weights} --lr 1e-30 --iterations 1 --val-overlap 0"))
    for run in same:
        model, sums = (results, ["-f", 0, "--sums", "half"]) if run == "half" else (root / run, [])
        model = back(root, "stem") if run == "back" else model
        lines.append(["ours", "predict", model, "-i", images, "-o", root / f"ours-{run}", "--device", "cpu", *sums])
    for run in (*runs, "half"):
        model = results if run == "half" else back(root, run)
        theirs.append(["predict", model, images, root / f"theirs-{run}", "half" if run == "half" else "float"])
    acts(root, *lines)
    acts(root, *theirs)
    return {run: (root / f"ours-{run}", root / f"theirs-{their}") for run, their in same.items()}


def test_nnunet_predicts_from_what_is_handed_back_as_seqpar_does(answers) -> None:
    assert {"follow", "own", "half"} <= answers.keys()
    for ours, theirs in answers.values():
        refuse_different(ours, theirs)


def test_the_plans_of_what_is_handed_back_have_the_median_sizes_that_nnunet_found(trained, answers) -> None:
    root, _, results = trained
    places = ("original_median_shape_after_transp", 0), ("original_median_spacing_after_transp", 1e-5)
    want, got = (json.loads((folder / "plans.json").read_text()) for folder in (results, back(root, "follow")))
    for name, off in places:
        assert got[name] == pytest.approx(want[name], abs=off), name
    want, got = (plans["configurations"]["3d_fullres"]["median_image_size_in_voxels"] for plans in (want, got))
    assert got == pytest.approx(want, abs=1), "nnU-Net resamples the median size, and not each"


def test_unchanged_weights_validate_as_nnunet_did(trained, answers) -> None:
    root, _, results = trained
    refuse_different(root / "follow" / "validation", results / "fold_0" / "validation")
    folders = (results / "fold_0", root / "follow")
    want, got = (json.loads((folder / "validation" / "summary.json").read_text()) for folder in folders)
    theirs = [mean["Dice"] for mean in want["mean"].values()]
    assert sorted(mean["Dice"] for mean in got["mean"].values()) == pytest.approx(sorted(theirs), abs=1e-3)


def test_nnunet_trains_on_from_what_is_handed_back(trained, answers) -> None:
    root, name, _ = trained
    runs = answers.keys() - {"half", "again", "back"}
    acts(root, *(["on", name, back(root, run), root / f"on-{run}.json"] for run in runs))
    for run in runs:
        want = load_torch(back(root, run) / "fold_0" / "checkpoint_final.pth")["network_weights"]
        begun = load_torch(root / f"on-{run}.pth")
        kept = [key for key in begun if ".seg_layers." not in key]  # these nnU-Net begins afresh
        assert len(kept) > 20 and all(torch.equal(begun[key], want[key]) for key in kept), run
        losses = json.loads((root / f"on-{run}.json").read_text())["losses"]
        assert len(losses) == 5 and np.isfinite(losses).all(), run


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
    """On one data set -num_gpus begins, with gloo instead of NCCL, and torchrun continues with --c."""
    root, name, _ = trained
    monkeypatch.setenv("nnUNet_extTrainer", str(Path(nnunet_trainer.__file__).parent))
    line: list[object] = [name, "nnUNetTrainerSeqPar", root / "boxes.json"]
    if "begin" in PARTS[name]:
        acts(root, ["num_gpus", *line])
        assert len(json.loads((root / "boxes.json").read_text())["losses"]) == 5
    acts(root, ["losses", *line, PARTS[name][-1]], ranks=2)
    alone, boxes = (json.loads((root / f"{file}.json").read_text()) for file in ("alone", "boxes"))
    assert len(alone["losses"]) == 10 and boxes["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    assert Path(boxes["folder"]).parent.name.startswith("nnUNetTrainerSeqPar__")
    want, got = (load_torch(Path(run["folder"]) / "checkpoint_final.pth") for run in (alone, boxes))
    assert got["trainer_name"] == "nnUNetTrainer" and got["current_epoch"] == 2
    assert got["network_weights"].keys() == want["network_weights"].keys()
    for key, tensor in want["network_weights"].items():
        assert (got["network_weights"][key] - tensor).abs().max() < 1e-3, key
    scores = [json.loads((Path(run["folder"]) / "validation" / "summary.json").read_text()) for run in (alone, boxes)]
    want, got = (score["foreground_mean"]["Dice"] for score in scores)
    assert got == pytest.approx(want, abs=1e-3)


def on_ranks(mesh: Mesh, state: State, image: Tensor, want: Tensor, gradients: State) -> dict[str, float]:
    """Returns how far logits and gradients, of the sum of their squares, are from those wanted; of each tensor."""
    net = load_primus(state, image.shape[2:], num_heads=4, group=mesh.seq, mode="gather").train()
    logits = net(net.layout.cut(image, mesh.seq.index))
    logits.square().sum().backward()
    net.load_state_dict({k: all_reduce(p.grad, mesh.seq) / mesh.seq.size for k, p in net.named_parameters()}, False)
    own = export_primus(net)
    far = {name: float((own[name] - grad).abs().max() / max(1, grad.abs().max())) for name, grad in gradients.items()}
    return far | {"logits": float((logits.detach() - want).abs().max())}


@pytest.mark.parametrize(
    ("version", "worlds"), [("Primus", (1, 2, 3, 4)), ("PrimusV2", (1, 2, 3, 4)), ("PrimusV3", (2,))]
)  # the last one's stem is wide
def test_primus_computes_here_what_its_package_computes(version, worlds) -> None:
    sides = (16, 8, 24)
    net = primus(version, sides)
    image = torch.randn(2, 2, *sides, dtype=torch.float64)
    want = net(image)
    want.square().sum().backward()
    state, gradients = net.state_dict(), {name: p.grad for name, p in net.named_parameters()}
    for world in worlds:
        for far in run_ranks(world, on_ranks, state, image, want.detach(), gradients, timeout=600):
            assert far.keys() == gradients.keys() | {"logits"}
            assert max(far.values()) <= 1e-12, max(far, key=lambda name: far[name])
    back = export_primus(load_primus(state, sides, num_heads=4))
    net.load_state_dict(back, strict=True)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name != "mask_token")
