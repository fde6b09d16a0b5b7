"""Weights under Primus' names give the reference output here, and come back as they were when exported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpar.decoders.primus import STEMS as PUBLISHED
from seqpar.models.build import build_network
from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group, Mesh
from seqpar.settings.checks import check
from seqpar.settings.config import Config
from seqpar.weights.monai_weights import load_monai
from seqpar.weights.pretrained import load_pretrained
from seqpar.weights.primus_weights import FINAL, export_primus, has_exchanged_axes, load_primus
from seqpar.weights.weight_files import load_torch
from tests.support import references
from tests.support.foreign_weights import HEADS, TILE, image, out, tiny_unetr

PRIMUS = {"c": 2, "k": 3, "patch": 8, "grid": (2, 1, 3), "e": 72, "depth": 2, "widths": [32, 16]}
PRIMUS_TILE = (16, 8, 24)


def test_primus_weights_give_the_reference_output_and_come_back(tmp_path: Path) -> None:
    state = references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    x = image(*PRIMUS_TILE)
    net = load_primus(state, PRIMUS_TILE, num_heads=4)
    assert (out(net, x) - references.primus(state, x, 4)).abs().max() < 1e-12
    torch.save(state, tmp_path / "primus.pt")
    assert torch.equal(out(load_primus(str(tmp_path / "primus.pt"), PRIMUS_TILE, num_heads=4), x), out(net, x))
    back = export_primus(net)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name != "mask_token")
    with pytest.raises(ValueError, match="num_heads="):
        load_primus(state, PRIMUS_TILE)
    with pytest.raises(ValueError, match="register_tokens"):
        load_primus(state | {"register_tokens": torch.zeros(1, 2, 72)}, PRIMUS_TILE, num_heads=4)
    with pytest.raises(ValueError, match="UnetrDecoder|PrimusDecoder"):
        export_primus(load_monai(tiny_unetr(), TILE, HEADS))


@pytest.mark.parametrize("lacking", ["eva.pos_embed", "gamma_", "attn.norm", "_proj.bias"])
def test_a_primus_without_an_option_loads_and_comes_back(lacking: str) -> None:
    whole = references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    neutral = {"eva.pos_embed": 0.0, "gamma_": 1.0, "_proj.bias": 0.0}
    state = {name: tensor for name, tensor in whole.items() if lacking not in name}
    net = load_primus(state, PRIMUS_TILE, num_heads=4)
    assert export_primus(net).keys() == state.keys()
    if lacking in neutral:
        filled = {name: t if lacking not in name else torch.full_like(t, neutral[lacking]) for name, t in whole.items()}
        assert (out(net, image(*PRIMUS_TILE)) - references.primus(filled, image(*PRIMUS_TILE), 4)).abs().max() < 1e-12


STEMS = {"V2": ((4, 4, 6, 8), False), "V3": ((4, 6, 8, 10), True)}


def stemmed(version: str) -> references.State:
    """Returns the weights of a small PrimusV2 or V3."""
    sizes = dict(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    del sizes["down_projection.proj.weight"], sizes["down_projection.proj.bias"]
    state = references.draw(sizes | references.primus_stem_shapes(2, 72, *STEMS[version]))
    return references.with_second_names(state)


@pytest.mark.parametrize("version", STEMS)
def test_a_primus_with_a_stem_of_convolutions_gives_the_reference_output_and_comes_back(version: str) -> None:
    state, x = stemmed(version), image(*PRIMUS_TILE)
    net = load_primus(state, PRIMUS_TILE, num_heads=4)
    want = references.primus(state, x, 4)
    assert (out(net, x) - want).abs().max() < 1e-12
    back = export_primus(net)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name != "mask_token")
    turned = load_primus(state, PRIMUS_TILE[::-1], num_heads=4, reverse_axes=True)
    assert (out(turned, x.transpose(2, 4)) - want.transpose(2, 4)).abs().max() < 1e-12
    back = export_primus(turned, reverse_axes=True)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name != "mask_token")
    more = {"down_projection.stages.0.blocks.1.conv1.conv.weight": torch.zeros(4, 4, 3, 3, 3)}
    with pytest.raises(ValueError, match=r"not weights of Primus; unknown: down_projection.stages.0.blocks.1"):
        load_primus(state | more, PRIMUS_TILE, num_heads=4)
    other = next(name for name in state if name.endswith("conv1.all_modules.0.weight"))
    with pytest.raises(ValueError, match="other numbers under second names"):
        load_primus(state | {other: state[other] + 1}, PRIMUS_TILE, num_heads=4)


def on_ranks(mesh: Mesh, state: references.State) -> list[tuple[float, dict[str, Tensor]]]:
    """Returns loss and gradients of two modes, under Primus' names, averaged over the ranks as DDP does."""
    return [loss_and_gradients(mesh, state, mode) for mode in ("gather", "halo")]


