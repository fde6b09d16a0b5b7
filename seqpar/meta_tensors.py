"""Tensors without data ("meta") stand for ones on some device, so that what a network would do there can be counted."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_stood_for = ContextVar("stood_for", default="cuda")
_casts = ContextVar[AbstractContextManager[Any] | None]("casts", default=None)


@contextmanager
def standing_for(device_type: str) -> Iterator[None]:
    """Lets tensors without data stand for ones on such a device."""
    before = _stood_for.set(device_type)
    try:
        yield
    finally:
        _stood_for.reset(before)


@contextmanager
def casting_again(casts: AbstractContextManager[Any]) -> Iterator[None]:
    """Lets what is computed here be cast, and cast alike where backward computes it again."""
    before = _casts.set(casts)
    try:
        with casts:
            yield
    finally:
        _casts.reset(before)


def around_checkpoint() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns what torch's checkpoint enters forward, and in backward, where it restores autocast, but no mode."""
    return nullcontext(), _casts.get() or nullcontext()


def device_type(x: Tensor) -> str:
    """Returns the kind of device on which ``x`` lies, or for which it stands."""
    return _stood_for.get() if x.is_meta else x.device.type


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Returns the precision that autocast asks for where ``x`` lies, None where it asks for none, as for float64.

    Tensors without data, for which torch knows no autocast, follow the CPU's.
    """
    if x.dtype == torch.float64:
        return None
    kind = "cpu" if x.is_meta else x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
