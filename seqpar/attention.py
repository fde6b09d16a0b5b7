"""Attention of this rank's queries over a sequence that is spread over a group.

Legend: b batch, n tokens, e embedding, a heads, f features per head; ``n/s`` is this rank's share of the tokens.

``gather_kv`` is the paper's: queries stay, keys and values of all ranks come to each. Other strategies fit
beside it with the same arguments; ``Attention`` is the one caller. Nothing of whole-sequence size is kept for the
backward unless ``keep`` asks for it: keys and values are then gathered again. With u = tokens x embedding / ranks
elements, a layer moves 2(P-1)u forward and 4(P-1)u backward, kept 2(P-1)u backward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.collectives import all_gather, reduce_scatter
from seqpar.mesh import Group

Rotate = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Multi-head self-attention of the tokens of all ranks, computed for this rank's queries.

    Keys have no bias: softmax does not see it, its gradient is zero, and Adam would amplify that zero's noise.
    ``norm_eps`` asks for a LayerNorm over the joined heads, before the projection.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        group: Group | None = None,
        keep: bool = False,
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            fits = [h for h in range(1, embed_dim + 1) if embed_dim % h == 0 and h <= 2 * num_heads]
            raise ValueError(f"--heads {num_heads} does not divide --embed-dim {embed_dim}: use {fits[-3:]}")
        self.num_heads, self.keep = num_heads, keep
        self.group = group or Group("seq")
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(embed_dim)) if qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(embed_dim)) if qkv_bias else None
        self.norm = nn.LayerNorm(embed_dim, norm_eps) if norm_eps is not None else nn.Identity()
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, sizes: Sequence[int], rotate: Rotate | None = None) -> Tensor:
        """Returns the attended tokens; ``sizes`` are all ranks' token counts, ``rotate`` turns queries and keys."""
        bias = None
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).unflatten(2, (3, self.num_heads, -1))  # b n/s 3 a f
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each b a n/s f
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        out = gather_kv(q, k, v, self.group, sizes, self.keep)
        return self.proj(self.norm(out.transpose(1, 2).flatten(2)))


def gather_kv(
    q: Tensor, k: Tensor, v: Tensor, group: Group, sizes: Sequence[int], keep: bool = False
) -> Tensor:
    """Returns softmax(q Kᵀ/√f) V for K, V of all ranks, each tensor ``b a n/s f``.

    *forward:* all-gather of keys and values in one message.
    *backward:* the same gather again (unless ``keep``), then reduce-scatter of their gradients in one message.
    """
    return _GatherKV.apply(q, k, v, group, tuple(sizes), keep)  # type: ignore[no-any-return]


class _GatherKV(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group, sizes: tuple[int, ...], keep: bool
    ) -> Tensor:
        whole_k, whole_v = _gather_pair(k, v, group, sizes)  # b a n f
        out, log_sum = _attend(q, whole_k, whole_v)
        ctx.how = group, sizes, keep
        ctx.save_for_backward(q, *((whole_k, whole_v) if keep else (k, v)), out, log_sum)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, sizes, keep = ctx.how
        q, k, v, out, log_sum = ctx.saved_tensors
        assert grad.shape == out.shape, (grad.shape, out.shape)
        if not keep:
            k, v = _gather_pair(k, v, group, sizes)
        dq, whole_dk, whole_dv = _attend_backward(grad, q, k, v, out, log_sum)
        assert whole_dk.shape == k.shape and whole_dv.shape == v.shape, (whole_dk.shape, k.shape)
        pair = _tokens_first(whole_dk, whole_dv)
        dk, dv = _pair(reduce_scatter(pair, group, 0, sizes, "attention"))
        assert dq.shape == q.shape and dk.shape[2] == sizes[group.index], (dq.shape, dk.shape)
        return dq, dk, dv, None, None, None


def _tokens_first(k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([k, v]).permute(3, 1, 0, 2, 4)  # n b 2 a f


def _pair(both: Tensor) -> tuple[Tensor, Tensor]:
    k, v = both.permute(2, 1, 3, 0, 4)  # b a n f
    return k, v


def _gather_pair(k: Tensor, v: Tensor, group: Group, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    if group.size == 1:
        return k, v
    return _pair(all_gather(_tokens_first(k, v), group, 0, sizes, "attention"))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns attention and, where the kernel hands it out, the log-sum-exp of its scores."""
    if q.device.type == "cpu":
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return out, log_sum
    return F.scaled_dot_product_attention(q, k, v), None


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    if log_sum is not None:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, log_sum, 0.0, False
        )
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        dq, dk, dv = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), grad)
    return dq, dk, dv
