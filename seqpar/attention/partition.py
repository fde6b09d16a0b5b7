"""How one attention over a sequence group is cut: ranks into inside x across, heads into chunks, and in what order.

Legend: b batch, n tokens, m what is carried together (queries, keys, values), a heads, f features per head;
``n/s`` is this rank's share, ``n/r`` that of its inside group (U of the P ranks), c the heads of a chunk.

With U = 1 a rank keeps its queries and all heads; with U = P it takes some heads of all tokens; between, it takes
some heads of its inside group's tokens. Heads need not divide by U: the first places take one more. Messages go in
pairs and in one order on all ranks, so a rank without a head in some chunk takes its turn with empty ones.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from seqpar.attention.strategies import heads_per_chunk
from seqpar.collectives import start_filling, start_reduce_scatter
from seqpar.mesh import Group
from seqpar.messages import Coming, Pending, post
from seqpar.meta_tensors import device_type

KIND = "attention"
Item = TypeVar("Item")
Result = TypeVar("Result")
Turn = Callable[[Tensor], Tensor]  # b a n f, turned or turned back


class Rotate(Protocol):
    """Rotary positions of this rank's tokens; ``whole`` are those of all tokens, in the order of ranks."""

    @property
    def whole(self) -> "Rotate": ...

    def __call__(self, x: Tensor, back: bool = False) -> Tensor: ...


def one_ahead(started: Iterator[Coming[Result]]) -> Iterator[Result]:
    """Yields each result when it has come, the next one being under way by then."""
    under_way: Coming[Result] | None = None
    for coming in started:
        if under_way is not None:
            yield under_way.wait()
        under_way = coming
    if under_way is not None:
        yield under_way.wait()


def one_behind(items: Iterator[Item], start: Callable[[Item], Coming[Result]]) -> Iterator[Result]:
    """Yields what ``start`` makes of each item, under way while the next item is made; one at a time is under way."""
    under_way: Coming[Result] | None = None
    for item in items:
        if under_way is not None:
            yield under_way.wait()
        under_way = start(item)
    if under_way is not None:
        yield under_way.wait()


def arrived(result: Result) -> Coming[Result]:
    return Coming(Pending((), ()), lambda: result)


