"""What a person watches on a terminal or in a log: a line that changes, a progress bar, the command that comes next."""

import os
import re
import shlex
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seqpar.text import clock, quantity

EVERY_S = 60.0  # a log gets a line at least as often
_COLOURS = {"red": 31, "green": 32, "yellow": 33, "cyan": 36}
_PREFIXES = {"error:": "red", "warning:": "yellow", "finished:": "green", "next:": "cyan"}


def fit(fields: Sequence[str], width: int) -> str:
    """Returns fields in a line of at most ``width`` letters, without the last ones where they are too many.

    The first field says what is done, the second one how long it still takes: it is never cut, the first if need be.
    """
    kept = list(fields)
    while len("  ".join(kept)) > width and len(kept) > 2:
        kept.pop()
    if len("  ".join(kept)) > width and len(kept) == 2:
        kept[0] = kept[0][: max(width - len(kept[1]) - 2, 0)].rstrip()
        kept = [field for field in kept if field]
    return "  ".join(kept) if len(kept) != 1 or len(fields) > 1 else kept[0][:width]


def coloured(text: str, stream: Any) -> str:
    """Returns text whose first words, such as "warning:", and bars are coloured where ``stream`` shows colours."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    for word, colour in _PREFIXES.items():
        text = re.sub(rf"^{word}", _paint(word, colour), text, flags=re.M)
    return re.sub("█+", lambda match: _paint(match[0], "green"), text)


def _paint(text: str, colour: str) -> str:
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def bar(share: float, width: int = 12) -> str:
    """Returns a bar that is filled to ``share``."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "·" * (width - filled)


class Display:
    """Shows progress on ``stream``, the name of one of Python's, and what is said between.

    On a terminal the progress is one line that changes. In a log a line comes with each milestone and at least every
    ``every_s`` seconds; where nothing happens for so long, a thread repeats the last one with the time since.
    """

    def __init__(self, stream: str = "stdout", every_s: float = EVERY_S) -> None:
        self.stream, self.every_s = stream, every_s
        self._line_open = False
        self._fields: Sequence[str] = ()
        self._shown = self._printed = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def on_terminal(self) -> bool:
        return bool(getattr(sys, self.stream).isatty())

    def say(self, text: str, stream: str = "") -> None:
        """Prints text on lines of its own, on another stream if one is named."""
        with self._lock:
            if self._line_open:
                self._print("\n")
            self._line_open = False
            self._print(text + "\n", stream)

    def show(self, fields: Sequence[str], milestone: bool = False) -> None:
        """Shows the progress: what is done, how long it still takes, and more, the most important first."""
        now = time.monotonic()
        with self._lock:
            self._fields, self._shown = fields, now
            if self.on_terminal:
                line = fit(fields, shutil.get_terminal_size().columns - 1)  # one that wraps could not be written over
                self._print("\r\x1b[K" + line + ("\n" if milestone else ""))
                self._line_open = not milestone
            elif milestone or now - self._printed >= self.every_s:
                self._print("  ".join(fields) + "\n")
        if self._thread is None and not self.on_terminal and not self._over.is_set():
            of_thread = weakref.ref(self), self._over
            thread = threading.Thread(target=_repeat, args=of_thread, daemon=True, name="seqpar-display")
            thread.start()
            self._thread = thread  # one that has begun, which can be waited for

    def close(self) -> None:
        """Ends the thread, and a line that is still open."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._line_open:
            self._print("\n")
            self._line_open = False

    def _print(self, text: str, stream: str = "") -> None:
        file = getattr(sys, stream or self.stream)
        print(coloured(text, file), end="", file=file, flush=True)
        self._printed = time.monotonic()

    def _repeat(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._printed >= self.every_s and self._fields:
                news = f"  (no news for {clock(now - self._shown)})" if now - self._shown >= 60 else ""
                self._print(f"{'  '.join(self._fields)}{news}\n")


def _repeat(reference: weakref.ref[Display], over: threading.Event) -> None:
    """Repeats what a display shows until it is closed, or until nobody holds it."""
    pause = 0.0
    while not over.wait(pause) and (display := reference()) is not None:
        display._repeat()
        pause = max(display._printed + display.every_s - time.monotonic(), 0.05)
        del display


TYPED = "SEQPAR_TYPED"  # variable of started processes: the script that a person started first


def typed_script() -> str:
    """Returns the path of the script that a person started: this process's, or that of the one that started it."""
    return os.environ.get(TYPED) or sys.argv[0]


