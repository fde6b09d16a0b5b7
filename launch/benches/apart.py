"""One measurement of a bench in processes of its own: what a process did before changes its memory and its times."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def measure_apart(script: str, arguments: Sequence[str], ranks: int, threads: int) -> dict[str, Any]:
    """Returns what the first of ``ranks`` new processes of a script prints last, as JSON."""
    command = [os.path.abspath(script), *arguments]
    starter = (
        f"import sys; from seqpar.launch.job.local_ranks import run_local; sys.exit(run_local({ranks}, {command!r}))"
    )
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} on {ranks} ranks failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))
