"""When to leave: a signal, the time limit, or Slurm's end of the job. One rank's wish becomes all ranks' decision."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from seqpar.launch.job.exit_codes import PREEMPTED
from seqpar.launch.job.stop_agreement import Agreement
from seqpar.mesh import Mesh


class Stopper:
    """Notes signals and the clock; ``here`` tells all ranks the same.

    Until ``there_is_work`` nothing could be lost: a signal then ends this process at once. A second Ctrl-C always
    does. Signals are read from a pipe too: the handler itself waits for the main thread, which may be in a kernel.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, time_limit_s: float, margin_s: float = 90.0) -> None:
        self._noted = ""
        self._interrupts = 0
        self._pipe: int | None = None
        self._agreement: Agreement | None = None
        self._until = time.monotonic() + time_limit_s - min(margin_s, 0.1 * time_limit_s)
        left = slurm_seconds_left()
        if left is not None:
            self._until = min(self._until, time.monotonic() + left - margin_s)
        for number in self.SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._agreement is None:
            raise SystemExit(PREEMPTED)
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            raise KeyboardInterrupt
        self._noted = self._noted or signal.Signals(number).name

    def there_is_work(self, mesh: Mesh, lost: Callable[[str], None]) -> None:
        """From now on signals are noted, and answered at the next place where the run can be left.

        ``lost`` hears why, when this rank has to leave alone.
        """
        if mesh.store is not None:
            self._pipe, writes = os.pipe()
            os.set_blocking(self._pipe, False)
            os.set_blocking(writes, False)
            signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        self._agreement = Agreement(self._wish, mesh.world.index, mesh.world.size, mesh.store, lost)

    @property
    def reason(self) -> str:
        """Why all leave: a signal and its rank, or the time limit; and how soon all knew."""
        assert self._agreement is not None
        reason, seconds = self._agreement.reason, self._agreement.seconds
        return f"{reason}, agreed in {seconds:.1f} s" if seconds else reason

    def here(self) -> bool:
        """Returns whether all ranks leave at this place, the same on all: one of those that come in one order."""
        assert self._agreement is not None
        return self._agreement.here()

    def end(self) -> None:
        """Says that no further place will come."""
        assert self._agreement is not None
        self._agreement.end()

    def close(self) -> None:
        """Ends what listens for the others' wishes; all ranks have met behind their last place."""
        assert self._agreement is not None
        self._agreement.close()

    def ignore(self) -> None:
        """Lets the signals of a job that is being ended no longer interrupt the way out."""
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _wish(self) -> str:
        """Returns why this rank would leave now, "" if it would not."""
        if self._pipe is not None:
            with suppress(BlockingIOError):
                came = [signal.Signals(number) for number in os.read(self._pipe, 64)]
                self._noted = self._noted or next((one.name for one in came if one in self.SIGNALS), "")
        if not self._noted and time.monotonic() > self._until:
            self._noted = "time limit"
        return self._noted


def slurm_seconds_left() -> float | None:
    """Returns the seconds until Slurm ends this job, None where it does not say."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():
        return int(end) - time.time()
    job = os.environ.get("SLURM_JOB_ID")
    if not job or os.environ.get("SLURM_PROCID", "0") != "0":
        return None
    try:
        asked = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%L"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _duration(asked.stdout.strip())


def _duration(text: str) -> float | None:
    """Returns seconds of Slurm's ``[days-][hours:]minutes:seconds``, None for UNLIMITED and the like."""
    days, _, clock = text.rpartition("-")
    pieces = clock.split(":")
    if not all(piece.isdigit() for piece in [*pieces, days or "0"]) or len(pieces) > 3:
        return None
    total = 0
    for piece in pieces:
        total = total * 60 + int(piece)
    return float(total + 86400 * int(days or 0))
