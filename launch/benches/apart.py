"""Runs one measurement in new processes: what a process did before changes its memory and its times."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def measure_apart(bench: str, arguments: Sequence[str], ranks: int, threads: int) -> dict[str, Any]:
    """Runs ``python -m seqpar.launch.benches.BENCH`` on new processes and returns the JSON that it prints last.

    Args:
        bench: name of the module in this folder. It is started by its name, not by its file, so that no folder of
            ours comes first on the path.
        arguments: its command line.
        ranks: how many processes; the first one prints.
        threads: threads of each.
    """
    command = ["-m", f"seqpar.launch.benches.{bench}", *arguments]
    starter = (
        f"import sys; from seqpar.launch.job.local_ranks import run_local; sys.exit(run_local({ranks}, {command!r}))"
    )
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} on {ranks} ranks failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
