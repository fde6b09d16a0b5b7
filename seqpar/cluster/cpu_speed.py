"""Measures one core of this machine for some seconds: matrix products, memory, convolutions, attention.

The rate of a convolution on a CPU varies twentyfold with its channels and grid, that of attention with the width of a
head. So each one that a network has is measured by itself; large ones on a part of their grid or tokens.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqpar.cluster.devices import (
    ATTENTION,
    CONVOLUTION,
    DTYPES,
    MATMUL,
    OTHER,
    Device,
    Operation,
    cpu,
    operations_of,
    usable_cores,
)

ENOUGH = 8e9  # operations of one measurement
WIDE = 1 << 23  # numbers of a sum
Run = Callable[[], Any]


def measure_cpu(precision: str, busy: int = 0) -> Device:
    """Returns this machine, by the measured speed of one core while ``busy`` of them work; 0: all that are there."""
    dtype, busy = DTYPES[precision], busy or usable_cores()
    into_fresh = _rate(3.0 * WIDE * dtype.itemsize, lambda: _sum(dtype, fresh=True), busy)
    into_known = _rate(3.0 * WIDE * dtype.itemsize, lambda: _sum(dtype, fresh=False), busy)
    rates = {
        MATMUL: _rate(2.0 * 512 * 768 * 3072, lambda: _product(dtype), busy),
        ATTENTION: _rate(14.0 * 2 * 1536**2 * 64, lambda: _attention(dtype), busy),
        CONVOLUTION: _rate(2.0 * 32 * 32 * 27 * 24**3, lambda: _convolution(dtype), busy),
        OTHER: math.sqrt(into_fresh * into_known),  # a step has both
    }
    return replace(cpu(rates, "measured here"), measured_rate=_MeasuredRates(busy).rate)


def _sum(dtype: torch.dtype, fresh: bool) -> Run:
    wide, there = torch.randn(2, WIDE, dtype=dtype)
    return (lambda: wide + wide) if fresh else (lambda: torch.add(wide, wide, out=there))


def _product(dtype: torch.dtype) -> Run:
    x, weight = torch.randn(512, 768, dtype=dtype), torch.randn(3072, 768, dtype=dtype)
    return lambda: F.linear(x, weight)


def _attention(dtype: torch.dtype) -> Run:
    qkv = torch.randn(3, 1, 2, 1536, 64, dtype=dtype, requires_grad=True)
    return lambda: F.scaled_dot_product_attention(*qkv).sum().backward()


def _convolution(dtype: torch.dtype) -> Run:
    volume, kernel = torch.randn(1, 32, 24, 24, 24, dtype=dtype), torch.randn(32, 32, 3, 3, 3, dtype=dtype)
    return lambda: F.conv3d(volume, kernel, padding=1)


def _rate(amount: float, make: Callable[[], Run], busy: int, within_s: float = 0.25) -> float:
    """Returns ``amount`` divided by the processor seconds of what ``make`` returns, the fastest of some runs.

    It runs in one thread, while ``busy - 1`` others do the same with numbers of their own: cores share memory.
    """
    threads, state, ended = torch.get_num_threads(), torch.get_rng_state(), threading.Event()
    torch.set_num_threads(1)
    beside = [threading.Thread(target=_repeat, args=(make(), ended), daemon=True) for _ in range(busy - 1)]
    try:
        run = make()
        for thread in beside:
            thread.start()
        run()
        best, end = math.inf, time.perf_counter() + within_s
        while best == math.inf or time.perf_counter() < end:
            began = time.thread_time()
            run()
            best = min(best, time.thread_time() - began)
    finally:
        ended.set()
        for thread in beside:
            thread.join()
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
    return amount / best


def _repeat(run: Run, ended: threading.Event) -> None:
    while not ended.is_set():
        run()


class _MeasuredRates:
    """Rates of convolutions and attention, forward and backward, each measured once, while ``busy`` cores work."""

    def __init__(self, busy: int) -> None:
        self._busy, self._known = busy, dict[Any, float]()

    def rate(self, operation: Operation) -> float:
        """Returns operations a second of such a call."""
        shapes = [t.shape if isinstance(t, Tensor) else str(t) for t in operation.args]
        key = (operation.func, *shapes)
        if key not in self._known:
            small = _smaller_attention(operation) if operation.kind == ATTENTION else _smaller_convolution(operation)
            bare = [t.to("meta") if isinstance(t, Tensor) else t for t in small]
            amount = operations_of(operation.func, bare, operation.kwargs, operation.func(*bare, **operation.kwargs))[1]
            self._known[key] = _rate(amount, lambda: _call(operation, small), self._busy, within_s=0.03)
        return self._known[key]


def _call(operation: Operation, args: Sequence[Any]) -> Run:
    numbers = [torch.randn(t.shape, dtype=t.dtype) if isinstance(t, Tensor) else t for t in args]
    return lambda: operation.func(*numbers, **operation.kwargs)


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
