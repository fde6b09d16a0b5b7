"""Attention that exchanges heads inside subgroups and gathers keys and values across them: the paper's, Ulysses, and
hybrids.

Legend: b batch, n tokens, a heads, f features per head; ``n/s`` is this rank's share of the tokens, ``n/r`` that of its
inside group, c the heads of a chunk.

U of the P ranks trade shares of tokens for shares of heads; keys and values are gathered across the other R = P/U. With
u = tokens x embedding / ranks elements, a rank sends 8(U-1)/U u + 6(R-1)u per layer, or 4(R-1)u if the gathered keys
and values are kept, where tokens and heads divide evenly. U = 1 is the paper's gather, U = P is Ulysses. Heads are
processed in chunks: while one is attended, the next one's messages and the previous one's results are in transit, and
gathered keys and values exist for at most two chunks.
"""

from collections.abc import Sequence
from typing import Any

from einops import rearrange
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.attention.kernels import State, kernel_for
from seqpar.attention.partition import (
    ChunkBuffers,
    HeadPartition,
    Prefetch,
    Rotary,
    heads_first,
    rotate_in_place,
    tokens_first,
)
from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import AwaitedTensor


def attend_by_head_exchange(
    qkv: Tensor,
    group: Group,
    sizes: Sequence[int],
    inner: int = 1,
    rotary: Rotary | None = None,
    keep_kv: bool = False,
    per_chunk: int | None = None,
) -> Tensor:
    """Returns softmax(q Kᵀ/√f) V, ``b n/s a f``, over the keys and values of all ranks.

    *forward:* all-to-all among ``inner`` ranks from shares of tokens to shares of heads, all-gather of keys and values
    across the others, attention, all-to-all back.
    *backward:* the adjoint of each: all-to-all of the gradient, the same gather again (unless ``keep_kv``),
    reduce-scatter of the gradients of keys and values, all-to-all back.

    - ``qkv``: this rank's queries, keys and values ``b n/s 3 a f``
    - ``sizes``: each rank's token count
    - ``inner``: number of ranks that exchange heads
    - ``rotary``: rotary positions of this rank's tokens; ``qkv`` is then rotated in place, so nothing else may use it
    - ``keep_kv``: keep the gathered keys and values until backward
    - ``per_chunk``: heads per chunk; None: by size
    """
    return _HeadExchange.apply(qkv, group, tuple(sizes), inner, rotary, keep_kv, per_chunk)  # type: ignore[no-any-return]


