"""The network without its numbers: built, run and counted on tensors that have shapes alone.

The very code that trains runs, on one rank's part, with a group that sends nothing: so what is held, moved and
computed is what the code does, whatever decoder, mode or attention. Blocks are alike, so that those of a deep
network are counted in two shallow ones. Legend: b batch, c channels, n tokens, p voxels of a patch.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.launch.hardware.operations import Operation
from seqpar.launch.models.build import build
from seqpar.launch.models.optimizer import make_optimizer
from seqpar.launch.models.segmentation import SegmentationNet
from seqpar.launch.planning.memory_counter import MemoryCounter, as_autocast
from seqpar.launch.planning.saved_bytes import Saved
from seqpar.launch.settings.config import Config
from seqpar.losses import DiceCE
from seqpar.mesh import Group
from seqpar.meta_tensors import standing_for
from seqpar.vit.dropout import DropoutKey

SHALLOW = (2, 3)  # blocks: the first one never drops its path, the others are alike
Clock = Callable[[Operation], float]  # seconds of an operation


@dataclass(frozen=True)
class Step:
    """What a step takes on one rank: bytes held, sent by kind, operations and seconds by kind.

    ``tokens`` and ``decoder`` are held for backward when the loss is known; ``peaks`` is all that is alive at the worst
    moment of each phase, the update among them, without weights, gradients and what the optimiser holds.
    """

    parameters: int = 0
    weights: int = 0
    gradients: int = 0
    optimiser: int = 0
    input: int = 0
    tokens: int = 0
    decoder: int = 0
    peaks: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    forward_operations: float = 0.0
    seconds: Counter[str] = field(default_factory=Counter)
    update_seconds: float = 0.0

    @property
    def transient(self) -> int:
        """What more there is at the worst moment than input and what is held for backward."""
        return max(0, max(self.peaks.values()) - self.input - self.tokens - self.decoder)


def outline(config: Config, group: Group, channels: int = 1, outputs: int = 2) -> SegmentationNet:
    """Returns the network without its numbers: built as always, so that every part refuses what it cannot."""
    state = torch.get_rng_state()
    net = build(config, channels, outputs, group, device="meta")
    torch.set_rng_state(state)
    return net.double() if config.precision == "fp64" else net


def without_numbers(net: SegmentationNet) -> SegmentationNet:
    """Returns a copy of a network that has shapes alone, and whose group sends nothing."""
    known: dict[int, object] = {id(t): torch.empty_like(t, device="meta") for t in net.buffers()}
    known |= {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in net.parameters()}
    groups = {id(g): g for module in net.modules() for g in vars(module).values() if isinstance(g, Group)}
    groups[id(net.mode.group)] = net.mode.group
    known |= {place: Group(g.name, g.ranks, g.index) for place, g in groups.items()}
    return copy.deepcopy(net, known)


def count_step(
    config: Config, rank: int, channels: int, outputs: int, clock: Clock, on_gpu: bool, data: int = 1
) -> Step:
    """Returns what a step of ``config`` takes on that rank of a sequence group; ``data`` groups share the batch."""
    few, more = SHALLOW
    how = rank, channels, outputs, clock, on_gpu, data
    if config.depth <= more:
        return _counted(config, *how)
    first, second = (_counted(replace(config, depth=depth), *how) for depth in SHALLOW)
    return extended(first, second, config.depth - few)


def _counted(config: Config, rank: int, channels: int, outputs: int, clock: Clock, on_gpu: bool, data: int) -> Step:
    """Returns what is counted in one forward, loss, backward and update."""
    group = Group("seq", tuple(range(config.seqpar)), rank)
    net = outline(config, group, channels, outputs)
    layout, dtype = net.encoder.layout, next(net.parameters()).dtype
    work = _Work(clock)
    lower = torch.bfloat16 if config.precision == "bf16" else None
    with standing_for("cuda" if on_gpu else "cpu"), MemoryCounter(work.watch) as alive:
        tokens = (config.batch, layout.counts[rank])
        image = torch.empty(*tokens, channels, *layout.patch, dtype=dtype, device="meta")
        label = torch.empty(*tokens, *layout.patch, dtype=torch.uint8, device="meta")
        given = image.nbytes + label.nbytes
        loss_groups = net.mode.loss_groups(Group("data", tuple(range(data))), config.batch)
        loss_of = DiceCE(batch_dice=config.batch_dice)
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(_let_go)  # they are counted by themselves
        with Saved(net, (image, label)) as saved:
            at_decoder = list[int]()
            net.decoder.register_forward_pre_hook(lambda *_: at_decoder.append(saved.total))
            _name_phases(net, alive)
            with as_autocast(lower, on_gpu):
                logits = net(image, None, DropoutKey(0, 0, tuple(range(config.batch))))
            loss = loss_of(logits, net.arrange(label), loss_groups)
        del logits
        held, forward = saved.total, work.operations.total()
        alive.phase = "decoder backward"
        loss.backward()
        del loss
        peaks = Counter(alive.peaks)
        step_seconds, work.seconds = work.seconds, Counter[str]()
        optimiser, more = _update(config, net, alive, on_gpu)
    size, owners, block, rest = sum(p.nbytes for p in net.parameters()), 1, 0, 0
    if config.shard_weights:  # together are those of the block that runs, of the next one, and of all that is no block
        owners = data * config.seqpar
        block = sum(p.nbytes for p in net.encoder.blocks[0].parameters())
        rest = size - config.depth * block
    peaks["update"] = given + more // owners
    return Step(
        parameters=size,
        weights=size // owners + 2 * block + rest + sum(b.nbytes for b in net.buffers()),
        gradients=size // owners + block + rest,
        optimiser=optimiser // owners,
        input=given,
        tokens=at_decoder[0],
        decoder=held - at_decoder[0],
        peaks=peaks,
        sent=Counter(group.traffic),
        messages=Counter(group.messages),
        operations=work.operations,
        forward_operations=forward,
        seconds=step_seconds,
        update_seconds=work.seconds.total(),
    )


class _Work:
    """Adds up operations and seconds by kind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.operations, self.seconds = Counter[str](), Counter[str]()

    def watch(self, done: Operation) -> None:
        self.operations[done.kind] += done.count  # type: ignore[assignment]
        self.seconds[done.kind] += self._clock(done)  # type: ignore[assignment]