def loss_and_gradients(mesh: Mesh, state: references.State, mode: str) -> tuple[float, dict[str, Tensor]]:
    x, weight = image(*PRIMUS_TILE), image(*PRIMUS_TILE)[:, 0]
    net = load_primus(state, PRIMUS_TILE, num_heads=4, group=mesh.seq, mode=mode).train()
    part, factor = (net.layout.cut(volume, mesh.seq.index) for volume in (x, weight))
    logits, factor = net(part), net.arrange(factor)
    share = 1 if factor.shape == weight.shape else mesh.seq.size
    loss = (logits.square() * factor[:, None]).sum() * share
    loss.backward()
    grads = {name: p.grad for name, p in net.named_parameters()}
    for name, tensor in grads.items():
        grads[name] = all_reduce(tensor, mesh.seq) / mesh.seq.size
    net.load_state_dict(grads, strict=False)
    return float(all_reduce(loss.detach(), mesh.seq)) / mesh.seq.size, export_primus(net)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("version", STEMS)
def test_stems_of_convolutions_have_the_gradients_of_one_process_on_several_ranks(ranks, version, world) -> None:
    state = stemmed(version)
    first = {name: tensor for name, tensor in state.items() if "all_modules" not in name and name != "mask_token"}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in first.items()}
    x, weight = image(*PRIMUS_TILE), image(*PRIMUS_TILE)[:, 0]
    want = (references.primus(leaves, x, 4).square() * weight[:, None]).sum()
    want.backward()
    want = want.detach()
    for losses in ranks(world, on_ranks, state):
        for loss, grads in losses:
            assert abs(loss / float(want) - 1) < 1e-12
            for name, leaf in leaves.items():
                assert (grads[name] - leaf.grad).abs().max() <= 1e-12 * max(1, leaf.grad.abs().max()), name


def test_training_starts_from_a_primus_with_a_stem_and_names_the_flag(tmp_path: Path) -> None:
    torch.save(references.draw({**_widened("primus-v2")}), tmp_path / "v2.pth")
    config = Config(
        tile=(24, 8, 16), patch=(8, 8, 8), embed_dim=72, depth=2, heads=4, mlp="swiglu", mlp_ratio=192 / 72,
        attention_norm=True, positions="learned+rope", layer_scale=0.1, decoder="primus", output_bias=False,
        stem="primus-v2", weights=str(tmp_path / "v2.pth"), precision="fp64",
    )  # fmt: skip
    net = build_network(config, 2, 3, Group("seq")).double()
    assert "new: " not in load_pretrained(net, config)
    assert torch.equal(export_primus(net, True)[FINAL], load_torch(tmp_path / "v2.pth")[FINAL])
    plain = replace(config, stem="patch")
    with pytest.raises(ValueError, match="--stem primus-v2 --patch 8"):
        load_pretrained(build_network(plain, 2, 3, Group("seq")).double(), plain)
    for wrong in ({"patch": (4, 4, 4)}, {"split": "ordered"}):
        with pytest.raises(ValueError, match="use --patch 8 --split spatial"):
            check(replace(config, **wrong), ["vit"])


