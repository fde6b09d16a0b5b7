"""Saves and loads checkpoints: safetensors and JSON, one directory per saved step, complete or absent.

A save writes ``checkpoints/step-N.HOST.PID.tmp``, waits for all ranks, writes digests, syncs, renames the directory,
points ``latest`` to it in one system call, and only then removes old checkpoints. Whenever a save is killed, the last
complete checkpoint stays. A save that hung on its disk while another training took the run over changes nothing there.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from operator import index
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from seqpar.data.errors import DataError, reason, unreadable
from seqpar.data.files import fsync_folder, refuse_special, umask_mode, write_text
from seqpar.models.network import NO_RESIZING, Resizing, resize_tensors
from seqpar.parallel.consensus import max_over_ranks, raise_on_all_ranks, run_on_rank0
from seqpar.parallel.mesh import Group
from seqpar.weights.facts import as_metadata, origin_of
from seqpar.weights.states import (
    copy_into,
    fill_optimizer,
    optimizer_tensors,
    random_states,
    set_random_states,
    whole_tensors,
)
from seqpar.weights.weight_files import digest, shapes_in, tensors_in

MODEL, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.safetensors", "progress.json"
MANIFEST = "manifest.json"
_REMOVE = "remove this checkpoint, so that an earlier one is taken"
State = dict[str, Tensor]
Collect = Callable[[State, bool], State]  # tensors of all ranks, whole, or on ranks that keep none an empty dict


@dataclass
class Progress:
    """How far a run has come: everything in a checkpoint that is not a tensor."""

    step: int = 0
    best: float = -1.0
    best_step: int = -1
    validated: int = -1  # the step of the last complete validation
    global_batch: int = 0
    best_loss: float | None = None  # of the best validation; None in a checkpoint that does not record it
    windows: dict[str, Any] | None = None  # content of window.json, about the best; None if nothing was measured
    measured_on: str = ""  # which cases validations score, and how; "" in a checkpoint that does not record it
    former: list[int] = field(default_factory=list)  # steps of what was the best on other cases, which are kept

    def compares_with(self, measured_on: str) -> bool:
        """Returns whether validations are of the cases of the best so far and measured like it, as far as is known."""
        return self.best < 0 or self.measured_on in ("", measured_on)

    def begin_scale(self, measured_on: str) -> None:
        """Says what validations are measured on; one that does not compare with the best so far will be the best.

        The checkpoint of the best so far is kept.
        """
        if not self.compares_with(measured_on):
            self.best, self.best_loss = -1.0, None
            self.former = sorted({*self.former, self.best_step})
        self.measured_on = measured_on

    def is_beaten_by(self, score: float, loss: float) -> bool:
        """Returns whether a validation is better than the best: by its score or, if that is equal, by its loss."""
        return score > self.best or (score == self.best and self.best_loss is not None and loss < self.best_loss)


class DamagedCheckpoint(DataError):
    """A checkpoint whose files do not match their digests."""


class NotSaved(OSError):
    """A save that some rank could not finish; all ranks raise it, and earlier checkpoints are kept."""


def save(
    folder: Path,
    net: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    world: Group,
    config: str = "{}",
    is_best: bool = False,
    refuse_lost: Callable[[], None] = lambda: None,
    collect: Collect = whole_tensors,
) -> Path:
    """Saves a checkpoint and returns its directory; if one rank fails, all raise ``NotSaved``.

    - ``folder``: the run's folder of checkpoints
    - ``world``: all ranks of the run
    - ``config``: text of the run's config.json, so that the checkpoint can be read without the run folder
    - ``is_best``: whether ``best`` shall name this checkpoint
    - ``refuse_lost``: raises ``ValueError`` where another training has the run folder by now; the first rank asks
      before each change of what is saved there, and all ranks raise the error
    - ``collect``: brings tensors, of the network and of its optimizer, to the first rank
    """
    target = folder / f"step-{progress.step:08d}"
    is_first = world.index == 0
    model = collect(net.state_dict(), is_first)
    states = collect(optimizer_tensors(net, optimizer), is_first)
    draft = target.with_name(f"{target.name}.{run_on_rank0(_this_process, world)}.tmp")
    problem = _attempt(lambda: _make_draft(draft)) if is_first else ""
    max_over_ranks(0, world)  # no rank writes before the folder exists
    problem = problem or _attempt(lambda: _write(draft, model, states, progress, world.index, config))
    try:
        raise_on_all_ranks(_not_saved(target, problem, world), world, name_rank=False)

        def commit() -> None:
            problem = _attempt(lambda: _commit(draft, target, folder, is_best, refuse_lost))
            if error := _not_saved(target, problem, world):
                raise error

        run_on_rank0(commit, world)
    except (NotSaved, ValueError):
        if is_first:
            shutil.rmtree(draft, ignore_errors=True)
        raise

    def purge() -> None:
        refuse_lost()
        if problem := _attempt(lambda: _purge(folder, target, progress.former)):
            print(f"warning: old checkpoints in {folder} stay: {problem}", file=sys.stderr, flush=True)

    run_on_rank0(purge, world)
    return target


def _this_process() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"


def _not_saved(target: Path, problem: str, world: Group) -> NotSaved | None:
    where = f"rank {world.ranks[world.index]}: " if world.size > 1 else ""
    return NotSaved(f"{target} could not be saved: {where}{problem}") if problem else None


def _attempt(act: Callable[[], None]) -> str:
    """Returns what went wrong with files while ``act`` ran, empty if nothing did."""
    try:
        act()
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""


def _make_draft(draft: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def _write(draft: Path, model: State, states: State, progress: Progress, rank: int, config: str) -> None:
    """Writes this rank's random states and, on the first rank, everything that is the same on all ranks."""
    _write_text(draft / f"random-{rank:05d}.json", json.dumps(random_states()))
    if rank:
        return
    write_tensors(draft / MODEL, model, as_metadata(json.loads(config).get("config", {})))
    write_tensors(draft / OPTIMIZER, states)
    _write_text(draft / PROGRESS, json.dumps(asdict(progress)))
    _write_text(draft / "config.json", config)


