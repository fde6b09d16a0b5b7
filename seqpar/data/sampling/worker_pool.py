"""Runs tasks ahead of time in processes; they never outlive this one, and a killed one is reported as a fault.

Results are in shared memory, not in pipes, so that workers can prepare ahead while nobody reads.
"""

import mmap
import multiprocessing
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from seqpar.data.errors import DataError
from seqpar.parallel.processes import start_worker

Task = TypeVar("Task")
Consumed = TypeVar("Consumed", contravariant=True)


class Work(Protocol[Consumed]):
    """What workers do: writes the result of a task into ``slot`` as bytes."""

    def __call__(self, task: Consumed, slot: Tensor) -> None: ...
    def describe(self, task: Consumed) -> str: ...


class TaskFailure(NamedTuple):
    """Why a task failed, as text that processes can send each other."""

    kind: str  # data, memory, crash or late
    path: str
    text: str

    @classmethod
    def of(cls, error: Exception, what: str) -> "TaskFailure":
        """Returns the fault of an exception."""
        if isinstance(error, DataError):
            return cls("data", error.path, error.problem)
        if isinstance(error, MemoryError):
            return cls("memory", "", f"no memory left for {what}; {_MEMORY}")
        return cls("crash", "", f"{what} failed:\n{''.join(traceback.format_exception(error))}")

    @classmethod
    def of_exit(cls, code: int | None, what: str) -> "TaskFailure":
        """Returns the fault of a worker process that ended with ``code``."""
        if code == -signal.SIGKILL:
            return cls("memory", "", f"a worker was killed at {what}, probably for lack of memory; {_MEMORY}")
        if code == -signal.SIGBUS:
            problem = "its files are too short or unreadable (SIGBUS); run prepare with --check on the cache"
            return cls("data", what, problem)
        return cls("crash", "", f"a worker ended with exit code {code} at {what}")

    @classmethod
    def of_wait(cls, pid: int, seconds: float, what: str) -> "TaskFailure":
        """Returns the fault of a worker process that has not answered for ``seconds``."""
        why = "was stopped by a signal" if _is_stopped(pid) else "hangs, or its disk does not answer"
        return cls("late", "", f"worker {pid} {why}: it has not finished {what} within {seconds:g} s")

    def error(self, where: str) -> Exception:
        """Returns the fault as an exception; it names ``where`` unless the data is at fault."""
        if self.kind == "data":
            return DataError(self.path, self.text)
        kind = {"memory": MemoryError, "late": TimeoutError}.get(self.kind, RuntimeError)
        return kind(f"{where}: {self.text}")


def _is_stopped(pid: int) -> bool:
    """Returns whether a signal holds a process; False where the system does not tell."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


LONGEST_S = 2e6  # seconds that poll can wait: it counts milliseconds in 32 bits
_MEMORY = "use fewer --workers, or ask for more memory"


class Slots:
    """Shared memory of ``count`` slots of ``size`` bytes, freed when the last process ends."""

    def __init__(self, count: int, size: int, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("seqpar-tiles") if hasattr(os, "memfd_create") else -1  # -1: only forks can share it
            if fd >= 0:
                os.ftruncate(fd, count * size)
        self.count, self.size, self._fd = count, size, fd
        self._bytes = torch.frombuffer(mmap.mmap(fd, count * size), dtype=torch.uint8).view(count, size)
        if fd >= 0:
            Finalize(self, os.close, (fd,))

    def __getitem__(self, number: int) -> Tensor:
        """Returns the bytes of the slot that result ``number`` uses."""
        return self._bytes[number % self.count]

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (reduction.DupFd(self._fd), self.count, self.size)


def _attach(fd: Any, count: int, size: int) -> Slots:
    return Slots(count, size, fd.detach())


class Pool(Generic[Task]):
    """Yields the results of tasks in order, prepared ahead by worker processes.

    Worker k % workers does task k and writes it into slot k % slots, so that nothing depends on the workers' speed.

    size: bytes of a result.
    workers: processes; 0 works in this one.
    depth: results that each worker prepares ahead.
    method: how processes start, as in multiprocessing.
    """

    def __init__(
        self, work: Work[Task], tasks: Iterator[Task], size: int, workers: int, depth: int, method: str
    ) -> None:
        self._work, self._tasks, self._taken = work, tasks, 0
        self._slots = Slots(max(1, workers * depth), size)
        self._sent: dict[int, Task] = {}
        multiprocessing.set_forkserver_preload([__name__])  # imports torch once, not in each worker
        self._staff = [_Worker(*start_worker(_serve, (work, self._slots), method)) for _ in range(workers)]
        self._stop = Finalize(self, _stop, (list(self._staff),), exitpriority=10)  # before daemons are terminated
        for number in range(self._slots.count if workers else 0):
            self._send(number)

    def take(self, limit_s: float) -> Tensor | TaskFailure:
        """Returns the next result as bytes that stay valid until ``release``, or why the task failed.

        A worker that takes longer than ``limit_s`` has failed.
        """
        slot = self._slots[self._taken]
        if not self._staff:
            return run_task(self._work, next(self._tasks), slot) or slot
        worker = self._staff[self._taken % len(self._staff)]
        return worker.answer(self._work.describe(self._sent[self._taken]), limit_s) or slot

    def release(self) -> None:
        """Frees the slot of the last result for the next task."""
        if self._staff:
            del self._sent[self._taken]
            self._send(self._taken + self._slots.count)
        self._taken += 1

    def close(self) -> None:
        """Ends the workers."""
        self._stop()
        self._staff.clear()

    @property
    def worker_ids(self) -> tuple[int, ...]:
        """Returns the workers' process ids."""
        return tuple(worker.process.pid or 0 for worker in self._staff)

    def _send(self, number: int) -> None:
        task = next(self._tasks, None)
        if task is not None:
            self._sent[number] = task
            self._staff[number % len(self._staff)].ask(number, task)


@dataclass(frozen=True)
class _Worker:
    """A process and this end of its pipe."""

    process: BaseProcess
    pipe: Connection

    def ask(self, number: int, task: object) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died, which is reported when its result is due
            self.pipe.send((number, task))

    def answer(self, what: str, limit_s: float) -> TaskFailure | None:
        limit_s = min(limit_s, LONGEST_S)
        try:
            if not self.pipe.poll(limit_s):
                return TaskFailure.of_wait(self.process.pid or 0, limit_s, what)
            fault: TaskFailure | None = self.pipe.recv()
            return fault
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return TaskFailure.of_exit(self.process.exitcode, what)


def _stop(staff: list[_Worker]) -> None:
    for worker in staff:
        worker.process.kill()
    for worker in staff:
        worker.process.join(5)
        worker.pipe.close()


def run_task(work: Work[Task], task: Task, slot: Tensor) -> TaskFailure | None:
    """Runs a task; returns why it failed, or None if its result is in ``slot``."""
    try:
        work(task, slot)
    except Exception as error:
        return TaskFailure.of(error, work.describe(task))
    return None


def _serve(pipe: Connection, work: Work[Any], slots: Slots) -> None:
    """Runs the tasks that arrive until the other process is gone."""
    torch.set_num_threads(1)
    with threadpool_limits(1):
        while True:
            try:
                number, task = pipe.recv()
            except (EOFError, ConnectionResetError):
                return
            pipe.send(run_task(work, task, slots[number]))
