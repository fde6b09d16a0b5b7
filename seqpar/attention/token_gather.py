"""Attention by gathering the tokens themselves: keys and values of the whole sequence are projected on each rank.

Legend: b batch, n tokens, e embedding, a heads, f features per head; ``n/s`` is this rank's share of the tokens,
c the heads of a chunk.

Half of what keys and values would move: with u = tokens x embedding / ranks elements, a rank sends 3(P-1)u in a
layer, or 2(P-1)u with the whole tokens kept. The price is the projection of all tokens on each rank, and, while the
layer runs, the whole tokens and their gradient; keys and values are there for a chunk of heads at a time.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.attention.kernels import pick
from seqpar.attention.partition import KIND, Rotate, heads_first, tokens_first
from seqpar.attention.strategies import heads_per_chunk
from seqpar.collectives import start_all_gather, start_reduce_scatter
from seqpar.mesh import Group
from seqpar.meta_tensors import device_type


def gather_x(
    x: Tensor,
    weight: Tensor,
    q_bias: Tensor | None,
    v_bias: Tensor | None,
    num_heads: int,
    group: Group,
    sizes: Sequence[int],
    rotate: Rotate | None = None,
    keep: bool = False,
    per_chunk: int | None = None,
) -> Tensor:
    """Returns attention ``b n/s a f`` of tokens ``x``, ``b n/s e``, projected here by ``weight``, ``3e e``.

    Nothing but the tokens and the output is held for the backward.

    *forward:* all-gather of the tokens, under the projection of this rank's queries.
    *backward:* the same gather again (unless ``keep``), then reduce-scatter of the gradient at all tokens, under
    what this rank's queries add to it. The weight's gradient is this rank's share, as everywhere.
    """
    if group.size == 1 or per_chunk is None:
        head_bytes = 2 * sum(sizes) * x.shape[0] * (weight.shape[1] // num_heads) * x.element_size()
        rows, on_gpu = sum(sizes) * x.shape[0] // group.size, device_type(x) == "cuda"
        per_chunk = num_heads if group.size == 1 else heads_per_chunk(num_heads, head_bytes, rows, on_gpu)
    how = num_heads, group, tuple(sizes), rotate, keep, per_chunk
    return _GatherX.apply(x, weight, q_bias, v_bias, *how)  # type: ignore[no-any-return]


class _GatherX(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, q_bias: Tensor | None, v_bias: Tensor | None, *how: Any) -> Tensor:
        num_heads, group, sizes, rotate, keep, per_chunk = how
        keep = keep and group.size > 1  # else the tokens are all there is
        whole, pending = start_all_gather(x.transpose(0, 1), group, 0, sizes, KIND)  # n b e
        q = _queries(x, weight, q_bias, num_heads, rotate)
        out = x.new_empty((*x.shape[:2], num_heads, q.shape[3]))  # b n/s a f
        place = out.transpose(0, 1)
        ctx.kernel = kernel = pick(q, q.shape[3])
        pending.wait()
        whole = whole.contiguous()
        states = []
        for heads in _chunks(num_heads, per_chunk):
            k, v = _keys_values(whole, weight, v_bias, heads, num_heads, rotate).unbind(2)
            mine, state = kernel.forward(heads_first(q[:, :, heads]), heads_first(k), heads_first(v))
            place[:, :, heads] = tokens_first(mine)
            states.append(state)
        ctx.how = how
        ctx.lengths = [len(state) for state in states]
        held = whole if keep else None
        ctx.save_for_backward(x, weight, q_bias, v_bias, out, held, *(t for state in states for t in state))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_heads, group, sizes, rotate, _, per_chunk = ctx.how
        x, weight, q_bias, v_bias, out, whole, *rest = ctx.saved_tensors
        assert grad.shape == out.shape, (grad.shape, out.shape)
        pending = None
        if whole is None:
            whole, pending = start_all_gather(x.transpose(0, 1), group, 0, sizes, KIND)
        q = _queries(x, weight, q_bias, num_heads, rotate)  # n/s b a f; each chunk gives its place to its gradient
        grad, out = grad.transpose(0, 1), out.transpose(0, 1)
        if pending is not None:
            pending.wait()
        whole = whole.contiguous()
        whole_dx = torch.zeros_like(whole, dtype=torch.promote_types(whole.dtype, torch.float32))
        dweight = torch.empty_like(weight)
        dv_bias = None if v_bias is None else torch.empty_like(v_bias)
        saved = iter(rest)
        for heads, length in zip(_chunks(num_heads, per_chunk), ctx.lengths):
            pair = _keys_values(whole, weight, v_bias, heads, num_heads, rotate)
            tensors = [heads_first(t) for t in (grad[:, :, heads], q[:, :, heads], *pair.unbind(2), out[:, :, heads])]
            dq, dk, dv = ctx.kernel.backward(*tensors, tuple(next(saved) for _ in range(length)))
            q[:, :, heads] = tokens_first(dq)
            pair[:, :, 0] = tokens_first(dk if rotate is None else rotate.whole(dk, back=True))
            pair[:, :, 1] = tokens_first(dv)
            del tensors, dq, dk, dv
            _add_projected(pair, whole, weight, heads, num_heads, whole_dx, dweight)
            if dv_bias is not None:
                dv_bias.view(num_heads, -1)[heads] = pair[:, :, 1].sum((0, 1))
            del pair
        del whole
        rows = whole_dx.to(x.dtype)
        del whole_dx
        summed = start_reduce_scatter(rows, group, sizes, KIND)
        del rows
        if rotate is not None:
            heads_first(q).copy_(rotate(heads_first(q), back=True))
        dq = q.transpose(0, 1).flatten(2)  # b n/s e
        width = weight.shape[1]
        dweight[:width] = dq.flatten(0, 1).t() @ x.flatten(0, 1)
        dx = dq @ weight[:width]
        dq_bias = None if q_bias is None else dq.sum((0, 1))
        dx += summed.wait().transpose(0, 1)
        assert dx.shape == x.shape and dweight.shape == weight.shape
        return dx, dweight, dq_bias, dv_bias, *[None] * len(ctx.how)


def _chunks(num_heads: int, per_chunk: int) -> Iterator[slice]:
    return (slice(low, min(low + per_chunk, num_heads)) for low in range(0, num_heads, per_chunk))


def _queries(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, rotate: Rotate | None) -> Tensor:
    """Returns this rank's queries ``n/s b a f``."""
    q = F.linear(x, weight[: weight.shape[1]], bias).unflatten(2, (num_heads, -1)).transpose(0, 1)
    if rotate is not None:
        view = heads_first(q)
        view.copy_(rotate(view))
    return q


