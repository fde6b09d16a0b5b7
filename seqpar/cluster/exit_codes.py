"""The one place that turns an exception into a message and a code, and output that outlives its reader."""

import atexit
import errno
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from seqpar.data.errors import DataError, reason
from seqpar.parallel.launcher import Launcher
from seqpar.parallel.processes import shell_code
from seqpar.terminal import coloured
from seqpar.text import in_flags


def open_streams() -> None:
    """Opens /dev/null in place of each standard stream that is closed.

    Otherwise the next file that this process opens would be what C code prints to.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest number that is free
        os.set_inheritable(handle, True)
    os.close(handle)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115  for as long as the process runs


def interrupt_quietly() -> None:
    """Lets Ctrl-C end this process in one line until ``run`` is called: imports take seconds."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted_early)


def _interrupted_early(number: int, frame: FrameType | None) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)


class SafeStream:
    """A stream that drops what it cannot write, and everything once its reader, or its terminal, is gone.

    ``lost``: why some of it could not be written when it was to be; "" if all was, or nobody reads it
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self.lost = stream, ""

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
            shown = text
        except UnicodeEncodeError:  # such as a name in a terminal of ASCII
            shown = text.encode(encoding, "backslashreplace").decode(encoding)
        self._attempt(lambda: self._stream.write(shown))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def finish(self) -> None:
        """Writes what is left; the stream itself stays open."""
        if not self._attempt(self._stream.flush):
            self._drop()

    def _attempt(self, act: Callable[[], object]) -> bool:
        """Returns False if output was lost, and keeps why; not if nobody reads the stream any more."""
        try:
            act()
        except OSError as error:  # EIO: the terminal was closed; others: the disk of a log is full
            if error.errno not in (errno.EPIPE, errno.EIO):
                self.lost = reason(error)
                return False
            self._drop()
        except ValueError:  # the stream is closed
            pass
        return True

    def _drop(self) -> None:
        """Has the stream's buffer written to nowhere: it is flushed again, at the interpreter's exit at least."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def safe_output() -> Iterator[SafeStream]:
    """Keeps stdout, which it gives, and stderr writable within the block, even if their readers close them."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err = SafeStream(before[0]), SafeStream(before[1])
    try:
        yield out
    finally:
        for stream in (out, err):
            stream.finish()
        sys.stdout, sys.stderr = before


LAST_WORDS = "TORCHELASTIC_ERROR_FILE"  # torchrun's variable with the file for a rank's error
# of a path that somebody named, or of its disk
_NO_WAY_IN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}
_NO_WAY_IN |= {errno.ENOSPC, errno.EDQUOT}
# of this shell; libraries tell them without a file
_LIMITS = {errno.EFBIG: "a file", errno.EMFILE: "open files", errno.EAGAIN: "processes and threads"}
_NO_THREAD = "can't start new thread"
FAULT, USAGE, DATA, MEMORY, NONFINITE, IN_USE, PREEMPTED = 1, 2, 3, 4, 5, 6, 75
INTERRUPTED = 128 + signal.SIGINT
FINAL = (USAGE, DATA, MEMORY, NONFINITE)  # of errors that would come again if the run went on


class NonFinite(RuntimeError):
    """A loss or gradient that is not finite, on any rank."""


class FolderInUse(ValueError):
    """A run folder that another training holds, or has taken over; later it may be free."""


class TooLittleMemory(MemoryError):
    """A run needs more memory than its hosts have free: known before it is asked for, and the same on all ranks."""


def code_of(error: BaseException) -> int | None:
    """Returns the exit code of an error that a user can cause, None for a bug."""
    if isinstance(error, DataError):
        return DATA
    if isinstance(error, NonFinite):
        return NONFINITE
    if is_out_of_memory(error):
        return MEMORY
    if isinstance(error, FolderInUse):
        return IN_USE
    if isinstance(error, ValueError):
        return USAGE
    if isinstance(error, (ConnectionError, TimeoutError)):  # names the ranks that did not start
        return FAULT
    return None


def code_of_processes(code: int, signals: Sequence[int]) -> int:
    """Returns the exit code for started processes that ended with ``code``, which is -n if signal n killed one.

    A killed process is a lost rank, unless it ended by one of ``signals``, which were forwarded to it.
    """
    return shell_code(code) if code >= 0 or -code in signals else FAULT


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the error is a GPU or this machine running out of memory."""
    torch = sys.modules.get("torch")  # programs that do without it start in half the time
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator raises no error of its own class
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def run(
    act: Callable[[Sequence[str]], int], arguments: Sequence[str] | None = None, prints_result: bool = False
) -> int:
    """Calls ``act(arguments)`` and returns its exit code; an error by the user is one line on stderr, no traceback.

    A reader of its output may close the pipe early (``| head``); the act continues, and its code stays the same. If
    output is lost otherwise, stderr says so, which is an error where the act has no other result (``prints_result``).
    """
    if signal.getsignal(signal.SIGINT) is _interrupted_early:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not gc.isenabled():
        gc.freeze()  # what was imported stays
        gc.enable()
    with safe_output() as out:
        code = _call(act, arguments)
        out.finish()
        if out.lost:
            is_error = prints_result and not code
            told = f"what was printed may be incomplete ({out.lost}): make room on its disk, or write it elsewhere"
            print(f"{'error' if is_error else 'warning'}: {told}", file=sys.stderr, flush=True)
            code = DATA if is_error else code
    if code:
        leave_last_words(f"ended with exit code {code}: the lines above say why")
    if code in (USAGE, DATA, MEMORY):
        write_verdict(code)
    return code


