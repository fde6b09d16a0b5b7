"""How quick one core of this machine is, measured for some seconds: products, memory, convolutions, attention.

Convolutions on a CPU differ twentyfold by their channels and the size of their grid, and attention by the width of a
head, so that each one that a network has is tried by itself; the largest on a part of their grid or tokens.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.launch.hardware.devices import DTYPES, Device, cpu
from seqpar.launch.hardware.operations import ATTENTION, CONVOLUTION, MATMUL, OTHER, Operation, operations_of

ENOUGH = 8e9  # operations of what is tried


def this_cpu(precision: str) -> Device:
    """Returns one core's speed here, with all cores and the memory of this machine."""
    dtype = DTYPES[precision]
    state = torch.get_rng_state()
    x, weight = torch.randn(512, 768, dtype=dtype), torch.randn(3072, 768, dtype=dtype)
    qkv = torch.randn(3, 1, 2, 1536, 64, dtype=dtype, requires_grad=True)
    volume, kernel = torch.randn(1, 32, 24, 24, 24, dtype=dtype), torch.randn(32, 32, 3, 3, 3, dtype=dtype)
    wide, there = torch.randn(2, 1 << 23, dtype=dtype)
    torch.set_rng_state(state)
    fresh = _rate(3.0 * wide.nbytes, lambda: wide + wide)  # into memory met for the first time
    known = _rate(3.0 * wide.nbytes, lambda: torch.add(wide, wide, out=there))
    rates = {
        MATMUL: _rate(2.0 * 512 * 768 * 3072, lambda: F.linear(x, weight)),
        ATTENTION: _rate(14.0 * 2 * 1536**2 * 64, lambda: F.scaled_dot_product_attention(*qkv).sum().backward()),
        CONVOLUTION: _rate(2.0 * 32 * 32 * 27 * 24**3, lambda: F.conv3d(volume, kernel, padding=1)),
        OTHER: math.sqrt(fresh * known),  # a step has some of both
    }
    return replace(cpu(rates, "measured here"), measured_rate=_MeasuredRates().rate)


def _rate(amount: float, run: Callable[[], Any], within_s: float = 0.25) -> float:
    """Returns the amount a second of this process's own time on one thread, the best of some runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run()
        best, end = math.inf, time.perf_counter() + within_s
        while best == math.inf or time.perf_counter() < end:
            began = time.process_time()
            run()
            best = min(best, time.process_time() - began)
    finally:
        torch.set_num_threads(threads)
    return amount / best


class _MeasuredRates:
    """Rates of convolutions and attention, forward and backward, each tried once."""

    def __init__(self) -> None:
        self._known: dict[Any, float] = {}

    def rate(self, done: Operation) -> float:
        """Returns operations a second."""
        given = [t.shape if isinstance(t, Tensor) else str(t) for t in done.args]
        key = (done.func, *given)
        if key not in self._known:
            small = _smaller_attention(done) if done.kind == ATTENTION else _smaller_convolution(done)
            args = [torch.randn(t.shape, dtype=t.dtype) if isinstance(t, Tensor) else t for t in small]
            bare = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
            amount = operations_of(done.func, bare, done.kwargs, done.func(*bare, **done.kwargs))[1]
            self._known[key] = _rate(amount, lambda: done.func(*args, **done.kwargs), within_s=0.03)
        return self._known[key]


def _smaller_convolution(done: Operation) -> list[Any]:
    """Returns the arguments with a grid on which it is quick."""
    place = 1 if "backward" in str(done.func) else 0  # of the input
    given, count = list(done.args), done.count
    sides = list(given[place].shape[2:])
    while count > ENOUGH and max(sides) > 8:
        widest = sides.index(max(sides))
        count *= (sides[widest] // 2) / sides[widest]
        sides[widest] //= 2
    batch = min(2, given[place].shape[0])  # torch convolves a single one in another way
    given[place] = given[place].new_empty((batch, given[place].shape[1], *sides))
    if place:  # the gradient has the output's shape
        given[0] = torch.ops.aten.convolution(given[1], given[2], None, *given[4:10])
    return given


def _smaller_attention(done: Operation) -> list[Any]:
    """Returns the arguments with as few queries and keys as are quick."""
    part = min(1.0, math.sqrt(ENOUGH / max(done.count, 1.0)))

    def fewer(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.new_empty((*value.shape[:2], max(1, int(value.shape[2] * part)), *value.shape[3:]))

    return [fewer(value) for value in done.args]