class _HeadExchange(Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        group: Group,
        sizes: tuple[int, ...],
        inner: int,
        rotary: Rotary | None,
        keep_kv: bool,
        per_chunk: int | None,
    ) -> Tensor:
        x = rearrange(qkv, "b n m a f -> n b m a f")
        if rotary is not None:
            rotate_in_place(x, rotary)
        partition = HeadPartition(group, sizes, inner, x, per_chunk)
        kernel, num_chunks = kernel_for(qkv, partition.head_dim, sum(sizes)), partition.num_chunks
        keep_kv = keep_kv and partition.across.size > 1  # else nothing is gathered
        is_kernels = partition.inside.size == 1 and num_chunks == 1  # the kernel's result is this rank's output
        out = qkv.new_empty((0 if is_kernels else len(qkv), qkv.shape[1], *qkv.shape[3:]))  # b n/s a f
        target = rearrange(out, "b n a f -> n b 1 a f")
        buffers = None if keep_kv else ChunkBuffers(x)
        heads = Prefetch(lambda at: partition.start_to_heads(x, at), num_chunks)
        gathered = Prefetch(lambda at: partition.start_gather(heads.take(at), at, buffers), num_chunks)
        returning = _Returning(partition, target)
        parts, outs, pairs, states = list[Tensor](), list[Tensor](), list[Tensor](), list[State]()
        for at in range(num_chunks):
            part, pair = gathered.take(at)
            attended, state = kernel.forward(*(heads_first(t) for t in (part[:, :, 0], *pair.unbind(2))))
            states.append(state)
            if keep_kv:
                pairs.append(pair)
            if is_kernels:
                out = rearrange(attended, "b a n f -> b n a f")
                break
            if partition.inside.size > 1:
                out_part = tokens_first(attended).contiguous().unsqueeze(2)  # no copy if the kernel wrote this order
                parts.append(part)
                outs.append(out_part)
            else:  # part and out_part are views of qkv and out
                out_part = partition.new_part(target, at)
                out_part[:, :, 0] = tokens_first(attended)
            returning.put(out_part, at)
        returning.finish()
        if partition.inside.size == 1:
            parts, outs = [qkv], [out]
        ctx.options = partition, kernel, rotary, keep_kv
        ctx.counts = [len(tensors) for tensors in (parts, outs, pairs, *states)]
        ctx.shape = qkv.shape
        ctx.save_for_backward(*parts, *outs, *pairs, *(t for state in states for t in state))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        partition, kernel, rotary, keep_kv = ctx.options
        parts, outs, pairs, *states = _split(ctx.saved_tensors, ctx.counts)
        assert grad.shape == (*ctx.shape[:2], *ctx.shape[3:]), (grad.shape, ctx.shape)
        dqkv = grad.new_empty(ctx.shape)
        dx = rearrange(dqkv, "b n m a f -> n b m a f")
        dout = rearrange(grad, "b n a f -> n b 1 a f")
        num_chunks, buffers = partition.num_chunks, ChunkBuffers(dqkv)
        if partition.inside.size == 1:  # forward saved qkv and out themselves
            x = rearrange(parts[0], "b n m a f -> n b m a f")
            outs = [rearrange(outs[0], "b n a f -> n b 1 a f")[:, :, :, partition.own(at)] for at in range(num_chunks)]

        def part_of(at: int) -> Tensor:  # n/r b 3 c f
            return partition.start_to_heads(x, at).wait() if partition.inside.size == 1 else parts[at]

        grads = Prefetch(lambda at: partition.start_to_heads(dout, at), num_chunks)
        gathered = Prefetch(lambda at: partition.start_gather(part_of(at), at, buffers), num_chunks)
        reducing: AwaitedTensor[Tensor] | None = None
        returning = _Returning(partition, dx)
        for at in range(num_chunks):
            grad_out = grads.take(at)
            part, pair = (part_of(at), pairs[at]) if keep_kv else gathered.take(at)
            tensors = (grad_out[:, :, 0], part[:, :, 0], *pair.unbind(2), outs[at][:, :, 0])
            dq, dk, dv = kernel.backward(*(heads_first(t) for t in tensors), states[at])
            target = partition.new_part(dx, at)
            del tensors, grad_out, part, pair
            if reducing is not None:  # was in transit while this chunk was computed
                returning.put(reducing.wait(), at - 1)
            reducing = partition.start_reduce(dq, dk, dv, target, buffers)
            del dq, dk, dv, target
        assert reducing is not None
        returning.put(reducing.wait(), num_chunks - 1)
        returning.finish()
        if rotary is not None:
            rotate_in_place(dx, rotary, back=True)
        return dqkv, None, None, None, None, None, None


class _Returning:
    """Sends chunks back to their tokens, each while the next one is computed."""

    def __init__(self, partition: HeadPartition, x: Tensor) -> None:
        """The chunks are written to ``x``, ``n/s b m a f``."""
        self._partition, self._x = partition, x
        self._under_way: AwaitedTensor[None] | None = None

    def put(self, part: Tensor, chunk: int) -> None:
        """Starts to send a chunk ``n/r b m c f``, then waits for the previous one."""
        started = self._partition.start_to_tokens(part, self._x, chunk)
        self.finish()
        self._under_way = started

    def finish(self) -> None:
        """Waits for the chunk that is in transit."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None


def _split(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[list[Tensor]]:
    remaining = iter(tensors)
    return [[next(remaining) for _ in range(count)] for count in counts]
