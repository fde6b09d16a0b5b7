"""``--fold all5``: five folds one after the other, each a training in a process and a run folder of its own.

Every rank has such a process. All of them agree, at a store that outlives the folds, where the runs lie, whether the
next fold begins and how it ended.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from seqpar.cluster import exit_codes
from seqpar.data.errors import DataError
from seqpar.data.formats.splits import FOLDS
from seqpar.parallel.consensus import run_on_rank0_before_mesh
from seqpar.parallel.launcher import MEETING, Launcher
from seqpar.parallel.meeting import START_S, Meeting
from seqpar.parallel.processes import (
    PARENT_OF_FOLD,
    STOP_FILE,
    forward_signals,
    most_informative_code,
    shell_code,
    start_python,
)
from seqpar.runs.fold_folder import (
    all_ended,
    has_ended,
    has_finished,
    read_flags,
    refuse_other_folds,
    runs_of,
    started_folds,
    write_flags,
)
from seqpar.runs.run_folder import holds_folds, holds_run, read_config, read_status, refuse_foreign_status
from seqpar.runs.run_log import FOLD_BEFORE
from seqpar.runs.run_status import StatusFile
from seqpar.settings.command_line import parse
from seqpar.settings.data_settings import ALL_FOLDS
from seqpar.settings.parser import Parser
from seqpar.tasks.lookup import task_of
from seqpar.tasks.task import Task
from seqpar.terminal import next_command, python_module, resume_command, typed_variable
from seqpar.text import parse_duration
from seqpar.training.run_request import check_again_flag, is_requeued, refuse_unlike_folds
from seqpar.weights.facts import changed_between, not_one_split, several_data

GRACE_S = 60.0  # for other ranks' word on how a fold ended, where it failed on this one


def find_folds(arguments: Sequence[str]) -> "Folds | None":
    """Returns the five trainings that a command line asks for, None where it asks for one."""
    parser = Parser("train", add_help=False, allow_abbrev=False)
    for name in ("fold", "out", "data"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--time-limit")
    for name in ("resume", "again", "dry-run"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=False)
    own, others = parser.parse_known_args(list(arguments))
    return Folds(own, others) if own.fold == ALL_FOLDS else None


class Folds:
    """Five trainings of one command line.

    ``own``: its flags that say which folds, where, and whether they resume; ``others``: the rest of it.
    """

    def __init__(self, own: argparse.Namespace, others: Sequence[str]) -> None:
        limit = [] if own.time_limit is None else ["--time-limit", own.time_limit]
        self.own, self.typed = own, [*others, *(["--data", own.data] if own.data else []), *limit]
        self.flags = self.typed  # with which folds begin
        self.new_flags: list[str] = []  # typed now, and not when folds were started before
        self.began = time.monotonic()
        parse_duration(own.time_limit or "")
        self._signals, self._before = list[int](), ""  # the run folder that was trained before, in this start
        self._told = set[str]()  # what this start has warned of

    def train(self, launcher: Launcher) -> int:
        """Returns 0 once all folds have finished, else the exit code of the fold that did not; called on every rank.

        The first rank alone looks at the folders of runs, and writes into the one that holds them.
        """
        if self.own.dry_run:
            return self._rehearse(launcher)
        meeting = Meeting(launcher)
        place = run_on_rank0_before_mesh(lambda: self._open(launcher), meeting, "place")
        self.flags = place["flags"]
        with forward_signals([], self._signals):
            return self._train_all(place["out"], launcher, meeting)

    def _train_all(self, out: str, launcher: Launcher, meeting: Meeting) -> int:
        runs = runs_of(out)
        for fold, run in enumerate(runs):
            now = self._agree(meeting, fold, run)
            if launcher.rank == 0:
                print(f"fold {fold} of {FOLDS}{' has finished' if now['finished'] else ''}: {run}", flush=True)
                if now["finished"] and self.new_flags:
                    print(f"  it keeps its settings: {' '.join(self.new_flags)} is for folds that go on", flush=True)
            if now["finished"]:
                continue
            _write(out, launcher, fold, "running")
            code = exit_codes.PREEMPTED
            if not now["leaves"]:
                code = _agree_code(self._train_fold(fold, run, now["begun"], launcher), meeting, fold)
            if code:
                return self._end(code, out, fold, launcher)
            if launcher.rank == 0:
                self._warn_of_other_data(_contents(runs[: fold + 1]))
        _write(out, launcher, FOLDS, "finished")
        if launcher.rank == 0:
            described = [content.get("dataset", {}) for content in _contents(runs)]
            if told := changed_between(*described):
                print(f"warning: {told}: a score of all folds together mixes two states of the data", flush=True)
            if told := several_data(*described):
                print(f"warning: {told}: together they are no cross-validation", flush=True)
            if self._task.predictions:
                line = next_command("predict", out, "-i", "IMAGES", "-o", "PREDICTIONS")
                print(f"next: {line}  (the mean of all folds)", flush=True)
            else:
                print(f"next: {next_command('report', *runs)}  (all folds on one page)", flush=True)
        return 0

    def _warn_of_other_data(self, contents: Sequence[Mapping[str, Any]]) -> None:
        """Warns, once of each, if folds that have finished are not of one split, or not of the same classes."""
        if (told := not_one_split(contents)) and "split" not in self._told:
            self._told.add("split")
            print(f"warning: {told}: together these folds are no cross-validation", flush=True)
        described = [content["dataset"] for content in contents if "dataset" in content]
        classes = (
            [own["labels"], (own.get("volume_classes") or {}).get("names")] for own in described if "labels" in own
        )
        if len({json.dumps(own, sort_keys=True) for own in classes}) > 1 and "classes" not in self._told:
            self._told.add("classes")
            why = "the classes of the data changed between these folds: predict refuses their mean"
            print(f"warning: {why}", flush=True)

    @property
    def until(self) -> float:
        """When all five have to leave, by ``time.monotonic``: the time limit is for each start, and kept as a run's."""
        parser = Parser("train", add_help=False, allow_abbrev=False)
        parser.add_argument("--time-limit", default="")
        return self.began + parse_duration(parser.parse_known_args(self.flags)[0].time_limit)

    def _rehearse(self, launcher: Launcher) -> int:
        """Returns the exit code of the dry run of the first fold, for which ranks need not meet."""
        self._refuse()
        if self.own.resume:
            self._add_flags_of_before(self.own.out, launcher)
        return self._start([*python_module("train"), *self._line(0, runs_of(self.own.out)[0]), "--dry-run"], {})

    def _open(self, launcher: Launcher) -> dict[str, Any]:
        """Returns where the runs are and with which flags folds begin, after making and marking the place."""
        self._refuse()
        out = self._folder(launcher)
        read_flags(out)  # raises for a file of another program
        refuse_foreign_status(out)
        refuse_other_folds(out)
        write_flags(out, self.flags)
        return {"out": out, "flags": list(self.flags)}

    def _refuse(self) -> None:
        if self.own.again:
            check_again_flag(self.own.out, self.own.resume)
        if not self.own.out:
            raise ValueError(f"--fold {ALL_FOLDS} needs --out, the folder for the five run folders")
        if self.own.data:
            refuse_folds(self._task, self.own.data)

    @property
    def _task(self) -> Task:
        return task_of(parse(self.flags, "laptop")[1])

    def _folder(self, launcher: Launcher) -> str:
        """Returns the folder of the five run folders; existing ones resume, which has to be asked for."""
        out, restarted = str(self.own.out), is_requeued(launcher)
        if holds_run(out):
            raise ValueError(f"--out {out} holds a run of its own, whose status would be lost: name another folder")
        if self.own.again:
            number = 1
            while all_ended(out) or holds_run(out):
                number += 1
                out = f"{self.own.out}-{number}"
            if not has_ended(out):  # else no fold could begin by the flags of before
                self._add_flags_of_before(out, launcher)
            return out
        runs = started_folds(out)
        if runs and not (self.own.resume or restarted):
            raise ValueError(f"--out {out} holds a run already, {runs[0]}: add --resume to continue, or name another")
        if self.own.resume and not runs and not holds_folds(out):
            raise ValueError(f"--resume --out {out}: it holds no five folds: name their folder, or leave --resume out")
        if self.own.resume or restarted:
            self._add_flags_of_before(out, launcher)
        return out

    def _add_flags_of_before(self, out: str, launcher: Launcher) -> None:
        """Begins folds by the flags of earlier starts, then those of this one, which win; refuses those that would
        make them unlike folds that have begun.
        """
        before = read_flags(out)
        known = before[len(before) - len(self.typed) :] == self.typed  # the line of before, typed again
        self.flags = before if known else [*before, *self.typed]
        self.new_flags = [] if known or not before else self.typed
        if self.new_flags and all(has_finished(read_status(run)) for run in runs_of(out)):
            self._refuse_longer(out)
            self.flags = before  # no fold would take the new ones
        elif self.new_flags:
            refuse_unlike_folds(started_folds(out), self.new_flags, self.flags, launcher)

    def _refuse_longer(self, out: str) -> None:
        """Raises ValueError for flags that ask finished folds to train longer, which none of them would do."""
        _, config, names = parse(self.new_flags, "laptop")
        for run in runs_of(out):
            before = read_config(run).get("config", {})
            longer = [n for n in ("epochs", "iterations") if n in names and getattr(config, n) > before.get(n, 0)]
            if longer:
                flags = [word for n in longer for word in (f"--{n}", getattr(config, n))]
                typed, one = " ".join(map(str, flags)), next_command("train", "--resume", "--out", run, *flags)
                raise ValueError(
                    f"--resume --fold {ALL_FOLDS} --out {out}: all five have finished, and {typed} would change none: "
                    f"continue each by itself, for example: {one}"
                )

    def _agree(self, meeting: Meeting, fold: int, run: str) -> dict[str, bool]:
        """Returns, on every rank, how the fold stands by the first one's reading, and whether any has to leave."""
        own = {"leaves": bool(self._signals) or time.monotonic() > self.until}
        if meeting.launcher.rank == 0:
            own["leaves"] |= (Path(run).parent / STOP_FILE).is_file()
            own |= {"finished": has_finished(read_status(run)), "begun": holds_run(run)}
        words = [dict(json.loads(text)) for text in meeting.gather(f"fold {fold} begins", json.dumps(own))]
        return {**words[0], "leaves": any(word["leaves"] for word in words)}

    def _train_fold(self, fold: int, run: str, resume: bool, launcher: Launcher) -> int:
        """Returns the exit code of one fold's training on this rank."""
        env = {PARENT_OF_FOLD: str(os.getpid())}
        env |= {FOLD_BEFORE: f"{self._before}/train.log"} if self._before else {}
        self._before = run
        if launcher.world > 1:  # ranks of one fold never meet those of another
            env[MEETING] = f"fold{fold}"
        code = self._start([*python_module("train"), *self._line(fold, run, resume)], env)
        early = not holds_run(run) and shell_code(code) - 128 in self._signals  # a signal before it began
        return exit_codes.PREEMPTED if early else code

    def _line(self, fold: int, run: str, resume: bool = False) -> list[str]:
        """Returns the flags of one fold's training; a resumed run has its settings."""
        line = [*(self.typed if resume else self.flags), "--fold", str(fold), "--out", run]
        if math.isfinite(self.until):
            line += ["--time-limit", f"{max(self.until - time.monotonic(), 1.0) / 60:.3f}"]
        return [*line, "--resume"] if resume else line

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Returns the exit code of a process, to which signals are forwarded; 75 if one came before it could act."""
        child = start_python(command, {**os.environ, **typed_variable(command), **env})
        with forward_signals([child], self._signals):
            code = child.wait()
        return exit_codes.PREEMPTED if -code in self._signals else exit_codes.code_of_processes(code, ())

    def _end(self, code: int, out: str, fold: int, launcher: Launcher) -> int:
        """Writes and says how it ended, on the first rank; returns the exit code."""
        if launcher.rank:
            return code
        left = code == exit_codes.PREEMPTED
        with suppress(OSError):
            (Path(out) / STOP_FILE).unlink(missing_ok=True)  # else it would end the next start
        how = "left early" if left else f"ended with exit code {code}"
        state, killed = read_status(runs_of(out)[fold]), code == exit_codes.FAULT
        if left or killed or state.get("state") != "running":  # else another training may hold it and go on
            why = f"fold {fold}: {state.get('why') or ('it had not begun' if left else how)}"
            _write(out, launcher, fold, "preempted" if left else "failed", why, code)
        again = resume_command("train", out, "--fold", ALL_FOLDS, ranks=launcher.world)
        line = f"fold {fold} {how}; to continue: {again}"
        print(line, flush=True)
        exit_codes.leave_last_words(line)
        return code


def _contents(runs: Sequence[str]) -> list[Mapping[str, Any]]:
    """Returns the config.json of each finished fold that has one that can be read."""
    contents = list[Mapping[str, Any]]()
    for run in runs:
        with suppress(DataError, ValueError):
            contents.append(read_config(run))
    return contents


def _agree_code(code: int, meeting: Meeting, fold: int) -> int:
    """Returns the most telling of all ranks' exit codes of a fold; its own where it failed and others are gone."""
    try:
        return most_informative_code(
            [int(text) for text in meeting.gather(f"fold {fold} ends", str(code), GRACE_S if code else START_S)]
        )
    except (ConnectionError, TimeoutError):
        if not code:
            raise
        return code


def _write(out: str, launcher: Launcher, fold: int, state: str, why: str = "", code: int = 0) -> None:
    """Writes how all five stand, on the first rank."""
    if launcher.rank == 0:
        status = StatusFile(Path(out))
        status.step, status.steps = fold, FOLDS
        status.write(state, why, code)


def refuse_folds(task: Task, data: str) -> None:
    """Raises ValueError for a data set whose folds are not those that --fold all5 trains."""
    numbers = task.fold_numbers(data)
    if list(numbers) != list(range(FOLDS)):
        listed = ", ".join(map(str, numbers))
        raise ValueError(
            f"--fold {ALL_FOLDS}: {data} has the folds {listed}, not 0 to {FOLDS - 1}: train each by its number"
        )
