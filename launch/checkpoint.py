"""Save and resume: safetensors and JSON, one directory a step, complete or absent.

A save writes ``checkpoints/step-N.tmp``, waits until every rank has, writes digests, syncs, renames, then turns
``latest`` over in one system call, and only then removes old ones. Whatever kills it, what was last complete stays.
"""

import hashlib
import json
import os
import random
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from seqpar.collectives import agree, tell_all
from seqpar.mesh import Group

MANIFEST = "manifest.json"


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


def save(
    folder: Path, net: nn.Module, optimiser: Optimizer, progress: Progress, world: Group, is_best: bool = False
) -> Path:
    """Returns the new checkpoint's directory; the same outcome on all ranks, an ``OSError`` where any failed."""
    target = folder / f"step-{progress.step:08d}"
    draft = target.with_suffix(".tmp")
    problem = ""
    if world.index == 0:
        problem = _tried(lambda: _fresh(draft))
    agree(0, world)
    if not problem:
        problem = _tried(lambda: _write(draft, net, optimiser, progress, world.index))
    problems = [text for text in tell_all(problem, world) if text]
    if not problems and world.index == 0:
        problem = _tried(lambda: _commit(draft, target, folder, is_best))
    problems = problems or [text for text in tell_all(problem, world) if text]
    if problems:
        if world.index == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise OSError(f"{target} could not be saved: {problems[0]}; what was saved before is kept")
    return target


def _tried(act: Any) -> str:
    try:
        act()
    except (OSError, SafetensorError) as error:
        return str(error)
    return ""


def _fresh(draft: Path) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def _write(draft: Path, net: nn.Module, optimiser: Optimizer, progress: Progress, rank: int) -> None:
    """Every rank writes its own random states; the first one all that is equal on all."""
    _write_text(draft / f"random-{rank:05d}.json", json.dumps(random_states()))
    if rank:
        return
    write_tensors(draft / "model.safetensors", net.state_dict())
    write_tensors(draft / "optimizer.safetensors", optimiser_tensors(net, optimiser))
    _write_text(draft / "progress.json", json.dumps(progress.__dict__))


def _commit(draft: Path, target: Path, folder: Path, is_best: bool) -> None:
    digests = {path.name: digest(path) for path in sorted(draft.iterdir())}
    _write_text(draft / MANIFEST, json.dumps(digests, indent=2))
    _sync_folder(draft)
    if target.exists():  # a run that stops where it resumed saves the same step again
        shutil.rmtree(target)
    os.rename(draft, target)
    _sync_folder(folder)
    point(folder / "latest", target.name)
    if is_best:
        point(folder / "best", target.name)
    _purge(folder)


def point(link: Path, name: str) -> None:
    """Makes the small file ``link`` name a directory, in one step."""
    draft = link.with_suffix(".tmp")
    _write_text(draft, name)
    os.replace(draft, link)
    _sync_folder(link.parent)


def _purge(folder: Path, keep: int = 2) -> None:
    """Removes all but the newest checkpoints and the best."""
    best = _named(folder / "best")
    steps = sorted(path for path in folder.glob("step-*") if path.is_dir() and path.suffix != ".tmp")
    for path in [*steps[:-keep], *folder.glob("step-*.tmp")]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file and syncs it; shared storage is written out once for each name."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(plain, path, metadata={"format": "pt"})
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digest(path: Path) -> str:
    """Returns the hash of a file's bytes."""
    seen = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            seen.update(block)
    return seen.hexdigest()


def _named(link: Path) -> Path | None:
    try:
        return link.parent / link.read_text().strip()
    except OSError:
        return None


def find(folder: Path, which: str = "latest") -> Path:
    """Returns the directory of a complete checkpoint; falls back to the newest undamaged one, saying so."""
    named = _named(folder / which)
    others = sorted((path for path in folder.glob("step-*") if path.suffix != ".tmp"), reverse=True)
    tried: list[str] = []
    for path in [*([named] if named else []), *(path for path in others if path != named)]:
        problem = _problem(path)
        if not problem:
            if tried:
                print(f"warning: {'; '.join(tried)}: going back to {path.name}", file=sys.stderr, flush=True)
            return path
        tried.append(problem)
    raise DamagedCheckpoint(f"{folder}: no complete checkpoint ({'; '.join(tried) or 'the folder holds none'})")


def _problem(path: Path) -> str:
    try:
        digests = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError):
        return f"{path.name} is incomplete"
    for name, wanted in digests.items():
        try:
            found = digest(path / name)
        except OSError:
            return f"{path.name}/{name} is missing"
        if found != wanted:
            return f"{path.name}/{name} is damaged"
    return ""


def load(path: Path, net: nn.Module, optimiser: Optimizer, rank: int) -> Progress:
    """Returns the progress of a checkpoint after filling net, optimiser and this rank's random states."""
    net.load_state_dict(load_file(path / "model.safetensors"))
    _fill_optimiser(net, optimiser, load_file(path / "optimizer.safetensors"))
    states = path / f"random-{rank:05d}.json"
    if states.exists():  # all draws of a run are keyed by step; a rank that is new starts from its seed
        set_random_states(json.loads(states.read_text()))
    return read_progress(path)


def read_progress(path: Path) -> Progress:
    """Returns where the run stood at a checkpoint."""
    return Progress(**json.loads((path / "progress.json").read_text()))


def optimiser_tensors(net: nn.Module, optimiser: Optimizer) -> dict[str, Tensor]:
    """Returns the optimiser's state as tensors under ``parameter/entry``."""
    found = {}
    for name, parameter in net.named_parameters():
        for entry, value in optimiser.state.get(parameter, {}).items():
            if value is not None:
                found[f"{name}/{entry}"] = torch.as_tensor(value)
    return found


def _fill_optimiser(net: nn.Module, optimiser: Optimizer, tensors: dict[str, Tensor]) -> None:
    for name, parameter in net.named_parameters():
        entries = {key.rpartition("/")[2]: t for key, t in tensors.items() if key.rpartition("/")[0] == name}
        for entry, value in entries.items():
            where = "cpu" if entry == "step" else parameter.device
            optimiser.state[parameter][entry] = value.to(where)


def random_states() -> dict[str, Any]:
    """Returns the states of python's, numpy's and torch's generators as JSON values."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, cached = numpy_state
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Puts back what ``random_states`` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(states["torch"]), dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(states["cuda"]), dtype=torch.uint8))
