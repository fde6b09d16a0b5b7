"""Runs by nnU-Net's recipe: its plans, its trained weights, its loss, its steps, its tiles."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.cli import export, plan, prepare
from seqpar.cluster.devices import DEVICES, GB
from seqpar.data.files import write_json
from seqpar.data.formats.recognise import read_dataset
from seqpar.data.geometry import to_canonical
from seqpar.data.preparation.cache_index import cache_folder, is_current
from seqpar.data.preparation.recipe import PrepareSettings
from seqpar.data.volumes import read_volume
from seqpar.models.build import build_loss, build_network
from seqpar.models.unet_families import format_stages, parse_stages
from seqpar.optimization.optimizers import make_optimizer
from seqpar.optimization.schedules import learning_rate
from seqpar.parallel.launcher import read_launcher
from seqpar.parallel.mesh import Group
from seqpar.planner import fit
from seqpar.planner.needs import RunToPlan, plan_complete_config
from seqpar.report.images import FoundImage, grey_images
from seqpar.settings.data_settings import prepare_settings
from seqpar.settings.presets import PRESETS
from seqpar.training.run_request import read_request
from seqpar.weights import nnssl
from seqpar.weights.nnunet_weights import load_nnunet
from seqpar.weights.weight_files import load_torch, read_weights
from tests.support import references
from tests.support.configs import trainer_of
from tests.support.folders import nnunet
from tests.support.nnunet_networks import DATASET, KINDS, configuration, plans_of, reference, write_results
from tests.support.training_runs import farthest, losses, scores, status, trained

SHORT = """
    --preset nnunet --iterations 2 --val-overlap 0 --workers 0 --augment none --device cpu --precision fp64
"""
PLAIN_STAGES = "313:111:4:2:2 333:212:6:1:1 333:222:6:2:2 333:212:6:1"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A data set, and results folders of both networks whose plans transpose."""
    root = tmp_path_factory.mktemp("nnunet")
    nnunet(root / "Dataset001_Tiny", cases=5, channels=("CT", "T1"))
    for kind in ("PlainConvUNet", "ResidualEncoderUNet"):
        own = {**configuration(kind), "batch_dice": True, "spacing": [1.9, 1.2, 1.1]}
        write_results(root / kind, [reference(kind).float()], plans_of(own, transpose_forward=[1, 0, 2]))
    return root


def flags_of(place: Path, *more: str) -> list[str]:
    epochs = [] if "--curriculum" in more else ["--epochs", "1"]
    return [*SHORT.split(), *epochs, "--data", str(place / "Dataset001_Tiny"), "--cache", str(place / "cache"), *more]


def file_axes(volume: Tensor) -> Tensor:
    """Returns nnU-Net's axes, y z x, of a volume ``b c x y z`` of a file."""
    return volume.permute(0, 1, 3, 4, 2)


