"""A table of a bench, printed and written row after row."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lab.benches.series import Row


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
