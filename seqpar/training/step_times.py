"""Each step's own seconds, compared over ranks; rows are written one step late."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from types import TracebackType

import torch
from torch import Tensor, nn

from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.mesh import Group


class HostCopy:
    """Numbers of a device, copied in the order of its work: only reading them waits, if they have not arrived."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.to("cpu", non_blocking=True)  # of a GPU: in pinned memory
        self._arrived = torch.cuda.Event() if x.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def numbers(self) -> list[float]:
        """Returns the numbers as a list."""
        if self._arrived is not None and not self._arrived.query():
            self._arrived.synchronize()
        return list[float](self._copy.tolist())


class DelayedRows:
    """Calls each function that is put here when the next one comes, or at ``write``: the last one is never lost.

    A context manager, which calls what is left where an error ends it, too.
    """

    def __init__(self) -> None:
        self._last: Callable[[], None] | None = None

    def put(self, record: Callable[[], None]) -> None:
        """Calls the function before and keeps this one."""
        self.write()
        self._last = record

    def write(self) -> None:
        """Calls the function that is kept."""
        last, self._last = self._last, None
        if last is not None:
            last()

    def __enter__(self) -> "DelayedRows":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.write()
        except Exception:
            if error is None:  # else that error is the one to show: the device's numbers may be gone with it
                raise


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
    role: str = ""  # its stage, where ranks have several

    @property
    def factor(self) -> float:
        return self.seconds / max(self.usual_s, 1e-9)

    def __str__(self) -> str:
        of, others = (f" ({self.role})", "the others of its stage") if self.role else ("", "the others")
        return (
            f"rank {self.rank} on {self.host}{of} takes {self.factor:.1f} x as long as {others} for its own part of a "
            f"step ({self.seconds:.3g} s, usual {self.usual_s:.3g} s; loading included): all wait for it"
        )


class SlowRankDetector:
    """Compares the seconds of ranks that do the same over ``WINDOW`` steps, and names each slow rank once.

    ``roles``: of each rank, its stages in a pipe; ranks of one role do the same. None: all do
    """

    def __init__(self, hosts: Sequence[str], roles: Sequence[str] = ()) -> None:
        self.hosts, self.roles = hosts, roles or [""] * len(hosts)
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
        alike = [[own for own, other in zip(typical, self.roles) if other == role] for role in self.roles]
        slow = [
            SlowRank(rank, self.hosts[rank], own, usual, self.roles[rank])
            for rank, (own, usual) in enumerate(zip(typical, map(median_low, alike)))
            if own > FACTOR * usual and own - usual > EXCESS_S and rank not in self._named
        ]
        self._named |= {rank.rank for rank in slow}
        return slow


def time_waiting(net: nn.Module, world: Group) -> None:
    """Lets the wait clock tell a rank's own work from waiting: after its last gradient it only waits, in DDP's sums."""
    for parameter in net.parameters() if world.size > 1 else ():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: world.watch.clock.mark_ready(p.is_cuda))


def sum_over_ranks(sums: Tensor, own: Sequence[float], world: Group) -> Tensor:
    """Returns the sums over all ranks, and behind them every rank's numbers ``own``, in one message."""
    every = sums.new_zeros(world.size, len(own))
    for place, number in enumerate(own):
        every[world.index, place].fill_(number)  # assigning would copy it from the host, and wait for the device
    return all_reduce(torch.cat([sums, every.flatten()]), world)
