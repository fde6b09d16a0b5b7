"""Pretrainings of nnssl's: an encoder that is written as one is the same function in nnU-Net; a U-Net's is read."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.cli.export import act as export
from seqpar.data.errors import DataError
from seqpar.data.preparation.recipe import Intensity
from seqpar.models.build import build_network
from seqpar.models.masked_network import MaskedNet
from seqpar.models.segmentation_network import SegmentationNet
from seqpar.parallel.launcher import read_launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.runs.nnunet_export import _trained_name
from seqpar.settings.config import Config
from seqpar.training.run_request import read_request
from seqpar.weights import checkpoint, nnssl
from seqpar.weights.nnunet_settings import network_of
from seqpar.weights.nnunet_weights import export_nnunet
from seqpar.weights.pretrained import ENCODER, load_pretrained
from tests.support import references
from tests.support.nnunet_networks import KINDS, Reference
from tests.support.predictions import RECIPE, make_run
from tests.support.ranks import run_ranks

RES_ENC_L = "333:111:32:1:1 333:222:64:3:1 333:222:128:4:1 333:222:256:6:1 333:222:320:6:1 333:222:320:6"
TINY = Config(
    tile=(24, 16, 8), patch=(8, 8, 8), embed_dim=72, depth=2, heads=4, mlp="swiglu", mlp_ratio=192 / 72,
    positions="learned+rope", attention_norm=True, layer_scale=0.1, decoder="primus", output_bias=False,
    precision="fp64",
)  # fmt: skip
PRETRAINING = Config(**{**vars(TINY), "task": "pretrain"})


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nnU-Net built so small a network too."""
    monkeypatch.setitem(nnssl.SIZES, "PrimusXS", (72, 2, 4))


def drawn(config: Config, channels: int) -> SegmentationNet | MaskedNet:
    net = build_network(config, channels, 3, Group("seq")).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype, generator=generator))
    assert isinstance(net, (SegmentationNet, MaskedNet))
    return net


