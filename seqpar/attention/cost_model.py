"""Which attention strategy moves and holds least: a cost model of one layer, pure arithmetic.

u = tokens x width / ranks elements. What a rank sends is exact, for tokens and heads that do not divide too; times
are an estimate from the link's bandwidth and latency and the processor's rate, good for an order of strategies.
"""

from dataclasses import dataclass

from seqpar.attention.strategies import (
    Strategy,
    heads_per_chunk,
    inner_sizes,
)


@dataclass(frozen=True)
class Machine:
    """What a rank has: bytes a second to other ranks, seconds a message takes beside, and operations a second.

    ``overlaps`` says whether messages travel under computation; ``node`` ranks share the fast links, others are
    reached at ``far_bandwidth``.
    """

    bandwidth: float
    latency: float
    flops: float
    overlaps: bool
    node: int = 8
    far_bandwidth: float | None = None


CPU = Machine(bandwidth=1e9, latency=2e-4, flops=5e10, overlaps=False, node=1 << 30)
GPU = Machine(bandwidth=1e11, latency=2e-5, flops=2e14, overlaps=True, far_bandwidth=1.25e10)


@dataclass(frozen=True)
class Layer:
    """One attention layer: all ranks' token counts, heads, width, samples a step, bytes a number.

    ``per_chunk`` is how many heads go together, None: as many as ``heads_per_chunk`` says.
    """

    sizes: tuple[int, ...]
    heads: int
    width: int
    batch: int = 1
    element: int = 4
    per_chunk: int | None = None

    @property
    def ranks(self) -> int:
        return len(self.sizes)

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Sent:
    """Elements that a rank sends in one layer: to the ranks that exchange heads, and across in gathers."""

    inside_forward: int
    across_forward: int
    inside_backward: int
    across_backward: int

    @property
    def forward(self) -> int:
        return self.inside_forward + self.across_forward

    @property
    def backward(self) -> int:
        return self.inside_backward + self.across_backward


