"""Kinds of operations and their floating-point operations."""

from dataclasses import dataclass
from typing import Any

from torch.utils.flop_counter import flop_registry

MATMUL, CONVOLUTION, ATTENTION, OTHER = KINDS = ("matmul", "convolution", "attention", "other")


@dataclass(frozen=True)
class Operation:
    """Calls of a torch operator, ``times`` of them: each ``count`` floating-point operations, and ``size`` bytes read
    and written."""

    kind: str
    count: float
    size: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: int = 1


def operations_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, float]:
    """Returns the kind of an operator's call and its floating-point operations."""
    packet = func._overloadpacket
    name = packet.__name__
    if name.startswith("_scaled_dot_product"):
        backward = "backward" in name
        q, k = args[1:3] if backward else args[:2]
        return ATTENTION, (10.0 if backward else 4.0) * q.numel() * k.shape[2]
    if packet in flop_registry:
        kind = CONVOLUTION if "conv" in name else MATMUL
        return kind, float(flop_registry[packet](*args, **kwargs, out_val=result))
    return OTHER, 0.0
