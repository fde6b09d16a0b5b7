"""RunLock: one training at a time writes into a run folder, on all machines that share its disk."""

import json
import os
import random
import time
from contextlib import suppress
from pathlib import Path

from seqpar.cluster.exit_codes import FolderInUse
from seqpar.runs.run_owner import RunOwner

_TRIES, _PAUSE_S = 40, 0.05  # for a lock that others take and return at this moment


class TakenOver(FolderInUse):
    """Another process has taken this training's run folder over."""


class RunLock:
    """The lock of a run folder: ``lock-N.json`` with the process that holds it, where N counts from 1.

    A lock whose owner has ended is taken over by making the file with the next number, which only one process can do
    (file systems of clusters have atomic creation, but often no locks that work across nodes). So an owner that turns
    out to live finds a higher number than its own, or its file gone.

    ``ticket``: number and text of the file with which this training holds the folder; 0 before. All its ranks know it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ticket: tuple[int, str] = (0, "")

    def take(self, take_over: bool = False) -> str:
        """Takes the lock; returns whom it was taken from, "" if nobody held it.

        Raises ``FolderInUse`` where its owner may still run, unless ``take_over``.
        """
        this = RunOwner.this_process()
        for _ in range(_TRIES):
            held, returned = self._numbers()
            owner = self._owner(max(held)) if held else None
            if owner is None and held and not take_over:  # just being written, or just returned
                time.sleep(_PAUSE_S)
                continue
            why = owner.why_gone(this) if owner and not take_over else "as --take-over says"
            if not why and owner:
                raise FolderInUse(self._in_use(owner))
            if self._make(max(held | returned, default=0) + 1, held, returned, this):
                return f"{owner or 'a process that is not named'}, {why}" if held else ""
            time.sleep(_PAUSE_S * random.random())
        raise FolderInUse(
            f"--out {self.folder} is in use: {self._path(max(self._numbers()[0], default=1))} cannot be read; if no "
            "other training runs there, add --take-over"
        )

    def abandoned_by(self) -> str:
        """Returns which process has ended without returning the lock, and what shows it; "" where none certainly has.

        Where there is no lock, no training of this version runs there.
        """
        held, _ = self._numbers()
        if not held:
            return "no process holds it"
        owner = self._owner(max(held))
        why = owner.why_gone(RunOwner.this_process()) if owner else ""
        return f"it was held by {owner}, {why}" if why else ""

    def is_lost(self) -> bool:
        """Returns whether this process does not hold the lock, or not any more."""
        number, text = self.ticket
        try:
            return self._path(number).read_text() != text or self._path(number + 1).exists()
        except FileNotFoundError:
            return True
        except OSError:  # the disk is away for a moment, for others too
            return not number

    def refuse_lost(self, then: str = "") -> None:
        """Raises ``TakenOver`` where this process does not hold the lock any more.

        - ``then``: what follows, in words; "": of a training
        """
        if self.is_lost():
            if not self.folder.is_dir():
                raise TakenOver(
                    f"--out {self.folder} was moved or removed: {then or 'this training ends without saving'}; if it "
                    "was moved, --resume continues it there"
                )
            owner = self._owner(max(self._numbers()[0], default=0))
            by = f"taken over by {owner}" if owner else "taken over, or its lock was removed"
            kept = "its last checkpoint is kept" if (self.folder / "checkpoints").is_dir() else "no checkpoint is there"
            raise TakenOver(f"--out {self.folder} was {by}: {then or f'this training ends without saving; {kept}'}")

    def release(self) -> None:
        """Returns the lock, if this process holds it."""
        if not self.is_lost():
            self._return(self.ticket[0])
        self.ticket = (0, "")

    def _make(self, number: int, held: set[int], returned: set[int], this: RunOwner) -> bool:
        """Returns whether the lock of this number could be made, with the others still as they were judged."""
        path, text = self._path(number), json.dumps(this.to_json(), indent=2) + "\n"
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(handle)  # a lock that a power cut left empty would keep every later start out, too
        except OSError:  # an empty lock would keep every later start out
            path.unlink(missing_ok=True)
            raise
        if self._numbers() != ({*held, number}, returned):
            self._return(number)
            return False
        for old in [*map(self._path, held), *map(self._returned, returned)]:
            old.unlink(missing_ok=True)
        self.ticket = (number, text)
        return True

    def _return(self, number: int) -> None:
        with suppress(FileNotFoundError):
            self._path(number).rename(self._returned(number))

    def _in_use(self, owner: RunOwner) -> str:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner.since))
        return (
            f"--out {self.folder} is in use by {owner} since {since}: wait for its end, or name another folder; if it "
            "is certainly gone, or shall leave, add --take-over"
        )

    def _owner(self, number: int) -> RunOwner | None:
        """Returns the owner in a lock file, None where it is gone or not yet written."""
        try:
            return RunOwner.from_json(json.loads(self._path(number).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def _numbers(self) -> tuple[set[int], set[int]]:
        """Returns the numbers of the locks that are held, and of those that were returned."""
        return self._found("lock-*.json", "lock-"), self._found(".lock-*.returned", ".lock-")

    def _found(self, pattern: str, prefix: str) -> set[int]:
        numbers = (path.stem.removeprefix(prefix) for path in self.folder.glob(pattern))
        return {int(number) for number in numbers if number.isdigit()}

    def _path(self, number: int) -> Path:
        return self.folder / f"lock-{number}.json"

    def _returned(self, number: int) -> Path:
        return self.folder / f".lock-{number}.returned"
