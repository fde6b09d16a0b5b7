"""The journal of a run: metrics.jsonl, boards where asked for, and the lines that people watch."""

import json
import os
import resource
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from seqpar.cluster.devices import MIB
from seqpar.data.files import read_whole, write_text
from seqpar.runs.boards import Board
from seqpar.runs.metrics_tail import score_of
from seqpar.runs.run_lock import RunLock
from seqpar.terminal import Display, bar
from seqpar.text import clock, quantity


class Journal:
    """Records metrics and prints on the first rank (``active``); on the others it does nothing.

    ``first_step``: where the run resumes; ``validated``: the step whose validation is complete, -1 for none;
    ``boards``: where numbers and pictures go too; ``lock``: of the run folder. What cannot be written is one warning
    and ends no run; rows of metrics.jsonl then wait until they can.
    """

    def __init__(
        self,
        out: Path,
        active: bool,
        first_step: int,
        validated: int = -1,
        boards: Iterable[Board] = (),
        lock: RunLock | None = None,
    ) -> None:
        self.path, self.active = out / "metrics.jsonl", active
        self._warned, self._display, self._undrawn = False, Display("stdout"), set[str]()
        self._boards, self._lock, self.steps_done = list(boards), lock, first_step
        self.lost = ""  # which of the steps and validations before it lacks, in words
        self.best_step: int | None = None  # of the best validation by the run's progress; None: by the rows
        if active:
            self._drop_from(first_step, validated)
            self._open()
        self._waiting = bytearray()  # rows that are not in the file yet

    def attempt(self, act: Callable[[], object]) -> None:
        """Calls ``act`` on the first rank; an ``OSError`` is a warning, once."""
        if not self.active:
            return
        try:
            act()
        except OSError as error:
            if not self._warned:
                self._warned = True
                self.say(f"warning: {self.path.parent} cannot be written ({error.strerror}); training continues")

    def draw(self, act: Callable[[], object]) -> None:
        """Calls ``act``, which draws, on the first rank; whatever the library of pictures raises ends no run."""
        try:
            self.attempt(act)
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
            if problem not in self._undrawn:
                self._undrawn.add(problem)
                self.say(f"warning: a picture cannot be drawn ({problem}); training continues")

    def _drop_from(self, step: int, validated: int) -> None:
        """Removes the rows of steps and validations that a resumed run repeats."""
        rows = read_metrics(self.path) if self.path.exists() else []
        kept = [row for row in rows if row["step"] < step or row["kind"] == "val" and row["step"] == step == validated]
        self.lost = describe_lost(kept, step, [validated])
        if self.path.exists():
            write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Adds a row to metrics.jsonl, and its numbers to the boards; ``kind``: train, val or slow."""
        if kind == "train":
            self.steps_done = step + 1
        if self.active:
            self._waiting += json.dumps({"kind": kind, "step": step, **values}).encode() + b"\n"
        self.attempt(self._write_rows)
        self._tell_boards(lambda board: board.record(kind, step, values))

    def _open(self) -> None:
        self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115  open for the run's whole life
        self._size = os.fstat(self._file.fileno()).st_size

    def _write_rows(self) -> None:
        self._keep_file()
        while self._waiting:
            written = self._file.write(self._waiting)
            self._size += written
            del self._waiting[:written]

    def _keep_file(self) -> None:
        """Opens metrics.jsonl again if somebody has removed it, with all its rows, or has replaced it."""
        own, there = os.fstat(self._file.fileno()), None
        with suppress(FileNotFoundError):
            there = self.path.stat()
        if there is not None and os.path.samestat(own, there):
            if own.st_size < self._size:
                self._size = own.st_size
                self._waiting[:0] = b"\n"  # behind a row that may be cut in two
                self._warn_of_file("was cut off while the run wrote it: earlier rows are gone, later ones follow")
        elif self._lock is None or not self._lock.is_lost():  # else the file is that of another training
            before = self._file
            rows = os.pread(before.fileno(), own.st_size, 0) if there is None else b""
            self._open()
            before.close()
            self._waiting[:0] = rows
            self._warn_of_file(
                "was removed while the run wrote it: written again, with all rows"
                if there is None
                else "was replaced while the run wrote it: later rows go to the new file"
            )

    def _warn_of_file(self, problem: str) -> None:
        self._display.say(f"warning: {self.path} {problem}", "stderr")

    def picture(self, name: str, step: int, path: Path) -> None:
        """Adds a picture of the run folder to the boards, if it could be drawn."""
        if path.exists():
            self._tell_boards(lambda board: board.picture(name, step, path))

    def _tell_boards(self, tell: Callable[[Board], None]) -> None:
        """Calls ``tell`` with each board; one that fails of anything but a disk gets nothing more."""
        for board in list(self._boards):
            try:
                self.attempt(partial(tell, board))
            except Exception as error:  # other people's code, often over a network, ends no training
                self._boards.remove(board)
                self.say(f"warning: {board.name} failed ({error}); training continues without it")

    def say(self, text: str) -> None:
        """Prints text on lines of its own."""
        if self.active:
            self._display.say(text)

    def begin(self, step: int, steps: int, terms: Collection[str]) -> None:
        """Explains the words of the lines that follow, and shows that the first step has begun.

        - ``terms``: the names of the loss's terms
        """
        self.say(f"({'dice: soft Dice on training tiles; ' if 'dice' in terms else ''}{EPOCH_WORDS})")
        self.progress([f"step {step + 1} of {steps}"])

    def progress(self, fields: Sequence[str], last: bool = False) -> None:
        """Shows how far the run is: what is done, how long it still takes, and more, the most important first.

        On a terminal one line changes; a log gets the ``last`` ones, and a line every minute.
        """
        if self.active:
            self._display.show(fields, last)

    def close(self) -> None:
        self._display.close()
        self.attempt(self._write_rows)
        if lost := self._waiting.count(b"\n"):
            self.say(f"warning: {self.path} lacks the last {quantity(lost, 'row')}: there was no room for them")
        self.attempt(lambda: self._file.close())
        self._tell_boards(lambda board: board.close())


def describe_lost(rows: Iterable[Mapping[str, Any]], steps: int, validations: Collection[int]) -> str:
    """Returns in words what rows of metrics.jsonl lack of the first ``steps`` steps, and of the validations after
    ``validations`` (-1 is none); "" if they have all.
    """
    has = dict[str, set[int]]()
    for row in rows:
        has.setdefault(row["kind"], set()).add(row["step"])
    lost = sorted({*range(steps)} - has.get("train", set()))
    told = list[str]()
    if lost and len(lost) == lost[-1] - lost[0] + 1:
        told = [f"steps {lost[0] + 1:,} to {lost[-1] + 1:,}" if len(lost) > 1 else f"step {lost[0] + 1:,}"]
    elif lost:
        told = [f"{len(lost):,} of the first {steps:,} steps"]
    if gone := sorted(step for step in {*validations} - has.get("val", set()) if step > 0):
        several = "s" * (len(gone) > 1)
        told.append(f"the validation{several} after step{several} {' and '.join(f'{step:,}' for step in gone)}")
    return " and ".join(told)


def read_metrics(path: Path, only: str = "") -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl, without lines that are none, such as a last one that a kill cut off.

    - ``only``: a kind; others are not read, which are many
    """
    rows, wanted = [], f'"kind": "{only}"'.encode() if only else b""
    for line in read_whole(path).splitlines():
        if wanted not in line:
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int) and _has_numbers(row):
            rows.append(row)
    return rows


