"""Starts other processes: passes signals on, ends them with their parent, and picks the exit code that tells most.

Needs no torch: workers of Ray import it.
"""

import ctypes
import errno
import math
import multiprocessing
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
Handler = Callable[[int, FrameType | None], object]
PARENT = "SEQPAR_PARENT"  # variable with the id of the process that started these ranks
PARENT_OF_FOLD = "SEQPAR_PARENT_OF_FOLD"  # of the process that trains fold after fold
LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # these ask a process to leave
STOP_FILE = "stop"  # in the folder of a run or a sweep: it saves and ends, resumable
# A scheduler warns every process of a job; whether work goes on is for the parent of workers to decide.
_FOR_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# by these, torchrun, Slurm and MPI tell a process which rank it is
_RANK_VARIABLES = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "SLURM_STEP",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "OMPI_",
    "PMI_",
    "PALS_",
)
_PR_SET_PDEATHSIG = 1


def start_process(command: Sequence[str], env: Mapping[str, str] | None = None, **streams: Any) -> subprocess.Popen:
    """Starts a command in a session of its own, so that Ctrl-C reaches this process alone, which passes it on.

    env: its environment; None: that of this process.
    streams: ``stdin``, ``stdout``, ``stderr`` and ``text``, as in ``subprocess.Popen``.
    """
    return subprocess.Popen(command, env=env, start_new_session=True, **streams)


def start_python(arguments: Sequence[str], env: Mapping[str, str] | None = None, **streams: Any) -> subprocess.Popen:
    """Starts this Python; see ``start_process``."""
    return start_process([sys.executable, *arguments], env, **streams)


def allow_open_files(ranks: int) -> None:
    """Lets this process and those that it starts open as many files and sockets as each of ``ranks`` ranks needs.

    Raises OSError if it may not: gloo would abort the process.
    """
    needed, (allowed, most) = 64 + 4 * ranks, resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (allowed, most) and most < needed:
        raise OSError(errno.EMFILE, f"too many open files for {ranks} ranks, each of which needs {needed}")
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def environment_of_ranks(keep: Sequence[str] = ()) -> dict[str, str]:
    """Returns this process's environment without what a launcher told it about its own rank, but with ``keep``."""
    return {name: os.environ[name] for name in os.environ if name in keep or not name.startswith(_RANK_VARIABLES)}


