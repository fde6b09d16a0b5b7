"""Networks that nnU-Net trained compute here what they compute there, and go back as they came."""

import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.models.build import build_network
from seqpar.parallel.mesh import Group
from seqpar.settings.presets import PRESETS
from seqpar.weights.monai_weights import load_monai
from seqpar.weights.nnunet_results import CHECKPOINT, fold_files, read_checkpoint
from seqpar.weights.nnunet_settings import settings_of, with_plans
from seqpar.weights.nnunet_weights import export_nnunet, load_nnunet, nnunet_names, trained_state
from seqpar.weights.weight_files import load_torch, read_weights
from tests.support.foreign_weights import HEADS, TILE, tiny_unetr
from tests.support.nnunet_networks import (
    CHANNELS,
    DATASET,
    KINDS,
    PATCH,
    Reference,
    configuration,
    old_configuration,
    plans_of,
    reference,
    write_results,
)
from tests.support.ranks import relative

GOLDEN = Path(__file__).parents[1] / "golden" / "nnunet" / "model"


def image(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, CHANNELS, *PATCH, generator=torch.Generator().manual_seed(5), dtype=dtype)


def gradients(levels: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Returns the gradients of a sum over all levels' logits, each voxel with a weight of its own."""
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)).sum() for x in levels)
    return list(torch.autograd.grad(total, inputs))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plans", [configuration, old_configuration], ids=["plans", "old plans"])
def test_each_network_gives_the_outputs_and_gradients_of_plain_modules(tmp_path: Path, kind: str, plans: Any) -> None:
    theirs = reference(kind)
    folder = write_results(tmp_path / "model", [theirs], plans_of(plans(kind)), "3d_lowres")
    ours = load_nnunet(folder, deep_supervision=True).train()
    x, y = image().requires_grad_(), image().requires_grad_()
    got, want = ours(x), theirs(y)[:-1]  # the coarsest level has weight 0 in training, and does not run here
    assert len(got) == len(want) == 2
    assert all(((a - b).abs().max() / b.abs().max()) < 1e-12 for a, b in zip(got, want))
    learned = {name: p for name, p in theirs.named_parameters() if "seg_layers.0" not in name}
    own = dict(ours.named_parameters())
    names = {their: f"unet.{our}" for our, their in nnunet_names(ours.unet).items()}
    assert set(learned) == {their for their, our in names.items() if own[our].requires_grad}
    want_grads = gradients(want, [y, *learned.values()])
    got_grads = gradients(got, [x, *(own[names[name]] for name in learned)])
    largest = max(float(grad.abs().max()) for grad in want_grads)
    for name, a, b in zip(["image", *learned], got_grads, want_grads):
        before_norm = name.endswith("conv.bias")  # no gradient but rounding: compared absolutely
        assert float((a - b).abs().max()) < 1e-12 * (largest if before_norm else float(b.abs().max())), name


