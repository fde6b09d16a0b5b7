"""What a run needs on each rank: memory by part, bytes sent by group, time; and the smallest group that fits.

Memory and bytes are counted by running the network on tensors without data (``outline``); time is an estimate from
what the device is said or measured to do.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from seqpar.choice import Layer, Strategy, check_strategy, choose, cost
from seqpar.launch.config import Config
from seqpar.launch.devices import DTYPES, Device
from seqpar.launch.feasible import refuse, refuse_lonely
from seqpar.launch.outline import Step, count_step, outline
from seqpar.layout import Layout
from seqpar.mesh import Group

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
GIB = 2**30
BUCKET = 25 << 20  # DDP sums so many bytes of gradients at a time


@dataclass(frozen=True)
class Run:
    """What is planned: the settings, the device, the data's channels and outputs, all ranks (None: one group).

    ``as_trained``: attention is what the encoder would choose by itself, not what suits the device best.
    """

    config: Config
    device: Device
    channels: int = 4
    outputs: int = 4
    regions: int = 0
    ranks: int | None = None
    as_trained: bool = False


@dataclass(frozen=True)
class Plan:
    """What one size of group needs on its fullest rank, or ``why`` it cannot be.

    ``scores`` is what attention that is not fused would need beside ``memory``.
    """

    config: Config
    device: Device
    ranks: int
    memory: dict[str, float] = field(default_factory=dict)
    sent: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    mfu: float = 0.0
    scores: float = 0.0
    why: str = ""

    @property
    def total(self) -> float:
        """Bytes on the fullest rank."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return not self.why and self.total <= self.device.memory

    @property
    def fits_unfused(self) -> bool:
        return not self.why and self.total + self.scores <= self.device.memory

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def plans(run: Run, sizes: Iterable[int] = SIZES) -> Iterator[Plan]:
    """Yields the plan of each size of group."""
    for size in sizes:
        try:
            yield plan(run, size)
        except ValueError as error:
            yield Plan(replace(run.config, seqpar=size), run.device, run.ranks or size, why=str(error))


def plan(run: Run, size: int) -> Plan:
    """Returns what a group of that size needs; refuses what cannot run."""
    ranks, node = run.ranks or size, run.device.node
    if ranks % size:
        raise ValueError(f"does not divide {ranks} ranks")
    if size > 1 and node < 1 << 20 and node % size and size % node:
        raise ValueError(f"does not share nodes of {node} evenly")
    config = replace(run.config, seqpar=size)
    if not config.batch:  # the least there can be
        config = replace(config, batch=size if config.mode == "swap" else 1)
    refuse(config)
    refuse_lonely(config, ranks)
    device = run.device.of(max(ranks, 1) if run.device.cores else 1)
    if config.attention != "auto" or size == 1:
        return _plan(run, config, device, ranks)
    if run.as_trained:
        chosen = outline(config, Group("seq", tuple(range(size)))).encoder.attention
        return _plan(run, replace(config, attention=str(chosen)), device, ranks)
    quickest, smallest = _candidates(config, device)
    found = _plan(run, replace(config, attention=quickest), device, ranks)
    if found.fits or smallest == quickest:
        return found
    return _plan(run, replace(config, attention=smallest), device, ranks)


def _layer(config: Config) -> Layer:
    layout = Layout.of(config.tile, config.patch, config.seqpar, config.split)
    return Layer(layout.counts, config.heads, config.embed_dim, config.batch, DTYPES[config.precision].itemsize)


def _candidates(config: Config, device: Device) -> tuple[str, str]:
    """Returns the quickest attention strategy and the smallest."""
    how = _layer(config), device.machine(config.seqpar, config.precision), config.keep_kv
    return str(choose(*how)[0]), str(choose(*how, memory_left=0.0, depth=config.depth)[0])


def _plan(run: Run, config: Config, device: Device, ranks: int) -> Plan:
    clock = device.clock(config.precision)
    how = run.channels, run.outputs, clock, device.on_gpu, ranks // config.seqpar, run.regions
    steps = [count_step(config, rank, *how) for rank in _fullest(config)]
    step = max(steps, key=lambda s: s.tokens + s.decoder + s.transient)
    memory: dict[str, float] = {
        "weights": step.weights,
        "gradients": step.gradients,
        "optimiser": step.optimiser,
        "input": step.input,
        "tokens": step.tokens,
        "decoder": step.decoder,
        "transient": step.transient,
    }
    memory["apart"] = device.taken + device.slack * sum(memory.values())
    sent = {"seq": step.sent.total() * config.accumulate, "world": _world_bytes(config, step, ranks)}
    seconds = _seconds(config, device, step, ranks)
    once = Config().grad_checkpoint
    alone = replace(config, seqpar=1, attention="auto", keep_kv=False, split="spatial", grad_checkpoint=once)
    done = 3 * config.accumulate * _forward_operations(alone, run.channels, run.outputs, run.regions) / config.seqpar
    mfu = done / sum(seconds.values()) / device.peak[config.precision]
    return Plan(config, device, ranks, memory, sent, seconds, mfu, _scores(config, step.transient))


