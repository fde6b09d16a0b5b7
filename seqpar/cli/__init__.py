"""The programs. Importing any of them prepares its process, before torch is imported.

It sets how threads wait and how many there are, how a GPU's memory is allotted, which volumes AMD's library takes and
how pictures are drawn.
It opens standard streams that are closed. In a process that was started for a program it makes Ctrl-C one line, and
collects no garbage until the program runs: what imports make is kept, and searching it takes a fifth of the start.
"""

import gc
import importlib.util
import os
import runpy
import sys
from collections.abc import MutableMapping
from pathlib import Path

from seqpar.cluster.exit_codes import interrupt_quietly, leave_deleted_folder, open_streams
from seqpar.cluster.host_memory import cores_here
from seqpar.parallel.launcher import gpu_settings, read_launcher

WAIT, THREADS = "OMP_WAIT_POLICY", "OMP_NUM_THREADS"
CHOSEN = "SEQPAR_CHOSEN_THREADS"  # what was written into THREADS here: a program started by this one chooses again


def set_threads(env: MutableMapping[str, str], cores: int) -> None:
    """Sets the variables of OpenMP, but for those that the user has set.

    Waiting threads sleep, since spinning ones take the cores from those that they wait for next to a busy neighbour.
    There are as many as this rank's share of the cores.
    """
    env.setdefault(WAIT, "passive")
    if THREADS in env and env.get(CHOSEN) != env[THREADS]:
        return
    try:
        ranks = read_launcher(env).local_world
    except ValueError:  # which the program reports
        ranks = 1
    env[THREADS] = env[CHOSEN] = str(max(1, cores // max(1, ranks)))


def set_gpu(env: MutableMapping[str, str]) -> None:
    """Sets the variables that torch reads once, but for those that the user has set; does not import torch."""
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin:
        build = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
        env.update(gpu_settings(env, build["__version__"], build.get("hip") is not None))


def is_program(started: str) -> bool:
    """Returns whether a process whose first argument is ``started`` was started for a program of this folder."""
    name = Path(started).name
    return name == "-m" or name.startswith("seqpar-") or (Path(__file__).parent / name).is_file()


set_threads(os.environ, cores_here())
set_gpu(os.environ)
os.environ["MPLBACKEND"] = "agg"  # pictures are files here, and a notebook's choice, which is inherited, may be missing
open_streams()
if is_program(sys.argv[0]):
    leave_deleted_folder()
    interrupt_quietly()
    gc.disable()
