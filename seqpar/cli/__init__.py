"""The programs. Importing any of them sets how threads wait and how many there are, before torch is imported."""

import os
from collections.abc import MutableMapping

from seqpar.cluster.host_memory import cores_here
from seqpar.parallel.launcher import read_launcher

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


set_threads(os.environ, cores_here())
