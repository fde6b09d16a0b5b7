"""The engine of a pipe: one rank's events of the timetable, act by act and message by message.

A pipe's step is an accumulated step: each micro-batch adds the gradients of its loss, in order, as in one process. What
a stage takes goes directly to it from the stage that has it, whatever lies between.
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
LossOf = Callable[[Sequence[Value], int], Tensor]  # of the network's outputs and the number of the micro-batch


class StagedNet(Protocol):
    """What a pipe asks of a network. ``micro`` is what a rank has of a micro-batch, such as its part of the image.

    - ``takes``, ``outputs``: as in ``StageMap``
    - ``owns``: of each cell the names, or their beginnings, of its weights and buffers
    """

    @property
    def takes(self) -> Takes: ...

    @property
    def outputs(self) -> tuple[int, ...]: ...

    @property
    def owns(self) -> Prefixes: ...

    def image(self, micro: Any) -> Value:
        """Returns what cells that take the image get."""

    def run_cell(self, number: int, inputs: Sequence[Value], micro: Any) -> Value:
        """Returns the output of a cell; ``inputs`` in the order of ``takes[number]``."""

    def buffers_of(self, numbers: Sequence[int]) -> Sequence[Tensor]:
        """Returns the running statistics of cells."""


class _Held(NamedTuple):
    """What a stage holds of a micro-batch between forward and backward."""

    leaves: dict[int, Value]  # what it took, by value
    roots: dict[int, Tensor]  # what others take of it; the loss under ``IMAGE``


class Engine:
    """Runs this rank's stages.

    - ``events``: this rank's list of the timetable, which all ranks computed from the same costs
    - ``pipe``: the places; ``seq``: over which values may be cut into boxes
    - ``recompute``: hold only what a stage took, and run it again in backward; running statistics move once
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
        """Adds the gradients of all micro-batches' losses to the weights.

        - ``micros``: as many as the timetable has
        - ``loss``: called on the rank of the last stage; what the step's loss is the sum of
        - ``sizes``: of the micro-batches, the same on all ranks; new ones are told to the ranks that receive them
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
        """Returns the values that others take of a stage, and those that the loss takes."""
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
        """Returns what ``_run`` did, with gradients; running statistics stay as they are."""
        buffers = self.net.buffers_of(self.stages.runs(stage))
        before = [buffer.clone() for buffer in buffers]
        with torch.enable_grad():
            values = self._run(stage, micro, leaves)
        for buffer, value in zip(buffers, before):
            buffer.data.copy_(value)  # not noted by autograd: torch's batch norm saves them, and does not read them
        return values


def _catch_gradients(leaves: Mapping[int, Value]) -> dict[int, Tensor]:
    """Returns what a backward that follows fills with the gradients of ``leaves``, by value.

    Their ``grad`` would have their strides, where one process goes on with the gradient as it came.
    """
    caught: dict[int, Tensor] = {}
    for value, (x, _) in leaves.items():
        x.register_hook(partial(caught.__setitem__, value))
        x.register_post_accumulate_grad_hook(_drop_gradient)
    return caught


def _drop_gradient(x: Tensor) -> None:
    x.grad = None
