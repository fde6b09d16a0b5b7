"""How attention is split over a sequence group: ranks into inside x across, heads into chunks.

Legend: b batch, n tokens, m tensors sent together (queries, keys, values), a heads, f features per head; ``n/s`` is
this rank's share, ``n/r`` that of its inside group (U of the P ranks), c the heads of a chunk.

With U = 1 a rank keeps its queries and all heads; with U = P it takes some heads of all tokens; in between, it takes
some heads of its inside group's tokens. Heads need not divide by U: the first ranks take one more. All ranks send their
messages in the same order, so a rank that has no head in a chunk takes part with empty ones.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from seqpar.attention.strategies import choose_heads_per_chunk
from seqpar.parallel.collectives import is_by_library, start_all_to_all, start_filling, start_reduce_scatter
from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import AwaitedTensor, Pending, post
from seqpar.parallel.meta_tensors import device_type

KIND = "attention"
Result = TypeVar("Result")


class Rotary(Protocol):
    """Rotary positions of this rank's tokens; ``whole`` has those of all tokens, in rank order."""

    @property
    def whole(self) -> "Rotary": ...

    def rotate_(self, x: Tensor, back: bool = False) -> None:
        """Rotates ``... n f`` in place, or back."""


class Prefetch(Generic[Result]):
    """Results of chunks, each started one chunk before it is taken. Chunks are taken in order, from 0."""

    def __init__(self, start: Callable[[int], AwaitedTensor[Result]], num_chunks: int) -> None:
        """``start`` posts the messages of a chunk."""
        self._start, self._num_chunks = start, num_chunks
        self._coming: AwaitedTensor[Result] | None = None

    def take(self, chunk: int) -> Result:
        """Returns a chunk's result; the next chunk's messages are posted before this one's are waited for."""
        coming = self._coming or self._start(chunk)
        self._coming = self._start(chunk + 1) if chunk + 1 < self._num_chunks else None
        return coming.wait()


def available_now(result: Result) -> AwaitedTensor[Result]:
    """Wraps a result for which no message is needed."""
    return AwaitedTensor(Pending((), ()), lambda: result)


