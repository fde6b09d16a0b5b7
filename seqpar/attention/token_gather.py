"""Attention that gathers the tokens themselves: each rank projects the keys and values of the whole sequence.

Legend: b batch, n tokens, e embedding, a heads, f features per head; ``n/s`` is this rank's share of the tokens, c the
heads of a chunk, m keys and values.

This sends half as much as gathering keys and values: with u = tokens x embedding / ranks elements, a rank sends 3(P-1)u
per layer, or 2(P-1)u if the gathered tokens are kept. The price is the projection of all tokens on each rank and, while
the layer runs, the whole sequence and its gradient; keys and values exist for one chunk of heads at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.attention.kernels import kernel_for
from seqpar.attention.partition import KIND, Rotary, heads_first, tokens_first
from seqpar.attention.strategies import choose_heads_per_chunk
from seqpar.parallel.collectives import start_all_gather, start_reduce_scatter
from seqpar.parallel.mesh import Group
from seqpar.parallel.meta_tensors import device_type


def attend_to_gathered_tokens(
    x: Tensor,
    weight: Tensor,
    q_bias: Tensor | None,
    v_bias: Tensor | None,
    num_heads: int,
    group: Group,
    sizes: Sequence[int],
    rotary: Rotary | None = None,
    keep_tokens: bool = False,
    per_chunk: int | None = None,
) -> Tensor:
    """Projects tokens and returns their attention ``b n/s a f``; keeps only the tokens and the output for backward.

    *forward:* all-gather of the tokens, overlapped with the projection of this rank's queries.
    *backward:* the same gather again (unless ``keep_tokens``), then reduce-scatter of the gradient at all tokens,
    overlapped with the gradient of this rank's queries. The weight's gradient is this rank's share, as everywhere.

    - ``x``: this rank's tokens ``b n/s e``
    - ``weight``: the projection to queries, keys and values, ``3e e``
    - ``sizes``: each rank's token count
    - ``rotary``: rotary positions of this rank's tokens
    - ``keep_tokens``: keep the gathered tokens until backward
    - ``per_chunk``: heads per chunk; None: by size
    """
    if group.size == 1:
        per_chunk = num_heads
    elif per_chunk is None:
        head_bytes = 2 * sum(sizes) * x.shape[0] * (weight.shape[1] // num_heads) * x.element_size()
        rows = sum(sizes) * x.shape[0] // group.size
        per_chunk = choose_heads_per_chunk(num_heads, head_bytes, rows, device_type(x))
    options = num_heads, group, tuple(sizes), rotary, keep_tokens, per_chunk
    return _GatherX.apply(x, weight, q_bias, v_bias, *options)  # type: ignore[no-any-return]


class _GatherX(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, q_bias: Tensor | None, v_bias: Tensor | None, *options: Any
    ) -> Tensor:
        num_heads, group, sizes, rotary, keep_tokens, per_chunk = options
        keep_tokens = keep_tokens and group.size > 1  # a single rank has all tokens anyway
        whole, pending = start_all_gather(rearrange(x, "b n e -> n b e"), group, 0, sizes, KIND)
        q = _queries(x, weight, q_bias, num_heads, rotary)
        out = x.new_empty((*x.shape[:2], num_heads, q.shape[3]))  # b n/s a f
        target = rearrange(out, "b n a f -> n b a f")
        ctx.kernel = kernel = kernel_for(q, q.shape[3], sum(sizes))
        pending.wait()
        whole = whole.contiguous()
        states = []
        for heads in _chunks(num_heads, per_chunk):
            k, v = _keys_values(whole, weight, v_bias, heads, num_heads, rotary).unbind(2)
            attended, state = kernel.forward(heads_first(q[:, :, heads]), heads_first(k), heads_first(v))
            target[:, :, heads] = tokens_first(attended)
            states.append(state)
        ctx.options = options
        ctx.lengths = [len(state) for state in states]
        kept = whole if keep_tokens else None
        ctx.save_for_backward(x, weight, q_bias, v_bias, out, kept, *(t for state in states for t in state))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        num_heads, group, sizes, rotary, _, per_chunk = ctx.options
        x, weight, q_bias, v_bias, out, whole, *saved = ctx.saved_tensors
        assert grad.shape == out.shape, (grad.shape, out.shape)
        pending = None
        if whole is None:
            whole, pending = start_all_gather(rearrange(x, "b n e -> n b e"), group, 0, sizes, KIND)
        q = _queries(x, weight, q_bias, num_heads, rotary)  # n/s b a f; each chunk is overwritten by its gradient
        grad, out = (rearrange(t, "b n a f -> n b a f") for t in (grad, out))
        if pending is not None:
            pending.wait()
        whole = whole.contiguous()
        whole_dx = torch.zeros_like(whole, dtype=torch.promote_types(whole.dtype, torch.float32))
        dweight = torch.empty_like(weight)
        dv_bias = None if v_bias is None else torch.empty_like(v_bias)
        states = iter(saved)
        for heads, length in zip(_chunks(num_heads, per_chunk), ctx.lengths):
            pair = _keys_values(whole, weight, v_bias, heads, num_heads, rotary)
            tensors = [heads_first(t) for t in (grad[:, :, heads], q[:, :, heads], *pair.unbind(2), out[:, :, heads])]
            dq, dk, dv = ctx.kernel.backward(*tensors, tuple(next(states) for _ in range(length)))
            q[:, :, heads] = tokens_first(dq)
            pair[:, :, 0], pair[:, :, 1] = tokens_first(dk), tokens_first(dv)
            if rotary is not None:
                rotary.whole.rotate_(heads_first(pair[:, :, 0]), back=True)
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
        if rotary is not None:
            rotary.rotate_(heads_first(q), back=True)
        dq = rearrange(q, "n b a f -> b n (a f)")
        width = weight.shape[1]
        dweight[:width] = rearrange(dq, "b n e -> (b n) e").t() @ rearrange(x, "b n e -> (b n) e")
        dx = dq @ weight[:width]
        dq_bias = None if q_bias is None else dq.sum((0, 1))
        dx += rearrange(summed.wait(), "n b e -> b n e")
        assert dx.shape == x.shape and dweight.shape == weight.shape
        return dx, dweight, dq_bias, dv_bias, *[None] * len(ctx.options)


def _chunks(num_heads: int, per_chunk: int) -> list[slice]:
    return [slice(low, min(low + per_chunk, num_heads)) for low in range(0, num_heads, per_chunk)]


def _queries(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, rotary: Rotary | None) -> Tensor:
    """Returns this rank's queries ``n/s b a f``."""
    q = rearrange(F.linear(x, weight[: weight.shape[1]], bias), "b n (a f) -> n b a f", a=num_heads)
    if rotary is not None:
        rotary.rotate_(heads_first(q))
    return q


