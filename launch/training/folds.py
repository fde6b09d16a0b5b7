"""``--fold all5``: five folds one after the other, each a training in a process and a run folder of its own.

OUT/fold0 … OUT/fold4   run folders, as train writes them
OUT/status.json         how all of them stand: "step" counts the folds that have finished
OUT/folds.json          the flags by which folds begin, so that --resume needs to name OUT alone
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from seqpar.data.files import write_json
from seqpar.data.formats.recognise import recognise
from seqpar.data.formats.splits import FOLDS, folds
from seqpar.environment import MEETING, Launcher
from seqpar.launch.job import exit_codes
from seqpar.launch.job.local_ranks import PARENT_OF_FOLD
from seqpar.launch.job.next_command import next_command
from seqpar.launch.runs.run_folder import Status
from seqpar.launch.settings.command_line import Parser
from seqpar.launch.settings.config import ALL_FOLDS
from seqpar.launch.settings.time_limit import seconds
from seqpar.launch.training.request import holds_run, is_restart

FLAGS = "folds.json"


def find_folds(arguments: Sequence[str]) -> "Folds | None":
    """Returns the five trainings that a command line asks for, None where it asks for one."""
    parser = Parser("train", add_help=False, allow_abbrev=False)
    for name in ("fold", "out", "data", "time-limit"):
        parser.add_argument(f"--{name}", default="")
    for name in ("resume", "again", "dry-run"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=False)
    own, others = parser.parse_known_args(list(arguments))
    return Folds(own, others) if own.fold == ALL_FOLDS else None


class Folds:
    """Five trainings of one command line.

    ``own``: its flags that say which folds, where, and whether they go on; ``others``: the rest of it.
    """

    def __init__(self, own: argparse.Namespace, others: Sequence[str]) -> None:
        self.own, self.typed = own, [*others, *(["--data", own.data] if own.data else [])]
        self.flags = self.typed  # by which folds begin
        self.until = time.monotonic() + seconds(own.time_limit)
        self._signals = list[int]()
        self._child: subprocess.Popen[bytes] | None = None

    def train(self, script: str, launcher: Launcher) -> int:
        """Returns 0 once all folds have finished, else the exit code of the fold that did not; called on every rank.

        Which folds go on is read before each begins: no rank writes into a run folder before all have met.
        """
        self._refuse()
        if self.own.dry_run:
            if self.own.resume:
                self._add_flags_of_before(self.own.out)
            return self._start([script, *self._line(0, self.own.out), "--dry-run"], {})
        out = self._folder(is_restart(launcher))
        self._keep_flags(out, launcher)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._pass_on)
        for fold in range(FOLDS):
            run = f"{out}/fold{fold}"
            finished = _state(run).get("state") == "finished"
            if launcher.rank == 0:
                print(f"fold {fold} of {FOLDS}{' has finished' if finished else ''}: {run}", flush=True)
            if finished:
                continue
            _write(out, launcher, fold, "running")
            if code := self._train_fold(script, fold, out, launcher):
                return self._end(code, out, fold, launcher)
        _write(out, launcher, FOLDS, "finished")
        if launcher.rank == 0:
            runs = [f"{out}/fold{fold}" for fold in range(FOLDS)]
            print(
                f"next: {next_command('predict', *runs, '-i', 'IMAGES', '-o', 'PREDICTIONS')}  (their mean)", flush=True
            )
        return 0

    def _refuse(self) -> None:
        if not self.own.out:
            raise ValueError(f"--fold {ALL_FOLDS} needs --out, the folder for the five run folders")
        count = len(folds(recognise(self.own.data))) if self.own.data else FOLDS
        if count != FOLDS:
            raise ValueError(
                f"--fold {ALL_FOLDS}: {self.own.data} has {count} splits of its own: train each by its number"
            )

    def _folder(self, restarted: bool) -> str:
        """Returns the folder of the five run folders; those that are in it go on, which has to be asked for."""
        out = str(self.own.out)
        if holds_run(out):
            raise ValueError(f"--out {out} holds a run of its own, whose status would be lost: name another folder")
        if self.own.again:
            number = 1
            while all(_state(f"{out}/fold{n}").get("state") == "finished" for n in range(FOLDS)):
                number += 1
                out = f"{self.own.out}-{number}"
            self._add_flags_of_before(out)
            return out
        begun = [run for n in range(FOLDS) if holds_run(run := f"{out}/fold{n}")]
        if begun and not (self.own.resume or restarted):
            raise ValueError(f"--out {out} holds a run already, {begun[0]}: add --resume to continue, or name another")
        if self.own.resume and not begun and not (Path(out) / FLAGS).exists():
            raise ValueError(f"--resume --out {out}: it holds no five folds: name their folder, or leave --resume out")
        if self.own.resume or restarted:
            self._add_flags_of_before(out)
        return out

    def _add_flags_of_before(self, out: str) -> None:
        """Begins folds by the flags of earlier starts, then those of this one, which win."""
        before = list(_read(Path(out) / FLAGS).get("flags", []))
        known = before[len(before) - len(self.typed) :] == self.typed  # the first rank may have written these already
        self.flags = before if known else [*before, *self.typed]

    def _keep_flags(self, out: str, launcher: Launcher) -> None:
        """Makes the folder, on all ranks, so that all fail alike; writes into it by which flags folds begin."""
        try:
            Path(out).mkdir(parents=True, exist_ok=True)
            if launcher.rank == 0:
                write_json(Path(out) / FLAGS, {"flags": self.flags})
        except OSError as error:
            raise ValueError(f"--out {out} cannot be written ({error.strerror}): name another, or make room") from None

    def _train_fold(self, script: str, fold: int, out: str, launcher: Launcher) -> int:
        """Returns the exit code of one fold's training on this rank."""
        if self._signals or time.monotonic() > self.until:
            return exit_codes.PREEMPTED
        resume = holds_run(f"{out}/fold{fold}")
        env = {PARENT_OF_FOLD: str(os.getpid())}
        if launcher.world > 1:  # ranks of one fold never meet those of another
            env[MEETING] = f"fold{fold}"
            if not launcher.agent_store:
                env["MASTER_PORT"] = str(launcher.port + fold)
        return self._start([script, *self._line(fold, out, resume)], env)

    def _line(self, fold: int, out: str, resume: bool = False) -> list[str]:
        """Returns the flags of one fold's training; a run that goes on has its settings."""
        line = [*(self.typed if resume else self.flags), "--fold", str(fold), "--out", f"{out}/fold{fold}"]
        if self.own.time_limit:
            line += ["--time-limit", f"{max(self.until - time.monotonic(), 1.0) / 60:.3f}"]
        return [*line, "--resume"] if resume else line

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Returns the exit code of a process, to which signals are passed on; 75 where one came before it could act."""
        self._child = start_process(command, {**os.environ, **env})
        if self._signals:  # it came while the process was made
            self._child.send_signal(self._signals[-1])
        code = self._child.wait()
        if -code in self._signals:
            return exit_codes.PREEMPTED
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    def _end(self, code: int, out: str, fold: int, launcher: Launcher) -> int:
        """Writes and says how it ended, on the first rank; returns the exit code."""
        left = code == exit_codes.PREEMPTED
        how = "left early" if left else f"ended with exit code {code}"
        state, killed = _state(f"{out}/fold{fold}"), code > 128
        if left or killed or state.get("state") != "running":  # else another training may hold it, which goes on
            why = f"fold {fold}: {state.get('why') or ('it had not begun' if left else how)}"
            _write(out, launcher, fold, "preempted" if left else "failed", why, code)
        if launcher.rank == 0:
            line = f"fold {fold} {how}: go on with --resume --fold {ALL_FOLDS} --out {out}"
            print(line, flush=True)
            exit_codes.leave_last_words(line)
        return code


def start_process(command: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Returns a Python process that is started; Ctrl-C comes to this process alone, which passes it on once."""
    return subprocess.Popen([sys.executable, *command], env=dict(env), start_new_session=True)


def _state(run: str) -> dict[str, Any]:
    """Returns the content of a run's status.json, {} where there is none."""
    return _read(Path(run) / "status.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _write(out: str, launcher: Launcher, fold: int, state: str, why: str = "", code: int = 0) -> None:
    """Writes how all five stand, on the first rank."""
    if launcher.rank == 0:
        Path(out).mkdir(parents=True, exist_ok=True)
        status = Status(Path(out))
        status.step, status.steps = fold, FOLDS
        status.write(state, why, code)
