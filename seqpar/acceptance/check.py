"""What a check of the acceptance program looks at and returns."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RIGHT, WRONG, MEASURED, LEFT_OUT = "right", "wrong", "measured", "left out"


@dataclass(frozen=True)
class Site:
    """Where checks run: the device, a folder for what they write, and until when (as ``time.monotonic`` counts)."""

    device: torch.device
    folder: Path
    until: float = math.inf

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()


@dataclass(frozen=True)
class Outcome:
    """What a check came to: a verdict, a line for people, figures for the record."""

    verdict: str
    text: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """A check by name, and the part of the program that it belongs to."""

    name: str
    part: int
    run: Callable[[Site], Outcome]


@dataclass(frozen=True)
class Error:
    """How far something is off, and how far it may be; it is wrong beyond that, and where it is no number."""

    value: float
    bound: float

    @property
    def is_wrong(self) -> bool:
        return not self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.value:.1e} (at most {self.bound:.0e})"


def judged(errors: Mapping[str, Error], more: Mapping[str, Any] | None = None) -> Outcome:
    """Returns the verdict on errors by name; its line names the one nearest to its bound, or all that are beyond."""
    wrong = [f"{name} {error}" for name, error in errors.items() if error.is_wrong]
    values = {name: error.value for name, error in errors.items()}
    figures = {name: x if math.isfinite(x) else str(x) for name, x in values.items()} | dict(more or {})  # as JSON has
    if wrong:
        others = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return Outcome(WRONG, "; ".join(wrong[:3]) + others, figures)
    name, worst = max(errors.items(), key=lambda pair: pair[1].value / pair[1].bound)
    return Outcome(RIGHT, f"{len(errors)} compared; nearest to its bound {name} {worst}", figures)


def relative(a: Tensor, b: Tensor) -> float:
    """Returns max |a - b| / max |b|, in float64 on the CPU."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))