@lru_cache(maxsize=4)
def _forward_operations(config: Config, channels: int, outputs: int, regions: int) -> float:
    """Returns what one process does forward: what is done twice or on each rank counts once."""
    step = count_step(config, 0, channels, outputs, lambda done: 0.0, True, regions=regions)
    return step.forward_operations


def _fullest(config: Config) -> Iterator[int]:
    """Yields the ranks that may hold most: of those with most tokens the one with most neighbours, and most heads."""
    layout = Layout.of(config.tile, config.patch, config.seqpar, config.split)

    def inside(rank: int) -> int:
        sides = zip(layout.box(rank), layout.grid) if layout.is_box else ()
        return sum((low > 0) + (high < extent) for (low, high), extent in sides)

    fullest = max(range(layout.num_ranks), key=lambda rank: (layout.counts[rank], inside(rank)))
    yield fullest
    inner = _strategy(config).inner
    if fullest and inner > 1 and config.heads % inner:
        yield 0  # the first places take one head more


def _strategy(config: Config) -> Strategy:
    if config.seqpar == 1 or config.attention == "auto":
        return Strategy("gather-kv")
    return check_strategy(config.attention, config.seqpar, config.heads, config.keep_kv)


def _scores(config: Config, transient: int) -> float:
    """Returns what attention that is not fused would need more.

    Each layer holds softmax's output of this rank's queries and all keys until its backward, which makes the gradients
    of that and of the scores.
    """
    layer = _layer(config)
    one = layer.batch * layer.heads * max(layer.sizes) * sum(layer.sizes) * layer.element
    held = config.depth if config.grad_checkpoint == Config().grad_checkpoint else 1
    return held * one + max(0, 2 * one - transient)


def _world_bytes(config: Config, step: Step, ranks: int) -> float:
    """Returns what a rank sends to all: gradients to be averaged, or weights twice and gradients once."""
    times = config.accumulate * 3 if config.shard_weights else 2
    return times * (ranks - 1) / ranks * step.parameters


def _seconds(config: Config, device: Device, step: Step, ranks: int) -> dict[str, float]:
    """Returns the step's seconds: of computing, and of waiting for messages that nothing hides."""
    computing = step.seconds.total() * config.accumulate
    found = {"computing": computing, "update": step.update_seconds}
    size, link = config.seqpar, device.link(config.seqpar)
    if size > 1:
        machine = device.machine(size, config.precision)
        waiting = cost(_strategy(config), _layer(config), machine, config.keep_kv).waiting * config.depth
        others = [kind for kind in step.sent if kind != "attention"]
        waiting += sum(step.sent[k] / link.bandwidth + step.messages[k] * link.latency for k in others)
        found["waiting"] = waiting * config.accumulate
    if ranks > 1:
        link = device.link(ranks)
        rounds = -(-step.parameters // BUCKET)
        summing = _world_bytes(config, step, ranks) / link.bandwidth + rounds * 2 * (ranks - 1) * link.latency
        found["summing"] = max(0.0, summing - computing / 2) if device.on_gpu else summing  # under the backward
    return found


def smallest(found: Iterable[Plan]) -> Plan | None:
    """Returns the plan of the smallest group that fits, None where none does."""
    return next((p for p in found if p.fits), None)


def most_tiles(run: Run, p: Plan) -> int:
    """Returns how many tiles a sequence group of ``p`` may take at once."""
    unit = p.config.seqpar if p.config.mode == "swap" else 1
    fewest, tiles = p.config.batch, p.config.batch + unit
    for _ in range(4):  # each guess lies on the line through the last one: memory is not quite a line
        more = plan(replace(run, config=replace(p.config, batch=tiles)), p.config.seqpar)
        each = max((more.total - p.total) / (tiles - fewest), 1.0)
        guess = fewest + int((p.device.memory - p.total) / each / unit) * unit
        if guess in (tiles, fewest):
            return guess
        tiles = guess
    return tiles


def refusal(found: Sequence[Plan]) -> str:
    """Returns why nothing fits, and what would take less."""
    possible = [p for p in found if not p.why]
    if not possible:
        return f"no group of ranks can run this: {found[0].why}"
    least = min(possible, key=lambda p: p.total)
    largest = max(("tokens", "decoder", "transient", "optimiser"), key=lambda name: least.memory[name])
    advice = {
        "tokens": "--grad-checkpoint full, or a larger --patch",
        "decoder": "--mode halo" if least.config.mode == "gather" else "a smaller --decoder-width or --tile",
        "transient": "--mode halo or a smaller --tile",
        "optimiser": "a smaller --embed-dim or --depth",
    }[largest]
    return (
        f"nothing fits: --seqpar {least.config.seqpar} needs {least.total / GIB:.1f} GiB on a rank of "
        f"{least.device.name}, which has {least.device.memory / GIB:.1f}; most is for {largest}: try {advice}"
    )
