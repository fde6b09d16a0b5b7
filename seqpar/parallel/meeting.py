"""Meeting: where the processes of one launcher find each other and exchange texts before there is a mesh."""

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from seqpar.parallel.launcher import Launcher
from seqpar.parallel.watchdog import format_ranks

START_S = 900.0  # hundreds of nodes reading from one file system have taken 600 s


class Meeting:
    """The store through which the processes of one launcher meet; a single process has none.

    The first rank hosts the store, and the processes meet when it is first used. Each name can be used once.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._store: dist.Store | None = None

    def store(self, timeout_s: float = START_S) -> dist.Store | None:
        """Returns the store after this rank has met the first one; None for a single process."""
        if self._store is None and self.launcher.world > 1:
            self._store = _meet(self.launcher, timeout_s)
        return self._store

    def of_first(self, name: str, text: str, timeout_s: float = START_S) -> str:
        """Returns the first rank's text on every rank; the other ranks' texts are ignored."""
        return self._exchange(name, text, [0], timeout_s)[0]

    def gather(self, name: str, text: str, timeout_s: float = START_S) -> list[str]:
        """Returns every rank's text, in rank order, the same on each rank."""
        return self._exchange(name, text, range(self.launcher.world), timeout_s)

    def _exchange(self, name: str, text: str, ranks: Sequence[int], timeout_s: float) -> list[str]:
        """Returns the texts of ``ranks``; the first rank, which may host the store, waits until all have read them."""
        store, rank = self.store(timeout_s), self.launcher.rank
        if store is None:
            return [text]
        if rank in ranks:
            store.set(f"{name}/{rank}", f"={text}")
        self._wait(store, name, ranks, timeout_s)
        texts = [store.get(f"{name}/{other}").decode()[1:] for other in ranks]
        store.set(f"{name}/read/{rank}", "=")
        if rank == 0:
            self._wait(store, f"{name}/read", range(self.launcher.world), timeout_s)
        return texts

    def _wait(self, store: dist.Store, name: str, ranks: Sequence[int], timeout_s: float) -> None:
        try:
            store.wait([f"{name}/{rank}" for rank in ranks], timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError) as error:
            try:
                missing = format_ranks([rank for rank in ranks if not store.check([f"{name}/{rank}"])])
            except (dist.DistError, RuntimeError):
                raise ConnectionError(f"rank 0 has exited ({str(error).splitlines()[0]}): see its log") from None
            raise TimeoutError(
                f"of {self.launcher.world} ranks, {missing} did not respond within {timeout_s:.0f} s ({name}); look at "
                "their logs"
            ) from None


def _meet(launcher: Launcher, timeout_s: float) -> dist.Store:
    limit = timedelta(seconds=timeout_s)
    host = launcher.rank == 0 and not launcher.agent_store
    _check_name(launcher)
    if not host:
        _await_listener(launcher, timeout_s)
    try:
        meeting = dist.TCPStore(
            launcher.address, launcher.port, launcher.world, host, timeout=limit, wait_for_workers=False
        )
    except (dist.DistError, RuntimeError) as error:
        raise ConnectionError(
            f"rank {launcher.rank} ({launcher.by}) cannot connect to {launcher.address}:{launcher.port}: another job "
            "may use this port, or an earlier start of this process, or MASTER_ADDR is wrong; set another MASTER_PORT "
            f"({str(error).splitlines()[0]})"
        ) from None
    return dist.PrefixStore(f"seqpar/{launcher.job}/{launcher.attempt}", meeting)


def _check_name(launcher: Launcher) -> None:
    """Raises ConnectionError if this host cannot resolve the address, which torch would retry for minutes."""
    try:
        socket.getaddrinfo(launcher.address, launcher.port)
    except OSError as error:
        raise ConnectionError(
            f"rank {launcher.rank} ({launcher.by}) on {socket.gethostname()} cannot resolve {launcher.address} "
            f"({error.strerror}): export MASTER_ADDR=$(hostname -i) on the node of rank 0, before srun"
        ) from None


def _await_listener(launcher: Launcher, timeout_s: float) -> None:
    """Waits until rank 0 listens; torch's own client waits twice as long and fills the log while it does."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(
                (launcher.address, launcher.port), timeout=max(0.1, until - time.monotonic())
            ).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(
                    f"rank {launcher.rank} ({launcher.by}): rank 0 did not answer at "
                    f"{launcher.address}:{launcher.port} within {timeout_s:.0f} s; check that rank 0 has started, and "
                    f"MASTER_ADDR and MASTER_PORT ({error.strerror})"
                ) from None
            time.sleep(0.1)
