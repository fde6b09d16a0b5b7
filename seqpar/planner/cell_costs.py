"""What each cell of a network costs: seconds, bytes of its output and bytes held for backward, measured or counted."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpar.pipeline.cells import IMAGE, Value, cells_needed
from seqpar.pipeline.engine import StagedNet
from seqpar.pipeline.placement import CellCost
from seqpar.pipeline.stage_weights import cells_of_names
from seqpar.planner.memory_counter import Saved

Around = Callable[[], AbstractContextManager[Any]]
Run = Callable[[Sequence[Value]], Value]


@dataclass
class OptimizerBytes:
    """What an optimizer needs, in bytes per byte of weight.

    - ``states``: its states and the gradient
    - ``update``: what else is alive while it updates weights, all ``at_once`` or one by one
    """

    states: float
    update: float = 0.0
    at_once: bool = False


@dataclass
class CodeCost:
    """What a piece of code took: seconds, and the peak of the bytes that it allocated."""

    seconds: float = 0.0
    most: int = 0


Meter = Callable[[], AbstractContextManager[CodeCost]]


@contextmanager
def measure_thread_seconds() -> Iterator[CodeCost]:
    """Times the code in this context: on a CPU only this thread's own work, unaffected by other processes."""
    reading = CodeCost()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = _now()
    yield reading
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    reading.seconds = _now() - began


def _now() -> float:
    return time.perf_counter() if torch.cuda.is_available() or torch.get_num_threads() > 1 else time.thread_time()


def measure_cells(
    net: nn.Module,
    staged: StagedNet,
    micro: Any,
    around: Around,
    optimizer: OptimizerBytes,
    repeats: int = 3,
    loss: Callable[[Sequence[Value]], Tensor] | None = None,
    meter: Meter = measure_thread_seconds,
) -> list[CellCost]:
    """Returns each cell's cost on this rank's part of a micro-batch; seconds are the minimum of ``repeats`` runs.

    All ranks of a sequence group call this together. Only one cell's graph is held at a time. Cells on which no output
    depends cost nothing; running statistics are restored. What several cells hold counts once, at the cell that
    computes it.

    - ``around``: the context of every forward, such as autocast
    - ``optimizer``: what it needs besides weights
    - ``loss``: of the network's outputs; its cost is added to the last cell's; None: it costs nothing
    - ``meter``: measures seconds and bytes
    """
    parameters = _parameters_of_cells(net, staged)
    needed = cells_needed(staged.takes, staged.outputs)
    last_use = {value: cell for cell in needed for value in staged.takes[cell]}
    buffers = staged.buffers_of(needed)
    before = [buffer.clone() for buffer in buffers]
    values: dict[int, Value] = {IMAGE: staged.image(micro)}
    costs, needed_values = [CellCost(0.0, 0.0) for _ in staged.takes], set[int]()  # values that backward needs
    for number in needed:
        taken, own = staged.takes[number], parameters[number]

        def run(inputs: Sequence[Value], number: int = number) -> Value:
            with around():
                return staged.run_cell(number, inputs, micro)

        turns = [_turn(net, run, taken, values, own, meter) for _ in range(repeats)]
        values[number] = turns[-1].output
        needed_values |= turns[-1].held_inputs | ({number} if turns[-1].holds_output else set())
        sizes = [p.nbytes for p in own]
        state = round((1 + optimizer.states) * sum(sizes))
        update = round(optimizer.update * (sum(sizes) if optimizer.at_once else max(sizes, default=0)))
        costs[number] = replace(_least(turns), output=values[number][0].nbytes, state=state, update=update)
        for value in set(taken) - set(staged.outputs):
            if last_use[value] == number:
                del values[value]
    if loss is not None:
        ends = [_turn(net, lambda of: (loss(of), None), staged.outputs, values, (), meter) for _ in range(repeats)]
        needed_values |= ends[-1].held_inputs
        costs[-1] = _together(costs[-1], _least(ends))
    with torch.no_grad():
        for buffer, saved in zip(buffers, before):
            buffer.copy_(saved)
    return [replace(c, held=c.held + c.output * (number in needed_values)) for number, c in enumerate(costs)]


def _parameters_of_cells(net: nn.Module, staged: StagedNet) -> list[list[nn.Parameter]]:
    cells = cells_of_names([name for name, _ in net.named_parameters()], staged.owns)
    parameters: list[list[nn.Parameter]] = [[] for _ in staged.takes]
    for name, p in net.named_parameters():
        parameters[cells[name]].append(p)
    return parameters


class _Turn(NamedTuple):
    """One run of a cell: costs, its output, and what it holds for backward.

    - ``held``: bytes other than its inputs and its output
    - ``held_inputs``: the inputs that it holds
    """

    forward: CodeCost
    backward: CodeCost
    output: Value
    held: int
    held_inputs: frozenset[int]
    holds_output: bool


def _turn(
    net: nn.Module,
    run: Run,
    taken: Sequence[int],
    values: Mapping[int, Value],
    parameters: Sequence[nn.Parameter],
    meter: Meter,
) -> _Turn:
    """Runs a cell forward and backward."""
    inputs = [(values[v][0].detach().requires_grad_(v != IMAGE), values[v][1]) for v in taken]
    with Saved(net) as saved, meter() as forward:
        y, grid = run(inputs)
    wanted = [x for x, _ in inputs if x.requires_grad] + [p for p in parameters if p.requires_grad]
    slope = torch.ones_like(y)
    with meter() as backward:
        if wanted and y.requires_grad:
            torch.autograd.grad(y, wanted, slope, allow_unused=True)
    held_inputs = {v: x for v, (x, _) in zip(taken, inputs) if v != IMAGE and saved.bytes_of(x)}
    others = saved.total - saved.bytes_of(*held_inputs.values(), y)
    output = y.detach(), grid
    return _Turn(forward, backward, output, others, frozenset(held_inputs), bool(saved.bytes_of(y)))


def _least(turns: Sequence[_Turn]) -> CellCost:
    """Returns the minimum seconds of all runs, and the bytes of the last one."""
    last = turns[-1]
    moment = max(last.forward.most - last.held, last.backward.most + last.output[0].nbytes * bool(last.backward.most))
    return CellCost(
        min(turn.forward.seconds for turn in turns),
        min(turn.backward.seconds for turn in turns),
        held=last.held,
        moment=max(0, moment),
    )


def _together(cell: CellCost, loss: CellCost) -> CellCost:
    """Returns the cost of a cell and the loss that follows it."""
    return replace(
        cell,
        forward=cell.forward + loss.forward,
        backward=cell.backward + loss.backward,
        held=cell.held + loss.held,
        moment=max(cell.moment, loss.moment),
    )