def as_nnunet_loads_it(path: Path, channels: int, tile: list[int]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the weights of encoder and stem, and what nnU-Net's plans then say, by the keys that it looks up."""
    content = torch.load(path, weights_only=True)
    plan, weights = content["nnssl_adaptation_plan"], content["network_weights"]
    ((_, configuration),) = plan["pretrain_plan"]["configurations"].items()
    architecture = plan["architecture_plans"]
    adaptation = {
        "network_class_name": architecture.pop("arch_class_name"),
        "imports": architecture.pop("arch_kwargs_requiring_import"),
        "patch_size": plan["recommended_downstream_patchsize"],
        "spacing": configuration["spacing"],
    }
    assert plan["pretrain_patch_size"] == configuration["patch_size"] == tile, "positions fit without resizing"
    stem, encoder = (
        {k: v for k, v in weights.items() if k.startswith(plan[f"key_to_{x}"])} for x in ("stem", "encoder")
    )
    assert list(plan["key_to_lpe"].split(".", 1)) == ["eva", "pos_embed"] and plan["key_to_lpe"] in encoder
    if channels > plan["pretrain_num_input_channels"]:
        assert plan["pretrain_num_input_channels"] == 1
        name = plan["keys_to_in_proj"][0] + ".weight"
        stem[name] = stem[name].repeat(1, channels, 1, 1, 1) / channels
    return encoder | stem, adaptation


def test_a_stem_of_convolutions_names_its_version_and_is_no_pretraining(tmp_path: Path) -> None:
    for stem, name in {"primus-v2": "PrimusV2XS", "primus-v3": "PrimusV3XS"}.items():
        net = build_network(replace(TINY, stem=stem), 1, 3, Group("seq"))
        assert nnssl.primus_name(net) == name
        with pytest.raises(ValueError, match=f"a {name} is not written as a pretraining.*name a folder"):
            nnssl.write_pretrained(tmp_path / "mae.pth", net, None, ("zscore",), "CC0")
    published = {name: _trained_name(name) for name in ("PrimusM", "PrimusV2M", "PrimusV3L")}
    assert published == {"PrimusM": "Primus_M", "PrimusV2M": "PrimusV2M", "PrimusV3L": "PrimusV3L"}


@pytest.mark.parametrize("config", [TINY, PRETRAINING])
def test_what_nnunet_loads_is_the_same_function_of_its_images(config: Config, tmp_path: Path) -> None:
    """Here images have their files' axes, W D H; nnU-Net reads H first."""
    file, net = tmp_path / "mae.pth", drawn(config, 1)
    assert nnssl.write_pretrained(file, net, (1.0, 2.0, 3.0), ("zscore",), "CC0") == "PrimusXS"
    weights, adaptation = as_nnunet_loads_it(file, 2, [8, 16, 24])
    assert adaptation == {
        "network_class_name": "PrimusXS",
        "imports": None,
        "patch_size": [8, 16, 24],
        "spacing": [3, 2, 1],
    }
    shapes = references.primus_shapes(2, 3, 8, (1, 2, 3), 72, 2, [32, 16])
    theirs = references.draw(shapes)
    theirs |= weights
    assert weights.keys() == {name for name in shapes if name.startswith(("eva.", "down_projection."))}
    torch.save({"network_weights": theirs}, tmp_path / "whole.pth")
    ours = drawn(TINY, 2)
    load_pretrained(ours, Config(**{**vars(TINY), "weights": str(tmp_path / "whole.pth")}))
    x = torch.randn(1, 2, 8, 16, 24, dtype=torch.float64)
    with torch.no_grad():
        logits = ours(x.transpose(2, 4))
        right = references.primus(theirs, x, 4)
        tokens = ours.encoder(x.mean(1, keepdim=True).expand_as(x).transpose(2, 4))
        assert (logits.transpose(2, 4) - right).abs().max() < 1e-12
        assert (tokens - net.encoder(x.mean(1, keepdim=True).transpose(2, 4))).abs().max() < 1e-12


def test_training_here_takes_it_back(tmp_path: Path) -> None:
    net, file = drawn(PRETRAINING, 1), tmp_path / "mae.pth"
    nnssl.write_pretrained(file, net, None, ("zscore",), "CC0")
    started = drawn(TINY, 1)
    line = load_pretrained(started, Config(**{**vars(TINY), "weights": str(file)}))
    ours, theirs = (each.encoder.state_dict() for each in (started, net))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and "new: decoder (" in line
    wide = Config(**{**vars(TINY), "tile": (32, 16, 16), "weights": str(file)})
    assert "positions resized from 6 tokens to 4x2x2" in load_pretrained(drawn(wide, 1), wide)
    with pytest.raises(DataError, match="is there already"):
        nnssl.write_pretrained(file, net, None, ("zscore",), "CC0")


def test_what_nnunet_does_not_build_is_refused_with_the_flags_that_it_does(tmp_path: Path) -> None:
    for change, words in (
        (
            {"depth": 1},
            r"nnU-Net builds only PrimusS \(--embed-dim 396 --depth 12 --heads 6\), PrimusB .* --preset mae",
        ),
        ({"patch": (4, 4, 4)}, "has patches of 8, not of .*: train with --patch 8"),
        ({"attention_norm": False}, "nnU-Net builds only"),
        ({"mlp": "gelu"}, "Primus has no ungated MLP"),
    ):
        other = drawn(Config(**{**vars(PRETRAINING), **change}), 1)
        with pytest.raises(ValueError, match=words):
            nnssl.write_pretrained(tmp_path / "other.pth", other, None, ("zscore",), "CC0")
    assert not list(tmp_path.iterdir())


def test_a_pretrainings_folder_is_written_from_the_checkpoint_that_is_asked_for(tmp_path: Path, capsys) -> None:
    recipe = replace(RECIPE, spacing=(1.0, 2.0, 3.0))
    run = make_run(tmp_path / "run", recipe, PRETRAINING)
    described, saved = json.dumps({"config": asdict(PRETRAINING)}), {}
    for step, which in enumerate(("best", "latest")):
        net = saved[which] = build_network(replace(PRETRAINING, seed=5 + step), 1, 2, Group("seq"))
        progress, optimizer = checkpoint.Progress(step), torch.optim.SGD(net.parameters(), 0.1)
        checkpoint.save(
            run / "checkpoints", net, optimizer, progress, Group("world"), described, is_best=which == "best"
        )
    for which, net in saved.items():
        file = tmp_path / f"{which}.pth"
        assert export([str(run), str(file), "--checkpoint", which, "--licence", "CC0"]) == 0
        said = capsys.readouterr()
        assert "PrimusXS, licence: CC0" in said.out and f"nnssl -d DATASET -n NAME -pc {file}" in said.out
        assert not said.err
        _, adaptation = as_nnunet_loads_it(file, 1, [8, 16, 24])
        assert adaptation["spacing"] == [3, 2, 1]
        started = drawn(TINY, 1)
        line = load_pretrained(started, Config(**{**vars(TINY), "weights": str(file)}))
        assert "(Primus, pretrained):" in line
        ours, theirs = (each.encoder.state_dict() for each in (started, net))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name].double()) for name in theirs)
    with pytest.raises(DataError, match="is there already"):
        export([str(run), str(tmp_path / "best.pth")])


