"""The attention module is torch's multi-head attention, in autocast too; each kernel is called as torch declares it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from seqpar.attention import kernels
from seqpar.attention.self_attention import ParallelAttention
from seqpar.parallel.mesh import Group, Mesh
from tests.support.ranks import relative


def test_the_module_is_torchs_multi_head_attention() -> None:
    torch.manual_seed(0)
    ours, theirs = ParallelAttention(12, 3).double(), torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
    with torch.no_grad():
        for bias in (ours.q_bias, ours.v_bias, ours.proj.bias):
            assert bias is not None
            bias.normal_()
        theirs.in_proj_weight.copy_(ours.qkv.weight)
        theirs.in_proj_bias.copy_(torch.cat([ours.q_bias, torch.randn(12), ours.v_bias]))  # type: ignore[list-item]
        theirs.out_proj.load_state_dict(ours.proj.state_dict())
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    assert relative(ours(x, [7]), theirs(x, x, x)[0]) < 1e-13  # and a bias on keys changes nothing


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads=5 does not divide embed_dim=12"):
        ParallelAttention(12, 5)
    with pytest.raises(ValueError, match="heads_per_chunk=4: choose 1 to 3"):
        ParallelAttention(12, 3, heads_per_chunk=4)


def inputs(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    toss = torch.Generator().manual_seed(0)
    shapes = [(2, 3, n, 8) for n in (5, 7, 7, 5)]  # q, k, v and a gradient, in no kernel's memory order
    return [torch.randn(shape, generator=toss, dtype=torch.float64).to(device, dtype) for shape in shapes]


def test_the_plain_kernel_is_the_one_of_the_cpu() -> None:
    q, k, v, grad = inputs(torch.float64)
    results = []
    for kernel in (kernels.PLAIN, kernels.CPU_FLASH):
        out, state = kernel.forward(q, k, v)
        results.append((out, *kernel.backward(grad, q, k, v, out, state)))
    assert all(relative(a, b) < 1e-13 for a, b in zip(*results))
    assert kernels.kernel_for(q, 8, 7) is kernels.CPU_FLASH


@pytest.mark.parametrize("kernel", [kernels.FLASH, kernels.EFFICIENT, kernels.CUDNN], ids=lambda kernel: kernel.name)
def test_the_kernels_of_gpus_take_and_return_what_torch_declares(kernel: kernels.Kernel) -> None:
    """On tensors without memory torch checks every argument and makes every shape, and computes nothing."""
    q, k, v, grad = inputs(torch.bfloat16, "meta")
    out, state = kernel.forward(q, k, v)
    assert out.shape == q.shape and len(state) == 3 and all(isinstance(t, Tensor) for t in state)
    dq, dk, dv = kernel.backward(grad, q, k, v, out, state)
    assert dq.shape == q.shape and dk.shape == k.shape and dv.shape == v.shape


@pytest.mark.parametrize("hip", ["6.4", None], ids=["amd", "nvidia"])
@pytest.mark.parametrize("kernel", [kernels.FLASH, kernels.EFFICIENT, kernels.CUDNN], ids=lambda kernel: kernel.name)
def test_the_kernels_of_gpus_get_all_tensors_in_one_memory_order(
    kernel: kernels.Kernel, hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []

    class Spy:
        def __getattr__(self, name: str) -> Callable:
            op = getattr(torch.ops.aten, name)

            def call(*args: object, **named: object) -> object:
                seen.extend(t for t in (*args, named.get("out")) if isinstance(t, Tensor) and t.ndim == 4)
                return op(*args, **named)

            return call

    monkeypatch.setattr(kernels, "aten", Spy())
    monkeypatch.setattr(torch.version, "hip", hip)
    _, _, _, grad = inputs(torch.bfloat16, "meta")
    batch, heads, count, width = grad.shape
    q, k, v = torch.empty(batch, count, 3, heads, width, dtype=grad.dtype, device="meta").permute(2, 0, 3, 1, 4)
    out, state = kernel.forward(q, k, v)
    kernel.backward(grad, q, k, v, out.contiguous(), state)
    assert len(seen) == 3 + 5
    apart = [not t.transpose(1, 2).is_contiguous() for t in seen]
    packed = hip is None  # NVIDIA's read queries, keys and values where they were projected
    assert apart == [packed] * 3 + ([False, packed, packed, packed, False]), apart
    assert all(t.stride()[2] > t.stride()[1] > t.stride()[3] == 1 for t in seen)


ALL = ("flash 3", "cudnn", "flash", "efficient")


@pytest.mark.parametrize(
    "kind, capability, allowed, head_dim, num_keys, kernel",
    [
        ("cpu", (0, 0), (), 64, 9, "flash, CPU"),
        ("meta", (0, 0), (), 64, 9, "flash, CPU"),
        ("mps", (0, 0), (), 64, 9, "plain"),
        ("cuda", (8, 0), ALL, 64, 140400, "flash"),  # A100: neither was made for it
        ("cuda", (9, 0), ALL, 64, 140400, "flash 3"),  # H100
        ("cuda", (9, 0), ALL[1:], 64, 140400, "cudnn"),
        ("cuda", (9, 0), ALL[1:], 64, 216, "flash"),  # short
        ("cuda", (9, 0), ALL[1:], 256, 4096, "flash"),  # wide
        ("cuda", (10, 0), ALL, 128, 4096, "cudnn"),  # B200
        ("cuda", (9, 0), ALL[2:], 64, 4096, "flash"),  # AMD's MI200 calls itself so too, and has no cuDNN
        ("cuda", (9, 0), ALL, 36, 4096, "plain"),  # torch pads such heads
        ("cuda", (8, 0), ("efficient",), 36, 4096, "efficient"),  # float32
        ("cuda", (7, 5), (), 64, 4096, "plain"),  # float64
    ],
)
def test_each_device_gets_its_kernel(
    kind: str, capability: tuple[int, int], allowed: tuple[str, ...], head_dim: int, num_keys: int, kernel: str
) -> None:
    assert kernels.fastest_kernel(kind, capability, allowed, head_dim, num_keys).name == kernel


def test_no_head_and_no_query_are_nothing() -> None:
    q, k, v, _ = inputs(torch.float64)
    empty = q[:, :, :0]
    out, state = kernels.CPU_FLASH.forward(empty, k, v)
    grads = kernels.CPU_FLASH.backward(empty, empty, k, v, out, state)
    assert out.shape == empty.shape and [g.shape for g in grads] == [empty.shape, k.shape, v.shape]
    assert not grads[1].any() and not grads[2].any()


def in_autocast(mesh: Mesh, name: str) -> tuple[float, float, str, int]:
    """Returns how far the output and a weight's gradient lie from float32's, the output's type, and the bytes sent."""
    torch.manual_seed(0)
    net = ParallelAttention(24, 3, group=mesh.seq, strategy=name)
    x = torch.randn(1, 9, 24).split([5, 4], 1)[mesh.seq.index]
    grads, outs = [], []
    for enabled in (False, True):
        net.zero_grad()
        mesh.seq.traffic.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled):
            out = net(x, [5, 4])
        out.float().square().sum().backward()
        assert net.qkv.weight.grad is not None
        grads.append(net.qkv.weight.grad.clone())
        outs.append(out)
    kind = str(outs[1].dtype)
    return relative(outs[1].float(), outs[0]), relative(grads[1], grads[0]), kind, mesh.seq.traffic["attention"]