def rank_variables(rank: int, world: int, local_rank: int, local_world: int, address: str, port: int) -> dict[str, str]:
    """Returns the variables that tell a rank its place, as torchrun sets them."""
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
    return {**{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a port of this machine that nobody listens to."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


def handle_leave_signals(handler: Handler) -> dict[int, Any]:
    """Has ``handler`` called for signals that ask this process to leave; returns the handlers before.

    SIGHUP stays ignored where it is, as ``nohup`` starts a program.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = (number for number in LEAVE_SIGNALS if not (number == signal.SIGHUP and is_ignored))
    return {number: signal.signal(number, handler) for number in handled}


@contextmanager
def forward_signals(processes: Sequence[subprocess.Popen], signals: list[int]) -> Iterator[None]:
    """Within the block, forwards signals that ask this process to leave, and appends them to ``signals``.

    If ``signals`` is not empty, one came while the processes were being started: it is forwarded at once.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = handle_leave_signals(forward)
    try:
        if signals:
            for process in processes:
                process.send_signal(signals[-1])
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_all(
    processes: Sequence[subprocess.Popen],
    grace_s: float = 25.0,
    tell_loss: Callable[[int, int], object] = lambda number, killed_by: None,
) -> int:
    """Returns the code that tells most, -n for signal n; once a process has failed, others have ``grace_s`` to leave.

    tell_loss: called at once if a signal kills a process that was not asked to leave: its number, and the signal
    """
    deadline, is_told = math.inf, False
    while True:
        codes = [process.poll() for process in processes]
        killed = [(number, -code) for number, code in enumerate(codes) if code is not None and code < 0]
        if killed and not is_told:
            tell_loss(*killed[0])
            is_told = True
        if None not in codes:
            return most_informative_code([process.returncode for process in processes])
        if any(codes):
            deadline = min(deadline, time.monotonic() + grace_s)
        if time.monotonic() > deadline:
            is_told = True
            for process in processes:
                process.kill()
        time.sleep(0.05)


def end_process(process: subprocess.Popen, grace_s: float = 30.0) -> None:
    """Asks a process to leave, and kills it if it is still there after ``grace_s``."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def most_informative_code(codes: Sequence[int]) -> int:
    """Returns one exit code for all: 2 to 6, 75 and signals tell more than 1, that of a rank that lost its peers."""
    failed = sorted((code for code in codes if code), key=lambda code: (code == 1, -code))
    return failed[0] if failed else 0


def shell_code(code: int) -> int:
    """Returns the exit code as a shell reports it: 128 + n for a process that signal n killed."""
    return code if code >= 0 else 128 - code


def signal_name(number: int) -> str:
    """Returns a signal's name, such as SIGKILL, or its number if it has none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def die_with_parent(parent: int | None = None) -> None:
    """Ends this process as soon as its parent ends, for whatever reason.

    The ranks of a torchrun that is killed are asked to leave, so that they save: nobody else ends them.

    parent: its process id; None: the one that the parent put into the environment, if it did.
    """
    if parent is None:
        started_by = os.environ.get(PARENT) or os.environ.get(PARENT_OF_FOLD)
        if started_by is None and "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if started_by is None:
            return
        parent = int(started_by)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_exit_without, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _exit_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


@contextmanager
def signals_held() -> Iterator[dict[int, Any]]:
    """Lets signals to this process wait for the end of the block, in which it forks; yields their handlers.

    Python drops an exception, such as that of Ctrl-C, which a handler raises within a callback of a fork. To block
    signals is not enough, as the kernel gives them to any thread that does not.
    """
    came, handlers = list[int](), dict[int, Any]()

    def deliver() -> None:
        for number in came:
            handlers[number](number, None)

    with ExitStack() as stack:
        stack.callback(deliver)  # last of all
        is_main = threading.current_thread() is threading.main_thread()  # no other runs handlers, or may set them
        for number in _FOR_PARENT if is_main else ():
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                stack.callback(signal.signal, number, handler)
                signal.signal(number, lambda number, frame: came.append(number))
        yield handlers


def start_worker(
    serve: Callable[..., object], arguments: Sequence[Any] = (), method: str = "fork"
) -> tuple[BaseProcess, Connection]:
    """Calls ``serve(pipe, *arguments)`` in a new process; returns the process and the other end of the pipe.

    The worker ignores signals that ask it to leave, and ends with this process.

    method: how the process starts, as in ``multiprocessing``.
    """
    context: Any = multiprocessing.get_context(method)
    pipe, theirs = context.Pipe()
    parent = os.getpid() if method == "fork" else None
    # A fork inherits the handlers of this process, which must not run there: signals wait until it ignores them.
    process: BaseProcess = context.Process(target=_serve, args=(serve, theirs, arguments, parent), daemon=True)
    try:
        with signals_held():
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_PARENT)
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
    except BaseException:  # of a signal: nobody else knows of the process yet
        _kill(process)
        raise
    theirs.close()
    return process, pipe


def _serve(serve: Callable[..., object], pipe: Connection, arguments: Sequence[Any], parent: int | None) -> None:
    if parent is None:  # a server started this process, which is no child of the one that it works for
        threading.Thread(target=_exit_when_closed, args=(pipe.fileno(),), daemon=True).start()
        _ignore_signals()
    else:
        become_worker(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_PARENT)
    serve(pipe, *arguments)


def call_in_fork(work: Callable[..., Any], *of: Any, limit_s: float = math.inf) -> Any:
    """Returns what ``work`` returns, called in a fork of this process, which ends with this one.

    Raises its ``ValueError``; ``TimeoutError`` after ``limit_s``; ``ChildProcessError`` if the fork ends without a
    result.
    """
    context = multiprocessing.get_context("fork")
    results, sending = context.Pipe(duplex=False)
    handlers = dict[int, Any]()  # for the fork, which begins with those of the block
    process = context.Process(target=_answer, args=(sending, os.getpid(), handlers, work, of))
    try:
        with signals_held() as held:
            handlers.update(held)
            process.start()
        sending.close()
        if not results.poll(None if math.isinf(limit_s) else max(0.0, limit_s)):
            raise TimeoutError
        answer = results.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise ChildProcessError(f"its process {how} without a result") from None
    finally:
        _kill(process)
    if isinstance(answer, ValueError):
        raise answer
    return answer


def _kill(process: BaseProcess) -> None:
    if process.pid is not None:  # it was started
        process.kill()
        process.join()


def _answer(
    results: Connection, parent: int, handlers: Mapping[int, Any], work: Callable[..., Any], of: Sequence[Any]
) -> None:
    die_with_parent(parent)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        answer = work(*of)
    except ValueError as error:
        answer = error
    results.send(answer)


def calls_in_forks(
    work: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Generator[Future[Result], None, None]:
    """Yields the finished call of ``work`` with each item, in order, by forks of this process that end with it.

    If a process or thread cannot be started, those that were are killed: this process would wait for them at its end.
    """
    before, threads, failed = {*multiprocessing.active_children()}, {*threading.enumerate()}, False
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), become_worker, (os.getpid(),))
    try:
        with signals_held():
            futures = [pool.submit(work, item) for item in items]
        for future in futures:
            while not wait([future], timeout=5).done:
                if {*threading.enumerate()} <= threads:  # the pool's thread could start none itself, and has ended
                    raise RuntimeError("can't start new thread")
            yield future
    except (RuntimeError, OSError):
        failed = True
        for process in {*multiprocessing.active_children()} - before:
            process.kill()
        raise
    finally:
        with signals_held():  # one that broke this off would leave workers that this process waits for at its end
            pool.shutdown(wait=not failed, cancel_futures=True)


def become_worker(parent: int) -> None:
    """Makes this process ignore signals and end with its parent; also for the initializer of a pool of processes."""
    _ignore_signals()
    die_with_parent(parent)


def _ignore_signals() -> None:
    for number in _FOR_PARENT:
        signal.signal(number, signal.SIG_IGN)


def _exit_when_closed(pipe: int) -> None:
    """Ends this process once nobody holds the other end of the pipe, even in the middle of a task."""
    poller = select.poll()
    poller.register(pipe, 0)  # a hang-up is told in any case
    poller.poll()
    os._exit(1)
