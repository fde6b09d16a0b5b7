"""What a run needs on each rank: memory by part, bytes sent by group, time; and the smallest group that fits.

Memory and bytes are counted by running the network on tensors without data (``outline``); time is an estimate from
what the device is said or measured to do.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

from seqpar.attention.cost_model import cost
from seqpar.launch.hardware.devices import Device
from seqpar.launch.planning.attention_choice import choose_within_memory, is_open, layer_of, saved_layers, strategy_of
from seqpar.launch.planning.feasibility import refuse, refuse_lonely
from seqpar.launch.planning.step_counter import Step, StepSetup, count_step
from seqpar.launch.settings.config import Config
from seqpar.layout import Layout

BUCKET = 25 << 20  # DDP sums so many bytes of gradients at a time


@dataclass(frozen=True)
class Run:
    """What is planned: the settings, the device, the data's channels and outputs, all ranks (None: one group).

    ``timed``: seconds and MFU are estimated too, which takes as long again as the memory.
    """

    config: Config
    device: Device
    channels: int = 4
    outputs: int = 4
    ranks: int | None = None
    timed: bool = True


@dataclass(frozen=True)
class Plan:
    """What one size of group needs on its fullest rank, or ``why`` it cannot be.

    ``scores`` is what attention that is not fused would need beside ``memory``; ``attention_why`` says in lines why
    attention goes as it does, where that was left open.
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
    attention_why: tuple[str, ...] = ()

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


def plan(run: Run, size: int) -> Plan:
    """Returns what a group of that size needs; refuses what cannot run, or would cut nodes up."""
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
    return planned(replace(run, config=config), ranks)


def planned(run: Run, ranks: int) -> Plan:
    """Returns what a complete config needs on so many ranks; attention that is left open is chosen.

    Training asks the same, so that it runs what was planned.
    """
    config, device = run.config, run.device.of(ranks)
    if not is_open(config):
        return _plan(run, config, device, ranks)
    plan_of = cache(lambda named: _plan(run, named, device, ranks))
    config, why = choose_within_memory(config, device, lambda named: plan_of(named).total)
    return replace(plan_of(config), attention_why=why)


def steps_of(run: Run, config: Config, device: Device, ranks: int) -> list[Step]:
    """Returns what a step takes on each rank that may hold most."""
    groups, clock = ranks // config.seqpar, device.clock(config.precision)
    setup = StepSetup(config, 0, run.channels, run.outputs, groups, device.on_gpu, clock)
    return [count_step(replace(setup, rank=rank)) for rank in _fullest(config)]


def memory_of(step: Step, device: Device) -> dict[str, float]:
    parts = ("weights", "gradients", "optimizer", "input", "tokens", "decoder", "transient")
    memory: dict[str, float] = {name: getattr(step, name) for name in parts}
    return memory | {"apart": device.reserved_bytes + device.fragmentation * sum(memory.values())}


def _plan(run: Run, config: Config, device: Device, ranks: int) -> Plan:
    step = max(steps_of(run, config, device, ranks), key=lambda s: s.tokens + s.decoder + s.transient)
    memory = memory_of(step, device)
    sent = {"seq": step.sent.total() * config.accumulate, "world": _world_bytes(config, step, ranks)}
    found = Plan(config, device, ranks, memory, sent, scores=_scores(config, step.transient))
    if not run.timed:
        return found
    seconds = _seconds(config, device, step, ranks)
    once = Config().grad_checkpoint
    alone = replace(config, seqpar=1, attention="auto", keep_kv=False, split="spatial", grad_checkpoint=once)
    done = 3 * config.accumulate * _forward_operations(alone, run.channels, run.outputs) / config.seqpar
    return replace(found, seconds=seconds, mfu=done / sum(seconds.values()) / device.peak[config.precision])


@lru_cache(maxsize=4)
def _forward_operations(config: Config, channels: int, outputs: int) -> float:
    """Returns what one process does forward: what is done twice or on each rank counts once."""
    return count_step(StepSetup(config, channels=channels, outputs=outputs)).forward_operations


def _fullest(config: Config) -> Iterator[int]:
    """Yields the ranks that may hold most: of those with most tokens the one with most neighbours, and most heads."""
    layout = Layout.of(config.tile, config.patch, config.seqpar, config.split)

    def inside(rank: int) -> int:
        sides = zip(layout.box(rank), layout.grid) if layout.is_box else ()
        return sum((low > 0) + (high < extent) for (low, high), extent in sides)

    fullest = max(range(layout.num_ranks), key=lambda rank: (layout.counts[rank], inside(rank)))
    yield fullest
    inner = strategy_of(config).inner
    if fullest and inner > 1 and config.heads % inner:
        yield 0  # the first places take one head more


def _scores(config: Config, transient: int) -> float:
    """Returns what attention that is not fused would need more.

    Each layer holds softmax's output of this rank's queries and all keys until its backward, which makes the gradients
    of that and of the scores.
    """
    layer = layer_of(config)
    one = layer.batch * layer.heads * max(layer.sizes) * sum(layer.sizes) * layer.element
    return saved_layers(config) * one + max(0, 2 * one - transient)


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
        waiting = cost(strategy_of(config), layer_of(config), machine, config.keep_kv).waiting * config.depth
        others = [kind for kind in step.sent if kind != "attention"]
        waiting += sum(step.sent[k] / link.bandwidth + step.messages[k] * link.latency for k in others)
        found["waiting"] = waiting * config.accumulate
    if ranks > 1:
        link = device.link(ranks)
        rounds = -(-step.parameters // BUCKET)
        summing = _world_bytes(config, step, ranks) / link.bandwidth + rounds * 2 * (ranks - 1) * link.latency
        found["summing"] = max(0.0, summing - computing / 2) if device.on_gpu else summing  # under the backward
    return found
