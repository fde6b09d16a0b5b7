"""The engine of a pipeline: runs one rank's events of the timetable, act by act and message by message.

A step over a pipeline is an accumulated step: the gradients of each micro-batch's loss are added in order, as in one
process. A stage's inputs are sent to it directly from the stages that compute them, whatever stages are in between.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from seqpar.parallel.mesh import Group
from seqpar.pipeline.cells import IMAGE, Value
from seqpar.pipeline.schedule import Act, Event, Message
from seqpar.pipeline.stages import StageMap, Takes
from seqpar.pipeline.transfers import Transfers

Prefixes = tuple[tuple[str, ...], ...]
LossOf = Callable[[Sequence[Value], int], Tensor]  # takes the network's outputs and the number of the micro-batch


class StagedNet(Protocol):
    """What a pipeline requires of a network.

    ``micro`` is a rank's share of a micro-batch, such as its part of the image.

    - ``takes``, ``outputs``: as in ``StageMap``
    - ``owns``: for each cell, the names of its weights and buffers, or their prefixes
    """

    @property
    def takes(self) -> Takes: ...

    @property
    def outputs(self) -> tuple[int, ...]: ...

    @property
    def owns(self) -> Prefixes: ...

    def image(self, micro: Any) -> Value:
        """Returns the input of cells that take the image."""

    def run_cell(self, number: int, inputs: Sequence[Value], micro: Any) -> Value:
        """Returns a cell's output, given its ``inputs`` in the order of ``takes[number]``."""

    def buffers_of(self, numbers: Sequence[int]) -> Sequence[Tensor]:
        """Returns the running statistics of cells."""


class _Held(NamedTuple):
    """What a stage keeps of a micro-batch between forward and backward."""

    leaves: dict[int, Value]  # its inputs, by value
    roots: dict[int, Tensor]  # its outputs that others take; the loss under ``IMAGE``


class Engine:
    """Runs this rank's stages.

    - ``events``: this rank's list in the timetable, which all ranks computed from the same costs
    - ``pipe``: the group of places
    - ``seq``: the group over which values may be split into boxes
    - ``recompute``: keep only a stage's inputs and run it again in backward; running statistics are updated once
    - ``around``: a context for every forward of cells, such as autocast
    """

    def __init__(
        self,
        net: StagedNet,
        stages: StageMap,
        events: Sequence[Event],
        pipe: Group,
        seq: Group,
        device: torch.device,
        recompute: bool = False,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.net, self.stages, self.events, self.around = net, stages, tuple(events), around
        self.transfers, self.recompute = Transfers(stages, pipe, seq, device), recompute
        self.last_stage = stages.num_stages - 1

    @property
    def has_loss(self) -> bool:
        """Whether this rank has the last stage."""
        return any(isinstance(event, Act) and event.stage == self.last_stage for event in self.events)

    def step(self, micros: Sequence[Any], loss: LossOf, sizes: Hashable = ()) -> None:
        """Adds the gradients of all micro-batches' losses to the weights' gradients.

        - ``micros``: the micro-batches, as many as the timetable has
        - ``loss``: called on the ranks of the last stage; the step's loss is the sum of its results
        - ``sizes``: sizes of the micro-batches, the same on all ranks; tensors of new sizes are described to their
          receivers
        """
        self._micros, self._loss = micros, loss
        self._held: dict[tuple[int, int], _Held] = {}
        self.transfers.begin(sizes)
        try:
            for event in self.events:
                if isinstance(event, Message):
                    self.transfers.run(event)
                elif event.is_forward:
                    self._forward(event.stage, event.micro)
                else:
                    self._backward(event.stage, event.micro)
            self.transfers.end()
        except BaseException:
            self.transfers.abandon()
            raise
        assert not self._held

    def _forward(self, stage: int, micro: int) -> None:
        leaves = dict[int, Value]()
        for value, source, _ in self.stages.enters(stage):
            x, grid = self.transfers.take(Message(True, value, source, stage, micro))
            leaves[value] = x.requires_grad_(), grid
        with torch.set_grad_enabled(not self.recompute):
            values = self._run(stage, micro, leaves)
        for value, _, target in self.stages.leaves(stage):
            x, grid = values[value]
            self.transfers.put(Message(True, value, stage, target, micro), x.detach(), grid)
        self._held[stage, micro] = _Held(leaves, {} if self.recompute else self._roots(stage, micro, values))

    def _run(self, stage: int, micro: int, leaves: dict[int, Value]) -> dict[int, Value]:
        """Returns the values of a stage that others or the loss take."""
        values, data = dict(leaves), self._micros[micro]
        cells = self.stages.runs(stage)
        kept = {value for value, _, _ in self.stages.leaves(stage)}
        if stage == self.last_stage:
            kept |= set(self.stages.outputs)
        last_use = {value: cell for cell in cells for value in self.stages.takes[cell]}
        with self.around():
            if self.stages.takes_image(stage):
                values[IMAGE] = self.net.image(data)
            for cell in cells:
                taken = self.stages.takes[cell]
                values[cell] = self.net.run_cell(cell, [values[value] for value in taken], data)
                for value in set(taken):
                    if last_use[value] == cell and value not in kept:
                        del values[value]
        return values

    def _roots(self, stage: int, micro: int, values: dict[int, Value]) -> dict[int, Tensor]:
        roots = {value: values[value][0] for value, _, _ in self.stages.leaves(stage)}
        if stage == self.last_stage:
            roots[IMAGE] = self._loss([values[value] for value in self.stages.outputs], micro)
        return roots

    def _backward(self, stage: int, micro: int) -> None:
        leaves, roots = self._held.pop((stage, micro))
        grads = dict[int, Tensor]()
        for value, _, target in self.stages.leaves(stage):
            more, _ = self.transfers.take(Message(False, value, stage, target, micro))
            grads[value] = grads[value] + more if value in grads else more
            self.transfers.let_go(Message(True, value, stage, target, micro))
        if self.recompute:
            roots = self._roots(stage, micro, self._run_again(stage, micro, leaves))
        learning = {value: x for value, x in roots.items() if x.requires_grad}
        back = _catch_gradients(leaves)
        if learning:
            torch.autograd.backward(list(learning.values()), [grads.get(value) for value in learning])
        for value, source, _ in self.stages.enters(stage):
            grad = back.get(value)
            grad = torch.zeros_like(leaves[value][0]) if grad is None else grad
            self.transfers.put(Message(False, value, source, stage, micro), grad)
            self.transfers.let_go(Message(False, value, source, stage, micro - 2))

    def _run_again(self, stage: int, micro: int, leaves: dict[int, Value]) -> dict[int, Value]:
        """Repeats ``_run`` with gradients; running statistics stay unchanged."""
        buffers = self.net.buffers_of(self.stages.runs(stage))
        before = [buffer.clone() for buffer in buffers]
        with torch.enable_grad():
            values = self._run(stage, micro, leaves)
        for buffer, value in zip(buffers, before):
            buffer.data.copy_(
                value
            )  # hidden from autograd: torch's batch norm saves these buffers but never reads them
        return values


def _catch_gradients(leaves: Mapping[int, Value]) -> dict[int, Tensor]:
    """Returns a dict that the next backward fills with the gradients of ``leaves``, by value.

    Their ``grad`` would have the leaves' strides, but a single process continues with the unchanged gradient.
    """
    caught: dict[int, Tensor] = {}
    for value, (x, _) in leaves.items():
        x.register_hook(partial(caught.__setitem__, value))
        x.register_post_accumulate_grad_hook(_drop_gradient)
    return caught


def _drop_gradient(x: Tensor) -> None:
    x.grad = None
