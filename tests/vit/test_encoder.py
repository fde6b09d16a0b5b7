"""The encoder as somebody else's plain module: any size, intermediates, positions, recomputation, refusals."""

import pytest
import torch

import seqpar
from seqpar import DropoutKey, Layout, SeqParViT
from seqpar.parallel.mesh import Group
from tests.support.ranks import relative

SMALL = dict(in_channels=2, tile=(16, 8, 24), patch=8, embed_dim=24, depth=3, num_heads=2)


def vit(**changes: object) -> SeqParViT:
    torch.manual_seed(0)
    return SeqParViT(**{**SMALL, **changes}).double()  # type: ignore[arg-type]


def image(*sides: int) -> torch.Tensor:
    return torch.randn(2, 2, *(sides or SMALL["tile"]), dtype=torch.float64)  # type: ignore[misc]


def test_a_whole_tile_and_its_part_are_the_same_alone() -> None:
    net, x = vit(), image()
    assert torch.equal(net(x), net(net.layout.cut(x, 0)))


def test_a_volume_of_another_size_passes_padded_with_positions_resized() -> None:
    net, x = vit(), image(17, 10, 24)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 6, 0, 7))
    assert net(x).shape == (2, 3 * 2 * 3, 24) and torch.equal(net(x), net(padded))
    larger = Layout.of((24, 16, 24), 8)
    assert torch.equal(net(larger.cut(padded, 0), layout=larger), net(padded))


@pytest.mark.parametrize("positions", ["learned", "sincos", "rope", "none"])
def test_positions_tell_tokens_apart_unless_there_are_none(positions: str) -> None:
    net, x = vit(positions=positions), image()
    swapped = torch.cat([x[:, :, 8:], x[:, :, :8]], 2)  # the two halves along W
    back = net(swapped).unflatten(1, (2, 3)).flip(1).flatten(1, 2)
    assert (relative(back, net(x)) < 1e-12) == (positions == "none")
    assert (net.pos_embed is not None) == (positions == "learned")


def test_intermediates_are_the_outputs_of_the_blocks_in_the_order_asked() -> None:
    net, x = vit(), image()
    outputs: list[torch.Tensor] = []
    for block in net.blocks:
        block.register_forward_hook(lambda module, inputs, result: outputs.append(result))
    last, taken = net.forward_intermediates(x, (-1, 0))
    assert torch.equal(taken[0], outputs[2]) and torch.equal(taken[1], outputs[0])
    assert torch.equal(last, net.norm(outputs[2])) and torch.equal(net(x), last)
    with pytest.raises(ValueError, match="encoder has 3"):
        net.forward_intermediates(x, (3,))


def test_recomputed_blocks_give_the_same_gradients_and_draws() -> None:
    x, key, grads = image(), DropoutKey(1, 2, (0, 1)), []
    for recompute in ("none", "attention", "full"):
        net = vit(dropout=0.3, drop_path=0.3, recompute=recompute)
        net(x, key=key).square().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other))


def test_dropout_acts_in_training_only_and_each_rate_by_itself() -> None:
    x, key = image(), DropoutKey(1, 2, (0, 1))
    plain = vit()(x)
    for rates in (dict(dropout=0.3), dict(drop_path=0.5)):
        net = vit(**rates)
        assert relative(net(x, key=key), plain) > 1e-3
        assert relative(net(x), net(x)) > 1e-3  # without a key, torch's own generator numbers the draw
        assert torch.equal(net.eval()(x, key=key), plain)


def test_layer_scale_scales_the_branches() -> None:
    net = vit(layer_scale=0.0)
    x = image()
    tokens = net.patch_embed(net.layout.cut(x, 0)) + net.pos_embed
    assert torch.equal(net(x), net.norm(tokens))


def test_two_directions_work_as_three() -> None:
    net = SeqParViT(in_channels=1, tile=(16, 24), patch=8, embed_dim=16, depth=1, num_heads=2, positions="rope")
    assert net(torch.randn(3, 1, 16, 24)).shape == (3, 6, 16)


def test_the_biases_on_queries_and_values_can_be_left_out() -> None:
    names = {name for name, _ in vit(qkv_bias=False).named_parameters()}
    with_bias = {name for name, _ in vit().named_parameters()}
    assert {name.split(".", 2)[2] for name in with_bias - names} == {"attn.q_bias", "attn.v_bias"}


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(positions="fourier"), "positions='fourier': choose one of learned, sincos, rope, learned.rope, none"),
        (dict(dropout=1.0), "must be in"),
        (dict(num_heads=5), "num_heads=5 does not divide"),
        (dict(positions="rope", num_heads=8), "too narrow"),
        (dict(tile=(15, 8, 24)), r"tile=\(16, 8, 24\)"),
    ],
)
def test_wrong_settings_are_refused_when_built(wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        vit(**wrong)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (dict(feature_size=-1), "feature_size=-1: give a whole number above 0"),
        (dict(hidden_size=24.0), "hidden_size=24.0: give a whole number above 0"),
        (dict(out_channels=0), "out_channels=0: give a whole number above 0"),
        (dict(num_heads="2"), "num_heads='2': give a whole number above 0"),
    ],
)
def test_a_unetr_takes_whole_numbers(wrong: dict, says: str) -> None:
    usual = dict(in_channels=1, out_channels=2, img_size=16, feature_size=4, hidden_size=24, mlp_dim=48, num_heads=2)
    with pytest.raises(ValueError, match=says):
        seqpar.UNETR(**{**usual, **wrong}, patch=8, depth=2)


def test_wrong_inputs_are_refused_with_what_is_needed() -> None:
    pair = Group("seq", (0, 1), 1)  # never communicates: it raises before
    net = vit(group=pair)
    with pytest.raises(ValueError, match="sequence group of 2 ranks got a whole tile"):
        net(image())
    with pytest.raises(ValueError, match="rank 1 of 2 holds 3 tokens"):
        net(torch.zeros(2, 4, 2, 8, 8, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="needs key="):
        vit(group=pair, dropout=0.1)(net.layout.cut(image(), 1))
    with pytest.raises(ValueError, match="has 3 samples"):
        vit(dropout=0.1)(image(), key=DropoutKey(0, 0, (0, 1, 2)))


def test_the_package_hands_its_names_on_and_knows_no_others() -> None:
    assert seqpar.SeqParViT is SeqParViT and "SeqParViT" in dir(seqpar)
    with pytest.raises(AttributeError, match="no attribute 'SeqParVit'"):
        seqpar.SeqParVit  # noqa: B018
