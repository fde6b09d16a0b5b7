"""Watches ranks that work together, and names those that hold up the others.

A library's timeout says that a message did not arrive, but not who failed to send it. Here every rank records which
collective it enters. If nothing has moved for long, a thread of each rank tells the others through the store where its
main thread is; ranks that do not wait in a collective, or do not answer, are named. With ``check``, every message and
collective is announced before it is sent, so that a mismatch raises an error with names instead of a hang or a crash
somewhere else.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from seqpar.parallel.wait_clock import WaitClock

# Modules in which DDP, sharded weights and the device wait without ``Watch.waiting``.
_WAITING_IN_TORCH = ("torch.distributed", "torch.autograd.graph", "torch.cuda")
# What errors say if a message did not arrive, whichever library sent it.
_LOST = ("Connection closed", "Connection reset", "Timed out", "timeout", "peer", "Broken pipe", "NCCL")
_GROUND = str(Path(__file__).parent)  # the folder of everything that communicates


class CollectiveMismatch(RuntimeError):
    """Raised if ranks enter different collectives, or the same one with different sizes."""


def is_lost_contact(error: BaseException) -> bool:
    """Returns whether a collective failed because a peer is gone or late."""
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _LOST)


def describe_lost_contact(error: BaseException, rank: int) -> str:
    """Returns the message for a collective that failed because a peer is gone or late."""
    return f"rank {rank} lost contact with its peers: {str(error).strip().splitlines()[0][:160]}"


class RankPosition(NamedTuple):
    """What a rank tells the others about its main thread."""

    waits: bool  # for other ranks
    place: str  # the line that it is in
    last: str  # the collective that it entered last


class Watch:
    """Records what one process is waiting for; shared by all its groups, idle in a single process.

    - ``hosts``: every rank's node
    - ``store``: through which ranks tell each other where they are
    - ``check``: announce every message and collective before it is sent
    """

    def __init__(self, rank: int = 0, hosts: Sequence[str] = ("",), store: Any = None, check: bool = False) -> None:
        self.rank, self.hosts, self.check = rank, hosts, check
        self.limit_s = 0.0  # how long a collective may take; 0: the backend's own limit
        self.start_limit_s = 0.0
        self.notice_s = 5.0  # how long a rank waits before it tells the others, or the user
        self.clock = WaitClock()
        self.calls = set[str]()  # of a network, that all ranks of a group have made
        self.finding = ""
        self.roles: Sequence[str] = ()  # of every rank, such as its stage, if ranks do different work
        self.speaks = True  # whether this is the rank that prints the finding
        self.store = store
        self._counts: Counter[str] = Counter()
        self._last: tuple[str, object] = ("nothing yet", "")
        self._beat = time.monotonic()
        self._waits = 0  # how many ``waiting`` blocks are open
        self._act: Callable[[str], None] = self._say
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def enter(self, kind: str, group: object) -> None:
        """Records that this rank enters a collective of a group."""
        self._last, self._beat = (kind, group), time.monotonic()

    @contextmanager
    def waiting(self, on_gpu: bool) -> Iterator[None]:
        """Marks the code inside as waiting for other ranks, and counts its time.

        Every call that blocks until others arrive must be inside such a block: a rank outside of one is taken for the
        cause of a hang.
        """
        self._waits += 1
        try:
            with self.clock.waiting(on_gpu):
                yield
        except RuntimeError as error:
            if is_lost_contact(error) and not hasattr(error, "__notes__"):
                error.add_note(self._explain_loss())
            raise
        finally:
            self._waits -= 1
        self._beat = time.monotonic()

    def _explain_loss(self) -> str:
        """Returns why messages may not have arrived: what another rank raised, or the usual mistake."""
        heard = list[str]()

        def ask() -> None:
            with suppress(RuntimeError):  # the store has gone with the rank that keeps it
                key = f"why/{self._last[1]}"
                if self.store is not None and self.store.check([key]):
                    heard.append(self.store.get(key).decode())

        reader = threading.Thread(target=ask, daemon=True)  # a store that a frozen rank keeps does not answer
        reader.start()
        reader.join(2.0)
        if heard:
            return f"rank {self.rank} was in {self.where}: {heard[0]}"
        return (
            f"rank {self.rank} was in {self.where}, and another rank has failed, has left or does something else: see "
            "its log. All ranks of a group must make the same calls; every rank must call the network, also to validate"
        )

    @property
    def patience(self) -> timedelta | None:
        """How long a message between two CPUs may take; gloo's own limit for them cannot be changed later."""
        return timedelta(seconds=self.limit_s) if self.limit_s else None

    # Announcing what is sent ----------------------------------------------------------------------------------

    def compare(self, group: str, ranks: Sequence[int], what: str) -> None:
        """Raises on all ranks of a group, with their names, unless all of them enter the same collective."""
        name = f"{group}/{'-'.join(map(str, ranks))}"
        self._counts[name] += 1
        number = self._counts[name]
        keys = {rank: f"check/{name}/{number}/{rank}" for rank in ranks}
        self.store.set(keys[self.rank], what)
        entered = {
            rank: self._read(key, f"rank {rank} did not enter {what} in the {group} group")
            for rank, key in keys.items()
        }
        self.store.delete_key(f"check/{name}/{number - 2}/{self.rank}")  # all have read it, since all entered the next
        if len(set(entered.values())) > 1:
            differing = [
                f"{format_ranks([r for r in ranks if entered[r] == one])}: {one}" for one in _unique(entered.values())
            ]
            raise CollectiveMismatch(f"collective {number} of the {group} group differs: {'; '.join(differing)}")

    def announce(self, group: str, sends: Mapping[int, str], receives: Mapping[int, str]) -> None:
        """Announces what this rank sends, and raises unless the others announce what this rank expects."""
        for rank, what in sends.items():
            self.store.set(self._channel(group, self.rank, rank), what)
        for rank, what in receives.items():
            key = self._channel(group, rank, self.rank)
            coming = self._read(key, f"rank {rank} did not send {what} in the {group} group")
            self.store.delete_key(key)
            if coming != what:
                raise CollectiveMismatch(
                    f"rank {self.rank} expects {what} in the {group} group; rank {rank} sends {coming}"
                )

    def _channel(self, group: str, sender: int, receiver: int) -> str:
        name = f"{group}/{sender}>{receiver}"
        self._counts[name] += 1
        return f"check/{name}/{self._counts[name]}"

    def _read(self, key: str, problem: str) -> str:
        """Returns another rank's announcement; raises with ``problem`` if it does not arrive."""
        limit_s = 0.5 * (self.limit_s or self.start_limit_s)
        try:
            with self.waiting(False):
                self.store.wait([key], timedelta(seconds=limit_s))
            return self.store.get(key).decode()  # type: ignore[no-any-return]
        except RuntimeError:  # DistError is one
            raise CollectiveMismatch(f"{problem} within {limit_s:.0f} s, or had left it") from None

    # Naming who holds up the others ---------------------------------------------------------------------------

    def begin(self, limit_s: float, act: Callable[[str], None] | None = None) -> None:
        """Starts a thread that names who holds up the others once this rank has not moved for 3/4 of ``limit_s``.

        - ``act``: called with that text on every rank if any rank waits; None: one rank prints it
        """
        self.limit_s, self._act, self._beat = limit_s, act or self._say, time.monotonic()
        self.look()

    def look(self) -> None:
        """Starts the thread, which until ``begin`` only tells the others when this rank waits for long."""
        if self.store is None or self._thread is not None or len(self.hosts) < 2:
            return
        store = self.store.clone() if hasattr(self.store, "clone") else self.store  # one that is never busy
        main = threading.get_ident()
        self._thread = threading.Thread(target=self._look, args=(store, main), daemon=True, name="seqpar-watch")
        self._thread.start()

    def _say(self, finding: str) -> None:
        if self.speaks:
            print(f"warning: {finding}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Stops the thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(5)

    def _look(self, store: Any, main: int) -> None:
        reported = told = warned = 0.0  # the beats after which nothing had moved
        place = ""
        while not self._over.wait(min(1.0, self.notice_s / 5, self.limit_s / 20 or 1.0)):
            beat = self._beat
            still_s = time.monotonic() - beat
            try:
                if told and told != beat:
                    store.delete_key(f"waits/{self.rank}")
                    told = 0.0
                if not told and still_s > self.notice_s:
                    frame = sys._current_frames().get(main)
                    in_ddp = frame is not None and _module(frame).startswith("torch.nn.parallel")
                    if self._waits or in_ddp:
                        place = f"DDP after {self.where}" if in_ddp else self.where
                        store.set(f"waits/{self.rank}", place)
                        told = beat
                if told == beat != warned and self._warn_of_ended(store, place):
                    warned = beat
                if reported and reported != beat:
                    store.delete_key(f"held/{self.rank}")
                    self.finding, reported = "", 0.0
                if self.limit_s and not reported and still_s > 0.75 * self.limit_s:
                    self.finding, reported = self._ask(store, main), beat
                    if self.finding:
                        self._act(self.finding)
            except RuntimeError:  # the store is gone, and with it the rank that keeps it
                return

    def _warn_of_ended(self, store: Any, own: str) -> bool:
        """Says which ranks are at their end, if this one waits in ``own``, of theirs too; returns whether any is."""
        kind, group = self._last
        others = [rank for rank in getattr(group, "ranks", ()) if rank != self.rank and kind != "the end"]
        keys = {rank: f"waits/{rank}" for rank in others}
        waiting = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        ended = [rank for rank, place in waiting.items() if place.startswith("the end")]
        if ended:
            print(
                f"warning: rank {self.rank} waits in {own}, but the script has ended on {format_ranks(ended)}: "
                "all ranks must make the same calls, so give them equally many batches",
                file=sys.stderr,
                flush=True,
            )
        return bool(ended)

    def _ask(self, store: Any, main: int) -> str:
        """Exchanges positions with the other ranks and returns who holds up whom."""
        store.set(f"held/{self.rank}", json.dumps(self.whereabouts(sys._current_frames().get(main))))
        keys = [f"held/{rank}" for rank in range(len(self.hosts))]
        until = time.monotonic() + min(10.0, 0.1 * self.limit_s)
        while not store.check(keys) and time.monotonic() < until:
            time.sleep(min(0.1, 0.01 * self.limit_s))
        answers = {
            rank: RankPosition(*json.loads(store.get(key))) for rank, key in enumerate(keys) if store.check([key])
        }
        self.speaks = self.rank == min((rank for rank, answer in answers.items() if answer.waits), default=self.rank)
        names = [f"{host}, {role}" for host, role in zip(self.hosts, self.roles)] or self.hosts
        return blame_waiting_ranks(answers, names, 0.75 * self.limit_s)

    def whereabouts(self, frame: FrameType | None) -> RankPosition:
        """Returns the position of the main thread, whose innermost frame is ``frame``."""
        in_torch = frame is not None and _module(frame).startswith(_WAITING_IN_TORCH)
        return RankPosition(self._waits > 0 or in_torch, line_outside_parallel(frame), self.where)

    @property
    def where(self) -> str:
        """The collective that this rank entered last, in words."""
        return " of the ".join(map(str, self._last))


def line_outside_parallel(frame: FrameType | None) -> str:
    """Returns the innermost line of this package outside this folder: the caller of what communicates."""
    if frame is None:
        return "its end"
    while frame.f_back and not _above_ground(frame):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} ({code.co_name})"


