"""Weights under MONAI's names give the reference output here, and exported weights are those that were loaded."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import seqpar
from seqpar.weights.monai_weights import export_monai, load_monai
from tests.support import references
from tests.support.foreign_weights import HEADS, TILE, TINY, image, out, tiny_unetr
from tests.support.ranks import relative


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 5e-5)])
def test_unetr_weights_give_the_reference_output(dtype: torch.dtype, bound: float) -> None:
    state, x = tiny_unetr(dtype=dtype), image(*TILE, dtype=dtype)
    net = load_monai(state, TILE, HEADS)
    assert next(net.parameters()).dtype == dtype
    assert (out(net, x) - references.unetr(state, x, HEADS)).abs().max() < bound


def test_as_many_channels_as_features_need_no_shortcut_at_the_image() -> None:
    state, x = tiny_unetr(f=2), image(*TILE)
    assert "encoder1.layer.conv3.conv.weight" not in state
    net = load_monai(state | {"encoder1.layer.conv3.conv.weight": torch.ones(2, 2, 1, 1, 1)}, TILE, HEADS)
    assert (out(net, x) - references.unetr(state, x, HEADS)).abs().max() < 1e-12


@pytest.mark.started
def test_every_weight_of_a_unetr_matters() -> None:
    """A control: with any one tensor changed before loading, the output moves."""
    state, x = tiny_unetr(), image(*TILE)[:1]
    whole = references.unetr(state, x, HEADS)
    some = [name for name in state if not re.match(r"vit\.blocks\.(?!5\.)", name)]
    for name in some:
        changed = {**state, name: state[name] + 0.1 * torch.rand_like(state[name])}
        assert relative(out(load_monai(changed, TILE, HEADS), x), whole) > 1e-7, name


def test_the_bias_of_keys_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    state, x = tiny_unetr(bias=True), image(*TILE)
    with caplog.at_level(logging.INFO):
        net = load_monai(state, TILE, HEADS)
    assert "biases of keys dropped" in caplog.text
    assert (out(net, x) - references.unetr(state, x, HEADS)).abs().max() < 1e-12
    queries = {name: t.clone() for name, t in state.items()}
    for name in (name for name in state if name.endswith("qkv.bias")):
        queries[name][: TINY["e"]] += 1.0  # type: ignore[misc]
    assert relative(out(load_monai(queries, TILE, HEADS), x), references.unetr(state, x, HEADS)) > 1e-6


def test_legacy_and_dead_keys_are_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    state, e = tiny_unetr(), TINY["e"]
    dead = {
        "vit.patch_embedding.cls_token": (1, 1, e),
        "vit.blocks.0.norm_cross_attn.weight": (e,),
        "vit.blocks.3.cross_attn.to_q.weight": (e, e),
        "encoder2.blocks.1.1.conv3.conv.weight": (6, 6, 1, 1, 1),
    }
    with caplog.at_level(logging.INFO):
        net = load_monai(state | references.draw(dead), TILE, HEADS)  # type: ignore[arg-type]
    assert all(name in caplog.text for name in dead)
    assert torch.equal(out(net, image(*TILE)), out(load_monai(state, TILE, HEADS), image(*TILE)))


def as_perceptron(state: references.State, prefix: str) -> references.State:
    """Returns the state with the embedding as a matrix whose columns have channels fastest."""
    state = dict(state)
    weight = state.pop(f"{prefix}patch_embedding.patch_embeddings.weight")
    rows = torch.stack([row.permute(*range(1, row.ndim), 0).reshape(-1) for row in weight])
    bias = state.pop(f"{prefix}patch_embedding.patch_embeddings.bias")
    at = f"{prefix}patch_embedding.patch_embeddings.1"
    return state | {f"{at}.weight": rows, f"{at}.bias": bias}


def test_a_perceptron_embedding_is_a_convolution() -> None:
    state, x = tiny_unetr(), image(*TILE)
    net = load_monai(as_perceptron(state, "vit."), TILE, HEADS)
    assert (out(net, x) - references.unetr(state, x, HEADS)).abs().max() < 1e-12


@pytest.mark.parametrize("prefix", ["", "vit."])
def test_a_vit_is_an_encoder(prefix: str) -> None:
    state = references.draw(references.vit_shapes(prefix, 2, 8, (2, 1, 3), 24, 40, 3, True))
    x = image(16, 8, 24)
    expected, _ = references.vit(state, x, HEADS, prefix)
    for saved in (state, as_perceptron(state, prefix)):
        net = load_monai(saved, (16, 8, 24), HEADS)
        assert isinstance(net, seqpar.SeqParViT)
        assert (out(net, x) - expected).abs().max() < 1e-12


def test_a_flat_vit_is_an_encoder_of_pictures() -> None:
    state = references.draw(references.vit_shapes("", 2, 8, (2, 3), 24, 40, 2))
    expected, _ = references.vit(state, image(16, 24), HEADS)
    assert (out(load_monai(state, (16, 24), HEADS), image(16, 24)) - expected).abs().max() < 1e-12


def test_a_perceptron_of_an_unknown_tile_asks_for_its_patch() -> None:
    state = references.draw(references.vit_shapes("", 2, 8, (3, 3, 3), 24, 40, 1))
    with pytest.raises(ValueError, match="patch="):
        load_monai(as_perceptron(state, ""), (16, 16, 32), HEADS)
    net, x = load_monai(as_perceptron(state, ""), (16, 16, 32), HEADS, patch=(8, 8, 8)), image(16, 16, 32)
    assert (out(net, x) - out(load_monai(state, (16, 16, 32), HEADS), x)).abs().max() < 1e-12
    assert torch.equal(out(load_monai(as_perceptron(state, ""), (16, 16, 32), HEADS, patch=8), x), out(net, x))
    with pytest.raises(ValueError, match="the weights have patch"):
        load_monai(state, (16, 16, 32), HEADS, patch=(4, 4, 4))


def test_positions_are_resized_where_the_grid_differs() -> None:
    state, x = tiny_unetr(grid=(2, 2, 2)), image(32, 48, 16)
    table = state["vit.patch_embedding.position_embeddings"]
    resized = nn.functional.interpolate(table.mT.reshape(1, -1, 2, 2, 2), (2, 3, 1), mode="trilinear").flatten(2).mT
    expected = references.unetr({**state, "vit.patch_embedding.position_embeddings": resized}, x, HEADS)
    assert (out(load_monai(state, (32, 48, 16), HEADS), x) - expected).abs().max() < 1e-12
    assert (out(load_monai(state, (32, 48, 16), HEADS, trained_tile=32), x) - expected).abs().max() < 1e-12


def test_the_tile_that_positions_were_trained_on_is_asked_for_where_it_is_open() -> None:
    state = tiny_unetr()
    with pytest.raises(ValueError, match=r"4 positions.*trained_tile="):
        load_monai(state, (32, 48, 16), HEADS)
    with pytest.raises(ValueError, match="4 positions"):
        load_monai(state, (32, 48, 16), HEADS, trained_tile=(32, 32, 32))
    assert out(load_monai(state, (32, 48, 16), HEADS, trained_tile=TILE), image(32, 48, 16)).isfinite().all()
    other = load_monai(state, TILE, HEADS, trained_tile=(16, 32, 32))  # as many positions, elsewhere
    assert relative(out(other, image(*TILE)), references.unetr(state, image(*TILE), HEADS)) > 1e-6


def test_heads_that_nobody_tells_are_asked_for() -> None:
    state, x = tiny_unetr(), image(*TILE)
    with pytest.raises(ValueError, match=r"embedding 24.*give num_heads="):
        load_monai(state, TILE)
    whole = references.unetr(state, x, HEADS)
    assert relative(out(load_monai(state, TILE, 12), x), whole) > 1e-3, "a wrong number would go unnoticed"
    file = {"state_dict": state, "hyper_parameters": {"num_heads": HEADS}, "epoch": 3}
    assert relative(out(load_monai(file, TILE), x), whole) < 1e-12


def test_weights_are_loaded_from_the_path_of_their_file_too(tmp_path: Path) -> None:
    state, x = tiny_unetr(), image(*TILE)
    torch.save({"state_dict": state, "hyper_parameters": {"num_heads": HEADS}}, tmp_path / "net.pt")
    seqpar.write_weights(tmp_path / "net.safetensors", state)
    whole = out(load_monai(state, TILE, HEADS), x)
    assert torch.equal(out(load_monai(str(tmp_path / "net.pt"), TILE), x), whole)
    assert torch.equal(out(load_monai(tmp_path / "net.safetensors", TILE, HEADS), x), whole)
    with pytest.raises(ValueError, match=r"absent.pt: no such file"):
        load_monai("absent.pt", TILE, HEADS)
    for other, hint in ((nn.Linear(2, 2), r"of type Linear: give its state_dict\(\)"), (3, "of type int")):
        with pytest.raises(ValueError, match=hint):
            load_monai(other, TILE, HEADS)  # type: ignore[arg-type]


def test_unknown_and_missing_keys_are_named_at_once() -> None:
    state = tiny_unetr()
    state["surprise.weight"] = state.pop("decoder4.conv_block.conv3.conv.weight")
    del state["vit.blocks.7.norm1.bias"]
    with pytest.raises(ValueError) as caught:
        load_monai(state, TILE, HEADS)
    for name in ("surprise.weight", "decoder4.conv_block.conv3.conv.weight", "vit.blocks.7.norm1.bias"):
        assert name in str(caught.value)
    with pytest.raises(ValueError, match="missing"):
        load_monai({"conv.weight": torch.zeros(3)}, TILE, HEADS)
    with pytest.raises(ValueError, match=r"stages.0.block.conv2.weight is \(3, 5"):
        load_monai({**tiny_unetr(), "decoder5.conv_block.conv2.conv.weight": torch.zeros(3, 5, 3, 3, 3)}, TILE, HEADS)
    with pytest.raises(ValueError, match="epoch"):
        load_monai({**tiny_unetr(), "epoch": 3}, TILE, HEADS)


@pytest.mark.parametrize("bias", [False, True])
def test_exported_weights_are_those_that_came(bias: bool) -> None:
    state = tiny_unetr(bias=bias)
    back = export_monai(load_monai(state, TILE, HEADS), "1.3")
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        if name.endswith("qkv.bias"):
            tensor[24:48] = 0
        assert torch.equal(back[name], tensor), name
    assert len(export_monai(load_monai(state, TILE, HEADS), "1.6")) == len(state) + 24
    assert len(export_monai(load_monai(state, TILE, HEADS), "1.5")) == len(state) + 24 + 12 * (8 if bias else 5)


def test_what_monai_does_not_compute_is_not_exported() -> None:
    def vit(**options: object) -> seqpar.SeqParViT:
        return seqpar.SeqParViT(1, 16, 8, 24, 2, 4, **options)  # type: ignore[arg-type]

    for positions in ("learned", "sincos", "none"):  # each is a table there
        net, x = vit(positions=positions).double(), image(16, 16, 16, c=1)
        assert torch.equal(out(load_monai(export_monai(net), 16, 4), x), out(net, x))
    for options, word in [
        ({"positions": "rope"}, "positions rope"),
        ({"mlp": "swiglu"}, "gated"),
        ({"norm_eps": 1e-6}, "eps"),
        ({"layer_scale": 0.1}, "unknown: encoder.blocks.0.ls1.gamma"),
        ({"attention_norm": True}, "attn.norm"),
    ]:
        with pytest.raises(ValueError, match=word):
            export_monai(vit(**options))
    deeper = load_monai(tiny_unetr(patch=8, depth=3), (16, 16, 8), HEADS)
    with pytest.raises(ValueError, match="3 blocks"):
        export_monai(deeper)
