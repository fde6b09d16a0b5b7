"""Which rank is slow: each step's own seconds, without waiting for others, compared over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

import torch
from torch import Tensor, nn

from seqpar.collectives import all_reduce
from seqpar.mesh import Group

SKIPPED = 3  # first steps that do not count: libraries choose their kernels in them
WINDOW = 10  # steps that are compared at a time
FACTOR = 1.5  # times the usual seconds; parts of a tile may differ in size by less
EXCESS_S = 0.05  # below, it is the operating system's noise


@dataclass(frozen=True)
class SlowRank:
    """A rank whose own work of a step takes much longer than the others'."""

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
    """Compares the seconds of all ranks over ``WINDOW`` steps, and names each slow rank once."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._steps: list[Sequence[float]] = []
        self._to_skip = SKIPPED
        self._named: set[int] = set()

    def note(self, seconds: Sequence[float]) -> list[SlowRank]:
        """Returns the ranks that turn out slow with this step; ``seconds``: each rank's own."""
        if self._to_skip:
            self._to_skip -= 1
            return []
        self._steps.append(seconds)
        if len(self._steps) < WINDOW:
            return []
        typical = [median(of_rank) for of_rank in zip(*self._steps)]
        self._steps = []
        usual = median_low(typical)
        slow = [
            SlowRank(rank, self.hosts[rank], own, usual)
            for rank, own in enumerate(typical)
            if own > FACTOR * usual and own - usual > EXCESS_S and rank not in self._named
        ]
        self._named |= {rank.rank for rank in slow}
        return slow


def time_waiting(net: nn.Module, world: Group) -> None:
    """Lets the wait clock tell a rank's own work from waiting: after its last gradient it only waits, in DDP's sums."""
    for parameter in net.parameters() if world.size > 1 else ():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: world.watch.clock.mark_ready(p.is_cuda))


def sum_over_ranks(sums: Tensor, own_s: float, world: Group) -> tuple[Tensor, list[float]]:
    """Returns the sums over all ranks, and every rank's ``own_s``, in one message."""
    seconds = sums.new_zeros(world.size)
    seconds[world.index] = own_s
    both = all_reduce(torch.cat([sums, seconds]), world)
    return both[: len(sums)], both[len(sums) :].tolist()
