"""Collectives, each next to its adjoint; they count the bytes they send. Halo exchange and remaps use the same
messages.

The gradient rule: every backward here is the true adjoint of its forward (gather <-> reduce-scatter, sum <-> sum,
all-to-all <-> reversed all-to-all). Every rank computes a loss whose mean over ``data x seq`` is the loss, and
parameter gradients are averaged over ``data x seq``. There is no other scale factor. Backward therefore differentiates
the sum of all ranks' losses: the gradient at a part's input is the group's size times the single-process gradient.

Point-to-point traffic goes through ``post``: on gloo it is faster than gloo's own gathers for the same bytes, it allows
uneven sizes, and sums are added in rank order, so they do not depend on timing. On a GPU, even gathers and scatters and
all-to-alls of a whole group use NCCL's own collectives, except half-precision sums, which NCCL does not accumulate in
float32. A group of one moves nothing; meta tensors are counted, not sent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import (
    AwaitedTensor,
    Pending,
    check_collective,
    post,
    sendable,
    shape_and_dtype,
    start_messages,
)
from seqpar.parallel.shared_memory import INLINE

_SUMMED = 1 << 20  # bytes of a rank's piece that are summed at a time, so that they stay in its cache
# torch 2.13 renamed both; older ones know only the second name.
_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
           torch.int8, torch.uint8, torch.bool)  # fmt: skip


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int], kind: str = "gather") -> Tensor:
    """Gathers all ranks' ``x`` and concatenates them along ``dim``; not differentiable.

    - ``sizes``: each rank's extent along ``dim``
    - ``kind``: the name under which the bytes are counted
    """
    whole, pending = start_all_gather(x, group, dim, sizes, kind)
    pending.wait()
    return whole


def start_all_gather(
    x: Tensor, group: Group, dim: int, sizes: Sequence[int], kind: str = "gather"
) -> tuple[Tensor, Pending]:
    """Starts ``all_gather``; the returned tensor is complete once the messages have been waited for."""
    assert x.shape[dim] == sizes[group.index] and len(sizes) == group.size, (x.shape, dim, sizes)
    if group.size == 1:
        return x, Pending((), ())
    rows = x.movedim(dim, 0)
    whole = rows.new_empty((sum(sizes), *rows.shape[1:]))
    whole.split(list(sizes))[group.index].copy_(rows)
    return whole.movedim(0, dim), start_filling(whole, group, sizes, kind)


def start_filling(whole: Tensor, group: Group, sizes: Sequence[int], kind: str) -> Pending:
    """Starts to fill ``whole`` with all ranks' rows; this rank's own rows must already be there."""
    pieces = whole.split(list(sizes))
    mine = pieces[group.index]
    if _has_native(whole, group, sizes):
        group.count(kind, mine.numel() * mine.element_size() * (group.size - 1), group.size - 1)
        check_collective(kind, group, shape_and_dtype(whole))
        work = _gather_single(sendable(whole), sendable(mine), group=group.handle, async_op=True)
        return Pending((work,), (whole,), group.watch)
    return post(dict.fromkeys(group.peers, mine), {q: pieces[q] for q in group.peers}, group, kind)


def _has_native(rows: Tensor, group: Group, sizes: Sequence[int]) -> bool:
    return is_by_library(rows, group) and len(set(sizes)) == 1


def is_by_library(x: Tensor, group: Group) -> bool:
    """Returns whether NCCL's own collectives exchange ``x``: a GPU tensor in a group that is not a subgroup."""
    return x.is_cuda and group.size > 1 and group.places is None


def reduce_scatter(x: Tensor, group: Group, dim: int, sizes: Sequence[int], kind: str = "scatter") -> Tensor:
    """Sums ``x`` over all ranks and returns this rank's piece along ``dim``; not differentiable."""
    assert x.shape[dim] == sum(sizes) and len(sizes) == group.size, (x.shape, dim, sizes)
    if group.size == 1:
        return x
    rows = x.movedim(dim, 0).contiguous()
    return start_reduce_scatter(rows, group, sizes, kind).wait().movedim(0, dim)