def _has_numbers(row: Mapping[str, Any]) -> bool:
    """Returns whether a row has the numbers that all readers need: of training a loss, of validation scores too."""
    try:
        if row["kind"] in ("train", "val"):
            float(row["loss"])
        return row["kind"] != "val" or isinstance(score_of(row), float)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def loss_terms(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the keys of the loss's terms, such as dice_loss, in any row; a resumed run may take another loss.

    A single term is the loss itself, and no key is returned.
    """
    terms = list(dict.fromkeys(name for row in rows for name in row if name.endswith("_loss")))
    return terms if len(terms) > 1 else []


def held_out_scores(row: Mapping[str, Any]) -> tuple[str, str]:
    """Returns under which key a validation's row has scores by name, and what they are."""
    return ("scores", "Scores") if "scores" in row else ("dice", "Dice")


EPOCH_WORDS = "waited: for data, in this epoch; GB: peak memory of the first rank"


def epoch_fields(step: int, epochs: int, iterations: int, rows: list[dict[str, Any]], left_s: float) -> list[str]:
    """Returns an epoch's line in fields: bar, time left, mean losses, tokens or voxels a second, waiting, memory.

    ``step``: steps done so far; ``iterations``: steps of an epoch; ``rows``: those of this epoch.
    """
    epoch, done = (step - 1) // iterations + 1, ((step - 1) % iterations + 1) / iterations
    speed = next(name for name in rows[0] if name.endswith("_per_s"))
    names = [name for name in ("loss", "dice_loss", speed) if name in rows[0]]
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in names}
    waited = sum(row["data_wait_s"] for row in rows)
    return [
        f"epoch {epoch}/{epochs} {bar(done)}",
        f"{clock(left_s)} left",
        f"loss {mean['loss']:.4f}",
        *([f"dice {1 - mean['dice_loss']:.3f}"] if "dice_loss" in mean else []),
        f"{mean[speed]:,.0f} {speed.removesuffix('_per_s')}/s",
        f"waited {waited:.1f} s",
        f"{rows[-1]['peak_mem_mb'] / 1024:.2f} GB",
    ]


def peak_memory_mb(device: torch.device) -> float:
    """Returns the peak memory of this rank in MiB: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
