"""The checks of a start: every rank is there, no GPU belongs to two ranks, and making the groups has a time limit."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from seqpar.parallel.launcher import SHARE_GPU, Launcher
from seqpar.parallel.shared_memory import Address
from seqpar.parallel.watchdog import format_ranks
from seqpar.text import quantity


class RankLocation(NamedTuple):
    """Where a rank runs: its host, and what identifies its GPU there ("" if it has no GPU of its own)."""

    host: str
    gpu: str = ""
    address: Address | None = None  # for messages through shared memory
    sizes: tuple[int, int] = (1, 1)  # of its groups seq and pipe


def locate_rank(
    launcher: Launcher,
    device: torch.device,
    env: Mapping[str, str] = os.environ,
    address: Address | None = None,
    sizes: tuple[int, int] = (1, 1),
) -> RankLocation:
    """Returns where this rank runs, without its GPU if ``env`` lets ranks share one."""
    host = launcher.host or socket.gethostname()
    return RankLocation(host, "" if env.get(SHARE_GPU) == "1" else _identity(device), address, sizes)


def _identity(device: torch.device) -> str:
    """Returns the GPU's uuid and bus ids, as far as this torch knows them; two dies of a card differ in one of them."""
    if device.type != "cuda":
        return ""
    facts = torch.cuda.get_device_properties(device)
    names = ("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id")
    return " ".join(str(getattr(facts, name)) for name in names if hasattr(facts, name))


def roll_call(launcher: Launcher, store: Any, own: RankLocation, timeout_s: float) -> list[RankLocation]:
    """Returns where every rank runs; raises if ranks are missing, asked for other groups or share a GPU; names them."""
    began = time.monotonic()
    keys = [f"host/{rank}" for rank in range(launcher.world)]
    store.set(keys[launcher.rank], json.dumps(own))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:  # DistError is one
        try:
            missing = format_ranks([rank for rank, key in enumerate(keys) if not store.check([key])])
        except RuntimeError:  # rank 0, which hosts the store, gave up first and names them
            if time.monotonic() - began < timeout_s / 2:
                raise ConnectionError("rank 0 has ended before all ranks had started: see its log") from None
            missing = "some, which rank 0 names,"
        raise TimeoutError(
            f"of {launcher.world} ranks, {missing} did not start within {timeout_s:.0f} s; "
            "look at their logs, or start fewer"
        ) from None
    told = [json.loads(store.get(key)) for key in keys]
    places = [
        RankLocation(host, gpu, None if address is None else Address(*address), (sizes[0], sizes[1]))
        for host, gpu, address, sizes in told
    ]
    refuse_other_sizes([place.sizes for place in places])
    refuse_shared_gpus(places)
    return places


def refuse_other_sizes(sizes: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError on all ranks if they asked for groups of other sizes: to make these would never end."""
    if others := [rank for rank, own in enumerate(sizes) if own != sizes[0]]:
        (seqpar, pipe), (other, other_pipe) = sizes[0], sizes[others[0]]
        raise ValueError(
            f"seqpar={other} with pipe={other_pipe} on {format_ranks(others[:1])}, but seqpar={seqpar} with "
            f"pipe={pipe} on rank 0: give the same on all ranks"
        )


def refuse_shared_gpus(places: Sequence[RankLocation]) -> None:
    """Raises ValueError on all ranks if some share a GPU, where NCCL would end the processes."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        if place.gpu:
            ranks_of.setdefault((place.host, place.gpu), []).append(rank)
    for (host, gpu), ranks in ranks_of.items():
        if len(ranks) > 1:
            count = sum(other == host for other, _ in ranks_of)
            raise ValueError(
                f"{format_ranks(ranks)} have one GPU of {host} together ({gpu.split()[0]}), "
                "and each rank needs "
                f"its own: start at most {quantity(count, 'rank')} there, make another GPU visible to each, or "
                "use device='cpu'"
            )


def _end() -> None:
    os._exit(1)


class StartLimit:
    """Ends this process if making a group takes too long, after one rank has named the group and the missing ranks.

    A library call that hangs while making a group cannot be interrupted: a wrong network interface or a rank that never
    comes would keep all others, and their allocation, for ever.

    - ``store``: through which ranks tell each other how far they are
    - ``left_s``: returns how many seconds the next step may take
    - ``end``: ends the process
    """

    def __init__(
        self, store: Any, rank: int, world: int, left_s: Callable[[], float], end: Callable[[], object] = _end
    ) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store  # not busy with what the main thread awaits
        self._rank, self._world, self._left_s, self._end = rank, world, left_s, end
        self._number = 0

    @contextmanager
    def making(self, name: str, ranks: Sequence[int]) -> Iterator[None]:
        """Limits the time spent inside; all ranks of the world enter in the same order, members of the group or not."""
        self._number += 1
        self._store.set(f"making/{self._rank}", str(self._number))
        limit_s = self._left_s()
        what = f"the {name} group of {format_ranks(ranks)}"
        timer = threading.Timer(limit_s, self._overdue, (self._number, what, limit_s))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _overdue(self, making: int, what: str, limit_s: float) -> None:
        keys = [f"making/{rank}" for rank in range(self._world)]
        try:
            numbers = [int(self._store.get(key)) if self._store.check([key]) else 0 for key in keys]
        except RuntimeError:  # the store went with rank 0
            numbers = [making] * self._world
        behind = [rank for rank, number in enumerate(numbers) if number < making]
        if self._rank == min(set(range(self._world)) - set(behind), default=self._rank):
            why = f"{format_ranks(behind)} never came" if behind else (
                "all ranks came, but do not reach each other: check NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; "
                "NCCL_DEBUG=INFO says what it tries"
            )  # fmt: skip
            print(f"error: {what} was not made within {limit_s:.0f} s: {why}", file=sys.stderr, flush=True)
        self._end()
