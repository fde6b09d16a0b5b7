"""Convolutions that go on while their halos travel give what those give that wait, by the same messages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.parallel import halo_exchange, row_exchange
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.messages import AwaitedTensor, Pending
from seqpar.parallel.watchdog import Watch
from seqpar.spatial import convolution, overlap
from seqpar.spatial.box_grid import BoxGrid
from tests.spatial.test_operations import conv, transposed
from tests.support.boxes import Case, box, draw_cases, numbers
from tests.support.ranks import relative

CASES = {2: 60, 3: 40, 4: 40}


def results(case: Case, group: Group) -> list[Tensor]:
    """Returns output and gradients of a case on this rank, and how many messages and bytes it sent."""
    grid = BoxGrid(case.edges, group)
    part = case.whole[box(grid)].clone(memory_format=case.order).requires_grad_()
    group.messages.clear(), group.traffic.clear()
    y, _ = case.module(part, grid)
    gradients = torch.autograd.grad(y, [part, *case.module.parameters()], numbers(3, *y.shape))
    return [y.detach(), *gradients, torch.tensor([group.messages["window"], group.traffic["window"]])]


def compare(mesh: Mesh, cases: list[Case]) -> tuple[float, int, list[int]]:
    """Returns how far results are apart, how many cases send anything, and the slabs of each that went on."""
    worst, sending, went_on = 0.0, 0, list[int]()
    original = overlap.halo_dependent_slabs

    def noted(*of: Any) -> list[overlap.HaloSlab]:
        went_on.append(len(original(*of)))
        return original(*of)

    overlap.halo_dependent_slabs = noted
    for case in cases:
        before = len(went_on)
        convolution.overlap_pays_off = lambda kind, bytes_to_come: False
        waits = results(case, mesh.seq)
        assert len(went_on) == before
        convolution.overlap_pays_off = lambda kind, bytes_to_come: True
        goes_on = results(case, mesh.seq)
        assert torch.equal(waits.pop(), sent := goes_on.pop()), (case.module, case.edges)
        sending += bool(sent[0])
        worst = max([worst, *(relative(a, b) for a, b in zip(goes_on, waits))])
    return worst, sending, went_on


@pytest.mark.parametrize("world", CASES)
def test_what_goes_on_gives_the_same_numbers_by_the_same_messages(world: int, ranks: Callable[..., list]) -> None:
    """Any stride, dilation and kernel, uneven boxes; the transposed ones go on in backward alone."""
    cases = [*draw_cases(conv, world, CASES[world]), *draw_cases(transposed, world, CASES[world] // 4)]
    for worst, sending, went_on in ranks(world, compare, cases):
        assert worst < 1e-12
        assert sending > len(cases) / 3 and sum(map(bool, went_on)) > len(cases) / 6, (sending, went_on)


class Convolutions(TorchDispatchMode):
    """Notes convolutions forward and backward, by what they are asked for, into a list."""

    def __init__(self, into: list[str]) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if name == "convolution":
            self.into.append("convolve")
        elif name == "convolution_backward":
            self.into.append("".join(what for what, asked in zip(("input", "weight", "bias"), args[-1]) if asked))
        return func(*args, **kwargs or {})


def acts_of(keep_window: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what a rank in a corner of 2 x 2 boxes does in turn: exchanges that start and end, convolutions."""
    acts = list[str]()
    start, wait = row_exchange.post, row_exchange.AwaitedTensor.wait
    with monkeypatch.context() as patch:
        for module_of_post in (row_exchange, halo_exchange):
            patch.setattr(module_of_post, "post", lambda *of: acts.append("post") or start(*of))  # type: ignore[func-returns-value]
        patch.setattr(row_exchange.AwaitedTensor, "wait", lambda of: acts.append("wait") or wait(of))  # type: ignore[func-returns-value]
        patch.setattr(overlap, "ENOUGH", 1)
        patch.setattr(convolution, "device_type", lambda x: kind)
        grid = BoxGrid(((0, 8, 16), (0, 8, 16), (0, 8)), Group("seq", tuple(range(4)), 3))
        module = convolution.Conv3d(2, 2, 3, padding=1, bias=False, keep_window=keep_window).to("meta")
        x = torch.empty(1, 2, 8, 8, 8, device="meta", requires_grad=True)
        with Convolutions(acts):
            y, _ = module(x, grid)
            acts.append("|")
            y.sum().backward()
    return acts


TURN = ["post", "wait"]


def test_what_needs_no_halos_is_computed_behind_the_first_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slabs beside two borders come after all of them; in backward, that of the weights goes beside."""
    assert acts_of(True, "cuda", monkeypatch) == [
        *("post", "convolve", "wait", *TURN, "convolve", "convolve", "|"),
        *("input", "post", "weight", "wait", *TURN),
    ]
    assert acts_of(False, "cuda", monkeypatch) == [
        *("post", "convolve", "wait", *TURN, "convolve", "convolve", "|"),
        *("post", "input", "wait", *TURN, "post", "weight", "wait", *TURN),
    ]
    assert acts_of(True, "cpu", monkeypatch) == [*TURN, *TURN, "convolve", "|", "inputweight", *TURN, *TURN]


def test_on_a_gpu_messages_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank waits for there counts as waiting only where its own work is done."""
    acts, watch = list[str](), Watch()

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        acts.append(f"on {stream.name}")
        yield
        acts.append("back")

    def streams(name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: acts.append(f"{name} after {other.name}"))

    def exchange() -> AwaitedTensor[None]:
        with watch.waiting(True):
            acts.append("exchange")
        return AwaitedTensor(Pending((), ()), lambda: None)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams("here"))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(row_exchange, "_stream_beside", lambda device: streams("beside"))
    monkeypatch.setattr("seqpar.parallel.wait_clock._record", lambda: acts.append("event"))
    watch.clock.measure()
    like = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    row_exchange.run_on_stream_in_order([exchange, exchange], like, watch, lambda: acts.append("work"))  # type: ignore[arg-type]
    assert acts == [
        *("beside after here", "on beside", "exchange", "exchange", "back", "work"),
        *("event", "here after beside", "event"),
    ]


def test_large_halos_of_gpus_are_gone_on_beside() -> None:
    sizes = ("cuda", overlap.ENOUGH), ("cuda", overlap.ENOUGH - 1), ("cpu", overlap.ENOUGH)
    assert [overlap.overlap_pays_off(*of) for of in sizes] == [True, False, False]


def test_slabs_hold_each_output_that_reads_halos_once() -> None:
    known, outputs, spans, strides = {2: (1, 9), 4: (0, 6)}, (4, 5, 7), (3, 3, 2), (2, 1, 1)
    times = torch.zeros(outputs, dtype=torch.int)
    for slab in overlap.halo_dependent_slabs(known, outputs, spans, strides):
        times[slab.outputs[2:]] += 1
        assert slab.inputs[3] == slice(None)
    first, last = (torch.arange(n) * s for n, s in ((4, 2), (7, 1)))
    reads_none = ((first >= 1) & (first + 3 <= 9))[:, None, None] & (last + 2 <= 6)[None, None]
    assert torch.equal(times == 0, reads_none.expand(outputs)) and times.max() == 1 and (times == 0).any()
