"""What a run writes down: config.json, metrics.jsonl, status.json, and the lines that people watch."""

import json
import math
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from seqpar.data.files import write_text
from seqpar.launch.runs.tensorboard import Board


class Journal:
    """The first rank's notes; every other rank's are silent.

    What people watch must not end what they watch: a note that cannot be written is a warning, told once.
    """

    def __init__(
        self, out: Path, active: bool, first_step: int, validated: int = -1, tensorboard: bool = False
    ) -> None:
        self.path, self.active = out / "metrics.jsonl", active
        self._line_open = self._warned = False
        self._board: Board | None = None
        if active:
            self._drop_from(first_step, validated)
            self._file = open(self.path, "a", buffering=1)  # noqa: SIM115  open for the run's whole life
            self._board = Board(out / "tensorboard", first_step) if tensorboard else None

    def attempt(self, act: Callable[[], object]) -> None:
        """Does what only the first rank does for people to look at."""
        if not self.active:
            return
        try:
            act()
        except OSError as error:
            if not self._warned:
                self._warned = True
                self.say(f"warning: {self.path.parent} cannot be written ({error.strerror}); training goes on")

    def _drop_from(self, step: int, validated: int) -> None:
        """A resumed run writes its steps and validations once: what came after the checkpoint is taken out."""
        if not self.path.exists():
            return
        rows = read_metrics(self.path)
        kept = [row for row in rows if row["step"] < step or row["kind"] == "val" and row["step"] == step == validated]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def record(self, kind: str, step: int, **values: Any) -> None:
        row = json.dumps({"kind": kind, "step": step, **values}) + "\n"
        self.attempt(lambda: self._file.write(row))
        if self._board is not None:
            board = self._board
            self.attempt(lambda: board.record(kind, step, values))

    def say(self, text: str) -> None:
        """Prints a line of its own."""
        if self.active:
            if self._line_open:
                print(flush=True)
                self._line_open = False
            print(text, flush=True)

    def progress(self, text: str, last: bool) -> None:
        """Shows an epoch's progress: one line that changes on a terminal, the last one in a log."""
        if not self.active:
            return
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be written over
            print(f"\r\x1b[K{text[:width]}", end="\n" if last else "", flush=True)
            self._line_open = not last
        elif last:
            print(text, flush=True)

    def close(self) -> None:
        self.attempt(lambda: self._file.close())
        if self._board is not None:
            self.attempt(self._board.close)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl; a last line that was cut off by a kill is left out."""
    rows = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def epoch_line(epoch: int, epochs: int, done: float, rows: list[dict[str, Any]], left_s: float) -> str:
    """Returns a line with bar, losses, speed, waiting, memory and the time left."""
    width = 12
    bar = "█" * round(done * width) + "·" * (width - round(done * width))
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in ("loss", "dice_loss", "tokens_per_s")}
    waited = sum(row["data_wait_s"] for row in rows)
    return (
        f"epoch {epoch + 1}/{epochs} {bar} loss {mean['loss']:.4f}  dice {1 - mean['dice_loss']:.3f}  "
        f"{mean['tokens_per_s']:,.0f} tokens/s  waited {waited:.1f} s  {rows[-1]['peak_mem_mb'] / 1024:.2f} GB  "
        f"{clock(left_s)} left"
    )


def clock(seconds: float) -> str:
    """Returns 1:02:03 or 2:03."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def peak_memory_mb(device: torch.device) -> float:
    """Returns the most memory that this rank has used: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