def _rows_of(weight: Tensor, heads: slice, num_heads: int) -> Tensor:
    """Returns the rows of the projection ``3e e`` for some heads' keys and values, ``2cf e``."""
    by_heads = rearrange(weight, "(m a f) e -> m a f e", m=3, a=num_heads)
    return rearrange(by_heads[1:, heads], "m c f e -> (m c f) e")


def _keys_values(
    whole: Tensor, weight: Tensor, v_bias: Tensor | None, heads: slice, num_heads: int, rotary: Rotary | None
) -> Tensor:
    """Returns the keys and values ``n b 2 c f`` of all tokens ``n b e``."""
    projected = F.linear(whole, _rows_of(weight, heads, num_heads))
    pair = rearrange(projected, "n b (m c f) -> n b m c f", m=2, c=heads.stop - heads.start)
    if v_bias is not None:
        pair[:, :, 1] += v_bias.view(num_heads, -1)[heads]
    if rotary is not None:
        rotary.whole.rotate_(heads_first(pair[:, :, 0]))
    return pair


def _add_projected(
    pair: Tensor, whole: Tensor, weight: Tensor, heads: slice, num_heads: int, whole_dx: Tensor, dweight: Tensor
) -> None:
    """Adds the gradient at all tokens of some heads' keys and values to ``whole_dx``, ``n b e``.

    Writes these heads' rows of ``dweight``. ``pair``, ``n b 2 c f``, is the gradient of keys and values.
    """
    flat, rows = rearrange(pair, "n b m c f -> (n b) (m c f)"), _rows_of(weight, heads, num_heads)
    sums = whole_dx.flatten(0, 1)  # n b e -> (n b) e, a view
    if sums.dtype == flat.dtype:
        sums.addmm_(flat, rows)
    else:
        sums.add_(flat @ rows)  # chunks are accumulated in float32
    own = flat.t() @ rearrange(whole, "n b e -> (n b) e")
    by_heads = dweight.view(3, num_heads, -1, weight.shape[1])
    by_heads[1:, heads] = rearrange(own, "(m c f) e -> m c f e", m=2, f=pair.shape[4])
