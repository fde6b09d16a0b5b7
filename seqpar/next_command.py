"""The command that usually comes next, as a person here would type it."""

import os
import shlex
import sys

TYPED = "SEQPAR_TYPED"  # variable of processes that another one started: the script of which a person started that one


def typed_script() -> str:
    """Returns the path of the script that a person started: this process's, or that of the one that started it."""
    return os.environ.get(TYPED) or sys.argv[0]


def typed_command() -> list[str]:
    """Returns this process's command line, with the script that a person started."""
    return [typed_script(), *sys.argv[1:]]


def program(act: str) -> list[str]:
    """Returns what to write after ``python``, ``torchrun`` or ``srun python`` to start an act, as a person here would.

    That is its file, or its module if this process was started by a console script.
    """
    folder, started = os.path.split(typed_script())
    if started.startswith("seqpar-"):
        return ["-m", f"seqpar.cli.{act}"]
    neighbour = os.path.join(folder, f"{act}.py")
    return [neighbour if os.path.exists(neighbour) else f"launch/{act}.py"]


def next_command(act: str, *arguments: object, ranks: int = 1) -> str:
    """Returns the line that starts an act: a console script where this one was started by one, else its file.

    - ``ranks``: how many torchrun starts; 1: the act itself
    """
    words = program(act)
    if ranks > 1:
        words = ["torchrun", "--nproc-per-node", str(ranks), *words]
    else:
        words = ["python", *words] if words[0] != "-m" else [f"seqpar-{act}"]
    return shlex.join([*words, *map(str, arguments)])