def _commit(draft: Path, target: Path, folder: Path, is_best: bool, refuse_lost: Callable[[], None]) -> None:
    digests = {path.name: digest(path) for path in sorted(draft.iterdir())}
    _write_text(draft / MANIFEST, json.dumps(digests, indent=2))
    fsync_folder(draft)
    refuse_lost()
    if target.exists():  # a run that stopped in validation saves that step again
        aside = target.with_suffix(".old")  # ``find`` sees it too, if this process is killed before the next rename
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(draft, target)
    fsync_folder(folder)
    refuse_lost()  # a sync may take as long as the disk likes
    write_link(folder / "latest", target.name)
    if is_best:
        write_link(folder / "best", target.name)


def write_link(link: Path, name: str) -> None:
    """Writes the name of a checkpoint into the file ``link``, atomically."""
    write_text(link, name)


def _purge(folder: Path, newest: Path, former: Collection[int], keep: int = 2) -> None:
    """Removes all checkpoints except the newest ``keep``, the best and the ``former`` ones, and what killed saves left
    behind.
    """
    stay = {_named(folder / "best"), *(folder / f"step-{step:08d}" for step in former)}
    steps = sorted(path for path in folder.glob("step-*") if path.is_dir() and not path.suffix)
    past = [path for path in steps if path.name <= newest.name]
    beyond = [path for path in steps if path.name > newest.name]  # saved before the run resumed from an earlier step
    for path in (*past[:-keep], *beyond):
        if path not in stay:
            os.rename(path, path.with_suffix(".gone"))  # so that a killed removal leaves no half checkpoint
    for suffix in ("tmp", "old", "gone"):
        for path in folder.glob(f"step-*.{suffix}"):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.tmp"):  # of a run that was killed as it rewrote ``latest``
        path.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str] = as_metadata({})) -> None:
    """Writes a safetensors file and syncs it; tensors that share storage are written once per name."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with umask_mode(path):
        save_file(plain, path, metadata=dict(metadata))
    fsync_folder(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    fsync_folder(path)


def latest_step(folder: Path) -> int:
    """Returns the step of the checkpoint that ``latest`` names, whole or not; 0 if it names none."""
    point = _named(folder / "latest")
    return int(point.name.removeprefix("step-")) if point else 0


def _named(link: Path) -> Path | None:
    refuse_special(link)
    try:
        name = link.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return link.parent / name if re.fullmatch(r"step-\d+", name) else None


def restore_best(folder: Path, step: int) -> bool:
    """Has ``best`` name the checkpoint of a step, -1 for none, as the progress of a resumed run says; returns False,
    and removes the file, if that checkpoint is gone or damaged.

    The file names another where a run goes back to an earlier checkpoint, or was killed before it was written.
    """
    target, named = folder / f"step-{step:08d}", _named(folder / "best")
    if step >= 0 and named == target and not _is_gone(target):
        return True
    if step >= 0 and not _problem(target):
        write_link(folder / "best", target.name)
        return True
    (folder / "best").unlink(missing_ok=True)
    return step < 0


def _is_gone(target: Path) -> bool:
    return not (target.is_dir() or target.with_suffix(".old").is_dir())  # the latter while it is saved again


def find(folder: Path, which: str = "latest") -> Path:
    """Returns the directory of a complete checkpoint; warns and takes the newest undamaged one if ``which`` is not.

    - ``which``: latest or best
    """
    path, problems = look_up(folder, which)
    if problems:
        print(f"warning: {'; '.join(problems)}: going back to {path.name}", file=sys.stderr, flush=True)
    return path


def look_up(folder: Path, which: str = "latest", trusts_times: bool = False) -> tuple[Path, list[str]]:
    """Returns the checkpoint that ``find`` returns, and what is wrong with those that it would have preferred.

    - ``trusts_times``: besides the weights, read no file that has not been written since the checkpoint was complete
    """
    named = _named(folder / which)
    others = [path for path in _complete(folder) if path != named]
    others.sort(key=lambda path: (path.stem, not path.suffix), reverse=True)
    problems = [f"{folder / which} names no checkpoint"] * (named is None and (folder / which).is_file())
    for path in [*([named] if named else []), *others]:
        try:
            problem = _problem(path, trusts_times)
        except OSError as error:  # it may be whole: nothing may be trained again in its place
            if not trusts_times:
                raise unreadable(path, error) from None
            problem = f"{path.name} cannot be read ({reason(error)})"
        if not problem:
            return path, problems
        problems.append(problem)
    raise DamagedCheckpoint(folder, f"no complete checkpoint ({'; '.join(problems) or 'the folder holds none'})")


def named_by(folder: Path, which: str = "best") -> str:
    """Returns ``which`` (best or latest) if that names a checkpoint, else "latest"; "" if neither does."""
    return next((name for name in (which, "latest") if (folder / name).is_file()), "")


def is_whole(folder: Path, step: int) -> bool:
    """Returns whether the checkpoint of a step is there and undamaged, as far as times of files tell."""
    try:
        return not _problem(folder / f"step-{step:08d}", trusts_times=True)
    except OSError:
        return False


def _complete(folder: Path) -> list[Path]:
    """Returns the checkpoints that were once complete, among them those moved aside while their step is saved again."""
    return [path for path in folder.glob("step-*") if path.suffix in ("", ".old")]


def find_on_all_ranks(folder: Path, world: Group) -> Path | None:
    """Returns the checkpoint that the first rank finds, on all ranks; None where nothing was ever saved."""
    path = run_on_rank0(lambda: str(find(folder)) if _complete(folder) else "", world)
    return Path(path) if path else None


def _problem(path: Path, trusts_times: bool = False) -> str:
    """Returns what is wrong with a checkpoint, empty if nothing is; for ``trusts_times`` see ``look_up``.

    Raises OSError if the system refuses to read a file that is there.
    """
    for name in (MANIFEST, PROGRESS):
        refuse_special(path / name)
    try:
        digests = dict(json.loads((path / MANIFEST).read_text()))
        completed = (path / MANIFEST).stat().st_mtime_ns
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):  # absent, cut off or not JSON
        return f"{path.name} is incomplete"
    for name in (MODEL, OPTIMIZER, PROGRESS):
        if name not in digests:
            return f"{path.name}/{MANIFEST} is damaged"
    for name, saved_digest in digests.items():
        refuse_special(path / name)
        try:
            if trusts_times:
                at = (path / name).stat()
                is_old = at.st_mtime_ns < completed and name != MODEL  # copies keep times, and disks rot
                file_digest = saved_digest if is_old else _digest_of(path / name, at.st_mtime_ns)
            else:
                file_digest = digest(path / name)
        except FileNotFoundError:
            return f"{path.name}/{name} is missing"
        if file_digest != saved_digest:
            return f"{path.name}/{name} is damaged"
    try:
        step = index(json.loads((path / PROGRESS).read_text())["step"])
    except (ValueError, LookupError, TypeError) as error:
        return f"{path.name}/{PROGRESS} is damaged ({error})"
    return "" if path.stem == f"step-{step:08d}" else f"{path.name} holds the checkpoint of step {step}"


def refuse_of_other(point: Path, content: Mapping[str, Any]) -> None:
    """Raises DataError if a checkpoint is another run's; ``content``: of the config.json of the run that has it."""
    began = own = ""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # earlier versions kept none with it
        began, own = origin_of(json.loads((point / "config.json").read_text())), origin_of(content)
    if began and own and began != own:
        of_other = "belongs to another run than config.json describes: copy this run's checkpoints back"
        raise DataError(point, of_other)


