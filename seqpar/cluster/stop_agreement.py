"""How ranks agree where to leave within seconds, however long a step takes; a last step cannot hold a process up."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from seqpar.cluster.exit_codes import PREEMPTED
from seqpar.parallel.watchdog import format_ranks

WAIT_S = 10.0  # for all steps together
LEAST_S = 1.0  # for each of them, also after one that hangs


class ShutdownSteps:
    """Takes steps one after the other, each in a thread of its own; one that hangs is left behind."""

    def __init__(self) -> None:
        self._until = time.monotonic() + WAIT_S

    def take(self, step: Callable[[], object]) -> None:
        """Calls ``step``, and returns once it is done, has failed, or has had its time."""

        def attempt() -> None:
            with suppress(Exception):
                step()

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(max(LEAST_S, self._until - time.monotonic()))


NEVER = 1 << 62  # the next place of a rank that comes to none


class StopAgreement:
    """Agreement of all ranks on the place where they leave.

    ``own_reason``: returns why this rank needs to leave, "" if it need not. ``store``: None for a process alone.
    ``patience_s``: a rank that does not answer for so long is taken for dead. This process then ends without saving,
    since saving is a collective, and the last checkpoint stands; ``on_lost`` is called with the reason before.
    """

    def __init__(
        self,
        own_reason: Callable[[], str],
        rank: int = 0,
        num_ranks: int = 1,
        store: Any = None,
        on_lost: Callable[[str], None] = lambda why: None,
        patience_s: float = 20.0,
    ) -> None:
        self.reason, self.seconds = "", 0.0  # why all leave, and how long it took until all knew
        self._own_reason, self._rank, self._num_ranks, self._store = own_reason, rank, num_ranks, store
        self._on_lost, self._patience_s = on_lost, patience_s
        self._lock, self._agreed = threading.Lock(), threading.Event()
        self._place, self._answered, self._target = 0, False, NEVER
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="seqpar-agreement")
        if store is not None:
            self._thread.start()

    def should_leave(self) -> bool:
        """Returns whether all ranks leave at this place, the same on all; called once at each place."""
        if self._store is None:
            self.reason = self.reason or self._own_reason()
            return bool(self.reason)
        needs_to_leave = bool(self._own_reason())
        with self._lock:
            waits = needs_to_leave or self._answered
            self._place += not waits
        if not waits:
            return False
        self._agreed.wait()  # the thread sets it, or ends this process
        self._place += 1
        return self._place >= self._target

    def finish(self) -> None:
        """Declares that this rank comes to no further place."""
        with self._lock:
            self._place = NEVER

    def close(self) -> None:
        """Ends the thread, once all ranks have finished: a store that is asked while Python ends aborts the process."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _listen(self) -> None:
        """Agrees with the other ranks; where that fails it ends this process, whose main thread may be waiting."""
        try:
            self._agree()
        except RuntimeError:  # DistError is one: the rank that keeps the store is gone
            while not (self.reason or self._is_finished()):
                why = self._own_reason()
                self.reason = f"{why} on rank {self._rank}" if why else ""
                self._closed.wait(0.2)
            self._give_up("the rank that keeps the store is gone")
        except Exception:
            self._give_up("agreeing with the others failed", traceback.format_exc())

    def _agree(self) -> None:
        while not self._store.check(["wanted"]):
            why = self._own_reason()
            if why:
                self._store.set("wanted", f"{why} on rank {self._rank}")
            elif self._closed.wait(max(0.2, self._num_ranks / 1000)):
                return
        self.reason, began = self._store.get("wanted").decode(), time.monotonic()
        with self._lock:
            self._answered, next_place = True, min(self._place + 1, NEVER)
        self._store.set(f"next/{self._rank}", str(next_place))
        if self._store.add("answers", 1) == self._num_ranks:
            self._store.set("target", str(max(map(int, map(self._store.get, self._answer_keys())))))
        while not self._store.check(["target"]):
            if time.monotonic() - began > self._patience_s:
                silent = [rank for rank, key in enumerate(self._answer_keys()) if not self._store.check([key])]
                self._give_up(f"{format_ranks(silent)} did not answer within {self._patience_s:g} s")
                return
            if self._closed.wait(0.05):
                return
        self._target, self.seconds = int(self._store.get("target")), time.monotonic() - began
        self._agreed.set()

    def _answer_keys(self) -> list[str]:
        return [f"next/{rank}" for rank in range(self._num_ranks)]

    def _is_finished(self) -> bool:
        with self._lock:
            return self._place >= NEVER

    def _give_up(self, why: str, more: str = "") -> None:
        """Ends this process without saving, unless it has finished anyway."""
        if self._is_finished():
            return self._agreed.set()
        try:
            last, text = ShutdownSteps(), f"{self.reason}: {why}, so this one leaves without saving"
            line = f"{more}seqpar: {text}; the last checkpoint stands"
            last.take(lambda: print(line, file=sys.stderr, flush=True))
            last.take(lambda: self._on_lost(text))
        finally:
            os._exit(PREEMPTED)