@pytest.mark.parametrize("kind", ["PlainConvUNet", "ResidualEncoderUNet"])
def test_training_goes_on_from_weights_that_nnunet_trained(place, tmp_path, kind) -> None:
    """The network follows from the checkpoint; its axes are turned to those of a file."""
    weights = place / kind / "fold_0" / "checkpoint_final.pth"
    more = ["--weights", str(weights), "--lr", "1e-30", "--iterations", "1"]
    trained(1, flags_of(place, *more), tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert config["network"] == {"P": "nnunet-plain", "R": "nnunet-resenc"}[kind[0]]
    assert (config["tile"], config["batch"], config["batch_dice"]) == ([16, 4, 8], 2, True)
    assert config["spacing"] == "1.1,1.9,1.2"
    state = read_weights(tmp_path / "run" / "model.safetensors")
    own = {name: config[name] for name in ("network", "stages")}
    net = build_network(replace(PRESETS["nnunet"](), **own, tile=(16, 4, 8)), 2, 2, Group("seq"))
    heads = {name for name in state if "classes" in name}
    net.load_state_dict({**state, **{name: tensor for name, tensor in net.state_dict().items() if name in heads}})
    theirs = load_nnunet(place / kind)
    for level in ("cells.up0", "cells.decoder0_0"):  # all but the heads, which are for other classes
        ours, own = (dict(n.unet.named_modules())[level] for n in (net, theirs))
        assert torch.allclose(ours.conv.weight.float().permute(0, 1, 3, 4, 2), own.conv.weight, atol=1e-6)
    image = torch.randn(1, 2, 16, 4, 8)
    got, want = features(net.float().eval(), image), features(theirs.eval(), file_axes(image))
    assert float((file_axes(got) - want).abs().max() / want.abs().max()) < 1e-5


def test_weights_by_a_trainer_of_another_name_are_taken_with_a_line_or_refused(place, tmp_path) -> None:
    plans = json.loads((place / "PlainConvUNet" / "plans.json").read_text())
    nets = [reference("PlainConvUNet").float()]
    folder = write_results(tmp_path / "own", nets, plans, trainer_name="nnUNetTrainerOfMine")
    weights = ["--weights", str(folder / "fold_0" / "checkpoint_final.pth")]
    trained(1, flags_of(place, *weights, "--iterations", "1"), tmp_path / "run")
    assert "by nnUNetTrainerOfMine, which is not one of its own" in (tmp_path / "run" / "train.log").read_text()
    with pytest.raises(ValueError, match="nnUNetTrainerOfMine.*--trainer-unknown is refuse"):
        read_request(flags_of(place, *weights, "--trainer-unknown", "refuse"), read_launcher({}))


def test_a_primus_that_nnunet_trained_brings_its_network_and_how_its_plans_prepare(
    place, tmp_path, monkeypatch, capfd
) -> None:
    """And goes back as it came, by plans that transpose."""
    monkeypatch.setitem(nnssl.SIZES, "PrimusXS", (72, 2, 4))
    state = references.draw(references.primus_shapes(2, 2, 8, (1, 2, 3), 72, 2, [24, 8]), dtype=torch.float32)
    own = {**configuration("PlainConvUNet"), "patch_size": [8, 16, 24], "spacing": [1.9, 1.2, 1.1]}
    plans = plans_of(own, transpose_forward=[1, 0, 2], dataset_name="Dataset001_Tiny")
    file, run = tmp_path / "checkpoint_final.pth", tmp_path / "run"
    arguments = {"plans": plans, "configuration": "3d_fullres", "dataset_json": DATASET, "fold": 2}
    torch.save({"network_weights": state, "trainer_name": "nnUNet_Primus_M_Trainer", "init_args": arguments,
                "inference_allowed_mirroring_axes": (0, 2)}, file)  # fmt: skip
    said = trained(1, flags_of(place, "--weights", str(file), "--lr", "1e-30", "--iterations", "1"), run).said()
    config = json.loads((run / "config.json").read_text())["config"]
    assert [config[name] for name in ("network", "decoder", "embed_dim", "heads")] == ["vit", "primus", 72, 4]
    assert (config["tile"], config["spacing"], config["batch"]) == ([24, 8, 16], "1.1,1.9,1.2", 2)
    assert (config["val_mirror"], config["fold"]) == ("WD", "2") and "as nnU-Net's plan says: in the file's" in said
    assert export.act([str(run), str(tmp_path / "back")]) == 0
    back = load_torch(tmp_path / "back" / "fold_2" / "checkpoint_final.pth")
    assert back["trainer_name"] == "nnUNet_PrimusXS_Trainer" and back["inference_allowed_mirroring_axes"] == (0, 2)
    assert back["init_args"]["plans"]["transpose_forward"] == [1, 0, 2]
    assert back["init_args"]["plans"]["configurations"]["3d_fullres"]["patch_size"] == [8, 16, 24]
    for name in state.keys() - {"mask_token"}:
        assert torch.allclose(back["network_weights"][name], state[name], atol=1e-6), name
    capfd.readouterr()
    record = json.loads((run / "config.json").read_text())
    write_json(run / "config.json", {**record, "config": {**record["config"], "val_mirror": "W"}})
    assert export.act([str(run), str(tmp_path / "edited")]) == 0
    assert "differs from that of the last checkpoint: --val-mirror WD -> W." in capfd.readouterr().err
    line = flags_of(place, "--weights", str(file), "--prepare", "own", "--dry-run")
    assert prepare_settings(read_request(line, read_launcher({})).config).plan is None
    torch.save({**load_torch(file), "trainer_name": "nnUNetTrainerOfMine"}, file)
    assert read_request(line, read_launcher({})).config.fold == "2"
    with pytest.raises(ValueError, match="was trained by nnUNetTrainerOfMine.*--trainer-unknown is refuse"):
        read_request([*line, "--trainer-unknown", "refuse"], read_launcher({}))


def features(net, image: Tensor) -> Tensor:
    """Returns what the head of the finest level takes."""
    cells = net.unet
    with torch.no_grad():
        ((x, _),) = cells.run(image, None, [cells.names.index("classes0") - 1])
    return x


def test_losses_by_its_recipe_are_the_same_on_two_ranks_and_plans_name_the_network(place, tmp_path) -> None:
    plans = ["--plans", str(place / "PlainConvUNet" / "plans.json"), "--lr", "0.001"]
    trained(1, flags_of(place, *plans), tmp_path / "alone")
    trained(2, flags_of(place, *plans, "--seqpar", "2"), tmp_path / "two")
    assert farthest(losses(tmp_path / "two"), losses(tmp_path / "alone")) <= 1e-9
    stages = json.loads((tmp_path / "alone" / "config.json").read_text())["config"]["stages"]
    assert stages == PLAIN_STAGES


def test_lessons_of_a_plans_network_run_to_their_end_on_two_ranks_as_on_one(place, tmp_path) -> None:
    """The stages are the plan's for every tile; validation and prediction take the last lesson's."""
    line = ["--plans", str(place / "PlainConvUNet" / "plans.json"), "--curriculum", "16x4x8:1:2,whole:1:1"]
    said = trained(1, flags_of(place, *line), tmp_path / "alone").said()
    trained(2, flags_of(place, *line, "--seqpar", "2"), tmp_path / "two")
    assert farthest(losses(tmp_path / "two"), losses(tmp_path / "alone")) <= 1e-9
    assert "lesson 1 of 2: tile 16x4x8" in said and "lesson 2 of 2: tile" in said
    config = json.loads((tmp_path / "alone" / "config.json").read_text())["config"]
    assert config["stages"] == PLAIN_STAGES and config["curriculum"].startswith("16x4x8:1:2,whole=")
    assert status(tmp_path / "alone")["state"] == "finished" and status(tmp_path / "alone")["step"] == 4
    assert scores(tmp_path / "two") == scores(tmp_path / "alone") != []


@pytest.mark.parametrize("more", [(), ("--mode", "auto")])
@pytest.mark.parametrize(("batch", "world"), [(1, 2), (2, 2), (2, 4), (3, 2)])
def test_ranks_take_boxes_or_samples_and_never_the_whole_tile(
    place, batch: int, world: int, more: tuple[str, ...]
) -> None:
    sizes = ["--seqpar", str(world), "--batch", str(batch), "--tile", "16", "16", "32"]
    config = read_request(flags_of(place, "--dry-run", *sizes, *more), read_launcher({})).config
    with torch.device("meta"):
        net = build_network(config, 2, 3, Group("seq", tuple(range(world)), 1), "meta")
    tile = torch.empty(batch, 2, 16, 16, 32, device="meta")
    image, grid = net.image(net.layout.cut(tile, 1), net.layout)
    assert image.numel() * world == tile.numel() and (grid is None) == (batch % world == 0)


def test_flags_win_over_plans_and_contradictions_are_refused(place) -> None:
    plans = ["--plans", str(place / "ResidualEncoderUNet" / "plans.json")]
    launcher = read_launcher({})
    config = read_request(flags_of(place, *plans, "--batch", "1", "--spacing", "source"), launcher).config
    assert (config.network, config.batch, config.spacing, config.tile) == ("nnunet-resenc", 1, "source", (16, 4, 8))
    lower = [*plans[:1], f"{plans[1]}:3d_lowres"]
    assert read_request(flags_of(place, *lower), launcher).config.batch == 3
    for more, message in {
        ("--network", "nnunet-plain"): "--network nnunet-plain: --plans .* has the network nnunet-resenc",
        ("--features", "8"): "--features: --plans .* names the stages",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_request(flags_of(place, *plans, *more), launcher)
    with pytest.raises(ValueError, match="--plans is empty: give it a value or remove it"):
        read_request(["--preset", "debug", "--plans", ""], launcher)


def test_prepare_chooses_between_the_plans_way_and_our_own(place) -> None:
    weights = ["--weights", str(place / "PlainConvUNet" / "fold_0" / "checkpoint_final.pth")]
    launcher = read_launcher({})
    request = read_request(flags_of(place, *weights), launcher)
    settings = prepare_settings(request.config)
    assert settings.plan is not None and settings.plan.schemes == ("CTNormalization", "ZScoreNormalization")
    assert settings.spacing == (1.1, 1.9, 1.2) and request.config.val_mirror == "WD"  # 0 and 2, transposed 1 0 2
    assert "as nnU-Net's plan says: in the file's axes" in request.choices["prepare"][0]
    own = read_request(flags_of(place, *weights, "--prepare", "own"), launcher)
    assert prepare_settings(own.config).plan is None and "prepare" not in own.choices
    for more, message in {
        (*weights, "--normalise", "volume"): "--normalise would do nothing: nnU-Net's plan prepares the data",
        (*weights, "--spacing", "median"): "--spacing median: nnU-Net's plan takes three sizes",
        (*weights, "--prepare", "so"): "--prepare so: choose own or plan",
        ("--prepare", "plan"): "--prepare plan: that needs --plans",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_request(flags_of(place, *more), launcher)


def test_a_ct_that_its_plan_prepared_is_shown_in_hounsfield_units(place, tmp_path, alone) -> None:
    """Its record has neither mean nor deviation; the plan has both, and clips at 15 and 400."""
    line = flags_of(place, "--plans", str(place / "PlainConvUNet" / "plans.json"), "--spacing", "source")
    trainer = trainer_of(read_request(line, read_launcher({})).config, alone, tmp_path)
    dataset = trainer.data.dataset
    for case in dataset.cases.values():
        drawn = trainer.validation._pictured(case, np.asarray(case.label), 0)
        volume, geometry, _ = read_volume(place / "Dataset001_Tiny" / "imagesTr" / f"{case.id}_0000.nii.gz")
        whole = to_canonical(volume, geometry.orientation)[0].clip(15, 400)
        turned = dataset.preparation.canonical_properties(case.properties)
        box = tuple(slice(*ends) for ends in turned.box)
        assert drawn.is_ct and np.allclose(drawn.image, whole[box], atol=1e-3)
        assert not trainer.validation._pictured(case, np.asarray(case.label), 1).is_ct
        _, ranges, is_ct = grey_images(FoundImage(case.image, None, turned), dataset.modalities)
        assert is_ct and 15 <= ranges["CT"][0] < ranges["CT"][1] <= 400


def test_a_pretraining_says_network_and_tile_and_the_data_all_else(place, tmp_path) -> None:
    kind = "ResidualEncoderUNet"
    plan = {
        "architecture_plans": {"arch_class_name": kind, "arch_kwargs": KINDS[kind]}, "pretrain_plan": {},
        "pretrain_num_input_channels": 1, "recommended_downstream_patchsize": [8, 8, 16],
        "key_to_encoder": "encoder.stages", "key_to_stem": "encoder.stem",
    }  # fmt: skip
    file = tmp_path / "checkpoint_final.pth"
    torch.save({"network_weights": reference(kind).state_dict(), "nnssl_adaptation_plan": plan}, file)
    request = read_request(flags_of(place, "--dry-run", "--weights", str(file)), read_launcher({}))
    config = request.config
    assert (config.network, config.tile, config.prepare) == ("nnunet-resenc", (16, 8, 8), "own")
    assert config.stages.startswith("331:111:4:1:2 ") and config.batch == 2
    assert "--tile 16 8 8, as given" in request.choices["auto_tile"][0]


def nnunet_loss(logits: Tensor, label: Tensor, batch_dice: bool) -> Tensor:
    """Cross-entropy and soft Dice without background, as nnU-Net computes them."""
    target = F.one_hot(label, logits.shape[1]).movedim(-1, 1).double()
    p, dims = logits.softmax(1), (0, 2, 3, 4) if batch_dice else (2, 3, 4)
    overlap, sizes = (p * target).sum(dims), p.sum(dims) + target.sum(dims)
    dice = (2 * overlap + 1e-5) / (sizes + 1e-5).clip(1e-8)
    return F.cross_entropy(logits, label) - dice[..., 1:].mean()


@pytest.mark.parametrize("batch_dice", [False, True])
def test_the_loss_is_its_own_plus_one_with_its_weights_of_levels(batch_dice: bool) -> None:
    config = replace(PRESETS["nnunet"](), tile=(16, 16, 16), features=2, batch_dice=batch_dice, stages=
                     "333:111 333:222 333:222 333:211")  # fmt: skip
    net = build_network(config, 1, 3, Group("seq")).double().train()
    image = torch.randn(2, 1, 16, 16, 16, dtype=torch.float64)
    label = torch.randint(3, (2, 16, 16, 16))
    got = net.training_loss(build_loss(config))(net(image), label)
    weights = torch.tensor([1, 0.5, 0.0], dtype=torch.float64)
    weights /= weights.sum()
    want = sum(
        w * nnunet_loss(x, label[:, step // 2 :: step, step // 2 :: step, step // 2 :: step], batch_dice)
        for w, x, step in zip(weights, net(image), (1, 2))
    )
    assert abs(got.item() - want.item() - 1) < 1e-12


def test_steps_decay_every_parameter_and_the_rate_falls_by_epochs() -> None:
    recipe = PRESETS["nnunet"]()
    assert (recipe.clip, recipe.epochs, recipe.iterations, recipe.warmup) == (12.0, 1000, 250, 0)
    assert (recipe.foreground, recipe.foreground_by, recipe.loss, recipe.augment) == (0.33, "count", "dice-ce", "full")
    config = replace(recipe, tile=(16, 16, 16), features=2, epochs=4, iterations=3)
    net = build_network(config, 1, 2, Group("seq"))
    groups = make_optimizer(net, config.optimizer_options).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] == 3e-5 for p in group["params"]}
    assert decayed == {id(p) for p in net.parameters()}
    assert all(group["momentum"] == 0.99 and group["nesterov"] for group in groups)
    rates = [learning_rate(config.schedule_options, step) for step in range(12)]
    assert rates == pytest.approx([0.01 * (1 - step // 3 / 4) ** 0.9 for step in range(12)])
    usual = make_optimizer(net, replace(config, decay_all=False).optimizer_options).param_groups
    assert len({group["weight_decay"] for group in usual if group["params"]}) == 2


def test_stages_with_widths_and_convolutions_are_read_and_built() -> None:
    text = "133:111:4:1:2 333:122:6:2:1 333:222:7:3"
    stages = parse_stages(text)
    assert format_stages(stages) == text and stages.decoder == (2, 1)
    config = replace(PRESETS["nnunet"](), tile=(8, 16, 16), stages=text)
    a = build_network(config, 1, 2, Group("seq")).unet.architecture
    assert (a.features, a.encoder, a.decoder) == ((4, 6, 7), (1, 2, 3), (1, 2))
    for wrong in ("133:111:4 333:122", "133:111:4:1:2 333:122:6:2:1 333:222:7:3:1", "133:111:4:1 333:122:6"):
        with pytest.raises(ValueError, match="features and convolutions are those of every stage"):
            parse_stages(wrong)
    with pytest.raises(ValueError, match="--features 3: --stages names the features"):
        build_network(replace(config, features=3), 1, 2, Group("seq"))


def test_the_tile_follows_from_the_data_unless_plans_say_it(place) -> None:
    launcher = read_launcher({})
    request = read_request(flags_of(place, "--dry-run"), launcher)
    config = request.config
    assert all(side < most + 8 for side, most in zip(config.tile, (14, 12, 10))) and "auto_tile" in request.choices
    planned = read_request(flags_of(place, "--plans", str(place / "PlainConvUNet" / "plans.json")), launcher)
    assert planned.config.tile == (16, 4, 8) and "auto_tile" not in planned.choices


@pytest.mark.started
def test_the_planner_says_how_large_a_cube_some_ranks_train(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "LARGEST", 256)  # fewer to look at
    line = ["--preset", "nnunet", "--features", "4", "--device", "a100", "--memory", "4.7", "--batch", "1"]
    sides = []
    for size in ("1", "2"):
        assert plan.act([*line, "--largest-tile", "--seqpar", size]) == 0
        (row,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("--seqpar")]
        sides.append(int(row.split("--tile ")[1].split(",")[0]))
    assert 32 < sides[0] < sides[1] < 256
    config = replace(PRESETS["nnunet"](), features=4, batch=1)
    device = replace(DEVICES["a100"], memory=4.7 * GB)
    fits = [
        plan_complete_config(RunToPlan(replace(config, tile=(side,) * 3), device, timed=False), 1).fits
        for side in (sides[0], sides[0] + 32)
    ]
    assert fits == [True, False]


def test_prepare_takes_plans_as_training_does_next_to_other_preparations(place, tmp_path, capfd) -> None:
    plans, cache = str(place / "PlainConvUNet" / "plans.json"), tmp_path / "cache"
    line = [str(place / "Dataset001_Tiny"), "--out", str(cache), "--workers", "0"]
    assert prepare.act(line) == prepare.act([*line, "--plans", plans]) == 0
    assert f"--cache {cache} --plans {plans}" in capfd.readouterr().out.splitlines()[-1]
    config = read_request(flags_of(place, "--plans", plans), read_launcher({})).config
    dataset, settings = read_dataset(config.data), prepare_settings(config)
    assert is_current(dataset, cache, PrepareSettings()) and not is_current(dataset, cache, settings)
    assert is_current(dataset, cache_folder(dataset, cache, settings), settings)
    assert prepare.act([*line, "--plans", plans, "--spacing", "2,2,2", "--check"]) == 0
    with pytest.raises(ValueError, match="--crop-to would do nothing: --plans decides it"):
        prepare.act([*line, "--plans", plans, "--crop-to", "4", "4", "4"])
