"""Save and resume: safetensors and JSON, one directory a step, complete or absent.

A save writes ``checkpoints/step-N.tmp``, waits until every rank has, writes digests, syncs, renames, then turns
``latest`` over in one system call, and only then removes old ones. Whatever kills it, what was last complete stays.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from seqpar.consensus import agree, by_first, raise_together
from seqpar.data.files import sync, write_text
from seqpar.launch.weights.states import (
    fill,
    fill_optimizer,
    optimizer_tensors,
    random_states,
    set_random_states,
    whole_tensors,
)
from seqpar.mesh import Group

MODEL, OPTIMIZER, PROGRESS = "model.safetensors", "optimizer.safetensors", "progress.json"
MANIFEST = "manifest.json"
State = dict[str, Tensor]


@dataclass
class Progress:
    """Where a run stands: all that is not a tensor."""

    step: int = 0
    best: float = -1.0
    best_step: int = -1
    validated: int = -1  # the step after which validation last ran to its end
    global_batch: int = 0


class DamagedCheckpoint(ValueError):
    """A checkpoint whose files do not match their digests."""


class NotSaved(OSError):
    """A save that some rank could not finish: told on all ranks alike; what was saved before is kept."""


def save(
    folder: Path,
    net: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    world: Group,
    config: str = "{}",
    is_best: bool = False,
) -> Path:
    """Returns the new checkpoint's directory; the same outcome on all ranks, ``NotSaved`` where any failed.

    ``config`` is the text of the run's config.json: a checkpoint says by itself what it is of.
    """
    target = folder / f"step-{progress.step:08d}"
    is_first = world.index == 0
    model = whole_tensors(net.state_dict(), is_first)
    states = whole_tensors(optimizer_tensors(net, optimizer), is_first)
    draft = target.with_suffix(".tmp")
    problem = _tried(lambda: _fresh(draft)) if is_first else ""
    agree(0, world)  # nobody writes before the folder is there
    problem = problem or _tried(lambda: _write(draft, model, states, progress, world.index, config))
    try:
        raise_together(_not_saved(target, problem, world), world, name_rank=False)
        problem = _tried(lambda: _commit(draft, target, folder, is_best)) if is_first else ""
        raise_together(_not_saved(target, problem, world), world, name_rank=False)
    except NotSaved:
        if is_first:
            shutil.rmtree(draft, ignore_errors=True)
        raise
    if is_first and (problem := _tried(lambda: _purge(folder, target))):
        print(f"warning: old checkpoints in {folder} stay: {problem}", file=sys.stderr, flush=True)
    return target


def _not_saved(target: Path, problem: str, world: Group) -> NotSaved | None:
    where = f"rank {world.ranks[world.index]}: " if world.size > 1 else ""
    return (
        NotSaved(f"{target} could not be saved: {where}{problem}; what was saved before is kept") if problem else None
    )


def _tried(act: Callable[[], None]) -> str:
    try:
        act()
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""


def _fresh(draft: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def _write(draft: Path, model: State, states: State, progress: Progress, rank: int, config: str) -> None:
    """Every rank writes its own random states; the first one all that is equal on all."""
    _write_text(draft / f"random-{rank:05d}.json", json.dumps(random_states()))
    if rank:
        return
    write_tensors(draft / MODEL, model)
    write_tensors(draft / OPTIMIZER, states)
    _write_text(draft / PROGRESS, json.dumps(asdict(progress)))
    _write_text(draft / "config.json", config)


def _commit(draft: Path, target: Path, folder: Path, is_best: bool) -> None:
    digests = {path.name: digest(path) for path in sorted(draft.iterdir())}
    _write_text(draft / MANIFEST, json.dumps(digests, indent=2))
    sync(draft)
    if target.exists():  # a run that was left in validation saves that step again
        aside = target.with_suffix(".old")  # found too, should this be killed before the next rename
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.rename(draft, target)
    sync(folder)
    point(folder / "latest", target.name)
    if is_best:
        point(folder / "best", target.name)


def point(link: Path, name: str) -> None:
    """Makes the small file ``link`` name a directory, in one step."""
    write_text(link, name)


def _purge(folder: Path, newest: Path, keep: int = 2) -> None:
    """Removes all but the newest checkpoints and the best; also what an abandoned course left behind."""
    best = _named(folder / "best")
    steps = sorted(path for path in folder.glob("step-*") if path.is_dir() and not path.suffix)
    past = [path for path in steps if path.name <= newest.name]
    beyond = [path for path in steps if path.name > newest.name]  # the run went back before them
    for path in (*past[:-keep], *beyond):
        if path != best:
            os.rename(path, path.with_suffix(".gone"))  # never half a checkpoint under a checkpoint's name
    for suffix in ("tmp", "old", "gone"):
        for path in folder.glob(f"step-*.{suffix}"):
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".*.tmp"):  # of a run that was killed as it turned ``latest`` over
        path.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file and syncs it; shared storage is written out once for each name."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})
    sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
    sync(path)


def digest(path: Path) -> str:
    """Returns the hash of a file's bytes."""
    seen = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            seen.update(block)
    return seen.hexdigest()


