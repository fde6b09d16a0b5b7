"""Starts the ranks of a sequence group on this machine, where only one process was started."""

import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

from seqpar.cluster.exit_codes import LAST_WORDS
from seqpar.parallel.launcher import Launcher
from seqpar.terminal import TYPED, next_command, program, typed_script
from seqpar.text import quantity

PARENT = "SEQPAR_PARENT"  # variable with the id of the process that started these ranks
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # these ask a process to leave
PARENT_OF_FOLD = "SEQPAR_PARENT_OF_FOLD"  # of the process that trains fold after fold
_LAUNCHER_VARIABLES = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "ROLE_",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
)


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
    started = f"{flags} needs {count} ranks and 1 was started: starting {count} here"
    print(f"{started} ({_devices()}); the same as: {line}", flush=True)
    return run_local(count, ["-m", f"seqpar.cli.{act}", *arguments])


def describe_launcher(launcher: Launcher) -> str:
    """Returns in words who started the ranks."""
    if launcher.by == "variables":
        return "started here" if PARENT in os.environ else "started with RANK and WORLD_SIZE"
    if launcher.by == "alone":  # a dry run may be of more ranks
        return "started alone" if launcher.world == 1 else "to be started here"
    return f"started by {launcher.by}"


def run_local(count: int, command: Sequence[str], signals: list[int] | None = None) -> int:
    """Returns the exit code of ``count`` ranks of ``command``; the first one that fails ends the others.

    - ``signals``: those that came to this process are here, and those that come meanwhile are added
    """
    inherited = (name for name in os.environ if name == LAST_WORDS or not name.startswith(_LAUNCHER_VARIABLES))
    env = {name: os.environ[name] for name in inherited}
    words = tempfile.TemporaryDirectory(prefix="seqpar-", ignore_cleanup_errors=True)
    env.setdefault(LAST_WORDS, f"{words.name}/error.json")  # so that one of them says what all have met
    env |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(_free_port()), PARENT: str(os.getpid()), TYPED: typed_script()}
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on once
        )
        for rank in range(count)
    ]
    with words, forward_signals(ranks, [] if signals is None else signals):
        return _wait(ranks)


@contextmanager
def forward_signals(processes: "Sequence[subprocess.Popen[bytes]]", signals: list[int]) -> Iterator[None]:
    """Within the block, signals that ask this process to leave ask those that it started, and are added to ``signals``.

    One that is there already came while the processes were made.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        if signals:
            for process in processes:
                process.send_signal(signals[-1])
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[subprocess.Popen], grace_s: float = 25.0) -> int:
    """Returns the most telling exit code; once a rank failed, the others have ``grace_s`` to leave."""
    deadline = None
    while any(rank.poll() is None for rank in ranks):
        if deadline is None and any(rank.returncode for rank in ranks):
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    code = most_informative_code([rank.returncode for rank in ranks])
    return code if code >= 0 else 128 - code


def most_informative_code(codes: Sequence[int]) -> int:
    """Returns the exit code of all: 2, 3, 4, 5, 75 and signals say more than 1, of a rank that lost its peers."""
    failed = sorted((code for code in codes if code), key=lambda code: (code == 1, -code))
    return failed[0] if failed else 0


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def die_with_parent() -> None:
    """Lets the kernel kill this rank when the process that started it ends, for whatever reason (Linux only)."""
    parent = os.environ.get(PARENT) or os.environ.get(PARENT_OF_FOLD)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        os._exit(1)


def _devices() -> str:
    count = torch.cuda.device_count()
    return quantity(count, "GPU") if count else quantity(os.cpu_count() or 1, "CPU core")
