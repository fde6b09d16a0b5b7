"""What a run needs on each rank: memory by part, bytes sent by group, and time.

Memory and bytes are counted by running the network on tensors without data (``step_counter``); time is estimated from
the device's figures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from seqpar.cluster.devices import Device
from seqpar.models.build import layout_of
from seqpar.planner.attention_choice import (
    attention_waiting,
    choose_within_memory,
    is_attention_open,
    strategy_of,
    unfused_scores,
)
from seqpar.planner.batch_size import hold_global_batch
from seqpar.planner.feasibility import check_feasible, require_peers
from seqpar.planner.step_counter import StepCost, StepSetup, count_step
from seqpar.settings.config import Config

BUCKET = 25 << 20  # bytes of gradients that DDP sums at a time


@dataclass(frozen=True)
class RunToPlan:
    """The run to plan: its settings, its device, channels and outputs of its data, and its ranks.

    ``ranks``: of the run, None where it has ``groups`` sequence groups, whatever their size. ``fixed``: batch and
    accumulate, where a global batch must be made with these.
    ``timed``: estimate seconds and MFU too, which takes as long again as the memory.
    """

    config: Config
    device: Device
    channels: int = 4
    outputs: int = 4
    ranks: int | None = None
    timed: bool = True
    groups: int = 1
    fixed: Mapping[str, int] = field(default_factory=dict)

    def ranks_of(self, size: int) -> int:
        """Returns all ranks of the run with groups of ``size``."""
        return self.ranks or self.groups * size


@dataclass(frozen=True)
class Plan:
    """What a run with one group size needs on its fullest rank, or ``why`` it cannot be.

    ``memory`` is bytes by part, ``sent`` bytes a step by group, ``seconds`` those of a step by kind. ``scores`` are the
    bytes that attention would need on top if it were not fused. ``attention_why`` are the lines that explain the choice
    of the attention strategy, where it was left open.
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


def plan(run: RunToPlan, size: int) -> Plan:
    """Returns the plan of a group size; raises where it cannot run, or groups would share nodes unevenly."""
    return plan_complete_config(replace(run, config=config_for_group_size(run, size)), run.ranks_of(size))


def fits_nodes_evenly(size: int, node: int) -> bool:
    """Returns whether groups of a size share nodes of ``node`` ranks evenly."""
    return size == 1 or node >= 1 << 20 or node % size == 0 or size % node == 0


