"""Counts the bytes that a forward pass saves for backward."""

from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from torch import Tensor, nn


class Saved:
    """Counts the bytes that code in this context saves for backward, in distinct storages.

    Parameters of ``net`` do not count. They are looked up for each tensor, because sharded ones are gathered only
    while their block runs.

    - ``apart``: further tensors that do not count
    """

    def __init__(self, net: nn.Module, apart: Iterable[Tensor] = ()) -> None:
        self._net = net
        self._apart = {_storage_id(t) for t in apart}
        self._sizes: dict[int, int] = {}  # storage -> bytes
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    @property
    def total(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, t: Tensor) -> Tensor:
        storage = _storage_id(t)
        if storage not in self._apart | {_storage_id(p) for p in self._net.parameters() if not hasattr(p, "to_local")}:
            self._sizes[storage] = t.untyped_storage().nbytes()
        return t

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