def _widened(stem: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a Primus with a stem of the published widths."""
    sizes = dict(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    del sizes["down_projection.proj.weight"], sizes["down_projection.proj.bias"]
    return sizes | references.primus_stem_shapes(2, 72, PUBLISHED[stem].widths, PUBLISHED[stem].skips)


CUBE = {**PRIMUS, "c": 1, "grid": (3, 3, 3)}


@pytest.mark.parametrize("order", ["whd", "hwd"])
def test_weights_of_either_order_of_tokens_give_the_output_that_they_were_trained_to_give(order: str) -> None:
    state = references.draw(references.primus_shapes(**CUBE))  # type: ignore[arg-type]
    x = torch.randn(2, 1, 24, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    net = load_primus(state, (24, 24, 24), num_heads=4, token_order=order)
    right, wrong = (references.primus(state, x, 4, exchanged) for exchanged in (order == "hwd", order != "hwd"))
    assert (out(net, x) - right).abs().max() < 1e-12 and (out(net, x) - wrong).abs().max() > 1e-3


def test_a_pretraining_has_exchanged_tokens_and_a_second_network_that_is_left(tmp_path: Path, caplog) -> None:
    shapes = references.primus_shapes(
        **CUBE,
    )  # type: ignore[arg-type]
    state = references.draw(shapes)
    second = {name.replace("eva.", "decoder."): t.clone() for name, t in state.items() if name.startswith("eva.")}
    x = torch.randn(1, 1, 24, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    whole = {"network_weights": state | second, "trainer_name": "BaseEvaMAETrainer", "current_epoch": 1000,
             "init_args": {"fold": "all"}, "nnssl_adaptation_plan": {"key_to_encoder": "eva"}}  # fmt: skip
    torch.save(whole, tmp_path / "checkpoint.pth")
    net = load_primus(tmp_path / "checkpoint.pth", (24, 24, 24), num_heads=4)
    assert (out(net, x) - references.primus(state, x, 4, exchanged=True)).abs().max() < 1e-12
    config = Config(
        tile=(24, 24, 24), patch=(8, 8, 8), embed_dim=72, depth=2, heads=4, mlp="swiglu", mlp_ratio=192 / 72,
        attention_norm=True, positions="learned+rope", layer_scale=0.1, decoder="primus", output_bias=False,
        weights=str(tmp_path / "checkpoint.pth"), precision="fp64",
    )  # fmt: skip
    started = build_network(config, 4, 3, Group("seq")).double()
    line = load_pretrained(started, config)
    for words in (
        "(Primus, pretrained, tokens in the order h w d)",
        "of 1 channel, repeated over 4",
        "left out: decoder (",
    ):
        assert words in line, line
    assert "new: decoder" in line and "up_projection (" in line
    in_file = x.transpose(2, 4).expand(-1, 4, -1, -1, -1)  # nnU-Net reads the last axis of a file first
    tokens = started.encoder(in_file).unflatten(1, (3, 3, 3)).transpose(1, 3).flatten(1, 3)  # type: ignore[operator]
    assert (tokens - net.encoder(x)).abs().max() < 1e-12
    with pytest.raises(ValueError, match=r"trained with .*--positions learned\+rope"):
        load_pretrained(
            build_network(replace(config, positions="learned"), 4, 3, Group("seq")),
            replace(config, positions="learned"),
        )


def pretraining(trainer: str, tile: tuple[int, ...] = (24, 24, 24), **sizes: Any) -> dict[str, Any]:
    """Returns a checkpoint of nnssl's without a second network."""
    state = references.draw(references.primus_shapes(**{**CUBE, **sizes}))
    return {"network_weights": state, "trainer_name": trainer, "nnssl_adaptation_plan": {"pretrain_patch_size": tile}}


@pytest.mark.parametrize(
    ("trainer", "exchanged"),
    [
        ("ModelGenesisEvaTrainer", True),
        ("VolumeFusionEvaTrainer_BS8", True),
        ("SimMIMEvaTrainer_BS8", False),
        ("seqpar", False),
        ("VoCoEvaTrainer", None),
    ],
)
def test_a_pretraining_without_a_second_network_has_its_trainers_order(trainer: str, exchanged: bool | None) -> None:
    checkpoint = pretraining(trainer)
    x = torch.randn(1, 1, 24, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    if exchanged is None:
        with pytest.raises(ValueError, match=f"by {trainer} does not tell .* give `token_order`, whd or hwd"):
            load_primus(checkpoint, 24, num_heads=4)
    order = "auto" if exchanged is not None else "hwd"
    net = load_primus(checkpoint, 24, num_heads=4, token_order=order)
    right = references.primus(checkpoint["network_weights"], x, 4, exchanged is not False)
    assert (out(net, x) - right).abs().max() < 1e-12
    assert not has_exchanged_axes(checkpoint["network_weights"], "auto"), "without a trainer it is a Primus"


def test_exchanged_axes_are_repaired_on_the_grid_that_the_file_tells() -> None:
    """Of 27 positions, too, which need not be a cube's; sides w and h that are equal are exchanged exactly."""
    for grid in ((3, 3, 2), (1, 1, 27)):
        tile = tuple(8 * side for side in grid)
        flat = pretraining("ModelGenesisEvaTrainer", tile, grid=grid)
        x = torch.randn(1, 1, *tile, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        right = references.primus(flat["network_weights"], x, 4, exchanged=True)
        assert (out(load_primus(flat, tile, num_heads=4), x) - right).abs().max() < 1e-12
    long = pretraining("ModelGenesisEvaTrainer", (8, 24, 72), grid=(1, 3, 9))
    with pytest.raises(ValueError, match="27 positions, which are no cube but 1x3x9"):
        load_primus(long, (24, 24, 24), num_heads=4)
    del long["network_weights"]["eva.pos_embed"]
    with pytest.raises(ValueError, match="no cube but 1x3x9"):
        load_primus(long, (24, 24, 24), num_heads=4)


def test_positions_of_a_primus_that_nnunet_trained_are_resized_from_its_plans_patch_size(tmp_path: Path) -> None:
    state = references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    plans = {"configurations": {"base": {"patch_size": [16, 8, 24]}, "own": {"inherits_from": "base"}}}
    trained = {"plans": plans, "configuration": "own", "dataset_json": {}, "fold": 0}
    whole = {"network_weights": state, "trainer_name": "nnUNet_Primus_M_Trainer", "init_args": trained}
    torch.save(whole, tmp_path / "checkpoint_final.pth")
    config = Config(
        tile=(16, 16, 32), patch=(8, 8, 8), embed_dim=72, depth=2, heads=4, mlp="swiglu", mlp_ratio=192 / 72,
        attention_norm=True, positions="learned+rope", layer_scale=0.1, decoder="primus", output_bias=False,
        weights=str(tmp_path / "checkpoint_final.pth"), precision="fp64",
    )  # fmt: skip
    net = build_network(config, 2, 3, Group("seq")).double()
    assert "positions resized from 6 tokens to 2x2x4" in load_pretrained(net, config)
    table = load_primus(state, config.tile, 4, trained_tile=(16, 8, 24), reverse_axes=True).state_dict()
    assert torch.equal(net.state_dict()["encoder.pos_embed"], table["encoder.pos_embed"])
    torch.save(state, tmp_path / "checkpoint_final.pth")
    with pytest.raises(ValueError, match="take the `tile` that they were trained on"):
        load_pretrained(net, config)
    fitting = replace(config, tile=(24, 8, 16))
    load_pretrained(build_network(fitting, 2, 3, Group("seq")).double(), fitting)


@pytest.mark.parametrize("forward", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0)])
@pytest.mark.parametrize("kind", ["patch", *STEMS])
def test_axes_that_nnunets_plans_transpose_are_those_of_files_again(kind: str, forward: tuple[int, ...]) -> None:
    state = stemmed(kind) if kind in STEMS else references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    checkpoint = {"network_weights": state, "init_args": {"plans": {"transpose_forward": list(forward)}}}
    x, order = image(*PRIMUS_TILE), [2 + forward.index(2 - axis) for axis in range(3)]
    in_file = x.permute(0, 1, *order)
    net = load_primus(checkpoint, tuple(in_file.shape[2:]), num_heads=4, reverse_axes=True)
    want = references.primus(state, x, 4).permute(0, 1, *order)
    assert (out(net, in_file) - want).abs().max() < 1e-12
    back = export_primus(net, True, forward)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if name != "mask_token")
    with pytest.raises(ValueError, match=r"transpose_forward \(1, 0, 2\).* reverse_axes=True"):
        export_primus(net, transpose_forward=(1, 0, 2))


