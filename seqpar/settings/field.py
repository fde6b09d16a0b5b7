"""What a setting of a run has beside its type: its default, its bounds, its choices and its line in --help."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may have: ``allows`` tests one, ``text`` says what is needed."""

    allows: Callable[[float], bool]
    text: str


AT_LEAST_1 = Bounds(lambda value: value >= 1, "it must be at least 1")
NOT_NEGATIVE = Bounds(lambda value: 0 <= value < math.inf, "it must not be negative")
ABOVE_0 = Bounds(lambda value: 0 < value < math.inf, "it must be above 0")
ABOVE_0_TO_1 = Bounds(lambda value: 0 < value <= 1, "it must be above 0, and at most 1")
BELOW_1 = Bounds(lambda value: 0 <= value < 1, "it must lie in [0, 1)")
SEED = Bounds(lambda value: 0 <= value < 2**63, "it must lie in [0, 2^63)")  # what torch takes
INSIDE_0_1 = Bounds(lambda value: 0 < value < 1, "it must lie between 0 and 1")
GAMMA = Bounds(lambda value: value == 0 or 1 <= value < math.inf, "it must be 0, or at least 1; 2 is usual")


def share_bounds(usual: float) -> Bounds:
    """Returns the bounds of a share; ``usual``: one that is often taken."""
    return Bounds(lambda value: 0 <= value <= 1, f"it must lie in [0, 1]; {usual} is usual")


def setting(
    default: Any,
    text: str,
    topic: str,
    choices: Sequence[str] = (),
    bounds: Bounds | None = None,
    metavar: str = "",
) -> Any:
    """Returns a field of Config.

    ``text``: its line in --help, under the heading ``topic``; ``metavar``: what stands for its value there, in a word
    that says what it is; only switches and ``choices`` need none.
    """
    metadata = {"help": text, "topic": topic, "choices": tuple(choices), "bounds": bounds, "metavar": metavar}
    return field(default=default, metadata=metadata)