@pytest.mark.parametrize(
    ("schemes", "stated", "masked", "says"),
    [
        (("zscore", "volume", "none"), ("ZScore", "ZScore", "No"), (True, False, False), ""),
        (("ct", "zscore", "clip"), ("CT", "ZScore", "RescaleTo01"), (False, True, False),
         "warning: this run normalised channels by ct (CTNormalization there), clip (RescaleTo01Normalization there)"),
    ],
)  # fmt: skip
def test_the_plan_states_how_the_run_normalised_and_what_nnunet_does_otherwise_is_said(
    schemes: tuple[str, ...], stated: tuple[str, ...], masked: tuple[bool, ...], says: str, tmp_path: Path, capsys
) -> None:
    recipe = replace(
        RECIPE,
        modalities=tuple("abc"),
        schemes=schemes,
        intensities=tuple(Intensity(-100, 300, 40, 20) if s in ("ct", "clip") else None for s in schemes),
    )
    run = make_run(tmp_path / "run", recipe, PRETRAINING)
    assert export([str(run), str(tmp_path / "mae.pth")]) == 0
    plan = torch.load(tmp_path / "mae.pth", weights_only=True)["nnssl_adaptation_plan"]["pretrain_plan"]
    (configuration,) = plan["configurations"].values()
    assert configuration["normalization_schemes"] == [f"{scheme}Normalization" for scheme in stated]
    assert configuration["use_mask_for_norm"] == list(masked)
    err = capsys.readouterr().err
    assert err.startswith(says) and bool(err) == bool(says)


KIND = "ResidualEncoderUNet"
PLAN: dict[str, Any] = {
    "architecture_plans": {"arch_class_name": KIND, "arch_kwargs": KINDS[KIND],
                           "arch_kwargs_requiring_import": ["conv_op", "norm_op", "nonlin"]},
    "pretrain_plan": {"transpose_forward": [0, 1, 2], "configurations": {"onemmiso": {"spacing": [1, 1, 1]}}},
    "pretrain_num_input_channels": 1, "recommended_downstream_patchsize": [4, 8, 16],
    "key_to_encoder": "encoder.stages", "key_to_stem": "encoder.stem", "key_to_lpe": None,
    "keys_to_in_proj": ["encoder.stem.convs.0.conv", "encoder.stem.convs.0.all_modules.0"],
}  # fmt: skip
UNET = ["--preset", "debug", "--precision", "fp64", "--batch", "1", "--spacing", "1,1,1", "--device", "cpu"]


def write_unet(path: Path, state: dict[str, Tensor], **changed: Any) -> Path:
    """Writes weights as nnssl does when training ends, or as its published files are: without most entries."""
    torch.save({"network_weights": state, "citations": [], "nnssl_adaptation_plan": {**PLAN, **changed}}, path)
    return path


def pretrained_unet(seed: int = 0) -> Reference:
    torch.manual_seed(seed)
    net = Reference(1, 1, KINDS[KIND]).double()
    with torch.no_grad():
        for p in net.parameters():
            p += 0.2 * torch.randn_like(p)
    return net


def started_unet(mesh: Mesh, config: Config, image: Tensor) -> tuple[str, Tensor, dict[str, Tensor]]:
    """Returns the line on what was loaded, the logits of this rank's box, and nnU-Net's names of all weights."""
    net = build_network(config, 2, 3, mesh.seq).double().eval()
    line = load_pretrained(net, config)
    with torch.no_grad():
        return line, net(net.layout.cut(image, mesh.seq.index)), export_nnunet(net)


