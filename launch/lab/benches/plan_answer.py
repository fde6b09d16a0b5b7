"""How soon the planner answers on one core: seconds until its first row and until its last line."""

import os
import subprocess
import sys
import time
from collections.abc import Generator

from lab.benches.series import LAUNCH, Row, Runs, Series, alternate

PLAN = LAUNCH / "plan.py"
COMMANDS = (
    "--volume 512 512 300 --patch 8 --classes 15 --channels 1 --device a100 --memory 40",
    "--tile 240 240 155 --patch 4 --preset modern --device mi250x",
    "--tile 128 --patch 4 --preset paper --device h100",
)


def series(quick: bool = False) -> list[Series]:
    """Returns one series: every command line, or two of them if quick."""
    cases = COMMANDS[:2] if quick else COMMANDS
    what = "seconds until the planner's first row and until its whole answer, on one core"

    def measure(turns: int) -> Generator[tuple[str, Row], None, None]:
        return alternate(cases, timed, turns)

    return [Series(what, cases, 1, 40.0 * len(cases), measure, _row)]


def _row(case: str, runs: Runs) -> Row:
    """Returns the quickest of a command line's turns."""
    return {"plan": case, **min(runs[case], key=lambda run: float(run["whole answer s"]))}


def timed(flags: str) -> Row:
    """Returns how long ``plan.py`` takes with these flags, in a new process on one core."""
    began, first_s, sizes, answer = time.perf_counter(), 0.0, 0, ""
    core = {min(os.sched_getaffinity(0))}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(PLAN), *flags.split()],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: os.sched_setaffinity(0, core),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            answer = line.strip() or answer
            if line.strip().partition(" ")[0].isdigit():
                sizes += 1
                first_s = first_s or time.perf_counter() - began
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "first row s": first_s,
        "whole answer s": time.perf_counter() - began,
        "processor s": usage.ru_utime + usage.ru_stime,
        "sizes counted": sizes,
        "exit code": process.returncode,
        "answer": answer,
    }