def start_reduce_scatter(rows: Tensor, group: Group, sizes: Sequence[int], kind: str) -> AwaitedTensor[Tensor]:
    """Starts ``reduce_scatter`` along dimension 0; ``rows`` must not change until the result has been waited for."""
    pieces = rows.split(list(sizes))
    mine = pieces[group.index]
    if _has_native(rows, group, sizes) and rows.dtype.itemsize > 2:  # half precision is summed in float32
        summed = torch.empty_like(mine)
        group.count(kind, mine.numel() * mine.element_size() * (group.size - 1), group.size - 1)
        check_collective(kind, group, shape_and_dtype(rows))
        work = _scatter_single(summed, rows, group=group.handle, async_op=True)
        return AwaitedTensor(Pending((work,), (rows, summed), group.watch), lambda: summed)
    received = {q: torch.empty_like(mine) for q in group.peers}
    pending = post({q: pieces[q] for q in group.peers}, received, group, kind)
    return AwaitedTensor(pending, lambda: _sum_in_rank_order({**received, group.index: mine}))


def _sum_in_rank_order(pieces: Mapping[int, Tensor]) -> Tensor:
    """Returns the sum, accumulated in at least float32 in rank order, whichever message arrived first."""
    first, *rest = [pieces[q] for q in sorted(pieces)]
    wide = torch.promote_types(first.dtype, torch.float32) if first.is_floating_point() else first.dtype
    result = first.to(wide, copy=True)
    for piece in rest:
        result += piece
    return result.to(first.dtype)


def gather(
    x: Tensor, group: Group, dim: int, sizes: Sequence[int], equal_gradients: bool = False, kind: str = "gather"
) -> Tensor:
    """Gathers all ranks' ``x`` and concatenates them along ``dim``.

    *forward:* all-gather.
    *backward:* reduce-scatter (sum). With ``equal_gradients``, this rank's slice times the group's size: the same
    number without communication.

    - ``sizes``: each rank's extent along ``dim``
    - ``equal_gradients``: all ranks hold the same gradient because each computes the same function of the whole tensor
    - ``kind``: the name under which the bytes are counted
    """
    return _Gather.apply(x, group, dim, tuple(sizes), equal_gradients, kind)  # type: ignore[no-any-return]


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, dim: int, sizes: tuple[int, ...], equal_gradients: bool, kind: str
    ) -> Tensor:
        ctx.how = group, dim, sizes, equal_gradients, kind
        whole = all_gather(x, group, dim, sizes, kind)
        ctx.shapes = x.shape, whole.shape
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, dim, sizes, equal_gradients, kind = ctx.how
        part, whole = ctx.shapes
        assert grad.shape == whole, (grad.shape, whole)
        if equal_gradients:
            mine = grad.split(sizes, dim)[group.index]
            mine = mine * group.size if group.size > 1 else mine
        else:
            mine = reduce_scatter(grad, group, dim, sizes, kind)
        assert mine.shape == part, (mine.shape, part)
        return mine, None, None, None, None, None


def all_sum(x: Tensor, group: Group, kind: str = "sum") -> Tensor:
    """Returns the sum of all ranks' ``x``, the same on every rank.

    *forward:* all-reduce (sum).
    *backward:* all-reduce (sum).
    """
    return _AllSum.apply(x, group, kind)  # type: ignore[no-any-return]


class _AllSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, kind: str) -> Tensor:
        ctx.how = group, kind
        ctx.shape = x.shape
        return all_reduce(x, group, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assert grad.shape == ctx.shape, (grad.shape, ctx.shape)
        return all_reduce(grad, *ctx.how), None, None


def with_mean_gradient(x: Tensor, group: Group, kind: str = "input gradient") -> Tensor:
    """Returns ``x``, which all ranks hold alike, so that its gradient is that of one process on each of them.

    *forward:* nothing.
    *backward:* the mean over ranks, as DDP takes it for parameters.
    """
    needed = group.size > 1 and x.requires_grad and torch.is_grad_enabled()
    return _MeanGradient.apply(x, group, kind) if needed else x  # type: ignore[no-any-return]


class _MeanGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, kind: str) -> Tensor:
        ctx.how = group, kind
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, kind = ctx.how
        return all_reduce(grad, group, kind) / group.size, None, None