def _named(link: Path) -> Path | None:
    try:
        name = link.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return link.parent / name if re.fullmatch(r"step-\d+", name) else None


def find(folder: Path, which: str = "latest") -> Path:
    """Returns the directory of a complete checkpoint; falls back to the newest undamaged one, saying so."""
    named = _named(folder / which)
    others = [path for path in _whole(folder) if path != named]
    others.sort(key=lambda path: (path.stem, not path.suffix), reverse=True)
    tried: list[str] = []
    for path in [*([named] if named else []), *others]:
        problem = _problem(path)
        if not problem:
            if tried:
                print(f"warning: {'; '.join(tried)}: going back to {path.name}", file=sys.stderr, flush=True)
            return path
        tried.append(problem)
    raise DamagedCheckpoint(f"{folder}: no complete checkpoint ({'; '.join(tried) or 'the folder holds none'})")


def _whole(folder: Path) -> list[Path]:
    """Returns what was once complete; a re-saved step lies aside for a moment."""
    return [path for path in folder.glob("step-*") if path.suffix in ("", ".old")]


def find_together(folder: Path, world: Group) -> Path | None:
    """Returns what the first rank finds, on every rank; None where nothing was ever saved."""
    found = by_first(lambda: str(find(folder)) if _whole(folder) else "", world)
    return Path(found) if found else None


def _problem(path: Path) -> str:
    try:
        digests = dict(json.loads((path / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):  # torn, or bytes that are no text
        return f"{path.name} is incomplete"
    for name in (MODEL, OPTIMIZER, PROGRESS):
        if name not in digests:
            return f"{path.name}/{MANIFEST} is damaged"
    for name, wanted in digests.items():
        try:
            found = digest(path / name)
        except OSError:
            return f"{path.name}/{name} is missing"
        if found != wanted:
            return f"{path.name}/{name} is damaged"
    return ""


def load(path: Path, net: nn.Module, optimizer: Optimizer, rank: int) -> Progress:
    """Returns the progress of a checkpoint after filling net, optimizer and this rank's random states."""
    wanted = net.state_dict()
    own, saved = {name: tuple(tensor.shape) for name, tensor in wanted.items()}, _shapes(path / MODEL)
    wrong = [name for name in {**own, **saved} if own.get(name) != saved.get(name)]
    if wrong:
        raise ValueError(f"{path} holds another network: {', '.join(wrong[:4])} differ; resume with the run's settings")
    for name, tensor in _tensors(path / MODEL):
        fill(wanted[name], tensor)
    fill_optimizer(net, optimizer, _tensors(path / OPTIMIZER))
    states = path / f"random-{rank:05d}.json"
    if states.exists():  # all draws of a run are keyed by step; a rank that is new starts from its seed
        set_random_states(json.loads(states.read_text()))
    return read_progress(path)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields a file's tensors one by one, so that no rank holds them all."""
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            yield name, file.get_tensor(name)


def read_progress(path: Path) -> Progress:
    """Returns where the run stood at a checkpoint."""
    return Progress(**json.loads((path / PROGRESS).read_text()))
