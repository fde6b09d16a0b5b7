"""Which rank holds up the others: each step's own seconds, waiting for others left out, compared over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

FIRST = 3  # steps that are not counted: libraries choose their kernels in them
WINDOW = 10  # steps that are compared at a time
FACTOR = 1.5  # of what is usual: parts of a tile may differ in size by less
EXCESS_S = 0.05  # below, it is the operating system's noise


@dataclass(frozen=True)
class Slow:
    """A rank that takes much longer than the others for its own work of a step."""

    rank: int
    host: str
    seconds: float
    usual_s: float

    @property
    def factor(self) -> float:
        return self.seconds / max(self.usual_s, 1e-9)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on {self.host} takes {self.factor:.1f} x as long as the others for its own part of a "
            f"step ({self.seconds:.3g} s, usual {self.usual_s:.3g} s; loading included): all wait for it"
        )


class Stragglers:
    """Takes every rank's seconds of each step, and names a slow rank once."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._steps: list[Sequence[float]] = []
        self._left_out = FIRST
        self._named: set[int] = set()

    def note(self, seconds: Sequence[float]) -> list[Slow]:
        """Returns the ranks that this step has shown to be slow, and no step before."""
        if self._left_out:
            self._left_out -= 1
            return []
        self._steps.append(seconds)
        if len(self._steps) < WINDOW:
            return []
        typical = [median(of_rank) for of_rank in zip(*self._steps)]
        self._steps = []
        usual = median_low(typical)
        slow = [
            Slow(rank, self.hosts[rank], own, usual)
            for rank, own in enumerate(typical)
            if own > FACTOR * usual and own - usual > EXCESS_S and rank not in self._named
        ]
        self._named |= {found.rank for found in slow}
        return slow
