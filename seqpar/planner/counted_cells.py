"""What each cell of a network costs on a device that need not be present: counted on tensors without data.

On this CPU, seconds are measured cell by cell instead if one rank has a whole tile.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from seqpar.cluster.devices import Link
from seqpar.cluster.torch_setup import recomputes, without_torch_compile
from seqpar.models.build import build_loss, build_network, build_on_meta
from seqpar.models.network import Network
from seqpar.models.pipelined import PartOfBatch
from seqpar.optimization.optimizers import OPTIMIZERS, make_optimizer
from seqpar.parallel.mesh import Group
from seqpar.parallel.meta_tensors import meta_as_device
from seqpar.pipeline.cells import Value
from seqpar.pipeline.placement import CellCost
from seqpar.planner.cell_costs import Around, CodeCost, Meter, OptimizerBytes, measure_cells, measure_thread_seconds
from seqpar.planner.memory_counter import MemoryCounter, as_autocast
from seqpar.planner.step_counter import Clock, StepSetup, WorkCounter, untimed
from seqpar.settings.config import Config
from seqpar.vit.dropout import DropoutKey


def bytes_of_optimizer(config: Config, on_gpu: bool) -> OptimizerBytes:
    """Returns what the config's optimizer needs per byte of weight."""
    probe = nn.Sequential(*[nn.Linear(64, 64, bias=False, device="meta") for _ in range(2)])
    weights = list(probe.parameters())  # two: temporaries of one may be alive while the next is updated
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    at_once = on_gpu and not OPTIMIZERS[config.optimizer].whole
    with without_torch_compile(), MemoryCounter() as counter:
        optimizer = make_optimizer(probe, config.optimizer_options)
        for group in optimizer.param_groups:
            group["foreach"] = at_once  # torch's own choice
        optimizer.step()
        before, counter.phase = counter.now, "update"
        optimizer.step()
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    size = sum(weight.nbytes for weight in weights)
    update = (counter.peaks["update"] - before) / (size if at_once else weights[0].nbytes)
    return OptimizerBytes(1 + states / size, update, at_once)


def count_cells(setup: StepSetup, link: Link) -> list[CellCost]:
    """Returns each cell's cost on a rank, including the loss in the last: bytes counted, seconds by the setup's clock.

    - ``link``: of the sequence group, for whose messages a cell waits
    """
    config = setup.config
    group = Group("seq", tuple(range(config.seqpar)), setup.rank)
    data = Group("data", tuple(range(setup.data_groups)))
    net = build_on_meta(config, group, setup.channels, setup.outputs, data)
    precision = torch.bfloat16 if config.precision == "bf16" else None

    with (
        nullcontext() if recomputes(config) else without_torch_compile(),
        meta_as_device("cuda" if setup.on_gpu else "cpu"),
    ):
        around, meter = partial(as_autocast, precision, setup.on_gpu), partial(_counted, setup.clock, group, link)
        return costs_of(config, net, data, around, 1, meter, "meta", setup.on_gpu)


def measure_here(setup: StepSetup, link: Link) -> list[CellCost]:
    """Returns the same as ``count_cells``, but seconds measured on one thread; only for a group of one."""
    config = setup.config
    counted = count_cells(replace(setup, clock=untimed), link)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    net = build_network(config, setup.channels, setup.outputs, Group("seq")).train()
    net.to(torch.float64 if config.precision == "fp64" else torch.float32)
    around = partial(torch.autocast, "cpu", torch.bfloat16, enabled=config.precision == "bf16")
    torch.set_num_threads(1)
    try:
        measured = costs_of(config, net, Group("data"), around, 2)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    return [replace(c, forward=m.forward, backward=m.backward) for c, m in zip(counted, measured)]


def costs_of(
    config: Config,
    net: Network,
    data: Group,
    around: Around,
    repeats: int = 3,
    meter: Meter = measure_thread_seconds,
    device: torch.device | str = "cpu",
    on_gpu: bool = False,
) -> list[CellCost]:
    """Returns the costs of a micro-batch of zeros on a device; for the others see ``measure_cells``.

    - ``data``: the group whose ranks share the batch
    - ``on_gpu``: whether the device is a GPU, or a meta device in its place
    """
    layout = net.layout
    tokens, dtype = (config.batch, layout.counts[net.group.index]), next(net.parameters()).dtype
    part = torch.zeros(*tokens, net.in_channels, *layout.patch, dtype=dtype, device=device)
    label = net.arrange(torch.zeros(net.label_shape(config.batch), dtype=torch.uint8, device=device))
    loss_of_net, loss_groups = net.training_loss(build_loss(config)), net.loss_groups(data, config.batch)

    def loss(values: Sequence[Value]) -> Tensor:
        logits = [x for x, _ in values]
        return loss_of_net(logits if len(logits) > 1 else logits[0], label, loss_groups)  # type: ignore[arg-type]

    micro = PartOfBatch(part, layout, DropoutKey(0, 0, tuple(range(config.batch))))
    return measure_cells(net, net.staged(), micro, around, bytes_of_optimizer(config, on_gpu), repeats, loss, meter)


@contextmanager
def _counted(clock: Clock, group: Group, link: Link) -> Iterator[CodeCost]:
    """Counts the bytes of the code in this context, and its seconds by a clock and a link."""
    work, reading = WorkCounter(clock), CodeCost()
    sent, messages = group.traffic.total(), group.messages.total()
    with MemoryCounter(work.watch) as counter:
        yield reading
    waiting = (group.traffic.total() - sent) / link.bandwidth + (group.messages.total() - messages) * link.latency
    reading.seconds, reading.most = work.seconds.total() + waiting, counter.most