def all_reduce(x: Tensor, group: Group, kind: str = "sum") -> Tensor:
    """Returns the sum of all ranks' ``x`` as a new tensor; not differentiable."""
    result = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        assert group.places is None, "a subgroup only sends point-to-point messages"
        sent = 2 * (group.size - 1) * result.numel() * result.element_size() // group.size
        group.count(kind, sent, 2 * (group.size - 1))
        if result.is_meta:
            return result
        check_collective(kind, group, shape_and_dtype(result))
        sum_in_place(result, group)
    return result


def sum_in_place(x: Tensor, group: Group) -> None:
    """Replaces a contiguous tensor by the sum over the ranks; neither counted nor announced."""
    if group.link is None:
        with group.watch.waiting(x.is_cuda):
            dist.all_reduce(x, group=group.handle)
        return
    flat, own = x.view(-1), group.index
    if x.nbytes <= INLINE:  # one short message to each peer is quicker than two rounds
        flat.copy_(_sum_in_rank_order(dict(enumerate(gather_rows(flat, group)))))
        return
    for part in flat.tensor_split(-(-x.nbytes // (group.size * _SUMMED))):
        pieces = part.tensor_split(group.size)
        received = [(q, torch.empty_like(pieces[own])) for q in group.peers]
        _exchange([(q, pieces[q]) for q in group.peers], received, group)
        pieces[own].copy_(_sum_in_rank_order({**dict(received), own: pieces[own]}))
        _exchange([(q, pieces[own]) for q in group.peers], [(q, pieces[q]) for q in group.peers], group)


def average_bucket(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket of gradients over the ranks; a communication hook of ``DistributedDataParallel``."""
    mean = bucket.buffer().div_(group.size)
    with group.watch.clock.paused():  # what is waited for in a backward is counted at its end
        sum_in_place(mean, group)
    done = torch.futures.Future[Tensor]()
    done.set_result(mean)
    return done


def gather_rows(row: Tensor, group: Group) -> list[Tensor]:
    """Returns every rank's ``row``, contiguous and all of one shape, in rank order; neither counted nor announced."""
    rows = [row if q == group.index else torch.empty_like(row) for q in range(group.size)]
    if group.link is None:
        with group.watch.waiting(row.is_cuda):
            dist.all_gather(rows, row, group=group.handle)
    else:
        _exchange([(q, row) for q in group.peers], [(q, rows[q]) for q in group.peers], group)
    return rows


def _exchange(outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]], group: Group) -> None:
    """Sends and receives messages, by index in the group; neither counted nor announced."""
    Pending(start_messages(outgoing, incoming, group), [x for _, x in (*outgoing, *incoming)], group.watch).wait()


def all_to_all(
    x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int], kind: str = "all_to_all"
) -> Tensor:
    """Sends each rank its rows of ``x`` and returns the rows received, in rank order along dimension 0.

    *forward:* all-to-all.
    *backward:* the reversed all-to-all.

    - ``send``: how many rows of ``x`` go to each rank, in rank order
    - ``receive``: how many rows come from each rank
    """
    return _AllToAll.apply(x, group, tuple(send), tuple(receive), kind)  # type: ignore[no-any-return]


