"""Small constant tensors that every step reads: made once per size and device, uploaded without waiting."""

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
_FORGET: list[Callable[[], None]] = []


def cached(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that caches the last ``most`` results of a function."""

    def keep(make: Callable[P, R]) -> Callable[P, R]:
        kept = lru_cache(maxsize=most)(make)
        _FORGET.append(kept.cache_clear)
        return kept  # type: ignore[return-value]

    return keep


def clear_caches() -> None:
    """Clears all caches, so that what is counted next does not depend on what ran before."""
    for forget in _FORGET:
        forget()


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies ``x`` to the device; a GPU fetches it from pinned memory without blocking this process."""
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
