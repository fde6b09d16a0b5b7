"""Somebody's own script on several ranks: forked processes with the variables that torchrun sets."""

import os
import socket
import traceback
from multiprocessing.connection import wait
from pathlib import Path

from tests.support.ranks import FORK


def _run(rank: int, world: int, port: int, code: str, folder: Path) -> None:
    own = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.chdir(folder)
    status = 0
    try:
        exec(compile(code, "script.py", "exec"), {"__name__": "__main__"})
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        status = 1
    os._exit(status)


def run_script(world: int, code: str, folder: Path, timeout: float = 300) -> None:
    """Runs ``code`` in ``folder`` on ``world`` ranks, as torchrun does; raises with what a rank that fails raised."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ranks = [FORK.Process(target=_run, args=(rank, world, port, code, folder)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    try:
        running = {process.sentinel: process for process in ranks}
        while running:
            ended = wait(list(running), timeout)
            assert ended, f"{len(running)} of {world} ranks did not end within {timeout:.0f} s"
            codes = [running.pop(sentinel).exitcode for sentinel in ended]  # type: ignore[index]
            errors = "".join(path.read_text() for path in sorted(folder.glob("error-*.txt")))
            assert not any(codes), f"exit codes {codes}\n{errors}"
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
