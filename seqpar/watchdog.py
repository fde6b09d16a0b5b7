"""Watches over ranks that work together: what each entered last, how long it waited, who holds up the others.

A library's timeout says that something did not come, not from whom. Here every rank notes what it enters; when
nothing has moved for long, a thread of each rank tells the others through the store where its main thread is, and
those that are elsewhere, or tell nothing, are named. With ``check`` every message and collective is announced
before it is sent, so that a mismatch is an error with names instead of a hang or a crash somewhere else.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch

# A main thread whose innermost frame lies here waits for its peers, or for a device that does.
_WAITING = tuple(
    f"seqpar.{name}" for name in ("messages", "collectives", "consensus", "mesh", "rendezvous", "watchdog")
)
_WAITING_IN_TORCH = ("torch.distributed", "torch.autograd.graph", "torch.cuda")


class OutOfStep(RuntimeError):
    """Ranks entered different collectives, or the same with different sizes."""


class Watch:
    """One for all groups of a process; of a process alone, it does nothing."""

    def __init__(self, rank: int = 0, hosts: Sequence[str] = ("",), store: Any = None, check: bool = False) -> None:
        self.rank, self.hosts, self.check = rank, hosts, check
        self.limit_s = 0.0  # 0: the library's own
        self.start_limit_s = 0.0
        self.timed = False  # whether waiting is measured: from ``measure`` to ``take_waited``
        self.finding = ""
        self.speaks = True  # whether this rank is the one of those that found it that says it
        self._store = store
        self._counts: Counter[str] = Counter()
        self._last: tuple[str, object] = ("nothing yet", "")
        self._beat = time.monotonic()
        self._waited_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._ready: float | torch.cuda.Event | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def enter(self, kind: str, group: object) -> None:
        """Notes that this rank enters a collective of a group."""
        self._last, self._beat = (kind, group), time.monotonic()

    @property
    def patience(self) -> timedelta | None:
        """How long a message between two CPUs may take; gloo's own limit for them cannot be changed later."""
        return timedelta(seconds=self.limit_s) if self.limit_s else None

    # Waiting, by the clock of the host or of the device -------------------------------------------------------

    @contextmanager
    def waiting(self, on_gpu: bool) -> Iterator[None]:
        """Counts the time inside as waiting for others, of the device's stream or of this process."""
        if not self.timed:
            yield
        elif on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._waited_s += time.perf_counter() - began
        self._beat = time.monotonic()

    def mark_ready(self, on_gpu: bool) -> None:
        """Notes that this rank has done its own work; called again, only the last counts."""
        if not self.timed:
            return
        if on_gpu:
            self._ready = torch.cuda.Event(enable_timing=True)
            self._ready.record()
        else:
            self._ready = time.perf_counter()

    def count_since_ready(self) -> None:
        """Counts the time since the mark as waiting."""
        ready, self._ready = self._ready, None
        if isinstance(ready, float):
            self._waited_s += time.perf_counter() - ready
        elif ready is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._events.append((ready, end))

    def measure(self) -> None:
        """Begins to count waiting."""
        self.timed, self._waited_s, self._events, self._ready = True, 0.0, [], None

    def take_waited(self) -> float:
        """Returns the seconds waited since ``measure``, and counts no more; the device must have come to rest."""
        seconds = self._waited_s + sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
        self.timed, self._events = False, []
        return seconds

    # Announcing what is sent ----------------------------------------------------------------------------------

    def compare(self, group: str, ranks: Sequence[int], what: str) -> None:
        """Raises on all ranks of a group, with their names, unless all enter the same collective now."""
        name = f"{group}/{'-'.join(map(str, ranks))}"
        self._counts[name] += 1
        number = self._counts[name]
        keys = {rank: f"check/{name}/{number}/{rank}" for rank in ranks}
        self._store.set(keys[self.rank], what)
        said = {rank: self._heard(key, f"rank {rank} did not enter", what, group) for rank, key in keys.items()}
        self._store.delete_key(f"check/{name}/{number - 2}/{self.rank}")  # all have read it: they were at the next one
        if len(set(said.values())) > 1:
            told = [f"{these([r for r in ranks if said[r] == one])}: {one}" for one in dict.fromkeys(said.values())]
            raise OutOfStep(f"collective {number} of the {group} group differs: {'; '.join(told)}")

    def announce(self, group: str, sends: Mapping[int, str], receives: Mapping[int, str]) -> None:
        """Tells other ranks what they will get, and raises unless what they will send is what is expected."""
        for rank, what in sends.items():
            self._store.set(self._channel(group, self.rank, rank), what)
        for rank, what in receives.items():
            key = self._channel(group, rank, self.rank)
            coming = self._heard(key, f"rank {rank} did not send", what, group)
            self._store.delete_key(key)
            if coming != what:
                raise OutOfStep(f"rank {self.rank} expects {what} in the {group} group; rank {rank} sends {coming}")

    def _channel(self, group: str, sender: int, receiver: int) -> str:
        name = f"{group}/{sender}>{receiver}"
        self._counts[name] += 1
        return f"check/{name}/{self._counts[name]}"

    def _heard(self, key: str, fault: str, what: str, group: str) -> str:
        limit_s = 0.5 * (self.limit_s or self.start_limit_s)
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
            return self._store.get(key).decode()
        except RuntimeError:  # DistError is one
            raise OutOfStep(f"{fault} {what} in the {group} group within {limit_s:.0f} s, or had left it") from None

    # Naming who holds up the others ---------------------------------------------------------------------------

    def begin(self, limit_s: float, act: Callable[[str], None] | None = None) -> None:
        """From now on, when this rank has not moved for three quarters of the limit, tells the others why.

        What they find, where any waits, is handed to ``act``; without one, a single rank prints it.
        """
        self.limit_s = limit_s
        if self._store is None or self._thread is not None:
            return
        store = self._store.clone() if hasattr(self._store, "clone") else self._store  # one that is never busy
        main = threading.get_ident()
        self._beat = time.monotonic()
        self._thread = threading.Thread(
            target=self._look, args=(store, main, act or self._say), daemon=True, name="seqpar-watch"
        )
        self._thread.start()

    def _say(self, finding: str) -> None:
        if self.speaks:
            print(f"warning: {finding}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Stops the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(5)

    def _look(self, store: Any, main: int, act: Callable[[str], None]) -> None:
        told_at = 0.0
        while not self._over.wait(min(1.0, self.limit_s / 20)):
            beat = self._beat
            try:
                if told_at and told_at != beat:
                    store.delete_key(f"held/{self.rank}")
                    self.finding, told_at = "", 0.0
                if not told_at and time.monotonic() - beat > 0.75 * self.limit_s:
                    self.finding, told_at = self._tell(store, main), beat
                    if self.finding:
                        act(self.finding)
            except RuntimeError:  # the store is gone, and with it the rank that keeps it
                return

    def _tell(self, store: Any, main: int) -> str:
        waits, place = whereabouts(sys._current_frames().get(main))
        store.set(
            f"held/{self.rank}",
            json.dumps({"waits": waits, "place": place, "last": " of the ".join(map(str, self._last))}),
        )
        keys = [f"held/{rank}" for rank in range(len(self.hosts))]
        until = time.monotonic() + min(10.0, 0.1 * self.limit_s)
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(min(0.1, 0.01 * self.limit_s))
        told = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
        self.speaks = self.rank == min((rank for rank in told if told[rank]["waits"]), default=self.rank)
        return judge(told, self.hosts, 0.75 * self.limit_s)


def judge(told: Mapping[int, Mapping[str, Any]], hosts: Sequence[str], seconds: float) -> str:
    """Returns who holds up whom, of what the ranks told about themselves; nothing where no rank waits."""
    waiting = [rank for rank in told if told[rank]["waits"]]
    if not waiting:
        return ""
    silent = [rank for rank in range(len(hosts)) if rank not in told]
    away = [rank for rank in told if not told[rank]["waits"]]
    causes = [f"rank {rank} ({hosts[rank]}) does not answer" for rank in silent]
    causes += [f"rank {rank} ({hosts[rank]}) stays at {told[rank]['place']}" for rank in away]
    lasts = {last: [rank for rank in waiting if told[rank]["last"] == last] for last in _lasts(told, waiting)}
    waits = "; ".join(f"{these(ranks)} in {last}" for last, ranks in lasts.items())
    if not causes:
        return f"for {seconds:.0f} s all ranks have waited for each other ({waits}): use --debug-collectives"
    return f"{' and '.join(causes)}, while for {seconds:.0f} s others have waited: {waits}"


def _lasts(told: Mapping[int, Mapping[str, Any]], waiting: Sequence[int]) -> list[str]:
    return list(dict.fromkeys(told[rank]["last"] for rank in waiting))


def whereabouts(frame: FrameType | None) -> tuple[bool, str]:
    """Returns whether a thread waits for its peers, and the innermost line of ours above that."""
    if frame is None:
        return False, "its end"
    name = frame.f_globals.get("__name__", "")
    waits = name in _WAITING or name.startswith(_WAITING_IN_TORCH)
    while frame.f_back and (name in _WAITING or not name.startswith("seqpar.")):
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
    code = frame.f_code
    return waits, f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} ({code.co_name})"


def these(ranks: Sequence[int]) -> str:
    """Returns "rank 2", "ranks 0, 1", or of many in a row the first and the last."""
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}…{ranks[-1]}"
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
