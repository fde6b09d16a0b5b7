"""Rates of a core are measured while others work as they will, and leave nothing behind."""

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from seqpar.cluster import cpu_speed
from seqpar.cluster.cpu_speed import measure_cpu
from seqpar.cluster.devices import CONVOLUTION, Operation


@pytest.mark.parametrize("busy", [1, 3])
def test_as_many_cores_work_as_were_said_each_on_numbers_of_its_own(busy: int) -> None:
    runs: list[Counter[int]] = []
    meanwhile: list[int] = []
    before = threading.active_count()

    def make() -> Callable[[], None]:
        runs.append(Counter())
        own, all_began = runs[-1], threading.Event()

        def run() -> None:
            own[threading.get_ident()] += 1
            if threading.current_thread() is threading.main_thread():
                meanwhile.append(threading.active_count() - before)
                all_began.wait(0.001)  # so that the others come to run

        return run

    assert cpu_speed._rate(1.0, make, busy, 0.05) > 0
    assert len(runs) == busy and all(len(run) == 1 for run in runs), "none shares its numbers with another"
    assert len({next(iter(run)) for run in runs}) == busy
    assert set(meanwhile) == {busy - 1} and threading.active_count() == before


def test_what_fails_leaves_no_thread_and_the_number_of_threads_as_it_was() -> None:
    before, threads = threading.active_count(), torch.get_num_threads()

    def make() -> Callable[[], None]:
        return lambda: 1 / 0 if threading.current_thread() is threading.main_thread() else None  # type: ignore[return-value]

    with pytest.raises(ZeroDivisionError):
        cpu_speed._rate(1.0, make, 2)
    assert (threading.active_count(), torch.get_num_threads()) == (before, threads)


def test_convolutions_are_measured_at_their_own_size_and_random_numbers_stay() -> None:
    state = torch.get_rng_state()
    device = measure_cpu("fp32", busy=2)
    assert torch.equal(torch.get_rng_state(), state), "training's own numbers do not depend on what was measured"
    image, weight = torch.empty(1, 4, 6, 6, 6, device="meta"), torch.empty(4, 4, 3, 3, 3, device="meta")
    args = (image, weight, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    operation = Operation(CONVOLUTION, 2.0 * 4 * 4 * 27 * 216, 0, torch.ops.aten.convolution.default, args, {})
    assert device.measured_rate is not None
    rate = device.measured_rate(operation)
    assert rate > 0 and device.measured_rate(operation) == rate, "each once"
    assert torch.equal(torch.get_rng_state(), state)
