"""Measures one core of this machine for some seconds: matrix products, memory, convolutions, attention.

The rate of a convolution on a CPU varies twentyfold with its channels and grid, that of attention with the width of a
head. So each one that a network has is measured by itself; large ones on a part of their grid or tokens.
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

ENOUGH = 8e9  # operations of one measurement


def this_cpu(precision: str) -> Device:
    """Returns this machine, by the measured speed of one core."""
    dtype = DTYPES[precision]
    state = torch.get_rng_state()
    x, weight = torch.randn(512, 768, dtype=dtype), torch.randn(3072, 768, dtype=dtype)
    qkv = torch.randn(3, 1, 2, 1536, 64, dtype=dtype, requires_grad=True)
    volume, kernel = torch.randn(1, 32, 24, 24, 24, dtype=dtype), torch.randn(32, 32, 3, 3, 3, dtype=dtype)
    wide, there = torch.randn(2, 1 << 23, dtype=dtype)
    torch.set_rng_state(state)
    into_fresh = _rate(3.0 * wide.nbytes, lambda: wide + wide)  # into memory that was just allocated
    into_known = _rate(3.0 * wide.nbytes, lambda: torch.add(wide, wide, out=there))
    rates = {
        MATMUL: _rate(2.0 * 512 * 768 * 3072, lambda: F.linear(x, weight)),
        ATTENTION: _rate(14.0 * 2 * 1536**2 * 64, lambda: F.scaled_dot_product_attention(*qkv).sum().backward()),
        CONVOLUTION: _rate(2.0 * 32 * 32 * 27 * 24**3, lambda: F.conv3d(volume, kernel, padding=1)),
        OTHER: math.sqrt(into_fresh * into_known),  # a step has both
    }
    return replace(cpu(rates, "measured here"), measured_rate=_MeasuredRates().rate)


def _rate(amount: float, run: Callable[[], Any], within_s: float = 0.25) -> float:
    """Returns ``amount`` divided by the processor seconds of ``run`` on one thread, the fastest of some runs."""
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
    """Rates of convolutions and attention, forward and backward, each measured once."""

    def __init__(self) -> None:
        self._known: dict[Any, float] = {}

    def rate(self, operation: Operation) -> float:
        """Returns operations a second of such a call."""
        shapes = [t.shape if isinstance(t, Tensor) else str(t) for t in operation.args]
        key = (operation.func, *shapes)
        if key not in self._known:
            small = _smaller_attention(operation) if operation.kind == ATTENTION else _smaller_convolution(operation)
            args = [torch.randn(t.shape, dtype=t.dtype) if isinstance(t, Tensor) else t for t in small]
            bare = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
            amount = operations_of(operation.func, bare, operation.kwargs, operation.func(*bare, **operation.kwargs))[1]
            self._known[key] = _rate(amount, lambda: operation.func(*args, **operation.kwargs), within_s=0.03)
        return self._known[key]


def _smaller_convolution(operation: Operation) -> list[Any]:
    """Returns the arguments of a convolution with a smaller grid, on which it is quick."""
    place = 1 if "backward" in str(operation.func) else 0  # of the input
    args, count = list(operation.args), operation.count
    sides = list(args[place].shape[2:])
    while count > ENOUGH and max(sides) > 8:
        widest = sides.index(max(sides))
        count *= (sides[widest] // 2) / sides[widest]
        sides[widest] //= 2
    batch = min(2, args[place].shape[0])  # torch convolves a single one in another way
    args[place] = args[place].new_empty((batch, args[place].shape[1], *sides))
    if place:  # the gradient has the output's shape
        args[0] = torch.ops.aten.convolution(args[1], args[2], None, *args[4:10])
    return args


def _smaller_attention(operation: Operation) -> list[Any]:
    """Returns the arguments of an attention with fewer queries and keys, so that it is quick."""
    part = min(1.0, math.sqrt(ENOUGH / max(operation.count, 1.0)))

    def fewer(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.new_empty((*value.shape[:2], max(1, int(value.shape[2] * part)), *value.shape[3:]))

    return [fewer(value) for value in operation.args]
