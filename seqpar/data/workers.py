"""Runs work on many items in processes; losing a process loses one item."""

import os
import traceback
from collections.abc import Callable, Generator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

from seqpar.data.errors import DataError
from seqpar.parallel.processes import start_worker

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[float, int], None]  # takes the number of items done (with fractions) and their total
ReportProgress = Callable[[float], None]  # takes the share of one item that is done


def no_progress(done: float, total: int) -> None:
    """Shows no progress."""


def no_item_progress(share: float) -> None:
    """Shows no progress within an item."""


class WorkerDied(Exception):
    """A process that ended without a result: it was killed, most often for lack of memory."""


class _Share(NamedTuple):
    """The share of its item that a process has done."""

    value: float


class WorkerCrash(Exception):
    """An unexpected exception in a process, with its traceback as text."""


def default_workers() -> int:
    """Returns the default number of workers; it is limited since each may hold several copies of a case."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, 8)


def map_in_processes(
    work: Callable[[Item, ReportProgress], Result],
    items: Sequence[Item],
    workers: int,
    beat: Callable[[dict[int, float]], None] = lambda shares: None,
) -> Generator[tuple[Item, Result | DataError | WorkerDied], None, None]:
    """Yields each item with its result or its error, in the order in which they finish.

    Each item has a process of its own, so that a killed process loses no other item.

    work: takes an item and a function that reports which share of it is done.
    workers: processes at a time; 0 works in this process.
    beat: called about once a second with the share that is done of each item in progress, by its number.
    """
    if workers == 0:
        for number, item in enumerate(items):
            yield item, _outcome(work, item, partial(_beat_one, beat, number))
            beat({})
        return
    waiting, running = list(reversed(list(enumerate(items)))), dict[Connection, tuple[Any, int, Item]]()
    shares: dict[int, float] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                number, item = waiting.pop()
                process, pipe = start_worker(_answer, (work, item))
                running[pipe] = (process, number, item)
            for ready in wait(list(running), timeout=1.0):
                assert isinstance(ready, Connection)
                process, number, item = running[ready]
                answer = _received(ready, process)
                if isinstance(answer, _Share):
                    shares[number] = answer.value
                    continue
                shares.pop(number, None)
                yield item, answer
                del running[ready]
            beat(shares)
    finally:
        for process, _, _ in running.values():
            process.kill()
            process.join()


def _beat_one(beat: Callable[[dict[int, float]], None], number: int, share: float) -> None:
    beat({number: share})


def _answer(pipe: Connection, work: Callable[[Item, ReportProgress], Any], item: Item) -> None:
    try:
        pipe.send(_outcome(work, item, lambda share: pipe.send(_Share(share))))
    except Exception:
        pipe.send(WorkerCrash(traceback.format_exc()))


def _outcome(
    work: Callable[[Item, ReportProgress], Result], item: Item, tell: ReportProgress
) -> Result | DataError | WorkerDied:
    try:
        return work(item, tell)
    except DataError as fault:
        return fault
    except MemoryError:
        return WorkerDied("there was not enough memory")


def _received(pipe: Connection, process: Any) -> Any:
    """Returns the result or progress that a process sent; raises RuntimeError with its traceback if it crashed."""
    try:
        answer = pipe.recv()
        if isinstance(answer, _Share):
            return answer
    except (EOFError, OSError):  # nothing, or half an answer
        process.join()
        answer = WorkerDied(f"its process was killed (exit code {process.exitcode})")
    pipe.close()
    process.join()
    if isinstance(answer, WorkerCrash):
        raise RuntimeError(f"a worker failed:\n{answer}")
    return answer
