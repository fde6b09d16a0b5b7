"""An error that another rank than the first has before ranks communicate: said only where the first has another."""

import socket
import time

from seqpar.cluster import exit_codes
from seqpar.parallel.launcher import Launcher

FIRST_RANK_S = 5.0  # the first rank's time to report an error that all ranks have


def report_late(error: ValueError, launcher: Launcher) -> int:
    """Returns the exit code after printing what another rank than the first refuses.

    Mostly all ranks refuse the same: the first one says so, and its end ends these before they speak.
    """
    until = time.monotonic() + FIRST_RANK_S
    while time.monotonic() < until and exit_codes.last_words() != f"error: {error}":
        time.sleep(0.05)
    if exit_codes.last_words() != f"error: {error}":
        host = launcher.host or socket.gethostname()
        exit_codes.report(f"rank {launcher.rank} ({host}): {error}")
    return exit_codes.code_of(error) or exit_codes.USAGE