@pytest.mark.parametrize("patch", [(8, 8, 8), (4, 8, 8)])
def test_a_primus_of_reversed_axes_is_the_same_function_of_images_in_their_files_axes(patch: tuple[int, ...]) -> None:
    sizes = {**PRIMUS, "patch": patch}
    state = references.draw(references.primus_shapes(**sizes))  # type: ignore[arg-type]
    tile = tuple(n * p for n, p in zip((2, 1, 3), patch))
    x = image(*tile)
    net = load_primus(state, tile[::-1], num_heads=4, reverse_axes=True)
    right = references.primus(state, x, 4).transpose(2, 4)
    assert net.layout.tile == tile[::-1] and (out(net, x.transpose(2, 4)) - right).abs().max() < 1e-12
    assert all(
        torch.equal(tensor, state[name]) for name, tensor in export_primus(net, True).items() if name != "mask_token"
    )
    assert (out(load_primus(state, tile, num_heads=4), x) - right.transpose(2, 4)).abs().max() < 1e-12


def test_an_order_without_a_cube_is_refused() -> None:
    state = references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="6 positions, which are no cube"):
        load_primus(state, PRIMUS_TILE, num_heads=4, token_order="hwd")
    with pytest.raises(ValueError, match="token_order=.dhw.: choose"):
        load_primus(state, PRIMUS_TILE, num_heads=4, token_order="dhw")
