"""How a run stands: status.json, corrected where the process was killed; which weights it has and what is known of
them; at which step each start began.
"""

import json
import math
import re
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from seqpar.data.errors import DataError
from seqpar.data.files import read_whole, write_json
from seqpar.runs.journal import describe_lost, read_metrics
from seqpar.runs.metrics_tail import MEASURED_ON, SCORES, basis_of, best_validation, comparable, measure_of, score_of
from seqpar.runs.run_folder import holds_folds, holds_run, origin_mark, read_best_step, read_config, read_status
from seqpar.runs.run_lock import RunLock
from seqpar.settings.config import Config
from seqpar.settings.lessons import lessons_of
from seqpar.settings.rules import with_absolute_paths
from seqpar.terminal import coloured, typed_command
from seqpar.text import flag_name
from seqpar.weights import checkpoint
from seqpar.weights.checkpoint import Progress
from seqpar.weights.facts import ORIGIN, WEIGHTS, origin_of


class StatusFile:
    """Writes ``status.json``: whether a run is running, finished, preempted or failed, and why.

    ``step`` is where the run is, ``steps`` where it ends; ``weights`` the digest of what a finished one has become.
    ``lock``: of the run folder; without holding it, nothing is written.
    """

    def __init__(self, out: Path, lock: RunLock | None = None) -> None:
        self.path, self.lock = out / "status.json", lock
        self.step = self.steps = 0
        self.weights = ""

    def open(self) -> None:
        """Writes that a run is running; what a finished one says stays until ``begin``, as it may not be resumed."""
        before = read_status(self.path.parent)
        self.step, self.steps = _whole(before, "step"), _whole(before, "steps")
        if before.get("state") != "finished":
            self.write("running")

    def begin(self) -> None:
        """Writes that a run is running, unless another rank has failed."""
        if read_status(self.path.parent).get("state") == "finished":
            self.write("running")
        self.write_unless_over("running")

    def write(self, state: str, why: str = "", code: int = 0, durable: bool = True) -> None:
        """Writes the state.

        - ``code``: the exit code that goes with it
        - ``durable``: wait until it is on disk. False where this process ends in trouble: its peers wait for that end,
          the disk may be what does not answer, and other processes read the new file at once anyway
        """
        if self.lock is not None and self.lock.is_lost():
            return
        content = {"state": state, "step": self.step, "steps": self.steps, "why": why, "code": code}
        if state == "finished" and self.weights:
            content |= {"weights": self.weights, **origin_mark(self.path.parent)}
        content["time"] = time.time()
        try:
            write_json(self.path, content, durable)
        except OSError:  # of a full disk, which has room in the old file: else a failed run would read as killed
            if state == "running" or not self.path.is_file():
                raise
            with open(self.path, "r+") as file:
                file.write(json.dumps(content, indent=2) + "\n")
                file.truncate()

    def write_unless_over(self, state: str, why: str = "", code: int = 0, durable: bool = True) -> None:
        """Writes, unless another rank has written how the run ended: the first cause is kept."""
        now = read_status(self.path.parent)
        if now.get("state", "running") == "running":
            self.step, self.steps = self.step or _whole(now, "step"), self.steps or _whole(now, "steps")
            self.write(state, why, code, durable)


def _whole(status: Mapping[str, Any], name: str) -> int:
    return n if isinstance(n := status.get(name), int) else 0


def describe_kill(run: str | Path) -> str:
    """Returns a sentence on a run folder whose training was killed; "" where none certainly was.

    - ``run``: a run folder; a file, or a folder that holds no run, is none, nor is a folder of five folds
    """
    run = Path(run)
    if holds_folds(run) or not _says_running(run):  # each fold has a lock of its own
        return ""
    process = RunLock(run).abandoned_by()
    if not process or not _says_running(run):  # it may have ended while the lock was looked at
        return ""
    return f"{run} was killed: its status.json says running, but {process}; {_last_step(run)}"


