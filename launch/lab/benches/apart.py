"""Runs measurements in new processes: what a process did before changes its memory and its times."""

import json
import os
import subprocess
import tempfile
from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lab.benches.series import lab_on_path
from seqpar.parallel.processes import end_process, start_python

_NOTHING: Mapping[str, str] = MappingProxyType({})


def stream_apart(
    bench: str, arguments: Sequence[str], ranks: int, threads: int, env: Mapping[str, str] = _NOTHING
) -> Generator[dict[str, Any], None, None]:
    """Runs ``python -m lab.benches.BENCH`` on new processes; yields each line of JSON as they print it.

    Closing the iterator ends the processes.

    - ``bench``: name of the module in this folder. It is started by its name, not by its file, so that no folder of
      ours comes first on the path
    - ``arguments``: its command line
    - ``ranks``: how many processes; the first one prints
    - ``threads``: threads of each
    - ``env``: variables to set beside those of this process
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
