"""A sweep of equal points by ``tune``: the clock of two workers against one, each training in one thread."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from statistics import median

from lab.benches.series import LAUNCH, Row, Runs, Series, alternate

TUNE = LAUNCH / "tune.py"
POINTS = 4
CASES = {"1 worker": 1, "2 workers": 2}
LINE = "--preset debug --epochs 1 --val-every 0 --val-cases 1 --device cpu --phantoms 6"


def series(quick: bool = False) -> list[Series]:
    """Returns the series, which measures nothing where Ray is not installed."""
    steps = 100 if quick else 300

    def row(case: str, runs: Runs) -> Row:
        known = {name: median(times) for name, times in runs.items() if times}
        return {
            "workers": CASES[case],
            "points": POINTS,
            "steps": steps,
            "seconds": known[case],
            "times_as_fast": known["1 worker"] / known[case],
        }

    def measure(turns: int) -> Generator[tuple[str, float], None, None]:
        if find_spec("ray") is None:
            print("sweep: nothing is measured, as Ray is not installed (pip install -e '.[tune]')", file=sys.stderr)
            return
        with tempfile.TemporaryDirectory() as folder:
            _seconds(Path(folder) / "first", 2, 2)  # makes the phantoms, and brings files into memory
            yield from alternate(
                tuple(CASES), lambda case: _seconds(Path(folder) / str(time.monotonic_ns()), CASES[case], steps), turns
            )

    what = f"{POINTS} points of {steps} steps, side by side"
    return [Series(what, tuple(CASES), 1, 160.0 if quick else 440.0, measure, row)]


def _seconds(out: Path, workers: int, steps: int) -> float:
    """Returns how long ``tune`` takes, from its start to its end."""
    space = f"lr={','.join(f'{n}e-3' for n in range(1, POINTS + 1))}"
    command = [sys.executable, str(TUNE), "--space", space, "--out", str(out)]
    command += ["--devices", str(workers), "--iterations", str(steps), *LINE.split()]
    began = time.perf_counter()
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began