def shares(count: int, places: int) -> list[int]:
    """Returns ``count`` things over places, the first ones taking one more where it does not divide."""
    return [count // places + (place < count % places) for place in range(places)]


class Buffers:
    """Memory that chunks use in turn, by number."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._flat = like, dict[int, Tensor]()

    def get(self, number: int, shape: Sequence[int]) -> Tensor:
        count = torch.Size(shape).numel()
        if number not in self._flat or self._flat[number].numel() < count:
            self._flat[number] = self._like.new_empty(count)
        return self._flat[number][:count].view(*shape)


class Spread:
    """Heads over the places ``inside``, whole keys and values by gathering ``across``, in chunks of heads."""

    def __init__(self, group: Group, sizes: Sequence[int], inner: int, like: Tensor, per_chunk: int | None) -> None:
        """``like`` is ``n/s b m a f``; ``inner`` is U, which divides the ranks."""
        assert group.size % inner == 0 and len(sizes) == group.size and like.shape[0] == sizes[group.index]
        _, batch, _, heads, self.head_dim = like.shape
        first = group.index - group.index % inner
        self.inside = group.part(range(first, first + inner))
        self.across = group.part(range(group.index % inner, group.size, inner))
        self.tokens = list(sizes[first : first + inner])
        self.gathered = [sum(sizes[low : low + inner]) for low in range(0, group.size, inner)]
        self.batch, self.heads = batch, shares(heads, inner)
        if group.size == 1:
            per_chunk = heads
        elif per_chunk is None:
            head_bytes = 2 * sum(sizes) * batch * self.head_dim * like.element_size()
            rows = sum(sizes) * batch * inner // group.size
            per_chunk = heads_per_chunk(max(self.heads), head_bytes, rows, device_type(like) == "cuda")
        self.per_chunk = min(per_chunk, max(self.heads))
        self.num_chunks = -(-max(self.heads) // per_chunk)

    def slices(self, chunk: int) -> list[slice]:
        """Returns the heads that each place inside computes in this chunk, numbered among all."""
        result, first = [], 0
        for held in self.heads:
            low, high = (min(held, at * self.per_chunk) for at in (chunk, chunk + 1))
            result.append(slice(first + low, first + high))
            first += held
        return result

    def mine(self, chunk: int) -> slice:
        return self.slices(chunk)[self.inside.index]

    def start_to_heads(self, x: Tensor, chunk: int, turn: Turn | None = None) -> Coming[Tensor]:
        """Returns this rank's heads ``n/r b m c f`` of the chunk, of tensors ``n/s b m a f``; ``turn`` turns q, k."""
        pieces = [x[:, :, :, heads] for heads in self.slices(chunk)]
        if turn is not None:
            pieces = [turned(piece, turn) for piece in pieces]
        if self.inside.size == 1:
            return arrived(pieces[0])
        me = self.inside.index
        held = x.new_empty((sum(self.tokens), *pieces[me].shape[1:]))
        rows = held.split(self.tokens)
        rows[me].copy_(pieces[me])
        sends = {q: pieces[q].contiguous() for q in self.inside.peers}
        return Coming(post(sends, {q: rows[q] for q in self.inside.peers}, self.inside, KIND), lambda: held)

    def room(self, x: Tensor, chunk: int) -> Tensor:
        """Returns where the chunk's ``n/r b m c f`` may be written so that ``start_to_tokens`` moves it into ``x``."""
        heads = self.mine(chunk)
        if self.inside.size == 1:
            return x[:, :, :, heads]
        return x.new_empty((sum(self.tokens), *x.shape[1:3], heads.stop - heads.start, self.head_dim))

    def start_to_tokens(self, held: Tensor, x: Tensor, chunk: int) -> Coming[None]:
        """Returns, under way, the move of the chunk ``n/r b m c f`` into ``x``, ``n/s b m a f``: the adjoint."""
        if self.inside.size == 1:
            return arrived(None)  # written into its room, which lies in x
        me, slices, rows = self.inside.index, self.slices(chunk), held.split(self.tokens)
        got = {q: x.new_empty(x[:, :, :, slices[q]].shape) for q in self.inside.peers}
        pending = post({q: rows[q] for q in self.inside.peers}, got, self.inside, KIND)

        def write() -> None:
            for q, piece in {**got, me: rows[me]}.items():
                x[:, :, :, slices[q]] = piece

        return Coming(pending, write)

    def start_gather(self, part: Tensor, chunk: int, buffers: Buffers | None) -> Coming[tuple[Tensor, Tensor]]:
        """Returns ``n/r b 3 c f`` as it came and, under way, whole keys and values ``n b 2 c f``.

        They lie in one of two buffers, in turn, or, to be kept, in memory of their own.
        """
        pair = part[:, :, 1:]
        if self.across.size == 1:
            return arrived((part, pair))
        shape = (sum(self.gathered), *pair.shape[1:])
        whole = part.new_empty(shape) if buffers is None else buffers.get(chunk % 2, shape)
        whole.split(self.gathered)[self.across.index].copy_(pair)
        return Coming(start_filling(whole, self.across, self.gathered, KIND), lambda: (part, whole))

    def start_reduce(self, dk: Tensor, dv: Tensor, target: Tensor, buffers: Buffers) -> Coming[Tensor]:
        """Returns ``target``, ``n/r b 3 c f``, whose keys and values get all ranks' sum of ``b c n f``: the adjoint.

        One buffer: the last sum must have come.
        """
        if self.across.size == 1:
            target[:, :, 1], target[:, :, 2] = tokens_first(dk), tokens_first(dv)
            return arrived(target)
        rows = buffers.get(2, (sum(self.gathered), *target[:, :, 1:].shape[1:]))
        rows[:, :, 0], rows[:, :, 1] = tokens_first(dk), tokens_first(dv)
        summed = start_reduce_scatter(rows, self.across, self.gathered, KIND)

        def write() -> Tensor:
            target[:, :, 1:] = summed.wait()
            return target

        return Coming(Pending((), ()), write)


def heads_first(x: Tensor) -> Tensor:
    """Returns ``b a n f`` of ``n b a f``, a view."""
    return x.permute(1, 2, 0, 3)


def tokens_first(x: Tensor) -> Tensor:
    """Returns ``n b a f`` of ``b a n f``, a view."""
    return x.permute(2, 0, 1, 3)


def turned(x: Tensor, turn: Turn) -> Tensor:
    """Returns ``n b m a f`` with its queries and keys turned, a copy."""
    result = x.clone(memory_format=torch.contiguous_format)
    turn_in_place(result, turn)
    return result


def turn_in_place(x: Tensor, turn: Turn) -> None:
    """Turns queries and keys of ``n b 3 a f``."""
    for place in (0, 1):
        view = heads_first(x[:, :, place])
        view.copy_(turn(view))