@pytest.mark.parametrize("kind", KINDS)
def test_weights_go_back_as_the_package_loads_them_strictly(tmp_path: Path, kind: str) -> None:
    theirs = reference(kind)
    folder = write_results(tmp_path / "model", [theirs, reference(kind, 1)], plans_of(configuration(kind)))
    state = export_nnunet(load_nnunet(folder))
    assert state.keys() == theirs.state_dict().keys() and len(state) > len(dict(theirs.named_parameters()))
    other = reference(kind, 2)
    other.load_state_dict(state, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(other(image()), theirs(image())))
    second = load_nnunet(folder, fold=1).state_dict()
    alone = load_nnunet(folder / "fold_1" / "checkpoint_final.pth").state_dict()
    assert all(torch.equal(second[name], tensor) for name, tensor in alone.items())
    assert not torch.equal(second["unet.cells.up0.conv.weight"], state["decoder.transpconvs.2.weight"])
    with pytest.raises(ValueError, match="U-Net, not of a SegmentationNet"):
        export_nnunet(load_monai(tiny_unetr(), TILE, HEADS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forward", [None, (0, 1, 2), (1, 0, 2), (1, 2, 0)], ids=str)
def test_kernels_of_a_run_are_turned_back_to_nnunets_axes(
    tmp_path: Path, kind: str, forward: tuple[int, ...] | None
) -> None:
    """A run's kernels are W D H, also where they and the strides differ from direction to direction."""
    theirs = reference(kind)
    plans = plans_of(configuration(kind), transpose_forward=list(forward or (0, 1, 2)))
    results = read_checkpoint(write_results(tmp_path / "model", [theirs], plans) / "fold_0" / "checkpoint_final.pth")
    config = replace(PRESETS["nnunet"](), **settings_of(results.plan, "plans"))
    net = build_network(config, CHANNELS, len(DATASET["labels"]), Group("seq")).double()
    net.load_state_dict(trained_state(results))
    state = export_nnunet(net, forward)
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in theirs.state_dict().items())
    assert all(tensor.is_contiguous() for tensor in state.values())
    alone = export_nnunet(net.unet, forward or (0, 1, 2))
    assert all(torch.equal(tensor, state[name]) for name, tensor in alone.items())


def test_the_fold_of_a_checkpoint_is_held_out_of_its_own_data_set(tmp_path: Path) -> None:
    nets = [reference("PlainConvUNet")] * 3
    weights = write_results(tmp_path / "model", nets, plans_of(configuration("PlainConvUNet"))) / "fold_2"
    config = replace(PRESETS["nnunet"](), weights=str(weights / "checkpoint_final.pth"))
    for data, fold in (("raw/Dataset001_Small/", "2"), ("1", "2"), ("raw/Dataset002_Small", "0"), ("11", "0")):
        assert with_plans(replace(config, data=data), set())[0].fold == fold, data
    assert with_plans(replace(config, data="1", fold="1"), {"fold"})[0].fold == "1"


def test_axes_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    plans = plans_of(configuration("PlainConvUNet"))
    net = load_nnunet(write_results(tmp_path / "model", [reference("PlainConvUNet")], plans))
    with pytest.raises(ValueError, match="in nnU-Net's axes already: remove it"):
        export_nnunet(net, (0, 1, 2))
    with pytest.raises(ValueError, match=r"transpose_forward \(0, 1, 1\): the axes 0, 1 and 2"):
        export_nnunet(net.unet, (0, 1, 1))


def test_what_the_package_itself_trained_loads_and_goes_back_with_its_keys() -> None:
    arguments = json.loads((GOLDEN / "plans.json").read_text())["configurations"]["3d_fullres"]["architecture"]
    for fold, path in enumerate(fold_files(GOLDEN)):
        trained = load_torch(path)["network_weights"]
        theirs = Reference(CHANNELS, 3, arguments["arch_kwargs"])
        theirs.load_state_dict(trained, strict=True)
        ours = load_nnunet(GOLDEN, fold).eval().double()
        x = torch.randn(1, CHANNELS, 8, 24, 24, dtype=torch.float64)
        want = theirs.double()(x)[0]
        assert relative(ours(x).detach(), want.detach()) < 1e-12
        back = export_nnunet(load_nnunet(GOLDEN, fold))
        assert all(torch.equal(back[name], tensor) for name, tensor in trained.items()) and len(back) == len(trained)


class Planted:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple:
        return (os.system, ("touch ran",))


def test_nothing_of_a_checkpoint_runs_and_numpys_scalars_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net = reference("PlainConvUNet")
    folder = write_results(tmp_path / "planted", [net], plans_of(configuration("PlainConvUNet")), logging=Planted())
    with pytest.raises(ValueError, match="checkpoint_final.pth: it holds more than tensors"):
        load_nnunet(folder)
    assert not Path("ran").exists()
    folder = write_results(tmp_path / "model", [net], plans_of(configuration("PlainConvUNet")))
    path = folder / "fold_0" / "checkpoint_final.pth"
    with pytest.raises(Exception, match="scalar"):  # torch itself takes no scalars of numpy's
        torch.load(path, weights_only=True)
    assert read_weights(path).keys() == net.state_dict().keys()
    assert b"numpy._core" in rewritten(path, b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert read_weights(path).keys() == net.state_dict().keys()


def rewritten(path: Path, old: bytes, new: bytes) -> bytes:
    """Replaces bytes of a checkpoint's pickle, as another numpy would have written it; returns what it was."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (pickled,) = (name for name in members if name.endswith("data.pkl"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content.replace(old, new) if name == pickled else content)
    return members[pickled]


def change_architecture(**changed: Any) -> dict[str, Any]:
    own = configuration("PlainConvUNet")
    kwargs = {**own["architecture"]["arch_kwargs"], **changed}
    return {**own, "architecture": {**own["architecture"], "arch_kwargs": kwargs}}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cascade": ({**configuration("PlainConvUNet"), "previous_stage": "3d_lowres"}, "second stage of a cascade"),
    "2d": ({**configuration("PlainConvUNet"), "patch_size": [8, 8]}, "is 2d"),
    "dropout": (change_architecture(dropout_op="torch.nn.Dropout3d"), "has dropout_op torch.nn.Dropout3d"),
    "squeeze-excite": (change_architecture(squeeze_excitation=True), "has squeeze_excitation"),
    "activation first": (change_architecture(nonlin_first=True), "PlainConvUNet has nonlin_first True, which is not"),
    "unknown": (change_architecture(new_in_their_next_version=3), "has new_in_their_next_version 3"),
    "blocks": (change_architecture(n_blocks_per_stage=[1, 3, 4, 6]), "has n_blocks_per_stage"),
    "running statistics": (
        change_architecture(norm_op_kwargs={"eps": 1e-5, "affine": True, "track_running_stats": True}),
        "InstanceNorm3d has track_running_stats True",
    ),
    "2d convolutions": (change_architecture(conv_op="torch.nn.modules.conv.Conv2d"), "use Conv3d"),
    "normalisation": ({**configuration("PlainConvUNet"), "normalization_schemes": ["Own", "Own"]}, "schemes is Own"),
    "resampling": ({**configuration("PlainConvUNet"), "resampling_fn_data": "own"}, "resampling_fn is own"),
    "spline": (
        {**configuration("PlainConvUNet"), "resampling_fn_data_kwargs": {"order": 9}},
        "fn_data is 9; supported",
    ),
    "part of a spline": (
        {**configuration("PlainConvUNet"), "resampling_fn_data_kwargs": {"order": 2.5}},
        "resampling_fn_data_kwargs is",
    ),
    "patch": ({**configuration("PlainConvUNet"), "patch_size": [4, 8, 13]}, "4x8x13 voxels does not fit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, name: str) -> None:
    own, message = REFUSED[name]
    folder = write_results(tmp_path / "model", [reference("PlainConvUNet")], plans_of(own))
    with pytest.raises(ValueError, match=message) as error:
        load_nnunet(folder)
    assert "plans.json" in str(error.value)


TRAINERS = """
    nnUNetTrainer nnUNetTrainer_250epochs_NoMirroring nnUNetTrainerDA5 nnUNetTrainerDA5ord0 nnUNetTrainerDA5Segord0
    nnUNetTrainerSeqPar
"""
OF_TOTALSEGMENTATOR = """
    nnUNetTrainer nnUNetTrainerNoMirroring nnUNetTrainer_4000epochs_NoMirroring nnUNetTrainer_2000epochs_NoMirroring
    nnUNetTrainer_DASegOrd0 nnUNetTrainer_DASegOrd0_NoMirroring
"""


def test_a_trainer_is_taken_whatever_its_name_if_all_tensors_fit(tmp_path: Path) -> None:
    net, plans = reference("PlainConvUNet"), plans_of(configuration("PlainConvUNet"))
    folder = write_results(tmp_path / "own", [net], plans, trainer_name="nnUNetTrainerOfMine")
    results = read_checkpoint(folder / "fold_0" / "checkpoint_final.pth")
    assert "trained by nnUNetTrainerOfMine, which is not one of nnU-Net's own" in results.trainer_line
    assert torch.equal(load_nnunet(folder)(image()), net(image())[0])
    with pytest.raises(ValueError, match="was trained by nnUNetTrainerOfMine.*--trainer-unknown is refuse"):
        results.refuse_unknown_trainers()
    other = [reference("ResidualEncoderUNet")]
    folder = write_results(tmp_path / "other", other, plans, trainer_name="nnUNetTrainerUMambaBot")
    with pytest.raises(ValueError, match="by nnUNetTrainerUMambaBot, which builds another network than the plan's"):
        load_nnunet(folder)
    (fold,) = results.folds
    for trainer in (*TRAINERS.split(), *OF_TOTALSEGMENTATOR.split()):
        known = replace(results, folds=(replace(fold, trainer=trainer),))
        known.refuse_unknown_trainers()
        assert known.trainer_line == "", trainer


def test_networks_copies_and_folds_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    net, plans = reference("PlainConvUNet"), plans_of(configuration("PlainConvUNet"))
    state = dict(net.state_dict())
    state["decoder.encoder.stages.0.0.convs.0.conv.weight"] = state["encoder.stages.0.0.convs.0.conv.weight"] + 1
    torn = write_results(tmp_path / "torn", [net], plans, network_weights=state)
    with pytest.raises(ValueError, match="other numbers under second names"):
        load_nnunet(torn)
    other = write_results(tmp_path / "other", [reference("ResidualEncoderUNet")], plans)
    with pytest.raises(ValueError, match="not weights of the plan's PlainConvUNet"):
        load_nnunet(other)
    with pytest.raises(ValueError, match=r"has no fold_3/checkpoint_final.pth; folds with that file: 0"):
        load_nnunet(torn, fold=3)
    with pytest.raises(ValueError, match="holds no fold_0/checkpoint_best.pth"):
        fold_files(torn, checkpoint="checkpoint_best.pth")
    (torn / "fold_0").rename(torn / "fold_7")
    for copy in ("fold_7_old", "fold_all"):  # a copy that somebody kept would count twice
        (torn / copy).mkdir()
        (torn / copy / CHECKPOINT).touch()
    assert fold_files(torn) == [torn / "fold_7" / CHECKPOINT]
