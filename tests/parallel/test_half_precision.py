"""Half precision on a GPU: its own forward and backward are those of torch's modules, in float64 and rounded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from seqpar.losses import DiceCE
from seqpar.models.build import build_network
from seqpar.parallel import half_precision
from seqpar.parallel.collectives import full_tensor
from seqpar.parallel.half_precision import LayerNorm, Linear, half, weights_cast_at_once
from seqpar.parallel.mesh import Group, Mesh
from seqpar.settings.config import Config
from seqpar.training.data_parallel import shard
from seqpar.vit.dropout import DropoutKey

CONFIG = Config(
    tile=(8, 8, 8), patch=(4, 4, 4), depth=2, embed_dim=24, heads=2, decoder_width=4, batch=2, precision="fp64"
)
MODERN = replace(CONFIG, decoder="unetr", positions="rope", layer_scale=0.3, drop_path=0.4)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Lets this CPU compute as a GPU does whose autocast converts to ``dtype``."""
    monkeypatch.setattr(half_precision, "half_dtype", lambda x: dtype)
    for user in ("vit.blocks", "vit.encoder", "attention.self_attention"):
        monkeypatch.setattr(f"seqpar.{user}.half_dtype", lambda x: dtype)
    wide = partial(torch.tensor, dtype=torch.promote_types(dtype, torch.float32))
    monkeypatch.setattr("seqpar.vit.dropout._scales", lambda rates, _: wide([[1 / (1 - rate)] for rate in rates]))


def gradients_of(net: nn.Module, step: int) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(1)
    image = torch.randn(2, 2, 8, 8, 8, generator=dice, dtype=torch.float64).requires_grad_()
    label = torch.randint(3, (2, 8, 8, 8), generator=dice)
    net.zero_grad()
    logits = net(net.layout.cut(image, 0), None, DropoutKey(3, step, (0, 1)))
    DiceCE()(logits, net.arrange(net.layout.cut(label, 0))).backward()
    assert image.grad is not None
    return {"logits": logits.detach(), "image": image.grad} | {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("config", [replace(CONFIG, mlp="swiglu", attention_norm=True), MODERN], ids=["eva", "modern"])
def test_a_network_computes_the_same_in_float64(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net = build_network(config, 2, 3, Group("seq")).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    expected = gradients_of(net, 5)
    as_on_a_gpu(monkeypatch, torch.float64)
    for name, ours in gradients_of(net, 5).items():
        apart = (ours - expected[name]).norm() / expected[name].norm().clamp(min=1e-9)
        assert apart < 1e-11, (name, apart)


def sharded_gradients(mesh: Mesh, config: Config) -> dict[str, Tensor]:
    """Returns what ``gradients_of`` returns, of a network whose weights are sharded over the ranks."""
    net = build_network(config, 2, 3, Group("seq")).double()
    shard(net, mesh)  # the same tiles on both ranks
    return {name: full_tensor(x) for name, x in gradients_of(net, 5).items()}


def test_sharded_weights_have_the_same_gradients(monkeypatch: pytest.MonkeyPatch, ranks: Callable[..., list]) -> None:
    """The factors of layer scale are gathered with their block, not before."""
    expected = gradients_of(build_network(MODERN, 2, 3, Group("seq")).double(), 5)
    as_on_a_gpu(monkeypatch, torch.float64)
    for ours in ranks(2, sharded_gradients, MODERN):
        for name, grad in ours.items():
            apart = (grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-9)
            assert apart < 1e-6, (name, apart)


def test_weights_are_cast_once_for_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch, torch.bfloat16)
    net = nn.Sequential(Linear(4, 8), LayerNorm(8), nn.Linear(8, 2)).requires_grad_()
    with weights_cast_at_once(net):
        found = [half_precision._in(torch.bfloat16, p) for p in net.parameters()]
        again = [half_precision._in(torch.bfloat16, p) for p in net.parameters()]
        assert [a is b for a, b in zip(found, again)] == [True] * 4 + [False] * 2  # torch's own layer casts by itself
        casts = half(net[0].weight)
        assert casts is not None and torch.equal(casts, net[0].weight.bfloat16())
        y = net[:2](torch.randn(3, 4))
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net[:2].parameters())
    assert half_precision._in(torch.bfloat16, net[0].weight) is not found[0]


@pytest.mark.parametrize("needed", [(True, False, True), (False, True, True), (False, False, True), (False,) * 3])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (3, 5, 4)])
def test_only_biases_that_learn_are_summed(sizes: tuple[int, ...], needed: tuple[bool, ...]) -> None:
    rows = torch.randn(6, 12, dtype=torch.float64)
    sums = half_precision._sums_of_parts(rows, sizes, needed, torch.float64)
    for part, ours, needs in zip(rows.split(sizes, 1), sums, needed, strict=True):
        assert (ours is not None) == needs
        torch.testing.assert_close(part.sum(0) if needs else None, ours)


def test_norms_of_a_block_have_hooks_and_may_be_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    block, seen = build_network(CONFIG, 2, 3, Group("seq")).encoder.blocks[0], list[torch.dtype]()
    monkeypatch.setattr(block, "norm2", nn.RMSNorm(24))
    x, tokens = torch.randn(2, 8, 24), torch.arange(8)
    for dtype in (None, torch.bfloat16):
        if dtype is not None:
            as_on_a_gpu(monkeypatch, dtype)
        before = block(x, (8,), tokens, None, None)
        hook = block.norm1.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
        assert torch.equal(block(x, (8,), tokens, None, None), before)
        hook.remove()
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("version", ["2.8.0+cu128", "2.13.0"])
def test_products_without_data_are_counted_on_old_versions_of_torch_too(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.8 has no shapes of a product with a wider result."""
    own = torch.mm

    def mm(a: Tensor, b: Tensor, **more: torch.dtype) -> Tensor:
        if more and a.is_meta and version.startswith("2.8"):
            raise TypeError("meta_mm() takes 2 positional arguments but 3 were given")
        return own(a, b, **more)

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(half_precision, "device_type", lambda x: "cuda")
    a, b = (torch.empty(sides, dtype=torch.bfloat16, device="meta") for sides in ((2, 3), (3, 4)))
    result = half_precision.product(a, b, torch.float32)
    assert result.dtype == torch.float32 and result.shape == (2, 4)
