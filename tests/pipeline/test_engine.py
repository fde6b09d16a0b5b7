"""The engine: any network of cells, at any places, in both orders, has the gradients of one process, bit for bit."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from seqpar.parallel.mesh import Group, Mesh
from seqpar.pipeline.cells import IMAGE, Value
from seqpar.pipeline.engine import Engine
from seqpar.pipeline.schedule import make_timetable
from seqpar.pipeline.stage_weights import keep_local_weights, places_of_names
from seqpar.pipeline.stages import StageMap
from seqpar.pipeline.transfers import Form, Transfers
from seqpar.spatial.box_grid import BoxGrid
from tests.support.pipes import random_stages
from tests.support.ranks import run_ranks

WIDTH = 3


class Cell(nn.Module):
    """A matrix, batch norm, and a factor that some cells have."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.matrix(x)).tanh()


class RandomNet(nn.Module):
    """Cells that add up what they take; ``micro`` is the image ``b c``."""

    def __init__(self, takes: tuple[tuple[int, ...], ...], outputs: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.takes, self.outputs = takes, outputs
        self.cells = nn.ModuleList(Cell() for _ in takes).double()
        self.owns = tuple((f"cells.{number}.",) for number in range(len(takes)))
        self.ran = list[int]()

    def image(self, micro: Tensor) -> Value:
        return micro, None

    def run_cell(self, number: int, inputs: Sequence[Value], micro: Tensor) -> Value:
        self.ran.append(number)
        total = inputs[0][0]
        for x, _ in inputs[1:]:
            total = total + x
        return self.cells[number](total), None

    def buffers_of(self, numbers: Sequence[int]) -> list[Tensor]:
        return [buffer for number in numbers for buffer in self.cells[number].buffers()]


@dataclass(frozen=True)
class Case:
    stages: StageMap
    micros: int
    schedule: str
    recompute: bool
    loss_s: float = 0.0


def images(micros: int, rows: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(2)
    return [torch.randn(rows, WIDTH, generator=dice, dtype=torch.float64) for _ in range(micros)]


def judge(values: Sequence[Value], micro: int) -> Tensor:
    first = values[0][0].square().mean()
    for x, _ in values[1:]:
        first = first + x.exp().mean()
    return first * (1 + micro)


def one_process(case: Case) -> dict[str, Tensor]:
    net = RandomNet(case.stages.takes, case.stages.outputs)
    needed = {cell for stage in range(case.stages.num_stages) for cell in case.stages.runs(stage)}
    for rows in (4, 5):
        for micro, image in enumerate(images(case.micros, rows)):
            values: dict[int, Value] = {IMAGE: net.image(image)}
            for number in sorted(needed):
                values[number] = net.run_cell(number, [values[v] for v in net.takes[number]], image)
            judge([values[v] for v in net.outputs], micro).backward()
    return state(net)


def state(net: RandomNet) -> dict[str, Tensor]:
    """Returns gradients and running statistics of what ran."""
    grads = {name: p.grad for name, p in net.named_parameters() if p is not None and p.grad is not None}
    return grads | {name: b.clone() for name, b in net.named_buffers() if b is not None}


def on_pipe(mesh: Mesh, case: Case) -> tuple[dict[str, Tensor], int, int]:
    """Returns this rank's gradients and statistics after two steps, of other sizes, and how many cells ran."""
    net, stages = RandomNet(case.stages.takes, case.stages.outputs), case.stages
    places = places_of_names(list(net.state_dict()), net.owns, stages.place_of_cells)
    keep_local_weights(net, places, mesh.pipe.index)
    events = make_timetable(stages, case.micros, case.schedule).events[mesh.pipe.index]
    engine = Engine(net, stages, events, mesh.pipe, mesh.seq, mesh.device, case.recompute)
    for rows in (4, 5):
        engine.step(images(case.micros, rows), judge, rows)
    messages = mesh.pipe.messages["activations"]
    mesh.pipe.messages.clear()
    return state(net), len(net.ran), messages


def run_all(mesh: Mesh, cases: list[Case]) -> list[tuple[dict[str, Tensor], int, int]]:
    return [on_pipe(mesh, case) for case in cases]


def random_cases(count: int, places: int) -> list[Case]:
    dice = random.Random(places)
    every = [random_stages(dice, dice.randint(places, 9), places) for _ in range(count)]
    return [Case(s, dice.randint(1, 4), dice.choice(("gpipe", "1f1b")), dice.random() < 0.5) for s in every]


@pytest.mark.parametrize(("places", "count"), [(2, 8), (3, 16)])
def test_random_networks_maps_and_orders_have_the_gradients_of_one_process(places: int, count: int) -> None:
    cases = random_cases(count, places)
    outcomes, identical = run_ranks(places, run_all, cases, pipe=places), 0
    for number, case in enumerate(cases):
        want, found = one_process(case), dict[str, Tensor]()
        for ours, _, _ in (rank[number] for rank in outcomes):
            assert not ours.keys() & found.keys()
            found |= ours
        assert found.keys() == want.keys()
        apart = [float((found[name].double() - want[name].double()).abs().max()) for name in want]
        assert max(apart) < 1e-12 * max(1.0, *(float(x.abs().max()) for x in want.values())), case
        identical += max(apart) == 0
        ran, sent = (sum(rank[number][at] for rank in outcomes) for at in (1, 2))
        forwards = 2 * case.micros * sum(len(case.stages.runs(s)) for s in range(case.stages.num_stages))
        assert ran == forwards * (1 + case.recompute)
        assert sent == 2 * case.micros * len(case.stages.messages)
    assert identical > count // 2  # all, where no value has more than two users


def hold(mesh: Mesh, recompute: bool) -> int:
    """Returns the most bytes that are held for backward at a time."""
    takes = tuple((cell - 1,) for cell in range(8))
    stages, net = StageMap.of_cuts(takes, (7,), (4,)), RandomNet(takes, (7,))
    keep_local_weights(net, places_of_names(list(net.state_dict()), net.owns, stages.place_of_cells), mesh.pipe.index)
    events = make_timetable(stages, 4, "gpipe").events[mesh.pipe.index]
    engine, most, now = Engine(net, stages, events, mesh.pipe, mesh.seq, mesh.device, recompute), [0], [0]

    class Counted:
        def __init__(self, x: Tensor) -> None:
            self.x = x
            now[0] += x.nbytes
            most[0] = max(most[0], now[0])

        def __del__(self) -> None:
            now[0] -= self.x.nbytes

    with torch.autograd.graph.saved_tensors_hooks(Counted, lambda counted: counted.x):
        engine.step(images(4, 64), judge)
    return most[0]


def test_recomputing_stages_holds_one_micro_batchs_cells_at_a_time(ranks: Callable[..., list]) -> None:
    plain, again = (ranks(2, hold, recompute, pipe=2) for recompute in (False, True))
    assert max(again) < 0.3 * max(plain)


def forms(mesh: Mesh) -> list[bool]:
    """Returns whether tensors of any strides, with their grids, arrive as they left."""
    takes, every = ((-1,), (0,)), list[bool]()
    stages = StageMap.of_cuts(takes, (1,), (1,))
    events = make_timetable(stages, 1).events[mesh.pipe.index]
    message = next(event for event in events if not hasattr(event, "stage"))
    volume = torch.arange(2.0 * 3 * 4 * 5 * 6).view(2, 3, 4, 5, 6)
    tensors = [
        volume,
        volume.contiguous(memory_format=torch.channels_last_3d),
        volume.transpose(1, 3),
        volume.bfloat16()[:, :1].contiguous(memory_format=torch.channels_last_3d),
        volume[..., ::2],
        torch.tensor(3.0, dtype=torch.float64),
    ]
    grids = [None, BoxGrid(((0, 4), (0, 5), (0, 6)), mesh.seq)]
    for number, x in enumerate(tensors):
        transfers, grid = Transfers(stages, mesh.pipe, mesh.seq, mesh.device), grids[number % 2]
        transfers.begin(())
        if mesh.pipe.index == 0:
            transfers.put(message, x, grid)
        transfers.run(message)
        if mesh.pipe.index == 1:
            y, after = transfers.take(message)
            dense = x if x.is_contiguous() or number in (1, 2, 3) else x.contiguous()
            alike = y.stride() == dense.stride() and y.dtype == x.dtype and torch.equal(y, x)
            every.append(alike and (after is None if grid is None else after.edges == grid.edges))
        transfers.end()
    return every


def test_tensors_arrive_with_their_strides_types_and_box_grids(ranks: Callable[..., list]) -> None:
    assert ranks(2, forms, pipe=2)[1] == [True] * 6


def test_a_form_is_read_as_it_was_written() -> None:
    form = Form.of(torch.zeros(2, 3, 4, dtype=torch.bfloat16).transpose(0, 1), BoxGrid(((0, 2), (0, 3)), Group("seq")))
    assert Form.decode(form.encode()) == form and form.strides == (4, 12, 1)


def test_micro_batches_that_differ_within_a_step_fail_at_their_sender(ranks: Callable[..., list]) -> None:
    with pytest.raises(AssertionError, match="micro-batches of a step must have the same form"):
        ranks(2, uneven, pipe=2)


def uneven(mesh: Mesh) -> None:
    takes = ((-1,), (0,))
    stages, net = StageMap.of_cuts(takes, (1,), (1,)), RandomNet(takes, (1,))
    engine = Engine(net, stages, make_timetable(stages, 2).events[mesh.pipe.index], mesh.pipe, mesh.seq, mesh.device)
    engine.step([*images(1, 4), *images(1, 5)], judge)


def groups(mesh: Mesh) -> dict[str, tuple[tuple[int, ...], int]]:
    merged = mesh.without_stages()
    named = {group.name: (group.ranks, group.index) for group in mesh.groups}
    return named | {"merged data": (merged.data.ranks, merged.data.index), "merged stage": (merged.stage.ranks, 0)}


def test_the_groups_are_data_x_pipe_x_seq_with_seq_innermost(ranks: Callable[..., list]) -> None:
    """Rank 5 of 2 x 2 x 2 is of the second data index, the first place and the second part."""
    fifth = ranks(8, groups, pipe=2, seqpar=2)[5]
    assert fifth == {
        "world": (tuple(range(8)), 5),
        "seq": ((4, 5), 1),
        "data": ((1, 5), 1),
        "pipe": ((5, 7), 0),
        "stage": ((0, 1, 4, 5), 3),
        "tile": ((4, 5, 6, 7), 1),
        "others": ((1, 3, 5, 7), 2),
        "merged data": ((1, 3, 5, 7), 2),
        "merged stage": (tuple(range(8)), 0),
    }


def test_a_pipe_that_does_not_fit_the_ranks_is_refused() -> None:
    from seqpar.parallel.rendezvous import check_seqpar

    check_seqpar(2, 8, 2)
    with pytest.raises(
        ValueError, match="pipe=2 with seqpar=2 does not fit 6 started ranks.*start a multiple of 4 ranks"
    ):
        check_seqpar(2, 6, 2)
    with pytest.raises(ValueError, match="pipe=0"):
        check_seqpar(1, 6, 0)