def typed_command() -> list[str]:
    """Returns this process's command line, with the script that a person started."""
    return [typed_script(), *sys.argv[1:]]


def python_module(act: str) -> list[str]:
    """Returns Python's arguments that start an act, wherever its file is."""
    return ["-m", f"seqpar.cli.{act}"]


def typed_variable(command: Sequence[str]) -> dict[str, str]:
    """Returns the variable that tells ``command``, which this process starts, the script a person would type for it."""
    folder, started = os.path.split(typed_script())
    act = command[1].removeprefix("seqpar.cli.") if command[0] == "-m" else ""
    if not act.isidentifier():
        return {TYPED: typed_script()}
    return {TYPED: os.path.join(folder, f"seqpar-{act}" if started.startswith("seqpar-") else f"{act}.py")}


def _is_of_package(folder: str) -> bool:
    """Returns whether the programs in a folder are the package's own, which only ``python -m`` starts."""
    return os.path.realpath(folder) == os.path.join(os.path.dirname(os.path.realpath(__file__)), "cli")


def program(act: str) -> list[str]:
    """Returns what to write after ``python``, ``torchrun`` or ``srun python`` to start an act, as a person here would.

    That is its file, or its module if this process was started by a console script.
    """
    folder, started = os.path.split(typed_script())
    if started.startswith("seqpar-") or _is_of_package(folder):
        return python_module(act)
    neighbour = os.path.join(folder, f"{act}.py")
    return [neighbour if os.path.exists(neighbour) else f"launch/{act}.py"]


def next_command(act: str, *arguments: object, ranks: int = 1) -> str:
    """Returns the line that starts an act: a console script where this one was started by one, else its file.

    - ``ranks``: how many torchrun starts; 1: the act itself
    """
    words = program(act)
    if ranks > 1:
        words = ["torchrun", "--nproc-per-node", str(ranks), *words]
    elif os.path.basename(typed_script()).startswith("seqpar-"):
        words = [f"seqpar-{act}"]
    else:
        words = ["python", *words]
    paths = (f"./{one}" if isinstance(one, Path) and str(one).startswith("-") else str(one) for one in arguments)
    return shlex.join([*words, *paths])


def resume_command(act: str, out: object, *more: str, ranks: int = 1) -> str:
    """Returns the line that resumes a run or sweep in a folder.

    - ``more``: further flags that it needs
    - ``ranks``: as ``next_command`` has it; those of several nodes are started as they were before
    """
    flags = ["--resume", *more, "--out", str(out)]
    if int(os.environ.get("LOCAL_WORLD_SIZE") or ranks) < ranks:
        return f"the command that started it, with {shlex.join(flags)}"
    return next_command(act, *flags, ranks=ranks)


class ProgressBar:
    """Prints to stderr how many cases are done: a bar on a terminal, else a line after every tenth and every minute.

    activity: what is done to the cases, such as "preparing".
    """

    def __init__(self, activity: str) -> None:
        self.activity, self.start, self.tenth = activity, time.monotonic(), -1
        self._first: tuple[float, float] | None = None  # what was done first, and after how long: work begins slowly
        self._display = Display("stderr")

    def __call__(self, done: float, total: int) -> None:
        """Shows that ``done`` of ``total`` cases are done; a fraction is of cases that are being worked on."""
        if total == 0:
            return
        spent, is_over = time.monotonic() - self.start, done >= total
        fields = [f"{self.activity} {quantity(total, 'case')} {bar(done / total)} {done / total:.0%}"]
        if not is_over:
            if done and self._first is None:
                self._first = spent, done
            first_s, first = self._first or (0.0, done)
            rest = f"{clock((spent - first_s) / (done - first) * (total - done))} left" if done > first else "? left"
            fields.append(rest)
        fields.append(f"{clock(spent)} so far" if not is_over else f"in {spent:.0f} s")
        tenth = int(done * 10 / total)
        if is_over and self.tenth == 10:
            return
        self._display.show(fields, milestone=is_over or (tenth != self.tenth and not self._display.on_terminal))
        self.tenth = tenth
        if is_over:
            self._display.close()