class _AllToAll(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, send: tuple[int, ...], receive: tuple[int, ...], kind: str
    ) -> Tensor:
        ctx.how = group, receive, send, kind
        ctx.shape = x.shape
        return exchange_rows(x, group, send, receive, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        assert grad.shape[0] == sum(ctx.how[1]) and grad.shape[1:] == ctx.shape[1:], (grad.shape, ctx.shape)
        result = exchange_rows(grad, *ctx.how)
        assert result.shape == ctx.shape, (result.shape, ctx.shape)
        return result, None, None, None, None


def exchange_rows(
    x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int], kind: str = "all_to_all"
) -> Tensor:
    """Computes ``all_to_all`` without a gradient."""
    assert len(send) == len(receive) == group.size and x.shape[0] == sum(send), (x.shape, send, receive)
    assert send[group.index] == receive[group.index], (send, receive)
    rows = x.contiguous()
    result = rows.new_empty((sum(receive), *rows.shape[1:]))
    if is_by_library(rows, group):
        width = rows.shape[1:].numel()
        start_all_to_all(rows, [n * width for n in send], result, [n * width for n in receive], group, kind).wait()
        return result
    outgoing, incoming = rows.split(list(send)), result.split(list(receive))
    incoming[group.index].copy_(outgoing[group.index])
    post({q: outgoing[q] for q in group.peers}, {q: incoming[q] for q in group.peers}, group, kind).wait()
    return result


def start_all_to_all(
    x: Tensor, send: Sequence[int], result: Tensor, receive: Sequence[int], group: Group, kind: str
) -> Pending:
    """Starts an all-to-all of elements by the backend's own collective; ``result`` is filled in rank order.

    - ``send``: how many elements of ``x`` go to each rank, itself included
    - ``receive``: how many elements come from each rank, itself included
    """
    counts = [count for place, count in enumerate(send) if place != group.index and count]
    group.count(kind, sum(counts) * x.element_size(), len(counts))
    check_collective(kind, group, f"of {x.dtype}")
    into, source = (
        t.view(-1).view(torch.uint8) for t in (result, x)
    )  # as bytes, for dtypes that NCCL does not support
    coming, leaving = ([count * x.element_size() for count in side] for side in (receive, send))
    work = dist.all_to_all_single(into, source, coming, leaving, group=group.handle, async_op=True)
    return Pending((work,), (into, source), group.watch)


def full_tensor(x: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor, or ``x`` itself, detached."""
    full: Callable[[], Tensor] | None = getattr(x, "full_tensor", None)
    return x.detach() if full is None else full().detach()


def broadcast_tensors(tensors: Sequence[Tensor], group: Group, device: torch.device) -> list[Tensor]:
    """Returns the first rank's tensors on every rank of ``group``, on ``device``; those of the others are ignored."""
    if group.size == 1:
        return [tensor.to(device) for tensor in tensors]
    is_first = group.index == 0
    described = [number for x in tensors for number in (_DTYPES.index(x.dtype), x.ndim, *x.shape)] if is_first else []

    def sent(x: Tensor) -> Tensor:
        _broadcast(x, group)
        return x

    count = int(sent(torch.tensor([len(described)], device=device)))
    numbers = torch.tensor(described or [0] * count, device=device)
    facts, received = sent(numbers).tolist(), list[Tensor]()
    while facts:
        kind, dims, shape = facts[0], facts[1], facts[2 : 2 + facts[1]]
        x = torch.empty(shape, dtype=_DTYPES[kind], device=device)
        if is_first:
            x.copy_(tensors[len(received)])
        sent(x.view(-1).view(torch.uint8))  # bytes, which every backend sends
        received.append(x)
        facts = facts[2 + dims :]
    return received


def equal_weights(module: nn.Module, group: Group) -> None:
    """Copies the first rank's parameters and buffers to every rank of ``group``."""
    if group.size == 1:
        return
    group.watch.enter("first weights", group)
    for tensor in [*module.parameters(), *module.buffers()]:
        _broadcast(tensor.data, group)


def _broadcast(x: Tensor, group: Group) -> None:
    """Replaces ``x`` by the first rank's."""
    if group.link is None:
        with group.watch.waiting(x.is_cuda):
            dist.broadcast(x, group.ranks[0], group=group.handle)
        return
    line = x.contiguous()
    to_all, from_first = [(q, line) for q in group.peers], [(0, line)]
    _exchange(*((to_all, []) if group.index == 0 else ([], from_first)), group)
    if line is not x:
        x.copy_(line)
