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

# subject → modules of benches/ that have rows(), imported only when they are measured
SUBJECTS = {
    "attention": ("attention",),
    "encoder": ("encoder", "rank"),
    "memory": ("memory",),
    "data": ("data", "loader"),
    "plan": ("plan",),
    "predict": ("predict",),
    "step": ("step",),
}
LARGE = {"memory": ("memory",)}  # these have large_rows() too
RESULTS = Path(__file__).parent / "benches" / "results"


def act(arguments: Sequence[str]) -> int:
    """Measures the subjects that the command line names and returns 0."""
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.subjects if name not in SUBJECTS]
    if unknown:
        raise ValueError(f"there is no bench of {unknown[0]}: choose from {', '.join(SUBJECTS)}")
    modules, function = (LARGE, "large_rows") if options.large else (SUBJECTS, "rows")
    subjects = options.subjects or list(modules)
    if not set(subjects) <= modules.keys():
        raise ValueError(f"--large has rows of {', '.join(LARGE)} alone: leave it out, or name only these")
    for subject in subjects:
        for module in modules[subject]:
            rows = getattr(importlib.import_module(f"seqpar.launch.benches.{module}"), function)()
            title = f"{subject} ({module}{', large' if options.large else ''}), {time.strftime('%Y-%m-%d')}"
            text = f"## {title}\n\n{machine()}\n\n{table(rows)}\n"
            print(text, flush=True)
            if options.write:
                RESULTS.mkdir(exist_ok=True)
                with open(RESULTS / f"{subject}.md", "a") as file:
                    file.write(text + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="seqpar-bench", description=__doc__, allow_abbrev=False)
    subjects = f"what to measure: {', '.join(SUBJECTS)} (default: all)"
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=subjects)
    large = "measure the large cases instead, half an hour or more each; only memory has some"
    parser.add_argument("--large", action="store_true", help=large)
    write = "append each table to benches/results/SUBJECT.md beside this script, as well as printing it"
    parser.add_argument("--write", action="store_true", help=write)
    return parser


def machine() -> str:
    """Returns the command and the machine of this run, in one line."""
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
    """Returns rows as a Markdown table, with columns in the order of their first appearance."""
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
