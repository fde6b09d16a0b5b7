"""What the stages of a pipeline send each other in a step: values forward, their gradients back.

The first time that a value or its gradient crosses, a description of it is sent first, so that nothing is assumed about
sizes, precision, strides or box grids. All micro-batches of a step have the same form.
"""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from seqpar.parallel.mesh import Group
from seqpar.parallel.messages import Pending, post
from seqpar.pipeline.cells import Value
from seqpar.pipeline.schedule import Message
from seqpar.pipeline.stages import StageMap
from seqpar.spatial.box_grid import BoxGrid

DESCRIPTION_BYTES = 4096
Edges = tuple[tuple[int, ...], ...]


class Form(NamedTuple):
    """The form of a value, or of its gradient, in every micro-batch."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    edges: Edges | None  # of its box grid

    @classmethod
    def of(cls, x: Tensor, grid: BoxGrid | None) -> "Form":
        """Returns the form in which a tensor is sent: with its own strides if they leave no gaps."""
        dense = x if _is_dense(x) else x.contiguous()
        return cls(tuple(x.shape), dense.stride(), x.dtype, None if grid is None else grid.edges)

    def encode(self) -> Tensor:
        """Encodes the form as a fixed number of bytes."""
        text = json.dumps([self.shape, self.strides, str(self.dtype).removeprefix("torch."), self.edges]).encode()
        assert len(text) <= DESCRIPTION_BYTES, text
        page = torch.zeros(DESCRIPTION_BYTES, dtype=torch.uint8)
        page[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        return page

    @classmethod
    def decode(cls, page: Tensor) -> "Form":
        """Decodes a form."""
        shape, strides, dtype, edges = json.loads(bytes(page.tolist()).rstrip(b"\0"))
        return cls(tuple(shape), tuple(strides), getattr(torch, dtype), edges and tuple(map(tuple, edges)))

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def line(self, x: Tensor) -> Tensor:
        """Returns a tensor's elements as a vector, in the memory order of this form."""
        if x.stride() != self.strides:
            x = self.empty(x.device).copy_(x)
        return x.as_strided((x.numel(),), (1,))


def _is_dense(x: Tensor) -> bool:
    """Returns whether a tensor's elements are contiguous in memory, in any order of dimensions."""
    expected = 1
    for stride, side in sorted((stride, side) for stride, side in zip(x.stride(), x.shape) if side > 1):
        if stride != expected:
            return False
        expected *= side
    return True


class Transfers:
    """The messages of one rank of a pipeline, step after step.

    - ``pipe``: the group of places
    - ``seq``: the group over which values may be split into boxes
    - ``device``: the device of received tensors
    """

    def __init__(self, stages: StageMap, pipe: Group, seq: Group, device: torch.device) -> None:
        self.stages, self.pipe, self.seq, self.device = stages, pipe, seq, device
        self._forms: dict[Any, Form] = {}  # by sizes and message
        self._sizes: Any = None
        self._outgoing: dict[Message, tuple[Tensor, BoxGrid | None]] = {}
        self._incoming: dict[Message, tuple[Tensor, Pending]] = {}
        self._going: dict[Message, Pending] = {}

    def begin(self, sizes: Any) -> None:
        """Starts a step; if ``sizes`` are new, which must be so on all ranks, forms are sent again."""
        assert not self._outgoing and not self._incoming and not self._going, "the last step has not ended"
        self._sizes = sizes

    def end(self) -> None:
        """Waits until everything that this rank sent has arrived."""
        for pending in self._going.values():
            pending.wait()
        self._going.clear()

    def abandon(self) -> None:
        """Drops all messages in transit, after an error."""
        self._outgoing.clear()
        self._incoming.clear()
        self._going.clear()

    def put(self, message: Message, x: Tensor, grid: BoxGrid | None = None) -> None:
        """Provides what the message will send, or what another stage of this rank will take."""
        self._outgoing[message] = x, grid

    def take(self, message: Message) -> Value:
        """Returns what a message delivered."""
        if message in self._outgoing:
            return self._outgoing.pop(message)
        x, pending = self._incoming.pop(message)
        pending.wait()
        edges = self._forms[self._key(message)].edges
        return x, None if edges is None else BoxGrid(edges, self.seq)

    def run(self, message: Message) -> None:
        """Sends a value, or starts to receive one, when it is the message's turn in the timetable."""
        source, target = (self.stages.places[stage] for stage in (message.source, message.target))
        sender, receiver = (source, target) if message.is_forward else (target, source)
        kind = "activations" if message.is_forward else "activation gradients"
        if self.pipe.index == sender:
            form = self._describe(message, receiver)
            x, _ = self._outgoing.pop(message)
            self._going[message] = post({receiver: form.line(x)}, {}, self.pipe, kind)
        else:
            x = self._hear(message, sender).empty(self.device)
            line = x.as_strided((x.numel(),), (1,))
            self._incoming[message] = x, post({}, {sender: line}, self.pipe, kind)

    def let_go(self, message: Message) -> None:
        """Waits until a sent value has arrived, and releases it."""
        if message in self._going:
            self._going.pop(message).wait()

    def _key(self, message: Message) -> Any:
        return self._sizes, message._replace(micro=0)

    def _describe(self, message: Message, receiver: int) -> Form:
        key = self._key(message)
        x, grid = self._outgoing[message]
        if key not in self._forms:
            self._forms[key] = Form.of(x, grid)
            post({receiver: self._forms[key].encode().to(self.device)}, {}, self.pipe, "descriptions").wait()
        form = self._forms[key]
        assert (tuple(x.shape), x.dtype) == (form.shape, form.dtype), (
            "the micro-batches of a step must have the same form"
        )
        return form

    def _hear(self, message: Message, sender: int) -> Form:
        key = self._key(message)
        if key not in self._forms:
            page = torch.zeros(DESCRIPTION_BYTES, dtype=torch.uint8, device=self.device)
            post({}, {sender: page}, self.pipe, "descriptions").wait()
            self._forms[key] = Form.decode(page.cpu())
        return self._forms[key]
