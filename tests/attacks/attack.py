"""What an attack on the programs is, and how it is carried out.

To add one, add a row to the list ``ATTACKS`` of a file ``attacks_*.py`` in this folder, which is found by its name:

    Attack("predict over true labels", code=3, says="holds labels", make=lambda here: nnunet(here / "D"),
           types="predict run -i D -o D/labelsTr", keeps="D")

Cheap rows are forked from the test's process and belong to ``make test``. Rows that start processes are
``started=True``, and forked ones that need more than a second of a processor ``slow=True``: ``.ci/started`` runs both.
"""

import importlib
import math
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from seqpar.cluster.exit_codes import DATA, USAGE, run
from tests.support.folders import child, tree
from tests.support.pages import ROOT
from tests.support.programs import PROGRAMS

NOBODY = 65534
# imported when first used, in seconds, and from where nobody may not read
_IMPORTED_LATE = (
    "concurrent.futures.process",
    "encodings.idna",
    "encodings.raw_unicode_escape",
    "encodings.unicode_escape",
    "multiprocessing.popen_fork",
    "multiprocessing.synchronize",
    "scipy.ndimage",
    "seqpar.tasks.segment.evaluation",
    "sympy",
    "torch._dynamo",
)
TINY = "--preset debug --tile 16 --patch 8 --device cpu --workers 0 --batch 2"  # a network that costs nothing


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Attack:
    """What is typed in a folder of its own, and what must come of it.

    - ``types``: the program and its arguments; paths are relative to the folder
    - ``code``: the exit code; ``says``: words that must be in its output, one text or several
    - ``make``: makes the situation in the folder, and calls ``pytest.skip`` where this machine cannot make it
    - ``before``: does something in the process that types, such as setting a limit
    - ``meanwhile``: does something to the running process, given its id and the folder
    - ``after``: asserts more, given the folder and the output
    - ``keeps``: files and folders, separated by spaces, that must stay as they are, byte for byte
    - ``as_nobody``: whether a user without rights types it; root is kept out of nothing
    - ``started``: whether a new Python runs it, as from a shell
    - ``closed``: the standard streams that are closed as it starts, of a new Python
    - ``slow``: whether a forked one takes more than a second of a processor
    - ``within_s``: seconds until it must have ended; ``within_mb``: memory that it may take, for rows that are forked
    """

    name: str
    types: str
    code: int
    says: str | tuple[str, ...]
    make: Callable[[Path], object] = _nothing
    before: Callable[[], object] = _nothing
    meanwhile: Callable[[int, Path], object] = _nothing
    after: Callable[[Path, str], object] = _nothing
    keeps: str = ""
    as_nobody: bool = False
    started: bool = False
    closed: tuple[int, ...] = ()
    slow: bool = False
    within_s: float = 120  # some 10 where nobody else computes
    within_mb: float = math.inf

    def __post_init__(self) -> None:
        assert not self.started or self.within_mb == math.inf, f"{self.name}: only forked rows measure memory"

    def carry_out(self) -> None:
        """Makes the situation, types the line, and asserts what must have come of it."""
        with tempfile.TemporaryDirectory(prefix="attack-", ignore_cleanup_errors=True) as name:
            root = Path(name)
            root.chmod(0o777)  # for nobody, who may also write what it says
            here, said, first = root / "here", root / "said.txt", root / "first.txt"
            here.mkdir()
            here.chmod(0o777)
            said.touch()
            self.make(here)
            if not self.started:
                self._import()
            before = self._kept(here)
            pid = child(lambda: self._type(here, said, first))
            try:
                self.meanwhile(pid, here)
                code, most_mb = self._wait(pid)
            except BaseException as error:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise AssertionError(f"{error!r}; said: {said.read_text()}") from error
            self._judge(code, said.read_text())
            assert not self.keeps or self._kept(here) == before, f"changed what was there; said: {said.read_text()}"
            if self.within_mb < math.inf:
                taken = most_mb - float(first.read_text())
                assert taken <= self.within_mb, f"took {taken:.0f} MB"
            self.after(here, said.read_text())

    def _import(self) -> None:
        """Imports what the row needs, once for all rows: a fork inherits it."""
        for name in (*_IMPORTED_LATE, PROGRAMS[self.types.split()[0]]):
            importlib.import_module(name)

    def _judge(self, code: int, said: str) -> None:
        words = [self.says] if isinstance(self.says, str) else self.says
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert code == self.code, f"exit code {code}, {self.code} expected; said: {said}"
        assert not [word for word in words if word not in said], f"{words} expected; said: {said}"
        assert "Traceback" not in said, said
        assert self.code not in (USAGE, DATA) or len(errors) <= 1, said

    def _kept(self, here: Path) -> dict[str, object]:
        every = [here / name for name in self.keeps.split()]
        return {str(path): tree(path) if path.is_dir() else path.read_bytes() for path in every}

    def _type(self, here: Path, said: Path, first: Path) -> None:
        """Types the line, in a process of its own; does not return."""
        program, *arguments = shlex.split(self.types)
        os.chdir(here)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever this process had
        output = os.open(said, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(output, stream)
        nobody = NOBODY if self.as_nobody and os.geteuid() == 0 else os.geteuid()
        if self.started:
            os.seteuid(nobody)
            self.before()
            for stream in self.closed:
                os.close(stream)
            env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
            os.execve(sys.executable, [sys.executable, "-m", PROGRAMS[program], *arguments], env)
        sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
        act = sys.modules[PROGRAMS[program]].act
        first.write_text(str(_memory_mb("VmRSS")))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins from here
        os.seteuid(nobody)
        self.before()
        code = run(act, arguments)
        sys.stdout.flush()
        os._exit(code)

    def _wait(self, pid: int) -> tuple[int, float]:
        """Returns the exit code, and the most memory in MB that the process had; raises ``TimeoutError`` where it does
        not end in time.
        """
        until = time.monotonic() + self.within_s
        while time.monotonic() < until:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024
            time.sleep(0.02)
        raise TimeoutError(f"runs after {self.within_s:g} s")


def _memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
