"""Counts bytes alive and operations of a piece of code, operator by operator; meta tensors will do.

``MemoryCounter`` sees every operator below autograd, in backward too. ``as_autocast`` gives meta tensors the precision
that autocast gives real ones.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.cluster.operations import Operation, operations_of
from seqpar.parallel.meta_tensors import casting_again, times
from seqpar.planner.meta_results import elementwise_result, known_result

Watch = Callable[[Operation], None]


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of storages made inside: those alive ``now``, and the ``most`` that were.

    ``peaks`` are the most in each ``phase``, whose name may be set at any time. ``watch`` is called with each operator
    that computes something.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        super().__init__()
        self.now, self.phase, self.peaks = 0, "", Counter[str]()
        self._watch = watch
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # torch asks; else the first operator would import its compiler
        return False

    @property
    def most(self) -> int:
        return max(self.peaks.values(), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0  # a number by which an optimizer scales: any does not change what is counted
        kwargs = kwargs or {}
        inputs = tensors_of((*args, *kwargs.values()))
        result = elementwise_result(func, args, kwargs, inputs)
        if result is None:
            result = known_result(func, args, kwargs, inputs)
        if result is None:
            result = func(*args, **kwargs)
        for tensor in inputs:
            self._note(tensor, 0)  # it was there before
        made = tensors_of((result,))
        new = sum(self._note(t, t.untyped_storage().nbytes()) for t in made)
        self.now += new
        self.peaks[self.phase] = max(self.peaks[self.phase], self.now)
        if self._watch is not None and (new or func._schema.is_mutable):
            kind, count = operations_of(func, args, kwargs, result)
            size = sum(t.numel() * t.element_size() for t in inputs + made)
            self._watch(Operation(kind, count, size, func, args, kwargs, times()))
        return result

    def _note(self, tensor: Tensor, size: int) -> int:
        """Returns ``size`` for a storage that was not known, else 0."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return 0

        def drop(_: Any) -> None:
            del self._known[key]
            self.now -= size

        self._known[key] = weakref.ref(storage, drop)
        return size


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors among an operator's arguments or results, in lists too: all that operators have."""
    tensors = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_of(value)
    return tensors


class _Cast(TorchFunctionMode):
    """Casts what autocast would cast, for the functions that this package's networks call."""

    _LOWER = {F.linear, F.conv3d, F.conv_transpose3d, torch.matmul, F.scaled_dot_product_attention}

    def __init__(self, dtype: torch.dtype, full: set[Any]) -> None:
        self._dtype, self._full = dtype, full

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._LOWER or func in self._full:
            dtype = self._dtype if func in self._LOWER else torch.float32
            args = [_cast(value, dtype) for value in args]
            kwargs = {name: _cast(value, dtype) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value


@contextmanager
def as_autocast(dtype: torch.dtype | None, on_gpu: bool) -> Iterator[None]:
    """Makes meta tensors follow autocast, as on a GPU, where layer norms are float32, or as on a CPU."""
    with ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(torch.autocast("cpu", dtype))  # for custom operations, which ask torch
            stack.enter_context(casting_again(_Cast(dtype, {F.layer_norm} if on_gpu else set())))
        yield
