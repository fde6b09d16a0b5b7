"""Counts one training step without data: memory, messages, operations and seconds of one rank.

The network is built and runs forward, loss, backward and update on meta tensors, on one rank's part and with a group
that sends nothing. The code is the one that trains, so the count holds for every decoder, mode and attention. All
blocks but the first are alike: a deep network is counted by two shallow ones. Legend: b batch, c channels, n tokens, p
voxels of a patch.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.cluster.devices import Operation
from seqpar.cluster.torch_setup import recomputes, without_torch_compile
from seqpar.models.build import build_loss, build_on_meta, family_of
from seqpar.models.network import Network
from seqpar.optimization.optimizers import OPTIMIZERS, make_optimizer
from seqpar.parallel.device_constants import clear_caches
from seqpar.parallel.mesh import Group
from seqpar.parallel.meta_tensors import meta_as_device
from seqpar.planner.memory_counter import MemoryCounter, Saved, as_autocast
from seqpar.settings.config import Config
from seqpar.vit.dropout import DropoutKey

LARGE_BATCH = 16  # tiles for each rank of a group: counting more takes as many times longer, and tells no more
SHALLOW = (2, 3)  # depths of the two: the first block never drops its path, the others are alike
Clock = Callable[[Operation], float]  # seconds of an operation


def untimed(operation: Operation) -> float:
    """Returns 0 seconds for every operation: the clock where only memory is wanted."""
    return 0.0


@dataclass(frozen=True)
class StepSetup:
    """The step to count.

    ``rank`` is the place in the sequence group, ``channels`` are the image's, ``outputs`` the logits'; ``data_groups``
    sequence groups share the batch. ``on_gpu`` follows autocast and the optimizer of a GPU, else of a CPU; ``clock``
    returns an operation's seconds.
    """

    config: Config
    rank: int = 0
    channels: int = 1
    outputs: int = 2
    data_groups: int = 1
    on_gpu: bool = True
    clock: Clock = untimed


@dataclass(frozen=True)
class StepCost:
    """What a step takes on one rank: bytes in memory, bytes sent by kind, operations and seconds by kind.

    ``tokens`` and ``decoder`` are saved for backward when the loss is known; ``peaks`` are the most bytes alive in each
    phase, the update among them, without weights, gradients and optimizer states.
    """

    parameters: int = 0
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    input: int = 0
    tokens: int = 0
    decoder: int = 0
    peaks: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    exchanges: Counter[str] = field(default_factory=Counter)  # of messages that travel together
    operations: Counter[str] = field(default_factory=Counter)
    forward_operations: float = 0.0
    seconds: Counter[str] = field(default_factory=Counter)
    update_seconds: float = 0.0

    @property
    def transient(self) -> int:
        """Bytes at the worst moment beyond the input and what is saved for backward."""
        return max(0, max(self.peaks.values()) - self.input - self.tokens - self.decoder)


def count_step(setup: StepSetup) -> StepCost:
    """Returns what a step takes on one rank of a sequence group; a large batch is extrapolated from two small ones."""
    config = setup.config
    if config.batch <= LARGE_BATCH * config.seqpar:
        return _count_by_depth(setup)
    few, more = _small_batches(config)
    first, second = (_count_by_depth(replace(setup, config=replace(config, batch=batch))) for batch in (few, more))
    return extrapolate(first, second, (config.batch - few) / (more - few))


def _small_batches(config: Config) -> tuple[int, int]:
    """Returns two batches that are decoded as the config's is: in whole samples, or not."""
    in_samples = config.batch % config.seqpar == 0
    fitting = [n for n in range(1, LARGE_BATCH * config.seqpar + 1) if (n % config.seqpar == 0) == in_samples]
    return fitting[len(fitting) // 2 - 1], fitting[-1]


def _count_by_depth(setup: StepSetup) -> StepCost:
    """Counts a step of a deep network by two shallow ones."""
    config, (few, more) = setup.config, SHALLOW
    depth = family_of(config).num_alike(config)
    if depth <= more:
        return count_whole_step(setup)
    first, second = (count_whole_step(replace(setup, config=replace(config, depth=depth))) for depth in SHALLOW)
    return extrapolate(first, second, depth - few)


@lru_cache(maxsize=256)
def count_whole_step(setup: StepSetup) -> StepCost:
    """Counts a step with all its blocks; each once, as plans ask for some of them again."""
    with nullcontext() if recomputes(setup.config) else without_torch_compile():
        return _count_whole_step(setup)


def _count_whole_step(setup: StepSetup) -> StepCost:
    config, on_gpu = setup.config, setup.on_gpu
    group = Group("seq", tuple(range(config.seqpar)), setup.rank)
    data = Group("data", tuple(range(setup.data_groups)))
    net = build_on_meta(config, group, setup.channels, setup.outputs, data)
    work = WorkCounter(setup.clock)
    clear_caches()
    with meta_as_device("cuda" if on_gpu else "cpu"):
        with MemoryCounter(work.watch) as counter:
            image, label = _part(setup, net)
            tokens, saved, forward_operations = _forward_and_backward(setup, net, data, (image, label), counter, work)
        step_seconds, work.seconds = work.seconds, Counter[str]()
        optimizer, update = _update(config, net, work, on_gpu)
    owners, weights, gradients = _weights_and_gradients(setup, net)
    inputs = image.nbytes + label.nbytes
    return StepCost(
        parameters=sum(p.nbytes for p in trainable_parameters(net)),
        weights=weights,
        gradients=gradients,
        optimizer=optimizer // owners,
        input=inputs,
        tokens=tokens,
        decoder=saved - tokens,
        peaks=Counter({**counter.peaks, "update": inputs + update // owners}),
        sent=Counter(group.traffic),
        messages=Counter(group.messages),
        exchanges=Counter(group.exchanges),
        operations=work.operations,
        forward_operations=forward_operations,
        seconds=step_seconds,
        update_seconds=work.seconds.total(),
    )


class WorkCounter:
    """Adds up operations and seconds by kind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.operations, self.seconds = Counter[str](), Counter[str]()

    def watch(self, operation: Operation) -> None:
        times = operation.times
        self.operations[operation.kind] += times * operation.count  # type: ignore[assignment]
        self.seconds[operation.kind] += times * self._clock(operation)  # type: ignore[assignment]


def _part(setup: StepSetup, net: Network) -> tuple[Tensor, Tensor]:
    """Returns the rank's image ``b n c p p p`` and label."""
    config, layout = setup.config, net.layout
    tokens, dtype = (config.batch, layout.counts[setup.rank]), next(net.parameters()).dtype
    image = torch.empty(*tokens, setup.channels, *layout.patch, dtype=dtype, device="meta")
    return image, torch.empty(net.label_shape(config.batch), dtype=torch.uint8, device="meta")


def _forward_and_backward(
    setup: StepSetup, net: Network, data: Group, part: tuple[Tensor, Tensor], counter: MemoryCounter, work: WorkCounter
) -> tuple[int, int, float]:
    """Returns the bytes saved for backward before the decoder and in all, and the operations forward."""
    config, (image, label) = setup.config, part
    loss_groups = net.loss_groups(data, config.batch)
    by_themselves = config.targets == "sigmoids" or setup.outputs == 1
    regions = [(value,) for value in range(1, setup.outputs + 1)] if by_themselves else ()
    loss_fn = net.training_loss(build_loss(config, regions))
    for p in trainable_parameters(net):
        p.register_post_accumulate_grad_hook(_drop_gradient)  # gradients are counted by themselves
    with Saved(net, (image, label)) as saved:
        at_decoder = list[int]()
        counter.phase = "forward"

        def begin(phase: str) -> None:
            if phase == "decoder":
                at_decoder.append(saved.total)
            else:
                counter.phase = phase

        net.on_phases(begin)
        with as_autocast(torch.bfloat16 if config.precision == "bf16" else None, setup.on_gpu):
            logits = net(image, None, DropoutKey(0, 0, tuple(range(config.batch))))
        loss = loss_fn(logits, net.arrange(label), loss_groups)
    del logits
    forward_operations = work.operations.total()
    counter.phase = "decoder backward"
    loss.backward()
    return at_decoder[0], saved.total, forward_operations


def trainable_parameters(net: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that training changes."""
    return [p for p in net.parameters() if p.requires_grad]


def _drop_gradient(p: Tensor) -> None:
    p.grad = None


def _update(config: Config, net: nn.Module, work: WorkCounter, on_gpu: bool) -> tuple[int, int]:
    """Returns the bytes of the optimizer's states after its first step, and what more is alive while it runs.

    It has a counter of its own: what is left over from the backward, and may go meanwhile, does not matter.
    """
    with MemoryCounter(work.watch) as counter:
        for p in trainable_parameters(net):
            p.grad = torch.empty_like(p)
        optimizer = make_optimizer(net, config.optimizer_options)
        for group in optimizer.param_groups:
            # torch's own choice: all at once, or in turn
            group["foreach"] = on_gpu and not config.shard_weights and not OPTIMIZERS[config.optimizer].whole
        before, counter.phase = counter.now, "update"
        optimizer.step()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    return states, counter.peaks["update"] - before - states


def _weights_and_gradients(setup: StepSetup, net: Network) -> tuple[int, int, int]:
    """Returns how many ranks share the weights, and this rank's bytes of weights and gradients."""
    config, size = setup.config, sum(p.nbytes for p in net.parameters())
    gradients, buffers = sum(p.nbytes for p in trainable_parameters(net)), sum(b.nbytes for b in net.buffers())
    if not config.shard_weights:
        return 1, size + buffers, gradients
    # whole at a time: the unit (block, cell) that runs, the next one, and all that is in no unit
    owners = setup.data_groups * config.seqpar
    units = [sum(p.nbytes for p in unit.parameters()) for unit in net.units()]
    unit, rest = max(units), size - sum(units)
    return owners, size // owners + 2 * unit + rest + buffers, gradients // owners + unit + rest


def extrapolate(few: StepCost, more: StepCost, times: float) -> StepCost:
    """Returns ``few`` with further blocks or samples; each adds the difference of ``more`` and ``few``."""

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