def describe_unfinished(run: Path, weights: Path) -> list[str]:
    """Returns a remark on weights of a run folder that has not done all of its steps; [] of a finished run, or of none.

    - ``weights``: their file
    """
    how = {"running": "is still running", "preempted": "was stopped early", "failed": "failed"}
    status = read_status(run) if holds_run(run) and not holds_folds(run) else {}
    if (state := str(status.get("state"))) not in how:
        return []
    done, total = re.fullmatch(r"step-(\d+)", weights.parent.name), _whole(status, "steps")
    if done and int(done[1]) == total:
        return []
    steps = f" of {total:,}" * bool(total)
    of = f"of its step {int(done[1]):,}{steps}" if done else "of an earlier end, before it went on"
    return [f"{run} {'was killed' if describe_kill(run) else how[state]}: these weights are {of}"]


def warn_if_killed(*folders: Path) -> None:
    """Prints a warning on stderr for each run folder among ``folders`` whose training was killed."""
    for folder in dict.fromkeys(folders):
        if sentence := describe_kill(folder):
            _warn(f"{sentence}; continue with train --resume --out {folder}")


@dataclass(frozen=True)
class TakenWeights:
    """Which weights of a run predict takes unless told otherwise, and what is known about them and the best.

    - ``step``: theirs; None if it is not known
    - ``saved``: the steps that the newest checkpoint has done, and ``validations`` those after which the run's other
      files say that it was validated: metrics.jsonl should have all of these
    - ``held_out``: the validations that metrics.jsonl has; ``scores``: of each that is known and can be compared with
      the last, by step
    - ``best``: the step of a better validation, None if there is none; ``is_there``: whether its weights are whole
    - ``none_saved``: whether the weights of no validation were ever saved, as when there was no room for them
    - ``is_untold``: whether nothing tells after which step they were saved, though validations are known
    - ``foreign``: why they are another run's; "" if they are not
    - ``edited``: sentences on what somebody has edited, or copied from another run; "" of nothing
    - ``has_ended``: whether the run did all of its steps, so that a resume has nothing to do
    """

    path: Path = Path()
    task: str = "segment"
    step: int | None = None
    saved: int = 0
    validations: frozenset[int] = frozenset()
    held_out: Sequence[Mapping[str, Any]] = ()
    scores: Mapping[int, float] = field(default_factory=dict)
    best: int | None = None
    is_there: bool = False
    none_saved: bool = False
    is_untold: bool = False
    foreign: str = ""
    edited: str = ""
    has_ended: bool = False

    def describe_lost(self, train: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Returns a sentence on what metrics.jsonl lacks; "" if that is nothing.

        - ``train``: its rows of steps; None: ask for validations alone
        """
        steps, path = 0 if train is None else self.saved, self.path / "metrics.jsonl"
        lost = describe_lost([*(train or ()), *self.held_out], steps, self.validations)
        if not path.exists():
            told = f"{path} is missing, and with it the record of {lost}."
        else:
            told = f"{path} lacks {lost}, which other files of the run record: it was cut off or replaced."
        return f"{told} Restore it from a copy." if lost else ""

    @property
    def not_the_best(self) -> str:
        """A sentence if the weights are not those of the best validation; else ""."""
        if self.foreign:
            return f"{self.foreign}. predict and export refuse it."
        if self.is_untold:
            told = "The run's checkpoints are gone, and no status.json tells after which step the weights in"
            return f"{told} {self.path / WEIGHTS} were saved, or whether they are this run's."
        if self.best is None:
            return ""
        folder = self.path / "checkpoints" / f"step-{self.best:08d}"
        own, best = self._measured(self.step), self._measured(self.best)
        best += " with a lower loss" * (own == best)
        told = f"Predict takes the weights of step {self.step:,} ({own})"
        if self.is_there:
            better = f"Those of step {self.best:,} scored better ({best}), but checkpoints/best does not name them"
            return f"{told}. {better}: to take them, use --checkpoint {folder}."
        told += f", as those of step {self.best:,}, the best validation ({best}), are "
        if self.none_saved:
            return f"{told}not saved. Training continues from step {self.step:,} with --resume."
        if folder.exists():
            return f"{told}damaged: to take them, restore {folder} and use it as --checkpoint."
        if 0 < self.saved < self.best and not self.has_ended:  # killed after the validation, or the newest were removed
            told += f"not there. Training continues from step {self.saved:,} with --resume and validates again"
            return f"{told}; if you have a copy, restore {folder} instead."
        return f"{told}not there: they were removed, or never saved. If you have a copy, restore {folder}."

    def _measured(self, step: int | None) -> str:
        if step is None or step not in self.scores:
            lost = "validated, but its score is not recorded" if step in self.validations else "not validated"
            return "validated on other cases" if step in {row["step"] for row in self.held_out} else lost
        score = self.scores[step]
        unscored = f"validated, without a {SCORES[self.task]}"
        return unscored if math.isnan(score) else f"{SCORES[self.task]} {measure_of(self.task, score):.3f}"


def weights_taken(run: Path) -> TakenWeights:
    """Returns which weights of a run folder predict takes unless told otherwise, and what is known about them."""
    points, known = run / "checkpoints", dict[str, Progress]()
    name, status, task, foreign = "", read_status(run), "segment", ""
    with suppress(DataError, OSError):  # if none is whole, predict takes none
        name = checkpoint.named_by(points)
        for which in {name, "latest"} if name else ():
            known[which] = checkpoint.read_progress(checkpoint.look_up(points, which, trusts_times=True)[0])
    try:
        if name:
            checkpoint.refuse_of_other(checkpoint.look_up(points, name, trusts_times=True)[0], read_config(run))
    except (ValueError, OSError) as error:
        foreign = str(error) if "belongs to another run" in str(error) else ""
    with suppress(DataError, ValueError, LookupError, OSError):
        task = str(read_config(run)["config"]["task"])
    saved = max((own.step for own in known.values()), default=0)
    validations = {at for own in known.values() for at in (own.validated, own.best_step)} | {read_best_step(run) or 0}
    held_out = list[dict[str, Any]]()  # read last, as a training may go on
    with suppress(DataError, OSError):
        held_out = read_metrics(run / "metrics.jsonl", "val")
    if not (saved or held_out or _says_running(run)):  # checkpoints were not copied
        validations.add(read_best_step(run, "validation/summary.json") or 0)
    rows, best = comparable(held_out), best_validation(held_out)
    basis = basis_of(rows) or max(((own.step, own.measured_on) for own in known.values()), default=(0, ""))[1]
    bests = [own for own in known.values() if own.best >= 0 and own.measured_on in ("", basis)]
    scores = {own.best_step: own.best for own in bests} | {row["step"]: score_of(row) for row in rows}
    if saved and _says_running(run) and not describe_kill(run):  # the newest weights may not be saved yet
        scores = {at: score for at, score in scores.items() if at <= saved}
    ranked = {at: score for at, score in scores.items() if not math.isnan(score)}
    top = max(ranked, key=lambda at: (ranked[at], best is not None and at == best["step"]), default=None)
    taken = known[name].step if name in known else None
    if not name and (run / WEIGHTS).is_file():
        taken = _whole(status, "step") or None if status.get("state") == "finished" else None
    is_best = taken is None or top is None or ranked.get(taken, -math.inf) > ranked[top] - 1e-9
    if is_best and taken in ranked and top not in (None, taken):  # as good: then the lower loss decides
        losses = {row["step"]: float(row["loss"]) for row in rows}
        has_loss = all(own.best_loss is not None for own in bests)
        is_best = not (has_loss and losses.get(top, math.nan) < losses.get(taken, math.nan))
    is_untold = not name and taken is None and top is not None and (run / WEIGHTS).is_file()
    return TakenWeights(
        run,
        task if task in SCORES else "segment",
        taken if taken is not None or is_untold else _named_step(points) or top,
        saved,
        frozenset(at for at in validations if 0 < at <= (saved or at)),
        held_out,
        scores,
        None if is_best or task == "pretrain" else top,  # weights of a pretraining are taken from its end
        top is not None and checkpoint.is_whole(points, top),
        bool(known) and name == "latest" and all(own.best_step < 0 for own in known.values()),
        is_untold,
        foreign,
        " ".join(filter(None, [_describe_edits(run), *_foreign_files(run, task, known.values(), held_out)])),
        status.get("state") == "finished",
    )


def _named_step(points: Path) -> int | None:
    try:
        return int(read_whole(points / "best").decode().strip().removeprefix("step-"))
    except (OSError, ValueError):
        return None


def warn_of_weights(*folders: Path, are_named: bool = False) -> None:
    """Prints warnings on stderr on each run folder among ``folders`` whose weights are not the best that it had, whose
    record lacks validations, or whose settings somebody has edited.

    - ``are_named``: the command line says which weights to take
    """
    for taken in map(weights_taken, filter(holds_run, dict.fromkeys(folders))):
        if taken.edited:
            _warn(taken.edited)
        if are_named:
            continue
        is_latest = taken.step is not None and taken.step == taken.saved
        if is_latest and taken.saved and not taken.scores and not taken.validations:
            _warn(f"{taken.path} has not been validated, so none of its weights are the best: the latest are taken "
                  f"(step {taken.step:,})")  # fmt: skip
        warn_of_lost(taken)


def warn_of_lost(*runs: TakenWeights) -> None:
    """Prints warnings on stderr about weights that are not the best, and records that lack validations."""
    for taken in runs:
        told = taken.not_the_best
        for line in filter(None, [told and f"{taken.path}: {told}", taken.describe_lost()]):
            _warn(line)


def _warn(line: str) -> None:
    print(coloured(f"warning: {line}", sys.stderr), file=sys.stderr, flush=True)


def _says_running(run: Path) -> bool:
    return read_status(run).get("state") == "running"


def _last_step(run: Path) -> str:
    try:
        steps = [row["step"] + 1 for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
        return f"the last step that it recorded is {max(steps)}"
    except (OSError, ValueError, KeyError, TypeError):
        return "it recorded no step"


Changes = Mapping[str, Sequence[Any]]  # name of a setting: what it was, what it is
_OF_ONE_START = ("out", "resume", "again", "take_over", "dry_run")  # these say how a run is started, not what it is


def changed_settings(before: Config, now: Config) -> dict[str, list[Any]]:
    """Returns the settings that differ, each with what it was and what it is."""
    before, now = map(with_absolute_paths, (before, now))
    pairs = {f.name: [getattr(before, f.name), getattr(now, f.name)] for f in fields(Config)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in _OF_ONE_START}


def edited_settings(out: str | Path, content: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the settings in a run's config.json that no start of it has changed since its last checkpoint, each with
    what it is there and what it is now: somebody edited the file. Raises DataError if the checkpoint is another run's.

    - ``content``: of config.json
    """
    points = Path(out) / "checkpoints"
    try:
        newest, best = (checkpoint.look_up(points, which, trusts_times=True)[0] for which in ("latest", "best"))
    except (OSError, ValueError):  # none, or damaged, which resuming tells
        return {}
    for point in (newest, best):
        checkpoint.refuse_of_other(point, content)
    try:
        saved = json.loads(read_whole(newest / "config.json"))
        starts = content["history"][len(saved.get("history", ())) :]
        since = {name: new for start in starts for name, (_, new) in start["changed"].items()}
        expected = {**saved["config"], **since}
        configs = [lessons_of(Config.from_dict(it))[0].config for it in (expected, content["config"])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # of an earlier version, or damaged
        return {}
    return changed_settings(*configs)


_DATA_AS_TRAINED = ("labels", "regions", "regions_class_order", "values", "recipe", "train", "held_out")


def _describe_edits(run: Path) -> str:
    """Returns a sentence on what somebody has edited in a run's config.json since its last checkpoint; "" of nothing.

    What a start changed is no edit, and what a file does not tell is not known.
    """
    edits = list[str]()
    with suppress(ValueError, OSError, LookupError, TypeError, AttributeError):  # programs tell of damage
        content = read_config(run)
        edits += filter(None, [list_changes(edited_settings(run, content))])
        newest = checkpoint.look_up(run / "checkpoints", trusts_times=True)[0]
        saved = json.loads(read_whole(newest / "config.json"))
        if len(saved["history"]) == len(content["history"]):
            pairs = {name: [own["dataset"].get(name) for own in (saved, content)] for name in _DATA_AS_TRAINED}
            edits += [f"{name} of its data" for name, (before, now) in pairs.items() if before != now]
    return f"{run}/config.json differs from that of the last checkpoint: {', '.join(edits)}." if edits else ""


def _foreign_files(
    run: Path, task: str, known: Collection[Progress], held_out: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yields a sentence on each file of a run that contradicts its checkpoints or config.json.

    - ``known``: the progress of checkpoints; ``held_out``: the validations in metrics.jsonl
    """
    mended = "it was edited, or is another run's. Restore it from a copy."
    for own in known:
        rows = [row for row in held_out if row["step"] == own.best_step]
        rows = [row for row in rows if row.get(MEASURED_ON, own.measured_on) == own.measured_on]
        best = own.best, math.nan if own.best_loss is None else own.best_loss
        pairs = [(score_of(row), float(row["loss"])) for row in rows]
        if own.best >= 0 and pairs and not any(all(map(_agree, pair, best)) for pair in pairs):
            told, true = (
                f"{SCORES[task]} {measure_of(task, score):.4f}{'' if math.isnan(best[1]) else f' (loss {loss:.4f})'}"
                for score, loss in (pairs[-1], best)
            )
            path = run / "metrics.jsonl"
            yield f"{path} says {told} after step {own.best_step:,}, and a checkpoint {true}: {mended}"
            break
    with suppress(OSError, ValueError, LookupError, TypeError):  # readers tell of damage
        now = json.loads(read_whole(run / "window.json"))
        same = [own.windows for own in known if own.windows and own.windows["step"] == now["step"]]
        if any(json.dumps(windows, sort_keys=True) != json.dumps(now, sort_keys=True) for windows in same):
            yield f"{run / 'window.json'} is not what a checkpoint says was measured: {mended}"
    with suppress(DataError, OSError, ValueError, LookupError, TypeError, AttributeError):
        own_origin, path = origin_of(read_config(run)), run / "validation" / "summary.json"
        if own_origin and json.loads(read_whole(path)).get(ORIGIN, own_origin) != own_origin:
            yield f"{path} is another run's, and with it the scores of single cases: restore this run's own folder."


def _agree(one: float, other: float) -> bool:
    """Returns whether two numbers are the same but for rounding, as far as both are known."""
    return math.isnan(one) or math.isnan(other) or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)


def changes_line(changes: Changes) -> str:
    """Returns the changes in a line, as typed on the command line; "" for none."""
    listed = list_changes(changes)
    return listed and f"changed since this run was last started: {listed}"


def list_changes(changes: Changes) -> str:
    """Returns each change as typed on the command line."""
    return ", ".join(f"--{flag_name(name)} {_typed(was)} -> {_typed(new)}" for name, (was, new) in changes.items())


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (" ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)) or "unset"


def append_start(
    history: Sequence[Any], step: int, ranks: int, changes: Changes, data: Sequence[str] = ()
) -> list[Any]:
    """Returns a run's history with this start of it; ``step``: from where it resumes; ``data``: how those changed."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    start = {"step": step, "time": now, "ranks": ranks, "changed": dict(changes), "command": typed_command()}
    return [*history, start | ({"data": list(data)} if data else {})]


def changes_of_data(history: Sequence[Any], last: int) -> list[str]:
    """Returns a sentence for each step up to the ``last`` from which a run, resumed there, had other data.

    Earlier versions do not tell.
    """
    told, starts = dict[int, list[str]](), list[tuple[int, str]]()
    for start in history[1:]:
        with suppress(LookupError, TypeError, ValueError):  # of a damaged record
            starts.append((int(start["step"]), "; ".join(start.get("data", ()))))
    for n, (_, data) in enumerate(starts):
        step = min(step for step, _ in starts[n:])  # steps that a later start did again do not count
        if data and 0 < step <= last:
            told.setdefault(step, []).append(data)
    before = "; then, before any further step, "
    return [f"From step {step:,}, where this run was resumed, {before.join(own)}." for step, own in told.items()]
