"""A function on n forked gloo ranks; what "equal" means here."""

import faulthandler
import functools
import io
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from seqpar.parallel.collectives import all_reduce
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.mesh import Group, Mesh
from seqpar.parallel.rendezvous import join

torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with Ctrl-C ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one started by nohup with that ignored, which programs inherit
FORK = multiprocessing.get_context("fork")


class RanksFailed(AssertionError):
    """A rank raised, died or hung; the message names it."""


def _child(
    rank: int, world: int, seqpar: int, pipe: int, folder: str, answer: Connection, work: Callable[..., Any], args: Any
):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()  # some are ended on purpose
    try:
        store = dist.FileStore(f"{folder}/store", world) if world > 1 else None
        launcher = Launcher("test", rank, world, rank, world)
        mesh = join(launcher, store, seqpar, torch.device("cpu"), timeout_s=60, pipe=pipe)
        result = work(mesh, *args)
        mesh.stop()
        letter = io.BytesIO()
        torch.save(result, letter)
        answer.send((True, letter.getvalue()))
    except BaseException:
        answer.send((False, traceback.format_exc()))
    os._exit(0)


def run_ranks(
    world: int, work: Callable[..., Any], *args: Any, seqpar: int | None = None, timeout: float = 60, pipe: int = 1
) -> list:
    """Returns ``work(mesh, *args)`` of each rank; the first failure ends all, a hang is killed and named."""
    with started_ranks(world, work, *args, seqpar=seqpar, timeout=timeout, pipe=pipe) as results:
        return results()


@contextmanager
def started_ranks(
    world: int, work: Callable[..., Any], *args: Any, seqpar: int | None = None, timeout: float = 60, pipe: int = 1
) -> Iterator[Callable[[], list]]:
    """Starts ``work`` on each rank and yields what waits for the results, so that several may run side by side."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORK.Pipe(duplex=False) for _ in range(world)]
        children = [  # no daemons: those may not start workers
            FORK.Process(target=_child, args=(r, world, seqpar or world // pipe, pipe, folder, pipes[r][1], work, args))
            for r in range(world)
        ]
        for child in children:
            child.start()
        for _, sender in pipes:
            sender.close()
        try:
            deadline = time.monotonic() + timeout
            yield lambda: _collect(world, [reader for reader, _ in pipes], deadline)
        finally:
            for child in children:
                child.kill()
                child.join()


def _collect(world: int, readers: list[Connection], deadline: float) -> list:
    results: dict[int, Any] = {}
    while len(results) < world:
        pending = [reader for rank, reader in enumerate(readers) if rank not in results]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = ", ".join(str(rank) for rank in range(world) if rank not in results)
            raise RanksFailed(f"ranks that did not end in time: {missing} of {world}")
        for reader in ready:
            rank = readers.index(reader)  # type: ignore[arg-type]
            try:
                fine, letter = reader.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RanksFailed(f"rank {rank} of {world} died without a word") from None
            if not fine:
                raise RanksFailed(f"rank {rank} of {world} raised:\n{letter}")
            results[rank] = torch.load(io.BytesIO(letter), weights_only=False)
    return [results[rank] for rank in range(world)]


def once_per_world(*checks: Callable[[Mesh], Any]) -> Callable[[int], list[dict[str, Any]]]:
    """Returns a function from a number of ranks to what each rank's checks return there, by their names.

    All of them run in one start: tests that show one fact each may look up their own.
    """

    def run(mesh: Mesh) -> dict[str, Any]:
        return {check.__name__: check(mesh) for check in checks}

    return functools.cache(lambda world: run_ranks(world, run))


def summed(tensors: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """Returns the sums over a group's ranks of tensors of one type, by one message: of many small ones each is dear."""
    whole = all_reduce(torch.cat([tensor.flatten() for tensor in tensors]), group)
    return [piece.view(t.shape) for piece, t in zip(whole.split([t.numel() for t in tensors]), tensors)]


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns max |a - b| / max |b|, the meaning of "equal" here."""
    assert a.shape == b.shape, (a.shape, b.shape)
    a, b = a.detach(), b.detach()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-300)) if b.numel() else 0.0


GOLDEN = Path(__file__).parents[1] / "golden"


def alone_mesh() -> Mesh:
    """Returns the mesh of one process by itself."""
    return join(Launcher("test"), None, 1, torch.device("cpu"))