def _rows_of(weight: Tensor, heads: slice, num_heads: int) -> Tensor:
    """Returns the rows of ``3e e`` that project to some heads' keys and values."""
    return weight.view(3, num_heads, -1, weight.shape[1])[1:, heads].flatten(0, 2)  # 2cf e


def _keys_values(
    whole: Tensor, weight: Tensor, v_bias: Tensor | None, heads: slice, num_heads: int, rotate: Rotate | None
) -> Tensor:
    """Returns keys and values ``n b 2 c f`` of all tokens ``n b e``."""
    pair = F.linear(whole, _rows_of(weight, heads, num_heads)).unflatten(2, (2, heads.stop - heads.start, -1))
    if v_bias is not None:
        pair[:, :, 1] += v_bias.view(num_heads, -1)[heads]
    if rotate is not None:
        view = heads_first(pair[:, :, 0])
        view.copy_(rotate.whole(view))
    return pair


def _add_projected(
    pair: Tensor, whole: Tensor, weight: Tensor, heads: slice, num_heads: int, whole_dx: Tensor, dweight: Tensor
) -> None:
    """Adds what the gradient ``n b 2 c f`` of keys and values makes at all tokens, and writes its weights'."""
    flat, rows = pair.flatten(2).flatten(0, 1), _rows_of(weight, heads, num_heads)  # nb 2cf, 2cf e
    sums = whole_dx.flatten(0, 1)
    if sums.dtype == flat.dtype:
        sums.addmm_(flat, rows)
    else:
        sums.add_(flat @ rows)  # many chunks' sums in float32
    share = (flat.t() @ whole.flatten(0, 1)).view(2, -1, pair.shape[4], weight.shape[1])
    dweight.view(3, num_heads, -1, weight.shape[1])[1:, heads] = share
