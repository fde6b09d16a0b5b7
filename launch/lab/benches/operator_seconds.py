"""Seconds that operators took by themselves, added up by what they do."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

KINDS = {  # the first whose part of a name an operator's has
    "convolutions": ("conv",),
    "products": ("mm", "attention"),  # of the encoder
    "messages": ("c10d", "gloo", "param_comms"),
    "copies": ("copy_", "cat", "fill_", "zero_", "pad"),
}


def seconds_by_kind(operators: Iterable[Any]) -> Counter[str]:
    """Returns the seconds of operators by kind, "" for those of none; those of autograd and Python are left out."""
    seconds = Counter[str]()
    for operator in operators:
        name = operator.key
        if name.startswith(("aten::", "c10d", "gloo")):
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "")
            seconds[kind] += operator.self_cpu_time_total / 1e6  # type: ignore[assignment]
    return seconds