def config_for_group_size(run: RunToPlan, size: int) -> Config:
    """Returns the run's config for a group size; raises, before anything is counted, where it cannot run."""
    ranks, node = run.ranks_of(size), run.device.node
    if ranks % size:
        raise ValueError(f"does not divide {ranks} ranks")
    if not fits_nodes_evenly(size, node):
        raise ValueError(f"does not share nodes of {node} evenly")
    config = replace(run.config, seqpar=size)
    if not config.batch:  # plan for the least
        config = replace(config, batch=size if config.mode == "swap" else 1)
    if config.global_batch:
        config = hold_global_batch(config, ranks // size, run.fixed)
    check_feasible(config)
    require_peers(config, ranks)
    return config


def plan_complete_config(run: RunToPlan, ranks: int) -> Plan:
    """Returns the plan of a complete config on so many ranks; attention that was left open is chosen.

    Training asks the same, so that it runs what was planned.
    """
    config = run.config
    device = run.device.of(ranks).in_groups((ranks, config.seqpar, ranks // config.seqpar))
    if not is_attention_open(config):
        return _plan(run, config, device, ranks)
    plan_of = cache(lambda named: _plan(run, named, device, ranks))
    config, why = choose_within_memory(config, device, lambda named: plan_of(named).total)
    return replace(plan_of(config), attention_why=why)


def steps_of(run: RunToPlan, config: Config, device: Device, ranks: int) -> list[StepCost]:
    """Counts a step on each rank that may need most memory."""
    groups, clock = ranks // config.seqpar, device.clock(config.precision)
    setup = StepSetup(config, 0, run.channels, run.outputs, groups, device.on_gpu, clock)
    return [count_step(replace(setup, rank=rank)) for rank in _fullest(config)]


def memory_of(step: StepCost, device: Device) -> dict[str, float]:
    """Returns bytes by part; ``apart`` are those of libraries and of fragmentation."""
    parts = ("weights", "gradients", "optimizer", "input", "tokens", "decoder", "transient")
    memory: dict[str, float] = {name: getattr(step, name) for name in parts}
    return memory | {"apart": device.reserved_bytes + device.fragmentation * sum(memory.values())}


def _plan(run: RunToPlan, config: Config, device: Device, ranks: int) -> Plan:
    step = max(steps_of(run, config, device, ranks), key=lambda s: s.tokens + s.decoder + s.transient)
    memory = memory_of(step, device)
    sent = {"seq": step.sent.total() * config.accumulate, "world": _world_bytes(config, step, ranks)}
    untimed = Plan(config, device, ranks, memory, sent, scores=unfused_scores(config, step.transient))
    if not run.timed:
        return untimed
    seconds = _seconds(config, device, step, ranks)
    operations = 3 * config.accumulate * _forward_operations(run, config) / config.seqpar
    return replace(untimed, seconds=seconds, mfu=operations / sum(seconds.values()) / device.peak[config.precision])


def _forward_operations(run: RunToPlan, config: Config) -> float:
    """Returns the operations of the model's forward pass, as one process runs it that does nothing to save memory."""
    usual, device = Config(), run.device
    same = ("mode", "attention", "keep_kv", "split", "grad_checkpoint", "mlp_chunks", "shard_weights", "accumulate")
    alone = replace(config, seqpar=1, **{name: getattr(usual, name) for name in same})
    clock = device.clock(config.precision)
    return count_step(StepSetup(alone, 0, run.channels, run.outputs, 1, device.on_gpu, clock)).forward_operations


def _fullest(config: Config) -> Iterator[int]:
    """Yields the ranks that may need most memory: one with most tokens and then neighbours, one with most heads."""
    layout = layout_of(config)

    def inside(rank: int) -> int:
        sides = zip(layout.box(rank), layout.grid) if layout.is_box else ()
        return sum((low > 0) + (high < extent) for (low, high), extent in sides)

    fullest = max(range(layout.num_ranks), key=lambda rank: (layout.counts[rank], inside(rank)))
    yield fullest
    inner = strategy_of(config).inner
    if fullest and inner > 1 and config.heads % inner:
        yield 0  # the first ranks take one head more


def _world_bytes(config: Config, step: StepCost, ranks: int) -> float:
    """Returns the bytes a step that a rank sends to all: gradients; of shards weights twice and gradients once."""
    times = config.accumulate * 3 if config.shard_weights else 2
    return times * (ranks - 1) / ranks * step.parameters


def _seconds(config: Config, device: Device, step: StepCost, ranks: int) -> dict[str, float]:
    """Returns the step's seconds by kind: computing, update, and waiting for messages that nothing overlaps."""
    computing = step.seconds.total() * config.accumulate
    seconds = {"computing": computing, "update": step.update_seconds}
    size, link = config.seqpar, device.link(config.seqpar)
    if size > 1:
        waiting = attention_waiting(config, device)
        others = [kind for kind in step.sent if kind != "attention"]
        waiting += sum(link.seconds(step.sent[k], step.exchanges[k], step.messages[k]) for k in others)
        seconds["waiting"] = waiting * config.accumulate
    if ranks > 1:
        link = device.link(ranks)
        rounds = -(-step.parameters // BUCKET)
        summing = link.seconds(_world_bytes(config, step, ranks), rounds, rounds * 2 * (ranks - 1))
        seconds["summing"] = max(0.0, summing - computing / 2) if device.on_gpu else summing  # under the backward
    return seconds
