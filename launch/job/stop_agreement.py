"""How ranks agree where to leave, within seconds, however long a step takes.

Places where a run can be left (between micro-batches, steps, and slabs of a validation) come in one order on all
ranks, so a number names them. The rank that wants to leave says so in the store; a thread of each rank, which runs
while the main thread computes or waits for others, answers with the next place that its rank will come to. All leave
at the furthest of these: nobody has passed it, and nobody waits for a message that a rank which left would send.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from seqpar.launch.job.exit_codes import PREEMPTED
from seqpar.watchdog import these

NEVER = 1 << 62  # the next place of a rank that will come to none


class Agreement:
    """``wish`` returns why this rank would leave, "" if it would not; ``store`` is None for a process alone.

    ``patience_s``: a rank that has not answered for so long is dead. This process then ends without saving, for what
    saves is a collective; the last checkpoint stands. ``lost`` hears about it before.
    """

    def __init__(
        self,
        wish: Callable[[], str],
        rank: int = 0,
        num_ranks: int = 1,
        store: Any = None,
        lost: Callable[[str], None] = lambda why: None,
        patience_s: float = 20.0,
    ) -> None:
        self.reason, self.seconds = "", 0.0
        self._wish, self._rank, self._num_ranks, self._store = wish, rank, num_ranks, store
        self._lost, self._patience_s = lost, patience_s
        self._lock, self._known = threading.Lock(), threading.Event()
        self._place, self._asked, self._target = 0, False, NEVER
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True, name="seqpar-agreement")
        if store is not None:
            self._thread.start()

    def here(self) -> bool:
        """Returns whether all ranks leave at this place: the same on all."""
        if self._store is None:
            self.reason = self.reason or self._wish()
            return bool(self.reason)
        wishes = bool(self._wish())
        with self._lock:
            waits = wishes or self._asked
            self._place += not waits
        if not waits:
            return False
        self._known.wait()  # that it is set, or this process ended, is the thread's affair
        self._place += 1
        return self._place >= self._target

    def end(self) -> None:
        """Says that this rank comes to no further place."""
        with self._lock:
            self._place = NEVER

    def close(self) -> None:
        """Ends the thread, once all ranks are through; asking the store while Python ends would abort the process."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(10)

    def _listen(self) -> None:
        """Lets ``here`` know, or ends this process: the main thread may be waiting for nothing else."""
        try:
            self._agree()
        except RuntimeError:  # DistError is one: the store is gone, and with it the rank that keeps it
            while not (self.reason or self._is_through()):
                why = self._wish()
                self.reason = f"{why} on rank {self._rank}" if why else ""
                self._over.wait(0.2)
            self._give_up("the rank that keeps the store is gone")
        except Exception:
            self._give_up("agreeing with the others failed", traceback.format_exc())

    def _agree(self) -> None:
        while not self._store.check(["wanted"]):
            why = self._wish()
            if why:
                self._store.set("wanted", f"{why} on rank {self._rank}")
            elif self._over.wait(max(0.2, self._num_ranks / 1000)):
                return
        self.reason, began = self._store.get("wanted").decode(), time.monotonic()
        with self._lock:
            self._asked, mine = True, min(self._place + 1, NEVER)
        self._store.set(f"next/{self._rank}", str(mine))
        if self._store.add("answers", 1) == self._num_ranks:
            self._store.set("target", str(max(map(int, map(self._store.get, self._answers())))))
        while not self._store.check(["target"]):
            if time.monotonic() - began > self._patience_s:
                silent = [rank for rank, key in enumerate(self._answers()) if not self._store.check([key])]
                self._give_up(f"{these(silent)} did not answer within {self._patience_s:g} s")
                return
            if self._over.wait(0.05):
                return
        self._target, self.seconds = int(self._store.get("target")), time.monotonic() - began
        self._known.set()

    def _answers(self) -> list[str]:
        return [f"next/{rank}" for rank in range(self._num_ranks)]

    def _is_through(self) -> bool:
        with self._lock:
            return self._place >= NEVER

    def _give_up(self, why: str, more: str = "") -> None:
        if self._is_through():
            return self._known.set()
        try:
            text = f"{self.reason}: {why}, so this one leaves without saving"
            print(f"{more}seqpar: {text}; the last checkpoint stands", file=sys.stderr, flush=True)
            self._lost(text)
        finally:
            os._exit(PREEMPTED)