def _name_phases(net: SegmentationNet, alive: MemoryCounter) -> None:
    """Lets the phase be known in which a moment lies: in each, a block more adds what it adds at its worst moment."""

    def begin(phase: str) -> Callable[[Tensor], None]:
        return lambda grad: setattr(alive, "phase", phase)

    alive.phase = "forward"
    net.encoder.norm.register_forward_hook(lambda module, given, made: _hook(made, begin("blocks backward")))
    first = net.encoder.blocks[0]
    first.register_forward_pre_hook(lambda module, given: _hook(given[0], begin("embedding backward")))


def _hook(tensor: Tensor, act: Callable[[Tensor], None]) -> None:
    tensor.register_hook(act)


def _let_go(p: Tensor) -> None:
    p.grad = None


def _update(config: Config, net: nn.Module, alive: MemoryCounter, on_gpu: bool) -> tuple[int, int]:
    """Returns the bytes that the optimiser holds after its first step, and what more it takes while it runs."""
    for p in net.parameters():
        p.grad = torch.empty_like(p)
    optimiser = make_optimizer(config, net)
    for group in optimiser.param_groups:
        group["foreach"] = on_gpu and not config.shard_weights  # as torch does by itself: all at once, or in turn
    alive.phase, before = "update", alive.now
    optimiser.step()
    state = sum(t.nbytes for held in optimiser.state.values() for t in held.values() if isinstance(t, Tensor))
    return state, alive.peaks["update"] - before - state


def extended(few: Step, more: Step, times: int) -> Step:
    """Returns ``few`` with so many blocks or samples more, each of which adds what ``more`` has above ``few``."""

    def along(a: float, b: float) -> float:
        return a + times * (b - a)

    def counts(a: Counter[str], b: Counter[str]) -> Counter[str]:
        return Counter({name: along(a[name], b[name]) for name in b})  # type: ignore[misc]

    values = dict[str, Any]()
    for name, value in vars(few).items():
        if isinstance(value, Counter):
            values[name] = counts(value, getattr(more, name))
        elif isinstance(value, (int, float)):
            values[name] = along(value, getattr(more, name))
    return replace(few, **values)