def all_in_autocast(mesh: Mesh) -> list[tuple[float, float, str, int]]:
    return [in_autocast(mesh, name) for name in ("gather-kv", "gather-x", "ulysses")]


def same_by_torchs_group(mesh: Mesh) -> list[bool]:
    """Returns for each strategy, given by its name, whether torch's own group gives the bits of ours."""
    x, same = torch.randn(1, 4, 24), []
    for name in ("gather-kv", "gather-x", "ulysses"):
        outs = []
        for group in (mesh.seq, mesh.seq.handle):
            torch.manual_seed(0)
            outs.append(ParallelAttention(24, 3, group=group, strategy=name)(x, [4, 4]))
        same.append(torch.equal(*outs))
    return same


def test_the_module_takes_torchs_process_group_and_a_strategys_name(ranks: Callable[..., list]) -> None:
    assert ranks(2, same_by_torchs_group) == [[True] * 3] * 2


def test_an_unknown_strategy_and_sizes_that_cannot_be_are_refused_by_their_arguments() -> None:
    pair = Group("seq", (0, 1))
    for options, advice in (
        ({"strategy": "ring"}, "strategy='ring': choose gather-kv, gather-x, ulysses, hybrid or hybrid:U"),
        ({"strategy": "hybrid", "group": pair}, "strategy='hybrid': 2 ranks allow no hybrid: use gather-x"),
        ({"strategy": "ulysses", "group": pair, "keep_kv": True}, "no effect with strategy='ulysses'"),
        ({"num_heads": 0}, "num_heads=0: give a whole number above 0"),
    ):
        with pytest.raises(ValueError, match=advice):
            ParallelAttention(**{"embed_dim": 12, "num_heads": 3, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gather-kv", "gather-x"])
def test_float64_stays_what_it_is_under_autocast(name: str) -> None:
    torch.manual_seed(0)
    net, x = ParallelAttention(24, 3, strategy=name).double(), torch.randn(1, 9, 24, dtype=torch.float64)
    plain = net(x, [9])
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x, [9])
    out.sum().backward()
    assert out.dtype == torch.float64 and torch.equal(out, plain)


def test_autocast_computes_and_sends_half_precision(ranks: Callable[..., list]) -> None:
    element = 2
    kv, x, heads = ranks(2, all_in_autocast)[0]
    for out, grad, kind, _ in (kv, x, heads):
        assert 0 < out < 0.03 and 0 < grad < 0.06 and kind == "torch.bfloat16"
    assert kv[3] == element * 24 * (2 * (2 * 5) + 2 * 4)  # twice its own 5 tokens' pair, and 4 others' gradient
    assert x[3] == element * 24 * (2 * 5 + 4)
    assert heads[3] == element * 8 * ((5 * 1 + 4 * 2) * 4)  # one head of three goes away, two come
