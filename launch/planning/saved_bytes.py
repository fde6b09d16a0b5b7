"""Counts the bytes that a forward pass saves for backward."""

from collections.abc import Callable, Iterable
from types import TracebackType

import torch
from torch import Tensor, nn


class Saved:
    """Counts the bytes of distinct storages that code run inside saves for backward, without parameters and ``apart``.

    Parameters are looked up at each tensor: sharded ones are gathered for their block alone.
    """

    def __init__(self, net: nn.Module, apart: Iterable[Tensor] = ()) -> None:
        self._net = net
        self._apart = {_place(t) for t in apart}
        self._held: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    @property
    def total(self) -> int:
        return sum(self._held.values())

    def _pack(self, t: Tensor) -> Tensor:
        place = _place(t)
        if place not in self._apart | {_place(p) for p in self._net.parameters() if not hasattr(p, "to_local")}:
            self._held[place] = t.untyped_storage().nbytes()
        return t

    def __enter__(self) -> "Saved":
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]


def _place(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def saved_bytes(net: nn.Module, run: Callable[[], Tensor], apart: Iterable[Tensor] = ()) -> int:
    """Returns the bytes of distinct storages that ``run()`` saves for backward, without parameters and ``apart``."""
    with Saved(net, apart) as saved:
        output = run()
    assert output.requires_grad, "nothing is saved where nothing has a gradient"
    return saved.total
