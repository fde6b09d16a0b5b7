"""What keeps a GPU's steps close together: the next tiles beside the step, rows a step late, few events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from seqpar.parallel import wait_clock
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.wait_clock import WaitClock
from seqpar.training.step_times import DelayedRows
from tests.support.cases import load, noise_source


def check_begun(mesh: Mesh) -> bool:
    plain = list(load(mesh, noise_source(), steps=range(3), accumulate=2, batch=2, workers=0))
    begun = []
    with load(mesh, noise_source(), steps=range(3), accumulate=2, batch=2, workers=1) as loader:
        while len(loader):
            begun.append(next(loader))
            left = len(loader)
            loader.begin_next()
            loader.begin_next()
            assert len(loader) == left
    same = [(a.step, a.samples, a.cases) == (b.step, b.samples, b.cases) for a, b in zip(begun, plain, strict=True)]
    return all(same) and all(torch.equal(a.image, b.image) for a, b in zip(begun, plain))


@pytest.mark.parametrize("world", [1, 2])
def test_tiles_that_are_begun_beside_a_step_are_the_next_ones(world: int, ranks: Callable[..., list]) -> None:
    assert all(ranks(world, check_begun))


def test_what_fails_beside_a_step_is_raised_by_the_next_one(alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(alone, noise_source(), steps=range(3), workers=0) as loader:
        next(loader)

        def fail() -> None:
            raise ValueError("the case is damaged")

        monkeypatch.setattr(loader, "_load", fail)
        loader.begin_next()
        with pytest.raises(ValueError, match="damaged"):
            next(loader)


def test_all_micro_batches_of_a_loader_come_on_its_one_stream(alone: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator keeps freed memory for the stream that asked for it: each new stream would take new memory."""
    made, used = list[object](), list[object]()

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device
            made.append(self)

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        used.append(stream)
        yield

    current = SimpleNamespace(wait_stream=lambda other: None)
    tensor = SimpleNamespace(record_stream=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    on_gpu = replace(alone, device=torch.device("cuda", 0))
    with load(on_gpu, noise_source(), steps=range(4), accumulate=2, workers=0) as loader:
        monkeypatch.setattr(loader, "_load", lambda: SimpleNamespace(image=tensor, label=tensor))
        for _ in range(8):
            loader.begin_next()
            next(loader)
    assert len(made) == 1 and used == made * 8


def test_rows_come_a_step_late_and_the_last_one_comes() -> None:
    seen = list[int]()

    def run(steps: int, error: Exception | None = None) -> None:
        with DelayedRows() as late:
            for step in range(steps):
                late.put(lambda step=step: seen.append(step))
                assert seen == list(range(step))
            if error is not None:
                raise error

    run(3)
    assert seen == [0, 1, 2]
    seen.clear()
    with pytest.raises(RuntimeError, match="a rank was lost"):
        run(2, RuntimeError("a rank was lost"))
    assert seen == [0, 1]
    with pytest.raises(RuntimeError, match="first"), DelayedRows() as late:
        late.put(lambda: 1 / 0)
        raise RuntimeError("first")


def test_a_gpu_records_one_event_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = list[str]()
    monkeypatch.setattr(wait_clock, "_record", lambda: recorded.append("event") or "event")
    clock, counts = WaitClock(), []
    for _ in range(3):
        clock.measure()
        recorded.clear()
        for _ in range(5):  # parameters
            clock.mark_ready(True)
        counts.append(len(recorded))
        clock.count_since_ready()
        assert clock._events == [("event", "event")]
    assert counts == [5, 1, 1]
