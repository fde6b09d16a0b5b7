"""Counts bytes alive, bytes saved for backward and operations of a piece of code."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar.cluster.devices import Operation, operations_of
from seqpar.parallel.meta_tensors import autocast_in_recomputation, repetitions
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
            return 1.0  # an optimizer's scale: its value does not change what is counted
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
            self._watch(Operation(kind, count, size, func, args, kwargs, repetitions()))
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
            stack.enter_context(autocast_in_recomputation(_Cast(dtype, {F.layer_norm} if on_gpu else set())))
        yield


class Saved:
    """Counts the bytes that code in this context saves for backward, in distinct storages.

    Parameters of ``net`` do not count. Where they are sharded, they are looked up for each tensor, because they are
    gathered only while their block runs.

    - ``apart``: further tensors that do not count
    """

    def __init__(self, net: nn.Module, apart: Iterable[Tensor] = ()) -> None:
        self._net = net
        self._is_sharded = any(hasattr(p, "to_local") for p in net.parameters())
        self._apart = {_storage_id(t) for t in apart} | self._parameters()
        self._sizes: dict[int, int] = {}  # storage -> bytes
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    @property
    def total(self) -> int:
        return sum(self._sizes.values())

    def bytes_of(self, *tensors: Tensor) -> int:
        """Returns the bytes of those of these tensors' storages that are saved."""
        return sum(self._sizes.get(storage, 0) for storage in {_storage_id(t) for t in tensors})

    def _pack(self, t: Tensor) -> Tensor:
        storage = _storage_id(t)
        if storage not in self._apart and not (self._is_sharded and storage in self._parameters()):
            self._sizes[storage] = t.untyped_storage().nbytes()
        return t

    def _parameters(self) -> set[int]:
        return {_storage_id(p) for p in self._net.parameters() if not hasattr(p, "to_local")}

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


def _storage_id(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def saved_bytes(net: nn.Module, run: Callable[[], Tensor], apart: Iterable[Tensor] = ()) -> int:
    """Returns the bytes of distinct storages that ``run()`` saves for backward, without parameters and ``apart``."""
    with Saved(net, apart) as saved:
        output = run()
    assert output.requires_grad, "without gradients nothing is saved"
    return saved.total
