"""When a run has to leave: a signal, a file, the time limit, or the end of a Slurm job; all ranks leave together."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from seqpar.cluster.exit_codes import PREEMPTED
from seqpar.cluster.stop_agreement import StopAgreement
from seqpar.parallel.mesh import Mesh
from seqpar.parallel.processes import LEAVE_SIGNALS, PARENT_OF_FOLD, STOP_FILE, handle_leave_signals

APART_S = 1.0  # one Ctrl-C may come twice to a fold: from srun to all processes, and passed on


class LeftBeforeStart(SystemExit):
    """A signal came before a run had anything to save."""


class StopRequest:
    """Watches for signals and the clock; ``should_leave`` returns the same on all ranks.

    Before ``begin`` there is nothing to save, and a signal raises ``LeftBeforeStart``, with the code of that signal;
    after it, a second Ctrl-C leaves at once. Signals are read from a pipe too, because a Python handler waits for the
    main thread, which may be in a kernel.

    - ``time_limit_s``: of the run; ``margin_s``: how long before that, or before the end of the Slurm job, it leaves
    - ``resumes``: whether the run has begun before, so that it can be resumed even if it leaves before ``begin``
    """

    def __init__(self, time_limit_s: float, margin_s: float = 90.0, resumes: bool = False) -> None:
        self._resumes = resumes
        self._reason = ""  # why this rank needs to leave
        self._interrupted: float | None = None  # when Ctrl-C came first
        self._early: LeftBeforeStart | None = None  # raised before the start: Python drops it in a finaliser
        self._pipe: int | None = None
        self._files: list[Path] = []
        self._agreement: StopAgreement | None = None
        self._deadline = time.monotonic() + time_limit_s - min(margin_s, 0.1 * time_limit_s)
        left_s = slurm_seconds_left()
        if left_s is not None:
            self._deadline = min(self._deadline, time.monotonic() + left_s - margin_s)
        handle_leave_signals(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._agreement is None:
            self._early = LeftBeforeStart(PREEMPTED if self._resumes else 128 + number)
            raise self._early
        if number == signal.SIGINT:
            now = time.monotonic()
            apart_s = APART_S if PARENT_OF_FOLD in os.environ else 0.0
            if self._interrupted is not None and now - self._interrupted >= apart_s:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
        self._reason = self._reason or signal.Signals(number).name

    def begin(self, mesh: Mesh, on_lost: Callable[[str], None], out: Path) -> None:
        """From now on a signal is kept, and all ranks leave at the next place where the run can be left.

        - ``on_lost``: called with the reason when this rank has to leave alone
        - ``out``: the run folder, in which the first rank looks for a file named ``stop``, as in that of five folds
        """
        if self._early is not None:
            raise self._early
        folders = [out, out.parent] if PARENT_OF_FOLD in os.environ else [out]
        self._files = [folder / STOP_FILE for folder in folders] * mesh.is_first
        if mesh.store is not None:
            self._pipe, writes = os.pipe()
            os.set_blocking(self._pipe, False)
            os.set_blocking(writes, False)
            signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
        self._agreement = StopAgreement(self.own_reason, mesh.world.index, mesh.world.size, mesh.store, on_lost)

    @property
    def reason(self) -> str:
        """Why all leave: a signal and its rank, or the time limit; and how soon all ranks knew."""
        agreement = self._begun()
        return f"{agreement.reason}, agreed in {agreement.seconds:.1f} s" if agreement.seconds else agreement.reason

    def should_leave(self) -> bool:
        """Returns whether all ranks leave here; called at every place where a run can be left, in the same order."""
        return self._begun().should_leave()

    def finish(self) -> None:
        """Declares that no further place comes where the run can be left."""
        self._begun().finish()

    def close(self) -> None:
        """Ends the thread that listens to the other ranks, once all have finished."""
        self._begun().close()

    def ignore_signals(self) -> None:
        """Ignores further signals, so that those of a job that is being ended do not interrupt saving."""
        for number in LEAVE_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def own_reason(self) -> str:
        """Returns why this rank needs to leave now, "" if it need not."""
        if self._pipe is not None:
            with suppress(BlockingIOError):
                numbers = os.read(self._pipe, 64)
                self._reason = self._reason or next(
                    (signal.Signals(number).name for number in numbers if number in LEAVE_SIGNALS), ""
                )
        if not self._reason and time.monotonic() > self._deadline:
            self._reason = "time limit"
        if not self._reason and (found := next((file for file in self._files if file.is_file()), None)):
            self._reason = f"file {found}"
        return self._reason

    def _begun(self) -> StopAgreement:
        assert self._agreement is not None, "begin comes first"
        return self._agreement


def slurm_seconds_left() -> float | None:
    """Returns the seconds until Slurm ends this job, None where it does not say."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():
        left = int(end) - time.time()
        return left if left > 0 else None  # of a job that has ended, as a screen that was opened in it still has
    job = os.environ.get("SLURM_JOB_ID")
    if not job or os.environ.get("SLURM_PROCID", "0") != "0":
        return None
    try:
        squeue = subprocess.run(
            ["squeue", "-h", "-j", job, "-o", "%L"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return slurm_duration(squeue.stdout.strip())


def slurm_duration(text: str) -> float | None:
    """Returns seconds of Slurm's ``[days-][hours:]minutes:seconds``, None for UNLIMITED and the like."""
    days, _, clock = text.rpartition("-")
    pieces = clock.split(":")
    if not all(piece.isdigit() for piece in [*pieces, days or "0"]) or len(pieces) > 3:
        return None
    total = 0
    for piece in pieces:
        total = total * 60 + int(piece)
    return float(total + 86400 * int(days or 0))