def sent(strategy: Strategy, layer: Layer, rank: int, keep: bool = False) -> Sent:
    """Returns what ``rank`` sends, exactly; ``keep`` spares the second gather."""
    ranks, inner, width = layer.ranks, strategy.inner, layer.head_width * layer.batch
    mine, tokens, again = layer.sizes[rank], sum(layer.sizes), 0 if keep else 1
    if strategy.name == "gather-x":
        gather, reduce = mine * (ranks - 1), tokens - mine
        return Sent(0, gather * layer.heads * width, 0, (again * gather + reduce) * layer.heads * width)
    first, place = rank - rank % inner, rank % inner
    near = sum(layer.sizes[first : first + inner])
    held = layer.heads // inner + (place < layer.heads % inner)
    to_heads, to_tokens = mine * (layer.heads - held), (near - mine) * held
    gather, reduce = 2 * near * held * (ranks // inner - 1), 2 * (tokens - near) * held
    return Sent(
        (3 * to_heads + to_tokens) * width,
        gather * width,
        (to_heads + 3 * to_tokens) * width,
        (again * gather + reduce) * width,
    )


@dataclass(frozen=True)
class Cost:
    """Of the rank that has most to do, in one layer: bytes sent, held for backward, and more while it runs; seconds.

    ``waiting`` is how much of the seconds is communication that no computation hides.
    """

    forward: int
    backward: int
    held: int
    transient: int
    seconds: float
    waiting: float

    def __str__(self) -> str:
        sizes = (self.forward, self.backward, self.held, self.transient)
        sent_forward, sent_backward, held, transient = (f"{size / 2**20:.1f}" for size in sizes)
        return (
            f"sends {sent_forward} + {sent_backward} MiB, holds {held} MiB, {transient} MiB more while it runs, "
            f"{1e3 * self.seconds:.2f} ms"
        )


def cost(strategy: Strategy, layer: Layer, machine: Machine, keep: bool = False) -> Cost:
    """Returns what a layer costs; memory and time are estimates."""
    tokens, most, inner, across = sum(layer.sizes), max(layer.sizes), strategy.inner, layer.ranks // strategy.inner
    near = max(sum(layer.sizes[low : low + inner]) for low in range(0, layer.ranks, inner))
    heads = -(-layer.heads // inner)
    number = layer.batch * layer.element  # bytes a token and feature
    whole_head = 2 * tokens * layer.head_width * number
    together = min(layer.per_chunk or heads, heads)
    if layer.per_chunk is None:
        together = heads_per_chunk(heads, whole_head, near * layer.batch, machine.overlaps)
    chunks, pair = -(-heads // together), together * whole_head
    operations = 14.0 * near * tokens * heads * layer.head_width * layer.batch  # 4 forward, 10 backward
    u = most * layer.width * number
    if strategy.name == "gather-x":
        held = 2 * u + keep * tokens * layer.width * number  # tokens, output
        transient = 2 * tokens * layer.width * number + 3 * u + 2 * pair
        messages = (2 if keep else 3) * (layer.ranks - 1)
        operations += layer.batch * layer.width**2 * (12.0 * (tokens - most) + 4.0 * tokens)
        chunks = 1  # nothing travels under attention
    else:
        held = (5 if inner == 1 else 6) * u  # tokens, q, k, v, output, which exchanged lies in both orders
        transient = 4 * u
        if across > 1:
            held += keep * heads * whole_head
            transient += 5 * pair
        if inner > 1:
            transient += 16 * near * together * layer.head_width * number
        messages = chunks * (4 * (inner - 1) + (2 if keep else 3) * (across - 1))
    amounts = [sent(strategy, layer, rank, keep) for rank in range(layer.ranks)]
    far = machine.far_bandwidth or machine.bandwidth
    inside = machine.bandwidth if inner <= machine.node else far
    outside = machine.bandwidth if layer.ranks <= machine.node else far
    wire = machine.latency * messages + layer.element * (
        max(a.inside_forward + a.inside_backward for a in amounts) / inside
        + max(a.across_forward + a.across_backward for a in amounts) / outside
    )
    compute = operations / machine.flops
    hidden = min(wire * (chunks - 1) / chunks, compute) if machine.overlaps else 0.0
    return Cost(
        layer.element * max(a.forward for a in amounts),
        layer.element * max(a.backward for a in amounts),
        held,
        transient,
        compute + wire - hidden,
        wire - hidden,
    )


def choose(
    layer: Layer,
    machine: Machine,
    keep: bool = False,
    memory_left: float | None = None,
    depth: int = 1,
) -> tuple[Strategy, tuple[str, ...]]:
    """Returns the quickest strategy whose ``depth`` layers fit the memory left, and why: a line for each.

    Where none fits, the smallest is returned, and the first line says so.
    """
    if layer.ranks == 1:
        return Strategy("gather-kv"), ("gather-kv: one rank has all tokens, nothing moves",)
    candidates = [Strategy("gather-x"), Strategy("gather-kv")]
    if not keep:  # it gathers nothing that could be kept
        candidates.append(Strategy("ulysses", layer.ranks))
    candidates += [Strategy("hybrid", inner) for inner in inner_sizes(layer.ranks)]
    costs = {s: cost(s, layer, machine, keep) for s in candidates}
    needs = {s: depth * c.held + c.transient for s, c in costs.items()}
    fits = [s for s in candidates if memory_left is None or needs[s] <= memory_left]
    if fits:
        best, why = min(fits, key=lambda s: costs[s].seconds), "the quickest"
    else:
        best, why = min(candidates, key=lambda s: needs[s]), "the smallest, though more than the memory left"
    if memory_left is not None:
        why += f" of those that need at most {memory_left / 2**20:.0f} MiB in {depth} layers"
    lines = [f"{s}: {costs[s]}" + ("" if s in fits else ", too large") for s in candidates]
    return best, (f"{best} is {why}", *lines)