def test_a_residual_unets_encoder_is_exact_and_its_decoder_is_fresh(tmp_path: Path) -> None:
    """Two channels see the mean: the first weights are repeated, as nnU-Net does."""
    theirs = pretrained_unet()
    file = write_unet(tmp_path / "checkpoint_final.pth", theirs.state_dict())
    line = [*UNET, "--weights", str(file), "--mode", "gather"]
    image = torch.randn(1, 2, 16, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for world in (1, 2):
        config = read_request([*line, "--seqpar", str(world)], read_launcher({})).config
        assert (config.network, config.tile, config.prepare) == ("nnunet-resenc", (16, 8, 4), "own")
        for said, logits, state in run_ranks(world, started_unet, config, image):
            assert "(nnssl, the encoder)" in said and "new: unet.cells.classes" in said and "left out" not in said
            assert "the first weights, of 1 channel, repeated over 2 and divided by 2" in said
            whole = Reference(1, 3, KINDS[KIND]).double()
            pretrained = {
                k: v for k, v in theirs.state_dict().items() if k.startswith(("encoder.", "decoder.encoder."))
            }
            whole.load_state_dict(state | pretrained, strict=True)
            want = whole(image.mean(1, keepdim=True).transpose(2, 4))[0].transpose(2, 4)
            assert (logits - want).abs().max() < 1e-12 * want.abs().max()


def test_resenc_l_has_the_published_names_and_sizes(tmp_path: Path) -> None:
    arguments = {**nnssl._RES_ENC_L, "kernel_sizes": [[3] * 3] * 6, "strides": [[1] * 3, *[[2] * 3] * 5],
                 "n_conv_per_stage_decoder": [1] * 5}  # fmt: skip
    with torch.device("meta"):
        theirs = Reference(1, 1, arguments).state_dict()
        ours = build_network(Config(network="nnunet-resenc", tile=(64, 64, 64), stages=RES_ENC_L), 1, 3, Group("seq"))
    content = {"network_weights": theirs, "nnssl_adaptation_plan": {
        **PLAN, "architecture_plans": {"arch_class_name": "ResEncL", "arch_kwargs": None}}}  # fmt: skip
    assert len(theirs) == 956 and len([name for name in theirs if name.startswith("encoder.")]) == 448
    pretrained = nnssl.read_pretrained_unet(content, tmp_path / "file")
    own, state = ours.state_dict(), pretrained.encoder_state()
    assert {name for name in own if name.startswith(ENCODER)} == state.keys()
    assert all(own[name].shape == tensor.shape for name, tensor in state.items())
    settings = network_of(pretrained.architecture, pretrained.file_axes, "file")
    assert settings == {"network": "nnunet-resenc", "stages": RES_ENC_L, "features": 0}


def test_the_numbers_with_which_a_pretraining_computed_are_taken(tmp_path: Path) -> None:
    """Sparse convolutions train what has the second of two names, and leave the first as it began."""
    state = pretrained_unet().state_dict()
    stale = {name: torch.zeros_like(t) if ".conv." in name else t for name, t in state.items()}
    config = read_request(
        [*UNET, "--weights", str(write_unet(tmp_path / "sparse.pth", stale))], read_launcher({})
    ).config
    net = build_network(config, 1, 2, Group("seq"))
    load_pretrained(net, config)
    got = net.state_dict()["unet.cells.encoder1_0.convs.0.conv.weight"]
    want = state["encoder.stages.1.blocks.0.conv1.all_modules.0.weight"].permute(0, 1, 4, 3, 2)
    assert torch.equal(got.double(), want.float().double())


def test_pretrained_unets_that_do_not_fit_are_refused_with_what_they_need(tmp_path: Path) -> None:
    state, launcher = pretrained_unet().state_dict(), read_launcher({})
    skips = write_unet(tmp_path / "noskip.pth", state, architecture_plans={"arch_class_name": "NoSkipResEncL"})
    with pytest.raises(DataError, match="noskip.pth: the plan's network NoSkipResEncL is not supported.*ResEncL"):
        read_request([*UNET, "--weights", str(skips)], launcher)
    elsewhere = write_unet(tmp_path / "elsewhere.pth", state, key_to_stem="stem")
    config = read_request([*UNET, "--weights", str(elsewhere)], launcher).config
    with pytest.raises(DataError, match="not weights of the encoder that its nnssl_adaptation_plan names; missing"):
        load_pretrained(build_network(config, 1, 2, Group("seq")), config)
    file = write_unet(tmp_path / "file.pth", state)
    with pytest.raises(ValueError, match="--network nnunet-plain: --weights .* has the network nnunet-resenc"):
        read_request([*UNET, "--weights", str(file), "--network", "nnunet-plain"], launcher)
    other = [*UNET, "--weights", str(file), "--stages", "333:111:4:1:1 333:221:6:2:1 333:222:6:1:1 333:221:8:2"]
    config = read_request([*other, "--tile", "16", "8", "4"], launcher).config
    with pytest.raises(ValueError, match='do not fit the U-Net: .*; they need --network nnunet-resenc --stages "331:'):
        load_pretrained(build_network(config, 1, 2, Group("seq")), config)
