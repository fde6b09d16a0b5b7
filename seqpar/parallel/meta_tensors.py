"""Meta tensors (without data) that stand in for tensors on a device, so that a network's operations can be counted."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

Piece = TypeVar("Piece")
_stood_for = ContextVar("stood_for", default="cuda")
_times = ContextVar("times", default=1)
_casts = ContextVar[AbstractContextManager[Any] | None]("casts", default=None)


@contextmanager
def meta_as_device(device_type: str) -> Iterator[None]:
    """Lets meta tensors stand for tensors on a device of this type, such as cuda."""
    before = _stood_for.set(device_type)
    try:
        yield
    finally:
        _stood_for.reset(before)


def representative_pieces(pieces: Sequence[Piece], x: Tensor) -> Iterator[Piece]:
    """Yields the pieces into which ``x`` is split, all of one size except for the last, which may be smaller.

    For a meta tensor, the second piece stands for all between the first and the last; ``repetitions`` says for how
    many.
    """
    if not x.is_meta or len(pieces) < 4:
        yield from pieces
        return
    first, second, *between, last = pieces
    yield first
    before = _times.set(_times.get() * (1 + len(between)))
    try:
        yield second
    finally:
        _times.reset(before)
    yield last


def repetitions() -> int:
    """Returns how many times the current computation takes place: more than once for a piece that stands for others."""
    return _times.get()


@contextmanager
def autocast_in_recomputation(casts: AbstractContextManager[Any]) -> Iterator[None]:
    """Enters ``casts`` now, and again when backward recomputes what is computed here."""
    before = _casts.set(casts)
    try:
        with casts:
            yield
    finally:
        _casts.reset(before)


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts that torch's checkpoint enters in forward and in recomputation.

    Checkpoint restores autocast by itself, but no other mode, such as that of ``autocast_in_recomputation``.
    """
    return nullcontext(), _casts.get() or nullcontext()


def device_type(x: Tensor) -> str:
    """Returns the type of the device of ``x``, or of the device for which ``x`` stands."""
    return _stood_for.get() if x.is_meta else x.device.type


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the dtype to which autocast converts ``x``, or None if it does not, as for float64.

    Meta tensors, for which torch has no autocast, follow the CPU's.
    """
    if x.dtype == torch.float64:
        return None
    kind = _autocast_kind(x)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which autocast converts nothing on the device of ``x``."""
    return torch.autocast(_autocast_kind(x), enabled=False)


def _autocast_kind(x: Tensor) -> str:
    return "cpu" if x.is_meta else x.device.type
