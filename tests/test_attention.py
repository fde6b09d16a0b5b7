"""Spread attention equals torch's on the whole sequence, moves the formula's bytes and keeps nothing whole."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import relative
from torch import Tensor

from seqpar import attention
from seqpar.attention import Attention, gather_kv
from seqpar.mesh import Mesh


def tensors(n: int, heads: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    toss = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, n, 5, generator=toss, dtype=torch.float64).to(dtype) for _ in range(4)]


def check_attention(mesh: Mesh, sizes: list[int], keep: bool, dtype: torch.dtype, bound: float) -> dict[str, list[int]]:
    q, k, v, weight = tensors(sum(sizes), dtype=dtype)
    for t in (q, k, v):
        t.requires_grad_()
    want = F.scaled_dot_product_attention(q, k, v)
    grads = torch.autograd.grad(want, (q, k, v), weight)
    group, sent = mesh.seq, {}
    mine = [t.detach().split(sizes, 2)[group.index].requires_grad_() for t in (q, k, v)]
    group.traffic.clear()
    out = gather_kv(*mine, group, sizes, keep)
    sent["forward"] = [group.traffic["attention"]]
    got = torch.autograd.grad(out, mine, weight.split(sizes, 2)[group.index])
    sent["backward"] = [group.traffic["attention"] - sent["forward"][0]]
    assert relative(out, want.split(sizes, 2)[group.index]) < bound
    for mine_grad, grad in zip(got, grads):
        assert relative(mine_grad, grad.split(sizes, 2)[group.index]) < bound
    return sent


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("sizes", [[7], [4, 4], [5, 2, 4], [2, 2, 2, 2], [1, 2, 3, 1, 2, 3], [3, 1, 2, 2, 1, 1, 4, 2]])
def test_attention_equals_torch_on_the_whole_sequence(sizes: list[int], keep: bool, ranks: Callable[..., list]) -> None:
    world = len(sizes)
    found = ranks(world, check_attention, sizes, keep, torch.float64, 1e-12)
    forward = sum(sent["forward"][0] for sent in found)
    backward = sum(sent["backward"][0] for sent in found)
    whole = sum(sizes) * 2 * 3 * 5 * 8  # bytes of N x E for the batch: over all ranks, P u
    assert forward == 2 * (world - 1) * whole
    assert backward == (2 if keep else 4) * (world - 1) * whole


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_lower_precision_stays_close(dtype: torch.dtype, bound: float, ranks: Callable[..., list]) -> None:
    ranks(3, check_attention, [5, 2, 4], False, dtype, bound)


def check_plain_kernels(mesh: Mesh) -> None:
    """Without a kernel that hands out its log-sum-exp, torch's own attention is run again in backward."""
    attention._attend = lambda q, k, v: (F.scaled_dot_product_attention(q, k, v), None)  # type: ignore[assignment]
    check_attention(mesh, [5, 2, 4], False, torch.float64, 1e-12)


def test_attention_is_exact_where_only_torchs_own_call_is_there(ranks: Callable[..., list]) -> None:
    ranks(3, check_plain_kernels)


def test_the_module_is_torchs_multi_head_attention() -> None:
    torch.manual_seed(0)
    ours, theirs = Attention(12, 3).double(), torch.nn.MultiheadAttention(12, 3, batch_first=True).double()
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
    with pytest.raises(ValueError, match="--heads 5 does not divide --embed-dim 12"):
        Attention(12, 5)