def split_evenly(count: int, places: int) -> list[int]:
    """Splits ``count`` items over ``places``; the first ones take one more if it does not divide evenly."""
    return [count // places + (place < count % places) for place in range(places)]


class ChunkBuffers:
    """Buffers that chunks reuse, by number; each grows to the largest chunk that it has served."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._flat = like, dict[int, Tensor]()

    def get(self, number: int, shape: Sequence[int]) -> Tensor:
        count = torch.Size(shape).numel()
        if number not in self._flat or self._flat[number].numel() < count:
            self._flat[number] = self._like.new_empty(count)
        return self._flat[number][:count].view(*shape)


class HeadPartition:
    """Splits heads over the ranks ``inside``, and gathers keys and values ``across`` the others, in chunks of heads."""

    def __init__(self, group: Group, sizes: Sequence[int], inner: int, like: Tensor, per_chunk: int | None) -> None:
        """Splits a group's attention.

        - ``sizes``: each rank's token count
        - ``inner``: U, a divisor of the number of ranks
        - ``like``: a tensor ``n/s b m a f`` that gives shape, precision and device
        - ``per_chunk``: heads per chunk; None: by size
        """
        assert group.size % inner == 0 and len(sizes) == group.size and like.shape[0] == sizes[group.index]
        _, batch, _, heads, self.head_dim = like.shape
        first = group.index - group.index % inner
        self.inside = group.part(range(first, first + inner))
        self.across = group.part(range(group.index % inner, group.size, inner))
        self.tokens = list(sizes[first : first + inner])  # of each rank inside
        self.gathered = [sum(sizes[low : low + inner]) for low in range(0, group.size, inner)]  # of each rank across
        self.heads = split_evenly(heads, inner)  # of each rank inside
        if group.size == 1:
            per_chunk = heads
        elif per_chunk is None:
            head_bytes = 2 * sum(sizes) * batch * self.head_dim * like.element_size()
            rows = sum(sizes) * batch * inner // group.size
            per_chunk = choose_heads_per_chunk(max(self.heads), head_bytes, rows, device_type(like))
        self.per_chunk = min(per_chunk, max(self.heads))
        self.num_chunks = -(-max(self.heads) // per_chunk)

    def slices(self, chunk: int) -> list[slice]:
        """Returns the heads, numbered among all, that each rank inside attends in this chunk."""
        result, first = [], 0
        for heads in self.heads:
            low, high = (min(heads, at * self.per_chunk) for at in (chunk, chunk + 1))
            result.append(slice(first + low, first + high))
            first += heads
        return result

    def own(self, chunk: int) -> slice:
        """Returns the heads that this rank attends in this chunk."""
        return self.slices(chunk)[self.inside.index]

    def start_to_heads(self, x: Tensor, chunk: int) -> AwaitedTensor[Tensor]:
        """Starts to send the chunk's heads of ``x``, ``n/s b m a f``, to their ranks.

        The result is ``n/r b m c f``: this rank's heads of the inside group's tokens.
        """
        pieces = [x[:, :, :, heads] for heads in self.slices(chunk)]
        if self.inside.size == 1:
            return available_now(pieces[0])
        me = self.inside.index
        part = x.new_empty((sum(self.tokens), *pieces[me].shape[1:]))
        rows = part.split(self.tokens)
        if is_by_library(x, self.inside):
            counts = [piece.numel() for piece in pieces]
            flat = x.new_empty(sum(counts))
            for piece, place in zip(pieces, flat.split(counts)):
                place.view(piece.shape).copy_(piece)
            receive = [row.numel() for row in rows]
            return AwaitedTensor(start_all_to_all(flat, counts, part, receive, self.inside, KIND), lambda: part)
        rows[me].copy_(pieces[me])
        sends = {q: pieces[q].contiguous() for q in self.inside.peers}
        return AwaitedTensor(post(sends, {q: rows[q] for q in self.inside.peers}, self.inside, KIND), lambda: part)

    def new_part(self, x: Tensor, chunk: int) -> Tensor:
        """Returns a tensor ``n/r b m c f`` for ``start_to_tokens`` to send into ``x``; it may be a view of ``x``."""
        heads = self.own(chunk)
        if self.inside.size == 1:
            return x[:, :, :, heads]
        return x.new_empty((sum(self.tokens), *x.shape[1:3], heads.stop - heads.start, self.head_dim))

    def start_to_tokens(self, part: Tensor, x: Tensor, chunk: int) -> AwaitedTensor[None]:
        """Starts to send the chunk ``n/r b m c f`` into ``x``, ``n/s b m a f``: the adjoint of ``start_to_heads``."""
        if self.inside.size == 1:
            return available_now(None)  # new_part is a view of x
        me, slices, rows = self.inside.index, self.slices(chunk), part.split(self.tokens)
        if is_by_library(x, self.inside):
            shapes = [x[:, :, :, heads].shape for heads in slices]
            flat = x.new_empty(sum(shape.numel() for shape in shapes))
            counts = [shape.numel() for shape in shapes]
            places = {q: t.view(shape) for q, (t, shape) in enumerate(zip(flat.split(counts), shapes))}
            pending = start_all_to_all(part, [row.numel() for row in rows], flat, counts, self.inside, KIND)
        else:
            received = {q: x.new_empty(x[:, :, :, slices[q]].shape) for q in self.inside.peers}
            pending = post({q: rows[q] for q in self.inside.peers}, received, self.inside, KIND)
            places = {**received, me: rows[me]}

        def write() -> None:
            for q, piece in places.items():
                x[:, :, :, slices[q]] = piece

        return AwaitedTensor(pending, write)

    def start_gather(
        self, part: Tensor, chunk: int, buffers: ChunkBuffers | None
    ) -> AwaitedTensor[tuple[Tensor, Tensor]]:
        """Starts to gather a chunk's keys and values from ``part``, ``n/r b 3 c f``.

        The result is ``part`` and the gathered keys and values ``n b 2 c f``. They are in one of two alternating
        buffers, or in memory of their own if they are kept.
        """
        pair = part[:, :, 1:]
        if self.across.size == 1:
            return available_now((part, pair))
        shape = (sum(self.gathered), *pair.shape[1:])
        whole = part.new_empty(shape) if buffers is None else buffers.get(chunk % 2, shape)
        whole.split(self.gathered)[self.across.index].copy_(pair)
        return AwaitedTensor(start_filling(whole, self.across, self.gathered, KIND), lambda: (part, whole))

    def start_reduce(
        self, dq: Tensor, dk: Tensor, dv: Tensor, target: Tensor, buffers: ChunkBuffers
    ) -> AwaitedTensor[Tensor]:
        """Starts to sum the gradients ``b c n f`` of keys and values over ranks: the adjoint of ``start_gather``.

        The result is ``target``, ``n/r b 3 c f``, filled for queries, keys and values. There is one buffer, so the
        previous chunk's sum must have been waited for.
        """
        if self.across.size == 1:
            together = [rearrange(t, "b a n f -> b n a f") for t in (dq, dk, dv)]
            torch.stack(together, 2, out=rearrange(target, "n b m a f -> b n m a f"))
            return available_now(target)
        target[:, :, 0] = tokens_first(dq)
        rows = buffers.get(2, (sum(self.gathered), *target[:, :, 1:].shape[1:]))
        rows[:, :, 0], rows[:, :, 1] = tokens_first(dk), tokens_first(dv)
        summed = start_reduce_scatter(rows, self.across, self.gathered, KIND)

        def write() -> Tensor:
            target[:, :, 1:] = summed.wait()
            return target

        return AwaitedTensor(Pending((), ()), write)


def heads_first(x: Tensor) -> Tensor:
    """Returns a view with batch and heads first, as kernels expect it."""
    return rearrange(x, "n b a f -> b a n f")


def tokens_first(x: Tensor) -> Tensor:
    """Returns a view with tokens first, as messages carry it."""
    return rearrange(x, "b a n f -> n b a f")


def rotate_in_place(x: Tensor, rotary: Rotary, back: bool = False) -> None:
    """Rotates the queries and keys of ``n b 3 a f``."""
    rotary.rotate_(rearrange(x[:, :, :2], "n b m a f -> m b a n f"), back)
