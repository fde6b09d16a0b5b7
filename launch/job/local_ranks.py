"""Starts the ranks of a sequence group on this machine, for people who started one process."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

import torch

PARENT = "SEQPAR_PARENT"
_OURS = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "ROLE_", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_", "TORCH_NCCL_")


def run_local(count: int, command: Sequence[str]) -> int:
    """Returns the exit code of ``count`` ranks of ``command``: the first that is not 0 ends the others."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    port = _free_port()
    threads = max(1, (os.cpu_count() or 1) // count)
    env |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), PARENT: str(os.getpid())}
    env.setdefault("OMP_NUM_THREADS", str(threads))
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on once
        )
        for rank in range(count)
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, pass_on)
    return _wait(ranks)


def _wait(ranks: list[subprocess.Popen], grace_s: float = 25.0) -> int:
    """Returns the code that says most; once a rank failed, the others get time to leave, then are ended."""
    deadline = None
    while any(rank.poll() is None for rank in ranks):
        if deadline is None and any(rank.returncode for rank in ranks):
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            for rank in ranks:
                rank.kill()
        time.sleep(0.05)
    # 2, 3, 4, 5, 75 and signals say more than a peer's loss of contact.
    codes = sorted((rank.returncode for rank in ranks if rank.returncode), key=lambda code: (code == 1, -code))
    code = codes[0] if codes else 0
    return code if code >= 0 else 128 - code


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def die_with_parent() -> None:
    """Ends this rank when the process that started it is gone, however it went (Linux; elsewhere no promise)."""
    parent = os.environ.get(PARENT)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        os._exit(1)


def visible_devices() -> str:
    """Returns what this machine offers, in words."""
    count = torch.cuda.device_count()
    return f"{count} GPU{'s' if count > 1 else ''}" if count else f"{os.cpu_count()} CPU cores"
