"""Weights of MONAI's networks and Primus give their outputs here, and ours load there; files are whole or refused."""

import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import seqpar
from seqpar.launch.weights.files import read_weights, unwrap, write_weights
from seqpar.launch.weights.monai import export_monai, load_monai
from seqpar.launch.weights.primus import export_primus, load_primus
from seqpar.mesh import Mesh
from tests.support import references
from tests.support.ranks import relative

TILE, HEADS = (32, 32, 16), 4
TINY = {"c": 2, "k": 3, "patch": 16, "grid": (2, 2, 1), "f": 3, "e": 24, "hidden": 40}
PRIMUS = {"c": 2, "k": 3, "patch": 8, "grid": (2, 1, 3), "e": 72, "depth": 2, "widths": [32, 16]}
PRIMUS_TILE = (16, 8, 24)


def image(*sides: int, c: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, c, *sides, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)


def tiny_unetr(seed: int = 0, dtype: torch.dtype = torch.float64, **changed: object) -> references.State:
    return references.draw(references.unetr_shapes(**{**TINY, **changed}), seed, dtype)  # type: ignore[arg-type]


@torch.no_grad()
def out(net: nn.Module, x: Tensor) -> Tensor:
    return net.eval()(x)


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


def test_legacy_and_dead_keys_are_dropped_and_told(caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.module.", "backbone.", "module._orig_mod.", "model.net."])
def test_nests_and_prefixes_are_taken_off(prefix: str) -> None:
    state = tiny_unetr()
    saved = {"epoch": 3, "state_dict": {prefix + name: tensor for name, tensor in state.items()}}
    assert unwrap(saved).keys() == state.keys()
    one, other = (out(load_monai(weights, TILE, HEADS), image(*TILE)) for weights in (saved, state))
    assert torch.equal(one, other)


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
    wanted, _ = references.vit(state, x, HEADS, prefix)
    for saved in (state, as_perceptron(state, prefix)):
        net = load_monai(saved, (16, 8, 24), HEADS)
        assert isinstance(net, seqpar.SeqParViT)
        assert (out(net, x) - wanted).abs().max() < 1e-12


def test_a_flat_vit_is_an_encoder_of_pictures() -> None:
    state = references.draw(references.vit_shapes("", 2, 8, (2, 3), 24, 40, 2))
    wanted, _ = references.vit(state, image(16, 24), HEADS)
    assert (out(load_monai(state, (16, 24), HEADS), image(16, 24)) - wanted).abs().max() < 1e-12


def test_a_perceptron_of_an_unknown_tile_asks_for_its_patch() -> None:
    state = references.draw(references.vit_shapes("", 2, 8, (3, 3, 3), 24, 40, 1))
    with pytest.raises(ValueError, match="patch="):
        load_monai(as_perceptron(state, ""), (16, 16, 32), HEADS)
    net, x = load_monai(as_perceptron(state, ""), (16, 16, 32), HEADS, patch=(8, 8, 8)), image(16, 16, 32)
    assert (out(net, x) - out(load_monai(state, (16, 16, 32), HEADS), x)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="the weights have patch"):
        load_monai(state, (16, 16, 32), HEADS, patch=(4, 4, 4))


def test_positions_are_resized_where_the_grid_differs() -> None:
    state, x = tiny_unetr(grid=(2, 2, 2)), image(32, 48, 16)
    table = state["vit.patch_embedding.position_embeddings"]
    resized = nn.functional.interpolate(table.mT.reshape(1, -1, 2, 2, 2), (2, 3, 1), mode="trilinear").flatten(2).mT
    wanted = references.unetr({**state, "vit.patch_embedding.position_embeddings": resized}, x, HEADS)
    assert (out(load_monai(state, (32, 48, 16), HEADS), x) - wanted).abs().max() < 1e-12


def test_the_tile_that_positions_were_trained_on_is_asked_for_where_it_is_open() -> None:
    state = tiny_unetr()
    with pytest.raises(ValueError, match=r"4 positions.*trained_tile="):
        load_monai(state, (32, 48, 16), HEADS)
    with pytest.raises(ValueError, match="4 positions"):
        load_monai(state, (32, 48, 16), HEADS, trained_tile=(32, 32, 32))
    assert out(load_monai(state, (32, 48, 16), HEADS, trained_tile=TILE), image(32, 48, 16)).isfinite().all()
    other = load_monai(state, TILE, HEADS, trained_tile=(16, 32, 32))  # as many positions, elsewhere
    assert relative(out(other, image(*TILE)), references.unetr(state, image(*TILE), HEADS)) > 1e-6


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


def test_primus_weights_give_the_reference_output_and_come_back() -> None:
    state = references.draw(references.primus_shapes(**PRIMUS))  # type: ignore[arg-type]
    x = image(*PRIMUS_TILE)
    net = load_primus(state, PRIMUS_TILE, num_heads=4)
    assert (out(net, x) - references.primus(state, x, 4)).abs().max() < 1e-12
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


def test_files_come_back_as_they_went(tmp_path: Path) -> None:
    net = load_monai(tiny_unetr(), TILE, HEADS)
    write_weights(tmp_path / "net.safetensors", net)
    back = read_weights(tmp_path / "net.safetensors")
    assert back.keys() == net.state_dict().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in net.state_dict().items())
    torch.save({"state_dict": tiny_unetr(), "epoch": 1}, tmp_path / "net.pt")
    assert read_weights(tmp_path / "net.pt").keys() == tiny_unetr().keys()
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["net.pt", "net.safetensors"]


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.safetensors"
    write_weights(path, nn.Linear(2, 2))
    before = path.read_bytes()

    def stop(tensors: dict, part: Path) -> None:
        Path(part).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(sys.modules["seqpar.launch.weights.files"], "save_file", stop)
    with pytest.raises(OSError, match="disk full"):
        write_weights(path, nn.Linear(3, 3))
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