@cache
def _digest_of(path: Path, _mtime_ns: int) -> str:
    """Returns the hash of a file that was read once in this process, as long as it is not written again."""
    return digest(path)


def load(
    path: Path,
    net: nn.Module,
    optimizer: Optimizer,
    rank: int,
    resizing: Resizing = NO_RESIZING,
    whole_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Progress:
    """Loads a checkpoint into net, optimizer and this rank's random generators; returns its progress.

    - ``resizing``: of tensors that another tile resizes
    - ``whole_shapes``: of the whole network, where this rank has some of its tensors; it loads these
    """
    state = net.state_dict()
    own = whole_shapes or {name: tuple(tensor.shape) for name, tensor in state.items()}
    with _as_damaged(path / MODEL):
        saved = shapes_in(path / MODEL)
    with _as_damaged(path / OPTIMIZER):
        kept = {key.rpartition("/")[0] for key in shapes_in(path / OPTIMIZER)}
    differing = [name for name in {**own, **saved} if own.get(name) != saved.get(name) and name not in resizing]
    if differing:
        raise ValueError(
            f"{path} holds another network: {', '.join(differing[:4])} differ; resume with the run's settings"
        )
    if foreign := sorted(kept - saved.keys()):
        raise DamagedCheckpoint(path / OPTIMIZER, f"holds states of {foreign[0]}, which the network lacks; {_REMOVE}")
    for name, tensor in resize_tensors(tensors_in(path / MODEL), resizing):
        if name in state:
            copy_into(state[name], tensor)
    parameters = {name for name, _ in net.named_parameters()}
    states = ((key, x) for key, x in tensors_in(path / OPTIMIZER) if key.rpartition("/")[0] in parameters)
    fill_optimizer(net, optimizer, resize_tensors(states, resizing))
    drawn = path / f"random-{rank:05d}.json"
    if drawn.exists():  # a new rank has none: it starts from its seed, and all draws of a run are keyed by step
        with _as_damaged(drawn):
            set_random_states(json.loads(drawn.read_text()))
    return read_progress(path)


def read_progress(path: Path) -> Progress:
    """Returns the progress that a checkpoint records."""
    with _as_damaged(path / PROGRESS):
        return Progress(**json.loads((path / PROGRESS).read_text()))


@contextmanager
def _as_damaged(file: Path) -> Iterator[None]:
    """Raises what reading a file inside meets as ``DamagedCheckpoint``, with the file's name."""
    try:
        yield
    except (SafetensorError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpoint(file, f"is damaged ({error}); {_REMOVE}") from None
