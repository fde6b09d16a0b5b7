"""Counts the bytes that a forward pass saves for backward."""

from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from torch import Tensor, nn


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
