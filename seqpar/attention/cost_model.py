"""What each attention strategy sends, stores and takes per layer, and which strategy is the fastest that fits.

Pure arithmetic. u = tokens x width / ranks elements. The bytes sent are exact, even if tokens and heads do not divide
evenly. Times are estimates from the links' bandwidth and latency and the processor's rate: good enough to rank the
strategies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from seqpar.attention.strategies import Strategy, check_strategy, choose_heads_per_chunk, inner_sizes
from seqpar.text import quantity


@dataclass(frozen=True)
class Machine:
    """The speed of a rank and of its links.

    - ``bandwidth``, ``latency``: bytes per second to other ranks of the node, and seconds per message
    - ``flops``: floating-point operations per second
    - ``overlaps``: whether messages travel while the rank computes
    - ``node``: number of ranks that share the fast links
    - ``far_bandwidth``: bytes per second to ranks of other nodes; None: as inside a node
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
    """The sizes of one attention layer.

    - ``sizes``: each rank's token count
    - ``width``: the embedding dimension, all heads together
    - ``batch``: samples per step
    - ``element``: bytes per number
    - ``per_chunk``: heads per chunk; None: as ``choose_heads_per_chunk`` returns
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
class BytesSent:
    """The elements that a rank sends in one layer: ``inside``, in the head exchange, and ``across``, in the gathers."""

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


def bytes_sent(strategy: Strategy, layer: Layer, rank: int, keep_kv: bool = False) -> BytesSent:
    """Returns exactly what ``rank`` sends; with ``keep_kv``, backward does not gather again."""
    ranks, inner, width = layer.ranks, strategy.inner, layer.head_width * layer.batch
    own, tokens, again = layer.sizes[rank], sum(layer.sizes), 0 if keep_kv else 1
    if strategy.name == "gather-x":
        gather, reduce = own * (ranks - 1), tokens - own
        return BytesSent(0, gather * layer.heads * width, 0, (again * gather + reduce) * layer.heads * width)
    first, place = rank - rank % inner, rank % inner
    near = sum(layer.sizes[first : first + inner])
    heads = layer.heads // inner + (place < layer.heads % inner)
    to_heads, to_tokens = own * (layer.heads - heads), (near - own) * heads
    gather, reduce = 2 * near * heads * (ranks // inner - 1), 2 * (tokens - near) * heads
    return BytesSent(
        (3 * to_heads + to_tokens) * width,
        gather * width,
        (to_heads + 3 * to_tokens) * width,
        (again * gather + reduce) * width,
    )


@dataclass(frozen=True)
class Cost:
    """What one layer costs the rank with the most work.

    - ``forward``, ``backward``: bytes sent
    - ``saved``: bytes kept for backward
    - ``transient``: additional bytes while the layer runs
    - ``seconds``: time of forward and backward
    - ``waiting``: the part of ``seconds`` spent on communication that no computation hides
    """

    forward: int
    backward: int
    saved: int
    transient: int
    seconds: float
    waiting: float

    def __str__(self) -> str:
        sizes = (self.forward, self.backward, self.saved, self.transient)
        forward, backward, saved, transient = (f"{size / 2**20:.1f}" for size in sizes)
        return (
            f"sends {forward} + {backward} MiB, stores {saved} MiB, {transient} MiB more while it runs, "
            f"{1e3 * self.seconds:.2f} ms"
        )

    def memory(self, depth: int) -> int:
        """Returns the bytes of ``depth`` layers while one of them runs."""
        return depth * self.saved + self.transient


def cost(strategy: Strategy, layer: Layer, machine: Machine, keep_kv: bool = False) -> Cost:
    """Returns what a layer costs; bytes sent are exact, memory and time are estimates."""
    near, heads = _near_tokens(strategy, layer), -(-layer.heads // strategy.inner)
    chunks = -(-heads // _heads_at_a_time(strategy, layer, machine))
    saved, transient = _memory(strategy, layer, machine, keep_kv)
    operations = 14.0 * near * sum(layer.sizes) * heads * layer.head_width * layer.batch  # 4 forward, 10 backward
    inner, across = strategy.inner, layer.ranks // strategy.inner
    gathers = 2 if keep_kv else 3  # including backward's reduce-scatter
    if strategy.name == "gather-x":
        others, tokens = sum(layer.sizes) - max(layer.sizes), sum(layer.sizes)
        operations += layer.batch * layer.width**2 * (12.0 * others + 4.0 * tokens)
        messages, chunks = gathers * (layer.ranks - 1), 1  # nothing travels under attention
    else:
        messages = chunks * (4 * (inner - 1) + gathers * (across - 1))
    amounts = [bytes_sent(strategy, layer, rank, keep_kv) for rank in range(layer.ranks)]
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
        saved,
        transient,
        compute + wire - hidden,
        wire - hidden,
    )


def _near_tokens(strategy: Strategy, layer: Layer) -> int:
    """Returns the largest number of tokens held together by ranks that exchange heads."""
    return max(sum(layer.sizes[low : low + strategy.inner]) for low in range(0, layer.ranks, strategy.inner))


def _heads_at_a_time(strategy: Strategy, layer: Layer, machine: Machine) -> int:
    heads = -(-layer.heads // strategy.inner)
    if layer.per_chunk is not None:
        return min(layer.per_chunk or heads, heads)
    head_bytes = 2 * sum(layer.sizes) * layer.head_width * layer.batch * layer.element
    rows, kind = _near_tokens(strategy, layer) * layer.batch, "cuda" if machine.overlaps else "cpu"
    return choose_heads_per_chunk(heads, head_bytes, rows, kind)


def _memory(strategy: Strategy, layer: Layer, machine: Machine, keep_kv: bool) -> tuple[int, int]:
    """Returns the bytes that a layer keeps for backward, and the additional bytes while it runs."""
    number = layer.batch * layer.element  # bytes of one feature of one token
    tokens, inner, heads = sum(layer.sizes), strategy.inner, -(-layer.heads // strategy.inner)
    u = max(layer.sizes) * layer.width * number
    whole_head = 2 * tokens * layer.head_width * number
    together = _heads_at_a_time(strategy, layer, machine)
    pair = together * whole_head
    if strategy.name == "gather-x":
        saved = 2 * u + keep_kv * tokens * layer.width * number  # tokens, output
        return saved, 2 * tokens * layer.width * number + 3 * u + 2 * pair
    saved, transient = (
        (5 if inner == 1 else 6) * u,
        4 * u,
    )  # tokens, q, k, v and output; the exchanged output is kept in both orders
    if inner < layer.ranks:
        saved += keep_kv * heads * whole_head
        transient += 5 * pair
    if inner > 1:
        transient += 16 * _near_tokens(strategy, layer) * together * layer.head_width * number
    return saved, transient


def memory_of(costs: Sequence[tuple[Cost, int]], recomputed: bool = False) -> int:
    """Returns the bytes of the given number of layers of each cost while one of them runs.

    - ``recomputed``: only one layer at a time keeps anything
    """
    if recomputed:
        return max(each.memory(1) for each, _ in costs)
    return sum(count * each.saved for each, count in costs) + max(each.transient for each, _ in costs)


def fastest_strategy(
    layer: Layer, machine: Machine, keep_kv: bool = False, memory_left: float | None = None, depth: int = 1
) -> tuple[Strategy, tuple[str, ...]]:
    """Returns the fastest strategy whose ``depth`` layers fit into ``memory_left``, and a line on each candidate.

    If none fits, returns the one that needs least, and the first line says so.
    """
    return fastest_strategy_of_model([(layer, depth)], machine, keep_kv, memory_left)


def fastest_strategy_of_model(
    layers: Sequence[tuple[Layer, int]],
    machine: Machine,
    keep_kv: bool = False,
    memory_left: float | None = None,
    recomputed: bool = False,
) -> tuple[Strategy, tuple[str, ...]]:
    """Like ``fastest_strategy``, for layers of several sizes that share one strategy.

    - ``layers``: each size, with its number of layers
    - ``recomputed``: only one layer at a time keeps anything for backward
    """
    ranks = layers[0][0].ranks
    if ranks == 1:
        return Strategy("gather-kv"), ("gather-kv: one rank has all tokens, nothing is sent",)
    candidates = [Strategy("gather-x"), Strategy("gather-kv")]
    if not keep_kv:  # Ulysses gathers nothing that could be kept
        candidates.append(Strategy("ulysses", ranks))
    candidates += [Strategy("hybrid", inner) for inner in inner_sizes(ranks)]
    costs = {s: [(cost(s, layer, machine, keep_kv), count) for layer, count in layers] for s in candidates}
    needs = {s: memory_of(each, recomputed) for s, each in costs.items()}
    seconds = {s: sum(count * one.seconds for one, count in each) for s, each in costs.items()}
    fits = [s for s in candidates if memory_left is None or needs[s] <= memory_left]
    if fits:
        best, why = min(fits, key=lambda s: seconds[s]), "the fastest strategy"
    else:
        best, why = min(candidates, key=lambda s: needs[s]), "the strategy that needs the least memory"
    if memory_left is not None:
        depth = 1 if recomputed else sum(count for _, count in layers)
        room = f"the {memory_left / 2**20:,.0f} MiB that are free for {quantity(depth, 'layer')}"
        if fits:
            why += f" that fits into {room}"
        elif memory_left > 0:
            why += f", but needs more than {room}"
        else:
            why += f", but {-memory_left / 2**20:.0f} MiB are missing even without attention"
    texts = {s: "; ".join(str(one) for one, _ in each) for s, each in costs.items()}
    lines = [f"{s}: {text}" + ("" if s in fits else ", too large") for s, text in texts.items()]
    return best, (f"{best} is {why}", *lines)


def resolve(
    strategy: Strategy | str, layer: Layer, machine: Machine, keep_kv: bool = False
) -> tuple[Strategy, tuple[str, ...]]:
    """Returns the strategy for this layer, which is the fastest for ``"auto"``, and why it was chosen."""
    if strategy == "auto":
        return fastest_strategy(layer, machine, keep_kv)
    strategy = check_strategy(str(strategy), layer.ranks, layer.heads, keep_kv)
    return strategy, (f"{strategy} was requested",)