def _above_ground(frame: FrameType) -> bool:
    package = __name__.partition(".")[0]
    return _module(frame).startswith(f"{package}.") and str(Path(frame.f_code.co_filename).parent) != _GROUND


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def blame_waiting_ranks(answers: Mapping[int, RankPosition], hosts: Sequence[str], seconds: float) -> str:
    """Returns who holds up whom according to the ranks that answered, or "" if no rank waits.

    - ``hosts``: each rank's node, with its role if ranks do different work
    """
    waiting = [rank for rank, answer in answers.items() if answer.waits]
    if not waiting:
        return ""
    silent = [rank for rank in range(len(hosts)) if rank not in answers]
    causes = [f"rank {rank} ({hosts[rank]}) does not answer" for rank in silent]
    causes += [f"rank {rank} ({hosts[rank]}) stays at {one.place}" for rank, one in answers.items() if not one.waits]
    collectives = _unique(answers[rank].last for rank in waiting)
    waits = "; ".join(
        f"{format_ranks([r for r in waiting if answers[r].last == last])} in {last}" for last in collectives
    )
    if not causes:
        return (
            f"all ranks have been waiting for each other for {seconds:.0f} s ({waits}): make the same calls on all "
            "ranks; seqpar.init_mesh(check=True) names the call that differs"
        )
    return f"{' and '.join(causes)}, and others have been waiting for {seconds:.0f} s: {waits}"


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns "rank 2", "ranks 0, 1" or, for a long consecutive run, "ranks 0…15"."""
    if len(ranks) > 8 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}…{ranks[-1]}"
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"
