"""Measures speed and memory as ratios within one run: ``python launch/bench.py data step … [--write]``."""

import argparse
import importlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from seqpar.launch.job.exit_codes import run

# subject → modules that have `rows()`; imported only when asked for
SUBJECTS = {
    "attention": ("attention",),
    "encoder": ("encoder", "rank"),
    "memory": ("memory",),
    "data": ("data", "loader"),
    "plan": ("plan",),
    "predict": ("predict",),
    "step": ("step",),
}
LARGE = {"memory": ("large",)}  # half an hour and longer
RESULTS = Path(__file__).parent / "benches" / "results"


def act(arguments: Sequence[str]) -> int:
    """Returns 0 when all subjects were measured."""
    parser = argparse.ArgumentParser(prog="seqpar-bench", description=__doc__, allow_abbrev=False)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"of {', '.join(SUBJECTS)}; none: all")
    parser.add_argument("--large", action="store_true", help="the rows of memory that take half an hour, alone")
    parser.add_argument("--write", action="store_true", help=f"append to {RESULTS.name}/ beside this script")
    asked = parser.parse_args(arguments)
    unknown = [name for name in asked.subjects if name not in SUBJECTS]
    if unknown:
        raise ValueError(f"there is no bench of {unknown[0]}: choose of {', '.join(SUBJECTS)}")
    modules = LARGE if asked.large else SUBJECTS
    wanted = asked.subjects or list(modules)
    if not set(wanted) <= modules.keys():
        raise ValueError(f"--large has rows of {', '.join(LARGE)} alone: leave it out, or name only these")
    for subject in wanted:
        for module in modules[subject]:
            rows = importlib.import_module(f"seqpar.launch.benches.{module}").rows()
            text = f"## {subject} ({module}), {time.strftime('%Y-%m-%d')}\n\n{machine()}\n\n{table(rows)}\n"
            print(text, flush=True)
            if asked.write:
                RESULTS.mkdir(exist_ok=True)
                with open(RESULTS / f"{subject}.md", "a") as file:
                    file.write(text + "\n")
    return 0


def machine() -> str:
    """Returns what the figures were measured on, and by which command."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    load = os.getloadavg()[0]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"`{' '.join(['python', os.path.relpath(sys.argv[0]), *sys.argv[1:]])}` at {commit or 'no commit'}; torch "
        f"{torch.__version__}, python {platform.python_version()}, {os.cpu_count()} cores {platform.machine()}"
        f"{', ' + ', '.join(gpus) if gpus else ''}, load {load:.1f} at the end"
    )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns rows as a Markdown table; columns in the order in which they first appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name, "")) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    sys.exit(run(act))


if __name__ == "__main__":
    main()
