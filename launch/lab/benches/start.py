"""Start-up times: seconds from the command line to the first step or case, next to an import of torch alone.

Each run is a new process with one thread a rank, which is killed as soon as that is reached. On a busy machine the
processor seconds of all its processes say more than the clock.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lab.benches.series import LAUNCH, Row, Runs, Series, alternate
from seqpar.cluster.start_ranks import run_local
from seqpar.data.phantom.phantom_files import PhantomSettings, write_phantom

STEP = ("--preset", "debug", "--device", "cpu", "--iterations", "1")
CASES = ("import torch", "train, 1 rank", "train, 2 ranks", "predict, 1 rank")
PATIENCE_S = 600.0


class Seconds(NamedTuple):
    """The clock seconds and processor seconds of a start."""

    clock: float
    processor: float


def series(quick: bool = False) -> list[Series]:
    """Returns one series: torch alone, a training's first step on one rank and on two, a prediction's first case."""

    def measure(turns: int) -> Generator[tuple[str, Seconds], None, None]:
        with tempfile.TemporaryDirectory() as name:
            folder, phantom = Path(name), PhantomSettings(size=(32, 32, 32))
            write_phantom(folder / "data", 1, phantom, 1)
            trained, images = folder / "run", phantom.root(folder / "data")
            if run_local(1, [str(LAUNCH / "train.py"), *STEP, "--val-every", "0", "--out", str(trained)]):
                raise RuntimeError("the training of the network for predict failed: the lines above say why")
            yield from alternate(CASES, lambda case: _started(case, trained, images), turns)

    what = "seconds until the first step of train --preset debug, and until predict's first case"
    return [Series(what, CASES, 1 if quick else 5, 20.0, measure, row)]


def row(case: str, runs: Runs) -> Row:
    """Returns the row of a case: medians, and the fastest and slowest turn."""
    clock, processor = (sorted(values) for values in zip(*runs[case]))
    torch_alone = statistics.median(run.processor for run in runs[CASES[0]])
    return {
        "start": case,
        "clock_s": statistics.median(clock),
        "processor_s": statistics.median(processor),
        "from": processor[0],
        "to": processor[-1],
        "times_torch_alone": statistics.median(processor) / torch_alone,
    }


def _started(case: str, trained: Path, images: Path) -> Seconds:
    """Returns the seconds of one start."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        if case == CASES[0]:
            mark = Path(name) / "imported"
            return seconds_until(["-c", f"import torch; open({str(mark)!r}, 'w')"], mark.exists)
        if case == CASES[3]:
            line = ["predict.py", str(trained), "-i", str(images), "-o", str(out), "--device", "cpu"]
            return _of_act(line, lambda: any(out.glob("*.nii.gz")))
        line = ["train.py", *STEP, "--out", str(out), "--seqpar", "2" if case == CASES[2] else "1"]
        return _of_act(line, lambda: _has_row(out / "metrics.jsonl"))


def _of_act(line: Sequence[str], has_begun: Callable[[], bool]) -> Seconds:
    return seconds_until([str(LAUNCH / line[0]), *line[1:]], has_begun)


def _has_row(metrics: Path) -> bool:
    return metrics.exists() and '"train"' in metrics.read_text()


def seconds_until(command: Sequence[str], has_begun: Callable[[], bool]) -> Seconds:
    """Returns the seconds of a new Python process until ``has_begun``, and kills it and its ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=environment)
    try:
        while not has_begun():
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if not has_begun() and (ended or time.perf_counter() - began > PATIENCE_S):
                raise RuntimeError(f"{' '.join(command)} ended, or took too long, before its first step or case")
            time.sleep(0.005)
        return Seconds(time.perf_counter() - began, _processor_s(process.pid))
    finally:
        process.kill()  # its ranks die with it
        process.wait()


def _processor_s(pid: int) -> float:
    """Returns the processor seconds of a process and its descendants."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ticks = sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK") + sum(_processor_s(int(child)) for child in children)
    return 0.0
