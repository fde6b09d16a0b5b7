"""MIOpen's database of searched kernels, kept in the run folder: a node's disk is emptied after each job."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_FOLDER, _KEPT = "MIOPEN_USER_DB_PATH", "miopen"


def bring_kernels(run: Path, env: Mapping[str, str] = os.environ) -> None:
    """Copies what an earlier job found into this rank's database, unless it holds something; every rank calls it."""
    source, target = run / _KEPT, Path(env.get(_FOLDER, ""))
    if not env.get(_FOLDER) or not source.is_dir() or (target.is_dir() and any(target.iterdir())):
        return
    with suppress(OSError):  # the kernels are then searched for again
        shutil.copytree(source, target, dirs_exist_ok=True)


def keep_kernels(run: Path, env: Mapping[str, str] = os.environ) -> None:
    """Copies this rank's database into the run folder, file by file; one rank calls it: all search for the same."""
    source, target = Path(env.get(_FOLDER, "")), run / _KEPT
    if not env.get(_FOLDER) or not source.is_dir():
        return
    with suppress(OSError):
        for path in (path for path in source.rglob("*") if path.is_file()):
            kept = target / path.relative_to(source)
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_name(f"{kept.name}.part")
            shutil.copy2(path, part)
            part.replace(kept)  # a job that is killed meanwhile leaves the file of the one before
