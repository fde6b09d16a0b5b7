"""Starts the ranks of a sequence group on this machine, where only one process was started."""

import os
import shlex
import signal
import tempfile
from collections.abc import Sequence

import torch

from seqpar.cluster.exit_codes import LAST_WORDS, code_of_processes, report
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.processes import (
    PARENT,
    allow_open_files,
    environment_of_ranks,
    forward_signals,
    free_port,
    rank_variables,
    signal_name,
    start_python,
    wait_for_all,
)
from seqpar.terminal import next_command, program, python_module, typed_variable
from seqpar.text import quantity


def start_missing_ranks(seqpar: int, act: str, arguments: Sequence[str], launcher: Launcher, pipe: int = 1) -> int:
    """Returns the exit code of ``seqpar`` x ``pipe`` ranks of ``act``, started by one process outside of any job.

    Under a launcher it raises ``ValueError`` with the command that starts enough ranks.
    """
    count, flags = seqpar * pipe, f"--seqpar {seqpar}" if pipe == 1 else f"--pipe {pipe} --seqpar {seqpar}"
    line = next_command(act, *arguments, ranks=count)
    lacking = f"{flags} needs {count} ranks, and {launcher.world} came"
    if "SLURM_JOB_ID" in os.environ:
        raise ValueError(
            f"{lacking}; in this Slurm job use: srun -n {count} python {shlex.join([*program(act), *arguments])}"
        )
    if launcher.world > 1:
        raise ValueError(f"{lacking}; use: {line}")
    _refuse_too_many(count)
    allow_open_files(count)
    print(f"{flags}: starting {count} ranks (processes) here, on {_devices()}; the same as: {line}", flush=True)
    return run_local(count, [*python_module(act), *arguments])


def describe_launcher(launcher: Launcher) -> str:
    """Returns in words who started the ranks."""
    if launcher.by == "variables":
        return "started here" if PARENT in os.environ else "started with RANK and WORLD_SIZE"
    if launcher.by == "alone":  # a dry run may be of more ranks
        return "started alone" if launcher.world == 1 else "to be started here"
    return f"started by {launcher.by}"


def run_local(count: int, command: Sequence[str], signals: list[int] | None = None) -> int:
    """Runs ``count`` ranks of ``command`` here and returns their exit code; the first one that fails ends the others.

    signals: those that came to this process so far; those that come meanwhile are added.
    """
    _refuse_too_many(count)
    signals = [] if signals is None else signals

    def tell_loss(rank: int, killed_by: int) -> None:
        if killed_by not in signals:
            why = ", maybe for lack of memory" if killed_by == signal.SIGKILL else ""
            report(f"rank {rank} was killed by {signal_name(killed_by)}{why}; the other ranks end too")

    env = environment_of_ranks(keep=(LAST_WORDS,))
    words = tempfile.TemporaryDirectory(prefix="seqpar-", ignore_cleanup_errors=True)
    env.setdefault(LAST_WORDS, f"{words.name}/error.json")  # so that one of them says what all have met
    env |= {PARENT: str(os.getpid()), **typed_variable(command)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    port = free_port()
    places = [rank_variables(rank, count, rank, count, "127.0.0.1", port) for rank in range(count)]
    ranks = [start_python(command, {**env, **place}) for place in places]
    with words, forward_signals(ranks, signals):
        return code_of_processes(wait_for_all(ranks, tell_loss=tell_loss), signals)


def _refuse_too_many(count: int) -> None:
    """Raises ValueError for more processes than any machine of ours has devices."""
    if count > (most := max(64, os.cpu_count() or 1)):
        raise ValueError(
            f"{count} ranks are needed, and at most {most} are started here: start them with torchrun or srun"
        )


def _devices() -> str:
    count = torch.cuda.device_count()
    return quantity(count, "GPU") if count else quantity(os.cpu_count() or 1, "CPU core")
