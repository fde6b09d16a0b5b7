"""Collectives, each with its adjoint beside it, counted in bytes; halo exchange and remaps stand on the same messages.

The gradient rule: every backward here is the true adjoint of its forward (gather <-> reduce-scatter, sum <-> sum,
all-to-all <-> the reversed one). Every rank holds a loss whose mean over ``data x seq`` is the loss, and parameter
gradients are averaged over ``data x seq``. There is no other scale factor anywhere. Backward so differentiates the
sum of all ranks' losses: the gradient at a part's input is the group's size times the one of a single process.

All traffic between pairs goes through ``post``: on gloo that is faster than its own gathers at the same bytes, it
takes uneven sizes, and sums are added in rank order, so that they do not depend on timing. On a GPU, even gathers and
scatters, and all-to-alls of a whole group, use the library's own, but for sums in half precision, which it does not add
in float32. A group of one moves nothing; tensors without data ("meta") are counted, not sent.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import AwaitedTensor, Pending, check_collective, post, sendable, shape_and_dtype

# torch 2.13 renamed both; older ones know only the second name.
_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int], kind: str = "gather") -> Tensor:
    """Returns all ranks' ``x`` joined along ``dim``, without a gradient.

    ``sizes``: every rank's extent along ``dim``. ``kind``: under which name the bytes are counted.
    """
    whole, pending = start_all_gather(x, group, dim, sizes, kind)
    pending.wait()
    return whole


def start_all_gather(
    x: Tensor, group: Group, dim: int, sizes: Sequence[int], kind: str = "gather"
) -> tuple[Tensor, Pending]:
    """Starts ``all_gather``; returns the whole tensor, which is filled once the messages have been waited for."""
    assert x.shape[dim] == sizes[group.index] and len(sizes) == group.size, (x.shape, dim, sizes)
    if group.size == 1:
        return x, Pending((), ())
    rows = x.movedim(dim, 0)
    whole = rows.new_empty((sum(sizes), *rows.shape[1:]))
    whole.split(list(sizes))[group.index].copy_(rows)
    return whole.movedim(0, dim), start_filling(whole, group, sizes, kind)


def start_filling(whole: Tensor, group: Group, sizes: Sequence[int], kind: str) -> Pending:
    """Starts to fill ``full_tensor`` with all ranks' rows, of which this rank's own are there already."""
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
    """Returns whether the group exchanges such tensors by the library's own collectives: GPUs, all of its ranks."""
    return x.is_cuda and group.size > 1 and group.places is None


def reduce_scatter(x: Tensor, group: Group, dim: int, sizes: Sequence[int], kind: str = "scatter") -> Tensor:
    """Returns this rank's piece along ``dim`` of the sum of all ranks' ``x``, without a gradient."""
    assert x.shape[dim] == sum(sizes) and len(sizes) == group.size, (x.shape, dim, sizes)
    if group.size == 1:
        return x
    rows = x.movedim(dim, 0).contiguous()
    return start_reduce_scatter(rows, group, sizes, kind).wait().movedim(0, dim)


def start_reduce_scatter(rows: Tensor, group: Group, sizes: Sequence[int], kind: str) -> AwaitedTensor[Tensor]:
    """Starts ``reduce_scatter`` along dimension 0; ``rows`` must not change until the result is waited for."""
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
    """Returns the sum, in float32 at least, added in the order of ranks whoever arrived first."""
    first, *rest = [pieces[q] for q in sorted(pieces)]
    wide = torch.promote_types(first.dtype, torch.float32)
    result = first.to(wide, copy=True)
    for piece in rest:
        result += piece
    return result.to(first.dtype)


def gather(
    x: Tensor, group: Group, dim: int, sizes: Sequence[int], equal_gradients: bool = False, kind: str = "gather"
) -> Tensor:
    """Returns all ranks' ``x`` joined along ``dim``.

    ``equal_gradients``: all ranks are known to hold the same gradient, as each computes the same of the whole.

    *forward:* all-gather.
    *backward:* reduce-scatter (sum). With ``equal_gradients`` this rank's slice times the group's size, which is the
    same number without communication.
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
            mine = grad.split(sizes, dim)[group.index] * group.size
        else:
            mine = reduce_scatter(grad, group, dim, sizes, kind)
        assert mine.shape == part, (mine.shape, part)
        return mine, None, None, None, None, None


def all_sum(x: Tensor, group: Group, kind: str = "sum") -> Tensor:
    """Returns the sum of all ranks' ``x``, the same on each.

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


def all_reduce(x: Tensor, group: Group, kind: str = "sum") -> Tensor:
    """Returns the sum of all ranks' ``x`` as a new tensor, without a gradient."""
    result = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        assert group.places is None, "a part of a group talks in pairs only"
        sent = 2 * (group.size - 1) * result.numel() * result.element_size() // group.size
        group.count(kind, sent, 2 * (group.size - 1))
        if result.is_meta:
            return result
        check_collective(kind, group, shape_and_dtype(result))
        with group.watch.waiting(result.is_cuda):
            dist.all_reduce(result, group=group.handle)
    return result


def all_to_all(
    x: Tensor, group: Group, send: Sequence[int], receive: Sequence[int], kind: str = "all_to_all"
) -> Tensor:
    """Returns the rows that each rank has for this one, in rank order along dimension 0.

    ``send``: how many rows of ``x`` each rank gets, in rank order. ``receive``: how many come from each.

    *forward:* all-to-all.
    *backward:* the reversed all-to-all.
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
    """Returns ``all_to_all``'s result, without a gradient."""
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
    """Starts to fill ``result`` with the elements that each rank has for this one, in rank order, by the library.

    ``send``: how many elements of ``x`` each rank gets. ``receive``: how many come from each; its own are among both.
    """
    counts = [count for place, count in enumerate(send) if place != group.index and count]
    group.count(kind, sum(counts) * x.element_size(), len(counts))
    check_collective(kind, group, f"of {x.dtype}")
    into, source = (
        t.view(-1).view(torch.uint8) for t in (result, x)
    )  # bytes: for types that the library does not know
    coming, leaving = ([count * x.element_size() for count in side] for side in (receive, send))
    work = dist.all_to_all_single(into, source, coming, leaving, group=group.handle, async_op=True)
    return Pending((work,), (into, source), group.watch)


def full_tensor(x: Tensor) -> Tensor:
    """Returns the whole of a tensor that may be sharded over ranks (torch's DTensor), without a gradient."""
    full: Callable[[], Tensor] | None = getattr(x, "full_tensor", None)
    return x.detach() if full is None else full().detach()
