"""Runs work on many items in processes: they never outlive their parent, and losing one loses one item."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from seqpar.data.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[int, int], None]  # is told how many items are done, and how many there are


def silent(done: int, total: int) -> None:
    """Shows no progress."""


class Lost(Exception):
    """A process that ended without a result: killed, most often for lack of memory."""


class Crash(Exception):
    """An unexpected exception in a process, with its traceback as text."""


def each(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    beat: Callable[[], None] = lambda: None,
) -> Generator[tuple[Item, Result | DataError | Lost], None, None]:
    """Yields each item with its result or its error, in the order in which they end.

    Each item has a process of its own, so that one that is killed takes no other along.

    workers: processes at a time; 0 works in this process.
    beat: called about once a second.
    """
    if workers == 0:
        for item in items:
            yield item, _outcome(work, item)
            beat()
        return
    context = multiprocessing.get_context("fork")
    waiting, running = list(reversed(items)), dict[Connection, tuple[Any, Item]]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_answer, args=(work, waiting[-1], theirs, os.getpid()))
                process.start()
                theirs.close()
                running[ours] = (process, waiting.pop())
            for ready in wait(list(running), timeout=1.0):
                assert isinstance(ready, Connection)
                yield running[ready][1], _received(ready, running[ready][0])
                del running[ready]
            beat()
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()


def die_with_parent(parent: int) -> None:
    """Makes this process end when its parent ends, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _answer(work: Callable[[Item], Any], item: Item, pipe: Connection, parent: int) -> None:
    die_with_parent(parent)
    try:
        pipe.send(_outcome(work, item))
    except Exception:
        pipe.send(Crash(traceback.format_exc()))


def _outcome(work: Callable[[Item], Result], item: Item) -> Result | DataError | Lost:
    try:
        return work(item)
    except DataError as fault:
        return fault
    except MemoryError:
        return Lost("there was not enough memory")


def _received(pipe: Connection, process: Any) -> Any:
    """Returns the result that a process sent; raises RuntimeError with its traceback if it crashed."""
    try:
        answer = pipe.recv()
    except (EOFError, OSError):  # nothing, or half an answer
        process.join()
        answer = Lost(f"its process was killed (exit code {process.exitcode})")
    pipe.close()
    process.join()
    if isinstance(answer, Crash):
        raise RuntimeError(f"a worker failed:\n{answer}")
    return answer
