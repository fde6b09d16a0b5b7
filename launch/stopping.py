"""When to leave: a signal, the time limit, or Slurm's end of the job. One rank's wish becomes all ranks' decision."""

import os
import signal
import subprocess
import time
from types import FrameType

from seqpar.collectives import agree
from seqpar.launch.exits import PREEMPTED
from seqpar.mesh import Group


class Stopper:
    """Notes signals and the clock; ``agreed`` tells all ranks the same, once a step.

    Until ``there_is_work`` nothing could be lost: a signal then ends this process at once. A second Ctrl-C always
    does.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, time_limit_s: float, margin_s: float = 90.0) -> None:
        self.reason = ""
        self._working = False
        self._until = time.monotonic() + time_limit_s - min(margin_s, 0.1 * time_limit_s)
        left = slurm_seconds_left()
        if left is not None:
            self._until = min(self._until, time.monotonic() + left - margin_s)
        for number in self.SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._working:
            raise SystemExit(PREEMPTED)
        if number == signal.SIGINT and self.reason == "SIGINT":
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name

    def there_is_work(self) -> None:
        """From now on signals are noted, and answered between two steps."""
        self._working = True

    def wish(self) -> bool:
        """Returns whether this rank would leave now."""
        if not self.reason and time.monotonic() > self._until:
            self.reason = "time limit"
        return bool(self.reason)

    def agreed(self, world: Group) -> bool:
        """Returns whether any rank would leave: the same on all, at the same step."""
        leave = bool(agree(int(self.wish()), world))
        if leave and not self.reason:
            self.reason = "another rank's signal"
        return leave

    def ignore(self) -> None:
        """Lets the signals of a job that is being ended no longer interrupt the way out."""
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)


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
