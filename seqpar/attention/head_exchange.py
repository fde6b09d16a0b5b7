"""Attention by exchanging heads inside, and gathering keys and values across: the paper's, Ulysses, and between.

Legend: b batch, n tokens, a heads, f features per head; ``n/s`` is this rank's share of the tokens, ``n/r`` that
of its inside group, c the heads of a chunk.

U of the P ranks change shares of tokens for shares of heads; keys and values are gathered across the other
R = P/U. With u = tokens x embedding / ranks elements, a rank sends 8(U-1)/U u + 6(R-1)u in a layer, or 4(R-1)u with
whole keys and values kept, where tokens and heads divide. U = 1 is the paper's gather, U = P is Ulysses. Heads go in
chunks: while one is attended, the next one's messages and the last one's gradients travel, and no more than two
chunks' whole keys and values are there.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.attention.kernels import pick
from seqpar.attention.partition import (
    Buffers,
    Rotate,
    Spread,
    heads_first,
    one_ahead,
    one_behind,
    tokens_first,
    turn_in_place,
)
from seqpar.mesh import Group


def exchange(
    qkv: Tensor,
    group: Group,
    sizes: Sequence[int],
    inner: int = 1,
    rotate: Rotate | None = None,
    keep: bool = False,
    per_chunk: int | None = None,
) -> Tensor:
    """Returns softmax(q Kᵀ/√f) V ``b n/s a f`` for keys and values of all ranks, of ``qkv``, ``b n/s 3 a f``.

    *forward:* all-to-all among ``inner`` ranks from shares of tokens to shares of heads, all-gather of keys and
    values across the others, attention, all-to-all back.
    *backward:* each reversed: all-to-all of the gradient, the same gather again (unless ``keep``), reduce-scatter
    of keys' and values' gradients, all-to-all back.
    """
    return _Exchange.apply(qkv, group, tuple(sizes), inner, rotate, keep, per_chunk)  # type: ignore[no-any-return]


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        group: Group,
        sizes: tuple[int, ...],
        inner: int,
        rotate: Rotate | None,
        keep: bool,
        per_chunk: int | None,
    ) -> Tensor:
        x = qkv.transpose(0, 1)  # n/s b 3 a f
        spread = Spread(group, sizes, inner, x, per_chunk)
        kernel = pick(qkv, spread.head_dim)
        keep = keep and spread.across.size > 1  # else nothing is gathered
        out = qkv.new_empty((*qkv.shape[:2], *qkv.shape[3:]))  # b n/s a f
        place = out.transpose(0, 1).unsqueeze(2)  # n/s b 1 a f
        parts: list[Tensor] = []
        pairs: list[Tensor] = []
        outs: list[Tensor] = []
        states: list[tuple[Any, ...]] = []
        buffers = None if keep else Buffers(x)
        came = one_ahead(spread.start_to_heads(x, at, rotate) for at in range(spread.num_chunks))
        gathered = one_ahead(spread.start_gather(part, at, buffers) for at, part in enumerate(came))

        def attended() -> Iterator[Tensor]:
            for at, (part, pair) in enumerate(gathered):
                mine, state = kernel.forward(*(heads_first(t) for t in (part[:, :, 0], *pair.unbind(2))))
                states.append(state)
                if spread.inside.size > 1:
                    held = tokens_first(mine).contiguous().unsqueeze(2)  # as the kernel wrote it, where it can
                    parts.append(part)
                    outs.append(held)
                else:  # both lie in qkv and out
                    held = spread.room(place, at)
                    held[:, :, 0] = tokens_first(mine)
                if keep:
                    pairs.append(pair)
                yield held

        for _ in one_ahead(spread.start_to_tokens(held, place, at) for at, held in enumerate(attended())):
            pass
        if spread.inside.size == 1:
            parts, outs = [qkv], [out]
        ctx.how = spread, kernel, rotate, keep
        ctx.counts = [len(tensors) for tensors in (parts, outs, pairs, *states)]
        ctx.shape = qkv.shape
        ctx.save_for_backward(*parts, *outs, *pairs, *(t for state in states for t in state))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        spread, kernel, rotate, keep = ctx.how
        parts, outs, pairs, *states = _split(ctx.saved_tensors, ctx.counts)
        assert grad.shape == (*ctx.shape[:2], *ctx.shape[3:]), (grad.shape, ctx.shape)
        dqkv = grad.new_empty(ctx.shape)
        dx = dqkv.transpose(0, 1)  # n/s b 3 a f
        buffers = Buffers(dqkv)
        chunks = range(spread.num_chunks)
        gives = grad.transpose(0, 1).unsqueeze(2)  # n/s b 1 a f
        grads = one_ahead(spread.start_to_heads(gives, at) for at in chunks)
        if spread.inside.size > 1:
            mine: Iterator[Tensor] = iter(parts)
        else:
            own = parts[0].transpose(0, 1)
            mine = (spread.start_to_heads(own, at, rotate).wait() for at in chunks)
            outs = [outs[0].transpose(0, 1).unsqueeze(2)[:, :, :, spread.mine(at)] for at in chunks]
        if keep:
            gathered: Iterator[tuple[Tensor, Tensor]] = zip(mine, pairs)
        else:
            gathered = one_ahead(spread.start_gather(part, at, buffers) for at, part in enumerate(mine))

        def differentiated() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
            for at, (grad_out, (part, pair)) in enumerate(zip(grads, gathered)):
                tensors = (grad_out[:, :, 0], part[:, :, 0], *pair.unbind(2), outs[at][:, :, 0])
                dq, dk, dv = kernel.backward(*(heads_first(t) for t in tensors), states[at])
                target = spread.room(dx, at)
                target[:, :, 0] = tokens_first(dq)
                del dq, tensors, grad_out, pair
                yield dk, dv, target

        summed = one_behind(differentiated(), lambda made: spread.start_reduce(*made, buffers))
        for at, _ in enumerate(one_ahead(spread.start_to_tokens(held, dx, at) for at, held in enumerate(summed))):
            if rotate is not None:
                for heads_of in spread.slices(at):
                    turn_in_place(dx[:, :, :, heads_of], partial(rotate, back=True))
        return dqkv, None, None, None, None, None, None


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    remaining = iter(tensors)
    return [[next(remaining) for _ in range(count)] for count in counts]
