"""Measures cases in turns, each in new processes, and makes a table of them."""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from seqpar.parallel.processes import end_process, start_python
from seqpar.text import clock

LAUNCH = Path(__file__).parents[2]
_NOTHING: Mapping[str, str] = MappingProxyType({})
Row = dict[str, Any]
Runs = dict[str, list[Any]]  # by case, the result of each turn


def lab_on_path() -> dict[str, str]:
    """Returns the environment variable that lets a new process find the laboratory, which is not installed."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(LAUNCH), os.environ.get("PYTHONPATH", "")]))}


@dataclass(frozen=True)
class Series:
    """Cases that are measured in turns, so that other load on the machine affects all of them equally.

    - ``what``: what is measured, in words
    - ``cases``: their names, in the order of a turn
    - ``turns``: their default number
    - ``turn_s``: seconds that a turn takes on 2 idle CPU cores
    - ``measure``: takes the number of turns; yields each case and its result, turn after turn
    - ``row``: returns a case's row of the table, from the runs of all cases so far
    - ``conclude``: returns a remark on all rows, to be printed below the table
    """

    what: str
    cases: tuple[str, ...]
    turns: int
    turn_s: float
    measure: Callable[[int], Generator[tuple[str, Any], None, None]]
    row: Callable[[str, Runs], Row]
    conclude: Callable[[Sequence[Row]], str] = lambda _: ""

    def in_words(self, turns: int) -> str:
        """Returns what is measured, and how much of it."""
        return f"{self.what}: {_count(len(self.cases), 'case')}, {_count(turns, 'turn')}"


def alternate(
    cases: Sequence[str], measure: Callable[[str], Any], turns: int
) -> Generator[tuple[str, Any], None, None]:
    """Yields each case with the result of ``measure``, turn after turn."""
    for _ in range(turns):
        for case in cases:
            yield case, measure(case)


def ratio(runs: Sequence[float], base: Sequence[float]) -> float | str:
    """Returns the median ratio over the turns that both have; "" if there are none."""
    ratios = [a / b for a, b in zip(runs, base)]
    return statistics.median(ratios) if ratios else ""


def spread(runs: Sequence[float], base: Sequence[float]) -> str:
    """Returns the smallest and largest ratio over the turns that both have; "" if there are fewer than two."""
    ratios = [a / b for a, b in zip(runs, base)]
    return f"{min(ratios):.3f} to {max(ratios):.3f}" if len(ratios) > 1 else ""


def run_series(series: Series, turns: int, show: Callable[[Row], None], progress: "Progress") -> bool:
    """Measures all cases in turns; returns False if Ctrl-C cut it short.

    ``show`` gets each row as soon as its last turn is done; after Ctrl-C, rows of the turns so far.
    """
    runs: Runs = {case: [] for case in series.cases}
    shown = set[str]()

    def show_row(case: str) -> None:
        shown.add(case)
        progress.clear()
        show(series.row(case, runs))

    progress.begin(series, turns)
    try:
        with closing(series.measure(turns)) as measurements:
            for case, run in measurements:
                runs[case].append(run)
                progress.note(sum(map(len, runs.values())))
                if len(runs[case]) == turns:
                    show_row(case)
    except KeyboardInterrupt:
        for case in series.cases:
            if runs[case] and case not in shown:
                show_row(case)
        return False
    return True


class Progress:
    """Prints on stderr what is being measured and the time left: each case on a terminal, each turn in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def begin(self, series: Series, turns: int) -> None:
        """Prints what comes next, with an estimate."""
        self._series, self._turns, self._began = series, turns, time.monotonic()
        self._say(f"{series.in_words(turns)}, about {clock(turns * series.turn_s)} on 2 idle CPU cores")
        self._say_case(0)

    def note(self, done: int) -> None:
        """Counts a measurement; ``done``: their number so far."""
        num_cases = len(self._series.cases)
        if done % num_cases == 0:
            spent, turn = time.monotonic() - self._began, done // num_cases
            left = f", about {clock(spent / turn * (self._turns - turn))} left" if turn < self._turns else ""
            self.clear()
            self._say(f"  turn {turn} of {self._turns}: {clock(spent)}{left}")
        self._say_case(done)

    def clear(self) -> None:
        """Clears the line of the current case."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _say_case(self, done: int) -> None:
        cases = self._series.cases
        if self._terminal and done < self._turns * len(cases):
            text = f"  turn {done // len(cases) + 1} of {self._turns}: {cases[done % len(cases)]} ..."
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def stream_apart(
    bench: str, arguments: Sequence[str], ranks: int, threads: int, env: Mapping[str, str] = _NOTHING
) -> Generator[dict[str, Any], None, None]:
    """Runs ``python -m lab.benches.BENCH`` on new processes; yields each line of JSON as they print it.

    Closing the iterator ends the processes.

    - ``bench``: name of the module in this folder. It is started by name, not by file, so that no folder of
      ours comes first on the path
    - ``arguments``: its command line
    - ``ranks``: how many processes; the first one prints
    - ``threads``: threads of each
    - ``env``: variables to set in addition to those of this process
    """
    command = ["-m", f"lab.benches.{bench}", *arguments]
    starter = f"import sys; from seqpar.cluster.start_ranks import run_local; sys.exit(run_local({ranks}, {command!r}))"
    variables = {**os.environ, **lab_on_path(), "OMP_NUM_THREADS": str(threads), **env}
    with tempfile.TemporaryFile("w+") as errors:
        process = start_python(["-c", starter], variables, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            if process.wait():
                errors.seek(0)
                raise RuntimeError(f"{' '.join(command)} on {ranks} ranks failed:\n{errors.read()[-2000:]}")
        finally:
            end_process(process)  # which forwards the signal to its ranks


def measure_apart(bench: str, arguments: Sequence[str], ranks: int, threads: int) -> dict[str, Any]:
    """Returns the last line of JSON that new processes print; arguments as of ``stream_apart``."""
    *_, last = stream_apart(bench, arguments, ranks, threads)
    return last


class Table:
    """A Markdown table whose rows are printed, and appended to a file, as they come.

    - ``title``: what the table is about
    - ``path``: the file; None: it is printed only
    """

    def __init__(self, title: str, path: Path | None) -> None:
        self._title, self._path = title, path
        self._columns: list[str] = []
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Adds a row; the first one decides on the columns."""
        if not self._columns:
            self._columns = list(row)
            self._print(f"## {self._title}, {time.strftime('%Y-%m-%d')}", "", machine(), "")
            self._print(_line(self._columns), _line(["---"] * len(row)))
        assert list(row) == self._columns, (list(row), self._columns)
        self.rows.append(row)
        self._print(_line(row.values()))

    def close(self, remark: str = "") -> None:
        """Ends the table, with a remark if there is one."""
        if self._columns:
            self._print("", *([remark, ""] if remark else []))

    def _print(self, *lines: str) -> None:
        text = "\n".join(lines)
        print(text, flush=True)
        if self._path is not None:
            self._path.parent.mkdir(exist_ok=True)
            with open(self._path, "a") as file:
                file.write(f"{text}\n")


def machine() -> str:
    """Returns the command and the machine of this run, in one line."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"`{' '.join(['python', os.path.relpath(sys.argv[0]), *sys.argv[1:]])}` at {commit or 'no commit'}; torch "
        f"{torch.__version__}, python {platform.python_version()}, {os.cpu_count()} cores {platform.machine()}"
        f"{', ' + ', '.join(gpus) if gpus else ''}, load {os.getloadavg()[0]:.1f}"
    )


def _line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