def leave(code: int) -> NoReturn:
    """Ends the program with an exit code; if it has used a GPU, without taking the interpreter apart.

    After a backward on a GPU, a thread of torch's drops its references to tensors. If the interpreter is being taken
    apart at that moment, the process is aborted, whatever its code. Exit handlers run in either case.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def write_verdict(code: int) -> None:
    """Writes the exit code to the file that SEQPAR_VERDICT names, unless another rank already has.

    When this rank exits, the launcher kills the others and may report a signal's code, and status.json may not exist
    yet.
    """
    path = os.environ.get("SEQPAR_VERDICT")
    if path:
        with suppress(OSError), open(path, "x") as file:
            file.write(f"{code}\n")


def _call(act: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    try:
        refuse_deleted_folder()
        return act(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        report("interrupted")
        return INTERRUPTED
    except Exception as error:
        error = of_a_file(error) or error
        code = code_of(error)
        if code is None and (lost := _lost_contact(error)):
            report(lost)
            return 1
        if code is None:
            leave_last_words(traceback.format_exc())
            raise
        report(str(error) or f"{type(error).__name__} without further words")
        return code


def _lost_contact(error: BaseException) -> str:
    """Returns what to say if an error means that another rank is gone or late; "" for others, and for a single rank."""
    from seqpar.parallel.launcher import read_launcher
    from seqpar.parallel.watchdog import describe_lost_contact, is_lost_contact  # imports torch

    with suppress(ValueError):  # the launcher's variables may be wrong themselves
        launcher = read_launcher(os.environ)
        if launcher.world > 1 and is_lost_contact(error):
            return describe_lost_contact(error, launcher.rank)
    return ""


def of_a_file(error: BaseException) -> DataError | None:
    """Returns what to say of a file or folder that the system keeps from us; None for any other error."""
    if type(error) is RuntimeError and str(error) == _NO_THREAD:
        error = OSError(errno.EAGAIN, _NO_THREAD)
    if type(error) is RuntimeError:  # of torch, in the system's words
        told = next((number for number in _LIMITS if os.strerror(number) in str(error)), 0)
        error = OSError(told, os.strerror(told)) if told else error
    if not isinstance(error, OSError):
        return None
    if error.errno in _LIMITS:
        return DataError(error.filename or _LIMITS[error.errno], reason(error))
    if error.filename is None or error.errno not in _NO_WAY_IN:
        return None
    return DataError(error.filename, f"cannot be used ({reason(error)}); check the path, its rights and its disk")


def leave_deleted_folder() -> None:
    """Ends this process if the current folder is gone, before torch is imported: MKL would, with words of its own."""
    if code := _call(lambda _: 0, ()):
        sys.exit(code)


def refuse_deleted_folder() -> None:
    """Raises DataError if the current folder is gone, so that no path can be found from it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise DataError("the current folder", "was deleted; change to one that exists (cd), and start again") from None


def report(text: str) -> None:
    """Prints an error on stderr, as the last words of this process too."""
    text = in_flags(text)
    print(coloured(f"error: {text}", sys.stderr), file=sys.stderr, flush=True)
    leave_last_words(f"error: {text}")


def leave_last_words(text: str) -> None:
    """Writes why this process ends to where torchrun looks for it, unless that is done.

    Whatever a rank's exit code, torchrun prints a traceback of its own and ends with 1; the last lines of what it
    prints are these.
    """
    path = os.environ.get(LAST_WORDS)
    if path:
        message = {"message": text, "extraInfo": {"py_callstack": f"\n\n{text}", "timestamp": str(int(time.time()))}}
        with suppress(OSError), open(path, "x") as file:
            json.dump({"message": message}, file)


def last_words() -> str:
    """Returns what was left as this process's last words, or those of any rank started with it here; "" if nothing."""
    try:
        return str(json.loads(Path(os.environ[LAST_WORDS]).read_text())["message"]["message"])
    except (KeyError, OSError, ValueError):
        return ""


FIRST_RANK_S = 5.0  # the first rank's time to report an error that all ranks have


def report_unless_rank0_did(error: ValueError, launcher: Launcher) -> int:
    """Returns the exit code after printing what another rank than the first refuses.

    Mostly all ranks refuse the same: the first one says so, and its end ends these before they speak.
    """
    until, expected = time.monotonic() + FIRST_RANK_S, f"error: {in_flags(str(error))}"
    while time.monotonic() < until and last_words() != expected:
        time.sleep(0.05)
    if last_words() != expected:
        host = launcher.host or socket.gethostname()
        report(f"rank {launcher.rank} ({host}): {error}")
    return code_of(error) or USAGE