class Surprise:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("ran"),))


def test_files_that_are_no_weights_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_weights("whole.safetensors", nn.Linear(9, 9))
    torch.save({"w": torch.zeros(99)}, "whole.pt")
    torch.save({"w": Surprise()}, "code.pt")
    Path("text.pt").write_text("no weights at all")
    Path("empty.pt").touch()
    for name in ("whole.safetensors", "whole.pt"):
        Path(f"cut.{name}").write_bytes(Path(name).read_bytes()[:200])
    for name in ("code.pt", "text.pt", "empty.pt", "cut.whole.safetensors", "cut.whole.pt", "absent.pt"):
        with pytest.raises(ValueError, match=re.escape(name)):
            read_weights(name)
    with pytest.raises(ValueError, match="more than tensors"):
        read_weights("code.pt")
    assert not Path("ran").exists()


def monai_net(dtype: torch.dtype, **options: object) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    net = nets.UNETR(2, 3, TILE, feature_size=3, hidden_size=24, mlp_dim=40, num_heads=HEADS, **options)
    net = net.to(dtype).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize("options", [{}, {"proj_type": "perceptron"}, {"qkv_bias": True}])
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 5e-5)])
def test_monai_itself_agrees(options: dict, dtype: torch.dtype, bound: float) -> None:
    theirs, x = monai_net(dtype, **options), image(*TILE, dtype=dtype)
    ours = load_monai(theirs.state_dict(), TILE, HEADS)
    assert (out(ours, x) - out(theirs, x)).abs().max() < bound


@pytest.mark.parametrize("bias", [False, True])
def test_monai_itself_loads_what_is_exported(bias: bool) -> None:
    theirs, x = monai_net(torch.float64, qkv_bias=bias), image(*TILE)
    version = sys.modules["monai"].__version__
    ours = load_monai(tiny_unetr(bias=bias), TILE, HEADS)
    theirs.load_state_dict(export_monai(ours, version))
    assert (out(ours, x) - out(theirs, x)).abs().max() < 1e-12
    encoder = ours.encoder
    vit = sys.modules["monai.networks.nets"].ViT(2, TILE, 16, 24, 40, 12, HEADS, qkv_bias=bias).double()
    vit.load_state_dict(export_monai(encoder, version))
    assert (out(encoder, x) - vit.eval()(x)[0]).abs().max() < 1e-12


def spread_outputs(
    mesh: Mesh, state: references.State, x: Tensor, modes: list[str], split: str
) -> list[tuple[Tensor, Tensor]]:
    """Returns a rank's logits in each mode, with the numbers of the voxels that they belong to."""
    found = []
    for mode in modes:
        net = load_monai(state, x.shape[2:], HEADS, mesh.seq, mode, split)
        voxels = torch.arange(x[:, 0].numel()).view_as(x[:, 0])
        layout = net.encoder.layout
        logits = out(net, layout.cut(x, mesh.seq.index))
        found.append((logits, net.arrange(layout.cut(voxels, mesh.seq.index))))
    return found


def check_spread(ranks, state: references.State, x: Tensor, whole: Tensor, split: str, bound: float) -> None:
    """Holds the logits of four ranks against those of the whole tile, ``b k W D H``; none may be left out."""
    modes = ["gather", "halo", "swap"]
    rows = whole.movedim(1, -1).flatten(0, 3)  # voxels of all samples, classes
    seen: dict[str, list[Tensor]] = {mode: [] for mode in modes}
    for outputs in ranks(4, spread_outputs, state, x, modes, split):
        for mode, (logits, voxels) in zip(modes, outputs):
            assert (logits.movedim(1, -1) - rows[voxels]).abs().max() < bound, mode
            seen[mode].append(voxels.flatten())
    assert all(torch.cat(voxels).unique().numel() == len(rows) for voxels in seen.values())


@pytest.mark.parametrize("split", ["spatial", "ordered"])
def test_loaded_weights_give_the_reference_output_on_four_ranks(ranks, split: str) -> None:
    state, x = tiny_unetr(), torch.cat([image(*TILE)] * 2)
    check_spread(ranks, state, x, references.unetr(state, x, HEADS), split, 1e-12)


@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 5e-5)])
def test_monai_itself_agrees_on_four_ranks(ranks, dtype: torch.dtype, bound: float) -> None:
    theirs, x = monai_net(dtype), torch.cat([image(*TILE, dtype=dtype)] * 2)
    check_spread(ranks, theirs.state_dict(), x, out(theirs, x), "spatial", bound)
